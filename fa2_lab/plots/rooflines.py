"""The rooflines in the chapters, which show how fast a method can run on a GPU, and which unit limits it.

To draw one of them, pass its data to roofline.draw(), as in `roofline.draw(**data("decode"))`.
"""

from dataclasses import replace

from fa2_lab.machine import chips, warps
from fa2_lab.machine.rates import cost, rates
from fa2_lab.plots import roofline
from fa2_lab.plots.roofline import Roof, draw
from fa2_lab.records import load

__all__ = ["data", "draw"]


def data(picture_name: str = "forward") -> dict:
    """Return the arguments to pass to roofline.draw() for the roofline that PICTURES lists under this name."""
    return PICTURES[picture_name]()


def forward() -> dict:
    """Return the roofline of standard attention, FA1, and FA2 with two tile sizes (chapter 04)."""
    blocks = {B: cost("FA2", B_r=B, B_c=B) for B in (64, 128)}
    small, large = (method.limit(chips.H200)[0] for method in blocks.values())
    message = f"With 64 rows per block, {small} limits FA2, and with 128 rows, the {large} do."
    return roofline.data("standard", "FA1", *((f"FA2, {B} × {B}", c) for B, c in blocks.items()), message=message)


def backward() -> dict:
    """Return the roofline of three versions of FA2's backward pass, with 64 × 64 tiles (chapter 05)."""
    one = cost("FA2 backward")  # every tile loads and stores dq
    dq = 64 * (4096 // 64) * 4096 * 128 * 4  # bytes of dq loaded (or stored): heads × column blocks × dQ in fp32
    methods = {
        "one pass, load and store": one,
        "one pass, atomic adds": replace(one, requested_bytes=one.requested_bytes - dq),
        "two passes": replace(one, flops=one.flops * 7 // 5, requested_bytes=2 * (one.requested_bytes - 2 * dq)),
    }
    message = "With tiles of 64 × 64, L2 limits a single backward pass, but not two passes."
    picture = roofline.data(*methods.items(), message=message)
    # The label of a dot replaces the label of the ceiling.
    return picture | dict(roofs=[roof._replace(flat="") for roof in picture["roofs"]])


def row_blocks() -> dict:
    """Return the roofline of one head with 8,192 queries, for four sizes of row block (chapter 06)."""
    sizes = {B_r: cost("FA2", heads=1, N=8192, B_r=B_r, B_c=64) for B_r in (128, 64, 32, 16)}
    best = min(sizes, key=lambda B_r: sizes[B_r].limit(chips.H200)[1])
    message = f"One head of 8,192 queries is fastest in row blocks of {best}."
    picture = roofline.data(*((f"B_r = {B_r}", method) for B_r, method in sizes.items()), message=message)
    x, most, _ = picture["points"]["B_r = 128"]
    picture["points"]["B_r = 128"] = x, most, f"{sizes[128].workers} busy SMs"  # all other SMs are idle
    return picture | dict(limit=(most, ""))


def split() -> dict:
    """Return the roofline of one tile under split-K and split-Q (chapter 07).

    The horizontal axis shows FLOPs per byte of shared memory.
    """
    rate, flops, points = rates(chips.A100), 4 * 128 * 64 * 128, {}
    for name, scheme in (("split-K", "split_k"), ("split-Q", "split_q")):
        intensity = flops / warps.access_bytes(scheme, 128, 64, 128, 4)
        points[name] = intensity, min(rate.tensor, intensity * rate.shared) / 1e12
    roof = Roof(rate.tensor / 1e12, rate.shared / 1e12, "", f"tensor cores {rate.tensor / 1e12:.0f}")
    caption = (
        "Shared memory limits split-K, and the tensor cores limit split-Q. A tile of 128 × 64 on one A100, d = 128."
        " Here a dot counts bytes of shared memory, whereas in the earlier chapters it counts requested bytes or"
        " bytes that reach DRAM."
    )
    xlabel = f"FLOPs per byte of shared memory ({rate.shared / 1e12:.1f} TB/s)"
    return dict(points=points, roofs=[roof], caption=caption, xlabel=xlabel)


def one_pass() -> dict:
    """Return the roofline of a backward pass in one kernel, with the Hopper kernel's measured speed (chapter 13)."""
    method = cost("FA2 backward", B_r=64, B_c=128)  # 64 heads, N = 4,096, d = 128
    problem = dict(N_q=4096, d=128, causal=False)
    rows = [row for row in load("paper").rows if row.direction == "backward" and problem.items() <= row.problem.items()]
    reached = rows[0].rate("fa2_lab")
    allowed, gemm = method.flops / method.limit(chips.H200)[1] / 1e12, load("paper").ceilings["GEMM TFLOP/s"]
    message = f"L2 would allow the backward pass {allowed:.0f} TFLOP/s, but it reaches {reached:.0f}."
    picture = roofline.data(("one pass", method), message=message)
    picture["points"]["fa2_lab"] = method.intensity("requested_bytes"), reached
    caption = picture["caption"] + " The dashed line is a large matmul on this GPU, whose power limit lowers its clock."
    return picture | dict(caption=caption, limit=(gemm, f"a large matmul: {gemm:.0f}"))


def decode() -> dict:
    """Return the roofline for decode with one query per K/V head and with four (chapter 14)."""
    groups = {n: cost("decode", N=65536, N_q=n, heads=8, B_r=16) for n in (1, 4)}
    one, four = (method.flops / method.limit(chips.H200)[1] for method in groups.values())
    message = f"A group of four queries per key does {four / one:.0f} times the work for the same bytes."
    names = dict(zip(groups, ("one query per key", "a group of four"), strict=True))
    return roofline.data(*((names[n], method) for n, method in groups.items()), message=message)


PICTURES = {make.__name__: make for make in (forward, backward, row_blocks, split, one_pass, decode)}
