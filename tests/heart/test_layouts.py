"""Register and shared-memory layouts: against Triton's own."""

import json
import subprocess
import sys

import numpy as np
import pytest

from fa2_lab.machine.layouts import MmaLayout, SharedLayout, parse

MMA = "#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 8]}>"
WGMMA = MMA.replace("versionMajor = 2", "versionMajor = 3").replace("[16, 8]", "[16, 64, 16]")
SWIZZLED = "#shared = #ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>"
NVMMA = "#shared = #ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16}>"


def test_layout_attributes_are_parsed():
    assert parse(MMA) == MmaLayout(2, (4, 1), (16, 8))
    assert parse(WGMMA) == MmaLayout(3, (4, 1), (16, 64))
    assert parse(SWIZZLED) == SharedLayout(8, 1, 8)
    assert parse(SWIZZLED.replace("[1, 0]", "[0, 1]")).transposed
    assert parse(NVMMA) == SharedLayout(8, 1, 8, block=64)
    narrow = NVMMA.replace("false", "true").replace("128", "32").replace("BitWidth = 16", "BitWidth = 8")
    assert parse(narrow) == SharedLayout(16, 4, 2, 32, True)


@pytest.mark.parametrize("text", ["#blocked", "#ttg.blocked<{order = [1, 0]}>", MMA.replace("Major = 2", "Major = 5")])
def test_unsupported_layouts_are_refused(text):
    with pytest.raises(ValueError, match=r"^layout: got (#blocked|blocked|nvidia_mma); it takes"):
        parse(text)
    with pytest.raises(ValueError, match=r"^shape: got \(8, 32\); it takes rows of whole"):
        SharedLayout(8, 1, 8).offsets((8, 32))


MMA_LAYOUTS = [
    (MmaLayout(2, (4, 1), (16, 8)), (128, 64)),
    (MmaLayout(2, (2, 2), (16, 8)), (64, 64)),
    (MmaLayout(2, (8, 1), (16, 8)), (128, 128)),
    (MmaLayout(3, (4, 1), (16, 64)), (128, 64)),
    (MmaLayout(3, (4, 1), (16, 64)), (64, 128)),
    (MmaLayout(3, (4, 2), (16, 32)), (64, 128)),
    (MmaLayout(3, (8, 1), (16, 128)), (256, 128)),
]


# Against Triton itself ----------------------------------------------------------------------------------------

PRINT_BASES = """
import json
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl
context = ir.context(); ir.load_dialects(context)
builder = gluon_ir.GluonOpBuilder(context)
for layout, shape in {cases}:
    linear = builder.to_linear_layout(layout._to_ir(builder), shape)
    names = ["reg_bases", "lane_bases", "warp_bases", "offset_bases"]
    print(json.dumps([getattr(linear, name) for name in names if hasattr(linear, name)]))
"""


def triton_bases(cases: str) -> list[list[list[list[int]]]]:
    """Return Triton's own linear layouts: the (row, col) of each bit of a register, lane, warp or offset."""
    result = subprocess.run(
        [sys.executable, "-c", PRINT_BASES.format(cases=cases)], capture_output=True, text=True, timeout=120
    )
    if result.returncode:
        pytest.skip("this Triton does not tell its layouts: " + result.stderr.strip().splitlines()[-1])
    return [json.loads(line) for line in result.stdout.splitlines()]


def positions(bases: list[list[int]]) -> np.ndarray:
    """Return the (row, col) of each number whose bits have these bases."""
    bits = np.arange(2 ** len(bases))[:, None] >> np.arange(len(bases)) & 1
    return np.array([np.bitwise_xor.reduce(np.where(b[:, None], bases, 0), axis=0) for b in bits]) if bases else bits


def gluon_source(mma: MmaLayout, shape: tuple[int, int]) -> str:
    """Return Gluon's source code for a layout and a shape."""
    instruction = [*mma.instruction, 16][: mma.version]
    return f"(gl.NVMMADistributedLayout([{mma.version}, 0], {list(mma.warps)}, {instruction}), {list(shape)})"


def test_register_layout_equals_tritons():
    pytest.importorskip("triton")
    bases_of_layouts = triton_bases(f"[{', '.join(gluon_source(*case) for case in MMA_LAYOUTS)}]")
    assert len(bases_of_layouts) == len(MMA_LAYOUTS)
    for (layout, shape), bases in zip(MMA_LAYOUTS, bases_of_layouts, strict=True):
        owners = layout.owners(shape)
        registers, lanes, warps = (positions(b) for b in bases)
        at = (registers[:, None, None] ^ lanes[None, :, None] ^ warps[None, None, :]).reshape(-1, 2).T
        register, lane, warp = (n.ravel() for n in np.indices((len(registers), len(lanes), len(warps))))
        assert np.array_equal(owners.warp[tuple(at)], warp) and np.array_equal(owners.lane[tuple(at)], lane)
        assert np.array_equal(owners.register[tuple(at)], register)


def test_shared_memory_layout_equals_tritons():
    pytest.importorskip("triton")
    cases = {
        "(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]), [64, 128])": (SharedLayout(8, 1, 8), (64, 128)),
        "(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]), [16, 32])": (SharedLayout(8, 2, 4), (16, 32)),
        "(gl.SwizzledSharedLayout(8, 1, 8, [0, 1]), [64, 16])": (SharedLayout(8, 1, 8, transposed=True), (64, 16)),
        "(gl.NVMMASharedLayout(128, 16, 2), [64, 64])": (SharedLayout(8, 1, 8, 64), (64, 64)),
        "(gl.NVMMASharedLayout(128, 16, 2), [64, 128])": (SharedLayout(8, 1, 8, 64), (64, 128)),
        "(gl.NVMMASharedLayout(64, 16, 2), [64, 64])": (SharedLayout(8, 2, 4, 32), (64, 64)),
        "(gl.NVMMASharedLayout(128, 16, 2, transposed=True), [128, 64])": (SharedLayout(8, 1, 8, 64, True), (128, 64)),
    }
    for (layout, shape), (bases,) in zip(cases.values(), triton_bases(f"[{', '.join(cases)}]"), strict=True):
        assert np.array_equal(layout.offsets(shape)[tuple(positions(bases).T)], np.arange(shape[0] * shape[1])), layout
