"""Plot, by row and column, of the values that ALiBi, a window, a tree and distance buckets add to the scores."""

import numpy as np

from fa2_lab.plots import style

PARENTS = (-1, 0, 1, 1, 0, 4, 0)  # each node's parent in a tree of draft tokens; every node comes before its children


def data(N: int = 24, left: int = 6, first: int = 3, context: int = 6) -> dict:
    """Return the arguments of draw(): the values that ALiBi, a window, a tree and buckets add to each score.

    A value of −∞ masks a score. ALiBi, the window and the buckets are shown for N queries and N keys. In the window, a
    query sees its own key, the `left` keys before it, and the first `first` keys. The queries of the tree are its draft
    tokens, and its keys are `context` earlier tokens followed by the same draft tokens.
    """
    row, column = np.arange(N)[:, None], np.arange(N)[None, :]
    distance = row - column
    hidden = distance < 0
    sees = ~hidden & ((distance <= left) | (column < first))
    node = np.arange(len(PARENTS))
    ends = [max(k for k in node if n in ancestor_line(k)) for n in node]  # the last node in each node's subtree
    drafts = (node[None, :] <= node[:, None]) & (node[:, None] <= np.array(ends)[None, :])
    tree = np.hstack([np.ones((len(node), context), dtype=bool), drafts])
    surfaces = {
        "ALiBi": np.where(hidden, -np.inf, -distance),
        f"window and first {first}": np.where(sees, 0, -np.inf),
        "a tree of drafts": np.where(tree, 0, -np.inf),
        "buckets of distance": np.where(hidden, -np.inf, -np.minimum(bucket_of(distance), 4 + 2)),
    }
    functions = tuple(f.format(left=left, first=first) for f in FUNCTIONS)
    return dict(surfaces=surfaces, parents=PARENTS, context=context, functions=functions)


def ancestor_line(node: int) -> list[int]:
    """Return the indices of a tree node and all its ancestors, beginning with the node itself."""
    return [] if node < 0 else [node, *ancestor_line(PARENTS[node])]


def bucket_of(distance: np.ndarray) -> np.ndarray:
    """Return the bucket of each distance.

    Each distance from 0 to 3 has its own bucket. The other buckets are for distances 4 to 7, 8 to 15, and 16 or more.
    """
    return np.minimum(distance, 4) + (distance >= 8) + (distance >= 16)


FUNCTIONS = ("−slope · (row − column)", "row − column ≤ {left}\nor column < {first}")
FUNCTIONS += ("column is row\nor its ancestor", "bucket(row − column),\nlooked up in a table")


@style.picture
def draw(
    surfaces: dict[str, np.ndarray], parents: tuple[int, ...], context: int, functions: tuple[str, ...]
) -> style.Drawn:
    """Draw each function in `surfaces` as a grid of queries and keys.

    `surfaces` is {name: values that the function adds to the scores}. The more a value lowers a score, the paler that
    score's cell. `parents` lists the parent of each draft token in the tree, `context` is the number of keys before the
    drafts, and `functions` holds the formulas to print.
    """
    caption = (
        "One small function of row and column gives any mask or bias. The paler the fill, the more is subtracted from"
        " the score. Hatched scores get −∞, and so do the scores of all keys after the query. The drafts come after"
        f" {context} tokens that all of them see, and each draft also sees its own ancestors."
    )
    rows = 2 if style.is_narrow() else 1
    figure, axes = style.new_figure(4.9 if style.is_narrow() else 2.2, caption, nrows=rows, ncols=4 // rows)
    for ax, (name, surface), function in zip(np.ravel(axes), surfaces.items(), functions, strict=True):
        ax.set_title(name)
        _draw_surface(ax, surface, cell_lines=len(surface) < 20)
        height, width = surface.shape
        first = ax in (axes[:, 0] if style.is_narrow() else axes[:1])
        # The picture of the scores is a square.
        look = dict(ylabel="← queries" if first else "", xlabel=f"keys →\n\n{function}", aspect=width / height)
        style.strip_axes(ax, (-0.02 * width, 1.02 * width), (-0.02 * height, 1.02 * height), **look)
        ax.xaxis.label.set_fontsize(style.SMALL)
    tree = "; ".join(f"{n} after {p}" for n, p in enumerate(parents) if p >= 0)
    formula_list = "; ".join(f"{name}: {' '.join(f.split())}" for name, f in zip(surfaces, functions, strict=True))
    alt = (
        "Four squares of scores, queries down and keys right, hatched where −∞ is added, each with its function below"
        f" ({formula_list}). ALiBi takes more from a key"
        " the farther it is behind the query. A window leaves a band below the diagonal, and the first keys a column at"
        f" the left. The tree of drafts has rows of gaps: each draft sees the context and its own ancestors ({tree})."
        " The buckets fall in steps that become wider with the distance."
    )
    return figure, alt


def _draw_surface(ax: style.Axes, surface: np.ndarray, cell_lines: bool) -> None:
    """Draw one bar for each run of equal values in a row of `surface`. Masked scores are hatched."""
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
    if cell_lines:
        for n in range(1, height):
            ax.plot([0, width], [n, n], color=style.PAPER, linewidth=0.6)
