"""Plot of how the state (m, l, o) of one row changes while the key blocks are processed one after another."""

from typing import Any

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference import naive
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import Tiling


def data(B_r: int = 4, B_c: int = 4, T_c: int = 10, d: int = 4, row: int = 2, seed: int = 35) -> dict:
    """Return one row block's state and α after each key block.

    Only the first component of o and O is returned. `row` is the row that draw() shows.
    """
    rng = np.random.default_rng(seed)
    Q, K, V = rng.standard_normal((B_r, d)), *rng.standard_normal((2, T_c * B_c, d))
    V = np.abs(V)  # so that o decreases only when it is rescaled
    tiling = Tiling(B_r, T_c * B_c, B_r, B_c)
    state = SoftmaxState.empty(B_r, d)
    steps: dict[str, list] = dict(s=[], m=[], l=[], o=[], alpha=[])
    for j in range(T_c):
        s = Q @ K[tiling.cols(j)].T
        after = state.update(s, V[tiling.cols(j)])
        alpha = np.exp(state.m - after.m)
        for name, value in dict(s=s, m=after.m, l=after.l, o=after.o[:, 0], alpha=alpha).items():
            steps[name].append(value)
        state = after
    O, _ = naive.forward(Q, K, V, tau=1.0)
    return dict(row=row, O=O[:, 0]) | {name: np.stack(values) for name, values in steps.items()}


@style.picture
def draw(
    row: int, s: np.ndarray, m: np.ndarray, l: np.ndarray, o: np.ndarray, alpha: np.ndarray, O: np.ndarray
) -> style.Drawn:
    """Draw one row's scores, m, l and one component of o, with a column for each key block.

    The scores s have shape (T_c, B_r, B_c). m, l, o and alpha have shape (T_c, B_r) and hold the values after each key
    block. O has shape (B_r,) and is the same component of the output.
    """
    caption = "A new maximum shrinks what l and o have summed so far, and all other blocks only add to it. Each shaded"
    caption += " column has a new maximum, and its number is α = exp(m before − m after), the factor for l and o."
    figure, axes = style.new_figure(
        5.8 if style.is_narrow() else 5.2, caption, nrows=3, sharex=True, height_ratios=[1.15, 1, 1]
    )
    T_c = len(alpha)
    events = [j for j in range(1, T_c) if alpha[j, row] < 1]
    for ax in axes:
        for j in events:
            ax.axvspan(j + 0.03, j + 0.97, color=style.tint(style.hue("m"), 0.3), linewidth=0, zorder=0)
    _draw_maximum(axes[0], s[:, row], m[:, row])
    for j in events:
        factor = f"{alpha[j, row]:.2f}"
        words = factor.removeprefix("0") if style.is_narrow() else f"× {factor}"
        style.note(axes[0], j + 0.5, s[:, row].min(), words, ha="center", weight="bold")
    _draw_sum(axes[1], "l", l[:, row], alpha[:, row], linestyle=style.DASHED)
    _draw_sum(axes[2], "o", o[:, row], alpha[:, row])
    axes[1].set_title("l, the sum of exp(s − m): first times α, then plus the block")
    axes[2].set_title("o, the sum of exp(s − m) v: likewise (one component)")
    ratio = o[-1, row] / l[-1, row]
    words = f"at the end o / l = {ratio:.4f}; standard attention: {O[row]:.4f}"
    axes[2].set_xlabel(f"key blocks in the order they arrive →\n{words}")
    axes[2].set(xlim=(0, T_c), xticks=np.arange(T_c) + 0.5, xticklabels=range(T_c))
    for ax in axes:
        ax.tick_params(axis="x", length=0)
    alt = (
        f"{T_c} key blocks stream past a row of scores, each in its own column. At blocks"
        f" {', '.join(str(j) for j in events)} the row meets a new maximum. There m steps up, and l and o first drop"
        f" to α times what they were, before the block is added. At the end o / l = {ratio:.4f}, as standard attention"
        " has it."
    )
    return figure, alt


def _draw_maximum(ax: style.Axes, s: np.ndarray, m: np.ndarray) -> None:
    T_c, B_c = s.shape
    x = np.arange(T_c)[:, None] + (np.arange(B_c) + 0.5) / B_c
    ax.plot(x.ravel(), s.ravel(), "o", color=style.hue("S"), markersize=4)
    ax.stairs(m, np.arange(T_c + 1), baseline=None, color=style.hue("m"), linewidth=2.2)
    style.note(ax, T_c + 0.1, m[-1], "m")
    style.note(ax, T_c + 0.1, s[-1].mean(), "scores s")
    ax.set_title("m, the largest score so far, and the factor α where m grows")
    ax.margins(y=0.12)


def _draw_sum(ax: style.Axes, name: str, total: np.ndarray, alpha: np.ndarray, **look: Any) -> None:
    """Draw two levels per key block: the total after it is multiplied by α, and after the new terms are added to it."""
    before = np.concatenate([[0.0], total[:-1]])
    levels = np.stack([alpha * before, total], axis=1).ravel()
    ax.stairs(levels, np.arange(len(levels) + 1) / 2, baseline=None, color=style.hue(name), linewidth=2.2, **look)
    ax.text(len(total) + 0.1, total[-1], name, va="center")
