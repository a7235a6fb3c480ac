"""Speed over the sequence length, beside the peers of the same run."""

from fa2_lab.plots import style
from fa2_lab.records import load

Curve = list[tuple[int, float]]  # (N, TFLOP/s)
LOOKS = {  # of every contestant, in the order of the legend
    "fa2_lab": dict(color=style.OURS, linewidth=2.2, marker="o", zorder=4),
    "fa2_lab portable": dict(color=style.OURS, linewidth=1.1, linestyle="--", marker="o", zorder=3),
    "FlashAttention-3": dict(color=style.INK, marker="v"),
    "FlashAttention-4": dict(color=style.INK, marker="P"),
    "cuDNN": dict(color=style.INK, linestyle=":", marker="^"),
    "FlexAttention": dict(color=style.WORKERS[2], marker="D"),
    "torch flash": dict(color=style.QUIET, linestyle="--", marker="s"),
    "flash_attn": dict(color=style.QUIET, linestyle=":", marker="x"),
}


def data() -> dict:
    """TFLOP/s of every contestant on the FA2 paper's grid."""
    record = load("paper")
    panels: dict[tuple, dict[str, list]] = {}
    for direction in ("forward", "backward"):
        for row in record.rows:
            if row.direction == direction:
                p = row.problem
                curves = panels.setdefault((direction, p["d"], p["causal"]), {name: [] for name in LOOKS})
                for name in LOOKS:
                    if name in row.values:
                        curves[name].append((p["N_q"], row.rate(name)))
    panels = {at: {name: sorted(curve) for name, curve in c.items() if curve} for at, c in panels.items()}
    setting = f"{record.made()}; 16,384 tokens, hidden size 2,048; torch flash is FlashAttention-2 in torch"
    return dict(panels=panels, gemm=record.ceilings["GEMM TFLOP/s"], setting=setting)


@style.picture
def draw(panels: dict[tuple, dict], gemm: float, setting: str) -> style.Drawn:
    """TFLOP/s over N: a column for each direction, a row for each d and mask.

    panels: {(direction, d, causal): {contestant: curve}}; gemm: TFLOP/s of a large product in the same run, a line.
    """
    columns, rows = list(dict.fromkeys(p[0] for p in panels)), list(dict.fromkeys(p[1:] for p in panels))
    caption = f"Speed over the sequence length: fa2_lab is faster {ahead(panels)}. {setting}."
    sizes = dict(nrows=len(rows), ncols=len(columns), squeeze=False, sharex=True, sharey=True)
    figure, axes = style.new_figure(1.0 + 1.45 * len(rows), caption, **sizes)
    for (direction, d, causal), curves in panels.items():
        ax = axes[rows.index((d, causal))][columns.index(direction)]
        ax.axhline(gemm, color=style.QUIET, linewidth=0.8, zorder=0)
        for name, curve in curves.items():
            ax.plot(*zip(*curve, strict=True), label=name, markersize=3.5, **dict(linewidth=1.2) | LOOKS[name])
        ax.set_title(f"{direction}, d {d}, {'causal' if causal else 'full'}")
    style.note(axes[0][0], 512, 0.98 * gemm, "GEMM", va="top", color=style.QUIET)
    lengths = sorted({N for curves in panels.values() for curve in curves.values() for N, _ in curve})
    axes[0][0].set(xscale="log", ylim=(0, 1.08 * gemm), yticks=[0, 250, 500, 750])
    style.log_ticks(axes[0][0].xaxis, lengths[::2], [short(N) for N in lengths[::2]])
    axes[0][0].set(xlim=(lengths[0] / 1.3, 1.3 * lengths[-1]))
    figure.supylabel("TFLOP/s", fontsize=style.NORMAL)
    figure.supxlabel("sequence length N", fontsize=style.NORMAL)
    names = axes[0][0].get_legend_handles_labels()
    figure.legend(
        *names, loc="outside upper left", ncols=2 if style.narrow() else 3, frameon=False, fontsize=style.SMALL
    )
    names = ", ".join(dict.fromkeys(name for curves in panels.values() for name in curves))
    best = {
        direction: max(max(c["fa2_lab"])[1] for at, c in panels.items() if at[0] == direction) for direction in columns
    }
    reached = ", ".join(f"{direction} {rate:.0f}" for direction, rate in best.items())
    alt = f"TFLOP/s over sequence length in {len(panels)} panels, for {names}; a line marks a GEMM at {gemm:.0f}."
    return figure, f"{alt} fa2_lab is faster {ahead(panels)}. At 16,384 tokens it reaches {reached}."


def ahead(panels: dict[tuple[str, int, bool], dict[str, Curve]]) -> str:
    """Every peer, and at how many of the points where both were measured fa2_lab is the faster."""
    peers_at: dict[str, list[str]] = {}
    for peer in LOOKS:
        pairs = [(dict(c.get("fa2_lab", ())), dict(c.get(peer, ()))) for c in panels.values()]
        faster = [ours[N] > theirs[N] for ours, theirs in pairs for N in ours if N in theirs]
        if faster and not peer.startswith("fa2_lab"):
            peers_at.setdefault(f"at {sum(faster)} of {len(faster)} points", []).append(peer)
    return ", ".join(f"than {', '.join(peers)} {where}" for where, peers in peers_at.items())


def short(N: int) -> str:
    """A length as people say it: 512, 2k, 16k."""
    return str(N) if N < 1024 else f"{N // 1024}k"
