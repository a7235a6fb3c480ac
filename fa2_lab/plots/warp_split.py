"""Diagram of how four warps share a tile (figure 3 of the FA2 paper), and of their traffic through shared memory."""

from fa2_lab.machine import warps
from fa2_lab.plots import style


def data(B_r: int = 128, B_c: int = 64, d: int = 128, W: int = 4) -> dict:
    """Return the bytes that one tile moves through shared memory with W warps, under split-K and under split-Q."""
    accesses = {scheme: warps.tile_accesses(scheme, B_r, B_c, d, W) for scheme in NAMES}
    moved = {scheme: {key: n * warps.BYTES[key[1]] for key, n in counts.items()} for scheme, counts in accesses.items()}
    return dict(B_r=B_r, B_c=B_c, d=d, W=W, moved=moved)


NAMES = {"split_k": "Split-K (FA1): a warp takes keys", "split_q": "Split-Q (FA2): a warp takes queries"}
GAP = 0.75


@style.picture
def draw(B_r: int, B_c: int, d: int, W: int, moved: dict) -> style.Drawn:
    """Draw Q Kᵀ = S and P V = O under split-K and split-Q, with each tile's traffic and barriers.

    `moved` is {"split_k": {("read", "Q"): bytes, …}, "split_q": …}.
    """
    caption = "If the warps split Q instead of K, no partial results go through shared memory."
    figure, axes = style.new_stacked_figure(
        3.3, f"{caption} This is figure 3 of the paper, for a tile of {B_r} × {B_c}, d = {d} and 16 bits.", ncols=2
    )
    figure.get_layout_engine().set(wspace=0.08)
    cost = {scheme: f"{format_kib(sum(moved[scheme].values()))} KiB" for scheme in NAMES}
    for ax, scheme in zip(axes[0], NAMES, strict=True):
        _draw_operands(ax, scheme, W)
        ax.set_xlabel(f"{cost[scheme]} through shared memory,\n{warps.BARRIERS[scheme]} barriers per tile")
    alt = (
        f"Split-K: all {W} warps read Q; Kᵀ, S and V are cut into a slice for each warp, and each ends with a partial O"
        " of full size, to be added up. Split-Q: Q, S and O are cut into rows for each warp, all warps read K and V,"
        f" and nothing is added. Per tile split-K moves {cost['split_k']}, of which"
        f" {format_kib(_partial_bytes(moved['split_k']))} are partial results, with {warps.BARRIERS['split_k']}"
        f" barriers; split-Q {cost['split_q']}, none of them partial, with {warps.BARRIERS['split_q']} barriers."
    )
    return figure, alt


def format_kib(size: int) -> str:
    return f"{size / 1024:.0f}"


def _partial_bytes(moved: dict[tuple[str, str], int]) -> int:
    return sum(size for (_, tensor), size in moved.items() if tensor in ("max", "sum", "PV"))


def _draw_operands(ax: style.Axes, scheme: str, W: int) -> None:
    """Draw Kᵀ above S, Q to the left of S, and V above O."""
    keys = scheme == "split_k"
    d, left, top = W / 2, W / 2 + GAP, W + GAP
    right = left + W + GAP
    _draw_matrix(ax, "K", "Kᵀ", left, W - d, W, d, "columns" if keys else "whole", W)
    _draw_matrix(ax, "V", "V", right, 0, d, W, "rows" if keys else "whole", W)
    _draw_matrix(ax, "Q", "Q", 0, top, d, W, "whole" if keys else "rows", W)
    _draw_matrix(ax, "S", "S, P", left, top, W, W, "columns" if keys else "rows", W)
    _draw_matrix(ax, "O", f"{W} parts of O" if keys else "O", right, top, d, W, "layers" if keys else "rows", W)
    style.strip_axes(ax, (-0.1, right + d + 1.2), (-GAP, top + W + 0.7), aspect="equal")
    ax.set_title(NAMES[scheme])


def _draw_matrix(
    ax: style.Axes, tensor: str, name: str, x: float, y: float, w: float, h: float, split: str, W: int
) -> None:
    """Draw one matrix: whole if all warps read it, otherwise cut into slices that are numbered by warp.

    `split` is "whole", "rows", "columns" or "layers". With "layers", each warp has a full-size partial result.
    """
    style.note(ax, x + w / 2, y - 0.12, name, ha="center", va="bottom")
    if split == "whole":
        style.tensor_box(ax, x, y, w, h, tensor, "all\nwarps")
        return
    for k in range(W):
        place, chip = _part_place(k, W, x, y, w, h)[split]
        style.tensor_box(ax, *place, tensor, linewidth=1)
        style.box(ax, chip[0] - 0.3, chip[1] - 0.3, 0.6, 0.6, f"{k + 1}", style.worker_color(k), zorder=2.5)


def _part_place(k: int, W: int, x: float, y: float, w: float, h: float) -> dict[str, tuple]:
    """Return {split: (rectangle of warp k's slice, position of its number)} for each way to cut a matrix."""
    row, column = h / W, w / W
    shift_x, shift_y = x + 0.38 * k, y + 0.2 * k
    return {
        "rows": ((x, y + k * row, w, row), (x + w / 2, y + (k + 0.5) * row)),
        "columns": ((x + k * column, y, column, h), (x + (k + 0.5) * column, y + h / 2)),
        "layers": ((shift_x, shift_y, w, h), (shift_x + 0.34, shift_y + 0.36 + 0.62 * k)),
    }
