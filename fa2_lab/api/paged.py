"""Attention over a paged cache, as serving engines keep it: keys and values in pages, and a table that orders them.

k_pages, v_pages  (pages, page_size, kv heads, d), in any strides that leave d contiguous
block_table       integers (batch, width): entry i of a row is the page with keys i·page_size … of its sequence
key_lengths       integers (batch,): how many keys each sequence has, those of its N_q queries among them

What lies behind a sequence's last key is not read, neither of a page nor of the table. Nothing here has a gradient.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa2_lab.api import operators
from fa2_lab.api.attention import by_reference, recall
from fa2_lab.api.checks import (
    as_computed,
    check_cache,
    check_entries,
    check_lengths,
    check_masks,
    check_no_gradient,
    check_num_splits,
    check_numbers,
    check_q,
    check_range,
    check_sinks,
    check_table,
    runs_on_triton,
    traced,
)
from fa2_lab.kernels.prepared import Options, Tensors, has_gaps, keep, like, rows_contiguous


class Pages(NamedTuple):
    """The tensors of a call over pages."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    key_lengths: Tensor
    sinks: Tensor | None = None

    @property
    def tensors(self) -> Tensors:
        """These tensors without the table, as the kernels take them."""
        return Tensors(self.q, self.k_pages, self.v_pages, self.key_lengths, sinks=self.sinks)


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
    """O (batch, heads, N_q, d) for q of that shape, the last N_q queries of each sequence, over its pages of keys.

    causal      query r sees the keys up to key_lengths − N_q + r; with one query it makes no difference
    window      (left, right) of that key; of pages before every window no key is read, and entries may be anything
    key_lengths, block_table  on a GPU their range is looked up once per tensor and version, which waits for the GPU;
                in a CUDA graph or a compiled function it is not, and what lies outside counts as the nearest inside
    num_splits  as in attention(). With it, O and L of a sequence are the same bits in every batch, at every place in
                it, with any pages and any width of the table; but they may differ from those of a call without pages
    others      as in attention()
    """
    tensors = Pages(q, k_pages, v_pages, block_table, key_lengths, sinks)
    key, found = recall(tensors, window, (causal, softcap, scale, num_splits, return_lse, backend))
    if found is not None:
        options, run = found
    else:  # the first of its kind
        run = None
        check_q(q)
        check_cache(q, k_pages, v_pages)
        check_table(block_table, q)
        N_k = block_table.shape[1] * k_pages.shape[1]  # the most keys that a sequence can have
        check_lengths(key_lengths, q, N_k)
        scale = check_numbers(causal, scale, q.shape[3], return_lse)
        options = check_masks(causal, window, softcap, sinks, q, (*q.shape[1:3], N_k))
        on_triton = runs_on_triton(backend, q.device.type)
        options = options._replace(scale=scale, num_splits=check_num_splits(num_splits), reference=not on_triton)
    check_no_gradient(q=q, k_pages=k_pages, v_pages=v_pages, sinks=sinks)
    check_range(key_lengths, block_table.shape[1] * k_pages.shape[1])
    check_entries(block_table, key_lengths, k_pages.shape[:2], q.shape[2], options.left)
    check_sinks(sinks, options)
    if run is None:
        run = prepare(tensors, options)
        if key is not None:
            keep(key, (options, run))
    O, L = run(tensors)
    return (O, L) if return_lse else O


def prepare(pages: Pages, options: Options) -> Callable:
    """Return what computes (O, L) for calls of one kind, given their pages."""
    if options.reference or not pages.q.numel():
        return partial(gathered, options=options)
    as_they_are = pages.block_table.is_contiguous() and not any(map(has_gaps, pages.tensors))
    as_they_are = as_they_are and not traced(pages.q, pages.k_pages, pages.v_pages)
    if as_they_are and as_computed(pages.q, pages.sinks, options)[0] is pages.q:
        kernels = operators.kernels()
        decode = kernels.decode.prepare(pages.tensors, options, pages.block_table)
        return kernels.served("decode over pages", lambda pages: decode(pages.tensors, pages.block_table))

    def on_copies(pages: Pages) -> tuple[Tensor, Tensor]:
        q, own = as_computed(pages.q, pages.sinks, options)
        pages = pages._replace(q=q)
        recorded = traced(pages.q, pages.k_pages, pages.v_pages)
        return torch.ops.fa2_lab.paged(*pages, *operators.recorded(own)) if recorded else paged(pages, own)

    return on_copies


# The kernels, as torch sees them --------------------------------------------------------------------------------

PAGES = (
    "Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor key_lengths, Tensor? sinks, "
    f"{operators.OPTIONS}"
)


@torch.library.custom_op("fa2_lab::paged", mutates_args=(), schema=f"({PAGES}) -> (Tensor, Tensor)")
def paged_op(*given: Any) -> tuple[Tensor, Tensor]:
    many = len(Pages._fields)
    return paged(Pages(*given[:many]), Options(*given[many:]))


def paged(pages: Pages, options: Options) -> tuple[Tensor, Tensor]:
    """Return (O, L) by the Triton kernels, which find every page by themselves."""
    tensors = Tensors._make(map(rows_contiguous, pages.tensors))
    return operators.kernels().decode.decode(tensors, options, pages.block_table.contiguous())


@paged_op.register_fake
def paged_shapes(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return like(rows_contiguous(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


# The reference --------------------------------------------------------------------------------------------------


def gathered(pages: Pages, options: Options) -> tuple[Tensor, Tensor]:
    """Return (O, L) sequence by sequence: its pages side by side as one tensor, and attention's reference on that."""
    q, found = pages.q, []
    for b, n in enumerate(pages.key_lengths.tolist()):
        used = pages.block_table[b, : -(-n // pages.k_pages.shape[1])].long().clamp(0, len(pages.k_pages) - 1)
        k, v = (x[used].flatten(0, 1)[:n].transpose(0, 1)[None] for x in (pages.k_pages, pages.v_pages))
        found.append(by_reference(Tensors(q[[b]], k, v, sinks=pages.sinks), options))
    O, L = zip(*found, strict=True) if found else ([q], [q[..., 0].float()])
    return torch.cat(O), torch.cat(L)
