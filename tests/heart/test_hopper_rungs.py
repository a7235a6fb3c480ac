"""Hopper's rungs of the ladder, run by Python on NumPy tiles: what they compute, what they release, what they count."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_truth import dense_truth  # before Triton

pytest.importorskip("triton")

from hopper_language import GLUON, GpuInt, Pointer, Tile, mma_wait, numpy_mma, unjitted

from fa2_lab.kernels import ladder

PERSISTENT_RUNGS = ("r20", "r21", "r22", "r23")


class EndlessBuffers:
    """Shared memory that has a tile for every index, so that no earlier tile is ever overwritten."""

    def __init__(self, shape):
        self.shape, self.kept = shape, {}

    def index(self, n):
        return self.kept.setdefault(n, np.zeros(self.shape[2:]).view(Tile))


class Ring:
    """A ring that keeps all its tiles in order, and counts the releases of each."""

    def __init__(self, tiles, consumers):
        self.tiles, self.consumers, self.filled, self.released = tiles, consumers, [], Counter()

    def no_deadlock(self) -> bool:
        """Return whether all consumers released each tile whose stage a later tile needs, and none of them twice."""
        stages = self.tiles.shape[0]
        once = all(count <= self.consumers for count in self.released.values())
        return once and all(self.released[n - stages] == self.consumers for n in range(stages, len(self.filled)))


def load(ring, n, X, head, row):
    assert n == len(ring.filled)
    tile = ring.tiles.index(n)
    tile[:] = 0
    rows = X.numbers[int(head), int(row) : int(row) + len(tile)]
    tile[: len(rows)] = rows
    ring.filled.append(tile)


def send(mailbox, r, t):
    assert r == len(mailbox.filled)
    mailbox.filled.append(t)


def receive(mailbox, r):
    mailbox.released[r] += 1
    return mailbox.filled[r]


def release(ring, n):
    ring.released[n] += 1


def async_store(O, at, tile):
    head, i = map(int, at[:2])
    rows = O.numbers[head, i : i + 64]
    assert np.isnan(rows).all(), "written twice"
    rows[:] = tile[: len(rows)]


def update_row_max(m, top, limit):
    """Return the new maxima, where a warp raises the maxima of all its rows if any row exceeds the limit."""
    raises = (top > limit).reshape(4, -1).any(1).repeat(16)[:, None]
    return np.where(raises, np.maximum(m, top.max(1)[:, None]), m).view(Tile)


def as_tiles(function):
    """Return a function whose result is a tile if `function` returns an array."""

    def returned(*given, **named):
        x = function(*given, **named)
        return x.view(Tile) if isinstance(x, np.ndarray) else x

    return returned


def run_on_numpy(module, monkeypatch, rings, program, programs):
    """Replace the GPU functions of a rung by their Python functions and by stand-ins."""

    def new_ring(tiles, consumers):
        rings.append(Ring(tiles, consumers))
        return rings[-1]

    language = dict(vars(GLUON)) | dict(where=as_tiles(GLUON.where), max=np.max)
    language |= dict(zeros=as_tiles(lambda shape, *_: np.zeros(shape)))
    language |= dict(full=as_tiles(lambda shape, x, *_: np.full(shape, x)))
    language |= dict(program_id=lambda axis: GpuInt(program[0]), num_programs=lambda axis: GpuInt(programs))
    language |= dict(NVMMADistributedLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None)
    language |= dict(allocate_shared_memory=lambda dtype, shape, layout: EndlessBuffers(shape))
    language |= dict(warp_specialize=lambda parts, *_: [part(*given) for part, given in reversed(parts)])
    stand_ins = unjitted(module) | dict(gl=SimpleNamespace(**language), LN2=math.log(2), NEG_INF=-np.inf, LOWEST=-1e30)
    stand_ins |= dict(LAG=8.0, ring=new_ring, load=load)
    stand_ins |= dict(tile_buffers=lambda X, stages: EndlessBuffers((stages, 1, *X.block_shape[1:])))
    stand_ins |= dict(wait=lambda ring, n: ring.filled[n], release=release, send=send, receive=receive)
    stand_ins |= dict(scores=lambda q, k: (q @ k.T).view(Tile), rounded=lambda p, *_: p)
    stand_ins |= dict(update_row_max=update_row_max, rescale_o=lambda o, alpha: o * alpha[:, :1])
    stand_ins |= dict(tma=SimpleNamespace(async_store=async_store, store_wait=lambda n: None))
    hopper = dict(warpgroup_mma=numpy_mma, warpgroup_mma_wait=mma_wait, fence_async_shared=lambda: None)
    stand_ins |= dict(hopper=SimpleNamespace(**hopper))
    for name, x in stand_ins.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, x)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("rung", PERSISTENT_RUNGS)
def test_simulated_rung_matches_float64_without_deadlock(rung, causal, monkeypatch):
    """O and L against float64, each written once; every stage is released before it is filled again; a counter that
    programs draw from ends as it began."""
    draw, heads, d, B_c = np.random.default_rng(0), 3, 8, 64
    module, program, rings = ladder.load(rung), [0], []
    for n, (N_q, N_k) in enumerate([(1, 500), (200, 333), (333, 200), (700, 700)]):
        consumers, stages = 2 + n % 2, 2 + n // 2
        persistent, buffers = rung != "r20", dict(OWN_O_BUFFER=n < 2) if rung == "r23" else {}
        blocks = -(-N_q // (64 * consumers)) * heads
        programs = min(blocks, 4) if persistent else blocks
        with monkeypatch.context() as patch:
            run_on_numpy(module, patch, rings, program, programs)
            Q, K, V = (draw.standard_normal((heads, N, d)) for N in (N_q, N_k, N_k))
            O, L, counter = np.full(Q.shape, np.nan), np.full(heads * N_q, np.nan), np.zeros(1, int)
            descriptors = [SimpleNamespace(numbers=X, block_shape=[1, B, d], dtype="half")
                    for X, B in ((Q, 64), (K, B_c), (V, B_c), (O, 64))]  # fmt: skip
            sizes = dict(CAUSAL=causal, CONSUMERS=consumers, STAGES=stages) | buffers
            numbers = map(GpuInt, (N_q, N_k, heads, 2))
            pointers = Pointer(L), *((Pointer(counter, 0),) * persistent)
            arguments = *descriptors, *pointers, *numbers, d**-0.5 / math.log(2)
            for program[0] in range(programs):
                rings.clear()
                module.forward_kernel(*arguments, **sizes)
                assert rings and all(ring.no_deadlock() for ring in rings), (N_q, N_k)
        want = dense_truth(*(torch.from_numpy(X)[None] for X in (Q, K, V, Q)), window=(None, 0 if causal else None))
        np.testing.assert_allclose(O, want[0][0], atol=1e-9)
        np.testing.assert_allclose(L.reshape(heads, N_q), want[1][0], atol=1e-9)
        assert not counter.any()
