"""What standard attention, FA1 and FA2 load and store: over the sequence length, and over the on-chip memory."""

from fa2_lab.machine import chips, io
from fa2_lab.plots import style
from fa2_lab.reference import fa1
from fa2_lab.tiles import Tiling


def data(N: int = 1024, M: int = 2**15, d: int = 64) -> dict:
    """Closed forms of the three."""
    lengths, sizes = [2**k for k in range(9, 15)], [2**k for k in range(12, 19)]
    over_N, over_M = {}, {}
    for name in ("standard", "FA1", "FA2"):
        over_N[name] = [(n, moved(name, n, M, d)) for n in lengths]
        over_M[name] = [(m, moved(name, N, m, d)) for m in sizes]
    memories = {chip.name.split()[0]: chip.shared_per_block for chip in (chips.A100, chips.H100)}
    return dict(N=N, M=M, d=d, over_N=over_N, over_M=over_M, memories=memories)


def block_sizes(name: str, M: int, d: int) -> dict[str, int]:
    """FA1's rule for both: the block that stays on chip gets a quarter of M, the one that streams at most d rows."""
    inner, outer = fa1.block_sizes(M, d)
    return dict(B_r=outer, B_c=inner) if name == "FA2" else dict(B_r=inner, B_c=outer)


def moved(name: str, N: int, M: int, d: int) -> int:
    """Elements that the forward of one head loads and stores, in closed form."""
    return io.requests(name.lower(), "forward", Tiling(N, N, **block_sizes(name, M, d)), d).total


Points = list[tuple[int, int]]  # (N or M, elements moved)
LOOKS = {
    "standard": dict(color=style.QUIET, linestyle=":"),
    "FA1": dict(color=style.INK, linestyle="--"),
    "FA2": dict(color=style.INK, linestyle="-"),
}


@style.picture
def draw(N: int, M: int, d: int, over_N: dict, over_M: dict, memories: dict) -> style.Drawn:
    """Elements that one head's forward moves: over N with M fixed, and over M with N fixed.

    over_N, over_M: {"FA2": points, ...}. memories: {chip: bytes that a block can have}.
    """
    caption = "Loads and stores of one head grow as N². Larger blocks need fewer of them."
    figure, axes = style.new_figure(6.2, caption, nrows=2)
    figure.get_layout_engine().set(hspace=0.08)
    for ax, curves in zip(axes, (over_N, over_M), strict=True):
        for name, curve in curves.items():
            ax.plot(*zip(*curve, strict=True), **LOOKS[name])
        least = [(x, 4 * (x if curves is over_N else N) * d) for x, _ in curves["FA2"]]
        ax.plot(*zip(*least, strict=True), color=style.QUIET, linewidth=0.9)
        place = (least[-1], (5, 0)) if curves is over_N else (least[0], (4, 7))
        style.beside(ax, "floor: 4 N d", *place)
        ax.set(xscale="log", yscale="log", ylabel="elements")
    _over_N(axes[0], M, d, over_N)
    _over_M(axes[1], N, d, over_M, memories)
    last = {name: curve[-1][1] for name, curve in over_N.items()}
    alt = (
        f"Two log-log charts of elements moved by one head. Over N, with on-chip memory of {M:,} elements, three"
        f" parallel lines of slope 2: at N = {over_N['FA2'][-1][0]:,} standard attention moves"
        f" {short(last['standard'])}, FA1 {short(last['FA1'])}, FA2 {short(last['FA2'])}. Over memory, at N = {N:,},"
        f" standard stays flat while FA1 and FA2 fall in proportion, from above it to far below. A thin line is the"
        " floor, 4 N d: each of Q, K, V and O once."
    )
    return figure, alt


def short(count: float) -> str:
    """A count with its thousands as k, M, G."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:.3g}"


def _over_N(ax: style.Axes, M: int, d: int, curves: dict[str, Points]) -> None:
    lengths = [x for x, _ in curves["FA2"]]
    for name, curve in curves.items():
        style.beside(ax, name, curve[-1], (6, -2 if name == "FA2" else 2))
    style.log_ticks(ax.xaxis, lengths)
    style.log_ticks(ax.yaxis, [10**5, 10**7, 10**9], ["100k", "10M", "1G"])
    ax.set(xlim=(lengths[0] / 1.2, lengths[-1] * 1.9), xlabel="sequence length N")
    ax.set_title(f"One head, d = {d}, M = {M:,} elements of 2 bytes ({M * 2 // 1024} KiB)")


def _over_M(ax: style.Axes, N: int, d: int, curves: dict[str, Points], memories: dict[str, int]) -> None:
    sizes = [x for x, _ in curves["FA2"]]
    style.beside(ax, "standard", curves["standard"][-1], (6, 0))
    style.beside(ax, "FA1", curves["FA1"][-1], (6, 4))
    style.beside(ax, "FA2", curves["FA2"][2], (-8, -7), ha="right")
    for chip, size in memories.items():
        ax.axvline(size // 2, color=style.QUIET, linewidth=0.8, zorder=0)
        look = dict(rotation=90, ha="right", va="top", color=style.QUIET)
        style.beside(ax, chip, (size // 2, ax.get_ylim()[1]), (-3, -3), **look)
    style.log_ticks(ax.xaxis, sizes, [f"{2 * x // 1024}" for x in sizes])
    style.log_ticks(ax.yaxis, [10**6, 10**7], ["1M", "10M"])
    ax.set(xlim=(sizes[0] / 1.2, sizes[-1] * 1.9), xlabel="room for M elements of 2 bytes, in KiB")
    ax.set_title(f"One head, d = {d}, N = {N:,}")
