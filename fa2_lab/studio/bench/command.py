"""The command line of `fa2-lab bench`, and the list of its suites."""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path
from typing import NamedTuple


class Suite(NamedTuple):
    """Who measures it (a function in this room that takes nothing and returns Results), against whom, and what."""

    measure: str
    baseline: str  # of the ratios in its table; "" for none
    what: str
    gpu: bool = True


SUITES = {
    "smoke": Suite("smoke:run", "", "no GPU needed: small problems checked, in Triton's interpreter", gpu=False),
    "paper": Suite("suites:paper", "torch flash", "the FA2 paper's grid: d 64 and 128, 16k tokens"),
    "quick": Suite("suites:quick", "torch flash", "three lengths of that grid"),
    "long": Suite("suites:long", "torch flash", "one sequence of up to 262,144 tokens"),
    "heads": Suite("suites:heads", "torch flash", "grouped heads"),
    "decode": Suite("decode:run", "cuDNN", "one query over long caches, dense and in pages"),
    "small": Suite("suites:small", "torch flash", "what one call costs on the host"),
    "memory": Suite("suites:memory", "torch flash", "peak bytes over the length"),
    "ladder": Suite("ladder:run", "standard", "one change of the kernel at a time, with hardware counters"),
    "train": Suite("train:run", "torch flash", "a small GPT with its attention swapped"),
    "ring": Suite(
        "ring:run", "1 GPU", "one sequence over several GPUs: torchrun --nproc-per-node 4 -m fa2_lab bench ring"
    ),
}


def main(argv: list[str]) -> int:
    """Run suites, print their tables and keep their results; after Ctrl-C keep what there is and stop."""
    parser = argparse.ArgumentParser(
        prog="fa2-lab bench",
        description="Measure on this machine's GPU.",
        epilog="\n".join(f"{name:8}{suite.what}" for name, suite in SUITES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", nargs="*", help="any of those below, one after the other")
    parser.add_argument("--readme", action="store_true", help="only renew the README's results from the recorded runs")
    parser.add_argument("--folder", type=Path, default=None, help="where the results go; figures/data if not given")
    options = parser.parse_args(argv)
    if options.readme:
        from fa2_lab.studio.bench.readme import write

        write()
        return 0
    check(options.suite)
    for name in options.suite:
        if not run(name, options.folder):
            return 130
    return 0


def check(names: list[str]) -> None:
    """Refuse suites that do not exist or cannot run here, before anything is measured."""
    unknown = [name for name in names if name not in SUITES]
    if unknown or not names:
        raise ValueError(f"suite: got {', '.join(unknown) or 'none'}; it takes {', '.join(SUITES)}")

    import torch

    if any(SUITES[name].gpu for name in names) and not torch.cuda.is_available():
        raise ValueError("bench: there is no CUDA GPU here (smoke needs none); recorded results are in figures/data")


def run(name: str, folder: Path | None) -> bool:
    """Measure one suite and keep it; whether it came to its end."""
    from fa2_lab.studio.bench import results

    room, function = SUITES[name].measure.split(":")
    start = time.perf_counter()
    measured = getattr(import_module(f"fa2_lab.studio.bench.{room}"), function)()
    path = measured.save(folder or results.FOLDER)
    print(results.table(measured, baseline=SUITES[name].baseline))
    print(f"\n{name}: {time.perf_counter() - start:.0f} s, kept in {path}", flush=True)
    return not measured.missing
