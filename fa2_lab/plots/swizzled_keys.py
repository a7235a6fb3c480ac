"""Where K's rows lie in shared memory, as compiled, and which banks they meet."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fa2_lab.machine.layouts import CHUNK_BYTES, LINE_BYTES, Shared, bank_conflicts, parse
from fa2_lab.plots import style
from fa2_lab.records import compiled_by, layouts_record

# Data -----------------------------------------------------------------------------------------------------------


def data(rows: int = 8, chunk: int = 2, itemsize: int = 2) -> dict:
    """Byte addresses of K's first rows, chunk by chunk: row-major, which nobody uses, and as compiled."""
    record, panels = layouts_record(), {}
    for kernel in record["layouts"]:
        layout, shape = parse(kernel["K"]["layout"]), tuple(kernel["K"]["shape"])
        plain = Shared(layout.vec, 1, 1)
        for name, kind in (("Row-major, for contrast", plain), (kernel["target"], layout)):
            panels[name, kernel["d"]] = itemsize * kind.offsets(shape)[:rows, :: layout.vec]
    return dict(panels=panels, chunk=chunk, made=compiled_by(record))


# Drawing --------------------------------------------------------------------------------------------------------

OBSERVED = "Observed (read from the compiled kernel)"


@style.picture
def draw(panels: Mapping[tuple[str, int], np.ndarray], chunk: int, made: str) -> tuple[Figure, str]:
    """Where 16-byte chunks of the first rows of K lie in shared memory; one chunk of every row is marked.

    panels: {(name, d): byte address of every chunk, (rows, chunks)}; names across, d down.
    """
    title = "Swizzled, one chunk of eight rows of K lies in eight different groups of banks"
    names, ds = (list(dict.fromkeys(key[k] for key in panels)) for k in (0, 1))
    heights = [max(len(_lines(panels[name, d])) for name in names) + 2 for d in ds]
    figure, axes = style.new_figure(1.75 + 0.19 * sum(heights), title, nrows=len(ds), ncols=len(names),
                                    height_ratios=heights, squeeze=False)  # fmt: skip
    clashes = {key: bank_conflicts(address[:, chunk], itemsize=1) for key, address in panels.items()}
    for (name, d), address in panels.items():
        ax = axes[ds.index(d)][names.index(name)]
        _memory(ax, address, chunk)
        ax.set_title(f"{name}, d = {d}")
        ax.set_xlabel(_said(clashes[name, d], len(address)), fontsize=style.SMALL)
    for line in axes:
        line[0].set_ylabel("128-byte line of memory")
    what = f"A box: 16 bytes; across: 8 groups of 4 banks. Dark, with its row: chunk {chunk} of K's rows 0 to 7"
    figure.supxlabel(f"{what}\nAll but row-major: {OBSERVED.lower()}: {made}", fontsize=style.SMALL)
    said = "; ".join(f"{name}, d = {d}: {_said(n, 8)}" for (name, d), n in clashes.items())
    alt = (
        f"{OBSERVED}, but for the row-major panels. The first eight rows of K in shared memory, 128 bytes a line, in"
        f" pieces of 16 bytes; chunk {chunk} of each row is marked. {said}."
    )
    return figure, alt


def _said(clashes: int, rows: int) -> str:
    if clashes == 1:
        return f"the {rows} marked: no two in the same banks"
    return f"the {rows} marked: {clashes} in the same banks"


def _lines(address: np.ndarray) -> list[int]:
    return sorted(set((address // LINE_BYTES).ravel().tolist()))


def _memory(ax: Axes, address: np.ndarray, chunk: int) -> None:
    lines = _lines(address)
    for (row, c), byte in np.ndenumerate(address):
        line, group = lines.index(byte // LINE_BYTES), byte % LINE_BYTES // CHUNK_BYTES
        fill = style.tint(style.hue("K"), 1.0 if c == chunk else 0.15)
        label = str(row) if c == chunk else ""
        style.box(ax, group, line, 1, 1, label, fill, edgecolor=style.PAPER, linewidth=0.8, gid=f"{row},{c}")
    groups = LINE_BYTES // CHUNK_BYTES
    ax.set(xlim=(0, groups), ylim=(len(lines), 0))
    ax.set_xticks(np.arange(groups) + 0.5, range(groups))
    ax.set_yticks([k + 0.5 for k in range(len(lines))], lines)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.xaxis.tick_top()
