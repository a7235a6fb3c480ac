"""Mutation tests: plant faults, one at a time, in a copy of the package, and check that the tests of their part fail.

    python tests/heart/planted.py                    plants all faults, which takes a while
    python tests/heart/planted.py reference decode   plants the faults of some parts

planted.txt has a line per fault below its `[part] tests`: a file of fa2_lab (or a pattern), a text that occurs once in
it, and the wrong text. The exit status is 0 if tests failed for all faults, 1 if not or if a text was not found once,
and 2 if the tests fail without a fault.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
COPIED_FOLDERS = ("fa2_lab", "fa2_studio", "tests", "notebooks", "figures")
PYTEST = ("-q", "-x", "--tb=line", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "not exhaustive and not beside")
TIME_LIMIT = 600
PRELOADED = ("hypothesis.strategies", "triton.language", "torch._dynamo", "transformers")  # not for each fault


class Fault(NamedTuple):
    """A wrong text that replaces a right one, and the tests that have to fail with it."""

    part: str
    tests: tuple[str, ...]
    files: str
    right: str
    wrong: str

    def place(self, root: Path) -> tuple[Path, str]:
        """Return the one file that contains the right text, and what the file contains with the wrong text instead.

        White space within the right text may differ from the file's. Raises LookupError if the file does not contain
        the right text exactly once.
        """
        pattern = r"\s*".join(re.escape(part) for part in re.findall(r"^\s+|\s+$|\w+|\S", self.right))
        texts = {path: path.read_text(encoding="utf-8") for path in root.glob(f"fa2_lab/{self.files}")}
        found = [(path, *re.subn(pattern, lambda _: self.wrong, text)) for path, text in texts.items()]
        found = [(path, text, times) for path, text, times in found if times]
        if len(found) != 1 or found[0][2] != 1:
            raise LookupError(f"{self.files} does not have {self.right!r} once: plant the fault elsewhere")
        return found[0][:2]


def faults() -> list[Fault]:
    """Return the faults of planted.txt."""
    planted, part, tests = [], "", ()
    for line in (FOLDER / "planted.txt").read_text(encoding="utf-8").splitlines():
        if head := re.fullmatch(r"\[(\w+)\] (.*)", line):
            part, tests = head[1], tuple(head[2].split())
        elif line:
            planted.append(Fault(part, tests, *(cell.replace("\\n", "\n") for cell in line.split(" || "))))
    return planted


def run(copy: Path, tests: tuple[str, ...]) -> int:
    """Run tests in a copy, in a forked process that has imported other packages already. Return pytest's exit status.

    It is 99 if the process hangs, and negative if it crashes.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(copy / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy), *(p for p in sys.path[1:] if p and Path(p).resolve() != ROOT)]
        import pytest

        os._exit(int(pytest.main([*PYTEST, *(f"tests/heart/{test}" for test in tests)])))
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 99


def main(parts: list[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)

    planted = [fault for fault in faults() if not parts or fault.part in parts]
    if {*parts} - {fault.part for fault in planted}:
        raise SystemExit(f"part: got {', '.join(parts)}; it takes {', '.join(sorted({x.part for x in faults()}))}")
    with tempfile.TemporaryDirectory() as folder:
        copy, undetected = Path(folder), []
        for name in COPIED_FOLDERS:
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if run(copy, tuple(dict.fromkeys(test for fault in planted for test in fault.tests))):
            print("without a fault:\n", (copy / "output.txt").read_text(errors="replace")[-3000:])
            return 2
        for fault in planted:
            try:
                file, wrong = fault.place(copy)
            except LookupError as problem:
                print(f"LOST     {fault.part}: {problem}")
                undetected.append(fault)
                continue
            right = file.read_text(encoding="utf-8")
            file.write_text(wrong, encoding="utf-8")
            status = run(copy, fault.tests)
            file.write_text(right, encoding="utf-8")
            verdict = "seen" if status else "NOT SEEN"
            print(f"{verdict:8} {fault.part}: {file.relative_to(copy)}: {fault.right!r} → {fault.wrong!r}", flush=True)
            undetected += [fault] * (verdict != "seen")
    print(f"{len(planted) - len(undetected)} of {len(planted)} seen")
    return 1 if undetected else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
