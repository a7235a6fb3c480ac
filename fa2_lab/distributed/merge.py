"""A kernel that merges an output (O, L) in place into a running fp32 softmax state, as SoftmaxState.merge does.

torch operators could compute the same result, but they would read and write o several times, whereas this kernel does
so only once. When it merges the last (O, L), the kernel writes the final output instead of the state.
"""

import triton
import triton.language as tl
from torch import Tensor

from fa2_lab.kernels import launches, tables
from fa2_lab.kernels.cache import get_or_prepare, tensor_keys
from fa2_lab.kernels.common.constants import NEG_INF
from fa2_lab.kernels.common.tile import head_ptr, load_rows, store_rows
from fa2_lab.kernels.contiguous import rows_contiguous

ROWS = 32  # rows per program


@triton.jit
def finite(m):
    """Return the row maxima m, with 0 instead of −∞ for rows that have seen no key."""
    return tl.where(m == NEG_INF, 0.0, m)


@triton.jit(do_not_specialize=["first", "n", "N", "H"])
def merge_state_kernel(m, l, o, L, O, L_out, O_out, strides, first, n, N, H, d: tl.constexpr, d_pad: tl.constexpr,
                 B_r: tl.constexpr):  # fmt: skip
    """Merge n rows of (O, L) into rows first:first + n of the state, which has N rows in every head.

    (O, L) is merged like a state with m = L, l = 1 and o = O. If O_out is given, write all N rows of the final output
    to O_out and L_out instead of updating the state. A row's l and o are read only if its m is not −∞, so they may be
    uninitialized before the first (O, L) is merged.
    """
    begin, end = first, first + n
    if O_out is not None:
        begin, end = 0, N
    blocks = tl.cdiv(end - begin, B_r)
    i, bh = begin + tl.program_id(0) % blocks * B_r, tl.program_id(0) // blocks
    row = i + tl.arange(0, B_r)  # (B_r,)
    at, o_rows = tl.cast(bh, tl.int64) * N + row, o + tl.cast(bh, tl.int64) * N * d
    O_strides, O_out_strides, L_out_strides = strides
    in_part = (row >= first) & (row < first + n)
    L_i = tl.load(L + tl.cast(bh, tl.int64) * n + row - first, mask=in_part, other=NEG_INF)
    o_part = head_ptr(O, O_strides, bh // H, bh % H)
    o_part = load_rows(o_part, i - first, O_strides[2], n, B_r, d, d_pad, RAGGED=True, UPCAST=True, begin=0)
    m_i = tl.load(m + at, mask=row < end, other=NEG_INF)
    m_new = tl.maximum(m_i, L_i)
    alpha, beta = tl.exp(m_i - finite(m_new)), tl.exp(L_i - finite(m_new))
    has_state = m_i != NEG_INF
    l_i = alpha * tl.load(l + at, mask=has_state, other=0.0) + beta
    o_i = load_rows(o_rows, i, d, end, B_r, d, d_pad, RAGGED=True, UPCAST=False, begin=tl.where(has_state, 0, N))
    o_i = alpha[:, None] * o_i + beta[:, None] * o_part
    if O_out is None:
        tl.store(m + at, m_new, mask=row < end)
        tl.store(l + at, l_i, mask=row < end)
        store_rows(o_rows, o_i, i, d, end, B_r, d, d_pad)
    else:
        l_i = tl.where(l_i == 0, 1.0, l_i)
        O_out = head_ptr(O_out, O_out_strides, bh // H, bh % H)
        store_rows(O_out, o_i * (1 / l_i)[:, None], i, O_out_strides[2], N, B_r, d, d_pad)
        tl.store(head_ptr(L_out, L_out_strides, bh // H, bh % H) + row, m_new + tl.log(l_i), mask=row < N)


def merge(m: Tensor, l: Tensor, o: Tensor, rows: slice, O: Tensor, L: Tensor, *,
          O_out: Tensor | None = None, L_out: Tensor | None = None) -> None:  # fmt: skip
    """Merge (O, L) into `rows` of the state m, l (batch, heads, N) and o (batch, heads, N, d), in place.

    If O_out and L_out are given, (O, L) must be the last output to be merged. The whole final output is then written to
    O_out and L_out, and the state is not updated. O_out and L_out may be views with any strides if the last dimension
    of each is contiguous.
    """
    O, L = rows_contiguous(O), L.contiguous()
    if O.shape[2] or O_out is not None:
        key = "merge", rows.start, m.shape, *tensor_keys((O, O_out, L_out))
        launch = get_or_prepare(key, prepare_launch, m.shape[2], rows.start, O, O_out, L_out)
        with launches.on_device_of(O):
            launch(m, l, o, L, O, L_out, O_out)


def prepare_launch(N: int, first: int, O: Tensor, O_out: Tensor | None, L_out: Tensor | None) -> launches.Launch:
    """Return a prepared launch of the merge kernel, to be called with (m, l, o, L, O, L_out, O_out)."""
    batch, H, n, d = O.shape
    blocks = triton.cdiv(n if O_out is None else N, ROWS)
    strides = tuple(None if X is None else X.stride()[:3] for X in (O, O_out, L_out))
    sizes = dict(first=first, n=n, N=N, H=H, d=d, d_pad=tables.padded_head_dim(d), B_r=ROWS)
    return launches.Launch(merge_state_kernel, blocks * batch * H, {}, strides=strides, **sizes)
