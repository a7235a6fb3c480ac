"""The ladder as one picture: what each stage of the book changes, and what becomes smaller by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import chips, grid, io, warps
from fa2_lab.plots import style
from fa2_lab.tiles import CAUSAL, Tile, Tiling

# Data -----------------------------------------------------------------------------------------------------------

HBM = "elements requested"
ABOVE = ("08–13", "On a GPU", "the same lines as kernels: written, measured, and taken to Hopper")


def data(N: int = 8192, d: int = 64, B: int = 128, heads: int = 32, W: int = 4) -> dict:
    """What each change saves, in closed form: one head, square tiles; `heads` heads at batch 1 on an H100."""
    tiling, chip = Tiling(N, N, B, B), chips.H100
    standard, fa1, fa2 = (moved(name, tiling, d) for name in ("standard", "fa1", "fa2"))
    work = {name: io.not_matmul(io.tile_operations(name, "forward", B, B, d)) for name in ("fa1", "fa2")}
    visited = tiles_of(tiling) - Tiling(N, N, B, B, CAUSAL).counts()[Tile.SKIP]
    idle = [1 - grid.schedule(blocks(heads, tiling), chip.SMs).utilisation for blocks in (grid.fa1_grid, grid.fa2_grid)]
    groups = {
        "What the chip requests": [
            Rung("01", "Naive attention", "S, P and O, one after the other", HBM, standard),
            Rung("03", "FlashAttention", "tiles; S and P never leave the chip", HBM, standard, fa1),
            Rung("04", "FA2: loops swapped", "o, l and m stay on chip until done", HBM, fa1, fa2),
        ],
        "Numbers kept": [
            Rung("02", "Online softmax", "a row is finished block by block", "of a row on its way", {"S": N}, state(d)),
            Rung("04", "FA2: one statistic", "L = m + log l instead of m and l", "of a row, at its end",
                 {"m": 1, "l": 1}, {"L": 1}),
            Rung("05", "Backward", "P is computed again, not kept", "for the backward", {"P": N * N}, {"L": N}),
        ],
        "FP32 work beside the products": [
            Rung("04", "FA2: divide once", "not in every tile, but after the last", "FLOPs in a tile",
                 {"": work["fa1"]}, {"": work["fa2"]}),
        ],
        "Tiles visited": [
            Rung("04", "FA2: causal tiles", "tiles above the diagonal are skipped", "of one head",
                 {"S": tiles_of(tiling)}, {"S": visited}),
        ],
        "Processors without work": [
            Rung("06", "Parallelism", "a thread block per row block, not head", "of an H100 idle",
                 {"": idle[0]}, {"": idle[1]}),
        ],
        "Traffic with shared memory": [
            Rung("07", "Warps", "each warp takes rows, not keys", "bytes",
                 through_shared_memory("split_k", B, d, W), through_shared_memory("split_q", B, d, W)),
        ],
    }  # fmt: skip
    sizes = f"One head, N = {N:,}, d = {d}, tiles {B} × {B}; 06: {heads} heads; 07: one tile, {W} warps"
    setting = f"Upper bar before, lower bar after. {sizes}"
    return dict(groups=groups, above=ABOVE, setting=setting)


def moved(algorithm: str, tiling: Tiling, d: int) -> dict[str, int]:
    """Elements that a forward moves, loads and stores together, tensor by tensor, the largest first."""
    traffic = io.traffic(algorithm, "forward", tiling, d)
    both = {t: traffic.loads.get(t, 0) + traffic.stores.get(t, 0) for t in [*traffic.loads, *traffic.stores]}
    return dict(sorted(both.items(), key=lambda item: -item[1]))


def state(d: int) -> dict[str, int]:
    """What a row needs to go on: m, l and o."""
    return {"m": 1, "l": 1, "o": d}


def tiles_of(tiling: Tiling) -> int:
    """All tiles, whatever the mask."""
    return tiling.T_r * tiling.T_c


def through_shared_memory(scheme: str, B: int, d: int, W: int) -> dict[str, int]:
    """Bytes that one tile moves through shared memory, by tensor; what crosses warps goes to o, m and l."""
    hues = {"PV": "o", "max": "m", "sum": "l"}
    bytes_of: dict[str, int] = {}
    for (_, tensor), n in warps.tile_accesses(scheme, B, B, d, W).items():
        name = hues.get(tensor, tensor)
        bytes_of[name] = bytes_of.get(name, 0) + n * warps.BYTES[tensor]
    return dict(sorted(bytes_of.items(), key=lambda item: -item[1]))


# Drawing --------------------------------------------------------------------------------------------------------

RAILS, TEXT, BARS, BAR, END = (0.1, 0.62), 0.82, 3.42, 1.95, style.WIDTH - 0.1  # inches from the left
NEUTRAL = style.tint(style.INK, 0.45)
HEAD = 0.5  # the name of a group, in rungs


@dataclass(frozen=True)
class Rung:
    """One change. Amounts are by tensor where tensors are moved or kept, else under the name ""."""

    chapter: str
    name: str
    change: str
    unit: str
    before: Mapping[str, float]
    after: Mapping[str, float] | None = None  # None: the rung all others start from

    @property
    def factor(self) -> float:
        """How many times less there is afterwards."""
        return sum(self.before.values()) / sum(self.after.values())


@style.picture
def draw(groups: Mapping[str, Sequence[Rung]], above: tuple[str, str, str], setting: str) -> tuple[Figure, str]:
    """A rung for each change, with two bars, before and after; factors stand together where they can be compared.

    groups: {what its rungs make smaller: from top to bottom}.
    above: (chapters, name, what they do) of the part of the book that adds no change of its own.
    """
    title = "The same result on every rung; each makes one thing smaller"
    bottom = sum(HEAD + len(rungs) for rungs in groups.values()) + HEAD / 2 + 1
    figure, ax = style.new_figure(0.52 * bottom + 0.6, title)
    y = 0.0
    for name, rungs in groups.items():
        ax.plot([RAILS[1], END], [y + 0.08, y + 0.08], color=style.QUIET, linewidth=0.7, gid="between groups")
        ax.text(TEXT, y + 0.1 + HEAD / 2, name, va="center", color=style.QUIET, gid="group")
        y += HEAD
        for rung in rungs:
            _label(ax, y, rung.chapter, rung.name, rung.change)
            _bars(ax, y, rung)
            y += 1
    ax.plot([RAILS[1], END], [y + 0.14, y + 0.14], color=style.QUIET, linewidth=0.7)
    _label(ax, y + HEAD / 2, *above)
    for x in RAILS:
        ax.plot([x, x], [0, bottom], color=style.INK, linewidth=2.2, zorder=0, solid_capstyle="round")
    ax.set(xlim=(0, END), ylim=(bottom + 0.05, -0.05), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_xlabel(setting, fontsize=style.SMALL, color=style.QUIET)
    told = ". ".join(
        f"{name}: " + "; ".join(f"{r.name}, {r.unit} ÷ {times(r.factor)}" for r in rungs if r.after)
        for name, rungs in groups.items()
    )
    alt = (
        f"A ladder with a rung for each change and two bars beside it, before and after, grouped by what becomes"
        f" smaller. {told}. Factors of different groups cannot be compared. {setting}."
    )
    return figure, alt


def _label(ax: Axes, y: float, chapter: str, name: str, change: str) -> None:
    left, right = RAILS
    style.box(ax, left, y + 0.2, right - left, 0.6, chapter, style.tint(style.INK, 0.1), size=style.NORMAL)
    ax.text(TEXT, y + 0.31, name, va="center", fontweight="bold")
    ax.text(TEXT, y + 0.71, change, va="center", fontsize=style.SMALL)


def _bars(ax: Axes, y: float, rung: Rung) -> None:
    """Before above after, both to the scale of the first, then the factor and what is counted."""
    whole = sum(rung.before.values())
    for top, amounts in ((0.15, rung.before), (0.52, rung.after)):
        if amounts:
            height = 0.33 if rung.after else 0.7
            _bar(ax, y + top, height, {name: BAR * n / whole for name, n in amounts.items()})
            share, total = sum(amounts.values()) / whole, sum(amounts.values())
            ax.text(BARS + BAR * share + 0.06, y + top + height / 2, amount(total), va="center", fontsize=style.SMALL)
    right = BARS + BAR + 0.62
    if rung.after:
        ax.text(right, y + 0.31, f"÷ {times(rung.factor)}", va="center", fontweight="bold")
    ax.text(right, y + 0.71, rung.unit, va="center", fontsize=style.SMALL, color=style.QUIET)


def _bar(ax: Axes, y: float, height: float, widths: Mapping[str, float]) -> None:
    """One bar, a part for each tensor; parts too narrow for their letter go without."""
    x = BARS
    for tensor, width in widths.items():
        fill = style.tint(style.hue(tensor), 0.55) if tensor else NEUTRAL
        label = tensor if width > 0.09 * len(tensor) + 0.05 else ""
        edge = 0.5 if label or width > 0.05 else 0  # a sliver is all edge
        style.box(ax, x, y, width, height, label, fill, linewidth=edge, gid="amount")
        x += width


def amount(n: float) -> str:
    """A count with its thousands as k and M; a share as per cent."""
    if isinstance(n, float):
        return f"{n:.0%}"
    for unit, letter in ((10**6, "M"), (10**4, "k")):
        if n >= unit:
            return f"{n / (unit if letter == 'M' else 1000):.3g}{letter}"
    return f"{n:,}"


def times(factor: float) -> str:
    """A factor with two digits that matter, or whole."""
    return f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"
