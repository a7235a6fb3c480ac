"""A model of the clock cycles of a forward tile on each unit of an SM, which shows the gains from tweak 1 and split-Q.

The tensor cores compute the matmuls, the special function units compute the exponentials, and the FP32 lanes compute
the rest. Operands pass through shared memory. If all four units work concurrently, the busiest unit determines the time
(`overlapped`). If each unit waits for the previous one, their times add up (`serial`). The time of a real kernel is in
between.

The FP32 work is the number of instructions that a kernel issues, which is smaller than the number of operations that
the meter in fa2_lab.trace counts. For example, τ s − m is a single FMA. The accumulation into o is part of a matmul in
FA2 but requires an FMA in FA1, which must scale the new term first. Every instruction is assumed to run at the FP32
rate. Conversions, addresses, loop control and HBM are ignored.
"""

from typing import NamedTuple

from fa2_lab.machine import io_model, warps
from fa2_lab.machine.chips import Chip, check_chip
from fa2_lab.tiles import cdiv, whole_number

MULTI_WARP_ROWS = {(9, 0): 64, (10, 0): 128}  # {compute capability: rows per multi-warp matmul instruction}
MIN_MULTI_WARP_ROWS = 64  # the smallest B_r for which multi-warp matmul instructions are used


class Clocks(NamedTuple):
    """The number of clock cycles that one tile takes on each unit of an SM."""

    tensor: float
    fp32: float
    exp: float
    shared: float

    @property
    def overlapped(self) -> float:
        """The clock cycles that the busiest unit takes, which are the total if all units work concurrently."""
        return max(self)

    @property
    def serial(self) -> float:
        """The sum of the clock cycles of all units, which is the total if the units work one after another."""
        return sum(self)


# One tile ---------------------------------------------------------------------------------------------------


def tile_clocks(
    chip: Chip, B_r: int, B_c: int, d: int, *, W: int = 4, algorithm: str = "fa2", scheme: str = "split_q"
) -> Clocks:
    """Return the clock cycles that one forward tile takes if W warps share it.

    `algorithm` is "fa1" or "fa2". `scheme` is "split_q" if the warps divide the queries, or "split_k" if they divide
    the keys.
    """
    check_chip(chip)
    whole_number("W", W, low=1, high=32)
    ops = io_model.tile_operations(algorithm, "forward", B_r, B_c, d)
    by_keys = scheme == "split_k"
    moved = warps.access_bytes(scheme, B_r, B_c, d, W if by_keys else reads_per_tile(chip, B_r, W))
    parts_added = (W - 1) * B_r * d if by_keys else 0  # each warp has a partial P V
    return Clocks(
        tensor=ops["matmul"] / chip.tensor_flops_per_clock,
        fp32=(fp32_instructions(algorithm, B_r, B_c, d) + parts_added) / chip.fp32_per_clock,
        exp=ops["exp"] / chip.exp_per_clock,
        shared=moved / chip.shared_bytes_per_clock,
    )


def fp32_instructions(algorithm: str, B_r: int, B_c: int, d: int, direction: str = "forward") -> int:
    """Return the number of FP32 instructions for one tile.

    The number includes all operations that io_model counts, except exponentials, matmuls and two kinds of additions,
    which need no instruction of their own: the subtraction of m in τ s − m is part of an FMA, and the accumulation into
    o, dQ, dK and dV is part of an FMA or a matmul.
    """
    counted = io_model.other_operations(io_model.tile_operations(algorithm, direction, B_r, B_c, d))
    summed = B_r * d if direction == "forward" else (B_r + 2 * B_c) * d
    return counted - B_r * B_c - summed


def reads_per_tile(chip: Chip, B_r: int, W: int) -> int:
    """Return how many times W warps together read each tile of K and V from shared memory under split-Q.

    Before Hopper, every warp reads K and V for its own rows. From Hopper on, a single instruction can read them for the
    rows of several warps.
    """
    rows = MULTI_WARP_ROWS.get(chip.compute_capability)
    return W if rows is None or B_r < MIN_MULTI_WARP_ROWS else cdiv(B_r, rows)
