"""The softmax step on a tile of scores, in registers. For most tiles lanes exchange nothing, and m does not change.

The tensor cores leave a tile like this: 16 rows to a warp, a row in the hands of 4 lanes. So m and l are kept once for
each lane, as (64, 4). m is the same in all four lanes. l is a lane's own sum; the four are added after the last tile.

m need not be the maximum. Whatever stands in its place cancels out of O and L; it only has to keep p from overflowing.
So m lags: it moves when some score in a warp's rows lies more than 8 above it, in powers of two. Until then p is at
most 256, and o need not be rescaled. The price, by `fa2-lab bench accuracy` on an H200 in bf16: beside kernels with the
exact maximum the error of O is 3 to 4% larger, and 10 to 14% where one number in a thousand is an outlier. For with the
exact maximum a row's largest p is 1, which is not rounded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2_lab.kernels.constants import NEG_INF
from fa2_lab.kernels.hopper.shared.aggregate import aggregate
from fa2_lab.kernels.hopper.shared.pipeline import accumulator


@aggregate
class Scales:
    """The factor of scores before exp2, and what to do with scores so large that m times this factor rounds too much.

    p is one fused multiply-add and an exp2, and only as exact as the product m · scale.
    """

    fine: gl.tensor  # the factor
    coarse: gl.tensor  # the power of two below it, whose products are exact
    huge: gl.tensor  # the |m| from which on the coarse one is used
    slack: gl.tensor  # how far a score may lie above m
    LAG: gl.constexpr  # whether it may; else m is the exact maximum


@gluon.jit
def first_state(s, scales):
    """m and l, (64, 4), before the first tile s. Without LAG m is (64,)."""
    STATE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_lanes(s).type.layout))
    l = gl.zeros([s.shape[0], 4], gl.float32, STATE)  # FA2.A1.L5
    if scales.LAG:
        m = gl.full([s.shape[0], 4], NEG_INF, gl.float32, STATE)  # FA2.A1.L5
    else:
        m = gl.full([s.shape[0]], NEG_INF, gl.float32, gl.SliceLayout(1, s.type.layout))  # FA2.A1.L5
    return m, l


@gluon.jit
def softmax_step(s, m, l, scales, MASKED: gl.constexpr):
    """One tile of scores s (64, B_c) into m and l: p, and alpha, by which what came before shrinks."""
    if scales.LAG:
        s = by_lanes(s)
        m_new = raised(m, largest(s), m + scales.slack)  # (64, 4)  FA2.A1.L9
    else:
        m_new = gl.maximum(m, gl.max(s, 1))  # (64,)  FA2.A1.L9
    m_ref = m_new
    if MASKED:  # a row that has seen no key yet has m = −inf, and −inf − (−inf) is NaN
        m_ref = gl.where(m_new == NEG_INF, 0.0, m_new)
    scale = gl.where(gl.abs(m_ref) < scales.huge, scales.fine, scales.coarse)
    p = gl.exp2(s * along(scale, s) - along(m_ref * scale, s))  # FA2.A1.L9
    alpha = gl.exp2((m - m_ref) * scale)  # FA2.A1.L9
    if scales.LAG:
        l = alpha * l + gl.sum(gl.sum(p, 3), 1)  # (64, 4)  FA2.A1.L9
        return as_tile(p), m_new, l, alpha
    else:
        l = along(alpha, l) * l + gl.sum(gl.sum(by_lanes(p), 3), 1)  # (64, 4)  FA2.A1.L9
        return p, m_new, l, alpha


# Four lanes to a row -----------------------------------------------------------------------------------------


@gluon.jit
def by_lanes(x):
    """A tile (64, columns) as (64, columns / 8, 4, 2): of each 8 columns a lane holds 2."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def as_tile(x):
    """by_lanes() undone."""
    return gl.convert_layout(x.reshape([x.shape[0], 8 * x.shape[1]]), accumulator(8 * x.shape[1]))


@gluon.jit
def along(state, x):
    """What rows (64,) or their lanes (64, 4) hold once, beside all their columns of x."""
    if len(state.shape) == 1:
        ROWS: gl.constexpr = gl.SliceLayout(1, x.type.layout)
        return gl.convert_layout(state, ROWS)[:, None]
    else:
        LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
        return gl.convert_layout(state, LANES)[:, None, :, None]


@gluon.jit
def largest(s):
    """Each lane's largest score of a row, (64, 4), as a tree: in a chain each maximum would wait for the one before."""
    STATE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, s.type.layout))
    pairs = gl.max(s, 3)
    fours = pairs.reshape([s.shape[0], 4, s.shape[1] // 4, 4])
    return gl.convert_layout(gl.max(gl.max(fours, 1), 1), STATE)


# What most often has not to be done: a warp jumps over it -----------------------------------------------------

RAISED = gl.constexpr("""{
.reg .pred p, some;
.reg .f32 a, b, x, y;
mov.f32 $0, $2;
mov.f32 $1, $3;
setp.gt.f32 p, $4, $6;
setp.gt.or.f32 p, $5, $7, p;
vote.sync.any.pred some, p, -1;
@!some bra.uni DONE;
mov.f32 a, $4;
mov.f32 b, $5;
shfl.sync.bfly.b32 x, a, 1, 31, -1;
shfl.sync.bfly.b32 y, b, 1, 31, -1;
max.f32 a, a, x;
max.f32 b, b, y;
shfl.sync.bfly.b32 x, a, 2, 31, -1;
shfl.sync.bfly.b32 y, b, 2, 31, -1;
max.f32 a, a, x;
max.f32 b, b, y;
max.f32 $0, $0, a;
max.f32 $1, $1, b;
DONE:
}""")  # $0, $1: the new m of a thread's two rows; from $2 on m, from $4 on the largest score, from $6 on the limit


@gluon.jit
def raised(m, top, limit):
    """m, (64, 4); if any `top` of a warp's rows is above its limit, the larger of m and the four lanes' tops."""
    return gl.inline_asm_elementwise(RAISED, "=&f,=&f,f,f,f,f,f,f", [m, top, limit], gl.float32, True, 2)


@gluon.constexpr_function
def multiply_unless_one(n):
    """n numbers of o, times the alpha of their row, which are two by two (row 0, row 0, row 8, row 8, row 0, …)."""
    lines = [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    ones = [f"setp.eq.f32 p, ${2 * n}, 1.0;", f"setp.eq.and.f32 p, ${2 * n + 2}, 1.0, p;"]
    jump = ["vote.sync.all.pred all, p, -1;", "@all bra.uni DONE;"]
    return "\n".join(["{", ".reg .pred p, all;", *ones, *jump, *lines, "DONE:", "}"])


@gluon.constexpr_function
def in_place(n):
    """n outputs, n inputs in the same registers, n more inputs."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def shrunk(o, alpha):
    """o (64, d) times alpha, of rows or of their lanes."""
    if len(alpha.shape) == 1:
        return o * along(alpha, o)
    else:
        N: gl.constexpr = o.shape[1] // 2  # numbers of o in a thread
        x = by_lanes(o)
        x, a = gl.broadcast(x, along(alpha, x))
        return as_tile(gl.inline_asm_elementwise(multiply_unless_one(N), in_place(N), [x, a], gl.float32, True, N))


# Masks and rounding ------------------------------------------------------------------------------------------


@aggregate
class Interval:
    """The columns that 64 rows see, and which tiles all of them see."""

    end: gl.tensor  # (64,), of each row
    full_end: gl.tensor  # of the tiles that end before every row's interval
    begin: gl.tensor | gl.constexpr  # (64,), or None, and all begin with the first column
    full: gl.tensor | gl.constexpr  # the first tile that begins after every row's interval

    @gluon.jit
    def cuts(self, j):
        """Whether some row does not see all of tile j."""
        if self.begin is None:
            return j >= self.full_end
        else:
            return (j >= self.full_end) | (j < self.full)


@gluon.jit
def mask(s, sees, first):
    """Scores, −inf outside of each row's interval; `first` is the tile's first column."""
    col = gl.arange(0, s.shape[1], gl.SliceLayout(0, accumulator(s.shape[1])))[None, :]
    s = gl.where((col & ~6) < (sees.end - first)[:, None] - (col & 6), s, NEG_INF)
    if sees.begin is not None:
        s = gl.where((col & ~6) >= (sees.begin - first)[:, None] - (col & 6), s, NEG_INF)
    return s


@gluon.jit
def rounded(p, dtype: gl.constexpr):
    """p in half precision, two numbers by one instruction.

    It is written out because otherwise the compiler rounds one by one, packs pairs the wrong way round and swaps their
    halves: 32 instructions more for a tile, of 465.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.bfloat16, True, 2)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.float16, True, 2)
