"""The configurations of a Hopper backward launch: which is fastest, and for which calls other kernels are faster.

Configurations and costs were fitted to times on an H200 with Triton 3.9, measured for the paper's grid of problems and
for 510 random shapes like those of `fa2-lab bench sweep`, each with several numbers of parts per column block.
PORTABLE_IS_FASTER is also based on older measurements. No command repeats the fit.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from fa2_lab.kernels.hopper.shared.host import even_l2_group, smallest_fitting
from fa2_lab.kernels.launch import MiB
from fa2_lab.kernels.tables import LOW_REG_SCHEDULE, USE_LOW_REG
from fa2_lab.tiles import cdiv

DIMENSIONS = range(32, 129, 8)  # TMA pads them with zeros to 64 or 128
SMALLEST_SCALE = 2.0**-60  # S starts from −L/scale, which must not overflow


class PortableLimits(NamedTuple):
    """The portable kernels are faster for calls within these limits."""

    max_N_k: int
    max_row_blocks_per_SM: float  # blocks of 64 rows, over all heads
    max_N_q_if_half_idle: int  # applies if portable column programs would use under half of the SMs


@dataclass(frozen=True)
class BackwardConfig:
    """A launch's sizes and the order of its matmuls.

    The sizes fit in an SM's registers and shared memory.
    """

    B_r: int  # rows per row block; a column block has 128 keys
    d_pad: int
    dv_late: bool  # whether P dO starts only after dS is in shared memory, which saves registers
    dk_late: bool  # whether a step's dS Q starts in the next step
    v_in_registers: bool  # whether half of V stays in registers
    last_first: bool  # whether row blocks are visited from last to first; the last one sees all column blocks
    low_reg_schedule: bool = False  # whether the compiler orders instructions so that fewer registers are needed

    @property
    def options(self) -> dict:
        """The compiler options for the launch."""
        return dict(num_warps=4) | (LOW_REG_SCHEDULE if self.low_reg_schedule else {})

    @property
    def W(self) -> int:
        """The number of columns in a consumer's tile of dQ, which has 64 rows."""
        return self.B_r * self.d_pad // 128


def choose(d: int, N_q: int, masked: bool, ragged: bool, deterministic: bool = False) -> BackwardConfig:
    """Return the fastest configuration for a call. `ragged` is True if a column block may reach past the last key.

    `masked` is True for the causal mask and for windows, which use the configurations that were measured for the causal
    mask. The fields of BackwardConfig are chosen by measurement. Under the causal mask, dk_late is 2 to 7% faster, but
    at d = 128 only with more than 2,048 rows. Without a mask, it is 2 to 4% slower. Since Triton 3.9, dk_late is up to
    4% slower for all calls. v_in_registers takes 16 registers and is 1 to 4% faster at d = 128, but with a mask, or
    with `deterministic`, there are not enough registers. last_first is 1 to 5% faster at d = 64 if sequences are long,
    and up to 6% slower at d = 128 if they are short. With `deterministic`, at d = 128 or under the causal mask, an
    instruction order without spills is 1 to 3% slower than one that spills up to 48 bytes per thread.
    """
    if d <= 64:
        order = dict(dv_late=True, dk_late=masked and not USE_LOW_REG, last_first=not deterministic)
        order |= dict(v_in_registers=False)
        return BackwardConfig(128, 64, **order, low_reg_schedule=USE_LOW_REG and not (deterministic and masked))
    v_in_registers = not (masked or ragged or deterministic)
    dk_late = masked and N_q > 2048 and not USE_LOW_REG
    order = dict(dv_late=USE_LOW_REG and v_in_registers, dk_late=dk_late, last_first=False)
    return BackwardConfig(64, 128, v_in_registers=v_in_registers, **order)


# With little work, the portable kernels are faster: their two launches take the host 25 µs, against 40 µs for the three
# here. At d = 96 and 128, that saving exceeds the 2 to 6 µs that they lose on the GPU. At d = 32, the Hopper kernel
# pads rows to 64 elements, and is still 1.03 to 2.1 times as fast from 2,049 keys upwards (Triton 3.9). The Hopper
# kernel is always chosen for grouped heads. It is also chosen for many rows with few keys: a portable program owns at
# most 64 keys and loops over all rows, so a few programs would keep a few SMs busy for a long time.
PORTABLE_IS_FASTER = {  # {largest d: limits}
    32: PortableLimits(2048, math.inf, 2048),
    64: PortableLimits(512, 2, 2048),
    96: PortableLimits(256, 1, 700),
    128: PortableLimits(256, 1, 700),
    256: PortableLimits(0, 0, 0),  # prepare() rejects d > 128
}


def enough_work(d: int, N_q: int, N_k: int, heads: int, grouped: bool, SMs: int) -> bool:
    """Return whether the Hopper backward is the fastest choice.

    `heads` counts the query heads of all batch entries, and `grouped` is True if several of them share a K/V head.
    """
    row_blocks_per_SM = cdiv(N_q, 64) * heads / SMs
    limits = smallest_fitting(d, PORTABLE_IS_FASTER)
    half_idle = 2 * cdiv(N_k, 64) * heads < SMs
    little_work = N_k <= limits.max_N_k and row_blocks_per_SM <= limits.max_row_blocks_per_SM
    little_work = little_work and not (half_idle and N_q > limits.max_N_q_if_half_idle)
    half_empty = N_k <= 64 and 2 * heads >= SMs  # a block has at most 64 keys; portable is 1.2 to 1.4 × as fast
    return grouped or not (little_work or half_empty)


# The cost of dividing a column block among programs, in steps (row blocks).
PART_COST = {64: 1, 128: 3}  # {d_pad: cost of beginning and ending a part}
SUM_COST, SUM_COST_PER_COLUMN = 2, 1 / 4096  # cost of adding up dK and dV in HBM: fixed, and per column block · d_pad
IDLE_SHARE = 1 / 5  # idle time at the end, because masked parts differ in length, as a share of the longest part's time
DRIFT_FACTOR = 1.09  # slowdown if masked parts of over four query heads drift apart and no longer share Q in L2


def choose_parts(column_blocks: int, steps: int, SMs: int, masked: bool, group: int, d_pad: int) -> int:
    """Return the number of parts per column block that minimizes the call's time.

    A column block has `steps` steps, one per row block. Parts of equal length run in rounds, with one part per SM. With
    a mask, parts are assumed to have half the steps on average, as under the causal mask, and the longest parts run
    first.
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
    """Return the number of heads to process concurrently, out of `heads` heads with `blocks` column blocks each.

    Each part of a divided K/V head counts as a head. Without a mask, one head is processed at a time, so that
    concurrent programs read the same rows, and dQ's accumulators stay in L2. With a mask, column blocks take different
    amounts of time. To even these out, at least eight heads are processed concurrently, and enough to fill most SMs. If
    more than two query heads share a K/V head, the minimum is four heads instead of eight. Otherwise, it is the number
    of heads, from two to eight, whose Q, dO and accumulators (`bytes_per_head` bytes per head) fit in 32 MiB of L2.
    even_l2_group() may return up to twice the minimum. Beyond that, calls are up to 10% and eventually 40% slower.
    """
    least = 4 if group > 2 else min(8, max(2, 32 * MiB // bytes_per_head))
    return even_l2_group(heads, max(least, math.ceil(0.8 * SMs / blocks))) if masked else 1


def deterministic_l2_group(N_q: int, d: int, group: int) -> int:
    """Return the number of K/V heads to process concurrently if dQ is accumulated in a fixed order.

    More heads hide more of the writers' waiting time, as long as the heads' Q and dO fit in 8 MiB of L2.
    """
    return max(1, 8 * MiB // (4 * N_q * d * group))
