"""Diagram of dQ's path in the Hopper backward pass: many additions to accumulators in L2, then one copy to HBM."""

from fa2_lab.plots import style


def data(d: int = 128, B_r: int = 64, N: int = 16384, keys: int = 128, consumers: int = 2) -> dict:
    """Return the number of column blocks of one head, the number of additions to dQ, and three sizes in bytes.

    A column block has `keys` keys, which are divided among `consumers` consumers. The three sizes are the bytes in one
    addition ("part"), in all accumulators ("sums") and in dQ.
    """
    columns = N // keys
    sizes = dict(part=B_r * d // consumers * 4, sums=N * d * 4, dQ=N * d * 2)
    return dict(columns=columns, additions=consumers * columns * N // B_r, sizes=sizes, N=N, d=d)


PAGE = ((0, 1.5), (2.65, 1.3), (4.75, 0.95))  # (left edge, width) of the column blocks, L2 and HBM
PHONE = ((0, 1.05), (1.65, 1.05), (3.15, 0.92))
PITCH = 0.52  # distance from one column block to the next, in data units


@style.picture
def draw(columns: int, additions: int, sizes: dict[str, int], N: int, d: int) -> style.Drawn:
    """Draw column blocks on the left, thick arrows from them to L2, and a thin arrow from L2 to HBM on the right."""
    caption = (
        "The parts of dQ are added up in L2, and dQ goes to HBM only once. A part goes from the registers of a consumer"
        " through its buffer in shared memory, and TMA adds it in L2. The last kernel multiplies the sums by τ and"
        " rounds them to 16 bits. The paper's line 15 adds to dQ in HBM; here, the GPU's L2 holds the sums while they"
        f" are added to. A dashed edge marks a gradient. This is one head with N = {N:,}, d = {d}."
    )
    figure, ax = style.new_figure(3.3, caption)
    (left, wide), (L2, across), (HBM, last) = PHONE if style.is_narrow() else PAGE
    names = ["0", "1", "2", "…", f"{columns - 1}"]
    block, each = "block" if style.is_narrow() else "column block", additions // columns
    for k, name in enumerate(names):
        y = k * PITCH + 0.21
        if name == "…":
            style.note(ax, left + wide / 2, y, "⋮", ha="center")
            style.note(ax, (left + wide + L2) / 2, y, "⋮", ha="center")
            continue
        style.tensor_box(ax, left, y - 0.21, wide, 0.42, "dQ", f"{block} {name}")
        style.arrow(ax, (left + wide + 0.05, y), (L2 - 0.04, y), linewidth=5, mutation_scale=16)
        words = f"{each} ×" if style.is_narrow() else f"{each} additions"
        style.note(ax, (left + wide + L2) / 2 - 0.05, y - 0.17, words, ha="center")
    high = (len(names) - 1) * PITCH + 0.42
    sums = f"sums\nin fp32,\n{format_size(sizes['sums'])}"
    style.tensor_box(ax, L2, 0, across, high, "dQ", sums, linewidth=2)
    style.arrow(ax, (L2 + across + 0.05, high / 2), (HBM - 0.04, high / 2), linewidth=1.4, mutation_scale=10)
    style.tensor_box(ax, HBM, high / 2 - 0.55, last, 1.1, "dQ", f"dQ\nin 16 bits,\n{format_size(sizes['dQ'])}")
    style.note(ax, (L2 + across + HBM) / 2, high / 2 - 0.2, "once", ha="center", weight="bold")
    for x, name in ((left, "SMs"), (L2, "L2"), (HBM, "HBM")):
        style.note(ax, x, -0.16, name, weight="bold")
    moved = additions * sizes["part"] // 2**20
    words = f"{additions:,} additions of {format_size(sizes['part'])}: {moved:,} MiB"
    style.note(ax, left, high + 0.2, words, weight="bold")
    style.note(ax, HBM + last, high + 0.2, f"once: {format_size(sizes['dQ'])}", weight="bold", ha="right")
    style.strip_axes(ax, (-0.03, style.width_in_units() - 0.1), (-0.3, high + 0.35))
    alt = (
        f"From left to right: {columns} column blocks in the SMs send thick arrows into one box, the sums in L2"
        f" ({format_size(sizes['sums'])} in fp32). These are {additions:,} additions of {format_size(sizes['part'])}"
        f" each. One thin arrow leads from L2 to dQ in HBM ({format_size(sizes['dQ'])} in 16 bits), once."
    )
    return figure, alt


def format_size(size: int) -> str:
    """Format a size in bytes as KiB or MiB."""
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"
