"""Bar chart of the registers that hold a consumer thread's live values in each phase of a backward step."""

from fa2_lab.plots import style

TILES = {"d = 64, 128 rows": (64, 128), "d = 128, 64 rows": (128, 64), "d = 128, 128 rows": (128, 128)}
LIVE = {"S and dQ": ("S", "dQ"), "then P and dP": ("P", "dP"), "all at once": ("S", "dQ", "dP")}


def data(consumers: int = 2, keys: int = 64, threads: int = 128) -> dict:
    """Return the arguments of draw(): the registers that one thread's fp32 values need in each phase of a step.

    Each consumer has `keys` keys and `threads` threads and computes its share of dQ.
    """
    needs = {}
    for name, (d, B_r) in TILES.items():
        each = {x: keys * B_r // threads for x in ("S", "P", "dP")} | {"dQ": B_r * d // consumers // threads}
        accumulators = {x: keys * d // threads for x in ("dK", "dV")}
        needs[name] = {phase: accumulators | {x: each[x] for x in live} for phase, live in LIVE.items()}
    return dict(tiles=needs, limit=240)


@style.picture
def draw(tiles: dict[str, dict[str, dict[str, int]]], limit: int) -> style.Drawn:
    """Draw one bar per phase of a step, broken down by tensor, and a line at the per-thread register limit."""
    caption = "At d = 128, a step of 128 rows needs more registers than a thread has."
    caption += (
        f" So a step has 64 rows. The bars count the fp32 values of one thread. The line marks its {limit} registers,"
    )
    caption += " which also hold everything else."
    figure, axes = style.new_figure(4.1, caption, nrows=len(tiles), sharex=True)
    most = max(sum(parts.values()) for phases in tiles.values() for parts in phases.values())
    words = []
    for ax, (name, phases) in zip(axes, tiles.items(), strict=True):
        for y, (phase, parts) in enumerate(phases.items()):
            x = 0
            for tensor, n in parts.items():
                style.tensor_box(ax, x, y + 0.08, n, 0.84, tensor, tensor, linewidth=0.8)
                x += n
            over = x > limit
            style.box(ax, limit, y + 0.08, max(x - limit, 0), 0.84, fill="none", hatch=style.MASK_HATCH, linewidth=0)
            style.note(
                ax, 1.02 * most, y + 0.5, f"{x} > {limit}" if over else f"{x}", weight="bold" if over else "normal"
            )
            style.note(ax, -0.012 * most, y + 0.5, phase, ha="right")
            words.append(f"{name}, {phase}: {x}")
        ax.plot([limit, limit], [0, len(phases)], color=style.INK, linewidth=2.2, zorder=3)
        style.note(ax, limit, -0.2, f"{'' if style.is_narrow() else 'limit: '}{limit}", ha="center", weight="bold")
        style.strip_axes(
            ax,
            (-(0.42 if style.is_narrow() else 0.2) * most, (1.3 if style.is_narrow() else 1.18) * most),
            (0, len(phases)),
        )
        ax.set_title(f"{name} per step")
    return figure, f"Stacked bars of registers of a thread, with a line at {limit}. {'; '.join(words)}."
