"""examine/: every known mistake is told from every other and named; what is right is not called wrong."""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from examined import enough_time, grouped_attention, mask_later, names, scores, sdpa_with_backend, softmax  # noqa: F401 — a fixture
from torch.nn.attention import SDPBackend

import fa2_lab
from fa2_lab.errata import ERRATA
from fa2_lab.examine import NotExamined, examine
from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import OPEN, AttentionCase, all_cases
from fa2_lab.examine.catalogue import CATALOGUE
from fa2_lab.examine.match import Answer, explain
from fa2_lab.reference import heads

EDITS = {name: m for name, m in CATALOGUE.items() if m.edits}


OUTPUTS = {"conventions": ("O",), "O": ("O",), "L": ("L",), "gradients": ("dQ", "dK", "dV")}


CASES = [(case, {}) for case in all_cases(quick=True)]  # with the variants of each, which all answers share


def answers_with(name: str, B: int = 16) -> list[Answer]:
    """Return the answers of a function with one mistake, or with none if name is "", with the noise of float32."""
    rng, part = np.random.default_rng(0), CATALOGUE[name].part if name else "gradients"
    B = {"B": B, "B bits": B, "sides": (64, 16), "parts": (4, 1)}.get(CATALOGUE[name].depends_on, 0) if name else 0
    answers = []
    for case, variants in CASES:
        gradients = case.gradients and part in ("conventions", "gradients")
        outputs = attention(case, [name] if name else [], B, gradients=gradients)
        results = {x: y for x, y in outputs.items() if case.gradients or x in "OL"}
        noisy = {x: y * (1 + 1e-7 * rng.uniform(-1, 1, y.shape)) for x, y in results.items()}
        answers.append(Answer(case, noisy, variants=variants))
    return answers


@pytest.mark.parametrize("part", ["O", "L", "gradients"])
def test_no_two_mistakes_give_the_same_numbers_on_all_cases(part):
    """Each case divides the groups of mistakes that gave the same numbers so far, until every group has one name."""
    weights = np.random.default_rng(1).standard_normal(10**5)
    sizes = {"B": (4, 16, 64), "B bits": (16,), "sides": ((64, 16),), "parts": ((4, 1), (3, 0), (OPEN, 16))}
    variants = [("", 0)] + [
        (name, B)
        for name, m in EDITS.items()
        for B in sizes.get(m.depends_on, (0,))
        if m.part == part or (part == "O" and m.part == "conventions")
    ]

    def numbers(case, name, B):
        outputs = attention(case, [name] if name else [], B, gradients=part == "gradients")
        flat = [np.nan_to_num(outputs[x].ravel(), nan=7.0, posinf=9.0, neginf=-9.0) for x in OUTPUTS[part]]
        return tuple(float(np.round(np.tanh(y / 9) @ weights[: y.size], 6)) for y in flat)

    groups = [variants]
    for case in [x for x in all_cases() if x.q.shape[2] < 300]:
        divided = {}
        for n, group in enumerate(groups):
            for name, B in group:
                divided.setdefault((n, numbers(case, name, B)), []).append((name, B))
        groups = [group for group in divided.values() if len({name for name, _ in group}) > 1]
    # In tiles of 4, each of these pairs is alike, because its mistakes differ only if all keys are in a single tile.
    small = ["keys-rest-dropped keys-tail-dropped", "keys-last-dropped keys-last-tile-dropped"]
    assert [x for x in groups if {B for _, B in x} != {4} or " ".join(sorted(name for name, _ in x)) not in small] == []


@pytest.mark.parametrize("part", OUTPUTS)
def test_each_mistake_is_named(part):
    assert explain(answers_with("")) == []
    for name in [x for x, m in EDITS.items() if m.part == part and x != "L-rounded"]:  # which only 16 bits show
        findings = explain(answers_with(name), tiles=(4, 16, 64))
        assert [x.name for x in findings] == [name], f"{name}: {[(x.name, x.where, x.others) for x in findings]}"


def mistaken(*names: str):
    """Return a forward pass with these mistakes and most options, or if they are in gradients, a backward pass."""

    def case_of(q, k, v, dO, **options):
        return AttentionCase("", q, k, v, dO, {x: y for x, y in options.items() if y is not None and y is not False})

    def forward(q, k, v, causal=False, scale=None, softcap=None, window=None):
        case = case_of(q, k, v, 0 * q, causal=causal, scale=scale, softcap=softcap, window=window)
        found = attention(case, names, B=16)
        return found["O"], found["L"]

    def backward(q, k, v, dO, causal=False):
        found = attention(case_of(q, k, v, dO, causal=causal), names, B=16, gradients=True)
        return found["dQ"], found["dK"], found["dV"]

    return backward if names and CATALOGUE[names[0]].part == "gradients" else forward


MISTAKES = "o-not-rescaled", "window-left-long", "L-base-2", "D-missing"


@pytest.mark.parametrize("wrong", [*MISTAKES, "scale-missing causal-strict"])
def test_a_function_with_a_mistake_is_examined(wrong):
    report = examine(mistaken(*wrong.split()), quick=True)
    assert names(report) == wrong.split() and not report.is_right


class Planted(torch.autograd.Function):
    """An autograd function with the right O and with one mistake in its gradients."""

    @staticmethod
    def forward(ctx, q, k, v, causal, name):
        ctx.save_for_backward(q, k, v)
        ctx.backward_of = partial(mistaken(name), causal=causal)
        return torch.tensor(mistaken()(*(x.double().numpy() for x in (q, k, v)), causal=causal)[0], dtype=q.dtype)

    @staticmethod
    def backward(ctx, dO):
        gradients = ctx.backward_of(*(x.double().numpy() for x in (*ctx.saved_tensors, dO)))
        return *(torch.tensor(x, dtype=dO.dtype) for x in gradients), None, None


def test_gradients_that_torch_takes_are_examined():
    report = examine(lambda q, k, v, is_causal=False: Planted.apply(q, k, v, is_causal, "group-last"), quick=True)
    assert names(report) == ["group-last"] and not report.is_right


def test_a_scale_of_0_may_give_nan():
    def as_flash(query, key, value, scale=None):  # PyTorch's kernels multiply masked scores of −∞ by it
        O = F.scaled_dot_product_attention(query, key, value, scale=scale)
        return O * torch.nan if scale == 0 else O

    report = examine(as_flash, quick=True)
    assert report.is_right and "scale-zero-nan" in names(report)


def reference(q, k, v, causal=False, window=None, softcap=None, sinks=None, scale=None, key_lengths=None):
    options = dict(causal=causal, window=window, softcap=softcap, sinks=sinks, scale=scale, key_lengths=key_lengths)
    return heads.forward(q, k, v, stage="fa2", B_r=16, B_c=8, **options)


def tiled_attention(q, k, v, causal=False, sm_scale=None, BLOCK=16):
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


RIGHT_FUNCTIONS = {
    "a layer": (Layer(16), dict(quick=True)),
    "torch's definition in fp16": (sdpa_with_backend(SDPBackend.MATH), dict(dtype="float16")),
    "torch's definition in bf16": (sdpa_with_backend(SDPBackend.MATH), dict(dtype="bfloat16")),
    "torch's call": (F.scaled_dot_product_attention, {}),
    "our reference": (reference, dict(library="numpy")),
    "a loop over tiles": (tiled_attention, {}),
    "the right knobs": (mistaken(), {}),
}


@pytest.mark.parametrize("name", RIGHT_FUNCTIONS)
def test_correct_functions_have_no_findings(name):
    function, options = RIGHT_FUNCTIONS[name]
    report = examine(function, **options)
    assert report.is_right, names(report)
    assert ("corner-top-left" in names(report)) == ("torch" in name)
    assert ("(batch, N, heads, d)" in report.how) == ("loop" in name)


def einsum_attention(q, k, v, causal=False, softmax_scale=None):
    s = torch.einsum("bnhd,bmhd->bhnm", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    return torch.einsum("bhnm,bmhd->bnhd", softmax(mask_later(s) if causal else s), v)


def sink_attention(q, k, v, sinks=None, causal=True):
    s = mask_later(scores(q, k)) if causal else scores(q, k)
    column = torch.full((1, len(s[0]), 1, 1), -1e30) if sinks is None else sinks.reshape(1, -1, 1, 1)
    return torch.cat([s, column.expand(*s.shape[:-1], 1)], -1).softmax(-1)[..., :-1] @ v


def packed_attention(q, k, v, cu_seqlens_q, cu_seqlens_k):
    out = torch.zeros_like(q)
    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
        out[a:b] = grouped_attention(*(x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d])))[0].transpose(0, 1)
    return out


def paged_attention(pages_of):
    """Return attention over a paged cache, in which batch entry b reads the pages chosen(block_table, b)."""

    def paged(q, k_cache, v_cache, block_table, cache_seqlens):
        out = []
        for b, n in enumerate(cache_seqlens.tolist()):
            k, v = (x[pages_of(block_table, b)].flatten(0, 1)[None, :n].transpose(1, 2) for x in (k_cache, v_cache))
            out.append(grouped_attention(q[b : b + 1].transpose(1, 2), k, v).transpose(1, 2))
        return torch.cat(out)

    return paged


def alibi_attention(sign):
    def biased(q, k, v, causal=False, alibi_slopes=None):
        s, ahead = scores(q, k), torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
        s = s if alibi_slopes is None else s + sign * alibi_slopes[:, None, None] * ahead.abs()
        return softmax(mask_later(s) if causal else s) @ v

    return biased


POSITIONS_SOURCE = """import torch
def numbered(q, k, v, causal=True):
    row, col = (torch.arange(x.shape[2], dtype=q.dtype) for x in (q, k))
    s = q @ k.mT * q.shape[-1] ** -0.5
    ahead = col - row[:, None] > k.shape[2] - q.shape[2]
    return torch.nan_to_num(s.masked_fill(causal & ahead, -torch.inf).softmax(-1)) @ v"""


exec(POSITIONS_SOURCE, module := {})  # a module without Triton kernels, whose interpreter does not take bf16


position_attention = module["numbered"]


class Dropout(torch.autograd.Function):
    """Attention with dropout. Its backward pass draws factors again, from the seed `again`, or uses none if None."""

    @staticmethod
    def forward(ctx, q, k, v, p, again):
        ctx.save_for_backward(q, k, v)
        ctx.how = p, again
        P = softmax(scores(q, k))
        return P * Dropout.factors(P, p, 0) @ v

    @staticmethod
    def factors(P, p, seed):
        return (torch.rand(P.shape, generator=torch.Generator().manual_seed(seed)) >= p) / (1 - p)

    @staticmethod
    def backward(ctx, dO):
        (q, k, v), (p, again) = ctx.saved_tensors, ctx.how
        P, dP = softmax(scores(q, k)), dO @ v.mT
        Z = Dropout.factors(P, p, again) if again is not None else torch.ones_like(P)
        dS = P * (Z * dP - (P * Z * dP).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return dS @ k, dS.mT @ q, (P * Z).mT @ dO, None, None


def dropout_attention(again):
    return lambda q, k, v, dropout_p=0.0: Dropout.apply(q, k, v, dropout_p, again)


def split_keys(q, k, v):
    parts = [
        (scores(q, x).softmax(-1) @ y, scores(q, x).logsumexp(-1, keepdim=True))
        for x, y in zip(k.tensor_split(3, 2), v.tensor_split(3, 2), strict=True)
        if x.shape[2]
    ]
    top = torch.stack([L for _, L in parts]).amax(0)
    return sum((L - top).exp() * o for o, L in parts)


def tall_tiles(q, k, v, causal=False, B_r=32, B_c=16):
    """Return O with a mistake: within a tile, the mask counts keys from the tile's first key.

    A row block visits two tiles on its diagonal, so that the mistake shows.
    """
    (N_q, N_k), s = (q.shape[2], k.shape[2]), scores(q, k)
    row, col = torch.arange(N_q)[:, None], torch.arange(N_k)
    last = (row // B_r * B_r + B_r).clamp(max=N_q) - 1 + N_k - N_q
    shown = (col // B_c * B_c <= last) & (col % B_c <= row + N_k - N_q)
    return softmax(s.masked_fill(~shown, -torch.inf) if causal else s) @ v


def whole_pack_mask(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=False):
    """Return packed attention with a mistake: the causal mask counts from the pack's start, not the sequence's."""
    ends, s = (cu_seqlens_q, cu_seqlens_k), scores(q.transpose(0, 1), k.transpose(0, 1))
    i, j = (torch.bucketize(torch.arange(int(x[-1])), x, right=True) for x in ends)
    s = s.masked_fill(i[:, None] != j, -torch.inf)
    return (softmax(mask_later(s, corner=0) if causal else s) @ v.transpose(0, 1)).transpose(0, 1)


def in_input_dtype(q, k, v):
    """Compute all in the inputs' dtype, which is no mistake in 16 bits."""
    s = scores(q, k)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return p @ v / p.sum(-1, keepdim=True)


def square_attention(q, k, v):
    s = scores(q, k)
    return softmax(s.masked_fill(torch.arange(k.shape[2]) >= q.shape[2], -torch.inf)) @ v


KEPT_MASKS: dict = {}


def kept_mask(q, k, v, causal=False, window=(-1, -1)):
    """The first mask of each size is kept."""
    ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
    left, right = window[0] if window[0] >= 0 else 999, 0 if causal else window[1] if window[1] >= 0 else 999
    hides = KEPT_MASKS.setdefault(ahead.shape, (ahead < -left) | (ahead > right)) if min(left, right) < 999 else False
    return softmax(scores(q, k).masked_fill(torch.as_tensor(hides), -torch.inf)) @ v


OTHER_FUNCTIONS = {  # what somebody writes, and what is said of it
    "einsum": (einsum_attention, []),
    "(O, P), True hides": (lambda q, k, v, attn_mask=None: (
        softmax(scores(q, k) if attn_mask is None else scores(q, k).masked_fill(attn_mask, -torch.inf)) @ v, q),
        ["mask-inverted"]),
    "a sink as a column": (sink_attention, []),
    "packed": (packed_attention, []),
    "heads one by one": (lambda q, k, v: torch.stack([
        softmax(scores(a, b)) @ c for a, b, c in zip(q, k, v, strict=True)]) if q.ndim == 3 else q[0, 0, 0, 0, 0], []),
    "a window of w keys": (lambda q, k, v, window=None: softmax(scores(q, k) if window is None else mask_later(
        scores(q, k), window - 1).where(mask_later(-scores(q, k).mT, window - 1).mT.isfinite(), -torch.inf)) @ v,
        ["window-counts-itself"]),
    "a bias before the scale": (lambda q, k, v, attn_bias=0.0: softmax((q @ k.mT + attn_bias) / q.shape[-1] ** 0.5) @ v,
        ["bias-scaled"]),
    "dropout of scores": (lambda q, k, v, dropout_p=0.0: softmax(F.dropout(scores(q, k), dropout_p)) @ v,
        ["dropout-normalised"]),
    "positions": (lambda q, k, v: softmax(scores(q, k) + 0.1 * torch.arange(k.shape[2])) @ v, ["weights"]),
    "a softcap by default": (lambda q, k, v, softcap=30.0: softmax(softcap * (scores(q.float(),
        k.float()) / softcap).tanh()).to(v.dtype) @ v, []),
    "pages": (paged_attention(lambda table, b: table[b]), []),
    "pages in order": (paged_attention(lambda table, b: torch.arange(table.shape[1]) + b * table.shape[1]),
        ["pages-in-order"]),
    "the last page is lost": (paged_attention(lambda table, b: table[b, :-1] if len(table[b]) > 1 else table[b]),
        ["keys-last-dropped"]),
    "ALiBi": (alibi_attention(-1), []),
    "ALiBi upside down": (alibi_attention(1), ["alibi-sign"]),
    "positions in q's dtype": (position_attention, ["positions-rounded"]),
    "dropout": (dropout_attention(0), []),
    "dropout drawn anew": (dropout_attention(1), ["dropout-other-mask"]),
    "dropout only forward": (dropout_attention(None), ["dropout-only-forward"]),
    "all in the dtype of q": (in_input_dtype, []),
    "as many keys as rows": (square_attention, ["weights"]),
    "splits": (split_keys, ["splits-undivided"]),
    "tall tiles": (tall_tiles, ["columns-in-visited"]),
    "a mask kept too long": (kept_mask, ["options-kept"]),
    "a mask of the whole pack": (whole_pack_mask, ["packed-positions"]),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_FUNCTIONS)
def test_attention_written_by_others_is_correct_or_its_mistakes_are_named(name):
    function, says = OTHER_FUNCTIONS[name]
    report = examine(function, quick=True, library="torch")
    silent = ("empty-mean", "corner-top-left")
    assert [x for x in names(report) if x not in silent] == says, [(x.name, x.where) for x in report.findings]


def test_our_kernels_are_right_in_the_interpreter():
    def ours(q, k, v, causal=False, window=None):
        return fa2_lab.attention(q, k, v, causal=causal, window=window, return_lse=True)

    report = fa2_lab.examine(ours, quick=True)
    assert report.is_right and set(report.parts) == {"O", "L", "dQ", "dK", "dV"}, names(report)
    assert all(x.startswith("values") for x, why in report.refused.items() if why), report.refused


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
        report = examine(sdpa_with_backend(getattr(SDPBackend, backend)), dtype=dtype, device="cuda")
    except NotExamined as refusal:
        pytest.skip(str(refusal))
    assert report.is_right, [(x.name, x.where, x.much, str(x.case)) for x in report.findings if x.is_wrong]


def test_the_head_dimension_of_v_is_not_that_of_the_scale():
    report = examine(lambda q, k, v: softmax(scores(q, k, v.shape[-1] ** -0.5)) @ v, library="torch")
    assert names(report) == ["scale-values"]


def test_the_catalogue_points_to_errata_that_exist_and_importing_takes_numpy_alone():
    assert len(EDITS) >= 45
    for mistake in CATALOGUE.values():
        for word in mistake.reference.replace(";", " ").split():
            assert not word.startswith(("fa1-", "fa2-", "article-", "notes-", "bilingual-")) or word in ERRATA, mistake
    check = "import sys, fa2_lab.examine; assert not {'torch', 'triton', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
