"""A fixed number of splits: results are right, and a row has the same bits in every batch, also with pages."""

from itertools import pairwise

import pytest
import torch
from case_selection import covering_or_exhaustive
from decode_checks import DTYPES, check_output, detached_inputs, nan_in_empty, paged_cache, small_tiles  # noqa: F401 (fixtures)
from kernel_truth import DEVICE, GPU

import fa2_lab

SPLITS = (1, 2, 7, 40)  # 90 keys are six of the interpreter's tiles
SHAPES_AND_MASKS = [  # heads, K/V heads, N_q, masks
    (2, 1, 1, dict()),
    (4, 1, 3, dict(causal=True)),
    (2, 1, 1, dict(window=(40, None), softcap=1.5)),
    (2, 2, 2, dict(window=(33, 0), sinks=True)),
    (20, 1, 1, dict()),  # more rows than the prefill would take if the cache were short
]
BATCHES = (1, 2, 3, 4, 8, 17, 64) if GPU else (1, 3, 17)  # the interpreter takes its time for each row
N_K = 4096 if GPU else 90  # long enough that a free choice depends on the batch


def with_sinks(heads, masks):
    """Return the masks of a call, with a tensor of sinks if they have any."""
    return masks | dict(sinks=torch.linspace(-1, 1, heads, device=DEVICE)) if "sinks" in masks else masks


def batches(heads, kv_heads, N_q, N_k=N_K):
    """Yield (q, k, v, lengths, b) for larger and larger batches, whose entry b is always the same N_K − 3 keys."""
    q, k, v, _ = detached_inputs(65, heads, kv_heads, N_q, N_k, 16, dtype=torch.float16)
    lengths = torch.randint(1, N_k + 1, (65,), generator=torch.Generator().manual_seed(1))
    for batch in BATCHES:
        b = batch // 2
        entries = torch.arange(1, batch + 1)
        entries[b] = 0
        n = lengths[entries]
        n[b] = N_K - 3
        yield *(x[entries.to(DEVICE)] for x in (q, k, v)), n.to(DEVICE), b


def first_difference(calls):
    """Return the number of the first call whose entry b has other bits than that of call 0, or None.

    `calls` yields (results, b).
    """
    entries = ([x[b] for x in results] for results, b in calls)
    want = next(entries)
    return next((n for n, got in enumerate(entries, 1) if not all(map(torch.equal, got, want))), None)


def dense_calls(heads, kv_heads, N_q, masks, **more):
    options = with_sinks(heads, masks) | more
    for q, k, v, lengths, b in batches(heads, kv_heads, N_q):
        yield fa2_lab.attention(q, k, v, key_lengths=lengths, return_lse=True, **options), b


def paged_calls(heads, kv_heads, N_q, masks, **more):
    options = with_sinks(heads, masks) | more
    for number, (q, k, v, lengths, b) in enumerate(batches(heads, kv_heads, N_q)):
        pages = paged_cache(k, v, lengths.tolist(), page=24, seed=number)
        yield fa2_lab.attention_paged(q, *pages, lengths, return_lse=True, **options), b


@pytest.mark.parametrize(
    "splits, case, calls", covering_or_exhaustive(SPLITS[:3], SHAPES_AND_MASKS, (dense_calls, paged_calls))
)
def test_num_splits_makes_rows_bitwise_independent_of_the_batch(splits, case, calls):
    assert first_difference(calls(*case, num_splits=splits)) is None


def test_without_num_splits_bits_depend_on_the_batch():
    """Otherwise the test above would show nothing."""
    assert first_difference(dense_calls(2, 2, 1, {})) and first_difference(paged_calls(2, 2, 1, {}))


def test_num_splits_makes_rows_bitwise_independent_of_padding():
    """Alone with its own keys and no lengths, or beside longer sequences; and in wider tables of other pages."""
    for heads, splits in ((2, 7), (20, 2)):
        calls, options = [], dict(num_splits=splits, return_lse=True)
        for q, k, v, lengths, b in batches(heads, 2 if heads == 2 else 1, 1):
            calls.append((fa2_lab.attention(q, k, v, key_lengths=lengths, **options), b))
            alone = (x[[b], :, : N_K - 3].contiguous() for x in (k, v))
            calls.append((fa2_lab.attention(q[[b]], *alone, **options), 0))
        assert first_difference(calls) is None
    assert len({len(O) for (O, _), _ in calls}) > 1


@pytest.mark.parametrize("splits, dtype", covering_or_exhaustive(SPLITS, DTYPES), ids=str)
def test_any_num_splits_matches_float64(splits, dtype):
    """More than a sequence has tiles, sequences without keys, windows that begin past some splits."""
    numbers = [0, N_K, 17]
    for heads, kv_heads, N_q, masks in SHAPES_AND_MASKS[1:]:
        q, k, v, dO = detached_inputs(3, heads, kv_heads, N_q, N_K, 16, dtype=dtype)
        options, lengths = with_sinks(heads, masks), torch.tensor(numbers, device=DEVICE)
        fixed = dict(num_splits=splits, return_lse=True, **options)
        got = fa2_lab.attention(q, k, v, key_lengths=lengths, **fixed)
        check_output(got, q, k, v, dO, (splits, masks), lengths=lengths, **options)
        got = fa2_lab.attention_paged(q, *paged_cache(k, v, numbers, 24), lengths, **fixed)
        for b in (1, 2):
            sequence = q[[b]], *(x[[b], :, : numbers[b]] for x in (k, v)), dO[[b]]
            check_output([x[[b]] for x in got], *sequence, (splits, masks, b), **dict(causal=True) | options)
        assert "sinks" in masks or ((got[0][0] == 0).all() and (got[1][0] == -torch.inf).all())


def test_cache_distinguishes_num_splits():
    """A call of the same kind but for the number of splits gets its own."""
    q, k, v, _ = detached_inputs(1, 2, 2, 1, N_K, 16)
    outputs = [fa2_lab.attention(q, k, v, num_splits=n) for n in (1, 2, 7)]
    assert not any(torch.equal(a, b) for a, b in pairwise(outputs))
    assert torch.equal(fa2_lab.attention(q, k, v, num_splits=1), outputs[0])
    without = fa2_lab.attention(q, k, v)
    assert all(torch.equal(fa2_lab.attention(q, k, v, num_splits=n), without) for n in (None, 0))


@pytest.mark.parametrize("causal", (False, True))
def test_portable_prefill_rows_are_bitwise_independent_of_the_batch(causal):
    """Its tiles depend on no batch. Without a diagonal, longer sequences beside it change nothing either."""
    options = dict(causal=causal, backend="portable", return_lse=True)
    calls = ((fa2_lab.attention(q, k, v, key_lengths=n, **options), b) for q, k, v, n, b in batches(2, 1, 70))
    assert first_difference(calls) is None
