"""Pictures whose data was measured: figures/data/bench_SUITE.json, which `fa2-lab bench` writes on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from fa2_lab.gallery.machine import RECORDED, recorded
from fa2_lab.gallery.picture import Picture
from fa2_lab.machine import chips
from fa2_lab.plots.roofline import roofline
from fa2_lab.plots.speed import speed

DRAM = ("DRAM bytes read", "DRAM bytes written")
CONTESTANTS = ("fa2_lab", "fa2_lab portable", "FlashAttention-4", "cuDNN", "FlexAttention", "torch flash", "flash_attn")
BASELINE = "torch flash"


def measured(suite: str) -> dict:
    """The recorded run of a suite, or one sentence on how to get it."""
    found = recorded(f"bench_{suite}")
    if found is None:
        raise ValueError(
            f"figures/data/bench_{suite}.json is missing: `python -m fa2_lab bench {suite}` measures it on a GPU"
        )
    return found


def made(record: dict) -> str:
    """The machine and the versions behind a run."""
    machine = record["machine"]
    return f"{machine['gpu']}, bf16, torch {machine['torch']}, triton {machine['triton']}"


# The ladder under the roof ------------------------------------------------------------------------------------


def roofline_data(d: int = 128) -> dict:
    """Every rung in the training shape without a mask: TFLOP/s, and FLOPs per byte that DRAM moved."""
    record = measured("ladder")
    row = training_row(record, d)
    moved = counted(record, d)
    rungs = [name for name in row["values"] if name in moved and not name.startswith("split")]
    speeds = {name: row["flops"] / row["values"][name][0] / 1e9 for name in rungs}
    points = {name: (row["flops"] / moved[name], speeds[name]) for name in rungs}
    chip, p = chips.named(record["machine"]["gpu"]), row["problem"]
    roof = dict(flops=record["ceilings"]["GEMM TFLOP/s"], bytes=record["ceilings"]["copy TB/s"])
    printed = dict(flops=chip.tensor_flops / 1e12, bytes=chip.hbm_per_second / 1e12)
    shape = f"forward, batch {p['batch']}, {p['heads']} heads, N = {p['N_q']:,}, d = {d}, no mask"
    return dict(points=points, measured=roof, datasheet=printed, setting=f"{made(record)}; {shape}")


def training_row(record: dict, d: int) -> dict:
    """The timed row of one head dimension with the most heads and no mask."""
    rows = [r for r in record["rows"] if r["direction"] == "forward" and r["problem"]["d"] == d]
    rows = [r for r in rows if not r["problem"]["causal"]]
    if not rows:
        raise ValueError(f"d: got {d}; the recorded ladder has no row without a mask for it")
    return max(rows, key=lambda r: r["problem"]["batch"] * r["problem"]["heads"])


def counted(record: dict, d: int) -> dict[str, float]:
    """{rung: bytes that DRAM moved in one call} of the rungs whose counters could be read."""
    rows = [r for r in record["rows"] if r["direction"] == "counters" and r["problem"]["d"] == d]
    found = {r["problem"]["rung"]: sum(r["values"][m][0] for m in DRAM) for r in rows if set(DRAM) <= set(r["values"])}
    if not found:
        reasons = sorted({why for r in rows for why in r["failed"].values()})
        raise ValueError(f"d: got {d}; the recorded ladder has no DRAM counters for it: {'; '.join(reasons) or 'none'}")
    return found


# Speed over N -------------------------------------------------------------------------------------------------


def speed_data() -> dict:
    """TFLOP/s of every contestant on the FA2 paper's grid."""
    record, panels = measured("paper"), {}
    for direction in ("forward", "backward"):
        for row in record["rows"]:
            if row["direction"] == direction:
                p = row["problem"]
                curves = panels.setdefault((direction, p["d"], p["causal"]), {name: [] for name in CONTESTANTS})
                for name in CONTESTANTS:
                    if name in row["values"]:
                        curves[name].append((p["N_q"], row["flops"] / row["values"][name][0] / 1e9))
    panels = {at: {name: sorted(curve) for name, curve in c.items() if curve} for at, c in panels.items()}
    setting = f"{made(record)}; 16,384 tokens, hidden size 2,048; {BASELINE} is FlashAttention-2 in torch"
    return dict(panels=panels, gemm=record["ceilings"]["GEMM TFLOP/s"], baseline=BASELINE, setting=setting)


# Crosses for the picture of HBM traffic -----------------------------------------------------------------------


def record_traffic(d: int = 64, rung: str = "tuned", folder: Path = RECORDED) -> Path:
    """Write figures/data/hbm_traffic.json: what the ladder's counters say of FA2, in elements that one head moves.

    Only FA2's rung has one item size throughout (L in fp32 is a number per row); standard and FA1 keep S or O in fp32.
    """
    record = measured("ladder")
    problem = training_row(record, d)["problem"]
    heads, width = problem["batch"] * problem["heads"], 2  # bytes of a bf16 element
    elements = round(counted(record, d)[rung] / heads / width)
    source = f"{record['machine']['gpu']}, DRAM, {heads} heads at once; L2 serves the loop over tiles"
    found = dict(source=source, points={"FA2": [(problem["N_q"], elements)]})
    file = folder / "hbm_traffic.json"
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return file


PICTURES = [
    Picture(
        "roofline",
        "The ladder under the roofline of an H200: from the swapped loops on, DRAM is no longer the limit.",
        "10_ladder",
        roofline,
        roofline_data,
    ),
    Picture(
        "speed",
        "Speed over the sequence length on an H200, beside the peers of the same run, forward and backward.",
        "10_ladder",
        speed,
        speed_data,
    ),
]
