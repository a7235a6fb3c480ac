"""How many of the small changes that mutmut makes in a room do its tests see?

    pip install mutmut
    python tests/heart/mutants.py                             every room; that takes hours
    python tests/heart/mutants.py reference machine --every 10    two rooms, each tenth change: minutes

A change is seen if a test fails by it or does not end. What no test runs counts as not seen. Those that were not
seen are listed; `tests/planted` has the faults that no tool invents. What a function returns while modules are
imported stays as it was (`package()` in the bench's peers): such changes are listed, and are to be made by hand.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {  # whose tests take seconds: what is changed, and who should see it
    "core": (["tiles.py", "trace.py", "paper.py"], ["tiles", "trace", "paper", "reference*"]),
    "reference": (["reference/*"], ["reference*", "masks", "packed", "machine_ring"]),
    "machine": (["machine/*"], ["machine_*", "layouts", "plots_machine", "plots_prices"]),
    "errata": (["errata/*"], ["errata"]),
    "plots": (["plots/*"], ["plots_*", "explorer", "poster"]),
    "bench": (["fa2_studio/bench/*"], ["bench*"]),
}
SEEN, UNSEEN = ("killed", "timeout", "suspicious", "segfault"), ("survived", "no tests")
# This test reads the sources as text.
CODE = "--deselect=tests/heart/test_poster.py::test_the_files_are_current_and_print_on_a3"
SETTINGS = {
    "source_paths": ["fa2_lab"],
    "also_copy": ["fa2_lab", "figures", "notebooks", "README.md", "RESULTS.md", "constraints.txt", "environment.yml"],
    "pytest_add_cli_args": [CODE, "-p", "no:cacheprovider", "-p", "no:nbval", "-o", "addopts=-m 'not exhaustive'"],
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python tests/heart/mutants.py", description=__doc__.split("\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(ROOMS)}; all where none is named")
    parser.add_argument("--every", type=int, default=1, choices=(1, 10), help="try each tenth change alone")
    options = parser.parse_args(argv)
    if unknown := set(options.rooms) - set(ROOMS):
        parser.error(f"ROOM: got {', '.join(sorted(unknown))}; it takes {', '.join(ROOMS)}")
    for room in options.rooms or ROOMS:
        seen, unseen = mutated(room, options.every)
        tried = seen + len(unseen)
        print(f"{room:10} {seen} of {tried} seen ({seen / max(1, tried):.0%})", flush=True)
        print(*unseen, sep="\n")
    return 0


def mutated(room: str, every: int) -> tuple[int, list[str]]:
    """How many changes were seen, and those that were not; tried in a copy of the checkout."""
    files, tests = ROOMS[room]
    settings = SETTINGS | {
        "only_mutate": [f"fa2_lab/{file}" for file in files],
        "pytest_add_cli_args_test_selection": [
            str(path.relative_to(ROOT)) for name in tests for path in sorted(ROOT.glob(f"tests/*/test_{name}.py"))
        ],
    }
    lines = ["[mutmut]", *(f"{name}=\n    " + "\n    ".join(values) for name, values in settings.items())]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", "mutants", ".*"))
        (copy / "setup.cfg").write_text("\n".join(lines) + "\n", encoding="utf-8")
        some = ["*__mutmut_7", "*__mutmut_*[0-9]7"] if every == 10 else []
        said = mutmut(copy, "run", *some)
        told = mutmut(copy, "results", "--all", "true").splitlines()
        became = dict(line.strip().rpartition(": ")[::2] for line in told if ": " in line)
        if not any(status in SEEN + UNSEEN for status in became.values()):
            raise SystemExit(f"{room}: nothing was tried; mutmut says\n{said[-2000:]}")
        unseen = [f"\n    {name}: {status}\n{shown(copy, name)}" for name, status in became.items() if status in UNSEEN]
    return sum(status in SEEN for status in became.values()), unseen


def shown(copy: Path, name: str) -> str:
    """The lines that a change takes out and puts in."""
    lines = mutmut(copy, "show", name).splitlines()
    return "\n".join(f"    {line}" for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---"))


def mutmut(folder: Path, *words: str) -> str:
    """What it prints, without the lines that it draws over."""
    command = [sys.executable, "-m", "mutmut", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode and words[0] != "run":
        raise SystemExit(f"{' '.join(command[1:])}: {done.stderr or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
