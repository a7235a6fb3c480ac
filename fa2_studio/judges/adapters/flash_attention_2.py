"""The adapter that stands in for `flash_attn`, FlashAttention-2's package."""

from fa2_studio.judges.adapters import flash_attention_4 as four


def flash_attn_func(q, k, v, dropout_p=0.0, *, alibi_slopes=None, return_attn_probs=False, **options):
    assert dropout_p == 0 and alibi_slopes is None
    O, L = four.flash_attn_func(q, k, v, **options)
    return (O, L, None) if return_attn_probs else O


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    *,
    alibi_slopes=None,
    block_table=None,
    return_attn_probs=False,
    **options,
):
    assert dropout_p == 0 and alibi_slopes is None and block_table is None
    O, L = four.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)
    return (O, L, None) if return_attn_probs else O


def flash_attn_kvpacked_func(q, kv, *rest, **options):
    return flash_attn_func(q, *kv.unbind(2), *rest, **options)


def flash_attn_qkvpacked_func(qkv, *rest, **options):
    return flash_attn_func(*qkv.unbind(2), *rest, **options)


def flash_attn_varlen_kvpacked_func(q, kv, *rest, **options):
    return flash_attn_varlen_func(q, *kv.unbind(1), *rest, **options)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *rest, **options):
    twice = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(*qkv.unbind(1), *twice, *rest, **options)


def flash_attn_with_kvcache(*_, **__):
    raise RuntimeError("tests of an updated cache are left out")


def _get_block_size_n(*_):
    """Return a tile width, which their tests would use to reconstruct the dropout mask."""
    return 128


USE_TRITON_ROCM = False
apply_rotary_emb = None
