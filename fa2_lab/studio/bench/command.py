"""The command line of `fa2-lab bench`."""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path

from fa2_lab.studio import files
from fa2_lab.studio.bench.registry import SUITES


def main(argv: list[str]) -> int:
    """Run suites, print their tables and keep their results; after Ctrl-C keep what there is and stop."""
    parser = argparse.ArgumentParser(
        prog="fa2-lab bench",
        description="Measure on this machine's GPU.",
        epilog="\n".join(f"{name:8}{suite.what}" for name, suite in SUITES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", nargs="*", help="any of those below, one after the other")
    parser.add_argument("--results", action="store_true", help="only write RESULTS.md anew from the recorded runs")
    parser.add_argument("--folder", type=Path, default=None, help="where the results go; figures/data if not given")
    options = parser.parse_args(argv)
    if options.results:
        from fa2_lab.studio.bench.page import write

        write()
        return 0
    check(options.suite)
    folder = options.folder or files.checkout("bench without --folder") / "figures" / "data"
    files.check_writable(folder, "bench")
    statuses = []
    for name in options.suite:
        statuses.append(run(name, folder))
        if statuses[-1] == 130:
            break
    return max(statuses)


def check(names: list[str]) -> None:
    """Refuse suites that do not exist or cannot run here, before anything is measured."""
    unknown = [name for name in names if name not in SUITES]
    if unknown or not names:
        raise ValueError(f"suite: got {', '.join(unknown) or 'none'}; it takes {', '.join(SUITES)}")

    import torch

    if any(SUITES[name].gpu for name in names) and not torch.cuda.is_available():
        raise ValueError("bench: there is no CUDA GPU here (smoke needs none); recorded results are in figures/data")


def run(name: str, folder: Path) -> int:
    """Measure one suite and keep it. 0: all well. 1: a result was wrong. 130: it was interrupted."""
    from fa2_lab.studio.bench import results

    room, function = SUITES[name].measure.split(":")
    start = time.perf_counter()
    measured = getattr(import_module(f"fa2_lab.studio.bench.{room}"), function)()
    path = measured.save(folder)
    print(results.table(measured, baseline=SUITES[name].baseline))
    print(f"\n{name}: {time.perf_counter() - start:.0f} s, kept in {path}", flush=True)
    if measured.missing:
        return 130
    return int(any("wrong" in why for row in measured.rows for why in row.failed.values()))
