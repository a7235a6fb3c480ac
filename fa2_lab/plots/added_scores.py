"""What four functions of (row, column) add to the scores: ALiBi, a window and the first keys, a tree, buckets."""

import numpy as np

from fa2_lab.plots import style

PARENTS = (-1, 0, 1, 1, 0, 4, 0)  # a tree of drafts, each node before its children


def data(N: int = 24, left: int = 6, first: int = 3, context: int = 6) -> dict:
    """Return four surfaces, −∞ at masked scores: N queries and N keys, or the drafts of a tree after their context."""
    row, column = np.arange(N)[:, None], np.arange(N)[None, :]
    distance = row - column
    hidden = distance < 0
    sees = ~hidden & ((distance <= left) | (column < first))
    node = np.arange(len(PARENTS))
    ends = [max(k for k in node if n in line_of(k)) for n in node]  # the last of each node's own subtree
    drafts = (node[None, :] <= node[:, None]) & (node[:, None] <= np.array(ends)[None, :])
    tree = np.hstack([np.ones((len(node), context), dtype=bool), drafts])
    surfaces = {
        "ALiBi": np.where(hidden, -np.inf, -distance),
        f"window and first {first}": np.where(sees, 0, -np.inf),
        "a tree of drafts": np.where(tree, 0, -np.inf),
        "buckets of distance": np.where(hidden, -np.inf, -np.minimum(bucket(distance), 4 + 2)),
    }
    return dict(surfaces=surfaces, parents=PARENTS, context=context)


def line_of(node: int) -> list[int]:
    """Return a node and its ancestors."""
    return [] if node < 0 else [node, *line_of(PARENTS[node])]


def bucket(distance: np.ndarray) -> np.ndarray:
    """Return a distance's bucket: 0 to 3 have one each, and then there is one for each doubling."""
    return np.minimum(distance, 4) + (distance >= 8) + (distance >= 16)


@style.picture
def draw(surfaces: dict[str, np.ndarray], parents: tuple[int, ...], context: int) -> style.Drawn:
    """Draw each surface as a square of queries and keys: the weaker the fill, the more is taken from the score."""
    caption = (
        "Four masks and biases, each a function of a row and a column. The weaker the fill, the more is taken from a"
        f" score; hatched scores get −∞. The drafts come after {context} tokens that all of them see, and each"
        " draft also sees its own ancestors."
    )
    rows = 2 if style.narrow() else 1
    figure, axes = style.new_figure(4.9 if style.narrow() else 2.2, caption, nrows=rows, ncols=4 // rows)
    for ax, (name, surface) in zip(np.ravel(axes), surfaces.items(), strict=True):
        ax.set_title(name)
        _surface(ax, surface, cell=len(surface) < 20)
        if len(surface) < 20:
            _tree(ax, parents, surface.shape)
        N = max(surface.shape)
        style.bare(ax, (-0.6, N + 0.6), (-0.6, N + 0.6), aspect="equal", ylabel="← queries")
        ax.set_xlabel("the tree" if "tree" in name else "keys →")
    tree = "; ".join(f"{n} after {p}" for n, p in enumerate(parents) if p >= 0)
    alt = (
        "Four squares of scores, queries down and keys right, hatched where −∞ is added. ALiBi takes more from a key"
        " the farther it is behind the query. A window leaves a band below the diagonal, and the first keys a column at"
        f" the left. The tree of drafts has rows of gaps: each draft sees the context and its own ancestors ({tree})."
        " The buckets fall in steps that become wider with the distance."
    )
    return figure, alt


def _surface(ax: style.Axes, surface: np.ndarray, cell: bool) -> None:
    """Draw each run of equal scores in a row as one bar, hatched if they are masked."""
    lowest = min(surface[np.isfinite(surface)].min(), -1)
    for value in np.unique(surface):
        runs = [
            (begin, r, end - begin, 1)
            for r, line in enumerate(surface == value)
            for begin, end in np.flatnonzero(np.diff(np.r_[0, line, 0])).reshape(-1, 2)
        ]
        if np.isneginf(value):
            look = dict(hatch=style.MASK_HATCH, edgecolor=style.QUIET, linewidth=0)
            style.bars(ax, runs, style.MASKED, **look)
        else:
            style.bars(ax, runs, style.tint(style.hue("S"), 0.98 - 0.83 * value / lowest))
    height, width = surface.shape
    style.box(ax, 0, 0, width, height, fill="none", edgecolor=style.QUIET)
    if cell:
        for n in range(1, height):
            ax.plot([0, width], [n, n], color=style.PAPER, linewidth=0.6)


def _tree(ax: style.Axes, parents: tuple[int, ...], shape: tuple[int, int]) -> None:
    """Draw the drafts as a tree in the space below their square."""
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    rows, columns = shape
    across, down = (columns - 1) / (len(parents) - 1), (columns - rows) / (max(depth) + 1)
    at = [(0.5 + across * n, rows + down * (d + 0.6)) for n, d in enumerate(depth)]
    for n, parent in enumerate(parents):
        if parent >= 0:
            style.arrow(ax, at[parent], at[n], style="-", linewidth=0.8)
    for n, (x, y) in enumerate(at):
        style.note(ax, x, y, str(n), ha="center", bbox=style.CLEAR)
