"""Plot of measured and modelled decode times against the number of programs that share a cache."""

from fa2_lab.kernels.decode.split_rules import tile_bytes
from fa2_lab.machine import splits
from fa2_lab.plots import style
from fa2_lab.records import load
from fa2_lab.tiles import cdiv

PURE_READ = "reading alone"  # the record's name for a pure read of the cache
TILE_KEYS = 64  # keys per tile of the Hopper kernel at d = 128
MIN_TILES = 16  # the fewest tiles per program; with fewer, rounding to whole tiles would dominate the model
LAUNCH_SECONDS = 8e-6  # time to launch two kernels that read nothing


def data() -> dict:
    """Return recorded and modelled decode times for a sequence of 65,536 keys and various numbers of programs."""
    record = load("decode")
    curves = record.curves
    curve = list(zip(curves["programs"], curves["microseconds"], strict=True))
    row = next(r for r in record.rows if r.direction == "decode" and r.problem["N_k"] == 65536)
    p = row.problem
    tiles = (cdiv(p["N_k"], TILE_KEYS),) * (p["batch"] * p["kv_heads"])
    size = tile_bytes(TILE_KEYS, p["d"], itemsize=2)
    copy, slots = record.ceilings["copy TB/s"] * 1e12, int(curves["usual"][0])
    counts = [n for n, _ in curve if n * MIN_TILES <= sum(tiles)]
    fewest, took = curve[0]
    # The bandwidth of a program that has an SM to itself, in bytes per second.
    lone_rate = sum(tiles) * size / fewest / (1e-6 * took - LAUNCH_SECONDS)
    model = [(n, 1e6 * (LAUNCH_SECONDS + splits.read_seconds(tiles, size, n, slots, lone_rate, copy))) for n in counts]
    peers = {name: values[0] for name, values in row.values.items()}
    heads = f"{p['heads']} query heads, {p['kv_heads']} K/V heads"
    setting = f"{record.setup()}; 1 query, {heads}, {p['N_k']:,} keys, d = {p['d']}"
    return dict(curve=curve, model=model, floor=peers.pop(PURE_READ), chosen=slots, peers=peers, setting=setting)


@style.picture
def draw(curve: list, model: list, floor: float, chosen: int, peers: dict[str, float], setting: str) -> style.Drawn:
    """Draw the measured and modelled times against the number of programs, and the time of a pure read of the cache.

    `curve` and `model` are lists of (programs, µs). `floor` is the time of a pure read in µs, `chosen` is the number of
    programs that the kernel chooses, and `peers` is {name: µs} for other implementations.
    """
    best = min(curve, key=lambda point: point[1])
    at_chosen = dict(curve)[chosen]
    caption = f"{chosen} programs read the cache in {at_chosen / dict(curve)[8]:.0%} of the time that 8 programs need."
    figure, ax = style.new_figure(3.3, f"{caption} {setting}.")
    ax.plot(*zip(*model, strict=True), color=style.QUIET, linestyle="--", linewidth=1.2)
    ax.plot(*zip(*curve, strict=True), color=style.OURS, marker="o", markersize=4)
    ax.axhline(floor, color=style.QUIET, linewidth=0.8)
    ax.set(xscale="log", yscale="log", xlabel="programs that share the tiles", ylabel="µs per call")
    counts = [n for n, _ in curve]
    style.log_ticks(ax.xaxis, counts[::2])
    style.log_ticks(ax.yaxis, [x for x in (50, 100, 200, 400, 800) if 0.8 * floor < x < 1.2 * curve[0][1]])
    ax.set(xlim=(counts[0] / 1.2, counts[-1] * 1.25), ylim=(0.75 * floor, 1.2 * curve[0][1]))
    style.note(ax, counts[0], 0.96 * floor, "pure read", va="top", color=style.QUIET)
    style.note(ax, 1.15 * curve[1][0], 1.04 * curve[1][1], "measured", color=style.OURS, weight="bold")
    style.note(ax, 0.3, 0.62, "dashed: the model", transform=ax.transAxes, color=style.QUIET)
    style.note(ax, chosen, 2.6 * at_chosen, f"the package\ntakes {chosen}", ha="center", va="bottom")
    style.arrow(ax, (chosen, 2.5 * at_chosen), (chosen, 1.1 * at_chosen))
    peer_times = ", ".join(f"{name} {time:.0f} µs" for name, time in peers.items())
    alt = (
        f"Time over the number of programs on logarithmic axes: {curve[0][1]:.0f} µs with {curve[0][0]},"
        f" {at_chosen:.0f} µs with the {chosen} that the package takes, fastest {best[1]:.0f} µs with {best[0]},"
        f" {curve[-1][1]:.0f} µs with {curve[-1][0]}. A dashed line is the model. A level line at {floor:.0f} µs is a"
        f" kernel that only reads the same bytes. In the same run: {peer_times}."
    )
    return figure, alt
