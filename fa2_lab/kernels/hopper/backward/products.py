"""Functions that start the five matmuls of a step in the Hopper backward kernel. kernel.py waits for the results."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from fa2_lab.kernels.common.constants import NEG_INF
from fa2_lab.kernels.hopper.backward.rows import COLS
from fa2_lab.kernels.hopper.shared.pipeline import acc_layout, as_operand, matmul_over_d, matrix

V_REG_COLS = gl.constexpr(64)  # number of columns of V that stay in registers if v_in_registers is set


@gluon.jit
def start_scores(c: gl.constexpr, n, q, bounds, smem):
    """Start the matmul K Qᵀ − L/scale (64, B_r) for consumer c's columns and the n-th row block.

    The accumulator is initialized to −L/scale, or to −∞ for masked entries.
    """
    B_r: gl.constexpr = smem.config.B_r
    init = broadcast_init(smem.row_blocks.load_acc_init(n, 0))
    if bounds.CUT:
        first = smem.row_blocks.read(n, "row")
        cut = first < bounds.unmasked_from
        if bounds.end is not None:
            cut |= first + B_r > bounds.end
        if cut:
            row = gl.arange(0, B_r, gl.SliceLayout(0, acc_layout(B_r)))[None, :]
            init = gl.where((row & ~6) >= (bounds.begin - first)[:, None] - (row & 6), init, NEG_INF)
            if bounds.end is not None:
                end = bounds.end + c * COLS + gl.arange(0, COLS, gl.SliceLayout(1, acc_layout(B_r)))
                init = gl.where((row & ~6) < (end - first)[:, None] - (row & 6), init, NEG_INF)
    k = matrix(smem.k.tiles.index(smem.row_blocks.read(n, "k_stage"))).slice(c * COLS, COLS, 0)
    return matmul_over_d(k, q, init, smem.config.skip_last_quarter)  # FA2.A2.L10


@gluon.jit
def start_dp(n, v, v_regs, do, smem):
    """Start the matmul V dOᵀ − D (64, B_r) for the n-th row block, with an accumulator initialized to −D.

    `v_regs` is the result of load_v(), which contains half of V if v_in_registers is set.
    """
    dp = broadcast_init(smem.row_blocks.load_acc_init(n, 1))
    if smem.config.v_in_registers:
        dp = warpgroup_mma(v_regs, do.slice(0, V_REG_COLS, 1).permute((1, 0)), dp, is_async=True)  # FA2.A2.L13
        REST: gl.constexpr = V_REG_COLS // 2 if smem.config.skip_last_quarter else V_REG_COLS
        v, do = v.slice(V_REG_COLS, REST, 1), do.slice(V_REG_COLS, REST, 1)
        return warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)  # FA2.A2.L13
    else:
        return matmul_over_d(v, do, dp, smem.config.skip_last_quarter)  # FA2.A2.L13


@gluon.jit
def broadcast_init(init):
    """Broadcast `init`, which has one element per query row, to the shape (64, B_r) of a matmul accumulator."""
    B_r: gl.constexpr = init.shape[1]
    init, _ = gl.broadcast(init, gl.zeros([COLS, B_r], gl.float32, acc_layout(B_r)))
    return init


@gluon.jit
def start_dv(dv, p, do):
    """Start the matmul that adds P dO to dv (64, d).

    Return dv and P (64, B_r), both of which must stay in registers until the matmul ends.
    """
    p = as_operand(p, do.dtype, do.shape[1])
    return warpgroup_mma(p, do, dv, is_async=True), p  # FA2.A2.L12


@gluon.jit
def start_dk(n, dk, ds, smem):
    """Start the matmul that adds dS Q of row block n to dk (64, d). ds must stay in registers until the matmul ends."""
    q, _ = smem.row_blocks.tiles(n)
    return warpgroup_mma(ds, q, dk, is_async=True)  # FA2.A2.L16


@gluon.jit
def start_dq(c: gl.constexpr, n, smem):
    """Start the matmul for consumer c's half of the n-th row block's dQ, over all 128 keys of the column block.

    A consumer computes half of dQ's columns or, if B_r = 128, half of its rows.
    """
    W: gl.constexpr = smem.config.W
    mbarrier.wait(smem.ds_filled, n & 1)
    k = matrix(smem.k.tiles.index(smem.row_blocks.read(n, "k_stage")))
    ds = smem.ds.index(n & 1)
    zero = gl.zeros([64, W], gl.float32, acc_layout(W))
    if smem.config.B_r == 64:
        ds = ds.permute((1, 0))
        k = k.slice(c * W, W, 1)
    else:
        ds = ds.slice(c * 64, 64, 1).permute((1, 0))
    return warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)  # (64, W)  FA2.A2.L15
