"""One change over the number of heads: programs come in waves, and so the worth of a change goes up and down."""

from collections.abc import Mapping

from fa2_lab.kernels import ladder
from fa2_lab.machine import reasons
from fa2_lab.plots import style
from fa2_lab.records import load

BEFORE, AFTER = "07", "09"
HEADS = range(2, 25)


def data(N: int = 4096, d: int = 128) -> dict:
    """How many times as fast rung 09 is as rung 07 without a mask: by the model, and as measured."""
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


@style.picture
def draw(model: Mapping[int, float], measured: Mapping[int, float], held: list[int], setting: str) -> style.Drawn:
    """The model as a line, the measurements as dots.

    model, measured: {heads: factor}. held: programs on an SM before and after the change.
    """
    caption = (
        f"Two loops instead of one leave {held[1]} programs on an SM instead of {held[0]}. How much that loses depends "
        f"on how full the last wave of programs is. Line: the model; dots: measured. {setting}."
    )
    figure, ax = style.new_figure(2.6, caption)
    ax.axhline(1, color=style.QUIET, linewidth=0.9)
    ax.plot(list(model), list(model.values()), color=style.QUIET)
    for heads, factor in measured.items():
        ax.plot(heads, factor, "o", color=style.OURS, markersize=6)
        style.note(ax, heads, factor + 0.06, f"{factor:.2f}", ha="center", bbox=style.CLEAR)
    ax.set(xlabel="heads", ylabel="rung 09 over rung 07", xlim=(1.5, max(model) + 0.5))
    ax.set_xticks(range(2, max(model) + 1, 2))
    shown = "; ".join(f"{heads} heads {factor:.2f}" for heads, factor in (measured or model).items())
    return figure, f"How many times as fast rung 09 is as rung 07, over the number of heads: a saw. {shown}."
