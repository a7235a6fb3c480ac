"""Clocks of one forward tile on each unit of an SM: what tweak 1, exp, split-Q, causal skipping, block sizes are worth.

The matmul FLOPs go to the tensor cores, the exponentials to the special function units, the rest to the FP32 lanes, and
operands pass through shared memory. `overlapped` is the time if the four work at the same moment (the busiest sets the
pace), `serial` if each waits for the one before; a real kernel lies between.

FP32 work is what a kernel issues, not what the meter counts: τ s − m is one FMA, and the sum into o is done by the
tensor core's accumulator (FA2) or by an FMA (FA1, which must scale the new part first). Every instruction runs at the
FP32 rate; conversions, addresses, loop control and HBM are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from fa2_lab.machine import budget, grid, io, warps
from fa2_lab.machine.chips import Chip
from fa2_lab.tiles import NO_MASK, Mask, Tile, Tiling, cdiv, whole_number

WARPGROUP_ROWS = 64  # from compute capability 9.0 on, four warps multiply 64 rows together


@dataclass(frozen=True)
class Clocks:
    """Clocks that one tile keeps each unit of one SM busy."""

    tensor: float
    fp32: float
    exp: float
    shared: float

    @property
    def overlapped(self) -> float:
        """All units at once: the busiest decides."""
        return max(self.tensor, self.fp32, self.exp, self.shared)

    @property
    def serial(self) -> float:
        """One unit after the other."""
        return self.tensor + self.fp32 + self.exp + self.shared

    @property
    def busiest(self) -> str:
        return max(self.shares(), key=self.shares().get)

    @property
    def peak_share(self) -> tuple[float, float]:
        """The share of the tensor peak that is reached, (serial, overlapped): reality lies between."""
        return self.tensor / self.serial, self.tensor / self.overlapped

    def shares(self) -> dict[str, float]:
        """Each unit's share of the serial time."""
        units = dict(tensor=self.tensor, fp32=self.fp32, exp=self.exp, shared=self.shared)
        return {unit: clocks / self.serial for unit, clocks in units.items()}


@dataclass(frozen=True)
class Worth:
    """A change of the inner loop: its tile before and after."""

    before: Clocks
    after: Clocks

    @property
    def overlapped(self) -> float:
        """How many times faster if the units work at once: 1.0 where the relieved unit had time to spare."""
        return self.before.overlapped / self.after.overlapped

    @property
    def serial(self) -> float:
        """How many times faster if they work one after the other."""
        return self.before.serial / self.after.serial


# One tile ---------------------------------------------------------------------------------------------------


def tile_clocks(
    chip: Chip, B_r: int, B_c: int, d: int, *, W: int = 4, algorithm: str = "fa2", scheme: str = "split_q"
) -> Clocks:
    """One forward tile with the arithmetic of FA1 or FA2, its W warps splitting Q or K."""
    _check(chip, W)
    ops = io.tile_operations(algorithm, "forward", B_r, B_c, d)
    moved = warps.tile_bytes(scheme, B_r, B_c, d, readers(chip, B_r, W))
    return Clocks(
        tensor=ops["matmul"] / chip.tensor_per_clock,
        fp32=fp32_instructions(algorithm, B_r, B_c, d) / chip.fp32_per_clock,
        exp=ops["exp"] / chip.exp_per_clock,
        shared=moved / chip.shared_per_clock,
    )


def fp32_instructions(algorithm: str, B_r: int, B_c: int, d: int) -> int:
    """FP32 instructions of one forward tile: the meter's count less the two kinds of addition that cost none."""
    counted = io.not_matmul(io.tile_operations(algorithm, "forward", B_r, B_c, d))
    in_the_fma_of_tau_s_minus_m, in_the_update_of_o = B_r * B_c, B_r * d
    return counted - in_the_fma_of_tau_s_minus_m - in_the_update_of_o


def readers(chip: Chip, B_r: int, W: int) -> int:
    """How often K and V are read from shared memory under split-Q: by each warp, or by each 64 rows of a warpgroup."""
    return W if chip.compute_capability < (9, 0) else cdiv(B_r, WARPGROUP_ROWS)


# What a change is worth -------------------------------------------------------------------------------------


def tweak_1(chip: Chip, B_r: int, B_c: int, d: int, W: int = 4) -> Worth:
    """FA1's arithmetic in the loop (scale o, scale the new part, divide) against FA2's (multiply o by α)."""
    return Worth(*(tile_clocks(chip, B_r, B_c, d, W=W, algorithm=name) for name in ("fa1", "fa2")))


def split(chip: Chip, B_r: int, B_c: int, d: int, W: int = 4) -> Worth:
    """Warps that split the keys against warps that split the queries. The barriers' waiting is not in it."""
    return Worth(*(tile_clocks(chip, B_r, B_c, d, W=W, scheme=name) for name in ("split_k", "split_q")))


def free_exp(chip: Chip, B_r: int, B_c: int, d: int, W: int = 4) -> Worth:
    """What exponentials cost: FA2's tile as it is against the same tile if they took no time."""
    tile = tile_clocks(chip, B_r, B_c, d, W=W)
    return Worth(tile, replace(tile, exp=0.0))


# Causal skipping --------------------------------------------------------------------------------------------


def causal_ratio(T: int) -> Fraction:
    """Tiles visited over all tiles of a square causal T × T tiling: T (T + 1) / 2 : T²."""
    T = whole_number("T", T, low=1)
    return Fraction(T * (T + 1) // 2, T * T)


@dataclass(frozen=True)
class Causal:
    """What a mask leaves of the work, and what the tiles on its edge cost."""

    all_tiles: int
    full_tiles: int
    diagonal_tiles: int
    visible_scores: int  # entries that the mask leaves
    computed_scores: int  # entries of the tiles that are visited
    overlapped: float  # how many times faster than without the mask
    serial: float

    @property
    def tile_speedup(self) -> Fraction:
        """All tiles over visited tiles: 2T / (T + 1) for a square causal tiling."""
        return Fraction(self.all_tiles, self.full_tiles + self.diagonal_tiles)

    @property
    def in_vain(self) -> Fraction:
        """The share of computed scores that the mask then throws away: what the diagonal costs."""
        return 1 - Fraction(self.visible_scores, self.computed_scores)


MASKING = 2  # FP32 instructions for each score of a diagonal tile: compare, select


def skipping(chip: Chip, tiling: Tiling, d: int, W: int = 4) -> Causal:
    """Skipping what the tiling's mask hides, against visiting every tile unmasked. Each visited tile is taken whole."""
    io.check_tiling(tiling)
    full = tile_clocks(chip, tiling.B_r, tiling.B_c, d, W=W)
    masking = MASKING * tiling.B_r * tiling.B_c / chip.fp32_per_clock
    diagonal = replace(full, fp32=full.fp32 + masking)
    n, n_all = tiling.counts(), tiling.T_r * tiling.T_c
    if n[Tile.SKIP] == n_all:
        raise ValueError("tiling: got one whose mask leaves no tile; it takes one with something to compute")
    faster = {}
    for mode in ("overlapped", "serial"):
        spent = n[Tile.FULL] * getattr(full, mode) + n[Tile.DIAGONAL] * getattr(diagonal, mode)
        faster[mode] = n_all * getattr(full, mode) / spent
    visible = int(sum(tiling.visible(i, j).sum() for i in range(tiling.T_r) for j in tiling.visited_cols(i)))
    return Causal(n_all, n[Tile.FULL], n[Tile.DIAGONAL], visible, io.scores_visited(tiling), **faster)


# The whole forward --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """FA2's forward of all heads with one choice of blocks."""

    B_r: int
    B_c: int
    W: int
    fit: budget.Fit
    waves: int
    utilisation: float
    seconds: tuple[float, float]  # (overlapped, serial)
    tflops: tuple[float, float]  # of the matmul FLOPs that visited tiles need, (overlapped, serial)


def forward_time(chip: Chip, tiling: Tiling, d: int, heads: int, W: int = 4, fit: budget.Fit | None = None) -> Forward:
    """Tiles on the longest path of the schedule times the clocks of a tile; one block at a time has an SM's units."""
    tile = tile_clocks(chip, tiling.B_r, tiling.B_c, d, W=W)
    ran = grid.schedule(grid.fa2_grid(heads, tiling, order="heaviest first"), chip.SMs)
    seconds = tuple(ran.makespan * clocks / chip.clock_hz for clocks in (tile.overlapped, tile.serial))
    flops = heads * io.operations("fa2", "forward", tiling, d)["matmul"]
    tflops = tuple(flops / s / 1e12 if s else 0.0 for s in seconds)
    fit = fit or budget.fits(chip, tiling.B_r, tiling.B_c, d, warps=W)
    return Forward(tiling.B_r, tiling.B_c, W, fit, ran.waves, ran.utilisation, seconds, tflops)


def best_blocks(
    chip: Chip, N_q: int, N_k: int, d: int, heads: int, mask: Mask = NO_MASK, sizes=(64, 128), stages: int = 2
) -> list[Forward]:
    """All block sizes that fit on the chip, the fastest (serial) first. Empty where none fits."""
    _check(chip, 1)
    choices = budget.table(chip, d, sizes=sizes, stages=stages)
    times = [
        forward_time(chip, Tiling(N_q, N_k, B_r, B_c, mask), d, heads, W, fit)
        for (B_r, B_c), (W, fit) in choices.items()
        if fit.ok
    ]
    return sorted(times, key=lambda t: t.seconds[1])


def _check(chip: Chip, W: int) -> None:
    if not isinstance(chip, Chip):
        raise TypeError(f"chip: got {chip!r}; it takes a Chip, as in chips.A100")
    whole_number("W", W, low=1, high=32)
