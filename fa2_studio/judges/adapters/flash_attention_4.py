"""The adapter that stands in for `flash_attn.cute.interface`, FlashAttention-4's package."""

from fa2_studio.judges.adapters.common import bounds, dense, deterministic_if, packed


def masks(
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    deterministic=False,
    **unused,
):
    """Convert FlashAttention-4's options to arguments for our calls."""
    deterministic_if(deterministic)
    window = bounds(window_size)
    return dict(causal=causal, window=window, softcap=softcap or None, scale=softmax_scale, sinks=learnable_sink)


def flash_attn_func(q, k, v, **options):
    return dense(q, k, v, **masks(**options))


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, **options
):
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, **masks(**options))


def get_scheduler_metadata(*_, **__):
    """Return None, because our calls need no metadata."""


class JITCache(dict):
    """A name that their tests import, but that is used only by tests that we leave out."""


_flash_attn_fwd = _flash_attn_bwd = _flash_attn_bwd_sparse_mla = None
