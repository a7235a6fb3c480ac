"""examine/ calls functions as their signatures expect: layouts, libraries, masks, lengths and outputs."""

import time
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from examined import enough_time, grouped_attention, mask_later, names, plain_attention, scores, softmax  # noqa: F401 — a fixture

from fa2_lab.examine import SECONDS, UNASKED, UNCHECKED, NotExamined, diagnose, examine, guards
from fa2_lab.examine.subject import Subject


@pytest.mark.gpu
def test_a_function_that_refuses_the_cpu_is_asked_on_a_gpu():
    def on_a_gpu(q, k, v):
        if not q.is_cuda:
            raise ValueError("q: is not on a GPU")
        return plain_attention(q, k, v)

    report = examine(on_a_gpu, quick=True)
    assert report.is_right and report.subject.device == "cuda"


def test_a_padding_mask_may_mark_padding_or_what_is_none():
    def masked(q, k, v, key_padding_mask=None):
        s = scores(q, k)
        if key_padding_mask is not None:
            s = s.masked_fill(~key_padding_mask[:, None, None], -torch.inf)
        return softmax(s) @ v

    report = examine(masked, quick=True, library="torch")
    assert report.is_right and "a key that takes part" in report.how
    report = examine(lambda q, k, v, key_padding_mask=None: masked(q, k, v, None if key_padding_mask is None else
        ~key_padding_mask), quick=True, library="torch")  # fmt: skip
    assert report.is_right and "a key that takes part" not in report.how


def test_a_mask_of_keys_is_a_padding_mask():
    def masked(q, k, v, attention_mask=None):
        s = scores(q, k)
        return softmax(s if attention_mask is None else s.masked_fill(~attention_mask[:, None, None], -torch.inf)) @ v

    report = examine(masked, quick=True, library="torch")
    assert report.is_right and "a key that takes part" in report.how and "key_lengths" not in report.refused


def test_a_slow_function_is_asked_one_case_of_each_group_first(monkeypatch):
    clock = 0.0

    def slow(q, k, v, is_causal=False):
        nonlocal clock
        clock += 0.05
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    monkeypatch.setitem(SECONDS, True, 1.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    report = examine(slow, quick=True, library="torch")
    assert names(report) == ["corner-top-left"] and UNASKED in report.refused


def test_a_slow_function_is_not_called_after_the_time_limit(monkeypatch):
    """Waiting counts as time, and so do the checks and the descriptions of an unknown mistake."""
    clock, calls = 0.0, []

    def slow(q, k, v, causal=False, factor=1.0):
        nonlocal clock
        clock += 1.0
        calls.append(clock)
        s = factor * scores(q, k)
        return softmax(mask_later(s) if causal else s) @ v

    monkeypatch.setattr(time, "monotonic", lambda: clock)
    for factor in (1.0, 1.03):
        limits = {}
        for seconds in (1, 10, 600):
            monkeypatch.setitem(SECONDS, True, seconds)
            before = len(calls)
            report = examine(slow, quick=True, library="torch", given=dict(factor=factor))
            limits[seconds] = len(calls) - before
            assert report.is_right == (factor == 1.0)
            assert (UNCHECKED in report.refused) == (seconds < 600)
        assert limits[10] - limits[1] <= 10 < limits[600] - limits[1]


def test_a_call_that_does_not_return_raises_not_examined(monkeypatch):
    def endless(q, k, v):
        time.sleep(30)

    monkeypatch.setattr(guards, "LIMIT", 1)
    with pytest.raises(NotExamined, match="did not return"):
        examine(endless, quick=True, library="torch")


def test_one_query_beside_a_cache_is_examined():
    def decode(q, k_cache, v_cache, cache_seqlens, sinks=None, parts=1):
        s = torch.einsum("bhd,bnhd->bhn", q, k_cache) * q.shape[-1] ** -0.5
        s = s.masked_fill(torch.arange(s.shape[-1]) >= cache_seqlens[:, None, None], -torch.inf)
        if sinks is not None:
            s = torch.cat([s, (sinks + np.log(parts)).expand(len(s), -1)[..., None]], -1)
        return torch.einsum("bhn,bnhd->bhd", softmax(s)[..., : k_cache.shape[1]], v_cache)

    assert names(examine(decode, quick=True, library="torch")) == ["length-nan"]
    assert "sinks-per-split" in names(examine(partial(decode, parts=4), quick=True, library="torch"))


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
        return softmax(scores(q, k)) @ v

    def of_model(q, k, v, num_heads):
        q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        weights = softmax(scores(q, k))
        return (weights @ v).transpose(1, 2).flatten(2), weights

    def scaled(q, k, v, scale):
        return softmax(scores(q, k, scale)) @ v

    def lazy(q, k, v, tau=8.0):
        return softmax(scores(q, k)) @ v

    for function in (by_place, of_model, scaled, lazy):
        report = examine(function, quick=True, library="torch")
        assert report.is_right and report.parts[0] == "O", (function, names(report))


def from_start(xq, cache_k, cache_v, start_pos: int):
    end = start_pos + xq.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (xq, cache_k[:, :end], cache_v[:, :end]))
    return (softmax(mask_later(scores(q, k))) @ v).transpose(1, 2)


def one_length(q, k_cache, v_cache, kv_len):
    return softmax(scores(q, k_cache[:, :, :kv_len])) @ v_cache[:, :, :kv_len]


def layer(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0):
    k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    P = softmax(scores(query, k, scaling) + (0.0 if attention_mask is None else attention_mask))
    return (F.dropout(P, dropout, training=module.training) @ v).transpose(1, 2), P


def sequence_first(query_layer, key_layer, value_layer):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
    return (softmax(scores(q, k)) @ v).permute(2, 0, 1, 3).flatten(2)


def packed_kv(q, kv, causal=False):
    q, (k, v) = q.transpose(1, 2), (x.transpose(1, 2) for x in kv.unbind(2))
    s = mask_later(scores(q, k)) if causal else scores(q, k)
    return {"lse": s.logsumexp(-1), "out": (softmax(s) @ v).transpose(1, 2)}


def batched(queries, keys, values, valid_lens=None, empty_L=-torch.inf):
    """Without lengths, this also takes four axes."""
    s = scores(queries, keys)
    if valid_lens is not None:
        s = s.masked_fill(torch.arange(s.shape[-1]) >= valid_lens[:, None, None], -torch.inf)
    return softmax(s) @ values, s.logsumexp(-1).clamp(min=empty_L)


def float_mask(q, k, v, attention_mask=None):
    s = scores(q, k)
    return softmax(s if attention_mask is None else s + (1.0 - attention_mask[:, None, None]) * -1e30) @ v


def left_window(q, k, v, sliding_window=None, is_causal=True):
    s = mask_later(scores(q, k)) if is_causal else scores(q, k)
    behind = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    return softmax(s if sliding_window is None else s.masked_fill(behind >= sliding_window, -torch.inf)) @ v


def backward_from_sums(dout, q, k, v, softmax_lse, delta):
    P = (scores(q, k) - softmax_lse[..., None]).exp()
    dS = P * (dout @ v.mT - delta[..., None]) * q.shape[-1] ** -0.5
    return dS @ k, dS.mT @ q, P.mT @ dout


def new_keys(q, k_new, v_new, k_cache, v_cache, cache_len: int):
    k, v = (torch.cat([x[:, :, :cache_len], y], 2) for x, y in ((k_cache, k_new), (v_cache, v_new)))
    return softmax(mask_later(scores(q, k))) @ v


def one_query(q, k, v, lengths):
    s = torch.einsum("bhd,bhnd->bhn", q, k) * q.shape[-1] ** -0.5
    s = s.masked_fill(torch.arange(k.shape[2]) >= lengths[:, None, None], -torch.inf)
    return torch.einsum("bhn,bhnd->bhd", softmax(s), v)


def own_slopes(q, k, v, slopes=None):
    """The function has slopes of its own if none are passed."""
    slopes = 2.0 ** -torch.arange(1.0, q.shape[1] + 1) if slopes is None else slopes
    ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return softmax(scores(q, k) - slopes[:, None, None] * ahead.abs()) @ v


GROUP_OF = {  # a right function, and a group of cases that it must have been asked
    from_start: "lengths",
    one_length: "lengths",
    layer: "grouped",
    sequence_first: "cross",
    packed_kv: "corner",
    batched: "lengths",
    float_mask: "lengths",
    left_window: "window",
    backward_from_sums: "cross",
    new_keys: "lengths",
    one_query: "lengths",
    own_slopes: "alibi",
}


@pytest.mark.parametrize("function", GROUP_OF, ids=lambda x: x.__name__)
def test_functions_with_other_signatures_are_called_as_they_expect(function):
    groups = []
    subject = Subject(function)
    subject.before_call = lambda case: groups.append(case.group)
    report = diagnose(subject, "", "torch", "", quick=True)
    assert report.is_right, (names(report), report.how)
    refused = {name: why for name, why in report.refused.items() if why and name.startswith(GROUP_OF[function])}
    assert GROUP_OF[function] in groups and not refused, refused


def test_rows_that_are_numbered_from_0_beside_a_cache_are_named():
    def of_top_left(q, k_new, v_new, k_cache, v_cache, cache_len: int):
        k, v = (torch.cat([x[:, :, :cache_len], y], 2) for x, y in ((k_cache, k_new), (v_cache, v_new)))
        return softmax(mask_later(scores(q, k), corner=0)) @ v

    assert "rows-from-0" in names(examine(of_top_left, quick=True, library="torch"))


def test_l_of_rows_without_keys_is_checked_in_three_axes():
    report = examine(batched, quick=True, library="torch", given=dict(empty_L=-1e30))
    assert "(batch, N, d)" in report.how and "L-empty" in names(report)


def test_a_backward_function_for_equal_lengths_is_right_with_a_remark():
    def square(do, q, k, v):
        p = scores(q, k[..., : q.shape[-2], :]).softmax(-1)
        dP = do @ v[..., : q.shape[-2], :].mT
        dS = p * (dP - (p * dP).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        dk[..., : q.shape[-2], :], dv[..., : q.shape[-2], :] = dS.mT @ q, p.mT @ do
        return dS @ k[..., : q.shape[-2], :], dk, dv

    report = examine(square, quick=True, library="torch")
    assert names(report) == ["lengths-silent"] and report.is_right
