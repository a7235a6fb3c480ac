"""Attention over a paged cache, as serving engines keep it: keys and values are in pages, which a table puts in order.

k_pages, v_pages  (pages, page_size, kv heads, d) with any strides that leave d contiguous
block_table       integers (batch, width): entry i of a row is the page with keys i·page_size … of its sequence
key_lengths       integers (batch,): the number of keys of each sequence, including those of its N_q queries

Nothing past a sequence's last key is read, neither in a page nor in the table. These calls have no gradient.
"""

from torch import Tensor

from fa2_lab.api import operators
from fa2_lab.api.attention import recall
from fa2_lab.api.checks import (
    check_cache,
    check_entries,
    check_lengths,
    check_masks,
    check_no_gradient,
    check_numbers,
    check_q,
    check_range,
    check_sinks,
    check_table,
    runs_on_triton,
    splits_asked,
)
from fa2_lab.kernels.prepared import Tensors


def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    *,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return O (batch, heads, N_q, d), where q holds the last N_q queries of each sequence and the pages its keys.

    causal      query r sees the keys up to key_lengths − N_q + r; for a single query this makes no difference
    window      (left, right) of that key. In pages before every window no key is read, and their entries may be
                anything
    key_lengths, block_table  on a GPU their range is checked once per tensor and version, which waits for the GPU. In a
                CUDA graph or a compiled function it is not checked, and a value out of range counts as the nearest one
                inside
    num_splits  as in attention(). With it, O and L of a sequence have the same bits in every batch, at every place in
                it, with any pages and any width of the table. They may differ from those of a call without pages
    others      as in attention()
    """
    tensors = Tensors(q, k_pages, v_pages, key_lengths, sinks=sinks, block_table=block_table)
    key, call = recall(tensors, window, (causal, softcap, scale, num_splits, return_lse, backend))
    if call is not None:  # a call of its kind has passed all checks except those of values
        options = call.options
    else:
        check_q(q)
        check_cache(q, k_pages, v_pages)
        check_table(block_table, q)
        N_k = block_table.shape[1] * k_pages.shape[1]  # the most keys that a sequence can have
        check_lengths(key_lengths, q, N_k)
        scale = check_numbers(causal, scale, q.shape[3], return_lse)
        options = check_masks(causal, window, softcap, sinks, q, (*q.shape[1:3], N_k))
        reference = not runs_on_triton(backend, q.device.type) or not q.numel()
        options = options._replace(scale=scale, num_splits=splits_asked(num_splits), reference=reference)
    check_no_gradient(q=q, k_pages=k_pages, v_pages=v_pages, sinks=sinks)
    check_range(key_lengths, block_table.shape[1] * k_pages.shape[1])
    check_entries(block_table, key_lengths, k_pages.shape[:2], q.shape[2], options.left)
    check_sinks(sinks, options)
    return operators.compute(key, tensors, options, return_lse) if call is None else call(tensors)
