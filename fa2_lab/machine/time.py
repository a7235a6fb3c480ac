"""Clocks of one forward tile on each unit of an SM: what tweak 1 and split-Q are worth.

The matmul FLOPs go to the tensor cores, the exponentials to the special function units, the rest to the FP32 lanes, and
operands pass through shared memory. `overlapped` is the time if the four work at the same moment (the busiest sets the
pace), `serial` if each waits for the one before; a real kernel lies between.

FP32 work is what a kernel issues, not what the meter counts: τ s − m is one FMA, and the sum into o is done by the
tensor core's accumulator (FA2) or by an FMA (FA1, which must scale the new part first). Every instruction runs at the
FP32 rate; conversions, addresses, loop control and HBM are left out.
"""

from typing import NamedTuple

from fa2_lab.machine import io, warps
from fa2_lab.machine.chips import Chip, check_chip
from fa2_lab.tiles import cdiv, whole_number

PRODUCT_ROWS = {(9, 0): 64, (10, 0): 128}  # that one instruction multiplies for all warps; before Hopper, none did
FEWEST_ROWS = 64  # of such an instruction


class Clocks(NamedTuple):
    """Clocks that one tile keeps each unit of one SM busy."""

    tensor: float
    fp32: float
    exp: float
    shared: float

    @property
    def overlapped(self) -> float:
        """All units at once: the busiest decides."""
        return max(self)

    @property
    def serial(self) -> float:
        """One unit after the other."""
        return sum(self)

    @property
    def busiest(self) -> str:
        return self._fields[self.index(max(self))]


# One tile ---------------------------------------------------------------------------------------------------


def tile_clocks(
    chip: Chip, B_r: int, B_c: int, d: int, *, W: int = 4, algorithm: str = "fa2", scheme: str = "split_q"
) -> Clocks:
    """One forward tile with the arithmetic of FA1 or FA2, its W warps splitting Q or K."""
    check_chip(chip)
    whole_number("W", W, low=1, high=32)
    ops = io.tile_operations(algorithm, "forward", B_r, B_c, d)
    by_keys = scheme == "split_k"
    moved = warps.tile_bytes(scheme, B_r, B_c, d, W if by_keys else readers(chip, B_r, W))
    parts_added = (W - 1) * B_r * d if by_keys else 0  # each warp has a part of P V
    return Clocks(
        tensor=ops["matmul"] / chip.tensor_per_clock,
        fp32=(fp32_instructions(algorithm, B_r, B_c, d) + parts_added) / chip.fp32_per_clock,
        exp=ops["exp"] / chip.exp_per_clock,
        shared=moved / chip.shared_per_clock,
    )


def fp32_instructions(algorithm: str, B_r: int, B_c: int, d: int, direction: str = "forward") -> int:
    """FP32 instructions of one tile: the meter's count less the additions that cost none.

    τ s − m is one multiply-add, and sums into o, or into dQ, dK and dV, are made by an accumulator or a multiply-add.
    """
    counted = io.not_matmul(io.tile_operations(algorithm, direction, B_r, B_c, d))
    summed = B_r * d if direction == "forward" else (B_r + 2 * B_c) * d
    return counted - B_r * B_c - summed


def readers(chip: Chip, B_r: int, W: int) -> int:
    """Return how often K and V are read from shared memory under split-Q: once per warp, or once per instruction."""
    rows = PRODUCT_ROWS.get(chip.compute_capability)
    return W if rows is None or B_r < FEWEST_ROWS else cdiv(B_r, rows)
