"""Is the package slower than at another commit, or with another Triton? Both are timed in one run on one GPU.

    python -m fa2_studio.bench.before_after REV       that commit's package, then the working tree's
    python -m fa2_studio.bench.before_after FOLDER    the installed Triton, then the one in a folder

Forward, backward, decode, pages, and the host's time. Each version runs in processes of its own, in the order before,
after, after, before, so that drift hits both alike. A row is slower if it is so by more than 1% and by more than equal
runs differ. 0: none is slower. 1: some are.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE, SLOWER = 8, 1.01

# In a process of one version ----------------------------------------------------------------------------------


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """(row, call): what both versions are asked for, through the public calls alone."""
    import torch

    from fa2_lab import attention, attention_paged

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    for d in (64, 128):
        for N in (1024, 4096, 16384):
            for causal in (False, True):
                tensors = [draw(16384 // N, 2048 // d, N, d).requires_grad_(n < 3) for n in range(4)]
                row, free = f"N {N} d {d} {'causal' if causal else 'full'}", [x.detach() for x in tensors[:3]]
                yield f"forward {row}", partial(attention, *free, causal=causal)
                O, leaves, dO = attention(*tensors[:3], causal=causal), tensors[:3], tensors[3]
                yield f"backward {row}", partial(torch.autograd.grad, O, leaves, dO, retain_graph=True)
        q, k, v = (draw(1, 8, 256, d) for _ in range(3))
        yield f"host, forward d {d}", partial(attention, q, k, v)
    for batch, N, heads in ((1, 65536, 8), (8, 16384, 8), (32, 8192, 8), (4, 16384, 32)):
        q, (k, v) = draw(batch, 32, 1, 128), draw(2, batch, heads, N, 128)
        yield f"decode {batch} × {N}, {heads} heads", partial(attention, q, k, v)
    page, q = 64, draw(8, 32, 1, 128)
    pages = draw(2, 8 * 16384 // page, page, 8, 128)
    table = torch.randperm(pages.shape[1], device="cuda", dtype=torch.int32).view(8, -1)
    lengths = torch.full((8,), 16384, device="cuda", dtype=torch.int32)
    yield "pages 8 × 16384", partial(attention_paged, q, *pages, table, lengths)


def measure(part: int, parts: int) -> None:
    """Print {row: milliseconds}; in one of several parts each call is made once, so that the compiler has run."""
    from fa2_studio.bench import protocol

    times = {}
    for n, (row, call) in enumerate(calls()):
        if n % parts != part:
            continue
        if parts > 1:
            call()
        elif row.startswith("host"):
            times[row] = protocol.wall_microseconds({row: call})[row] / 1e3
        else:
            times[row] = protocol.measure({row: call}, flushing=protocol.reading)[row].median
    print(json.dumps(times))


# Both versions ------------------------------------------------------------------------------------------------


def started(path: list[Path], part: int = 0, parts: int = 1) -> subprocess.Popen:
    """A process that finds its packages first in these folders."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "fa2_studio.bench.before_after", "--measure", str(part), str(parts)]
    return subprocess.Popen(command, cwd=path[0], env=env, stdout=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen) -> dict[str, float]:
    """What it has printed."""
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args}: ended with {process.returncode}")
    return json.loads(out.splitlines()[-1])


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
    for path in (before, after):
        for process in [started(path, part, AT_ONCE) for part in range(AT_ONCE)]:
            finished(process)
    runs = [finished(started(path)) for path in (before, after, after, before)]
    rows = compared([runs[0], runs[3]], runs[1:3])
    print(f"{'after / before':28} ratio   equal runs apart")
    for row, ratio, apart in rows:
        print(f"{row:28} {ratio:5.3f}   {apart:5.3f}{'   slower' * slower(ratio, apart)}")
    return int(any(slower(ratio, apart) for _, ratio, apart in rows))


def main(argv: list[str]) -> int:
    if argv[:1] == ["--measure"]:
        measure(*map(int, argv[1:]))
        return 0
    if len(argv) != 1:
        raise SystemExit(__doc__)
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("before_after: there is no CUDA GPU here, and it times nothing else")
    if Path(argv[0]).is_dir():
        return run([ROOT], [Path(argv[0]).resolve(), ROOT])
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", ROOT, "archive", argv[0], "fa2_lab"], capture_output=True, check=True)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        return run([Path(folder), ROOT], [ROOT])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
