"""examine/ calls a function again to check memory, rounding, rows without keys and repeated calls, also in kernels."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from examined import enough_time, mask_later, names, plain_attention, scores, softmax  # noqa: F401 — a fixture

from fa2_lab.examine import examine


@triton.jit
def kernel(Q, K, V, O, N_q, N_k, tau, CAUSAL: tl.constexpr, WRONG: tl.constexpr, B: tl.constexpr, d: tl.constexpr):
    row, e, h = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, d), tl.program_id(1)
    q = tl.load(Q + (h * N_q + row[:, None]) * d + e[None, :], mask=(row < N_q)[:, None], other=0.0)
    m, l, o = tl.full((B,), float("-inf"), tl.float32), tl.zeros((B,), tl.float32), tl.zeros((B, d), tl.float32)
    for j in range(0, N_k, B):
        col = j + tl.arange(0, B)
        at, there = (h * N_k + col[:, None]) * d + e[None, :], (col < N_k)[:, None]
        k, v = tl.load(K + at, mask=there, other=0.0), tl.load(V + at, mask=there, other=0.0)
        s = tl.dot(q, k.T, input_precision="ieee") * tau
        if WRONG != 1:
            s = tl.where((col < N_k)[None, :], s, float("-inf"))
        if CAUSAL:
            s = tl.where(col[None, :] <= row[:, None] + N_k - N_q, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p, alpha = tl.exp(s - base[:, None]), tl.exp(m - base)
        l = alpha * l + tl.sum(p, 1)
        o = alpha[:, None] * o + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = new
    o = o / tl.where(l == 0.0, 1.0, l)[:, None]
    at = O + (h * N_q + row[:, None]) * d + e[None, :]
    if WRONG >= 2:
        tl.store(at, o.to(q.dtype))
    else:
        tl.store(at, o.to(q.dtype), mask=(row < N_q)[:, None])


def kernel_attention(wrong: int):
    def attention(q, k, v, causal=False):
        (b, h, N_q, d), N_k = q.shape, k.shape[2]
        if k.shape[1] != h or d & (d - 1):
            raise ValueError("as many heads of K as of Q, and a power of two for d")
        q, k, v = (x.contiguous() for x in (q, k, v))
        O = torch.empty(q.numel() + (16 * d if wrong == 3 else 0), dtype=q.dtype, device=q.device)
        kernel[triton.cdiv(N_q, 16), b * h](q, k, v, O, N_q, N_k, d**-0.5, causal, wrong, 16, d)
        return O[: q.numel()].reshape(q.shape)

    return attention


KERNEL_FINDINGS = {0: [], 1: ["keys-padded"], 2: ["writes-past-end"], 3: ["writes-past-rows"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.parametrize("wrong", KERNEL_FINDINGS)
def test_a_kernel_is_examined_in_the_interpreter(wrong):
    assert names(examine(kernel_attention(wrong), quick=True, device="cpu")) == KERNEL_FINDINGS[wrong]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wrong", KERNEL_FINDINGS)
def test_a_kernel_is_examined_on_a_gpu(wrong, dtype):
    report = examine(kernel_attention(wrong), dtype=dtype, device="cuda")
    assert report.subject.device == "cuda"
    if wrong == 3:  # which program writes last is not known
        assert not report.is_right
    elif wrong == 2:  # what one program writes past its end, another may write as well
        assert "writes-past-end" in names(report)
    else:
        assert names(report) == KERNEL_FINDINGS[wrong]


def as_if_contiguous(x):
    return x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())


def with_one_more_row(x):
    return x.as_strided((*x.shape[:2], x.shape[2] + 1, x.shape[3]), x.stride(), x.storage_offset())


MEMORY_FAULTS = {
    "inputs-changed": lambda q, k, v: plain_attention(q.mul_(1.0), k.add_(1), v),
    "not-deterministic": lambda q, k, v: plain_attention(q, k, v) + 0.01 * torch.rand(1),
    "strides-ignored": lambda q, k, v: plain_attention(*map(as_if_contiguous, (q, k, v))),
    "unwritten": lambda q, k, v: plain_attention(q, k, v) + 0 * torch.empty(1),
    "reads-past-end": lambda q, k, v: plain_attention(q, k, v) + 0 * with_one_more_row(k)[:, :, -1:].sum(),
    "dropout-factor": None,
}


@pytest.mark.parametrize("fault", MEMORY_FAULTS)
def test_a_fault_of_memory_is_named(fault):
    def function(q, k, v):
        return MEMORY_FAULTS[fault](q, k, v)

    def dropped(q, k, v, dropout_p=0.0):
        P = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
        return (P * (torch.rand(P.shape) >= dropout_p)) @ v

    assert fault in names(examine(function if MEMORY_FAULTS[fault] else dropped, quick=True, library="torch"))


def writes_past_o(Q, K, V, O):
    O[:] = 0
    O.base[-1] = 0


def writes_past_new_tensor(q, k, v):
    o = torch.empty_like(q)
    o.copy_(plain_attention(q, k, v))
    o.as_strided((1,), (1,), o.storage_offset() + o.numel())[0] = 1.0
    return o


@pytest.mark.parametrize("function", [writes_past_o, writes_past_new_tensor])
def test_writes_past_the_end_of_an_output_are_found(function):
    found = names(examine(function, quick=True))
    assert "writes-past-end" in found and "unknown" not in found


def test_a_coarse_dtype_inside_is_the_only_thing_that_is_said():
    """What else is asked, about views and memory, is then held to that dtype."""

    def coarse(q, k, v):
        return plain_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()).to(q.dtype)

    def weights_in_half(q, k, v):
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1).half().float() @ v

    def scores_of_half(q, k, v):  # which overflow where scores are large
        return softmax((q.half() @ k.half().mT).to(q.dtype) * q.shape[-1] ** -0.5) @ v

    for function in (coarse, scores_of_half):
        assert len(found := names(examine(function, quick=True, dtype="float32"))) == 1, found
    report = examine(coarse, quick=True, dtype="float32")
    assert names(report) == ["precision"] and "as in bf16" in report.findings[0].where
    assert names(examine(weights_in_half, quick=True, dtype="float32")) == ["weights-rounded"]


class NanGradients(torch.autograd.Function):
    """Attention in which rows that see no key have O = 0, but NaN in their gradients."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        s = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1 + s.shape[-1] - s.shape[-2]).bool(), -torch.inf)
        L = torch.logsumexp(s, -1, keepdim=True)
        o = torch.nan_to_num(torch.exp(s - L)) @ v
        ctx.save_for_backward(q, k, v, o, s, L)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, s, L = ctx.saved_tensors
        p = torch.exp(s - L)
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, p.mT @ do, None


@pytest.mark.parametrize(("coarse", "name"), [(False, "sums-coarse"), (True, "all-coarse")])
def test_sums_in_16_bits_are_a_mistake_unless_all_is_in_16_bits(coarse, name):
    def streamed(q, k, v):
        o, l, m = torch.zeros_like(q), torch.zeros_like(q[..., :1]), torch.full_like(q[..., :1], -torch.inf).float()
        S = scores(q, k) if coarse else scores(q.float(), k.float())
        for s, v_j in zip(S.split(16, -1), v.split(16, -2), strict=True):
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, alpha = (s - m_new).exp(), (m - m_new).exp()
            o = (alpha * o + p @ v_j.float()).to(q.dtype)
            l, m = (alpha * l + p.sum(-1, keepdim=True)).to(q.dtype), m_new
        return o / l

    report = examine(streamed, quick=True, library="torch")
    assert names(report) == [name] and report.is_right == coarse


def test_scores_in_16_bits_are_a_remark_unless_the_weights_are_in_16_bits_as_well():
    def mixed(q, k, v):
        S = (q @ k.mT).float() * q.shape[-1] ** -0.5
        return (S.softmax(-1) @ v.float()).to(q.dtype)

    for function, says in ((mixed, ["scores-coarse"]), (plain_attention, [])):
        report = examine(function, quick=True, library="torch")
        assert names(report) == says and report.is_right, function


def test_a_last_axis_taken_to_be_contiguous_is_a_remark():
    def function(q, k, v):
        return plain_attention(*(as_if_contiguous(x) if x.stride(-1) > 1 else x for x in (q, k, v)))

    report = examine(function, quick=True, library="torch")
    assert names(report) == ["last-axis-strided"] and report.is_right


@pytest.mark.parametrize("is_kernel", [False, True])
def test_values_behind_the_lengths_and_the_corner_are_said(is_kernel):
    space = dict(torch=torch, safe=softmax, scores=scores, hidden=mask_later, kernel=kernel)
    source = """def f(q, k_cache, v_cache, causal=False, seqused_k=None, run=False):
        run and kernel[1](q)
        s = hidden(scores(q, k_cache)) if causal else scores(q, k_cache)
        if seqused_k is not None:
            s = s.masked_fill(torch.arange(s.shape[-1]) >= seqused_k.reshape(-1, 1, 1, 1), -torch.inf)
        return safe(s) @ v_cache"""
    exec(source if is_kernel else source.replace("run and kernel[1](q)", "pass"), space)
    report = examine(space["f"], quick=True, library="torch")
    said = {"reads-past-length" if is_kernel else "length-nan", "corner-of-buffer"}
    assert said <= set(names(report)) and report.is_right == (not is_kernel)


def test_nan_of_rows_without_keys_is_a_remark_and_nan_in_gradients_alone_is_wrong():
    def of_softmax(q, k, v, causal=False):
        s = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1 + s.shape[-1] - s.shape[-2]).bool(), -torch.inf)
        return s.softmax(-1) @ v

    def guarded(q, k, v, causal=False):
        return NanGradients.apply(q, k, v, causal)

    report = examine(of_softmax, quick=True)
    assert report.is_right and names(report) == ["empty-nan", "gradient-nan"]
    assert names(examine(guarded, quick=True)) == ["gradient-empty"]


def test_a_backward_pass_with_a_finite_mask_is_right_unless_its_own_o_is_0():
    def backward(q, k, v, dO, causal=False):
        s = scores(q, k)
        p = torch.softmax(mask_later(s).nan_to_num(neginf=-1e30) if causal else s, -1)
        dP = dO @ v.mT
        dS = p * (dP - (p * dP).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return dS @ k, dS.mT @ q, p.mT @ dO

    def off(q, k, v, dO, causal=False):
        dQ, dK, dV = backward(q, k, v, dO, causal)
        return dQ, dK, dV + 0.1 * (causal and q.shape[2] > k.shape[2])

    def with_o(q, k, v, dO, causal=False):
        s = scores(q, k)
        return softmax(mask_later(s) if causal else s) @ v, *backward(q, k, v, dO, causal)

    report = examine(backward, quick=True, library="torch")
    assert report.is_right and names(report) == ["empty-mean"]
    for wrong in (off, with_o):
        assert names(examine(wrong, quick=True, library="torch")) == ["gradient-empty"]


def test_a_call_that_overwrites_or_keeps_what_an_earlier_one_gave_is_named():
    kept = {}

    def reuses(q, k, v):
        return kept.setdefault(q.shape, torch.empty_like(q)).copy_(plain_attention(q, k, v).detach())

    def keeps(q, k, v):
        k = kept.setdefault((k.shape, "k"), k.detach().clone())
        return plain_attention(q, k, v)

    def changes(q, k, v, attn_mask=None):
        P = softmax(scores(q, k) + (0 if attn_mask is None else attn_mask))
        if attn_mask is not None:
            attn_mask.zero_()
        return P @ v

    for function, name in ((reuses, "output-reused"), (keeps, "state-kept"), (changes, "inputs-changed")):
        assert name in names(examine(function, quick=True, library="torch")), name


def test_a_sequence_without_keys_must_be_written():
    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, make="empty"):
        O, (rows, keys) = getattr(torch, make)(q.shape), (x.tolist() for x in (cu_seqlens_q, cu_seqlens_k))
        for a, b, c, d in zip(rows, rows[1:], keys, keys[1:], strict=False):
            if d > c:
                x, y, z = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
                O[a:b] = (softmax(scores(x, y)) @ z).transpose(0, 1)
        return O

    assert names(examine(packed, quick=True, library="torch")) == ["unwritten"]
    zeros = partial(packed, make="zeros")
    assert names(examine(zeros, quick=True, library="torch")) == []


def test_gradients_that_a_call_keeps_or_spoils_are_findings():
    kept = {}

    def backward(q, k, v, dO):
        S = scores(q, k)
        P, dP = S.softmax(-1), dO @ v.mT
        dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        kept[q.shape] = kept.get(q.shape, 0) + dS @ k
        return kept[q.shape], dS.mT @ q, P.mT @ dO

    def spoils(q, k, v, dO):
        dO *= 2
        return backward(q, k, v, dO / 2)

    assert names(examine(backward, quick=True, library="torch")) == ["state-kept"]
    assert "inputs-changed" in names(examine(spoils, quick=True, library="torch"))


def test_a_finite_mask_is_a_remark_even_if_l_is_returned():
    """As in jax.nn: L of a row without keys is so small that a merge gives the row no weight."""

    def masked(q, k, v, causal=False):
        s = mask_later(scores(q, k)).nan_to_num(neginf=-1e30) if causal else scores(q, k)
        return s.softmax(-1) @ v, s.logsumexp(-1)

    for function in (masked, lambda q, k, v, causal=False: masked(q, k, v, causal)[0]):
        report = examine(function, quick=True, library="torch")
        assert report.is_right and names(report) == ["empty-mean"]


def test_an_option_kept_from_an_earlier_call_is_named():
    kept = {}

    def caches(q, k, v, window=None):
        s = scores(q, k)
        if window is not None:
            s = s + kept.setdefault(s.shape, mask_later(torch.zeros_like(s), window).where(
                mask_later(torch.zeros_like(s), window).mT.isfinite(), -torch.inf))  # fmt: skip
        return softmax(s) @ v

    assert "options-kept" in names(examine(caches, quick=True, library="torch"))
