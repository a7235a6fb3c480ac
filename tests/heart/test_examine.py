"""examine/: every known mistake is told from every other and named; what is right is not called wrong."""

import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa2_lab
from fa2_lab.errata import ERRATA
from fa2_lab.examine import SECONDS, UNASKED, NotExamined, examine
from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import OPEN, AttentionCase, all_cases
from fa2_lab.examine.catalogue import CATALOGUE
from fa2_lab.examine.match import Answer, explain
from fa2_lab.reference import heads
from fa2_lab.tools.command import main

KNOBS = {name: m for name, m in CATALOGUE.items() if m.edits}
OUTPUTS = {"conventions": ("O",), "O": ("O",), "L": ("L",), "gradients": ("dQ", "dK", "dV")}


CASES = [(case, {}) for case in all_cases(quick=True)]  # with the variants of each, which all answers share


def answers(name: str, B: int = 16) -> list[Answer]:
    """Return the answers of a function with one mistake, or with none if name is "", with the noise of float32."""
    noise, part = np.random.default_rng(0), CATALOGUE[name].part if name else "gradients"
    B = {"B": B, "B bits": B, "parts": (4, 1)}.get(CATALOGUE[name].depends_on, 0) if name else 0
    found = []
    for case, variants in CASES:
        gradients = case.gradients and part in ("conventions", "gradients")
        outputs = attention(case, [name] if name else [], B, gradients=gradients)
        kept = {x: y for x, y in outputs.items() if case.gradients or x in "OL"}
        noisy = {x: y * (1 + 1e-7 * noise.uniform(-1, 1, y.shape)) for x, y in kept.items()}
        found.append(Answer(case, noisy, variants=variants))
    return found


@pytest.mark.parametrize("part", ["O", "L", "gradients"])
def test_no_two_mistakes_give_the_same_numbers_on_all_cases(part):
    """Each case divides the groups of mistakes that gave the same numbers so far, until every group has one name."""
    weights = np.random.default_rng(1).standard_normal(10**5)
    sizes = {"B": (4, 16, 64), "B bits": (16,), "parts": ((4, 1), (3, 0), (OPEN, 16))}
    forms = [("", 0)] + [
        (name, B)
        for name, m in KNOBS.items()
        for B in sizes.get(m.depends_on, (0,))
        if m.part == part or (part == "O" and m.part == "conventions")
    ]

    def numbers(case, name, B):
        outputs = attention(case, [name] if name else [], B, gradients=part == "gradients")
        flat = [np.nan_to_num(outputs[x].ravel(), nan=7.0, posinf=9.0, neginf=-9.0) for x in OUTPUTS[part]]
        return tuple(float(np.round(np.tanh(y / 9) @ weights[: y.size], 6)) for y in flat)

    groups = [forms]
    for case in [x for x in all_cases() if x.q.shape[2] < 300]:
        divided = {}
        for n, group in enumerate(groups):
            for name, B in group:
                divided.setdefault((n, numbers(case, name, B)), []).append((name, B))
        groups = [group for group in divided.values() if len({name for name, _ in group}) > 1]
    whole_tiles = [("keys-tail-dropped", 4), ("keys-rest-dropped", 4)]  # are alike if each case has a whole tile
    assert [group for group in groups if sorted(group) != sorted(whole_tiles)] == []


@pytest.mark.parametrize("part", OUTPUTS)
def test_each_mistake_is_named(part):
    assert explain(answers("")) == []
    for name in [x for x, m in KNOBS.items() if m.part == part and x != "L-rounded"]:  # which only 16 bits show
        found = explain(answers(name), tiles=(4, 16, 64))
        assert [x.name for x in found] == [name], f"{name}: {[(x.name, x.where, x.others) for x in found]}"


# As functions -----------------------------------------------------------------------------------------------------


def planted(*names: str):
    """Return a forward pass with these mistakes and most options, or if they are in gradients, a backward pass."""

    def asked(q, k, v, dO, **options):
        return AttentionCase("", q, k, v, dO, {x: y for x, y in options.items() if y is not None and y is not False})

    def forward(q, k, v, causal=False, scale=None, softcap=None, window=None):
        case = asked(q, k, v, 0 * q, causal=causal, scale=scale, softcap=softcap, window=window)
        found = attention(case, names, B=16)
        return found["O"], found["L"]

    def backward(q, k, v, dO, causal=False):
        found = attention(asked(q, k, v, dO, causal=causal), names, B=16, gradients=True)
        return found["dQ"], found["dK"], found["dV"]

    return backward if names and CATALOGUE[names[0]].part == "gradients" else forward


@pytest.fixture(autouse=True)
def enough_time(monkeypatch):
    """Raise the time limit, so that a test also passes on a busy machine."""
    monkeypatch.setitem(SECONDS, True, 600)


def names(report) -> list[str]:
    return [finding.name for finding in report.findings]


WRONG = "o-not-rescaled", "window-left-long", "L-base-2", "D-missing"


@pytest.mark.parametrize("wrong", [*WRONG, "scale-missing causal-strict"])
def test_a_function_with_a_mistake_is_examined(wrong):
    report = examine(planted(*wrong.split()), quick=True)
    assert names(report) == wrong.split() and not report.is_right


class Planted(torch.autograd.Function):
    """An autograd function with the right O and with one mistake in its gradients."""

    @staticmethod
    def forward(ctx, q, k, v, causal, name):
        ctx.save_for_backward(q, k, v)
        ctx.backward_of = partial(planted(name), causal=causal)
        return torch.tensor(planted()(*(x.double().numpy() for x in (q, k, v)), causal=causal)[0], dtype=q.dtype)

    @staticmethod
    def backward(ctx, dO):
        gradients = ctx.backward_of(*(x.double().numpy() for x in (*ctx.saved_tensors, dO)))
        return *(torch.tensor(x, dtype=dO.dtype) for x in gradients), None, None


def test_gradients_that_torch_takes_are_examined():
    report = examine(lambda q, k, v, is_causal=False: Planted.apply(q, k, v, is_causal, "group-last"), quick=True)
    assert names(report) == ["group-last"] and not report.is_right


def of_torch(backend):
    def sdpa(query, key, value, attn_mask=None, is_causal=False, scale=None):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)

    return sdpa


def test_a_scale_of_0_may_give_nan():
    def as_flash(query, key, value, scale=None):  # PyTorch's kernels multiply masked scores of −∞ by it
        O = F.scaled_dot_product_attention(query, key, value, scale=scale)
        return O * torch.nan if scale == 0 else O

    report = examine(as_flash, quick=True)
    assert report.is_right and "scale-zero-nan" in names(report)


def reference(q, k, v, causal=False, window=None, softcap=None, sinks=None, scale=None, key_lengths=None):
    options = dict(causal=causal, window=window, softcap=softcap, sinks=sinks, scale=scale, key_lengths=key_lengths)
    return heads.forward(q, k, v, stage="fa2", B_r=16, B_c=8, **options)


def written_with_loops(q, k, v, causal=False, sm_scale=None, BLOCK=16):
    """Return O, (batch, N, heads, d), computed by a loop over tiles of keys, with PyTorch's own gradients."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    (_, _, N_q, d), N_k = q.shape, k.shape[2]
    m, l, o = torch.full(q.shape[:3], -torch.inf), torch.zeros(q.shape[:3]), torch.zeros_like(q)
    for j in range(0, N_k, BLOCK):
        s = q @ k[:, :, j : j + BLOCK].mT * (d**-0.5 if sm_scale is None else sm_scale)
        if causal:
            ahead = torch.arange(j, j + s.shape[-1]) - torch.arange(N_q)[:, None]
            s = s.masked_fill(ahead > N_k - N_q, -torch.inf)
        new = torch.maximum(m, s.amax(-1))
        base = torch.where(new.isneginf(), 0.0, new)
        p, alpha = torch.exp(s - base[..., None]), torch.exp(m - base)
        m, l, o = new, alpha * l + p.sum(-1), alpha[..., None] * o + p @ v[:, :, j : j + BLOCK]
    return (o / torch.where(l == 0, 1.0, l)[..., None]).transpose(1, 2)


class Layer(torch.nn.Module):
    """Attention as a layer of a model has it, with the scale computed once."""

    def __init__(self, d):
        super().__init__()
        self.scale = d**-0.5

    def forward(self, q, k, v, attn_mask=None):
        s = q @ k.mT * self.scale
        return torch.softmax(s if attn_mask is None else s + attn_mask, -1) @ v


RIGHT = {
    "a layer": (Layer(16), dict(quick=True)),
    "torch's definition in fp16": (of_torch(SDPBackend.MATH), dict(dtype="float16")),
    "torch's definition in bf16": (of_torch(SDPBackend.MATH), dict(dtype="bfloat16")),
    "torch's call": (F.scaled_dot_product_attention, {}),
    "our reference": (reference, dict(library="numpy")),
    "a loop over tiles": (written_with_loops, {}),
    "the right knobs": (planted(), {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_correct_functions_have_no_findings(name):
    function, options = RIGHT[name]
    report = examine(function, **options)
    assert report.is_right, names(report)
    assert ("corner-top-left" in names(report)) == ("torch" in name)
    assert ("(batch, N, heads, d)" in report.how) == ("loop" in name)


def scores(q, k, tau=None):
    return q @ k.mT * (q.shape[-1] ** -0.5 if tau is None else tau)


def hidden(s, later=0, corner=None):
    """Return scores with −∞ for keys that are more than `later` places after their row.

    The diagonal begins at the bottom right corner, or at an offset `corner` from the top left one.
    """
    N_q, N_k = s.shape[-2:]
    ahead = torch.arange(N_k) - torch.arange(N_q)[:, None] - (N_k - N_q if corner is None else corner)
    return s.masked_fill(ahead > later, -torch.inf)


def safe(s):
    return torch.nan_to_num(s.softmax(-1))


def grouped(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return scores(q, k).softmax(-1) @ v


def of_einsum(q, k, v, causal=False, softmax_scale=None):
    s = torch.einsum("bnhd,bmhd->bhnm", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    return torch.einsum("bhnm,bmhd->bnhd", safe(hidden(s) if causal else s), v)


def with_a_sink(q, k, v, sinks=None, causal=True):
    s = hidden(scores(q, k)) if causal else scores(q, k)
    column = torch.full((1, len(s[0]), 1, 1), -1e30) if sinks is None else sinks.reshape(1, -1, 1, 1)
    return torch.cat([s, column.expand(*s.shape[:-1], 1)], -1).softmax(-1)[..., :-1] @ v


def of_packed(q, k, v, cu_seqlens_q, cu_seqlens_k):
    out = torch.zeros_like(q)
    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
        out[a:b] = grouped(*(x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])))[0].transpose(0, 1)
    return out


def of_pages(chosen):
    """Return attention over a paged cache, in which batch entry b reads the pages chosen(block_table, b)."""

    def paged(q, k_cache, v_cache, block_table, cache_seqlens):
        out = []
        for b, n in enumerate(cache_seqlens.tolist()):
            k, v = (x[chosen(block_table, b)].flatten(0, 1)[None, :n].transpose(1, 2) for x in (k_cache, v_cache))
            out.append(grouped(q[b : b + 1].transpose(1, 2), k, v).transpose(1, 2))
        return torch.cat(out)

    return paged


def of_alibi(sign):
    def biased(q, k, v, causal=False, alibi_slopes=None):
        s, ahead = scores(q, k), torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
        s = s if alibi_slopes is None else s + sign * alibi_slopes[:, None, None] * ahead.abs()
        return safe(hidden(s) if causal else s) @ v

    return biased


POSITIONS = """import torch
def numbered(q, k, v, causal=True):
    row, col = (torch.arange(x.shape[2], dtype=q.dtype) for x in (q, k))
    s = q @ k.mT * q.shape[-1] ** -0.5
    ahead = col - row[:, None] > k.shape[2] - q.shape[2]
    return torch.nan_to_num(s.masked_fill(causal & ahead, -torch.inf).softmax(-1)) @ v"""
exec(POSITIONS, module := {})  # a module without Triton kernels, whose interpreter does not take bf16
of_positions = module["numbered"]


class Dropped(torch.autograd.Function):
    """Attention with dropout. Its backward pass draws factors again, from the seed `again`, or uses none if None."""

    @staticmethod
    def forward(ctx, q, k, v, p, again):
        ctx.save_for_backward(q, k, v)
        ctx.how = p, again
        P = safe(scores(q, k))
        return P * Dropped.factors(P, p, 0) @ v

    @staticmethod
    def factors(P, p, seed):
        return (torch.rand(P.shape, generator=torch.Generator().manual_seed(seed)) >= p) / (1 - p)

    @staticmethod
    def backward(ctx, dO):
        (q, k, v), (p, again) = ctx.saved_tensors, ctx.how
        P, dP = safe(scores(q, k)), dO @ v.mT
        Z = Dropped.factors(P, p, again) if again is not None else torch.ones_like(P)
        dS = P * (Z * dP - (P * Z * dP).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return dS @ k, dS.mT @ q, (P * Z).mT @ dO, None, None


def of_dropout(again):
    return lambda q, k, v, dropout_p=0.0: Dropped.apply(q, k, v, dropout_p, again)


def of_splits(q, k, v):
    parts = [
        (scores(q, x).softmax(-1) @ y, scores(q, x).logsumexp(-1, keepdim=True))
        for x, y in zip(k.tensor_split(3, 2), v.tensor_split(3, 2), strict=True)
        if x.shape[2]
    ]
    top = torch.stack([L for _, L in parts]).amax(0)
    return sum((L - top).exp() * o for o, L in parts)


def of_tall_tiles(q, k, v, causal=False, B_r=32, B_c=16):
    """Return O with a mistake: within a tile, the mask counts keys from the tile's first key.

    A row block visits two tiles on its diagonal, so that the mistake shows.
    """
    (N_q, N_k), s = (q.shape[2], k.shape[2]), scores(q, k)
    row, col = torch.arange(N_q)[:, None], torch.arange(N_k)
    last = (row // B_r * B_r + B_r).clamp(max=N_q) - 1 + N_k - N_q
    shown = (col // B_c * B_c <= last) & (col % B_c <= row + N_k - N_q)
    return safe(s.masked_fill(~shown, -torch.inf) if causal else s) @ v


def of_whole_mask(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=False):
    """Return packed attention with a mistake: the causal mask counts from the pack's start, not the sequence's."""
    ends, s = (cu_seqlens_q, cu_seqlens_k), scores(q.transpose(0, 1), k.transpose(0, 1))
    i, j = (torch.bucketize(torch.arange(int(x[-1])), x, right=True) for x in ends)
    s = s.masked_fill(i[:, None] != j, -torch.inf)
    return (safe(hidden(s, corner=0) if causal else s) @ v.transpose(0, 1)).transpose(0, 1)


KEPT: dict = {}


def of_kept_mask(q, k, v, causal=False, window=(-1, -1)):
    """The first mask of each size is kept."""
    ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
    left, right = window[0] if window[0] >= 0 else 999, 0 if causal else window[1] if window[1] >= 0 else 999
    hides = KEPT.setdefault(ahead.shape, (ahead < -left) | (ahead > right)) if min(left, right) < 999 else False
    return safe(scores(q, k).masked_fill(torch.as_tensor(hides), -torch.inf)) @ v


OTHERS = {  # what somebody writes, and what is said of it
    "einsum": (of_einsum, []),
    "(O, P), True hides": (lambda q, k, v, attn_mask=None: (
        safe(scores(q, k) if attn_mask is None else scores(q, k).masked_fill(attn_mask, -torch.inf)) @ v, q),
        ["mask-inverted"]),
    "a sink as a column": (with_a_sink, []),
    "packed": (of_packed, []),
    "heads one by one": (lambda q, k, v: torch.stack([safe(scores(a, b)) @ c for a, b, c in zip(q, k, v, strict=True)])
        if q.ndim == 3 else q[0, 0, 0, 0, 0], []),
    "a window of w keys": (lambda q, k, v, window=None: safe(scores(q, k) if window is None else hidden(
        scores(q, k), window - 1).where(hidden(-scores(q, k).mT, window - 1).mT.isfinite(), -torch.inf)) @ v,
        ["window-counts-itself"]),
    "a bias before the scale": (lambda q, k, v, attn_bias=0.0: safe((q @ k.mT + attn_bias) / q.shape[-1] ** 0.5) @ v,
        ["bias-scaled"]),
    "dropout of scores": (lambda q, k, v, dropout_p=0.0: safe(F.dropout(scores(q, k), dropout_p)) @ v,
        ["dropout-normalised"]),
    "positions": (lambda q, k, v: safe(scores(q, k) + 0.1 * torch.arange(k.shape[2])) @ v, ["weights"]),
    "a softcap by default": (lambda q, k, v, softcap=30.0: safe(softcap * (scores(q.float(),
        k.float()) / softcap).tanh()).to(v.dtype) @ v, []),
    "pages": (of_pages(lambda table, b: table[b]), []),
    "pages in order": (of_pages(lambda table, b: torch.arange(table.shape[1]) + b * table.shape[1]),
        ["pages-in-order"]),
    "the last page is lost": (of_pages(lambda table, b: table[b, :-1] if len(table[b]) > 1 else table[b]),
        ["keys-rest-dropped"]),
    "ALiBi": (of_alibi(-1), []),
    "ALiBi upside down": (of_alibi(1), ["alibi-sign"]),
    "positions in q's dtype": (of_positions, ["positions-rounded"]),
    "dropout": (of_dropout(0), []),
    "dropout drawn anew": (of_dropout(1), ["dropout-other-mask"]),
    "dropout only forward": (of_dropout(None), ["dropout-only-forward"]),
    "splits": (of_splits, ["splits-undivided"]),
    "tall tiles": (of_tall_tiles, ["columns-in-visited"]),
    "a mask kept too long": (of_kept_mask, ["options-kept"]),
    "a mask of the whole pack": (of_whole_mask, ["packed-positions"]),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_attention_written_by_others_is_correct_or_its_mistakes_are_named(name):
    function, says = OTHERS[name]
    report = examine(function, quick=True, library="torch")
    silent = ("empty-mean", "corner-top-left")
    assert [x for x in names(report) if x not in silent] == says, [(x.name, x.where) for x in report.findings]


def test_our_kernels_are_right_in_the_interpreter():
    def ours(q, k, v, causal=False, window=None):
        return fa2_lab.attention(q, k, v, causal=causal, window=window, return_lse=True)

    report = fa2_lab.examine(ours, quick=True)
    assert report.is_right and set(report.parts) == {"O", "L", "dQ", "dK", "dV"}, names(report)
    assert all(x.startswith("values") for x, why in report.refused.items() if why), report.refused


# Triton, and GPUs -------------------------------------------------------------------------------------------------


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


def launched(wrong: int):
    def attention(q, k, v, causal=False):
        (b, h, N_q, d), N_k = q.shape, k.shape[2]
        if k.shape[1] != h or d & (d - 1):
            raise ValueError("as many heads of K as of Q, and a power of two for d")
        q, k, v = (x.contiguous() for x in (q, k, v))
        O = torch.empty(q.numel() + (16 * d if wrong == 3 else 0), dtype=q.dtype, device=q.device)
        kernel[triton.cdiv(N_q, 16), b * h](q, k, v, O, N_q, N_k, d**-0.5, causal, wrong, 16, d)
        return O[: q.numel()].reshape(q.shape)

    return attention


KERNELS = {0: [], 1: ["keys-padded"], 2: ["writes-past-end"], 3: ["writes-past-rows"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.parametrize("wrong", KERNELS)
def test_a_kernel_is_examined_in_the_interpreter(wrong):
    assert names(examine(launched(wrong), quick=True, device="cpu")) == KERNELS[wrong]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wrong", KERNELS)
def test_a_kernel_is_examined_on_a_gpu(wrong, dtype):
    report = examine(launched(wrong), dtype=dtype, device="cuda")
    assert report.subject.device == "cuda"
    if wrong == 3:  # which program writes last is not known
        assert not report.is_right
    elif wrong == 2:  # what one program writes past its end, another may write as well
        assert "writes-past-end" in names(report)
    else:
        assert names(report) == KERNELS[wrong]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_our_calls_are_right_on_a_gpu(dtype):
    def ours(q, k, v, causal=False, window=None, scale=None):
        return fa2_lab.attention(q, k, v, causal=causal, window=window, scale=scale, return_lse=True)

    report = examine(ours, dtype=dtype, device="cuda")
    assert report.is_right and set(report.parts) == {"O", "L", "dQ", "dK", "dV"}, names(report)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION"])
def test_torch_is_right_on_a_gpu(backend, dtype):
    if dtype == "float32" and backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        pytest.skip(f"{backend} takes 16 bits alone")
    try:
        report = examine(of_torch(getattr(SDPBackend, backend)), dtype=dtype, device="cuda")
    except NotExamined as refusal:
        pytest.skip(str(refusal))
    assert report.is_right, [(x.name, x.where, x.much, str(x.case)) for x in report.findings if x.is_wrong]


@pytest.mark.gpu
def test_a_function_that_refuses_the_cpu_is_asked_on_a_gpu():
    def on_a_gpu(q, k, v):
        if not q.is_cuda:
            raise ValueError("q: is not on a GPU")
        return dot_product(q, k, v)

    report = examine(on_a_gpu, quick=True)
    assert report.is_right and report.subject.device == "cuda"


# Memory, runs, and what is no function ----------------------------------------------------------------------------


def dot_product(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def as_if_contiguous(x):
    return x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())


def padded(x):
    return x.as_strided((*x.shape[:2], x.shape[2] + 1, x.shape[3]), x.stride(), x.storage_offset())


FAULTS = {
    "inputs-changed": lambda q, k, v: dot_product(q.mul_(1.0), k.add_(1), v),
    "not-deterministic": lambda q, k, v: dot_product(q, k, v) + 0.01 * torch.rand(1),
    "strides-ignored": lambda q, k, v: dot_product(*map(as_if_contiguous, (q, k, v))),
    "unwritten": lambda q, k, v: dot_product(q, k, v) + 0 * torch.empty(1),
    "reads-past-end": lambda q, k, v: dot_product(q, k, v) + 0 * padded(k)[:, :, -1:].sum(),
    "dropout-factor": None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_memory_is_named(fault):
    def function(q, k, v):
        return FAULTS[fault](q, k, v)

    def dropped(q, k, v, dropout_p=0.0):
        P = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
        return (P * (torch.rand(P.shape) >= dropout_p)) @ v

    assert fault in names(examine(function if FAULTS[fault] else dropped, quick=True, library="torch"))


def writes_past_o(Q, K, V, O):
    O[:] = 0
    O.base[-1] = 0


def writes_past_what_torch_gave(q, k, v):
    o = torch.empty_like(q)
    o.copy_(dot_product(q, k, v))
    o.as_strided((1,), (1,), o.storage_offset() + o.numel())[0] = 1.0
    return o


@pytest.mark.parametrize("function", [writes_past_o, writes_past_what_torch_gave])
def test_writes_past_the_end_of_an_output_are_found(function):
    found = names(examine(function, quick=True))
    assert "writes-past-end" in found and "unknown" not in found


def test_a_coarse_dtype_inside_is_the_only_thing_that_is_said():
    """What else is asked, about views and memory, is then held to that dtype."""

    def coarse(q, k, v):
        return dot_product(q.bfloat16(), k.bfloat16(), v.bfloat16()).to(q.dtype)

    def weights_in_half(q, k, v):
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1).half().float() @ v

    def scores_of_half(q, k, v):  # which overflow where scores are large
        return safe((q.half() @ k.half().mT).to(q.dtype) * q.shape[-1] ** -0.5) @ v

    for function in (coarse, scores_of_half):
        assert len(found := names(examine(function, quick=True, dtype="float32"))) == 1, found
    report = examine(coarse, quick=True, dtype="float32")
    assert names(report) == ["precision"] and "as in bf16" in report.findings[0].where
    assert names(examine(weights_in_half, quick=True, dtype="float32")) == ["weights-rounded"]


class Guarded(torch.autograd.Function):
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


def test_scores_in_16_bits_are_a_mistake_unless_the_weights_are_in_16_bits_as_well():
    def mixed(q, k, v):
        S = (q @ k.mT).float() * q.shape[-1] ** -0.5
        return (S.softmax(-1) @ v.float()).to(q.dtype)

    for function, says in ((mixed, ["scores-rounded"]), (dot_product, [])):
        assert names(examine(function, quick=True, library="torch")) == says, function


@pytest.mark.parametrize("is_kernel", [False, True])
def test_values_behind_the_lengths_and_the_corner_are_said(is_kernel):
    space = dict(torch=torch, safe=safe, scores=scores, hidden=hidden, kernel=kernel)
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


def test_a_backward_pass_that_forgets_a_side_of_the_window_is_named():
    def backward(q, k, v, dO, window=None):
        s = scores(q, k)
        left, right = (OPEN, OPEN) if window is None else window
        ahead = torch.arange(s.shape[-1]) - torch.arange(s.shape[-2])[:, None] - s.shape[-1] + s.shape[-2]
        s = s.masked_fill(ahead > right, -torch.inf)
        shown = s.masked_fill(ahead < -left, -torch.inf)
        O, P = safe(shown) @ v, (s - shown.logsumexp(-1, keepdim=True)).exp()  # not 0 left of the window, but large
        dS = P * (dO @ v.mT - (dO * O).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return dS @ k, dS.mT @ q, P.mT @ dO

    found = examine(backward, quick=True, library="torch").findings
    assert ["forward pass: the window has no left side" in str(x) for x in found] == [True], [str(x) for x in found]


def test_nan_of_rows_without_keys_is_a_remark_and_nan_in_gradients_alone_is_wrong():
    def of_softmax(q, k, v, causal=False):
        s = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1 + s.shape[-1] - s.shape[-2]).bool(), -torch.inf)
        return s.softmax(-1) @ v

    def guarded(q, k, v, causal=False):
        return Guarded.apply(q, k, v, causal)

    report = examine(of_softmax, quick=True)
    assert report.is_right and names(report) == ["empty-nan", "gradient-nan"]
    assert names(examine(guarded, quick=True)) == ["gradient-empty"]


def test_a_backward_pass_with_a_finite_mask_is_right_unless_its_own_o_is_0():
    def backward(q, k, v, dO, causal=False):
        s = scores(q, k)
        p = torch.softmax(hidden(s).nan_to_num(neginf=-1e30) if causal else s, -1)
        dP = dO @ v.mT
        dS = p * (dP - (p * dP).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return dS @ k, dS.mT @ q, p.mT @ dO

    def off(q, k, v, dO, causal=False):
        dQ, dK, dV = backward(q, k, v, dO, causal)
        return dQ, dK, dV + 0.1 * (causal and q.shape[2] > k.shape[2])

    def with_o(q, k, v, dO, causal=False):
        s = scores(q, k)
        return safe(hidden(s) if causal else s) @ v, *backward(q, k, v, dO, causal)

    report = examine(backward, quick=True, library="torch")
    assert report.is_right and names(report) == ["empty-mean"]
    for wrong in (off, with_o):
        assert names(examine(wrong, quick=True, library="torch")) == ["gradient-empty"]


def tiles_of(q, k, v, causal=False, B=16, cut=0, power=1, lift=0.0, off=0, roll=0):
    """Attention over tiles of keys, in which something is wrong that has no name."""
    q, M, i = q.roll(roll, 2), k.shape[2], torch.arange(q.shape[2])[:, None]
    m, l, o = torch.full(q.shape[:3], -torch.inf), torch.zeros(q.shape[:3]), torch.zeros_like(q)
    for j in (torch.arange(t, min(t + B, M) - cut * (M > t + 1)) for t in range(0, M, B)):
        s = scores(q, k[:, :, j]) + lift * j
        s = s.masked_fill(causal & (j > i + M - len(i) + off), -torch.inf)
        new = torch.maximum(m, s.amax(-1))
        p, alpha = torch.exp(s - safe_base(new)[..., None]), torch.exp(m - safe_base(new))
        m, l, o = new, alpha * l + p.sum(-1), (alpha**power)[..., None] * o + p @ v[:, :, j]
    return o / torch.where(l == 0, 1.0, l)[..., None]


def safe_base(m):
    return torch.where(m.isneginf(), 0.0, m)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(cut=1), "cannot see the last of each tile of 16 keys"),
        (dict(power=2), "In each tile of 16 keys, the weights are multiplied by exp(1 (m up to it))"),
        (dict(lift=0.1), "multiplied by exp(0.1 (j))"),
        (dict(off=2), "can also see the keys up to the key 2 after its own"),
        (dict(roll=1), "Row i has the weights of row i -1 (modulo N)"),
    ],
)
def test_weights_that_no_known_mistake_gives_are_described(wrong, says):
    report = examine(partial(tiles_of, **wrong), quick=True, library="torch")
    assert names(report)[0] == "weights" and set(names(report)) <= {"weights", "empty-mean", "unknown"}, names(report)
    assert says in str(report.findings[0]), str(report.findings[0])


@pytest.mark.parametrize(
    ("P", "says"),
    [
        (lambda S: (1.2 * S).softmax(-1), "The weights are the softmax of scores that are multiplied by 1.2"),
        (lambda S: S.exp() / (S.exp().sum(-1, keepdim=True) + 1), "exp(S − L) with log (exp(L) + 1) instead of L"),
        (lambda S: S.softmax(-1) / 2, "All weights are multiplied by 1/2"),
        (lambda S: S.softmax(-1) * (1 + (torch.arange(S.shape[-1]) < 16)), "counts 2 times the first 16 keys"),
    ],
)
def test_other_weights_of_the_same_scores_are_described(P, says):
    report = examine(lambda q, k, v: P(scores(q, k)) @ v, quick=True, library="torch")
    assert says in str(report.findings[0]), str(report.findings[0])


def test_a_call_that_overwrites_or_keeps_what_an_earlier_one_gave_is_named():
    kept = {}

    def reuses(q, k, v):
        return kept.setdefault(q.shape, torch.empty_like(q)).copy_(dot_product(q, k, v).detach())

    def keeps(q, k, v):
        k = kept.setdefault((k.shape, "k"), k.detach().clone())
        return dot_product(q, k, v)

    def changes(q, k, v, attn_mask=None):
        P = safe(scores(q, k) + (0 if attn_mask is None else attn_mask))
        if attn_mask is not None:
            attn_mask.zero_()
        return P @ v

    for function, name in ((reuses, "output-reused"), (keeps, "state-kept"), (changes, "inputs-changed")):
        assert name in names(examine(function, quick=True, library="torch")), name


STEPS = {
    "L": lambda x: x.S.logsumexp(-1, keepdim=True),
    "P": lambda x: torch.nan_to_num((x.S - x.L).exp()),
    "dP": lambda x: x.dO @ x.v.mT,
    "D": lambda x: (x.P * x.dP).sum(-1, keepdim=True),
    "dS": lambda x: x.P * (x.dP - x.D),
    "dQ": lambda x: x.tau * x.dS @ x.k,
    "dK": lambda x: x.tau * x.dS.mT @ x.q,
    "dV": lambda x: x.P.mT @ x.dO,
}
GRADIENT_MISTAKES = [  # a step, what is there instead, and what is said of it
    ("dQ", lambda x: x.tau**1.5 * x.dS @ x.k, "dQ is multiplied by √τ"),
    ("dS", lambda x: x.P * (x.dP - x.D) / 3, "dQ and dK are multiplied by 1/3"),
    ("dQ", lambda x: x.tau * x.dS @ x.v, "dQ sums the rows of V instead of those of K"),
    ("dK", lambda x: STEPS["dK"](x).sum(0, keepdim=True).expand_as(x.k), "dK of each batch entry sums the rows of Q"),
    ("dK", lambda x: x.tau * x.dS[:, :, 16:].mT @ x.q[:, :, 16:], "In dK, the first 16 rows cannot see any key"),
    (
        "dV",
        lambda x: (x.P * (1 + (torch.arange(x.k.shape[2]) < 16))).mT @ x.dO,
        "In dV, row i counts 2 times the first 16 keys",
    ),
    (
        "dV",
        lambda x: (x.S / x.tau).softmax(-1).nan_to_num().mT @ x.dO,
        "In dV, the weights are the softmax of scores that",
    ),
    ("dV", lambda x: x.P[:, :1].expand_as(x.P).mT @ x.dO, "In dV, head i has the weights of head 0"),
    ("dP", lambda x: x.dO @ x.v.roll(1, 2).mT, "dS is P ∘ (dP of the key before − D)"),
    ("dV", lambda x: x.P.mT @ x.dO.clamp(min=0), "dV is not proportional to dO"),
    ("dQ", lambda x: x.tau * STEPS["dQ"](x) * 0.5, "dQ is multiplied by 1/2 · τ"),
    (
        "L",
        lambda x: x.S[..., :16].logsumexp(-1, keepdim=True),
        "the weights are exp(S − L) with L of the first 16 keys alone",
    ),
    (
        "P",
        lambda x: STEPS["P"](x) * (torch.arange(x.k.shape[2]) > 0),
        "In the backward pass, row i cannot see the first key",
    ),
    ("D", lambda x: STEPS["D"](x).roll(-1, 2), "dS is P ∘ (dP − D of the next row)"),
    ("D", lambda x: STEPS["D"](x) * x.tau, "dS is P ∘ (dP − τ · D)"),
    ("dS", lambda x: STEPS["dS"](x).clamp(-0.05, 0.05), "dS is cut off at ±0.05"),
    ("dO", lambda x: torch.ones_like(x.dO), "do not depend on dO"),
    ("dS", lambda x: STEPS["dS"](x).half().float(), "dQ and dK are computed from a dS that is rounded to 11 bits"),
]


@pytest.mark.parametrize(("step", "wrong", "says"), GRADIENT_MISTAKES, ids=[x[2] for x in GRADIENT_MISTAKES])
def test_gradients_that_no_known_mistake_gives_are_described(step, wrong, says):
    def backward(q, k, v, dO, causal=False):
        x = SimpleNamespace(q=q, k=k, v=v, dO=dO, tau=q.shape[-1] ** -0.5)
        x.S = hidden(scores(q, k)) if causal else scores(q, k)
        for name, how in ({"dO": lambda x: x.dO} | STEPS | {step: wrong}).items():
            setattr(x, name, how(x))
        return x.dQ, x.dK, x.dV

    report = examine(backward, quick=True, library="torch")
    assert names(report)[0] == "gradients", names(report)
    assert says in str(report.findings[0]), str(report.findings[0])


@pytest.mark.parametrize("most", (32, 4096), ids=("refuses a large d", "is NaN"))
def test_wrong_gradients_that_cannot_be_read_out_are_unknown(most):
    """They are NaN, or the function refuses the large head dimension with which they would be read."""

    def backward(q, k, v, dO):
        if q.shape[3] > most:
            raise ValueError("head dimension")
        P, dP = safe(scores(q, k)), dO @ v.mT
        dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dQ = dS @ k
        return dQ.square() + 1 if most == 32 else dQ * torch.nan, dS.mT @ q, P.mT @ dO

    report = examine(backward, quick=True, library="torch")
    assert "unknown" in names(report) and not report.is_right


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda S, L: L - np.log(S.shape[-1]), "L is L − log N_k"),
        (lambda S, L: S.amax(-1) + torch.log1p((S - S.amax(-1, keepdim=True)).exp().sum(-1)), "L is m + log (1 + l)"),
        (lambda S, L: S[..., 1:].logsumexp(-1), "L is L without the first key"),
        (lambda S, L: L.roll(1, 2), "L is that of the row before"),
        (lambda S, L: L.half().float(), "L is rounded to 11 bits"),
    ],
)
def test_an_l_that_no_known_mistake_gives_is_described(wrong, says):
    def function(q, k, v):
        S = scores(q, k)
        return safe(S) @ v, wrong(S, S.logsumexp(-1))

    report = examine(function, quick=True, library="torch")
    assert names(report) == ["L-other"] and says in str(report.findings[0]), [str(x) for x in report.findings]


def test_a_backward_pass_with_other_options_than_the_forward_pass_is_named():
    def backward(q, k, v, dO, causal=False, key_lengths=None):
        S = hidden(scores(q, k)) if causal else scores(q, k)
        P, dP = safe(S), dO @ v.mT
        dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return dS @ k, dS.mT @ q, P.mT @ dO

    report = examine(backward, quick=True, library="torch")
    assert "wrong forward pass: the lengths of the keys are ignored" in str(report.findings[0]), report.findings[0]


def test_a_padding_mask_may_mark_padding_or_what_is_none():
    def masked(q, k, v, key_padding_mask=None):
        s = scores(q, k)
        return safe(s if key_padding_mask is None else s.masked_fill(~key_padding_mask[:, None, None], -torch.inf)) @ v

    report = examine(masked, quick=True, library="torch")
    assert report.is_right and "a key that takes part" in report.how
    report = examine(lambda q, k, v, key_padding_mask=None: masked(q, k, v, None if key_padding_mask is None else
        ~key_padding_mask), quick=True, library="torch")  # fmt: skip
    assert report.is_right and "a key that takes part" not in report.how


def test_a_mask_of_keys_is_a_padding_mask():
    def masked(q, k, v, attention_mask=None):
        s = scores(q, k)
        return safe(s if attention_mask is None else s.masked_fill(~attention_mask[:, None, None], -torch.inf)) @ v

    report = examine(masked, quick=True, library="torch")
    assert report.is_right and "a key that takes part" in report.how and "key_lengths" not in report.refused


def test_the_head_dimension_of_v_is_not_that_of_the_scale():
    report = examine(lambda q, k, v: safe(scores(q, k, v.shape[-1] ** -0.5)) @ v, library="torch")
    assert names(report) == ["scale-values"]


def test_a_sequence_without_keys_must_be_written():
    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, make=torch.empty):
        O, (rows, keys) = make(q.shape), (x.tolist() for x in (cu_seqlens_q, cu_seqlens_k))
        for a, b, c, d in zip(rows, rows[1:], keys, keys[1:], strict=False):
            if d > c:
                x, y, z = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
                O[a:b] = (safe(scores(x, y)) @ z).transpose(0, 1)
        return O

    assert names(examine(packed, quick=True, library="torch")) == ["unwritten"]
    zeros = partial(packed, make=torch.zeros)
    assert names(examine(zeros, quick=True, library="torch")) == []


def test_a_slow_function_is_asked_one_case_of_each_group_first(monkeypatch):
    def slow(q, k, v, is_causal=False):
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    monkeypatch.setitem(SECONDS, True, 1.0)
    report = examine(slow, quick=True, library="torch")
    assert names(report) == ["corner-top-left"] and UNASKED in report.refused


def test_one_query_beside_a_cache_is_examined():
    def decode(q, k_cache, v_cache, cache_seqlens, sinks=None, parts=1):
        s = torch.einsum("bhd,bnhd->bhn", q, k_cache) * q.shape[-1] ** -0.5
        s = s.masked_fill(torch.arange(s.shape[-1]) >= cache_seqlens[:, None, None], -torch.inf)
        if sinks is not None:
            s = torch.cat([s, (sinks + np.log(parts)).expand(len(s), -1)[..., None]], -1)
        return torch.einsum("bhn,bnhd->bhd", safe(s)[..., : k_cache.shape[1]], v_cache)

    assert names(examine(decode, quick=True, library="torch")) == ["length-nan"]
    assert "sinks-per-split" in names(examine(partial(decode, parts=4), quick=True, library="torch"))


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


def test_l_may_come_first_and_a_mask_may_be_boolean_or_additive():
    def l_first(q, k, v):
        s = q @ k.mT * q.shape[-1] ** -0.5
        return s.logsumexp(-1), s.softmax(-1) @ v

    def masked(q, k, v, attn_mask):
        return torch.softmax((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(attn_mask == 0, -1e9), -1) @ v

    def biased(q, k, v, attn_mask):
        return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + attn_mask, -1) @ v

    assert examine(l_first, quick=True).parts[:2] == ["O", "L"]
    for function, convention in ((masked, "mask-boolean"), (biased, "mask-added")):
        report = examine(function, quick=True)
        assert report.is_right and convention in names(report)


def test_jax_is_asked_in_its_own_arrays():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    with jax.default_matmul_precision("highest"):  # on a GPU, JAX multiplies in TF32 otherwise, and is told so
        report = examine(jax.nn.dot_product_attention, quick=not torch.cuda.is_available())  # JAX compiles for long
    assert report.is_right and report.how.startswith("jax, float32, (batch, N, heads, d)")
    assert "corner-top-left" in names(report)


def test_arguments_are_found_however_they_are_taken():
    """By place alone, heads in the last axis beside weights, a required scale, a threshold that is called tau."""

    def by_place(q, k, v, /):
        return safe(scores(q, k)) @ v

    def of_model(q, k, v, num_heads):
        q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        weights = safe(scores(q, k))
        return (weights @ v).transpose(1, 2).flatten(2), weights

    def scaled(q, k, v, scale):
        return safe(scores(q, k, scale)) @ v

    def lazy(q, k, v, tau=8.0):
        return safe(scores(q, k)) @ v

    for function in (by_place, of_model, scaled, lazy):
        report = examine(function, quick=True, library="torch")
        assert report.is_right and report.parts[0] == "O", (function, names(report))


def test_a_backward_that_raises_is_said_and_an_alarm_of_the_caller_stays():
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return safe(scores(q, k)) @ v

        @staticmethod
        def backward(ctx, do):
            raise RuntimeError("not written")

    def raises(q, k, v):
        return Raises.apply(q, k, v)

    before = signal.signal(signal.SIGALRM, own := lambda *_: None)
    signal.alarm(1000)
    try:
        report = examine(raises, quick=True)
        assert signal.getsignal(signal.SIGALRM) is own and 500 < signal.alarm(0) <= 1000
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "not written" in report.refused["its gradients"] and report.parts == ["O"]


def test_an_option_kept_from_an_earlier_call_is_named():
    kept = {}

    def caches(q, k, v, window=None):
        s = scores(q, k)
        if window is not None:
            s = s + kept.setdefault(s.shape, hidden(torch.zeros_like(s), window).where(
                hidden(torch.zeros_like(s), window).mT.isfinite(), -torch.inf))  # fmt: skip
        return safe(s) @ v

    assert "options-kept" in names(examine(caches, quick=True, library="torch"))


WRONG_CALLS = {
    "takes one": ("def f(x): return x", "takes 1 arguments"),
    "never returns": ("def f(q, k, v):\n    while True: pass", "did not return"),
    "returns nothing": ("def f(q, k, v): pass", "it returns nothing"),
    "raises": ("def f(q, k, v): raise KeyError('no such head')", "KeyError"),
    "returns another shape": ("def f(q, k, v): return q[..., :1]", "returns shape"),
    "needs more": ("def f(q, k, v, blocks): return q", "--set blocks=…"),
    "dies": ("import os\ndef f(q, k, v): os._exit(7)", "ended with exit code 7 when it was asked probe"),
    "does not import": ("import nothing_of_that_name", "does not import"),
    "no function": ("f = 3", "is not a function"),
    "none of that name": ("def g(q, k, v): return q", "it has g"),
}


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_what_cannot_be_examined_is_one_sentence(what, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fa2_lab.examine.subject.LIMIT", 5)
    source, says = WRONG_CALLS[what]
    (tmp_path / f"m_{what.replace(' ', '_')}.py").write_text(source)
    assert main(["examine", f"{tmp_path}/m_{what.replace(' ', '_')}.py:f"]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_a_function_on_a_gpu_that_is_already_in_use_is_examined(tmp_path, monkeypatch, capsys):
    """A forked process cannot use CUDA if its parent already has, and it inherits what is patched here."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    source = "import torch\ndef f(q, k, v):\n    assert not torch.cuda.is_initialized(), 'forked'\n"
    (tmp_path / "on_gpu.py").write_text(source + "    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v")
    assert main(["examine", f"{tmp_path}/on_gpu.py:f", "--quick"]) == 0, capsys.readouterr()


def test_the_printed_program_runs_and_shows_the_mistake(tmp_path, capsys):
    source = "import numpy as np\ndef f(q, k, v):\n    s = q @ np.swapaxes(k, -1, -2)\n"
    (tmp_path / "bare.py").write_text(source + "    p = np.exp(s)\n    return p @ v / p.sum(-1, keepdims=True)\n")
    assert main(["examine", f"{tmp_path}/bare.py:f", "--quick"]) == 1
    page = capsys.readouterr().out
    assert "[scale-missing]" in page and "[maximum-missing]" in page
    lines = page.split("\n\n    import numpy")[1].split("\n\nWRONG")[0]
    program = "import numpy" + "\n".join(line[4:] if line.startswith("    ") else line for line in lines.split("\n"))
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    printed, comment = ran.stdout.strip(), program.split("#")[1].split(";")[0].strip()
    assert np.allclose(eval(printed.replace("  ", ",").replace(" ", ",").replace("[,", "[").replace(",,", ",")), eval(
        ",".join(comment.split()).replace("[,", "[")), atol=1e-4), ran.stderr  # fmt: skip


def test_the_catalogue_points_to_errata_that_exist_and_importing_takes_numpy_alone():
    assert len(KNOBS) >= 45
    for mistake in CATALOGUE.values():
        for word in mistake.reference.replace(";", " ").split():
            assert not word.startswith(("fa1-", "fa2-", "article-", "notes-", "bilingual-")) or word in ERRATA, mistake
    check = "import sys, fa2_lab.examine; assert not {'torch', 'triton', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
