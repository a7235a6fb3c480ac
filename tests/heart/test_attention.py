"""fa2_lab.attention against float64: on a GPU every combination of shapes, in Triton's interpreter a sample."""

from itertools import product

import numpy as np
import pytest
import torch
from attention_cases import HOPPER_FORWARD, check_attention, kernels, nan_in_empty  # noqa: F401 (two are fixtures)
from case_selection import covering_or_exhaustive, covering_rows, exhaustive_on_gpu
from kernel_truth import DEVICE, DTYPES, dense_truth, dropout_mask, largest_error, random_inputs, run_with_gradients

from fa2_lab.api.attention import attention
from fa2_lab.kernels import tables
from fa2_lab.kernels.common import softmax

LENGTH_PAIRS = [(1, 1), (1, 128), (113, 203), (127, 127), (128, 217), (256, 512), (512, 256), (1023, 1024)]
LENGTH_PAIRS += [(1024, 1023), (2048, 2048)]
HEAD_PAIRS = [(6, 6), (6, 2), (6, 1)]
HEAD_DIMS = (1, 13, 16, 32, 40, 64, 96, 111, 128, 192, 256)


# The product --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_attention_matches_float64_for_each_shape_dtype_and_mask(kernels):  # noqa: F811
    """Every d, dtype, mask, number of heads and pair of lengths."""
    if kernels == "chosen":
        pytest.skip("tests of Hopper's kernels take all of theirs once")
    for d, dtype, causal, heads, lengths in covering_rows(HEAD_DIMS, DTYPES, (False, True), HEAD_PAIRS, LENGTH_PAIRS):
        check_attention(*random_inputs(1, *heads, *lengths, d, dtype), causal=causal)


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_attention_matches_float64_for_all_combinations(d, causal, dtype, kernels):  # noqa: F811
    if kernels == "chosen" and (dtype == torch.float32 or d not in HOPPER_FORWARD.configs.DIMENSIONS):
        pytest.skip("the portable ones again")
    for (heads, kv_heads), (N_q, N_k) in product(HEAD_PAIRS, LENGTH_PAIRS):
        check_attention(*random_inputs(1, heads, kv_heads, N_q, N_k, d, dtype), causal=causal)


SAMPLE = [
    (16, (1, 1), (6, 6), False, torch.float32),
    (32, (1, 128), (2, 1), True, torch.float16),
    (40, (70, 140), (2, 1), True, torch.bfloat16),
    (64, (127, 127), (2, 2), True, torch.float16),
    (96, (70, 130), (1, 1), False, torch.float32),
    (111, (100, 66), (2, 1), True, torch.float32),
    (128, (128, 128), (1, 1), False, torch.bfloat16),
    (192, (65, 66), (1, 1), True, torch.float16),
    (256, (33, 65), (1, 1), False, torch.float32),
    (1, (40, 70), (3, 1), True, torch.float32),
    (13, (100, 66), (1, 1), False, torch.bfloat16),
]


@exhaustive_on_gpu
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_attention_matches_float64_for_a_sample_of_shapes(case):
    d, (N_q, N_k), heads, causal, dtype = case
    check_attention(*random_inputs(2, *heads, N_q, N_k, d, dtype), causal=causal)


@exhaustive_on_gpu
@pytest.mark.parametrize("sizes", [(16, 16), (64, 16), (16, 64)])
def test_attention_matches_float64_for_any_block_sizes(sizes, monkeypatch):
    monkeypatch.setattr(
        tables,
        "choose_config",
        lambda kernel, Q, causal: tables.KernelConfig(*sizes, 4, 1, d_pad=tables.padded_head_dim(Q.shape[3])),
    )
    check_attention(*random_inputs(1, 2, 1, 50, 83, 16), causal=True, lengths=torch.tensor([70], device=DEVICE))
    check_attention(*random_inputs(1, 2, 1, 83, 50, 16), causal=True)


# Masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "causal, dtype", covering_or_exhaustive((False, True), (torch.int32, torch.int64, torch.uint8)), ids=str
)
def test_attention_masks_keys_past_key_lengths(causal, dtype):
    lengths = torch.tensor([0, 1, 64, 99, 100], dtype=dtype, device=DEVICE)
    q, k, v, dO = random_inputs(5, 1, 1, 70, 100, 16)
    with torch.no_grad():  # what lies behind a length must not matter, whatever it is
        for b, n in enumerate(lengths.tolist()):
            k[b, :, n:] = v[b, :, n:] = 0
    clean = check_attention(q, k, v, dO, causal=causal, lengths=lengths)
    with torch.no_grad():
        for b, n in enumerate(lengths.tolist()):
            k[b, :, n:] = v[b, :, n:] = float("nan")
    with_nan = run_with_gradients(attention, q, k, v, dO, causal=causal, key_lengths=lengths)
    assert all(map(torch.equal, with_nan, clean))


def test_attention_gives_zeros_for_fully_masked_rows():
    q, k, v, dO = random_inputs(1, 1, 1, 100, 30, 16)
    O, L, dQ, dK, dV = check_attention(q, k, v, dO, causal=True)
    assert (O[:, :, :70] == 0).all() and (L[:, :, :70] == -torch.inf).all() and (dQ[:, :, :70] == 0).all()
    assert torch.isfinite(dK).all() and torch.isfinite(dV).all()
    dL = torch.full((1, 1, 100), 0.5, device=DEVICE)
    dL[:, :, :70] = float("nan")  # the gradient of a logsumexp over −∞ can be NaN, and must not spread
    O, L = attention(q, k, v, causal=True, return_lse=True)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad((O, L), (q, k, v), (dO, dL)))


# Dropout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", (0, 7, 2**32 + 5, 2**64 - 1))
def test_dropout_mask_equals_the_reference_mask(seed):
    q, k, _, _ = random_inputs(2, 2, 2, 40, 64, 64)
    v = torch.eye(64, device=DEVICE).expand(2, 2, 64, 64)
    O = attention(q * 0, k, v, dropout_p=0.3, seed=seed)
    factors = dropout_mask(0.3, seed, 2, 2, 40, 64, DEVICE)
    assert torch.equal(O != 0, factors != 0)
    from fa2_lab.reference.dropout import keep_mask

    mask = np.stack([[keep_mask(0.3, seed, b, h, np.arange(40), np.arange(64)) for h in (0, 1)] for b in (0, 1)])
    assert np.array_equal((O != 0).cpu().numpy(), mask)


@pytest.mark.parametrize("causal", (False, True))
def test_dropout_gradients_match_float64(causal):
    check_attention(*random_inputs(2, 2, 1, 70, 100, 24), causal=causal, p=0.4, seed=3)
    lengths = torch.tensor([50], device=DEVICE)
    check_attention(*random_inputs(1, 1, 1, 33, 65, 16, torch.float16), p=0.1, seed=11, lengths=lengths)


@pytest.mark.parametrize("backend", ("auto", "reference"))
def test_dropout_seed_follows_torch_manual_seed(backend):
    q, k, v, _ = random_inputs(1, 1, 1, 16, 16, 16)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(attention(q, k, v, dropout_p=0.5, backend=backend))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


# Numbers that break kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", (133120.0, -133120.0, 2.0**40))
def test_attention_is_exact_for_huge_equal_scores(size):
    q, k = torch.full((1, 1, 70, 64), abs(size), device=DEVICE), torch.full((1, 1, 200, 64), size, device=DEVICE)
    v = torch.randn(1, 1, 200, 64, device=DEVICE)
    O, L = attention(q, k, v, return_lse=True)
    assert largest_error(O, v.mean(2, keepdim=True).expand_as(O)) < 1e-5
    assert torch.allclose(L, torch.full_like(L, abs(size) * size * 8), rtol=1e-6)


@pytest.mark.parametrize("size", (992, 3008, 4992, 6016, 6832, 6912, 6944, 7072, 8960, 29952))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("sign", (1, -1))
def test_attention_is_exact_for_huge_equal_scores_in_half_precision(dtype, sign, size):
    """Times the scale, such scores are rounded by whole powers of two, and so is p, which fp16 must hold.

    64 squares of such a size have an exact sum in fp32, so the scores are equal in whatever order they are added.
    """
    q, v = torch.full((1, 1, 90, 64), size, device=DEVICE, dtype=dtype), torch.randn(1, 1, 90, 64, device=DEVICE)
    for causal in (False, True):
        O = attention(q, sign * q, v.to(dtype), causal=causal)
        seen = torch.arange(1, 91, device=DEVICE)[:, None] if causal else 90
        mean = (v.to(dtype).double().cumsum(2) if causal else v.to(dtype).double().sum(2, keepdim=True)) / seen
        assert largest_error(O, mean.expand_as(O)) < (2e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("logit", (1e4, -1e4, -6e4))
def test_attention_is_accurate_for_large_scores(logit, causal):
    q, k, v, dO = random_inputs(1, 1, 1, 70, 130, 16)
    with torch.no_grad():
        q.zero_()[..., 0], k.zero_()[..., 0] = 1.0, logit + torch.arange(130, device=DEVICE) % 7
    check_attention(q, k, v, dO, causal=causal, scale=1.0, rough=True)


def test_attention_is_accurate_for_scores_of_mixed_size():
    q, k, v, dO = random_inputs(1, 1, 1, 70, 130, 16, size=60.0)
    check_attention(q, k, v, dO, rough=True)
    q, k, v, _ = random_inputs(1, 1, 1, 70, 130, 16, size=3e4)
    assert not any(torch.isnan(x).any() for x in attention(q, k, v, causal=True, return_lse=True))


@pytest.mark.parametrize("with_dO", (True, False))
def test_attention_backpropagates_the_gradient_of_L(with_dO):
    q, k, v, dO = random_inputs(2, 2, 1, 40, 70, 16)
    dL = torch.randn(2, 2, 40, device=DEVICE)
    if with_dO:
        check_attention(q, k, v, dO, causal=True, dL=dL)
    L = attention(q, k, v, return_lse=True)[1]
    got = torch.autograd.grad(L.sum(), (q, k, v), allow_unused=True)
    want = dense_truth(q, k, v, dO * 0, dL=torch.ones_like(dL))[2:]
    got = [torch.zeros_like(v) if x is None else x for x in got]
    assert all(largest_error(a, b) < 1e-4 for a, b in zip(got, want, strict=True))


# Memory layouts -----------------------------------------------------------------------------------------------


def test_strided_inputs_are_not_copied(monkeypatch):
    q, k, v, dO = (x.detach() for x in random_inputs(1, 4, 2, 40, 50, 16))
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    dO = dO.transpose(1, 2).contiguous().transpose(1, 2)
    for name in ("contiguous", "clone", "copy_"):
        monkeypatch.setattr(torch.Tensor, name, None)
    torch.autograd.grad(attention(*inputs), inputs, dO)


@pytest.mark.parametrize("width", (72, 76, 79, 80))
def test_attention_accepts_any_row_stride(width):
    """The kernels count strides in eights if 8 divides them all, and only then; what lies between rows is NaN."""
    q, k, v, dO = random_inputs(2, 2, 1, 40, 70, 72, torch.bfloat16)

    def with_row_stride(x):
        rows = torch.full((*x.shape[:3], width), torch.nan, dtype=x.dtype, device=DEVICE)[..., :72]
        return rows.copy_(x)

    q, k, v = (with_row_stride(x.detach()).requires_grad_() for x in (q, k, v))
    check_attention(q, k, v, with_row_stride(dO), causal=True)


@pytest.mark.parametrize("d", (16, 72, 128))
def test_attention_is_right_if_O_is_computed_in_column_slices(d, monkeypatch):
    """As the kernels make it for GPUs whose compiler would share S by columns otherwise."""
    if DEVICE == "cuda":
        pytest.skip("on a GPU, the chip decides")
    monkeypatch.setattr(tables, "splits_head_dim", lambda Q: True)
    check_attention(*random_inputs(1, 2, 1, 50, 83, d, torch.bfloat16), causal=True)


@pytest.mark.parametrize("scale", (1e-30, 0.088, 0.125, 1.0, 3.7, 1e20))
def test_p_never_overflows_fp16_for_huge_scores(scale):
    """The factor that rounding makes p wrong by, below the limit and beyond it: 2⁸ at most, and none."""
    fine, coarse, huge, *_ = softmax.make_scales(scale, softcap=None)
    assert 2.0**-25 * huge * fine <= 8 and coarse <= fine < 2 * coarse and np.log2(coarse) % 1 == 0
