"""Select the configuration of a Hopper backward launch, and determine for which calls other kernels are faster.

The configurations and costs were fitted to run times on an H200 with Triton 3.9. The measurements cover the paper's
grid of problems and 510 random shapes like those of `fa2-lab bench sweep`. Each problem was timed with several numbers
of parts per column block. PORTABLE_IS_FASTER also relies on older measurements. There is no command that repeats the
fit.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from fa2_lab.kernels.hopper.shared.host import even_l2_group, skips_last_quarter, smallest_fitting
from fa2_lab.kernels.launches import MiB
from fa2_lab.kernels.tables import LOW_REG_SCHEDULE, USE_LOW_REG
from fa2_lab.tiles import cdiv

DIMENSIONS = range(32, 129, 8)  # TMA zero-pads each head dimension to 32, 64 or 128
SMALLEST_SCALE = 2.0**-60  # the accumulator of S starts at −L/scale, which must not overflow


class PortableLimits(NamedTuple):
    """Limits within which the portable kernels are faster than the Hopper kernels."""

    max_N_k: int
    max_row_blocks_per_SM: float  # number of 64-row blocks per SM, over all heads
    max_N_q_if_half_idle: int  # limit on N_q if portable programs for dK and dV occupy fewer than half of the SMs


@dataclass(frozen=True)
class BackwardConfig:
    """The tile sizes of a launch and the order of its matmuls.

    Every configuration fits in an SM's registers and shared memory.
    """

    B_r: int  # rows per row block (a column block always has 128 keys)
    d_pad: int
    dv_late: bool  # whether P dO starts only after dS is in shared memory, which saves registers
    dk_late: bool  # whether dS Q is deferred to the next step
    v_in_registers: bool  # whether half of V stays in registers
    last_first: bool  # whether row blocks are visited from last to first (the last one sees all column blocks)
    low_reg_schedule: bool = False  # whether the compiler orders instructions to save registers
    skip_last_quarter: bool = False  # whether sums over d omit the last quarter of the d_pad columns, which is padding

    @property
    def compiler_options(self) -> dict:
        """The compiler options for the launch."""
        return dict(num_warps=4) | (LOW_REG_SCHEDULE if self.low_reg_schedule else {})

    @property
    def W(self) -> int:
        """The number of columns in a consumer's 64-row tile of dQ."""
        return self.B_r * self.d_pad // 128


def choose(d: int, N_q: int, masked: bool, ragged: bool, deterministic: bool = False) -> BackwardConfig:
    """Return the fastest configuration for a call. `ragged` is True if a column block may extend past the last key.

    `masked` is True for the causal mask and for windows, which use the configurations measured for the causal mask. The
    fields of BackwardConfig were chosen by measurement. Under the causal mask, dk_late makes calls 2 to 7% faster, but
    at d = 128, only calls with more than 2,048 rows benefit. Without a mask, dk_late makes calls 2 to 4% slower, and
    with Triton 3.9, it makes all calls up to 4% slower. v_in_registers takes 16 registers and makes calls 1 to 4%
    faster at d = 128, but calls with a mask or with `deterministic` do not have enough registers for it. last_first
    makes long sequences 1 to 5% faster at d = 64, but short ones up to 6% slower at d = 128. With `deterministic`,
    at d = 128 or under the causal mask, the instruction order spills up to 48 bytes per thread, because an order
    without spills is 1 to 3% slower.
    """
    if d <= 64:
        order = dict(dv_late=True, dk_late=masked and not USE_LOW_REG, last_first=not deterministic)
        order |= dict(v_in_registers=False)
        order |= dict(low_reg_schedule=USE_LOW_REG and not (deterministic and masked))
        d_pad = 64 if d > 32 else 32
        return BackwardConfig(128, d_pad, **order, skip_last_quarter=skips_last_quarter(d, d_pad))
    v_in_registers = not (masked or ragged or deterministic)
    dk_late = masked and N_q > 2048 and not USE_LOW_REG
    order = dict(dv_late=USE_LOW_REG and v_in_registers, dk_late=dk_late, last_first=False)
    return BackwardConfig(64, 128, v_in_registers=v_in_registers, **order, skip_last_quarter=skips_last_quarter(d, 128))


# For small problems, the portable kernels are faster because the host needs 25 µs for their two launches but 40 µs for
# the three launches of the Hopper kernels. At d = 96 and d = 128, this saving exceeds the 2 to 6 µs that the portable
# kernels lose on the GPU. The Hopper kernels are always chosen for grouped heads. They are also chosen for many rows
# with few keys. In this case, only a few portable programs would run, since each of them owns up to 64 keys. Each
# program would loop over all rows, leaving most SMs idle for a long time.
PORTABLE_IS_FASTER = {  # {largest d: limits}
    64: PortableLimits(512, 2, 2048),
    96: PortableLimits(256, 1, 700),
    128: PortableLimits(256, 1, 700),
    256: PortableLimits(0, 0, 0),  # prepare() rejects d > 128
}


def is_fastest(d: int, N_q: int, N_k: int, heads: int, grouped: bool, SMs: int) -> bool:
    """Return whether the Hopper backward kernels are the fastest choice.

    `heads` is the number of query heads over all batch entries, and `grouped` is True if several of them share a K/V
    head.
    """
    row_blocks_per_SM = cdiv(N_q, 64) * heads / SMs
    limits = smallest_fitting(d, PORTABLE_IS_FASTER)
    half_idle = 2 * cdiv(N_k, 64) * heads < SMs
    little_work = N_k <= limits.max_N_k and row_blocks_per_SM <= limits.max_row_blocks_per_SM
    little_work = little_work and not (half_idle and N_q > limits.max_N_q_if_half_idle)
    # If half of each column block is empty, the portable kernels are 1.2 to 1.4 times as fast as the Hopper kernels.
    half_empty = N_k <= 64 and 2 * heads >= SMs
    return grouped or not (little_work or half_empty)


# The cost of dividing a column block among programs. The unit is the time of one step, which processes one row block.
PART_COST = {32: 1, 64: 1, 128: 3}  # {d_pad: cost of starting and finishing a part}
SUM_COST, SUM_COST_PER_COLUMN = 2, 1 / 4096  # cost of adding up dK and dV in HBM: a constant and a cost per column
IDLE_SHARE = 1 / 5  # with a mask, idle time at the end of the kernel, as a fraction of the longest part's time
DRIFT_FACTOR = 1.09  # slowdown if masked parts with more than four query heads drift apart and stop sharing Q in L2


def choose_parts(column_blocks: int, steps: int, SMs: int, masked: bool, group: int, d_pad: int) -> int:
    """Return the number of parts per column block that minimizes the estimated time of the call.

    Each column block takes `steps` steps, one per row block. Without a mask, all parts take the same time and run in
    rounds of one part per SM. With a mask, the model assumes that parts take half of their steps on average, as under
    the causal mask, and that the longest parts run first.
    """

    def time(parts: int) -> float:
        rounds, longest, part_cost = column_blocks * parts / SMs, steps / parts, PART_COST[d_pad]
        sum_cost = SUM_COST + column_blocks * d_pad * SUM_COST_PER_COLUMN if parts > 1 else 0
        if masked:
            drift = DRIFT_FACTOR if group > 4 * parts else 1
            balanced = rounds * (longest / 2 + part_cost) + longest * IDLE_SHARE
            return max(balanced, longest + part_cost) * drift + sum_cost
        return math.ceil(rounds) * (longest + part_cost) + sum_cost

    return min((2**n for n in range(9) if 2**n <= steps), key=time)


def l2_group(blocks: int, heads: int, SMs: int, masked: bool, group: int, bytes_per_head: int) -> int:
    """Return the number of heads to process concurrently, given `heads` heads with `blocks` column blocks each.

    Each part of a divided K/V head is treated as a head. Without a mask, one head is processed at a time, so that
    concurrent programs read the same rows and dQ's accumulators stay in L2. With a mask, column blocks take different
    amounts of time, so several heads are needed to balance the load. These heads must fill most SMs, and their number
    must not fall below a minimum. The minimum is four if more than two query heads share a K/V head. Otherwise, it is
    the number of heads, from two to eight, whose Q, dO and accumulators (`bytes_per_head` bytes per head) fit in 32 MiB
    of L2. even_l2_group() may return up to twice the minimum. With even more heads, calls become 10% and eventually 40%
    slower.
    """
    least = 4 if group > 2 else min(8, max(2, 32 * MiB // bytes_per_head))
    return even_l2_group(heads, max(least, math.ceil(0.8 * SMs / blocks))) if masked else 1


def deterministic_l2_group(N_q: int, d: int, group: int) -> int:
    """Return the number of K/V heads to process concurrently if dQ is accumulated in a fixed order.

    More heads hide more of the writers' waiting time, but their Q and dO must fit in 8 MiB of L2.
    """
    return max(1, 8 * MiB // (4 * N_q * d * group))
