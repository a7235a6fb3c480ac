"""A fixed number of splits: results are right, and a row has the same bits in every batch, also with pages."""

from itertools import pairwise

import pytest
import torch
from case_selection import covering_or_exhaustive
from decode_checks import DTYPES, check_near, paged, poisoned, random_tensors, small_tiles  # noqa: F401 (fixtures)
from kernel_truth import DEVICE, GPU

import fa2_lab

SPLITS = (1, 2, 7, 40)  # 90 keys are six of the interpreter's tiles
ASKED = [  # heads, K/V heads, N_q, and what else is asked for
    (2, 1, 1, dict()),
    (4, 1, 3, dict(causal=True)),
    (2, 1, 1, dict(window=(40, None), softcap=1.5)),
    (2, 2, 2, dict(window=(33, 0), sinks=True)),
    (20, 1, 1, dict()),  # more rows than the prefill would take if the cache were short
]
BATCHES = (1, 2, 3, 4, 8, 17, 64) if GPU else (1, 3, 17)  # the interpreter takes its time for each row
N_K = 4096 if GPU else 90  # long enough that a free choice depends on the batch


def given(heads, asked):
    """Return the options of a call, with a tensor of sinks if sinks are asked for."""
    return asked | dict(sinks=torch.linspace(-1, 1, heads, device=DEVICE)) if "sinks" in asked else asked


def batches(heads, kv_heads, N_q, N_k=N_K):
    """Yield (q, k, v, lengths, b) for larger and larger batches, whose entry b is always the same N_K − 3 keys."""
    q, k, v, _ = random_tensors(65, heads, kv_heads, N_q, N_k, 16, dtype=torch.float16)
    lengths = torch.randint(1, N_k + 1, (65,), generator=torch.Generator().manual_seed(1))
    for batch in BATCHES:
        b = batch // 2
        rows = torch.arange(1, batch + 1)
        rows[b] = 0
        n = lengths[rows]
        n[b] = N_K - 3
        yield *(x[rows.to(DEVICE)] for x in (q, k, v)), n.to(DEVICE), b


def row_of(result, b):
    return [x[b] for x in result]


def first(calls):
    """Return the number of the first call whose result has other bits than the result of call 0, or None."""
    want = None
    for number, (result, b) in enumerate(calls):
        got = row_of(result, b)
        want = got if want is None else want
        if not all(map(torch.equal, got, want)):
            return number
    return None


def dense_calls(heads, kv_heads, N_q, asked, **more):
    asked = given(heads, asked) | more
    for q, k, v, n, b in batches(heads, kv_heads, N_q):
        yield fa2_lab.attention(q, k, v, key_lengths=n, return_lse=True, **asked), b


def paged_calls(heads, kv_heads, N_q, asked, **more):
    asked = given(heads, asked) | more
    for number, (q, k, v, n, b) in enumerate(batches(heads, kv_heads, N_q)):
        pages = paged(k, v, n.tolist(), page=24, seed=number)
        yield fa2_lab.attention_paged(q, *pages, n, return_lse=True, **asked), b


@pytest.mark.parametrize("splits, asked, calls", covering_or_exhaustive(SPLITS[:3], ASKED, (dense_calls, paged_calls)))
def test_num_splits_makes_rows_bitwise_independent_of_the_batch(splits, asked, calls):
    assert first(calls(*asked, num_splits=splits)) is None


def test_without_num_splits_bits_depend_on_the_batch():
    """Else the test above would show nothing."""
    assert first(dense_calls(2, 2, 1, {})) and first(paged_calls(2, 2, 1, {}))


def test_num_splits_makes_rows_bitwise_independent_of_padding():
    """Alone with its own keys and no lengths, or beside longer sequences; and in wider tables of other pages."""
    for heads, splits in ((2, 7), (20, 2)):
        found = []
        for q, k, v, n, b in batches(heads, 2 if heads == 2 else 1, 1):
            found.append((fa2_lab.attention(q, k, v, key_lengths=n, num_splits=splits, return_lse=True), b))
            own = (x[b : b + 1, :, : N_K - 3].contiguous() for x in (k, v))
            found.append((fa2_lab.attention(q[b : b + 1], *own, num_splits=splits, return_lse=True), 0))
        assert first(found) is None
    assert len({int(x[0].shape[0]) for x, _ in found}) > 1


@pytest.mark.parametrize("splits, dtype", covering_or_exhaustive(SPLITS, DTYPES), ids=str)
def test_any_num_splits_matches_float64(splits, dtype):
    """More than a sequence has tiles, sequences without keys, windows that begin past some splits."""
    lengths = [0, N_K, 17]
    for heads, kv_heads, N_q, asked in ASKED[1:]:
        q, k, v, dO = random_tensors(3, heads, kv_heads, N_q, N_K, 16, dtype=dtype)
        options, n = given(heads, asked), torch.tensor(lengths, device=DEVICE)
        got = fa2_lab.attention(q, k, v, key_lengths=n, num_splits=splits, return_lse=True, **options)
        check_near(got, q, k, v, dO, (splits, asked), lengths=n, **options)
        got = fa2_lab.attention_paged(q, *paged(k, v, lengths, 24), n, num_splits=splits, return_lse=True, **options)
        for b in (1, 2):
            own = q[[b]], *(x[[b], :, : lengths[b]] for x in (k, v)), dO[[b]]
            check_near([x[[b]] for x in got], *own, (splits, asked, b), **dict(causal=True) | options)
        assert "sinks" in asked or ((got[0][0] == 0).all() and (got[1][0] == -torch.inf).all())


def test_cache_distinguishes_num_splits():
    """A call of the same kind but for the number of splits gets its own."""
    q, k, v, _ = random_tensors(1, 2, 2, 1, N_K, 16)
    found = [fa2_lab.attention(q, k, v, num_splits=n) for n in (1, 2, 7)]
    assert not any(torch.equal(a, b) for a, b in pairwise(found))
    assert torch.equal(fa2_lab.attention(q, k, v, num_splits=1), found[0])
    free = fa2_lab.attention(q, k, v)
    assert all(torch.equal(fa2_lab.attention(q, k, v, num_splits=n), free) for n in (None, 0))


@pytest.mark.parametrize("causal", (False, True))
def test_portable_prefill_rows_are_bitwise_independent_of_the_batch(causal):
    """Its tiles depend on no batch. Without a diagonal, longer sequences beside it change nothing either."""
    found = []
    for q, k, v, n, b in batches(2, 1, 70):
        found.append((fa2_lab.attention(q, k, v, key_lengths=n, causal=causal, backend="portable", return_lse=True), b))
    assert first(found) is None
