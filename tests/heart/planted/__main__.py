"""Plant the faults one at a time in a copy of the project, and see whether the test beside each fails.

    PYTHONPATH=tests/heart python -m planted                 all of them
    PYTHONPATH=tests/heart python -m planted book tour       those of some rooms
    PYTHONPATH=tests/heart python -m planted --part 3/12     every twelfth, from the third on

0: all were seen. 1: some were not. 2: a test fails where there is no fault, or a fault has lost its place.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from planted import ROOT, Fault, rooms

COPIED = ("fa2_lab", "tests", "notebooks", "figures")
PYTEST = ("-q", "-x", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short")
FAILED, SECONDS = 1, 120


def copy_to(folder: Path) -> None:
    """The project without what running it leaves behind."""
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file():
            shutil.copy(path, folder)


def run(copy: Path, tests: list[str], seconds: int = SECONDS) -> tuple[int, str]:
    """pytest's exit status and what it said, in a process that begins where the imports of other packages end."""
    said = copy / "said.txt"
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(said, "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
        status = 99
        try:
            import pytest

            status = int(pytest.main([*PYTEST, *tests]))
        finally:
            sys.stdout.flush()
            os._exit(status)
    end, status = time.monotonic() + seconds, None
    while status is None and time.monotonic() < end:
        pid, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if pid else time.sleep(0.02)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        status = -signal.SIGKILL
    return status, said.read_text(encoding="utf-8", errors="replace")


def plant(copy: Path, fault: Fault) -> tuple[bool, str]:
    """Whether the test saw the fault, and how it put it."""
    file = copy / fault.file
    right = file.read_text(encoding="utf-8")
    file.write_text(fault.planted(copy), encoding="utf-8")
    status, said = run(copy, [fault.test])
    file.write_text(right, encoding="utf-8")
    words = re.findall(r"^E +(\S.*)|^FAILED (\S+)|^(ERROR .*)", said, re.MULTILINE)
    return status == FAILED, "; ".join("".join(w) for w in words)[:300] or f"pytest ended with {status}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m planted", description="Plant faults and see who sees them.")
    parser.add_argument("rooms", nargs="*", help=f"some of {', '.join(rooms())}; all, if none is named")
    parser.add_argument("--part", default="1/1", help="3/12: every twelfth fault, from the third on")
    parser.add_argument("--words", action="store_true", help="also show how each fault was seen")
    options = parser.parse_args(argv)
    part, parts = map(int, options.part.split("/"))
    rows = [(room, fault) for room, faults in rooms().items() for fault in faults]
    rows = [row for row in rows if not options.rooms or row[0] in options.rooms][part - 1 :: parts]
    import hypothesis.strategies  # noqa: F401 — what most tests import, once for all of them
    import matplotlib.figure  # noqa: F401
    import torch  # noqa: F401

    planted, seen, start = Counter(), Counter(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        copy_to(copy := Path(folder))
        status, said = run(copy, sorted({fault.test for _, fault in rows}), 10 * SECONDS)
        if status:
            print(f"without a fault:\n{said[-4000:]}")
            return 2
        for room, fault in rows:
            found, words = plant(copy, fault)
            planted[room] += 1
            seen[room] += found
            if options.words or not found:
                print(f"{'seen' if found else 'NOT SEEN'}: {room}: {fault}\n    {words}", flush=True)
    for room in planted:
        print(f"{room:12}{seen[room]:4} of {planted[room]}")
    print(f"{seen.total()} of {planted.total()} seen in {time.perf_counter() - start:.0f} s")
    return 0 if seen == planted else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
