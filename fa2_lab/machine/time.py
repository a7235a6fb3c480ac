"""The clocks that one forward tile takes on each unit of an SM, which show the gain of tweak 1 and of split-Q.

The tensor cores do the matmul FLOPs, the special function units do the exponentials, and the FP32 lanes do the rest.
Operands pass through shared memory. If all four units work at the same time, the busiest one sets the pace
(`overlapped`). If each waits for the one before, their times add up (`serial`). A real kernel is between the two.

The FP32 work is what a kernel issues, which is less than what the meter counts. τ s − m is one FMA. The sum into o is
done by the tensor core's accumulator in FA2, and by an FMA in FA1, which must scale the new term first. Every
instruction runs at the FP32 rate. Conversions, addresses, loop control and HBM are left out.
"""

from typing import NamedTuple

from fa2_lab.machine import io, warps
from fa2_lab.machine.chips import Chip, check_chip
from fa2_lab.tiles import cdiv, whole_number

PRODUCT_ROWS = {(9, 0): 64, (10, 0): 128}  # rows that one instruction multiplies for all warps; older chips have none
FEWEST_ROWS = 64  # with which such an instruction is used


class Clocks(NamedTuple):
    """The clocks for which one tile keeps each unit of an SM busy."""

    tensor: float
    fp32: float
    exp: float
    shared: float

    @property
    def overlapped(self) -> float:
        """The time in clocks if all units work at once, so that the busiest unit sets the total."""
        return max(self)

    @property
    def serial(self) -> float:
        """The time in clocks if the units work one after another."""
        return sum(self)

    @property
    def busiest(self) -> str:
        return self._fields[self.index(max(self))]


# One tile ---------------------------------------------------------------------------------------------------


def tile_clocks(
    chip: Chip, B_r: int, B_c: int, d: int, *, W: int = 4, algorithm: str = "fa2", scheme: str = "split_q"
) -> Clocks:
    """Return the clocks of one forward tile of FA1 or FA2 whose queries (split_q) or keys (split_k) W warps share."""
    check_chip(chip)
    whole_number("W", W, low=1, high=32)
    ops = io.tile_operations(algorithm, "forward", B_r, B_c, d)
    by_keys = scheme == "split_k"
    moved = warps.tile_bytes(scheme, B_r, B_c, d, W if by_keys else readers(chip, B_r, W))
    parts_added = (W - 1) * B_r * d if by_keys else 0  # each warp has a partial P V
    return Clocks(
        tensor=ops["matmul"] / chip.tensor_per_clock,
        fp32=(fp32_instructions(algorithm, B_r, B_c, d) + parts_added) / chip.fp32_per_clock,
        exp=ops["exp"] / chip.exp_per_clock,
        shared=moved / chip.shared_per_clock,
    )


def fp32_instructions(algorithm: str, B_r: int, B_c: int, d: int, direction: str = "forward") -> int:
    """Return the FP32 instructions of one tile, which are the meter's count without the additions that cost nothing.

    τ s − m is one FMA. An accumulator or an FMA also computes the sums into o, or into dQ, dK and dV.
    """
    counted = io.not_matmul(io.tile_operations(algorithm, direction, B_r, B_c, d))
    summed = B_r * d if direction == "forward" else (B_r + 2 * B_c) * d
    return counted - B_r * B_c - summed


def readers(chip: Chip, B_r: int, W: int) -> int:
    """Return how often K and V are read from shared memory under split-Q: once per warp, or once per instruction.

    Before Hopper, every warp reads them for its own rows. From Hopper on, one instruction reads them for the rows of
    several warps.
    """
    rows = PRODUCT_ROWS.get(chip.compute_capability)
    return W if rows is None or B_r < FEWEST_ROWS else cdiv(B_r, rows)
