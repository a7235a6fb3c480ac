"""The command line of `fa2-lab bench`."""

from __future__ import annotations

import argparse
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run suites on this machine's GPU, print their tables and keep their results."""
    parser = argparse.ArgumentParser(prog="fa2-lab bench", description="Measure on this machine's GPU.")
    parser.add_argument("suite", nargs="+", help="paper, quick, long or heads")
    parser.add_argument("--folder", type=Path, default=None, help="where the results go; figures/data if not given")
    parser.add_argument("--direction", choices=["forward", "backward", "both"], help="only this one")
    options = parser.parse_args(argv)

    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench: there is no CUDA GPU here; recorded results are in figures/data")
    from fa2_lab.bench import results, suites

    unknown = [s for s in options.suite if s not in suites.SUITES]
    if unknown:
        raise ValueError(f"suite: got {', '.join(unknown)}; it takes {', '.join(suites.SUITES)}")
    for suite in options.suite:
        measured = suites.run(suite, directions=[options.direction] if options.direction else suites.DIRECTIONS)
        path = measured.save(options.folder or results.FOLDER)
        print(results.table(measured, suites.SHORT_NAMES, baseline="torch flash"))
        print(f"\nkept in {path}")
    return 0
