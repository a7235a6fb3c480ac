"""Plots of the measured time and memory that four attention methods need as N grows."""

from matplotlib.ticker import NullLocator, StrMethodFormatter

from fa2_lab.plots import style
from fa2_lab.records import Record, load

# {line in the picture: its name in the record}, for the records of the ladder, of the times by N, and of the memory
RUNGS = {"standard": "r00_standard", "FA1": "r01_fa1"}
OVER_N = {"FA2": "torch flash", "ours": "fa2_lab"}
MEMORY = {"standard": "torch math", "FA2": "torch flash", "ours": "fa2_lab"}
TOKENS, d = 16384, 128


def data() -> dict:
    """Return the times in ms for 16,384 tokens in sequences of length N, and the memory in MiB for one sequence.

    The memory does not include the inputs.
    """
    ladder, grid, memory = (load(suite) for suite in ("ladder", "paper", "memory"))
    time = {name: points(ladder, rung, whole=True) for name, rung in RUNGS.items()}
    time |= {name: points(grid, peer, whole=True) for name, peer in OVER_N.items()}
    mib = {name: points(memory, peer, whole=False) for name, peer in MEMORY.items()}
    setting = f"{grid.setup()}; forward, 16 heads, d = {d}. Time: the number of tokens stays {TOKENS:,}, in sequences"
    setting += " of N, without a mask. Memory: one sequence of N, with a causal mask"
    return dict(time=time, memory=mib, setting=setting)


def points(record: Record, name: str, whole: bool) -> list[tuple[int, float]]:
    """Return a list of (N, value) for the forward pass of one implementation at d = 128.

    If `whole` is set, include only problems without a mask and with 16,384 tokens in total.
    """
    values = {}
    for row in record.rows:
        p = row.problem
        fits = row.direction in ("forward", "over N") and p["d"] == d and name in row.values
        if fits and (not whole or (not p["causal"] and p["batch"] * p["N_q"] == TOKENS)):
            values[p["N_q"]] = row.values[name][0]
    return sorted(values.items())


Readings = list[tuple[int, float]]
LOOKS = {
    "standard": dict(color=style.QUIET, linestyle=":", marker="s"),
    "FA1": dict(color=style.QUIET, linestyle="--", marker="^"),
    "FA2": dict(color=style.INK, linewidth=1.1, marker="o"),
    "ours": dict(color=style.OURS, linewidth=2.4, marker="o"),
}
NAMES = {"FA1": "FA1 as printed:\none worker per head", "FA2": "FA2 (PyTorch)", "ours": "ours"}


@style.picture
def draw(time: dict[str, Readings], memory: dict[str, Readings], setting: str) -> style.Drawn:
    """Draw two charts against N on logarithmic axes, with milliseconds at the top and MiB at the bottom."""
    (N, slow), (most, _) = time["standard"][-1], memory["standard"][-1]
    faster = slow / dict(time["ours"])[N]
    steep, flat = (curve[most] / curve[most // 2] for curve in (dict(memory["standard"]), dict(memory["ours"])))
    caption = (
        f"At N = {N:,}, our kernel is {faster:.1f} times as fast as standard attention, and its memory grows with N"
        f" instead of N². When N doubles, standard attention needs about {steep:.0f} times as much memory, and our"
        f" kernel {flat:.0f} times as much. Standard attention's times are those of simple kernels in bf16, and its"
        " memory is that of PyTorch's own version in float32."
    )
    figure, (above, below) = style.new_figure(5.6, f"{caption} {setting}.", nrows=2, sharex=True)
    for ax, curves in ((above, time), (below, memory)):
        for name, curve in curves.items():
            ax.plot(*zip(*curve, strict=True), markersize=4, **LOOKS[name])
        ax.set(xscale="log", yscale="log")
        ax.set_yticks([y for y in (0.1, 1, 10, 100, 1000, 10000) if ax.get_ylim()[0] < y < ax.get_ylim()[1]])
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        ax.yaxis.set_minor_locator(NullLocator())
    lengths = sorted({n for curve in (*time.values(), *memory.values()) for n, _ in curve})
    style.log_ticks(below.xaxis, lengths[1::2])
    below.set(xlim=(lengths[0] / 1.1, lengths[-1] * 2.2), xlabel="N, tokens per sequence")
    above.set_title(f"Milliseconds for {TOKENS:,} tokens in sequences of N, forward")
    below.set_title("MiB for one sequence of N, beyond its inputs")
    for name, curve in time.items():
        _write_name(above, name, curve[-1], NAMES.get(name, name))
    _write_name(below, "standard", memory["standard"][-1], "standard: the next\nruns out of memory")
    _write_name(below, "ours", memory["ours"][-1], "FA2, ours")
    ms, MiB = (
        ", ".join(f"{name} {curve[-1][1]:,.4g} at {curve[-1][0]:,}" for name, curve in curves.items())
        for curves in (time, memory)
    )
    return figure, f"Two charts over N on logarithmic axes. Milliseconds: {ms}. MiB beyond the inputs: {MiB}."


def _write_name(ax: style.Axes, name: str, at: tuple[int, float], words: str) -> None:
    weight = "bold" if name == "ours" else "normal"
    style.beside(
        ax, words, at, (7, 0), color=LOOKS[name]["color"], weight=weight, va="top" if "\n" in words else "center"
    )
