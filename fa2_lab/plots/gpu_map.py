"""A map of a GPU: the sizes of its memories as areas, and their bandwidths as bars, both to scale."""

from math import sqrt
from typing import NamedTuple

from fa2_lab.machine import chips
from fa2_lab.machine.prices import measured
from fa2_lab.plots import style


class Memory(NamedTuple):
    """One memory of a chip: its size in bytes, and the bytes that it delivers per second, if that is known."""

    name: str
    size: int
    speed: float | None


def data(name: str = "H200") -> dict:
    """Return the memories of a chip, beginning with the registers, and the bandwidth of its link to other GPUs."""
    chip = chips.named(name)
    return dict(chip=name, places=memories(chip), link=chip.link_per_second)


def memories(chip: chips.Chip) -> list[Memory]:
    """Return the memories of a chip, beginning with the registers.

    The bandwidth of the registers assumes that FP32 units read three 4-byte numbers per clock. The bandwidth of L2 is
    measured.
    """
    clocks, l2 = chip.SMs * chip.clock_hz, measured(chip).get("L2 TB/s")
    return [
        Memory("registers", 4 * chip.SMs * chip.registers_per_sm, 3 * 4 * chip.fp32_per_clock * clocks),
        Memory("shared memory", chip.SMs * chip.shared_per_sm, chip.shared_per_clock * clocks),
        Memory("L2", chip.l2_bytes, speed=1e12 * l2 if l2 else None),
        Memory("HBM", chip.hbm_bytes, chip.hbm_per_second),
    ]


ZOOM = 14  # how many times as long the sides under the lens are
PAGE = (1.75, 2.3, 0.84, 3.2, 4.25, 0.85)  # inches: HBM's side, the lens and its width, words, bars, the longest bar
PHONE = (1.1, 1.22, 0.6, 1.87, 3.22, 0.22)


@style.picture
def draw(chip: str, places: list[Memory], link: float) -> style.Drawn:
    """Draw the sizes of the memories as areas, and their bandwidths as bars."""
    caption = "Far memory is big and slow, and near memory is small and fast."
    caption += f" This is an {chip}, with areas and bars to scale."
    figure, ax = style.new_figure(3.15, caption)
    *near, far = places
    SIDE, LENS, WIDE, WORDS, BARS, LONGEST = PHONE if style.narrow() else PAGE
    unit = SIDE / sqrt(far.size)
    dots = [unit * sqrt(place.size) for place in near]
    style.box(ax, 0, 0.4, SIDE, SIDE, fill=style.tint(style.INK, 0.12))
    style.note(ax, 0, 0.4 + SIDE + 0.2, f"{far.name} {_size(far.size)}", bbox=style.CLEAR)
    pitch, x, low = 0.72, 0.06, 0.4 + SIDE - 0.06
    for n, (place, dot) in enumerate(zip(near, dots, strict=True)):
        style.box(ax, x, low - dot, dot, dot, fill=style.WORKERS[1], linewidth=0)
        x += 1.3 * dot
        large, middle = ZOOM * dot, 0.4 + pitch * (n + 0.35)
        style.box(ax, LENS + (WIDE - large) / 2, middle - large / 2, large, large, fill=style.WORKERS[1], linewidth=0)
        style.note(ax, WORDS, middle, f"{place.name}\n{_size(place.size)}")
    bottom, edge = 0.4 + pitch * len(near) - 0.1, dict(color=style.QUIET, linewidth=0.8)
    lens = dict(fill="none", edgecolor=style.QUIET, linewidth=1)
    style.box(ax, 0.03, low - max(dots) - 0.03, x, max(dots) + 0.06, **lens)
    style.box(ax, LENS, 0.3, WIDE, bottom - 0.3, **lens)
    for start, end in ((low - max(dots) - 0.03, 0.3), (low + 0.03, bottom)):
        ax.plot([0.03 + x, LENS], [start, end], **edge)
    style.note(ax, WORDS, bottom + 0.3, far.name)
    style.note(ax, WORDS, bottom + 0.68, "link to\nother GPUs")
    fastest = max(place.speed or 0 for place in places)
    speeds = [(0.4 + pitch * (n + 0.35), place.speed) for n, place in enumerate(near)]
    for y, speed in [*speeds, (bottom + 0.3, far.speed), (bottom + 0.68, link)]:
        if speed:
            style.box(ax, BARS, y - 0.11, LONGEST * speed / fastest, 0.22, fill=style.WORKERS[1], linewidth=0)
        words = _speed(speed) if speed else "not measured"
        style.note(ax, BARS + LONGEST * (speed or 0) / fastest + 0.06, y, words)
    style.note(ax, 0, 0.1, "size", weight="bold")
    style.note(ax, LENS, 0.1, f"sides × {ZOOM}", weight="bold")
    style.note(ax, BARS, 0.1, "bytes per second", weight="bold")
    style.bare(ax, (-0.02, style.width() - 0.06), (0, bottom + 0.8), aspect="equal")
    parts = [f"{p.name} {_size(p.size)}" + (f" and {_speed(p.speed)}" if p.speed else "") for p in places]
    alt = (
        f"The memories of an {chip} to scale. HBM is a large square with three dots in it, which a lens enlarges to"
        f" squares. A bar shows the bytes per second of each: {', '.join(parts)}, link {_speed(link)}. The registers'"
        " speed is what the FP32 units read."
    )
    return figure, alt


def _size(n: float) -> str:
    return f"{n / 2**30:.0f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


def _speed(n: float) -> str:
    return f"{n / 1e12:.0f} TB/s" if n > 1e13 else f"{n / 1e12:.2g} TB/s"
