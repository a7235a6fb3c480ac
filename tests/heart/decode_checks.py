"""Fixtures and checks for tests of decode: outputs and scratch hold NaN, and results follow the accuracy rule."""

import pytest
import torch
from kernel_truth import DEVICE, DTYPES, check_accuracy, dense_truth, nan_in_empty, random_inputs  # noqa: F401 (nan_in_empty is a fixture)

from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.decode import plan


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Make the interpreter's tiles small and many."""
    monkeypatch.setattr(plan, "INTERPRETED", plan.DecodeConfig(B_c=16, warps=1, stages=1, programs_per_SM=4))


def paged_cache(k, v, lengths, page, seed=0, begins=None):
    """Return (k_pages, v_pages, table) of a dense cache: pages in random order, with unused pages between them.

    Everything that no query may read holds NaN. `begins` has the first key of each sequence that a window shows.
    """
    (batch, heads, N_k, d), begins = k.shape, begins or [0] * len(lengths)
    width = -(-N_k // page)
    order = torch.randperm(batch * width + 3, generator=torch.Generator().manual_seed(seed))[: batch * width]
    table, pages = order.view(batch, width).int().to(DEVICE), []
    for x in (k, v):
        whole = torch.full((batch, heads, width * page, d), torch.nan, dtype=x.dtype, device=DEVICE)
        for b, (first, end) in enumerate(zip(begins, lengths, strict=True)):
            whole[b, :, first:end] = x[b, :, first:end]
        pages.append(torch.full((batch * width + 3, page, heads, d), torch.nan, dtype=x.dtype, device=DEVICE))
        pages[-1][order.to(DEVICE)] = whole.view(batch, heads, width, page, d).permute(0, 2, 3, 1, 4).flatten(0, 1)
    for b, (first, end) in enumerate(zip(begins, lengths, strict=True)):
        table[b, : first // page] = table[b, -(-end // page) :] = -(2**31)  # pages that do not exist
    return *pages, table


def check_output(got, q, k, v, dO, what="", rough=False, **options):
    """Assert that (O, L) is as near to float64 as the accuracy rule demands."""
    truth, torchs = (dense_truth(q, k, v, dO, dtype=dtype, **options) for dtype in (torch.float64, q.dtype))
    check_accuracy(got, truth, torchs, what, rough)


def detached_inputs(*shape, **more):
    """Return random_inputs() without gradients."""
    return [x.detach() for x in random_inputs(*shape, **more)]


def run_decode(q, k, v, causal=False, scale=1.0, key_lengths=None, table=None, **more):
    """Return (O, L) from the decode kernels."""
    return plan.decode(Tensors(q, k, v, key_lengths, block_table=table), Options(causal, scale), **more)


def check_decode(shape, dtype=torch.float32, causal=False, lengths=None, scale=None, programs=None, **more):
    """Run the decode kernels on random tensors, check the results against float64, and return them."""
    q, k, v, dO = detached_inputs(*shape, dtype=dtype)
    lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    size = shape[5] ** -0.5 if scale is None else scale
    got = run_decode(q, k, v, causal, size, key_lengths=lengths, programs=programs)
    what = f"{shape} {dtype} causal {causal} lengths {lengths} programs {programs}"
    check_output(got, q, k, v, dO, what, causal=causal, lengths=lengths, scale=scale, **more)
    return got
