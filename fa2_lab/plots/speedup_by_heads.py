"""Chart of the speedup from one change in the ladder, as a function of the number of heads.

The speedup rises and falls because programs run in waves.
"""

from collections.abc import Mapping

from fa2_lab.kernels import ladder
from fa2_lab.machine import chips, reasons
from fa2_lab.plots import style
from fa2_lab.records import load
from fa2_lab.tiles import cdiv

BEFORE, AFTER = "07", "09"
ROWS = 64  # rows per program
HEADS = range(2, 25)
NAMES = ("heads", f"waves of rung {BEFORE}", f"waves of rung {AFTER}")


def data(N: int = 4096, d: int = 128) -> dict:
    """Return the modelled and the measured speedup of rung 09 over rung 07 by number of heads, without a mask."""
    before, after = ladder.find(BEFORE), ladder.find(AFTER)
    model = {n: reasons.predicted_speedup(before, after, causal=False, d=d, heads=n) for n in HEADS}
    measured = {}
    record = load("ladder")
    for row in record.rows:
        p = row.problem
        shape = (p["N_q"], p["d"], p["causal"], p["batch"])
        timed = shape == (N, d, False, 1) and row.flops and {before, after} <= row.values.keys()
        if timed and p["heads"] in HEADS:
            measured[p["heads"]] = row.ratio(after, before)
    resident = [reasons.compiled_rungs()[name, False, d]["programs"] for name in (before, after)]
    setting = f"N = {N:,}, d = {d}, no mask; {record.setup()}"
    return dict(model=model, measured=dict(sorted(measured.items())), resident=resident, setting=setting)


def waves(heads: int, resident: int, N: int = 4096) -> int:
    """Return the number of waves for all row blocks of 64 queries if each SM holds `resident` programs at a time."""
    return cdiv(heads * N, ROWS * resident * chips.H200.SMs)


@style.picture
def draw(model: Mapping[int, float], measured: Mapping[int, float], resident: list[int], setting: str) -> style.Drawn:
    """Draw the model as an area and the measurements as bars that begin at 1.

    `model` and `measured` are {heads: speedup}. `resident` lists the number of resident programs per SM before and
    after the change.
    """
    most, least = max(measured, key=measured.get), min(measured, key=measured.get)
    counts = {heads: tuple(waves(heads, fit) for fit in resident) for heads in measured}
    caption = (
        f"Rung {AFTER} is {measured[most] - 1:.0%} faster for {most} heads, but {1 - measured[least]:.0%} slower for"
        f" {least}, which need one more wave. {resident[1]} programs of rung {AFTER} fit on an SM, but {resident[0]} of"
        f" rung {BEFORE}. In the model, all programs of a wave end together. {setting}."
    )
    figure, ax = style.new_figure(3.4, caption)
    ax.axhline(1, color=style.INK, linewidth=0.9)
    ax.fill_between(list(model), 1, list(model.values()), color=style.tint(style.QUIET, 0.25), step="mid", linewidth=0)
    low, high = 0.55, 1.4
    for heads, factor in measured.items():
        more = counts[heads][1] > counts[heads][0]
        ax.plot([heads, heads], [1, factor], color=style.OURS, linewidth=5 if heads == least else 2.5)
        ax.plot(heads, factor, "o", color=style.OURS, markersize=9 if heads == least else 6)
        place = (0, -14 if heads == least else -12) if more else (0, 15 if heads == most else 12)
        bold = "bold" if heads in (least, most) else "normal"
        style.beside(ax, f"{factor:.2f}", (heads, factor), place, ha="center", weight=bold)
    x = least + 2
    style.arrow(ax, (x, measured[least]), (least + 0.45, measured[least]))
    now, then = reversed(counts[least])
    words = f"{least} heads: {1 - measured[least]:.0%} slower"
    style.note(ax, x + 0.2, measured[least] + 0.035, words, weight="bold")
    style.note(ax, x + 0.2, measured[least] - 0.035, f"{style.count_with_noun(now, 'wave')} instead of {then}")
    last = max(measured)
    style.note(ax, last + 0.8, measured[last] - 0.15, "measured", ha="center", color=style.OURS)
    style.note(ax, max(model) - 1.55, 0.925, "model", ha="center")
    style.note(ax, max(model) + 0.4, 1.05, "as fast as before", ha="right", va="bottom", color=style.QUIET)
    ax.set(ylabel="times as fast", xlim=(0, max(model) + 0.5), ylim=(low, high))
    ax.set_xticks([])
    _draw_table(ax, counts, low)
    factors = "; ".join(f"{heads} heads {factor:.2f}" for heads, factor in (measured or model).items())
    return (
        figure,
        "How many times as fast rung 09 is as rung 07, over the number of heads. The curve goes up and down like a"
        f" saw. {factors}. Below it are the waves of both rungs, and the bars of the heads for which rung {AFTER} needs"
        " one more wave go down.",
    )


def _draw_table(ax: style.Axes, counts: Mapping[int, tuple[int, ...]], low: float) -> None:
    """Below each bar, write its number of heads and the number of waves that each rung needs.

    `counts` is {heads: (waves of the earlier rung, waves of the later rung)}. The later rung's number is bold if it is
    larger. The table begins below y = `low`.
    """
    names = ("heads", f"waves, {BEFORE}", f"waves, {AFTER}") if style.is_narrow() else NAMES
    for row, name in enumerate(names):
        y = low - 0.07 * (row + 1)
        style.note(ax, -0.3, y, name, ha="right")
        for heads, waves_of_both in counts.items():
            bold = row == 2 and waves_of_both[1] > waves_of_both[0]
            style.note(
                ax, heads, y, f"{(heads, *waves_of_both)[row]}", ha="center", weight="bold" if bold else "normal"
            )
