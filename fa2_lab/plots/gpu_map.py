"""The map of a GPU: the sizes of its memories as areas, and their bytes per second as bars, both to scale."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine import chips
from fa2_lab.plots import style

# Data -----------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """One memory of one chip: all of its bytes, and the bytes it delivers in a second where the maker says so."""

    name: str
    size: int
    speed: float | None


def data(names: Sequence[str] = ("A100 SXM 80GB", "H100 SXM", "H200", "B200")) -> dict:
    """The memories of each chip, the nearest to the arithmetic first, and its link to other GPUs."""
    return dict(
        chips={name.split()[0]: (memories(chips.named(name)), chips.named(name).link_per_second) for name in names}
    )


def memories(chip: chips.Chip) -> list[Place]:
    """The registers' speed is what the FP32 units can read: three numbers of four bytes in each clock."""
    clocks = chip.SMs * chip.clock_hz
    return [
        Place("registers", 4 * chip.SMs * chip.registers_per_sm, 3 * 4 * chip.fp32_per_clock * clocks),
        Place("shared memory", chip.SMs * chip.shared_per_sm, chip.shared_per_clock * clocks),
        Place("L2", chip.l2_bytes, None),
        Place("HBM", chip.hbm_bytes, chip.hbm_per_second),
    ]


# Drawing --------------------------------------------------------------------------------------------------------

ZOOM = 14  # how many times as long the sides under the lens are
NEAR = style.WORKERS[1]


@style.picture
def draw(chips: dict[str, tuple[list[Place], float]]) -> tuple[Figure, str]:
    """Above, the memories as areas, those of the chip under a lens; below, their speeds."""
    title = "There is much room far away, and little room nearby, where numbers come fast"
    figure, (sizes, speeds) = style.new_figure(3.6 + 0.9 * len(chips), title, nrows=2, height_ratios=[1.15, 1])
    _sizes(sizes, chips)
    _speeds(speeds, chips)
    told = []
    for name, (places, link) in chips.items():
        parts = [f"{p.name} {_size(p.size)}" + (f" and {_speed(p.speed)}" if p.speed else "") for p in places]
        told.append(f"{name}: {', '.join(parts)}, link {_speed(link)}")
    alt = f"Memories of GPUs to scale, sizes as areas and bytes per second as bars. {'; '.join(told)}."
    return figure, alt


def _size(n: float) -> str:
    return f"{n / 2**30:.0f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


def _speed(n: float) -> str:
    return f"{n / 1e12:.0f} TB/s" if n > 1e13 else f"{n / 1e12:.2g} TB/s"


def _sizes(ax: Axes, chips: dict) -> None:
    unit = 100 / sqrt(max(p.size for places, _ in chips.values() for p in places))
    top = 0.0
    for k, (name, (places, _)) in enumerate(chips.items()):
        left, low = 225 * (k % 2), 112 * ((len(chips) - 1) // 2 - k // 2)  # two chips in a row
        *near, far = places
        side, widest = unit * sqrt(far.size), ZOOM * unit * sqrt(max(place.size for place in near))
        top = max(top, low + side)
        style.box(ax, left, low, side, side, gid=f"{name} HBM", fill=style.tint(style.INK, 0.12))
        ax.text(left + 3, low + side - 4, f"{name}\nHBM {_size(far.size)}", va="top", fontsize=style.SMALL)
        x, y, lens = left + 2, low, left + side + 8
        for place in near:
            tiny, large = (zoom * unit * sqrt(place.size) for zoom in (1, ZOOM))
            style.box(ax, x, low + 2, tiny, tiny, gid=f"{name} {place.name}", fill=NEAR, linewidth=0)
            style.box(ax, lens, y, large, large, gid=f"{name} {place.name} large", fill=NEAR, linewidth=0)
            words = f"{place.name} {_size(place.size)}"
            ax.text(lens + widest + 2, y + large / 2, words, va="center", fontsize=style.SMALL)
            x, y = x + tiny + 1, y + large + 2
        ax.plot([x, lens - 1], [low + 2.5, low + 2.5], color=style.QUIET, linewidth=0.8)
    ax.set(xlim=(-1, 450), ylim=(-2, top + 2), aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_title(f"Size: areas to scale; the memories on the chip once more under a lens, sides × {ZOOM}")


def _speeds(ax: Axes, chips: dict) -> None:
    names = [p.name for p in next(iter(chips.values()))[0]] + ["link to other GPUs"]
    longest = max(p.speed or 0 for places, _ in chips.values() for p in places)
    tall = 0.8 / len(chips)
    for k, (chip, (places, link)) in enumerate(chips.items()):
        for y, speed in enumerate([*(p.speed for p in places), link]):
            top = y - 0.4 + k * tall
            if speed:
                style.box(
                    ax,
                    0,
                    top,
                    speed,
                    0.92 * tall,
                    gid=f"{chip} {names[y]} speed",
                    fill=style.worker(k, len(chips)),
                    linewidth=0,
                )
                words = f"{chip} {_speed(speed)}"
                ax.text(speed + 0.008 * longest, top + tall / 2, words, va="center", fontsize=style.SMALL)
    for y, name in enumerate(names):
        ax.text(-0.01 * longest, y, name, va="center", ha="right")
        if name == "L2":
            ax.text(0.008 * longest, y, "the makers print no figure", va="center", fontsize=style.SMALL)
    ax.axvline(0, color=style.QUIET, linewidth=0.8)
    ax.set(xlim=(-0.2 * longest, 1.16 * longest), ylim=(len(names) - 0.5, -0.5), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.set_title("Speed: bytes per second of the whole chip, to scale (registers: what the FP32 units read)")
