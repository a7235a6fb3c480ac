"""Plots of the measured speedup of ring attention over one GPU, and of the memory that each GPU needs."""

from fa2_lab.plots import style
from fa2_lab.records import Record, load


def data() -> dict:
    """Return the speedups and memory use that `fa2-lab bench ring` measured for a forward and a backward pass."""
    record = load("ring")
    rows = [r for r in record.rows if "layout" not in r.problem]
    by_length = {r.problem["N_q"]: r.values for r in rows if r.direction == "both"}
    sizes = sorted({gpu_count(name) for values in by_length.values() for name in values})
    curves = {n: sorted((N, speedup(v, n)) for N, v in by_length.items() if gpu_label(n) in v) for n in sizes if n > 1}
    longest = max(by_length)
    peak = next(r for r in rows if r.direction == "peak memory" and r.problem["N_q"] == longest).values
    return dict(
        curves=curves,
        contiguous=contiguous_speedup(record, by_length),
        memory={gpu_count(name): mib for name, (mib,) in peak.items()},
        setting=f"{record.setup()}; forward and backward, causal, 16 heads of 128; memory at {longest:,} tokens",
    )


def reached(record: Record, ranks: int = 4, N: int = 131072) -> tuple[float, float]:
    """Return one GPU's FLOP/s in the causal forward pass, and a link's bytes per second while K and V are sent."""
    rows = {r.direction: r for r in record.rows if r.problem["N_q"] == N and "layout" not in r.problem}
    forward_row, ms_around, p = (
        rows["forward"],
        rows["K V once round"].values[gpu_label(ranks)][0],
        rows["forward"].problem,
    )
    moved = (ranks - 1) * N // ranks * p["kv_heads"] * p["d"] * 2 * 2  # K and V, with 2 bytes per element
    return 1e3 * forward_row.flops / forward_row.values[gpu_label(1)][0], 1e3 * moved / ms_around


def contiguous_speedup(record: Record, by_length: dict) -> tuple[int, int, float]:
    """Return (number of GPUs, N, speedup over one GPU) from the measurements of the contiguous layout."""
    row = next(r for r in record.rows if r.problem.get("layout") == "contiguous" and r.direction == "both")
    (name, (ms, *_)), N = next(iter(row.values.items())), row.problem["N_q"]
    return gpu_count(name), N, by_length[N][gpu_label(1)][0] / ms


def gpu_count(name: str) -> int:
    return int(name.split()[0])


def gpu_label(n: int) -> str:
    return f"{n} GPU" + "s" * (n > 1)


def speedup(values: dict, n: int) -> float:
    """Return the speedup of n GPUs over one GPU. `values` is {"1 GPU": times, …} for one problem."""
    return values[gpu_label(1)][0] / values[gpu_label(n)][0]


MARKERS = {2: "s", 4: "o", 8: "D"}


def short_length(N: int) -> str:
    """Format a sequence length in short form, such as 512, 2k or 16k."""
    return str(N) if N < 1024 else f"{N // 1024}k"


@style.picture
def draw(curves: dict, contiguous: tuple[int, int, float], memory: dict, setting: str) -> style.Drawn:
    """Draw the speedup over one GPU by sequence length and, below it, the memory that each GPU needs.

    `curves` is {number of GPUs: list of (N, speedup)}. `contiguous` is (number of GPUs, N, speedup) for the contiguous
    layout. `memory` is {number of GPUs: MiB per GPU}.
    """
    most = max(curves)
    N, best = curves[most][-1]
    caption = f"On long sequences, {most} GPUs reach {best / most:.1%} of linear speed ({short_length(N)} tokens)."
    figure, (above, below) = style.new_figure(4.6, f"{caption} {setting}.", nrows=2, height_ratios=[2.6, 1])
    figure.get_layout_engine().set(w_pad=0.08)
    lengths = sorted({n for curve in curves.values() for n, _ in curve})
    for n, curve in curves.items():
        look = dict(marker=MARKERS.get(n, "o"), markersize=4, linestyle="-" if n == most else "--")
        above.plot(*zip(*curve, strict=True), color=style.OURS, **look)
        above.plot([lengths[0], lengths[-1]], [n, n], color=style.QUIET, linewidth=0.8)
        style.note(above, lengths[0], n + 0.06, f"{n} times: linear", va="bottom", color=style.QUIET)
        style.note(above, 1.1 * curve[-1][0], curve[-1][1], f"{n} GPUs\n{curve[-1][1]:.2f}", color=style.OURS)
    n, at, times = contiguous
    above.plot([at], [times], marker="x", color=style.INK, linestyle="none")
    words = f"contiguous\n{times:.2f}" if style.is_narrow() else f"{n} GPUs, contiguous, {times:.2f}"
    style.note(above, at / 1.1, times + 0.14, words, ha="right", va="bottom", bbox=style.TEXT_BACKGROUND)
    above.set(xscale="log", xlabel="tokens in total")
    style.log_ticks(above.xaxis, lengths, [short_length(n) for n in lengths])
    above.set(xlim=(lengths[0] / 1.15, 1.6 * lengths[-1]), ylim=(0, 1.14 * most))
    above.set_title("times as fast as one GPU")
    gib = {style.count_with_noun(n, "GPU"): mib / 1024 for n, mib in memory.items()}
    style.named_bars(below, gib, [f"{size:.1f}" for size in gib.values()], style.WORKERS[1])
    below.set_title("peak GiB of each GPU")
    speeds = ", ".join(f"{n} GPUs {curve[0][1]:.2f} to {curve[-1][1]:.2f}" for n, curve in curves.items())
    sizes = ", ".join(f"{name} {size:.1f}" for name, size in gib.items())
    alt = (
        f"How many times as fast as one GPU, from {short_length(lengths[0])} to {short_length(lengths[-1])} tokens:"
        f" {speeds}. Bars show the peak GiB of each GPU: {sizes}."
    )
    return figure, alt
