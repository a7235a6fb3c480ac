"""What the models of the machine refuse: one argument at a time is wrong, and the error names it."""

import numpy as np
import pytest

from fa2_lab.machine import budget, chips, grid, hopper, io, ring, splits, time, warps
from fa2_lab.machine.chips import A100, H100, H200
from fa2_lab.tiles import Mask, Tiling

TILING, ONES = Tiling(8, 8, 4, 4), np.ones((8, 4))
QKV = dict(Q=ONES, K=ONES, V=ONES)
NO_INTERVAL = Tiling(4, 4, 2, 2, Mask(allowed=np.eye(4, dtype=bool)))
TILE = dict(B_r=64, B_c=64, d=64)
WARPS = dict(W=[0, 2.0], i=[2], tiling=[Tiling(8, 9, 4, 4), 4], Q=[np.zeros(8)], tau=[-1.0])

CALLS = [  # a call, good arguments, and wrong ones for each
    (budget.fits, dict(chip=H100, **TILE, stages=2, warps=4, itemsize=2, kernel="forward"),
     dict(chip=["H100"], B_r=[0], B_c=[64.0], d=[-1], stages=[0], warps=[33], itemsize=[0], kernel=["sideways"])),
    (grid.waves, dict(blocks=4, slots=4), dict(blocks=[0], slots=[1.5])),
    (grid.schedule, dict(blocks=[grid.Block(0, None, 1)], SMs=1, blocks_per_sm=1),
     dict(blocks=[[]], SMs=[0], blocks_per_sm=[0])),
    (grid.fa1_grid, dict(heads=1, tiling=TILING), dict(heads=[0], tiling=[(8, 8)])),
    (grid.fa2_grid, dict(heads=1, tiling=TILING), dict(tiling=[(8, 8)], direction=["sideways"], order=["random"])),
    (grid.dq_steps, dict(tiling=TILING), dict(tiling=[None])),
    (io.tile_operations, dict(algorithm="fa2", direction="forward", b=4, c=4, d=4), dict(b=[0], d=[2.0])),
    *[(io.traffic, dict(algorithm=algorithm, direction=direction, tiling=TILING, d=4),
       dict(tiling=[(8, 8)], d=[0, 2.0])) for algorithm, direction in io.FORMS],
    (time.tile_clocks, dict(chip=A100, **TILE), dict(chip=["A100"], W=[0], scheme=["split_d"])),
    (warps.tile_accesses, dict(scheme="split_q", b=8, c=8, d=4, W=4), dict(scheme=["split_d"])),
    *[(scheme, dict(**QKV, tiling=TILING, i=1, W=2), WARPS) for scheme in warps.SCHEMES.values()],
    (splits.Cache, dict(lengths=(5,), kv_heads=1, d=128, rows=1), dict(lengths=[(), (-1,)], kv_heads=[0], rows=[0])),
    (splits.Shares, dict(tiles=(1,), programs=1, least=1), dict(tiles=[(), (1, -1)], programs=[0], least=[0])),
    (splits.same_splits, dict(tiles=(4,), splits=1), dict(splits=[0])),
    (splits.pace, dict(chip=H200, cache=splits.Cache((5,), 1, 16), stages=2), dict(stages=[1])),
    (hopper.forward, dict(T=4), dict(T=[0], consumers=[0, True], stages=[0])),
    (ring.sent, dict(lengths=[8, 8], rank=0, direction="forward", kv_heads=2, d=16), dict(direction=["sideways"])),
    (chips.named, dict(name="H200"), dict(name=["V100", 90])),
]  # fmt: skip


@pytest.mark.parametrize("call, good, wrong", CALLS, ids=[call.__name__ for call, *_ in CALLS])
def test_bad_input_is_named(call, good, wrong):
    call(**good)
    for name, bad in ((name, bad) for name, values in wrong.items() for bad in values):
        says = f"^{'scale' if name == 'tau' else name}: got .*; it takes "
        with pytest.raises((TypeError, ValueError), match=says):
            call(**good | {name: bad})


def test_an_algorithm_that_there_is_not_is_refused():
    for call in (io.traffic, io.operations):
        with pytest.raises(ValueError, match=r"fa3.*it takes"):
            call("fa3", "forward", TILING, 4)
    with pytest.raises(ValueError, match="fa3"):
        time.tile_clocks(A100, 64, 64, 64, algorithm="fa3")
