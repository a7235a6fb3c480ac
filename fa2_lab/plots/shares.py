"""Decode: the tiles of all heads in equal shares, the parts that come of it, and what the number of programs does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine.splits import Shares
from fa2_lab.plots import style

H = 0.62  # height of a tile


@style.picture
def shares(cut: Shares) -> tuple[Figure, str]:
    """Every head a row of tiles in its program's colour, the parts that must be merged, and the output they make."""
    title = "Equal shares end anywhere; only a head that several programs have read is merged"
    heads, longest = len(cut.tiles), max(cut.tiles)
    figure, ax = style.new_figure(0.75 + 0.62 * heads, title)
    for head, n in enumerate(cut.tiles):
        ax.text(-0.25, head, f"head {head}", ha="right", va="center")
        if not n:
            ax.text(0.1, head, "no keys", ha="left", va="center", color=style.QUIET)
        _tiles(ax, cut, head)
        _parts(ax, cut, head, longest + 1.2)
    ax.text(0, -0.75, "tiles of keys and values →", va="center", color=style.QUIET)
    ax.text(longest + 1.2, -0.75, "parts (m, l, o), by slot", va="center", color=style.QUIET)
    ax.set(xlim=(-1.6, longest + 10.4), ylim=(heads - 0.45, -1.1), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    return figure, _told(cut)


def _tiles(ax: Axes, cut: Shares, head: int) -> None:
    """The tiles of a head; the program's number on each."""
    for w in cut.readers(head):
        for h, first, last in cut.spans(w):
            for tile in range(first, last) if h == head else ():
                style.box(ax, tile, head - H / 2, 1, H, f"{w}", style.worker(w), linewidth=0.5)


def _parts(ax: Axes, cut: Shares, head: int, x: float) -> None:
    """What is merged, and what comes of it."""
    readers = cut.readers(head)
    if len(readers) > 1:
        for k, w in enumerate(readers):
            style.box(
                ax, x + 1.5 * k, head - H / 2, 1.4, H, f"slot {cut.slot(w, head)}", style.worker(w), linewidth=0.5
            )
        ax.annotate(
            "merge",
            (x + 7.1, head),
            (x + 1.5 * len(readers) + 0.1, head),
            ha="left",
            va="center",
            arrowprops=dict(arrowstyle="->", color=style.INK),
        )
    else:
        ax.text(x, head, f"program {readers[0]} finishes it", va="center", color=style.QUIET)
    style.tensor_box(ax, x + 7.2, head - H / 2, 1.9, H, "O", f"O, L of {head}")


def _told(cut: Shares) -> str:
    lines = []
    for head, n in enumerate(cut.tiles):
        readers = cut.readers(head)
        slots = ", ".join(str(cut.slot(w, head)) for w in readers)
        end = f"merged from slots {slots}" if len(readers) > 1 else f"finished by program {readers[0]}"
        lines.append(f"head {head}: {n} tiles, {end}")
    return (
        f"{len(cut.tiles)} heads of unequal length as rows of tiles, shared out among {cut.busy} programs,"
        f" {cut.share} turns each: one to begin a head, one for each tile. Colour and number say who reads a tile."
        f" {'; '.join(lines)}."
    )


@style.picture
def programs(
    curve: Sequence[tuple[int, float]],
    model: Sequence[tuple[int, float]],
    floor: float,
    usual: int,
    rivals: Mapping[str, float],
    setting: str,
) -> tuple[Figure, str]:
    """Microseconds over the number of programs that share one cache: measured, by the model, and reading alone."""
    best = min(curve, key=lambda point: point[1])
    at_usual = dict(curve)[usual]
    title = f"From 8 programs to {usual}: the same bytes in {at_usual / dict(curve)[8]:.0%} of the time"
    figure, ax = style.new_figure(3.6, title)
    ax.plot(*zip(*model, strict=True), color=style.QUIET, linestyle="--", linewidth=1.2)
    ax.plot(*zip(*curve, strict=True), color=style.INK, marker="o", markersize=4)
    ax.axhline(floor, color=style.QUIET, linewidth=0.8)
    ax.set(xscale="log", yscale="log", xlabel=f"programs that share the tiles\n{setting}", ylabel="µs")
    counts = [n for n, _ in curve]
    ax.set_xticks(counts[::2], [f"{n:,}" for n in counts[::2]])
    marks = [x for x in (50, 100, 200, 400, 800) if 0.8 * floor < x < 1.2 * curve[0][1]]
    ax.set_yticks(marks, [str(x) for x in marks])
    ax.minorticks_off()
    ax.set(xlim=(counts[0] / 1.2, counts[-1] * 1.25), ylim=(0.75 * floor, 1.2 * curve[0][1]))
    ax.text(counts[0], floor * 0.96, "reading alone", va="top", color=style.QUIET)
    ax.annotate(
        "measured", curve[1], xytext=(8, 4), textcoords="offset points", fontweight="bold", va="bottom", ha="left"
    )
    ax.text(0.3, 0.62, "dashed: the model", transform=ax.transAxes, color=style.QUIET)
    ax.annotate(
        f"taken by the package: {usual}", (usual, at_usual), xytext=(0, 46), textcoords="offset points", ha="center",
        arrowprops=dict(arrowstyle="->", color=style.INK),
    )  # fmt: skip
    others = ", ".join(f"{name} {time:.0f} µs" for name, time in rivals.items())
    alt = (
        f"Time over the number of programs on logarithmic axes: {curve[0][1]:.0f} µs with {curve[0][0]},"
        f" {at_usual:.0f} µs with the {usual} that the package takes, fastest {best[1]:.0f} µs with {best[0]},"
        f" {curve[-1][1]:.0f} µs with {curve[-1][0]}. A dashed line is the model; a level line at {floor:.0f} µs a"
        f" kernel that only reads the same bytes. In the same run: {others}. {setting}."
    )
    return figure, alt


@style.picture
def ends(SM: Sequence[int], ended: Sequence[float], setting: str) -> tuple[Figure, str]:
    """When each program has ended, over the SM that it ran on."""
    first, half, last = min(ended), median(ended), max(ended)
    title = f"The same bytes for each: the last program ends {last / first - 1:.0%} after the first"
    figure, ax = style.new_figure(2.9, title)
    ax.plot(SM, ended, color=style.INK, marker="o", markersize=2.8, linestyle="none")
    ax.axhline(half, color=style.QUIET, linewidth=0.8)
    ax.text(max(SM) + 1, half, f" half of them\n by {half:.0f} µs", va="center", ha="left", color=style.QUIET)
    margin = 0.15 * (last - first)
    ax.set(xlim=(-2, max(SM) + 1), ylim=(first - margin, last + margin), ylabel="a program ends, µs")
    ax.set_xlabel(f"SM\n{setting}")
    alt = (
        f"A dot for each of {len(ended)} programs over the number of its SM: they end between {first:.0f} and"
        f" {last:.0f} µs, half of them by {half:.0f}. {setting}."
    )
    return figure, alt
