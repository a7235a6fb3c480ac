"""The adapter for torch.nn.attention.varlen, PyTorch's own attention for packed sequences."""

from fa2_studio.judges.adapters.common import bounds, packed


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), **unused):
    masks = dict(window=bounds(window_size), scale=scale)
    return packed(query, key, value, cu_seq_q, cu_seq_k, max_seqlen_q=max_q, **masks)[0]
