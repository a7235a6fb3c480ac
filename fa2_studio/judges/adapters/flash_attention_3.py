"""Behind the names of `flash_attn_interface`, FlashAttention-3's package."""

from fa2_studio.judges.adapters.common import bounds, dense, deterministic_if, packed


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False, **unused
):
    masks = dict(causal=causal, window=bounds(window_size), softcap=softcap or None, scale=softmax_scale)
    deterministic_if(deterministic)
    return dense(q, k, v, **masks)[0]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    **unused,
):
    masks = dict(causal=causal, window=bounds(window_size), softcap=softcap or None, scale=softmax_scale)
    deterministic_if(deterministic)
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **masks)[0]


flash_attn_combine = flash_attn_with_kvcache = get_scheduler_metadata = None
