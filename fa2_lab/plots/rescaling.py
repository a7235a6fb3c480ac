"""Bar chart of the terms of l and o: before and after a new maximum rescales them, and after new terms are added."""

from fractions import Fraction

import numpy as np

from fa2_lab.plots import style
from fa2_lab.reference.online_softmax import SoftmaxState


def data(exponentials: list[float] = (1, 3, 4, 8), values: list[float] = (8, 0, 4, 2), B_c: int = 2) -> dict:
    """Return the terms of one row's l and o after the first key block, after rescaling, and at the end.

    There are two key blocks. `exponentials` holds exp(score) for each key.
    """
    s, v = np.log(np.array(exponentials, dtype=float)), np.array(values, dtype=float)
    first = SoftmaxState.empty(1, 1).update(s[None, :B_c], v[:B_c, None])
    last = first.update(s[None, B_c:], v[B_c:, None])
    states = [(B_c, first), (B_c, last), (len(s), last)]  # (number of keys so far, state whose maximum is used)
    l = [np.exp(s[:keys] - state.m) for keys, state in states]
    return dict(
        l=l,
        o=[terms * v[: len(terms)] for terms in l],
        m=[np.exp(first.m.item()), np.exp(last.m.item())],
        ends={"ℓ": [first.l.item(), last.l.item()], "o": [first.o.item(), last.o.item()]},
    )


HIGH, STEP = 0.62, 1.0
TERMS = {"ℓ": "the sum of e^(s − m)", "o": "the sum of e^(s − m) v"}


@style.picture
def draw(l: list[np.ndarray], o: list[np.ndarray], m: list[float], ends: dict[str, list[float]]) -> style.Drawn:
    """Draw two panels, for l and o, with three bars each. A bar consists of one box per key, as wide as the key's term.

    `l` and `o` hold the terms before rescaling, after rescaling and at the end. `m` holds the exponentials of the old
    and the new maximum. `ends` holds the sums computed by the package.
    """
    alpha = m[0] / m[1]
    caption = (
        "If a larger maximum arrives, all old terms of l and o shrink by one factor before the new ones are added."
    )
    figure, axes = style.new_figure(3.7, caption, nrows=2)
    old, new = (", ".join(map(str, keys)) for keys in (range(len(l[0])), range(len(l[0]), len(l[2]))))
    names = [f"keys {old}\nm = log {m[0]:g}", f"× α = {_format_fraction(alpha)}", f"+ keys {new}\nm = log {m[1]:g}"]
    for ax, (name, meaning), stages in zip(axes, TERMS.items(), (l, o), strict=True):
        _draw_bars(ax, name, stages, style.hue(name.replace("ℓ", "l")))
        ax.set_title(f"{name}, {meaning}")
        ax.set(yticks=[n * STEP + HIGH / 2 for n in range(3)], yticklabels=names)
    sums = [
        f"{name} from {_format_fraction(a)} to {_format_fraction(alpha * a)} to {_format_fraction(b)}"
        for name, (a, b) in ends.items()
    ]
    alt = (
        f"Bars of the terms of ℓ and o for one row. After {len(l[0])} keys, the maximum is log {m[0]:g}. Then all terms"
        f" are multiplied by α = {_format_fraction(alpha)}, and the terms of the other keys are added, relative to the"
        f" maximum log {m[1]:g}. {'; '.join(sums)}."
    )
    return figure, alt


def _format_fraction(x: float) -> str:
    return str(Fraction(x).limit_denominator(100))


def _draw_bars(ax: style.Axes, name: str, stages: list[np.ndarray], hue: str) -> None:
    widest = max(terms.sum() for terms in stages)
    ends = [np.concatenate([[0.0], np.cumsum(terms)]) for terms in stages]
    for n, (terms, left) in enumerate(zip(stages, ends, strict=True)):
        for key, width in enumerate(terms):
            if width > 0:
                fill = style.tint(hue, 0.75 if key < len(stages[0]) else 0.25)
                label = _format_fraction(width) if width > (0.09 if style.is_narrow() else 0.05) * widest else ""
                style.box(ax, left[key], n * STEP, width, HIGH, label, fill)
        ax.text(left[-1] + 0.02 * widest, n * STEP + HIGH / 2, f"{name} = {_format_fraction(left[-1])}", va="center")
    dashes = dict(color=style.QUIET, linewidth=0.8, linestyle=(0, (2, 2)))
    for before, after in zip(ends[0][1:], ends[1][1:], strict=True):  # ends of old terms, before and after rescaling
        ax.plot([before, after], [HIGH, STEP], **dashes)
        ax.plot([after, after], [STEP + HIGH, 2 * STEP], **dashes)
    style.strip_axes(ax, (0, 1.2 * widest), (-0.1, 2 * STEP + HIGH + 0.1))
    ax.spines["left"].set_visible(True)
