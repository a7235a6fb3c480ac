"""Helpers that call Hopper's kernels directly on a Hopper GPU, with NaN in free memory, and check their results."""

from functools import partial

import torch
from kernel_truth import DEVICE, check_accuracy, dense_truth, ints, packed_truth

from fa2_lab.kernels.arguments import Tensors
from fa2_lab.kernels.cache import PREPARED

DTYPES, CU_SEQLENS = (torch.float16, torch.bfloat16), ("cu_seqlens_q", "cu_seqlens_k")


def random_heads(batch, heads, N, d, dtype, turned=False, seed=0):
    """Return a random tensor (batch, heads, N, d). With `turned`, it is stored as (batch, N, heads, d)."""
    shape = (batch, N, heads, d) if turned else (batch, heads, N, d)
    x = torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dtype)
    return x.transpose(1, 2) if turned else x


def fill_with_nan(*tensors) -> None:
    """Leave NaN in the free memory that outputs and sums are likely to get."""
    keep = [torch.full_like(x, torch.nan) for x in tensors for _ in range(2)]
    keep += [torch.full((2 * x.numel() + 4096 * 128,), torch.nan, device=DEVICE) for x in tensors]
    del keep


def run_kernels(q, k, v, dO, options, lengths=None, cu=(), dL=None, deterministic=False):
    """Return O and L, and if dO is given and d has a backward kernel, dQ, dK and dV. `cu` has both cu_seqlens."""
    from fa2_lab.kernels.hopper.backward import launch as backward
    from fa2_lab.kernels.hopper.forward import launch as forward

    tensors = Tensors(q, k, v, lengths, **dict(zip(CU_SEQLENS, cu, strict=False)))
    fill_with_nan(q, k)
    O, L = forward.prepare(tensors, options)(tensors)
    if dO is None:
        return O, L
    call = backward.prepare(dO, O, tensors, options, deterministic)
    fill_with_nan(q, k)
    return O, L, *(call(dO, dL, O, L, tensors) if call else ())


def with_nan_in_unseen_keys(q, k, v, options, lengths):
    """Return k and v with NaN for keys that no row sees."""
    col, N_k = torch.arange(k.shape[2], device=DEVICE), k.shape[2]
    unseen = col[None] >= (ints(N_k) if lengths is None else lengths)[:, None]
    if options.left is not None:
        unseen = unseen | (col < N_k - q.shape[2] - options.left)
    return [x.masked_fill(unseen[:, None, :, None], torch.nan) for x in (k, v)]


def check_kernels(q, k, v, dO, options, lengths=None, cu=(), dL=None, deterministic=False):
    """Check the kernels' results by the accuracy rule.

    The truth of the gradients is computed for the returned O, because the kernels compute D from this rounded O.
    """
    given = torch.zeros_like(q) if dO is None else dO
    packed = dict(zip(CU_SEQLENS, cu, strict=False))
    truth = partial(packed_truth, **packed) if cu else partial(dense_truth, lengths=lengths)
    truth = partial(truth, q, k, v, given, window=options.bounds, scale=options.scale)
    want, torchs = truth(dL=dL), truth(dL=dL, dtype=q.dtype)
    if not cu:
        k, v = with_nan_in_unseen_keys(q, k, v, options, lengths)
    got = run_kernels(q, k, v, dO, options, lengths, cu, dL, deterministic)
    if dO is not None:
        assert len(got) == (5 if q.shape[-1] <= 128 else 2)
        lost = (given.nan_to_num() * (want[0] - got[0]).nan_to_num()).sum(-1)
        lost = lost.T if cu else lost
        want = *want[:2], *truth(dL=lost if dL is None else dL + lost)[2:]
    check_accuracy(got, want, torchs, f"{tuple(q.shape)} {tuple(k.shape)} {options} {lengths} {cu}")


def prepared_backward(Q, K, V, dO, options, deterministic=False):
    """Return a function that runs the backward kernels on these tensors, any number of times."""
    from fa2_lab.kernels.hopper.backward import launch as backward
    from fa2_lab.kernels.hopper.forward import launch as forward

    tensors = Tensors(Q, K, V)
    O, L = forward.prepare(tensors, options)(tensors)
    call = backward.prepare(dO, O, tensors, options, deterministic)
    return lambda: call(dO, None, O, L, tensors)


def counters_are_zero() -> bool:
    """Return whether there are scheduler counters in the cache, all of them 0."""
    counters = [value for key, value in PREPARED.items() if key[0] == "counter"]
    return bool(counters) and not any(counter.any() for counter in counters)


def captured_and_eager(call):
    """Record a call as a CUDA graph, and yield (its results, the results of a plain call) for three replays.

    Before each replay, the results are filled with NaN.
    """
    want = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(3):
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        yield captured, want
