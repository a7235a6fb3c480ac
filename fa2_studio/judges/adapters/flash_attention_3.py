"""The adapter that stands in for `flash_attn_interface`, FlashAttention-3's package."""

from fa2_studio.judges.adapters import flash_attention_4 as four


def flash_attn_func(q, k, v, **options):
    return four.flash_attn_func(q, k, v, **options)[0]


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    given = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return four.flash_attn_varlen_func(q, k, v, *given, **options)[0]


flash_attn_combine = flash_attn_with_kvcache = get_scheduler_metadata = None
