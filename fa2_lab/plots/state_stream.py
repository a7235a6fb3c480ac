"""A picture of the state (m, l, o) of one row block while the key blocks stream past."""

from typing import Any

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference import naive
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import Tiling


def data(B_r: int = 4, B_c: int = 4, T_c: int = 10, d: int = 4, row: int = 2, seed: int = 35) -> dict:
    """Return the state of one row block and α after each key block.

    Only the first component of o and O is returned. `row` is the row that draw() shows.
    """
    rng = np.random.default_rng(seed)
    Q, K, V = rng.standard_normal((B_r, d)), *rng.standard_normal((2, T_c * B_c, d))
    V = np.abs(V)  # so that o falls only where it is rescaled
    tiling = Tiling(B_r, T_c * B_c, B_r, B_c)
    state = SoftmaxState.reset(B_r, d)
    seen: dict[str, list] = dict(s=[], m=[], l=[], o=[], alpha=[])
    for j in range(T_c):
        s = Q @ K[tiling.cols(j)].T
        after = state.update(s, V[tiling.cols(j)])
        alpha = np.exp(state.m - after.m)
        for name, value in dict(s=s, m=after.m, l=after.l, o=after.o[:, 0], alpha=alpha).items():
            seen[name].append(value)
        state = after
    O, _ = naive.forward(Q, K, V, tau=1.0)
    return dict(row=row, O=O[:, 0]) | {name: np.stack(values) for name, values in seen.items()}


@style.picture
def draw(
    row: int, s: np.ndarray, m: np.ndarray, l: np.ndarray, o: np.ndarray, alpha: np.ndarray, O: np.ndarray
) -> style.Drawn:
    """Draw α of every row and key block as a grid and, below it, the scores, m, l and one component of o of one row.

    The scores s have shape (T_c, B_r, B_c). m, l, o and alpha have shape (T_c, B_r) and are those after each key block.
    O has shape (B_r,) and is the same component of the output.
    """
    caption = "A new maximum shrinks what l and o have summed so far, and all other blocks only add to it."
    figure, axes = style.new_figure(6.4, caption, nrows=4, sharex=True, height_ratios=[1, 1.1, 1, 1])
    _factors(axes[0], alpha, row)
    _maximum(axes[1], s[:, row], m[:, row])
    _sum(axes[2], "l", "Σ exp(s − m)", l[:, row], alpha[:, row], linestyle=style.DASHED)
    _sum(axes[3], "o", "Σ exp(s − m) v (one component)", o[:, row], alpha[:, row])
    ratio = o[-1, row] / l[-1, row]
    words = f"o / l = {ratio:.4f}; standard attention: {O[row]:.4f}"
    style.note(axes[3], 0.99, 0.03, words, transform=axes[3].transAxes, ha="right", va="bottom", bbox=style.CLEAR)
    events = [j for j in range(1, len(alpha)) if alpha[j, row] < 1]
    for ax in axes[1:]:
        for j in events:
            ax.axvline(j, color=style.QUIET, linewidth=0.8, linestyle=(0, (2, 2)), zorder=0)
    axes[3].set_xlabel("key blocks in the order they arrive →")
    alt = (
        f"{len(alpha)} key blocks stream past {alpha.shape[1]} rows. A grid shows the factor α for each row and block:"
        f" 1 almost everywhere, smaller only where a row meets a new maximum. For row {row} that happens at blocks"
        f" {', '.join(str(j) for j in events)}. There m steps up, and l and o first drop to α times what they"
        f" were, before the block is added. At the end o / l = {ratio:.4f}, as standard attention has it."
    )
    return figure, alt


def _factors(ax: style.Axes, alpha: np.ndarray, row: int) -> None:
    T_c, B_r = alpha.shape
    for (j, i), factor in np.ndenumerate(alpha):
        new = j > 0 and factor < 1
        number = f"{factor:.2f}".removeprefix("0" if style.narrow() else "")
        label = ("" if style.narrow() else "start") if j == 0 else number if new else "1"
        look = dict(linewidth=1.8, zorder=3) if i == row else dict(linewidth=0.6, edgecolor=style.QUIET)
        style.box(ax, j, i, 1, 1, label, style.hue("m") if new else style.PAPER, **look)
    ticks = dict(xticks=np.arange(T_c) + 0.5, yticks=np.arange(B_r) + 0.5)
    style.bare(ax, (0, T_c + 0.9), (B_r + 0.05, -0.05), **ticks)
    ax.set(xticklabels=range(T_c), yticklabels=[f"row {i}" for i in range(B_r)])
    ax.set_title(f"α = exp(m before − m after), the factor for l and o (row {row} is drawn below)")


def _maximum(ax: style.Axes, s: np.ndarray, m: np.ndarray) -> None:
    T_c, B_c = s.shape
    x = np.arange(T_c)[:, None] + (np.arange(B_c) + 0.5) / B_c
    ax.plot(x.ravel(), s.ravel(), "o", color=style.hue("S"), markersize=4)
    ax.stairs(m, np.arange(T_c + 1), baseline=None, color=style.hue("m"), linewidth=2.2)
    style.note(ax, T_c + 0.1, m[-1], "m")
    style.note(ax, T_c + 0.1, s[-1].mean(), "scores s")
    ax.set_title("m, the largest score so far")


def _sum(ax: style.Axes, name: str, meaning: str, total: np.ndarray, alpha: np.ndarray, **look: Any) -> None:
    """Draw two levels for each key block: the total after it is multiplied by α, and after the new terms are added."""
    before = np.concatenate([[0.0], total[:-1]])
    levels = np.stack([alpha * before, total], axis=1).ravel()
    ax.stairs(levels, np.arange(len(levels) + 1) / 2, baseline=None, color=style.hue(name), linewidth=2.2, **look)
    ax.text(len(total) + 0.1, total[-1], name, va="center")
    ax.set_title(f"{name} = {meaning}: first times α, then the block is added")
