"""The command line of `fa2-lab bench`."""

from __future__ import annotations

import argparse
from pathlib import Path

SUITES = ("ladder", "paper", "quick", "long", "heads", "small", "memory", "train")


def main(argv: list[str]) -> int:
    """Run suites on this machine's GPU, print their tables and keep their results."""
    parser = argparse.ArgumentParser(prog="fa2-lab bench", description="Measure on this machine's GPU.")
    parser.add_argument("suite", nargs="*", help=", ".join(SUITES))
    parser.add_argument("--readme", action="store_true", help="only renew the README's table from the recorded run")
    parser.add_argument("--folder", type=Path, default=None, help="where the results go; figures/data if not given")
    options = parser.parse_args(argv)
    if options.readme:
        from fa2_lab.bench.readme import write

        write()
        return 0
    unknown = [s for s in options.suite if s not in SUITES]
    if unknown:
        raise ValueError(f"suite: got {', '.join(unknown)}; it takes {', '.join(SUITES)}")

    import torch

    if not torch.cuda.is_available():
        raise ValueError("bench: there is no CUDA GPU here; results recorded on one are in figures/data")
    from fa2_lab.bench import ladder, results, suites, train

    own = dict(ladder=ladder.run, train=train.run)
    for suite in options.suite:
        measured = own[suite]() if suite in own else suites.run(suite)
        path = measured.save(options.folder or results.FOLDER)
        print(results.table(measured, baseline="standard" if suite == "ladder" else "torch flash"))
        print(f"\nkept in {path}")
    return 0
