"""A map of a GPU that shows the sizes of its memories as areas and their bandwidths as bars, both to scale."""

from math import sqrt
from typing import NamedTuple

from fa2_lab.machine import chips
from fa2_lab.machine.rates import measured_rates
from fa2_lab.plots import style


class Memory(NamedTuple):
    """One of a chip's memories: its size in bytes and, if known, its bandwidth in bytes per second."""

    name: str
    size: int
    speed: float | None


def data(name: str = "H200") -> dict:
    """Return a chip's memories, beginning with the registers, and the bandwidth of its link to other GPUs."""
    chip = chips.find(name)
    return dict(chip=name, places=memories(chip), link=chip.link_bytes_per_second)


def memories(chip: chips.Chip) -> list[Memory]:
    """Return a chip's memories, beginning with the registers.

    For the bandwidth of the registers, each FP32 unit is assumed to read three 4-byte numbers per clock cycle. The
    bandwidth of L2 is measured.
    """
    clocks, l2 = chip.SMs * chip.clock_hz, measured_rates(chip).get("L2 TB/s")
    return [
        Memory("registers", 4 * chip.SMs * chip.registers_per_sm, 3 * 4 * chip.fp32_per_clock * clocks),
        Memory("shared memory", chip.SMs * chip.shared_per_sm, chip.shared_bytes_per_clock * clocks),
        Memory("L2", chip.l2_bytes, speed=1e12 * l2 if l2 else None),
        Memory("HBM", chip.hbm_bytes, chip.hbm_bytes_per_second),
    ]


ZOOM = 14  # the factor by which the lens magnifies lengths (not areas)


@style.picture
def draw(chip: str, places: list[Memory], link: float) -> style.Drawn:
    """Draw the sizes of the memories as areas, and their bandwidths as bars beside or, on a phone, below the areas."""
    caption = "Far memory is big and slow, and near memory is small and fast."
    caption += f" This is an {chip}, with areas and bars to scale."
    side = 1.75 if style.is_narrow() else 2.16  # side length of the square for HBM, in data units
    figure, ax = style.new_figure(side + (2.6 if style.is_narrow() else 1.1), caption)
    words, pitch = _draw_sizes(ax, places, side), side / (len(places) - 1)
    speeds = {place.name: place.speed for place in places} | {"other GPUs": link}
    longest = 0.75 / max(speed or 0 for speed in speeds.values())
    heights, x = [pitch * (n + 0.5) for n in range(len(places) - 1)], words + 0.95
    heights += [side + 0.25, side + 0.6]
    if style.is_narrow():
        heights, x, longest = [side + 0.75 + 0.33 * n for n in range(len(speeds))], 1.2, 2.2 * longest
    style.note(ax, x, heights[0] - (0.33 if style.is_narrow() else pitch / 2 + 0.15), "bytes per second", weight="bold")
    for n, (y, (name, speed)) in enumerate(zip(heights, speeds.items(), strict=True)):
        if style.is_narrow() or n > 2:
            style.note(
                ax, x - 0.1 if style.is_narrow() else words, y, name, ha="right" if style.is_narrow() else "left"
            )
        style.box(ax, x, y - 0.11, longest * (speed or 0), 0.22, fill=style.WORKERS[1], linewidth=0)
        style.note(ax, x + longest * (speed or 0) + 0.06, y, _format_speed(speed) if speed else "not measured")
    style.strip_axes(ax, (-0.02, style.width_in_units() - 0.06), (-0.25, heights[-1] + 0.15), aspect="equal")
    parts = [f"{p.name} {_format_size(p.size)}" + (f" and {_format_speed(p.speed)}" if p.speed else "") for p in places]
    alt = (
        f"The memories of an {chip} to scale. HBM is a large square with three dots in it, which a lens enlarges to"
        f" squares. A bar shows the bytes per second of each: {', '.join(parts)}, link {_format_speed(link)}. The"
        " registers' speed is what the FP32 units read."
    )
    return figure, alt


def _draw_sizes(ax: style.Axes, places: list[Memory], side: float) -> float:
    """Draw HBM as a square with the other memories in its corner, and a lens that enlarges these memories.

    Return the x-coordinate at which the names of the enlarged memories begin.
    """
    *near, far = places
    dots, pitch = [side * sqrt(place.size / far.size) for place in near], side / len(near)
    x, low, left, wide = side - 1.4 * sum(dots), side - 0.06, side + 0.25, 1.15 * pitch
    style.note(ax, 0, -0.15, "size", weight="bold")
    style.note(ax, left, -0.15, f"enlarged × {ZOOM}", weight="bold")
    style.box(ax, 0, 0, side, side, fill=style.tint(style.INK, 0.12))
    style.note(ax, 0.12, 0.12, f"{far.name}\n{_format_size(far.size)}", va="top")
    lens = dict(fill="none", edgecolor=style.QUIET, linewidth=1)
    style.box(ax, x - 0.03, low - max(dots) - 0.03, side - x, max(dots) + 0.06, **lens)
    style.box(ax, left, 0, wide, side, **lens)
    for start, end in ((low - max(dots) - 0.03, 0), (low + 0.03, side)):
        ax.plot([side - 0.03, left], [start, end], color=style.QUIET, linewidth=0.8)
    for n, (place, dot) in enumerate(zip(near, dots, strict=True)):
        style.box(ax, x, low - dot, dot, dot, fill=style.WORKERS[1], linewidth=0)
        x += 1.3 * dot
        large, middle = ZOOM * dot, pitch * (n + 0.5)
        style.box(ax, left + (wide - large) / 2, middle - large / 2, large, large, fill=style.WORKERS[1], linewidth=0)
        style.note(ax, left + wide + 0.1, middle, f"{place.name}\n{_format_size(place.size)}")
    return left + wide + 0.1


def _format_size(n: float) -> str:
    return f"{n / 2**30:.0f} GiB" if n >= 2**30 else f"{n / 2**20:.0f} MiB"


def _format_speed(n: float) -> str:
    return f"{n / 1e12:.0f} TB/s" if n > 1e13 else f"{n / 1e12:.2g} TB/s"
