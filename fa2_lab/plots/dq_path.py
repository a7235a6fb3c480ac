"""The path of dQ in the Hopper backward: from a consumer's registers to accumulators in L2, and then to HBM."""

import textwrap

from fa2_lab.plots import style


def data(d: int = 128, B_r: int = 64, N: int = 16384, keys: int = 128) -> dict:
    """Return bytes of a head at each station, and how often they pass it."""
    columns = N // keys
    stations = {
        "registers of a consumer": ("half of a tile, fp32", B_r * d // 2 * 4, 2 * columns * N // B_r),
        "its buffer in shared memory": (
            "one buffer per consumer, free again once it was read",
            B_r * d // 2 * 4,
            2 * columns * N // B_r,
        ),
        "accumulators in L2": ("TMA sends the tile, and L2 adds it", N * d * 4, columns),
        "dQ in HBM": ("the last kernel multiplies by τ and rounds to 16 bits", N * d * 2, 1),
    }
    return dict(stations=stations, N=N, d=d)


@style.picture
def draw(stations: dict[str, tuple[str, int, int]], N: int, d: int) -> style.Drawn:
    """Draw the path. stations: {name: (what happens, bytes, how often)}, from the first to the last."""
    caption = "TMA adds dQ tile by tile to accumulators that stay in L2, and the last kernel writes dQ once."
    figure, ax = style.new_figure(
        3.1 if not style.narrow() else 4.3, f"{caption} This is one head with N = {N:,}, d = {d}."
    )
    wide = 2.1 if not style.narrow() else 2.0
    for y, (name, (what, size, times)) in enumerate(stations.items()):
        style.tensor_box(ax, 0, y, wide, 0.62, "dQ", textwrap.fill(name, 16 if style.narrow() else 40))
        if y:
            style.arrow(ax, (wide / 2, y - 0.38), (wide / 2, y), linewidth=1.3)
        words = f"{amount(size)}{f', {times:,} times' if times > 1 else ', once'}"
        style.note(ax, wide + 0.12, y + 0.18, words, weight="bold")
        style.note(ax, wide + 0.12, y + 0.3, textwrap.fill(what, 23 if style.narrow() else 60), va="top")
    style.bare(ax, (-0.02, style.width() - 0.1), (-0.05, len(stations) - 0.2))
    steps = "; ".join(f"{name}: {amount(size)}, {times:,} times" for name, (_, size, times) in stations.items())
    return figure, f"Four places of dQ from top to bottom, with arrows between them: {steps}."


def amount(size: int) -> str:
    """Return a number of bytes as KiB or MiB."""
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"
