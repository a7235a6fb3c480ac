"""Timelines of causal row blocks on SMs, under static and under dynamic scheduling."""

from fa2_lab.machine import chips, grid
from fa2_lab.plots.waves import draw  # noqa: F401  every picture's file has data() and draw()
from fa2_lab.tiles import CAUSAL, Tiling


def data(N: int = 16384, d: int = 128, heads: int = 16, at_once: int = 4, B_r: int = 128) -> dict:
    """Return three schedules of causal row blocks on the SMs of an H200.

    The first schedule is static and processes one head after another. The other two process `at_once` heads at a time,
    one with static and one with dynamic scheduling.
    """
    # The number of tiles in each row block of one head, from the heaviest to the lightest.
    tiles = grid.worker_tiles(Tiling(N, N, B_r, 128, CAUSAL), "forward")[::-1].tolist()
    costs = tiles * heads, [n for n in tiles for _ in range(at_once)] * (heads // at_once)
    head_by_head, side_by_side = ([grid.BlockWork(0, n, cost) for n, cost in enumerate(order)] for order in costs)
    SMs = chips.H200.SMs
    ran = {
        "Static, head by head": grid.static_schedule(head_by_head, SMs),
        f"Static, {at_once} heads at once": grid.static_schedule(side_by_side, SMs),
        "Dynamic, as in a plain launch": grid.schedule(side_by_side, SMs),
    }
    caption = (
        "Static scheduling of causal row blocks leaves some SMs idle, but dynamic scheduling keeps all of them busy."
        f" Model of {heads} heads, N = {N:,}, d = {d}, causal, {SMs} SMs, row blocks of {B_r}."
    )
    return dict(ran=ran, caption=caption)
