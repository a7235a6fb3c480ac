"""`fa2-lab bench`: measure the kernels and other implementations on a GPU."""

import argparse
import os
import time
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from fa2_lab.records import FOLDER, Record, load, path_of
from fa2_lab.tools import files
from fa2_studio.bench.registry import LADDER_PARTS, SUITES


def main(argv: list[str]) -> int:
    """Run suites, print their tables and save their records. After Ctrl-C, save the rows measured so far and stop."""
    parser = argparse.ArgumentParser(
        prog="fa2-lab bench",
        description="Measure the kernels and other implementations on this machine's GPU.",
        epilog="\n".join(f"{name:15}{suite.what}" for name, suite in SUITES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", nargs="*", help="one or more of the suites below, run one after another")
    parser.add_argument("--results", action="store_true", help="measure nothing, and write RESULTS.md from the records")
    parser.add_argument("--all", action="store_true", help="with --results, print every row of every record instead")
    parser.add_argument("--folder", type=Path, help="the folder of the records (default: figures/data)")
    parser.add_argument(
        "--sustained", action="store_true", help="time calls without pauses, a second or more per implementation"
    )
    parser.add_argument(
        "--part", action="append", choices=LADDER_PARTS, help="of the ladder, measure only this part (repeatable)"
    )
    parser.add_argument(
        "--beside", type=Path, metavar="FILE.py", help="in the ladder, also time forward(q, k, v, causal) of this file"
    )
    arguments = parser.parse_args(argv)
    if arguments.results and not arguments.all and (arguments.folder or arguments.suite):
        raise ValueError("results: got a suite or a folder; without --all it takes neither")
    if arguments.results:
        from fa2_studio.bench import results_page

        if arguments.all:
            print(results_page.site_page(arguments.folder), end="")
        else:
            results_page.write_pages()
        return 0
    flags = {name: value for name in ("sustained", "part", "beside") if (value := getattr(arguments, name))}
    check_arguments(arguments.suite, flags)
    if not arguments.folder:
        files.checkout("bench without --folder")
    folder = arguments.folder or FOLDER
    files.check_writable(folder, "bench")
    for name in arguments.suite:
        check_same_gpu(name, folder, flags)
    if len(arguments.suite) == 1:
        return measure_suite(arguments.suite[0], folder, flags)
    return run_all(arguments.suite, folder, flags)


def check_arguments(names: list[str], flags: dict) -> None:
    """Raise ValueError if a suite does not exist or cannot run here, before anything is measured."""
    unknown = [name for name in names if name not in SUITES]
    if unknown or not names:
        raise ValueError(f"suite: got {', '.join(unknown) or 'none'}; it takes {', '.join(SUITES)}")
    for flag in flags:
        accepting = [name for name in SUITES if flag in SUITES[name].flags]
        if not {*names} <= {*accepting}:
            raise ValueError(f"suite: got {', '.join(names)}; with --{flag} it takes {', '.join(accepting)}")
    if "beside" in flags and not flags["beside"].is_file():
        raise ValueError(f"beside: got {flags['beside']}; it takes a file with forward(q, k, v, causal)")

    import torch

    if any(SUITES[name].gpu for name in names) and not torch.cuda.is_available():
        raise ValueError("bench: there is no CUDA GPU here (smoke needs none); recorded results are in figures/data")
    override = os.environ.get("TRITON_OVERRIDE_ARCH", "")
    if override != ("sm80" if names == ["ampere"] else ""):
        raise ValueError(f"TRITON_OVERRIDE_ARCH: got {override!r}; the suite ampere alone takes sm80")


def check_same_gpu(name: str, folder: Path, flags: dict) -> None:
    """Raise ValueError if a partial run would add its rows to a record from a different GPU."""
    if flags.keys() - {"beside"} and path_of(name, folder).exists():
        from fa2_studio.bench.recording import environment

        here, there = environment()["gpu"], load(name, folder).machine["gpu"]
        if here != there:
            raise ValueError(f"folder: got {folder}, whose {name} is of an {there}; on an {here} it takes another")


def run_all(names: list[str], folder: Path, flags: dict) -> int:
    """Run one suite after another. A suite that fails does not stop the next one, but Ctrl-C does."""
    from fa2_studio.bench.protocol import result_or_reason

    worst = 0
    for name in names:
        status = result_or_reason(partial(measure_suite, name, folder, flags))
        if isinstance(status, str):
            print(f"{name}: {status}", flush=True)
            status = 1
        worst = max(worst, status)
        if status == 130:
            break
    return worst


def measure_suite(name: str, folder: Path, flags: dict) -> int:
    """Measure one suite and save its record.

    Return 0 on success, 1 if a result of ours was wrong, or 130 after Ctrl-C.
    """
    from fa2_studio.bench import record_page, recording
    from fa2_studio.bench.compare import run_plan

    module, function = SUITES[name].planner.split(":")
    start = time.perf_counter()
    plan = getattr(import_module(f"fa2_studio.bench.{module}"), function)
    earlier = load(name, folder) if path_of(name, folder).exists() else None

    def keep(record: Record) -> Path:
        record = replace(record, made_by=f"python -m fa2_lab bench {name}")
        return recording.save_record(recording.merge_records(earlier, record), folder)

    measured = run_plan(plan(name, **flags) if function == "plan_dense" else plan(**flags), keep)
    path = keep(measured)
    print(record_page.all_rows_tables(measured))
    print(f"{name}: {time.perf_counter() - start:.0f} s, kept in {path}", flush=True)
    if measured.missing:
        return 130
    failures = [item for row in measured.rows + measured.sustained for item in row.failed.items()]
    return int(any(who.startswith("fa2_lab") and "wrong" in why for who, why in failures))
