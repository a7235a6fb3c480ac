"""Is the package slower than at another commit, or with another Triton? Both are timed in one run on one GPU.

    python -m fa2_studio.bench.before_after REV       that commit's package, then the working tree's
    python -m fa2_studio.bench.before_after FOLDER    the installed Triton, then the one in a folder

The paper's grid, decode and pages, and the host's time, as their suites measure them. Each version runs in processes of
its own, in the order before, after, after, before, so that drift hits both alike. A row is slower if it is so by more
than 1% and by more than equal runs differ. 0: none is slower. 1: some are.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fa2_lab.records import Measurement

ROOT = Path(__file__).resolve().parents[2]
OURS, SLOWER = ("fa2_lab",), 1.01

# In a process of one version ----------------------------------------------------------------------------------


def rows() -> Iterator[Measurement]:
    """What both versions are asked for."""
    from fa2_studio.bench import ahead, contest, decode, protocol, suites

    ahead.compile_ahead(suites.PAPER, OURS)
    for problem in suites.PAPER:
        for direction in contest.DIRECTIONS:
            yield suites.row(problem, direction, OURS, protocol.measure)
    for problem in suites.SMALL:
        yield suites.row(problem, "forward", OURS, protocol.host, "µs")
    for problem in decode.grid():
        yield decode.pages(problem)


def measure() -> dict[str, float]:
    """The time of each row, in the unit of its suite."""
    from fa2_studio.bench.results import label

    times = {}
    for row in rows():
        if row.failed:
            raise SystemExit(f"{label(row)}: {row.failed}")
        times |= {f"{label(row)}, {row.unit}, {name}": numbers[0] for name, numbers in row.values.items()}
    return times


# Both versions ------------------------------------------------------------------------------------------------


def timed(path: list[Path]) -> dict[str, float]:
    """What a process measures that finds its packages first in these folders."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "fa2_studio.bench.before_after", "--measure"]
    done = subprocess.run(command, cwd=path[0], env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{path[0]}: ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compared(before: list[dict[str, float]], after: list[dict[str, float]]) -> list[tuple[str, float, float]]:
    """(row, after / before, how far equal runs are apart), the slowest first."""
    rows = []
    for row in before[0]:
        a, b = ([run[row] for run in runs] for runs in (before, after))
        rows.append((row, sum(b) / sum(a), max(max(x) / min(x) - 1 for x in (a, b))))
    return sorted(rows, key=lambda row: -row[1])


def slower(ratio: float, apart: float) -> bool:
    """Beyond what is allowed and beyond what chance does."""
    return ratio > max(SLOWER, 1 + apart)


def run(before: list[Path], after: list[Path]) -> int:
    """Time both, each given by the folders where it is found, and print what changed."""
    runs = [timed(path) for path in (before, after, after, before)]
    rows = compared([runs[0], runs[3]], runs[1:3])
    width = max(len(row) for row, *_ in rows)
    print(f"{'after / before':{width}} ratio   equal runs apart")
    for row, ratio, apart in rows:
        print(f"{row:{width}} {ratio:5.3f}   {apart:5.3f}{'   slower' * slower(ratio, apart)}")
    return int(any(slower(ratio, apart) for _, ratio, apart in rows))


def main(argv: list[str]) -> int:
    if argv == ["--measure"]:
        print(json.dumps(measure()))
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        raise SystemExit(__doc__)
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("before_after: there is no CUDA GPU here, and it times nothing else")
    if Path(argv[0]).is_dir():
        return run([ROOT], [Path(argv[0]).resolve(), ROOT])
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", ROOT, "archive", argv[0], "fa2_lab"], capture_output=True)
        if archive.returncode:
            raise SystemExit(f"before_after: got {argv[0]}; it takes a commit or a folder: {archive.stderr.decode()}")
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        return run([Path(folder), ROOT], [ROOT])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
