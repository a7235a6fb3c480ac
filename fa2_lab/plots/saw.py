"""The picture of one change over the number of heads: programs run in waves, so the gain goes up and down."""

from collections.abc import Mapping

from fa2_lab.kernels import ladder
from fa2_lab.machine import chips, reasons
from fa2_lab.plots import style
from fa2_lab.records import load

BEFORE, AFTER = "07", "09"
ROWS = 64  # of a program
HEADS = range(2, 25)


def data(N: int = 4096, d: int = 128) -> dict:
    """Return the speedup of rung 09 over rung 07 without a mask, by number of heads: by the model, and as measured."""
    before, after = ladder.find(BEFORE), ladder.find(AFTER)
    model = {n: reasons.predicted(before, after, causal=False, d=d, heads=n) for n in HEADS}
    measured = {}
    record = load("ladder")
    for row in record.rows:
        p = row.problem
        shape = (p["N_q"], p["d"], p["causal"], p["batch"])
        timed = shape == (N, d, False, 1) and row.flops and {before, after} <= row.values.keys()
        if timed and p["heads"] in HEADS:
            measured[p["heads"]] = row.ratio(after, before)
    held = [reasons.facts()[name, False, d]["programs"] for name in (before, after)]
    setting = f"N = {N:,}, d = {d}, no mask; {record.made()}"
    return dict(model=model, measured=dict(sorted(measured.items())), held=held, setting=setting)


def waves(heads: int, held: int, N: int = 4096) -> int:
    """Return the number of waves for the row blocks of 64 queries of all heads, with `held` programs on each SM."""
    return -(-heads * N // (ROWS * held * chips.H200.SMs))


@style.picture
def draw(model: Mapping[int, float], measured: Mapping[int, float], held: list[int], setting: str) -> style.Drawn:
    """Draw the model as a line and the measurements as dots.

    model, measured: {heads: speedup}. held: resident programs per SM before and after the change.
    """
    most, least = max(measured, key=measured.get), min(measured, key=measured.get)
    caption = (
        f"Rung {AFTER}'s second loop makes {most} heads {measured[most] - 1:.0%} faster, but {least} heads"
        f" {1 - measured[least]:.0%} slower. {held[1]} programs of rung {AFTER} fit on an SM, but {held[0]} of rung"
        f" {BEFORE}, so the same programs may need one wave more. In the model, all programs of a wave end together."
        f" {setting}."
    )
    figure, ax = style.new_figure(2.9, caption)
    ax.axhline(1, color=style.QUIET, linewidth=0.9)
    ax.step(list(model), list(model.values()), color=style.QUIET, where="mid", linewidth=1.2)
    for heads, factor in measured.items():
        ax.plot(heads, factor, "o", color=style.OURS, markersize=7)
        if heads == least or (style.narrow() and heads != most):
            continue  # its label is drawn below; on a phone, lines would cross the label
        below = factor < model[heads] and not 1 < factor < 1.1  # there, the line of 1 would cross it
        style.note(ax, heads + 0.35, factor + (-0.06 if below else 0.06), f"{factor:.2f}", ha="right")
    now, then = (waves(least, fit) for fit in reversed(held))
    space = "\n" if style.narrow() else " "
    words = f"{measured[least]:.2f}; rung {AFTER}: {style.counted(now, 'wave')},"
    words += f"{space}rung {BEFORE}: {style.counted(then, 'wave')}"
    style.note(ax, least + 0.8, measured[least], words)
    style.note(ax, max(model) + 0.4, 1.34, "line: the model", ha="right")
    style.note(ax, max(model) + 0.4, 1.24, "dots: measured", ha="right", color=style.OURS)
    style.note(ax, max(model) + 0.4, 1.03, "as fast as before", ha="right", va="bottom", color=style.QUIET)
    ax.set(xlabel="heads", ylabel="times as fast", xlim=(0, max(model) + 0.5), ylim=(0.55, 1.4))
    ax.set_xticks(range(2, max(model) + 1, 2))
    shown = "; ".join(f"{heads} heads {factor:.2f}" for heads, factor in (measured or model).items())
    return (
        figure,
        "How many times as fast rung 09 is as rung 07, over the number of heads. The curve goes up and down like a"
        f" saw. {shown}.",
    )
