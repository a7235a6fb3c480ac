"""The Hopper kernels: what they compile to without a GPU, what they take, and on a Hopper GPU whether they are right.

Run as a program, this file compiles for sm_90 what its arguments name, and prints a line of JSON for each.
"""

import json
import os
import subprocess
import sys
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

if __name__ != "__main__":
    import pytest
    from kernel_truth import dense, worst  # before Triton

    pytest.importorskip("triton")

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
FULL, CAUSAL, CAUSAL_PADDED, PADDED = (False, False), (True, False), (True, True), (False, True)
JOBS = [(d, 4096, *masks) for d in (64, 128, 256) for masks in (FULL, CAUSAL, CAUSAL_PADDED)]
JOBS += [(64, 4096, *PADDED), (64, 1024, *CAUSAL)]  # d 96 is compiled as 128, and 192 as 256


# Compiling without a GPU --------------------------------------------------------------------------------------


class Compiling:
    """Stands in for a kernel: called in the same way, it compiles and keeps what came out."""

    def __init__(self, kernel):
        self.kernel, self.made = kernel, None

    def __getitem__(self, grid):
        def call(*arguments, **options):
            self.made = self.kernel.warmup(*arguments, grid=grid, **options)

        return call


def pretend() -> None:
    """Have a Hopper GPU, as far as compiling goes."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from fa2_lab.kernels import offline
    from fa2_lab.kernels.hopper import forward, host

    driver.set_active(offline.Absent(GPUTarget("cuda", 90, 32)))
    host.multiprocessors = lambda device: 132
    host.counter_of = lambda device, stream: torch.zeros(2, dtype=torch.int32)
    forward.forward_kernel = Compiling(forward.forward_kernel)


def compile_one(job) -> str:
    """One call of forward() as far as the launch."""
    from fa2_lab.kernels import offline
    from fa2_lab.kernels.hopper import forward

    d, N, causal, keys = job
    Q = torch.empty(2, 4, N, d, dtype=torch.bfloat16)
    forward.forward(Q, Q, Q, torch.ones(2, dtype=torch.int32) if keys else None, causal, d**-0.5)
    made = forward.forward_kernel.made
    found = offline.report(made) | dict(waits=offline.serialized(made))
    return json.dumps(dict(d=d, N=N, causal=causal, keys=keys) | found)


def test_fits_and_spills_nothing():
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(JOBS)
    for row in rows:
        assert row["ldl"] + row["stl"] + row["stack"] == 0, row
        assert row["shared"] <= 227 * 1024, row
        assert row["hgmma"] > 0 and row["hmma"] == 0 and not row["waits"], row


# What they take -----------------------------------------------------------------------------------------------


def strides_of(*shape):
    return torch.empty(shape, device="meta").stride()


def test_copyable():
    from fa2_lab.kernels.hopper.host import copyable

    assert copyable((2, 4, 100, 64), strides_of(2, 4, 100, 64))
    assert copyable((2, 4, 100, 64), torch.empty(2, 100, 4, 64, device="meta").transpose(1, 2).stride())
    assert copyable((1, 4, 100, 64), (3, 6400, 64, 1)), "a dimension of 1 has no step"
    assert not copyable((2, 4, 100, 64), (0, 6400, 64, 1)), "repeated batch"
    assert not copyable((2, 4, 100, 64), (25600, 6400, 1, 100)), "last dimension not contiguous"
    assert not copyable((2, 4, 100, 64), (26400, 6600, 66, 1)), "rows not in steps of 16 bytes"
    assert not copyable((2, 4, 0, 64), strides_of(2, 4, 0, 64)), "nothing to copy"


def test_nothing_for_a_cpu():
    from fa2_lab.kernels.hopper.forward import supports

    Q = torch.empty(1, 2, 8, 64, dtype=torch.float16)
    assert not supports(Q, Q, Q)


def test_plan_fits():
    """Registers and shared memory as the chip has them, counted from the sizes."""
    from fa2_lab.kernels.hopper import host

    for size in (*host.PLANS.values(), host.SHORT):
        assert 128 * (size.registers * size.consumers + 32) <= 65536
        rows = 64 * size.consumers * (2 if size.O_apart else 1) + 2 * size.slots * size.B_c
        assert 2 * rows * size.d_pad < 227 * 1024 - 1024


# Right on a GPU -----------------------------------------------------------------------------------------------

if __name__ != "__main__":
    gpu = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
    PAIRS = [(1, 239), (113, 203), (127, 513), (192, 192), (1023, 1024), (1024, 1023), (300, 50), (2048, 2048)]


def draw(batch, heads, N, d, dtype, turned=False, seed=0):
    """Random rows, on request as a view of (batch, N, heads, d)."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, N, heads, d) if turned else (batch, heads, N, d)
    x = torch.randn(shape, device="cuda", generator=generator).to(dtype)
    return x.transpose(1, 2) if turned else x


def poison(Q):
    """Leave NaN in the memory that the outputs are likely to get."""
    keep = [torch.full_like(Q, float("nan")), torch.full(Q.shape[:3], float("nan"), device="cuda")]
    del keep


def check(Q, K, V, lengths, causal, hidden=0.0):
    from fa2_lab.kernels.hopper.forward import forward, supports

    truth = dense(Q, K, V, torch.zeros_like(Q), causal=causal, lengths=lengths)
    torchs = dense(Q, K, V, torch.zeros_like(Q), causal=causal, lengths=lengths, dtype=Q.dtype)
    if lengths is not None:
        unused = torch.arange(K.shape[2], device="cuda") >= lengths[:, None]
        K, V = (x.masked_fill(unused[:, None, :, None], hidden) for x in (K, V))
    assert supports(Q, K, V, lengths)
    poison(Q)
    O, L = forward(Q, K, V, lengths, causal, Q.shape[3] ** -0.5)
    for name, got, want, theirs in zip("OL", (O, L), truth, torchs, strict=False):
        assert worst(got, want) <= 2 * worst(theirs, want) + 1e-5, (name, Q.shape, K.shape, lengths, causal)


if __name__ != "__main__":

    @gpu
    @pytest.mark.gpu
    @pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
    @pytest.mark.parametrize("d", (64, 96, 128, 192, 256))
    def test_right(d, dtype):
        for (N_q, N_k), causal, padded, turned in product(PAIRS, (False, True), (False, True), (False, True)):
            Q = draw(2, 6, N_q, d, dtype, turned, 0)
            K, V = (draw(2, 2, N_k, d, dtype, turned, seed) for seed in (1, 2))
            lengths = torch.tensor([N_k // 3, N_k + 9], dtype=torch.int32, device="cuda") if padded else None
            check(Q, K, V, lengths, causal, hidden=float("nan"))

    @gpu
    @pytest.mark.gpu
    @pytest.mark.parametrize("causal", (False, True))
    @pytest.mark.parametrize("d", (64, 128))
    def test_same_bits_a_thousand_times(d, causal):
        from fa2_lab.kernels.hopper.forward import forward

        Q, K, V = (draw(4, 8, 1000, d, torch.bfloat16, seed=seed) for seed in range(3))
        O, L = forward(Q, K, V, None, causal, 0.1)
        differ = torch.zeros((), dtype=torch.bool, device="cuda")
        for _ in range(1000):
            again = forward(Q, K, V, None, causal, 0.1)
            differ |= (again[0] != O).any() | (again[1] != L).any()
        assert not differ

    @gpu
    @pytest.mark.gpu
    def test_counter_is_put_back_and_graphs_have_their_own():
        from fa2_lab.kernels.hopper import host
        from fa2_lab.kernels.hopper.forward import forward

        Q, K, V = (draw(2, 8, 700, 64, torch.float16, seed=seed) for seed in range(3))
        O, _ = forward(Q, K, V, None, True, 0.1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, _ = forward(Q, K, V, None, True, 0.1)
        for _ in range(3):
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, O)
        assert all(not counter.any() for counter in host.COUNTERS.values())


if __name__ == "__main__":
    with get_context("spawn").Pool(2, initializer=pretend) as pool:
        for line in pool.imap(compile_one, JOBS):
            print(line, flush=True)
