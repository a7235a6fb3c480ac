"""The adapter that provides the names which vLLM's tests of paged attention import."""

from types import SimpleNamespace

import torch

from fa2_studio.judges.adapters.common import bounds, paged

current_platform = SimpleNamespace(is_device_capability_family=lambda family: False)
set_random_seed = torch.manual_seed


def is_fa_version_supported(version):
    return version == 2


def fa_version_unsupported_reason(version):
    return "it stands for one version"


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    seqused_k,
    block_table,
    out=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    **unused,
):
    masks = dict(causal=causal, window=bounds(window_size), softcap=softcap or None, scale=softmax_scale)
    O = paged(q, k, v, cu_seqlens_q, block_table, seqused_k, **masks)
    return O if out is None else out.copy_(O)
