"""Select the configuration of a Hopper forward launch, and determine for which calls other kernels are faster.

The tables were fitted to run times of every configuration on an H200 with Triton 3.9. The measurements cover the
paper's grid of problems and 510 random shapes like those of `fa2-lab bench sweep`. The values for d = 32, d = 192
and d = 256 are based on fewer calls. There is no command that repeats the fit. Throughout, `row_blocks_per_SM` is the
number of 64-row blocks per SM, counted over all heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from fa2_lab.kernels.hopper.shared.host import even_l2_group, skips_last_quarter, smallest_fitting
from fa2_lab.kernels.launches import MiB
from fa2_lab.kernels.tables import LOW_REG_SCHEDULE, USE_LOW_REG, padded_head_dim
from fa2_lab.tiles import cdiv

NO_LIMIT = float("inf")
DIMENSIONS = range(32, 257, 8)  # TMA zero-pads each head dimension to tma_d_pad(d): 32, 64, 128 or 256


class CausalCase(NamedTuple):
    """A configuration for causal calls, with the limits within which it applies."""

    max_row_blocks_per_SM: float
    max_N_q: float
    key_lengths: bool | None  # whether the calls have key_lengths, or None if that makes no difference
    config: ForwardConfig


class UnmaskedTime(NamedTuple):
    """The estimated time of an unmasked row block: tile · keys / 128 + start, with keys rounded up to whole tiles."""

    config: ForwardConfig
    tile: float
    start: float


class PortableCase(NamedTuple):
    """Limits on calls for which the portable kernel is faster.

    Such a call has more than `over_row_blocks_per_SM` row blocks per SM and exceeds none of the other limits.
    """

    max_N_q: float
    max_N_k: float
    over_row_blocks_per_SM: float
    max_row_blocks_per_SM: float


@dataclass(frozen=True)
class ForwardConfig:
    """The block sizes and other parameters of a launch.

    Every configuration fits in an SM's 64 K registers and 227 KiB of shared memory.
    """

    B_c: int  # keys per tile
    consumers: int  # warpgroups with 64 rows each
    stages: int  # number of stages in each of the rings of K and V
    d_pad: int = 128
    ping_pong: bool = False  # whether consumers take turns starting their matmuls
    separate_O_buffer: bool = True  # whether O is copied to HBM from a buffer of its own instead of from Q's buffer
    low_reg_schedule: bool = False  # whether the compiler orders instructions to save registers
    skip_last_quarter: bool = False  # whether Q Kᵀ leaves out the last quarter of the d_pad columns, which is padding

    @property
    def rows(self) -> int:
        """The number of rows in a row block."""
        return 64 * self.consumers

    @property
    def registers(self) -> int:
        """The number of registers per consumer thread.

        The producer uses at most 32 registers per thread, and the consumers share all other registers of an SM.
        """
        return min(240, (512 - 32) // self.consumers)

    @property
    def shared(self) -> dict[str, int]:
        """The size in bytes of each tensor's buffers in shared memory, excluding barriers and the mailbox.

        If O has its own buffer, each consumer has two buffers for Q so that the next row block's Q can be copied early.
        """
        rows = dict(
            Q=self.rows * (2 if self.separate_O_buffer else 1), K=self.stages * self.B_c, V=self.stages * self.B_c
        )
        rows |= dict(O=self.rows) if self.separate_O_buffer else {}
        return {tensor: 2 * n * self.d_pad for tensor, n in rows.items()}

    @property
    def compiler_options(self) -> dict:
        """The compiler options for the launch.

        At d = 256, the option for saving registers is unnecessary because the kernel saves enough registers by
        computing Q's addresses only when they are needed.
        """
        return dict(num_warps=4) | (LOW_REG_SCHEDULE if self.low_reg_schedule and self.d_pad < 256 else {})


# The default configurations by d_pad. One consumer is slower than several, but needs fewer rows to keep an SM busy.
DEFAULT = {
    64: ForwardConfig(128, consumers=3, stages=4, d_pad=64, ping_pong=True),
    128: ForwardConfig(128, consumers=2, stages=2),
    256: ForwardConfig(64, consumers=2, stages=2, d_pad=256, separate_O_buffer=False, low_reg_schedule=USE_LOW_REG),
}
ONE_CONSUMER = {d_pad: replace(config, consumers=1, ping_pong=False) for d_pad, config in DEFAULT.items()}
# These configurations use half as many keys per tile as the defaults. They suit short causal rows, where the diagonal
# cuts most tiles, and unmasked rows that leave much of the last tile empty. At d = 64, they also suit unmasked rows
# that are so short that an earlier start matters.
HALF_B_C = {64: ForwardConfig(64, consumers=3, stages=8, d_pad=64), 128: ForwardConfig(64, consumers=2, stages=4)}
# This configuration is used at d = 64 if N_q leaves much of the last block of 192 rows empty, and for causal calls with
# key_lengths. Its variant has half as many keys per tile.
TWO_CONSUMERS = ForwardConfig(128, consumers=2, stages=3, d_pad=64, ping_pong=True)
TWO_CONSUMERS_HALF_B_C = replace(TWO_CONSUMERS, B_c=64, stages=6)
# This configuration suits calls with many rows and d from 72 to 128 because it reads K and V only once per 192 rows.
THREE_CONSUMERS = ForwardConfig(64, consumers=3, stages=5, separate_O_buffer=False)

# Without a mask, all row blocks take the same time, so they are modeled as rounds of one row block per SM. Only
# configurations with the same d_pad are compared. At d = 32, choose() takes the configurations for d = 64 and replaces
# their d_pad.
UNMASKED_TIMES = {  # {d_pad: times}
    32: [
        UnmaskedTime(ONE_CONSUMER[64], 0.7, 0.0),
        UnmaskedTime(HALF_B_C[64], 1.3, 0.3),
        UnmaskedTime(TWO_CONSUMERS, 1.02, 0.0),
        UnmaskedTime(DEFAULT[64], 1.18, 0.5),
    ],
    64: [
        UnmaskedTime(ONE_CONSUMER[64], 0.75, 0.0),
        UnmaskedTime(HALF_B_C[64], 1.25, 0.58),
        UnmaskedTime(TWO_CONSUMERS, 1.14, 0.0),
        UnmaskedTime(DEFAULT[64], 1.18, 0.86),
    ],
    128: [
        UnmaskedTime(DEFAULT[128], 1.0, 1.0),
        UnmaskedTime(ONE_CONSUMER[128], 0.75, 0.45),
        UnmaskedTime(HALF_B_C[128], 1.03, 1.0),
        UnmaskedTime(THREE_CONSUMERS, 1.33, 2.26),
    ],
    256: [UnmaskedTime(DEFAULT[256], 1.0, 1.0), UnmaskedTime(ONE_CONSUMER[256], 0.75, 0.45)],
}

# Under the causal mask, row blocks take different amounts of time, so they cannot be modeled as rounds. Instead, the
# first matching case is used. If N_k is at least 1.5 N_q and the call has no key_lengths, however, row blocks differ so
# little that UNMASKED_TIMES is used.
CAUSAL_CASES: dict[int, list[CausalCase]] = {  # {largest d: cases}
    64: [
        CausalCase(2.5, NO_LIMIT, None, ONE_CONSUMER[64]),
        CausalCase(NO_LIMIT, NO_LIMIT, True, TWO_CONSUMERS),
        CausalCase(NO_LIMIT, 256, None, TWO_CONSUMERS_HALF_B_C),
        CausalCase(4.2, NO_LIMIT, None, TWO_CONSUMERS),
        CausalCase(NO_LIMIT, 2048, None, HALF_B_C[64]),
        CausalCase(NO_LIMIT, NO_LIMIT, None, DEFAULT[64]),
    ],
    128: [
        CausalCase(2.4, 512, None, replace(HALF_B_C[128], consumers=1)),
        CausalCase(2.4, NO_LIMIT, None, ONE_CONSUMER[128]),
        CausalCase(NO_LIMIT, 1024, False, HALF_B_C[128]),
        CausalCase(NO_LIMIT, NO_LIMIT, True, DEFAULT[128]),
        CausalCase(9, NO_LIMIT, None, DEFAULT[128]),
        CausalCase(NO_LIMIT, NO_LIMIT, None, THREE_CONSUMERS),
    ],
    192: [CausalCase(1.5, NO_LIMIT, None, ONE_CONSUMER[256]), CausalCase(NO_LIMIT, NO_LIMIT, None, DEFAULT[256])],
    256: [CausalCase(2.3, NO_LIMIT, None, ONE_CONSUMER[256]), CausalCase(NO_LIMIT, NO_LIMIT, None, DEFAULT[256])],
}

# For calls with few keys, the portable kernel is faster because it starts sooner.
PORTABLE_IS_FASTER: dict[int, list[PortableCase]] = {  # {largest d: cases}
    32: [PortableCase(3000, 1000, 0, NO_LIMIT)],
    64: [PortableCase(NO_LIMIT, 512, 0, 4), PortableCase(511, 2048, 1, 4), PortableCase(64, 2048, 1, 32)],
    96: [PortableCase(NO_LIMIT, 255, 0, 2), PortableCase(NO_LIMIT, 384, 0, 1)],
    128: [PortableCase(NO_LIMIT, 255, 0, 2), PortableCase(NO_LIMIT, 512, 0, 0.5)],
    256: [],
}


def tma_d_pad(d: int) -> int:
    """Return d padded to 32, 64, 128 or 256, which is the number of columns in a tile."""
    return max(32, padded_head_dim(d))


def for_d(config: ForwardConfig, d: int) -> ForwardConfig:
    """Return the configuration with d_pad and skip_last_quarter set for head dimension d."""
    d_pad = tma_d_pad(d)
    return replace(config, d_pad=d_pad, skip_last_quarter=skips_last_quarter(d, d_pad))


def choose_for_window(d: int, causal: bool) -> ForwardConfig:
    """Return the configuration for a call with a window, for d up to 128.

    Tiles have 64 keys because both edges of the window cut tiles. The window's mask takes additional registers, for
    which there is no room above d = 128. Above d = 64, some registers would spill without `low_reg_schedule`, unless
    the window ends at the diagonal (right = 0).
    """
    if d <= 64:
        return for_d(HALF_B_C[64], d)
    return for_d(replace(THREE_CONSUMERS, low_reg_schedule=USE_LOW_REG and not causal), d)


def choose(d: int, N_q: int, N_k: int, heads: int, SMs: int, causal: bool, has_key_lengths: bool) -> ForwardConfig:
    """Return the fastest configuration for a call without a window.

    `heads` is the number of query heads over all batch entries, and `has_key_lengths` is True if key_lengths is given.
    """
    d_pad, row_blocks_per_SM = tma_d_pad(d), cdiv(N_q, 64) * heads / SMs

    def time(case: UnmaskedTime) -> float:
        B_c, row_blocks = case.config.B_c, cdiv(N_q, case.config.rows) * heads
        rounds, keys = cdiv(row_blocks, SMs), cdiv(N_k, B_c) * B_c
        return rounds * (case.tile * keys / 128 + case.start)

    if causal and (has_key_lengths or 2 * N_k < 3 * N_q):
        config = next(
            case.config
            for case in smallest_fitting(d, CAUSAL_CASES)
            if row_blocks_per_SM <= case.max_row_blocks_per_SM
            and N_q <= case.max_N_q
            and case.key_lengths in (None, has_key_lengths)
        )
    else:
        times = UNMASKED_TIMES[d_pad]
        times = [case for case in times if not (has_key_lengths and case.config == THREE_CONSUMERS)]
        config = min(times, key=time).config
        if causal and config == DEFAULT[128]:  # ping-pong keeps consumers in step if they have unequal numbers of tiles
            config = replace(config, ping_pong=True)
    masked = causal and config == DEFAULT[64]  # the mask takes additional registers, so the compiler has to save some
    config = for_d(config, d)
    return replace(config, low_reg_schedule=USE_LOW_REG) if masked else config


def is_fastest(d: int, N_q: int, N_k: int, heads: int, SMs: int) -> bool:
    """Return whether the Hopper forward kernel is the fastest choice.

    `heads` is the number of query heads over all batch entries."""
    row_blocks_per_SM = cdiv(N_q, 64) * heads / SMs
    return not any(
        N_q <= case.max_N_q
        and N_k <= case.max_N_k
        and case.over_row_blocks_per_SM < row_blocks_per_SM <= case.max_row_blocks_per_SM
        for case in smallest_fitting(d, PORTABLE_IS_FASTER)
    )


def l2_group(N_k: int, d: int, heads: int, causal: bool) -> int:
    """Return the number of K/V heads to process concurrently so that their K and V stay in L2.

    Without a mask, heads are processed one at a time, and concurrent programs read the same K and V. With a causal
    mask, row blocks take different amounts of time, and processing several heads concurrently balances the load. In
    this case, return the number of heads whose K and V fit in 11 MiB of L2, or in 21 MiB if one head's K and V take 1
    MiB or more. even_l2_group() may return up to twice this number.
    """
    if not causal:
        return 1
    kv_bytes_per_head = 4 * N_k * d
    capacity = (21 if kv_bytes_per_head >= MiB else 11) * MiB
    return even_l2_group(heads, max(1, capacity // kv_bytes_per_head))
