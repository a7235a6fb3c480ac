"""Attention over a paged cache, as serving engines keep it: keys and values in pages, and a table that orders them.

    k_pages, v_pages   (pages, page_size, kv heads, d), in any strides that leave d contiguous
    block_table        integers (batch, width): entry i of a row is the page with keys i·page_size … of its sequence
    key_lengths        integers (batch,): how many keys each sequence has, those of its N_q queries among them

What lies behind a sequence's last key is not read, neither of a page nor of the table. Nothing here has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fa2_lab.attention import (
    DTYPES,
    INTEGERS,
    attention,
    check_lengths,
    check_masks,
    check_numbers,
    contiguous,
    described,
    for_kernels,
    kernels,
    rows_contiguous,
    runs_on_triton,
    traced,
    with_positive_scale,
)
from fa2_lab.kernels.prepared import Options, remember_seen, was_seen

PAGES = "(pages, page_size, kv heads, d)"


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
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """O (batch, heads, N_q, d) for q of that shape, the last N_q queries of each sequence, over its pages of keys.

    causal      query r sees the keys up to key_lengths − N_q + r; with one query it makes no difference
    window      (left, right) of that key; of pages before every window no key is read, and entries may be anything
    key_lengths, block_table: on a GPU their range is looked up once per tensor and version, which waits for the GPU; in
                a CUDA graph or a compiled function it is not, and what lies outside counts as the nearest inside
    softcap, sinks, scale, return_lse, backend: as in attention()
    """
    check_cache(q, k_pages, v_pages)
    scale = check_numbers(causal, scale, q.shape[3], return_lse)
    check_table(block_table, q)
    most = block_table.shape[1] * k_pages.shape[1]
    check_lengths(key_lengths, q, most)
    if sinks is not None and isinstance(sinks, Tensor) and sinks.requires_grad and torch.is_grad_enabled():
        raise ValueError("sinks: got a tensor that requires a gradient; it takes one without, or torch.no_grad()")
    options = check_masks(causal, window, softcap, sinks, q, most)._replace(scale=scale)
    check_entries(block_table, key_lengths, *k_pages.shape[:2], q.shape[2], options.left)
    q, options = with_positive_scale(q, options)
    if runs_on_triton(backend, q.device.type):
        q, options = for_kernels(q, sinks, options)
        run = torch.ops.fa2_lab.paged if traced(q, k_pages, v_pages) else paged
    else:
        run = gathered
    O, L = run(q, k_pages, v_pages, block_table, key_lengths, sinks, *options)
    return (O, L) if return_lse else O


# Checks -------------------------------------------------------------------------------------------------------


def check_cache(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Refuse queries and pages of wrong kind or shapes that do not go together."""
    check_kind("q", q, "(batch, heads, N, d)")
    heads, d = q.shape[1], q.shape[3]
    if min(q.shape) < 1 or d > 256:
        raise ValueError(f"q: got {described(q)}; it takes (batch, heads, N, d), each at least 1 and d at most 256")
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        check_kind(name, x, PAGES)
        if x.shape[3] != d or min(x.shape) < 1:
            raise ValueError(f"{name}: got {described(x)}; with q {tuple(q.shape)} it takes {PAGES} with d = {d}")
        if heads % x.shape[2]:
            raise ValueError(
                f"{name}: got {x.shape[2]} heads; with {heads} heads of q it takes a number that divides it"
            )
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: got {x.dtype}; it takes q's dtype, {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: got a tensor on {x.device}; it takes q's device, {q.device}")
        if x.stride(3) != 1 and d > 1:
            raise ValueError(f"{name}: got strides {x.stride()}; it takes pages whose last dimension is contiguous")
    if v_pages.shape != k_pages.shape:
        raise ValueError(f"v_pages: got {described(v_pages)}; it takes k_pages' shape, {tuple(k_pages.shape)}")


def check_kind(name: str, x: Tensor, takes: str) -> None:
    """Refuse what is no tensor of four dimensions and a known type, or wants a gradient."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}; it takes a torch.Tensor")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: got {x.dtype}; it takes float16, bfloat16 or float32")
    if x.dim() != 4 or x.layout != torch.strided:
        raise ValueError(f"{name}: got {described(x)}; it takes {takes}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: got a tensor that requires a gradient; it takes one without, or torch.no_grad()")


def check_table(block_table: Tensor, q: Tensor) -> None:
    """Refuse a table of wrong kind or shape."""
    if not isinstance(block_table, Tensor):
        raise TypeError(f"block_table: got {type(block_table).__name__}; it takes an integer tensor (batch, width)")
    if block_table.dtype not in INTEGERS:
        raise TypeError(f"block_table: got {block_table.dtype}; it takes an integer tensor (batch, width)")
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0] or block_table.shape[1] < 1:
        raise ValueError(f"block_table: got {described(block_table)}; it takes (batch, width) with batch {q.shape[0]}")
    if block_table.device != q.device:
        raise ValueError(f"block_table: got a tensor on {block_table.device}; it takes q's device, {q.device}")


def check_entries(block_table: Tensor, key_lengths: Tensor, count: int, page_size: int, N_q: int, left) -> None:
    """Refuse a table that names a page which does not exist, where a sequence needs it and it can be known."""
    if traced(block_table) or (block_table.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if was_seen(block_table, (count, page_size, N_q, left), key_lengths):
        return
    begin = torch.arange(block_table.shape[1], device=block_table.device) * page_size
    needed = begin < key_lengths[:, None]
    if left is not None:
        needed &= begin + page_size > key_lengths[:, None] - N_q - left
    named = block_table.masked_fill(~needed, 0)
    low, high = torch.stack(torch.aminmax(named)).tolist()
    if low < 0 or high >= count:
        raise ValueError(f"block_table: got pages from {low} to {high}; it takes 0 to {count - 1}, for {count} pages")
    remember_seen(block_table, (count, page_size, N_q, left), key_lengths)


# The kernels, as torch sees them --------------------------------------------------------------------------------


def paged(q, k_pages, v_pages, block_table, key_lengths, sinks, *options):
    """(O, L) by the Triton kernels, which find every page by themselves."""
    lengths, table, sinks = map(contiguous, (key_lengths, block_table, sinks))
    return kernels().decode.decode(rows_contiguous(q), k_pages, v_pages, Options(*options), lengths, table, sinks=sinks)


@torch.library.custom_op("fa2_lab::paged", mutates_args=())
def paged_op(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    sinks: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    left: int | None = None,
    right: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    options = causal, scale, dropout_p, left, right, softcap
    return paged(q, k_pages, v_pages, block_table, key_lengths, sinks, *options)


@paged_op.register_fake
def paged_shapes(q, *rest):
    return torch.empty_like(rows_contiguous(q)), q.new_empty(q.shape[:3], dtype=torch.float32)


# The reference --------------------------------------------------------------------------------------------------


def gathered(q, k_pages, v_pages, block_table, key_lengths, sinks, *options):
    """(O, L) sequence by sequence: its pages side by side as one tensor, and attention's reference on that."""
    causal, scale, _, left, right, softcap = options
    O, L = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
    if sinks is not None:
        L += sinks[:, None]
    for b, n in enumerate(key_lengths.tolist()):
        if n:
            used = block_table[b, : -(-n // k_pages.shape[1])].long().clamp(0, len(k_pages) - 1)
            k, v = (x[used].flatten(0, 1)[:n].transpose(0, 1)[None] for x in (k_pages, v_pages))
            masks = dict(causal=causal, window=(left, right), softcap=softcap, sinks=sinks)
            O[b : b + 1], L[b : b + 1] = attention(
                q[b : b + 1], k, v, **masks, scale=scale, return_lse=True, backend="reference"
            )
    return O, L
