"""Attention over a paged KV cache, as used by serving engines.

Keys and values are stored in pages, and a block table lists the pages of each sequence in order.

k_pages, v_pages  (pages, page_size, kv heads, d) with any strides as long as the last dimension is contiguous
block_table       integers (batch, width): entry i of a row is the index of the page that begins with that sequence's
                  key i · page_size
key_lengths       integers (batch,): the number of keys in each sequence, including the keys of its N_q queries

The call never reads past a sequence's last key, either in the pages or in the block table. Gradients are not supported.
"""

from torch import Tensor

from fa2_lab.api import operators
from fa2_lab.api.checks import (
    check_block_table,
    check_block_table_values,
    check_key_lengths,
    check_key_lengths_values,
    check_kv_pages,
    check_no_gradient,
    check_q,
    check_sinks,
)
from fa2_lab.api.options import GivenOptions, find_prepared, given_options, make_options
from fa2_lab.kernels.arguments import Tensors


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
    """Compute attention for the last N_q queries of each sequence and return O (batch, heads, N_q, d).

    causal      If True, query r sees the keys up to key_lengths − N_q + r. For a single query, causal makes no
                difference.
    window      A pair (left, right) of distances from the key at key_lengths − N_q + r. The call does not read pages
                that end before every window, so the table's entries for these pages may have any value.
    key_lengths, block_table  On a GPU, the range of their values is checked when a tensor is first passed, and again
                whenever one of these tensors has been modified. Each check waits for the GPU. In a CUDA graph or a
                compiled function, the range is not checked, and a value outside the range is clamped.
    num_splits  The number of splits, as in attention(). If you pass it, a sequence's O and L have the same bits in
                every batch and at every position in the batch, whichever pages are used and however wide the table is.
                The bits may differ from those that attention() returns for contiguous keys.

    The other arguments are the same as in attention().
    """
    tensors = Tensors(q, k_pages, v_pages, key_lengths, sinks=sinks, block_table=block_table)
    given = given_options(
        window=window, bias=None, causal=causal, softcap=softcap, scale=scale, return_lse=return_lse, backend=backend,
        num_splits=num_splits
    )  # fmt: skip
    key, call = find_prepared(tensors, given)
    if call is None:
        check_q(q)
        check_kv_pages(q, k_pages, v_pages)
        check_block_table(block_table, q)
        N_k = block_table.shape[1] * k_pages.shape[1]  # the largest possible number of keys per sequence
        check_key_lengths(key_lengths, q, N_k)
        options = make_options(GivenOptions(*given), tensors, (*q.shape[1:3], N_k))
        options = options._replace(reference=options.reference or not q.numel())
    else:  # an earlier call with this key passed all checks that do not depend on tensor values
        options = call.options
        check_sinks(sinks, options)
    check_no_gradient(q=q, k_pages=k_pages, v_pages=v_pages, sinks=sinks)
    check_key_lengths_values(key_lengths, block_table.shape[1] * k_pages.shape[1])
    check_block_table_values(block_table, key_lengths, k_pages.shape[:2], q.shape[2], options.left)
    return operators.run_checked(key, tensors, options, return_lse) if call is None else call(tensors)
