"""Pictures of decode: how the tiles are shared out, and what the number of programs was measured to do."""

from __future__ import annotations

from fa2_lab.gallery.measured import made, measured
from fa2_lab.gallery.picture import Picture
from fa2_lab.machine import chips, splits
from fa2_lab.plots.shares import ends, programs, shares

ALONE = "reading alone"  # of the cache's bytes, as the record calls it
TILE, STAGES = 64, 4  # of the kernel on Hopper at d = 128
BEGIN = 8e-6  # seconds that a launch of two kernels takes, with nothing to read


def shares_data() -> dict:
    """Five heads of 10, 3, 0, 12 and 2 tiles for four programs."""
    return dict(cut=splits.Shares((10, 3, 0, 12, 2), 4))


def programs_data() -> dict:
    """The recorded sweep over the number of programs on one sequence of 65,536 keys, beside the model."""
    record = measured("decode")
    curves = record["curves"]
    curve = list(zip(curves["programs"], curves["microseconds"], strict=True))
    row = next(r for r in record["rows"] if r["direction"] == "decode" and r["problem"]["N_k"] == 65536)
    p = row["problem"]
    rows = p["heads"] // p["kv_heads"]
    cache = splits.Cache((p["N_k"],) * p["batch"], p["kv_heads"], p["d"], rows, B_c=TILE)
    chip, copy = chips.named(record["machine"]["gpu"]), record["ceilings"]["copy TB/s"] * 1e12
    speed = splits.pace(chip, cache, STAGES, copy / chip.hbm_per_second)
    slots = int(curves["usual"][0])
    model = [(n, 1e6 * (BEGIN + seconds(cache, n, slots, speed))) for n, _ in curve]
    rivals = {name: values[0] for name, values in row["values"].items()}
    setting = f"{made(record)}; 1 query, {p['heads']} heads on {p['kv_heads']}, {p['N_k']:,} keys, d = {p['d']}"
    return dict(curve=curve, model=model, floor=rivals.pop(ALONE), usual=slots, rivals=rivals, setting=setting)


def ends_data() -> dict:
    """The recorded clocks: when each of the programs that read a whole head has ended, and its SM."""
    record = measured("ends")
    SM, ended = ([*record["curves"][name]] for name in ("SM", "ended"))
    setting = f"{made(record)}; 32 × 8,192 keys, 32 heads on 8, d = 128"
    return dict(SM=[int(x) for x in SM], ended=ended, setting=setting)


def seconds(cache: splits.Cache, n: int, slots: int, speed: splits.Pace) -> float:
    """By the model, with so many programs."""
    return splits.seconds(cache, splits.Shares(cache.tiles, n).blocks(), slots, speed)


PICTURES = [
    Picture(
        "shares",
        "Decode gives every program an equal share of all tiles; heads that several have read are merged.",
        "14_decode",
        shares,
        shares_data,
    ),
    Picture(
        "programs",
        "One query over 65,536 keys on an H200: time over the number of programs that share the cache.",
        "14_decode",
        programs,
        programs_data,
    ),
    Picture(
        "ends",
        "256 programs of decode read a head each, on an H200: when each of them ends, over its SM.",
        "14_decode",
        ends,
        ends_data,
    ),
]
