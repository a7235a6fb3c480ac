"""Is the package slower than at another commit? Both are timed in one run on one GPU.

    python tests/studio/before_after.py REV     REV against the working tree: forward, backward, decode, pages, host

Each version runs in processes of its own, in the order before, after, after, before, so that drift hits both alike. A
row is slower if it is so by more than 1% and by more than equal runs differ. 0: none is slower. 1: some are.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve()
REPEATS, AT_ONCE, SLOWER = 20, 8, 1.01

# In a process of one version ----------------------------------------------------------------------------------


def calls() -> Iterator[tuple[str, Callable[[], object], Callable[[Callable], float]]]:
    """(row, call, clock): what both versions are asked for, through the public calls alone."""
    import torch

    from fa2_lab.api.attention import attention
    from fa2_lab.api.paged import attention_paged

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    for d in (64, 128):
        for N in (1024, 4096, 16384):
            for causal in (False, True):
                q, k, v, dO = (draw(16384 // N, 2048 // d, N, d) for _ in range(4))
                row = f"N {N} d {d} {'causal' if causal else 'full'}"
                yield f"forward {row}", partial(attention, q, k, v, causal=causal), milliseconds
                yield (
                    f"backward {row}",
                    backward_of([x.detach().requires_grad_() for x in (q, k, v)], dO, causal),
                    milliseconds,
                )
        q, k, v = (draw(1, 8, 256, d) for _ in range(3))
        yield f"host, forward d {d}", partial(attention, q, k, v), host_milliseconds
    for batch, N, heads in ((1, 65536, 8), (8, 16384, 8), (32, 8192, 8), (4, 16384, 32)):
        q, (k, v) = draw(batch, 32, 1, 128), draw(2, batch, heads, N, 128)
        yield f"decode {batch} × {N}, {heads} heads", partial(attention, q, k, v), milliseconds
    page, q = 64, draw(8, 32, 1, 128)
    pages = draw(2, 8 * 16384 // page, page, 8, 128)
    table = torch.randperm(pages.shape[1], device="cuda", dtype=torch.int32).view(8, -1)
    lengths = torch.full((8,), 16384, device="cuda", dtype=torch.int32)
    yield "pages 8 × 16384", partial(attention_paged, q, *pages, table, lengths), milliseconds


def backward_of(leaves: list, dO, causal: bool) -> Callable[[], object]:
    """The backward of a forward that is made with the first call."""
    import torch

    from fa2_lab.api.attention import attention

    kept = []

    def call():
        if not kept:
            kept.append(attention(*leaves, causal=causal))
        return torch.autograd.grad(kept[0], leaves, dO, retain_graph=True)

    return call


def milliseconds(call: Callable[[], object]) -> float:
    """On the GPU, with nothing of the call's in its L2 cache, and all of the call in its queue before it begins."""
    import torch

    other = torch.zeros(torch.cuda.get_device_properties(0).L2_cache_size // 2, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for begin, end in pairs:
        other.amax()
        torch.cuda._sleep(3_000_000)  # about 1.5 ms, in which the host launches the call
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def host_milliseconds(call: Callable[[], object]) -> float:
    """On the host, until a call returns."""
    import torch

    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(20):
            call()
        times.append(1e3 * (time.perf_counter() - begun) / 20)
    return statistics.median(times)


def measure(part: int, parts: int) -> None:
    """Print {row: milliseconds}; in one of several parts each call is made once, so that the compiler has run."""
    found = {}
    for n, (row, call, clock) in enumerate(calls()):
        if n % parts == part:
            for _ in range(3):
                call()
            found[row] = clock(call) if parts == 1 else 0.0
    print(json.dumps(found))


# Both versions ------------------------------------------------------------------------------------------------


def started(tree: Path, part: int = 0, parts: int = 1) -> subprocess.Popen:
    """A process that measures the package in a folder."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, HERE, "--measure", str(part), str(parts)]
    return subprocess.Popen(command, cwd=tree, env=env, stdout=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen) -> dict[str, float]:
    """What it has printed."""
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args[1]}: ended with {process.returncode}")
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


def main(argv: list[str]) -> int:
    if argv[:1] == ["--measure"]:
        measure(*map(int, argv[1:]))
        return 0
    if len(argv) != 1:
        raise SystemExit(__doc__)
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("before_after: there is no CUDA GPU here, and it times nothing else")
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", ROOT, "archive", argv[0], "fa2_lab"], capture_output=True, check=True)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        old = Path(folder)
        for tree in (old, ROOT):
            for process in [started(tree, part, AT_ONCE) for part in range(AT_ONCE)]:
                finished(process)
        runs = [finished(started(tree)) for tree in (old, ROOT, ROOT, old)]
    rows = compared([runs[0], runs[3]], runs[1:3])
    print(f"{'after / before':28} ratio   equal runs apart")
    for row, ratio, apart in rows:
        print(f"{row:28} {ratio:5.3f}   {apart:5.3f}{'   slower' * slower(ratio, apart)}")
    return int(any(slower(ratio, apart) for _, ratio, apart in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
