"""attention_packed(): against dense attention sequence by sequence, in float64."""

import sys

import pytest
import torch
from biases import BIASES
from kernel_truth import DEVICE, RESULTS, check_accuracy, largest_error, nan_in_empty, packed_truth, run_with_gradients  # noqa: F401 (nan_in_empty is a fixture)

from fa2_lab.api.packed import attention_packed

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def cu_seqlens(lengths):
    """Return cu_seqlens of sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)


def random_amid_nan(total, heads, d, dtype, draw):
    """Return a random tensor (total, heads, d) within a larger one that is otherwise NaN on all sides."""
    surrounded = torch.full((total + 4, heads + 2, d + 3), torch.nan)
    surrounded[2:-2, 1:-1, :d] = torch.randn(total, heads, d, generator=draw)
    return surrounded.to(DEVICE, dtype)[2:-2, 1:-1, :d]


def packed_inputs(n_q, n_k, heads=1, kv_heads=1, d=16, dtype=torch.float32, seed=0):
    """Return q, k and v, which require gradients, dO, and both cu_seqlens."""
    draw = torch.Generator().manual_seed(seed)
    q, dO = (random_amid_nan(sum(n_q), heads, d, dtype, draw) for _ in range(2))
    k, v = (random_amid_nan(sum(n_k), kv_heads, d, dtype, draw) for _ in range(2))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dO, cu_seqlens(n_q), cu_seqlens(n_k)


def check_packed(n_q, n_k=None, dL=False, backend="auto", options=None, sink=False, bias=None, **more):
    """Run attention_packed() forward and backward, check the results against float64, and return them."""
    q, k, v, dO, cu_seqlens_q, cu_seqlens_k = packed_inputs(n_q, n_q if n_k is None else n_k, **more)
    generator, options = torch.Generator().manual_seed(9), dict(causal=True) if options is None else options
    dL = torch.randn(q.shape[1], q.shape[0], generator=generator).to(DEVICE) if dL else None
    sinks = torch.randn(q.shape[1], generator=generator).to(DEVICE).requires_grad_() if sink else None
    leaves, arguments = (
        [q, k, v] + [sinks] * sink,
        dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks, **options),
    )
    triton_bias, numpy_bias = bias or (None, None)
    ours = numpy_bias if backend == "reference" else triton_bias
    O, L = attention_packed(q, k, v, **arguments, bias=ours, return_lse=True, backend=backend)
    arguments["bias"] = numpy_bias
    got = O, L, *torch.autograd.grad((O, L) if dL is not None else O, leaves, (dO, dL) if dL is not None else dO)
    assert [x.dtype for x in got[:5]] == [q.dtype, torch.float32, q.dtype, q.dtype, q.dtype]
    want, torchs = (packed_truth(q, k, v, dO, dL=dL, dtype=dtype, **arguments) for dtype in (torch.float64, q.dtype))
    check_accuracy(got, want, torchs, f"{n_q} {n_k}")
    assert not sink or largest_error(got[5], want[5]) < 2e-5 * max(1.0, want[5].abs().max().item())
    return got


# Right --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, causal", [*zip(DTYPES, (True, False, True), strict=True)], ids=str)
def test_packed_matches_float64_for_ragged_lengths(dtype, causal):
    check_packed([0, 1, 40, 0, 33], dtype=dtype, options=dict(causal=causal))


def test_packed_matches_float64_for_different_q_and_k_lengths():
    """The last row of a sequence sees its last key; rows that see no key, and keys that nobody sees, give zeros."""
    O, L, dQ, dK, dV = check_packed([5, 36, 0, 2], [40, 7, 9, 0], dL=True, heads=2)
    nothing, unseen = slice(41, 43), slice(47, 56)  # the fourth has queries and no keys, the third keys and no queries
    assert (O[nothing] == 0).all() and (L[:, nothing] == -torch.inf).all() and (dQ[nothing] == 0).all()
    assert (dK[unseen] == 0).all() and (dV[unseen] == 0).all()


def test_packed_matches_float64_for_sequences_of_0_to_3_rows():
    check_packed([1, 0, 2, 1, 1, 0, 3, 1])


MASKS = [(dict(window=(3, 1)), False), (dict(window=(4, None), causal=True), True), (dict(softcap=1.5), True)]
MASKS += [(dict(window=(30, 2), softcap=1.5), True)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("options, sink", MASKS, ids=str)
def test_packed_matches_float64_with_window_softcap_and_sinks(options, sink):
    check_packed([70, 0, 129, 1, 30], [150, 9, 64, 33, 30], dL=True, options=options, sink=sink, heads=2)


@pytest.mark.parametrize("backend", ("auto", "reference"))
@pytest.mark.parametrize("name", ("alibi", "some_rows", "later_tiles", "nothing"))
def test_packed_bias_positions_restart_in_each_sequence(name, backend):
    options = MASKS[1][0] if name == "some_rows" else {}
    lengths, heads = ([40, 0, 5, 9, 20], [70, 9, 4, 0, 33]), dict(heads=4, kv_heads=2, d=17)
    check_packed(*lengths, dL=True, options=options, bias=BIASES[name], backend=backend, **heads)


@pytest.mark.parametrize("heads, kv_heads, d", ((1, 1, 5), (4, 2, 24)))
def test_packed_matches_float64_for_heads_and_head_dimensions(heads, kv_heads, d):
    check_packed([5], heads=heads, kv_heads=kv_heads, d=d)


@pytest.mark.parametrize("n_q, n_k", (([3, 2], [0, 0]), ([0, 0], [4, 1]), ([0], [0])), ids=str)
def test_packed_fully_masked_rows_have_zero_O_and_L_minus_infinity(n_q, n_k):
    q, k, v, dO, cu_seqlens_q, cu_seqlens_k = packed_inputs(n_q, n_k)
    O, L, *gradients = run_with_gradients(
        attention_packed, q, k, v, dO, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, causal=True
    )
    assert O.shape == q.shape and L.shape == (1, sum(n_q)) and (L == -torch.inf).all()
    assert all((x == 0).all() for x in (O, *gradients))


def test_packed_backend_reference_matches_the_kernels():
    check_packed([0, 20, 0, 7], backend="reference", dL=True, heads=4, kv_heads=2)
    check_packed([20, 3, 0, 7], [9, 0, 4, 9], backend="reference", options={})


@pytest.mark.parametrize("poison", (0, 1))
def test_packed_isolates_sequences(poison):
    """With NaN in one sequence, all others are what they would be alone."""
    lengths = [3, 20, 2]
    q, k, v, dO, cu, _ = packed_inputs(lengths, lengths)
    rows, others = slice(*cu[poison : poison + 2].tolist()), torch.ones(sum(lengths), dtype=torch.bool)
    others[rows] = False
    given = [x.detach().clone() for x in (q, k, v, dO)]
    for x in given:
        x[rows] = torch.nan
    got = run_with_gradients(
        attention_packed,
        *(x.requires_grad_() for x in given[:3]),
        given[3],
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        causal=True,
    )
    truth = packed_truth(q, k, v, dO, cu, cu, causal=True)
    for name, a, t in zip(RESULTS, got, truth, strict=True):
        a, t = (x.T if name == "L" else x for x in (a, t))
        assert largest_error(a[others], t[others]) < 1e-5 and a[rows].isnan().any(), name


@pytest.mark.exhaustive
def test_packed_matches_float64_for_sequences_that_share_a_block():
    for n in (1, 31, 32, 33, 63, 64, 65):
        check_packed([n, 66 - n])


@pytest.mark.exhaustive
def test_packed_matches_float64_for_random_lengths():
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        n_q, n_k = (torch.randint(0, top, (6,), generator=draw).tolist() for top in (60, 90))
        more = dict(heads=4, kv_heads=2, d=64, dtype=DTYPES[seed % 3])
        check_packed(n_q, n_k, seed=seed, options=dict(causal=bool(seed % 2)), dL=seed % 3 == 0, **more)
    check_packed(torch.randint(0, 3, (300,), generator=draw).tolist())


@pytest.mark.gpu
@pytest.mark.parametrize("d", (64, 128))
def test_packed_matches_float64_for_many_blocks_on_a_gpu(d):
    check_packed([1000, 17, 0, 333, 2049, 64, *[3] * 300], heads=4, kv_heads=2, d=d, dtype=torch.bfloat16)


# Starts that cannot be looked at ------------------------------------------------------------------------------


def run_operators(q, k, v, dO, cu_seqlens_q, cu_seqlens_k):
    """Return (O, L, dQ, dK, dV) from the operators alone, without the checks of cu_seqlens, as on a GPU."""
    O, L = torch.ops.fa2_lab.forward(q, k, v, None, None, None, cu_seqlens_q, cu_seqlens_k, None, True, 0.25)
    return O, L, *torch.autograd.grad(O, (q, k, v), dO)


@pytest.mark.parametrize("wild", ([0, 7, 4], [0, 2**31 - 1, 7], [0, -(2**31), 7], [7, 0, 0]), ids=str)
def test_wrong_cu_seqlens_cause_no_out_of_bounds_access(wild):
    """Around the tensors lie NaN, which would be found in what is written, and there nothing may be written."""
    q, k, v, dO, good, _ = packed_inputs([4, 3], [4, 3])
    cu = torch.tensor(wild, dtype=torch.int32, device=DEVICE)
    for pair in ((cu, good), (good, cu)):
        O, _ = torch.ops.fa2_lab.forward(q, k, v, None, None, None, *pair, None, True, 0.25)
        again = torch.autograd.grad(O, (q, k, v), dO)
        assert all(x.shape == y.shape for x, y in zip(again, (q, k, v), strict=True))
    assert not O.isnan().any()  # its rows are in order, only its keys were not


def test_packed_clamps_cu_seqlens_to_the_tensor():
    q, k, v, dO, good, _ = packed_inputs([4, 3], [4, 3])
    wild = torch.tensor([2, 4, 99], dtype=torch.int32, device=DEVICE)  # and the first as 0
    want, got = (run_operators(q, k, v, dO, cu, cu) for cu in (good, wild))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_packed_rows_after_the_last_sequence_see_only_the_sinks(backend, monkeypatch):
    monkeypatch.setattr("fa2_lab.api.packed.check_cu_seqlens_values", lambda *_: None)  # on a CPU, it refuses the call
    monkeypatch.setattr(sys.modules[__name__], "cu_seqlens", lambda lengths, real=cu_seqlens: real(lengths[:-1]))
    check_packed([3, 20, 9], dL=True, sink=True, heads=2, backend=backend)


def test_packed_rows_after_the_last_sequence_are_zero():
    q, k, v, dO, *_ = packed_inputs([40], [40])
    two_sequences = cu_seqlens([2, 30])
    got = run_operators(q, k, v, dO, two_sequences, two_sequences)
    cut = (x[:32].detach().requires_grad_() for x in (q, k, v))
    want = run_operators(*cut, dO[:32], two_sequences, two_sequences)
    for name, a, b in zip(RESULTS, got, want, strict=True):
        a, b = (x.T if name == "L" else x for x in (a, b))
        assert torch.equal(a[:32], b) and (a[32:] == (-torch.inf if name == "L" else 0)).all(), name
