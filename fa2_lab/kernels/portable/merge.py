"""SoftmaxState.merge on the GPU, in place: a finished part (O, L) of more keys is taken into a running state in fp32.

Several torch operators would do the same and read and write o several times; here it is touched once.
"""

import torch
import triton
import triton.language as tl

from fa2_lab.kernels import launch
from fa2_lab.kernels.constants import NEG_INF
from fa2_lab.kernels.portable.tile import head_of, load_rows, store_rows

ROWS = 32  # of a program


@triton.jit
def finite(m):
    """m, with 0 for the −∞ of a row that has seen no key."""
    return tl.where(m == NEG_INF, 0.0, m)


@triton.jit(do_not_specialize=["first", "n", "N", "H"])
def merge_kernel(m, l, o, L, O, O_strides, first, n, N, H, d: tl.constexpr, d_pad: tl.constexpr,
                 B_r: tl.constexpr):  # fmt: skip
    """State rows first … first + n of N, and the n rows of a part, in every head."""
    i, bh = tl.program_id(0) % tl.cdiv(n, B_r) * B_r, tl.program_id(0) // tl.cdiv(n, B_r)
    row = i + tl.arange(0, B_r)  # (B_r,)
    at = tl.cast(bh, tl.int64) * N + first + row
    L_i = tl.load(L + tl.cast(bh, tl.int64) * n + row, mask=row < n, other=NEG_INF)
    o_part = load_rows(
        head_of(O, O_strides, bh // H, bh % H), i, O_strides[2], n, B_r, d, d_pad, RAGGED=True, UPCAST=True
    )
    o_rows = o + (tl.cast(bh, tl.int64) * N + first) * d
    m_i = tl.load(m + at, mask=row < n, other=NEG_INF)
    m_new = tl.maximum(m_i, L_i)
    alpha, beta = tl.exp(m_i - finite(m_new)), tl.exp(L_i - finite(m_new))
    l_i = alpha * tl.load(l + at, mask=row < n, other=0.0) + beta
    o_i = load_rows(o_rows, i, d, n, B_r, d, d_pad, RAGGED=True, UPCAST=False)
    o_i = alpha[:, None] * o_i + beta[:, None] * o_part.to(tl.float32)
    tl.store(m + at, m_new, mask=row < n)
    tl.store(l + at, l_i, mask=row < n)
    store_rows(o_rows, o_i, i, d, n, B_r, d, d_pad)


@triton.jit(do_not_specialize=["N", "H"])
def finalize_kernel(m, l, o, L, O, L_strides, O_strides, N, H, d: tl.constexpr, d_pad: tl.constexpr,
                    B_r: tl.constexpr):  # fmt: skip
    """O = o / l and L = m + log l, with l = 1 where no key was seen."""
    i, bh = tl.program_id(0) % tl.cdiv(N, B_r) * B_r, tl.program_id(0) // tl.cdiv(N, B_r)
    row = i + tl.arange(0, B_r)  # (B_r,)
    at = tl.cast(bh, tl.int64) * N + row
    l_i = tl.load(l + at, mask=row < N, other=1.0)
    l_i = tl.where(l_i == 0, 1.0, l_i)
    o_i = load_rows(o + tl.cast(bh, tl.int64) * N * d, i, d, N, B_r, d, d_pad, RAGGED=True, UPCAST=False)
    store_rows(head_of(O, O_strides, bh // H, bh % H), o_i * (1 / l_i)[:, None], i, O_strides[2], N, B_r, d, d_pad)
    L_i = tl.load(m + at, mask=row < N, other=0.0) + tl.log(l_i)
    tl.store(head_of(L, L_strides, bh // H, bh % H) + row, L_i, mask=row < N)


def merge(m: torch.Tensor, l: torch.Tensor, o: torch.Tensor, rows: slice, O: torch.Tensor, L: torch.Tensor) -> None:
    """Take (O, L) into rows of m, l (batch, heads, N) and o (batch, heads, N, d)."""
    batch, H, n, d = O.shape
    if n:
        O = O if O.stride(3) == 1 else O.contiguous()
        sizes = O.stride()[:3], rows.start, n, m.shape[2], H
        grid = (triton.cdiv(n, ROWS) * batch * H,)
        with launch.on_device_of(O):
            merge_kernel[grid](m, l, o, L.contiguous(), O, *sizes, d, launch.padded(d), ROWS)


def finalize(m: torch.Tensor, l: torch.Tensor, o: torch.Tensor, O: torch.Tensor, L: torch.Tensor) -> None:
    """Write the state's output into O and L, views of any strides whose last dimension is contiguous."""
    batch, H, N, d = O.shape
    if N:
        grid = (triton.cdiv(N, ROWS) * batch * H,)
        with launch.on_device_of(O):
            strides = L.stride(), O.stride()[:3]
            finalize_kernel[grid](m, l, o, L, O, *strides, N, H, d, launch.padded(d), ROWS)
