"""The softmax step on a tile of scores in registers. For most tiles, the lanes exchange no data, and m stays the same.

The tensor cores distribute the scores so that each warp holds 16 rows of a tile and each row belongs to 4 lanes. m and
l are therefore stored once per lane, as (64, 4). All four lanes of a row have the same m. Each lane has its own l, and
these four partial sums are added after the last tile.

m need not be the maximum, because any value used in its place cancels out of O and L. Its only purpose is to keep p
from overflowing. m therefore lags behind the maximum. A warp updates m only when a score in one of its rows, as an
exponent of 2, exceeds m by more than 8. Until then, p is at most 256, and o need not be rescaled. The loss of accuracy
was measured by `fa2-lab bench accuracy` on an H200 in bf16. O's error is 3 to 4% larger than with the exact maximum. If
one element in a thousand is an outlier, the error is 10 to 17% larger, because, with the exact maximum, a row's largest
p is 1, which needs no rounding.

Computing p = 2^(scale_log2 · s − m) takes one FMA and one exponential. Because no other operation separates m from the
FMAs, the FMAs can start while the tensor cores are still busy. m itself is a product with scale_log2 and is rounded.
This rounding error also cancels, but if |m| is 2²⁸ or more, rounding alone could make p larger than 2⁸. In such rows,
`row_scale` is therefore the next power of two below scale_log2, which makes all products exact. With such large scores,
all entries of a row of P except one are close to 0. When a row's scale changes, its old and new largest scores differ
by at least 16, so all earlier tiles contribute almost nothing, and alpha is 0.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2_lab.kernels.common.constants import NEG_INF
from fa2_lab.kernels.hopper.shared.pipeline import acc_layout

LOWEST = gl.constexpr(-3.0e38)  # initial value of m; −∞ would give −∞ − (−∞) = NaN in rows without keys


@gluon.jit
def initial_state(s, scale_log2):
    """Return the initial m, row_scale and l, each (64, 4), in the layout that matches s, a tile of scores.

    `row_scale` multiplies each row's scores in the exponent. Its initial value is scale_log2, the softmax scale times
    log₂ e.
    """
    STATE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, split_lanes(s).type.layout))
    m = gl.full([s.shape[0], 4], LOWEST, gl.float32, STATE)  # FA2.A1.L5
    row_scale = gl.full([s.shape[0], 4], scale_log2, gl.float32, STATE)
    l = gl.zeros([s.shape[0], 4], gl.float32, STATE)  # FA2.A1.L5
    return m, row_scale, l


@gluon.jit
def softmax_step(s, m, row_scale, l, scale_log2):
    """Update m, row_scale and l with the scores s (64, B_c) of a tile.

    Return p, m, row_scale, l, and alpha, the factor by which o is rescaled.
    """
    x = split_lanes(s)
    m, row_scale, alpha = update_row_max(m, row_scale, lane_row_max(x), scale_log2)  # (64, 4)  FA2.A1.L9
    p = gl.exp2(broadcast_state(row_scale, x) * x - broadcast_state(m, x))  # (64, B_c / 8, 4, 2)  FA2.A1.L9
    l = alpha * l + gl.sum(gl.sum(p, 3), 1)  # (64, 4)  FA2.A1.L9
    return join_lanes(p), m, row_scale, l, alpha


# Four lanes per row ------------------------------------------------------------------------------------------


@gluon.jit
def split_lanes(x):
    """Reshape a tile to (64, columns / 8, 4, 2) because each of a row's 4 lanes holds 2 of every 8 columns."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def join_lanes(x):
    """Undo split_lanes(): reshape (64, columns / 8, 4, 2) to (64, columns)."""
    return gl.convert_layout(x.reshape([x.shape[0], 8 * x.shape[1]]), acc_layout(8 * x.shape[1]))


@gluon.jit
def broadcast_state(state, x):
    """Reshape `state` (64, 4), with one value per row and lane, so that it broadcasts against x from split_lanes()."""
    return gl.convert_layout(state, gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout)))[:, None, :, None]


@gluon.jit
def lane_row_max(x):
    """Return each lane's largest score in each of its rows, as (64, 4).

    The maxima are reduced as a tree because, in a chain, each maximum would have to wait for the previous one.
    """
    STATE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
    pairs = gl.max(x, 3)
    fours = pairs.reshape([x.shape[0], 4, x.shape[1] // 4, 4])
    return gl.convert_layout(gl.max(gl.max(fours, 1), 1), STATE)


# Work that most warps can skip ---------------------------------------------------------------------------------

# This PTX updates the m, row_scale and alpha of one row in place. `top` is this lane's largest score, and $12 is
# scale_log2. 0f4D800000 is 2²⁸, and the mask 0x7f800000 rounds a positive number down to a power of two.
PTX_UPDATE_ROW = """
shfl.sync.bfly.b32 x, {top}, 1, 31, -1; max.f32 all, {top}, x;
shfl.sync.bfly.b32 x, all, 2, 31, -1; max.f32 all, all, x;
mul.f32 x, all, {row_scale}; setp.gt.f32 higher, x, {m};
mul.f32 x, all, $12; abs.f32 x, x; setp.lt.f32 fine, x, 0f4D800000;
and.b32 x, $12, 0x7f800000; selp.f32 x, $12, x, fine;
setp.eq.f32 same, x, {row_scale};
mul.rn.f32 all, all, x; sub.rn.f32 y, {m}, all; ex2.approx.f32 y, y; selp.f32 y, y, 0.0, same;
@higher mov.f32 {m}, all; @higher mov.f32 {row_scale}, x; @higher mov.f32 {alpha}, y;
"""
# The operands for a thread's two rows: m ($0, $1), row_scale ($2, $3), alpha ($4, $5), largest score ($10, $11).
PTX_UPDATE_ROW_MAX = """{
.reg .pred some, higher, fine, same;
.reg .f32 x, y, all;
mov.f32 $4, 1.0; mov.f32 $5, 1.0;
neg.f32 x, $0; fma.rn.f32 x, $10, $2, x; setp.gt.f32 some, x, 8.0;
neg.f32 x, $1; fma.rn.f32 x, $11, $3, x; setp.gt.or.f32 some, x, 8.0, some;
vote.sync.any.pred some, some, -1;
@!some bra.uni DONE;"""
for i in (0, 1):
    PTX_UPDATE_ROW_MAX += PTX_UPDATE_ROW.format(m=f"${i}", row_scale=f"${2 + i}", alpha=f"${4 + i}", top=f"${10 + i}")
PTX_UPDATE_ROW_MAX = gl.constexpr(PTX_UPDATE_ROW_MAX + "DONE:\n}")


@gluon.jit
def update_row_max(m, row_scale, top, scale_log2):
    """Return the new m, row_scale and alpha, each (64, 4).

    `top` is each lane's largest unscaled score. If row_scale · top exceeds m by more than 8 in any of a warp's rows,
    the warp raises m in each of its rows to the row's largest scaled score, unless m is already larger. A row whose m
    is raised gets row_scale = scale_log2 or, if |m| would be 2²⁸ or more, the next power of two below scale_log2. The
    inline PTX processes two elements per thread at a time, from the thread's rows r and r + 8, in this order.
    """
    scale_log2 = gl.full([m.shape[0], m.shape[1]], scale_log2, gl.float32, m.type.layout)
    return gl.inline_asm_elementwise(
        PTX_UPDATE_ROW_MAX, "=&f,=&f,=&f,=&f,=&f,=&f,0,1,2,3,f,f,f,f", [m, row_scale, top, scale_log2],
        (gl.float32, gl.float32, gl.float32), is_pure=True, pack=2
    )  # fmt: skip


@gluon.constexpr_function
def multiply_unless_one(n):
    """Return PTX that multiplies n elements of o by their row's alpha, unless alpha is 1 in every row of the warp.

    Each thread has elements in two rows, r and r + 8. The elements must come in pairs that alternate between these
    rows.
    """
    lines = [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    ones = [f"setp.eq.f32 p, ${2 * n}, 1.0;", f"setp.eq.and.f32 p, ${2 * n + 2}, 1.0, p;"]
    jump = ["vote.sync.all.pred all, p, -1;", "@all bra.uni DONE;"]
    return "\n".join(["{", ".reg .pred p, all;", *ones, *jump, *lines, "DONE:", "}"])


@gluon.constexpr_function
def in_place(n):
    """Return inline-PTX constraints for n outputs, n inputs in the outputs' registers, and n other inputs."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescale_o(o, alpha):
    """Multiply each row of o (64, d) by its alpha. Warps skip this step if alpha is 1 in all of their rows."""
    N: gl.constexpr = o.shape[1] // 2  # elements of o per thread
    x = split_lanes(o)
    x, a = gl.broadcast(x, broadcast_state(alpha, x))
    x = gl.inline_asm_elementwise(multiply_unless_one(N), in_place(N), [x, a], gl.float32, is_pure=True, pack=N)
    return join_lanes(x)


# Masks and rounding ------------------------------------------------------------------------------------------


@triton.aggregate
class ColumnBounds:
    """The columns that each of 64 rows sees, and the tiles that all 64 rows see in full."""

    end: gl.tensor  # (64,), the column at which each row's interval ends
    end_full_tile: gl.tensor  # number of tiles that end at or before the end of every interval
    begin: gl.tensor | gl.constexpr  # (64,), the column at which each row's interval begins, or None for column 0
    first_full_tile: gl.tensor | gl.constexpr  # first tile that begins at or after the beginning of every interval

    @gluon.jit
    def cuts(self, j):
        """Return whether tile j needs a mask because it contains a column that some row does not see."""
        if self.begin is None:
            return j >= self.end_full_tile
        else:
            return (j >= self.end_full_tile) | (j < self.first_full_tile)


@gluon.jit
def mask(s, bounds, first):
    """Return the scores s, with −∞ in every column that a row does not see. `first` is the tile's first column."""
    col = gl.arange(0, s.shape[1], gl.SliceLayout(0, acc_layout(s.shape[1])))[None, :]
    s = gl.where((col & ~6) < (bounds.end - first)[:, None] - (col & 6), s, NEG_INF)
    if bounds.begin is not None:
        s = gl.where((col & ~6) >= (bounds.begin - first)[:, None] - (col & 6), s, NEG_INF)
    return s


@gluon.jit
def rounded(p, dtype: gl.constexpr):
    """Round p to half precision, converting two elements per instruction.

    The instruction is written in inline PTX because Triton 3.9's compiler would otherwise pack some pairs in the wrong
    order and then swap their halves. The swaps would cost 64 to 128 instructions in a kernel without a mask.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.bfloat16,
                                         is_pure=True, pack=2)  # fmt: skip
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.float16,
                                         is_pure=True, pack=2)  # fmt: skip
