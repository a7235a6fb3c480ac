"""attention_paged(): any layout of the pages in memory, the input that it accepts, and the input that it refuses."""

import pytest
import torch
from decode_checks import DTYPES, check_output, detached_inputs, nan_in_empty, paged_cache, run_decode, small_tiles  # noqa: F401 (fixtures)
from kernel_truth import DEVICE, largest_error

import fa2_lab
import fa2_lab.api.paged

# Pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", (1, 3, 16, 32, 40))
@pytest.mark.parametrize("causal", (False, True))
def test_paged_decode_equals_dense_decode(page, causal):
    lengths = [0, 80, 37]
    q, k, v, dO = detached_inputs(3, 4, 2, 2, 80, 16)
    k_pages, v_pages, table = paged_cache(k, v, lengths, page)
    given = dict(key_lengths=torch.tensor(lengths, device=DEVICE), table=table)
    O, L = run_decode(q, k_pages, v_pages, causal, 0.25, **given)
    assert (O[0] == 0).all() and (L[0] == -torch.inf).all()
    for b, n in ((1, 80), (2, 37)):  # the last key of each is the last that its last query sees
        check_output((O[b : b + 1], L[b : b + 1]), q[[b]], k[[b], :, :n], v[[b], :, :n], dO[[b]], causal=causal)


def test_paged_decode_accepts_strided_and_shared_pages():
    q, k, v, _ = detached_inputs(2, 4, 2, 1, 64, 16)
    lengths = torch.tensor([64, 50], device=DEVICE)
    k_pages, v_pages, table = paged_cache(k, v, [64, 50], 16)
    want = run_decode(q, k_pages, v_pages, causal=True, scale=0.25, key_lengths=lengths, table=table)
    side_by_side = torch.stack([k_pages, v_pages], 1)  # keys and values of a page side by side
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_pages, v_pages)]
    for pages in ((side_by_side[:, 0], side_by_side[:, 1]), heads_first, (k_pages, heads_first[1])):
        got = run_decode(q, *pages, causal=True, scale=0.25, key_lengths=lengths, table=table)
        assert all(map(torch.equal, got, want))
    table[1, :2] = table[0, :2]  # a common beginning
    O, _ = run_decode(q, k_pages, v_pages, causal=True, scale=0.25, key_lengths=lengths, table=table)
    k[1, :, :32], v[1, :, :32] = k[0, :, :32], v[0, :, :32]
    assert largest_error(O, run_decode(q, k, v, scale=0.25, key_lengths=lengths)[0]) < 1e-6


def test_block_table_may_be_wider_than_the_page_count():
    q, k, v, dO = detached_inputs(1, 4, 2, 1, 32, 16)
    k_pages, v_pages = (x.transpose(1, 2).reshape(2, 16, 2, 16) for x in (k, v))
    table, lengths = torch.tensor([[0, 1, 0, 1, 0]], device=DEVICE), torch.tensor([75], device=DEVICE)
    got = run_decode(q, k_pages, v_pages, scale=0.25, key_lengths=lengths, table=table)
    check_output(got, q, *(x.repeat(1, 1, 3, 1)[:, :, :75] for x in (k, v)), dO)


def test_paged_decode_clamps_page_indices():
    """In a CUDA graph nobody looks at the table before the kernel does."""
    q, k, v, _ = detached_inputs(1, 2, 1, 1, 48, 16)
    lengths = torch.tensor([48], device=DEVICE)
    k_pages, v_pages = (x.transpose(1, 2).reshape(3, 16, 1, 16) for x in (k, v))
    outside, inside = (torch.tensor([x], device=DEVICE) for x in ([-5, 1, 99], [0, 1, 2]))
    got, want = (run_decode(q, k_pages, v_pages, key_lengths=lengths, table=x) for x in (outside, inside))
    assert all(map(torch.equal, got, want))


# The public call ----------------------------------------------------------------------------------------------


def paged_arguments(dtype=torch.float32):
    """Return arguments of attention_paged(), and the dense k and v with the same contents, and dO."""
    lengths = [64, 0, 37]
    q, k, v, dO = detached_inputs(3, 4, 2, 2, 64, 16, dtype=dtype)
    k_pages, v_pages, table = paged_cache(k, v, lengths, page=16)
    arguments = dict(q=q, k_pages=k_pages, v_pages=v_pages, block_table=table)
    return arguments | dict(key_lengths=torch.tensor(lengths, device=DEVICE)), (k, v, dO)


@pytest.mark.parametrize("backend", ("auto", "reference"))
@pytest.mark.parametrize(
    "dtype, scale, causal",
    [*((dtype, None, True) for dtype in DTYPES), (torch.float32, 0.0, False), (torch.float16, -0.3, False)],
)
def test_attention_paged_matches_float64(dtype, backend, scale, causal):
    arguments, (k, v, dO) = paged_arguments(dtype)
    O, L = fa2_lab.attention_paged(**arguments, scale=scale, causal=causal, return_lse=True, backend=backend)
    assert O.dtype == dtype and L.dtype == torch.float32 and (O[1] == 0).all() and (L[1] == -torch.inf).all()
    for b, n in ((0, 64), (2, 37)):
        sequence = arguments["q"][[b]], k[[b], :, :n], v[[b], :, :n], dO[[b]]
        check_output((O[b : b + 1], L[b : b + 1]), *sequence, causal=causal, scale=scale)
    options = {} if causal else dict(causal=False)  # it is causal where nobody says
    assert torch.equal(fa2_lab.attention_paged(**arguments, scale=scale, backend=backend, **options), O)
