"""What was measured: figures/data/NAME.json, written by `fa2-lab bench` on a GPU and by `fa2-lab figures --compile`."""

from __future__ import annotations

import json
from pathlib import Path

RECORDED = Path(__file__).resolve().parents[2] / "figures" / "data"
COMPILE = "python -m fa2_lab figures --compile"


def recorded(name: str) -> dict | None:
    """What was measured under this name, or None if nobody has measured it yet."""
    file = RECORDED / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


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


def layouts_record() -> dict:
    """The layouts of the compiled forward, or one sentence on how to get them."""
    found = recorded("layouts")
    if found is None:
        raise ValueError(f"figures/data/layouts.json is missing: `{COMPILE}` compiles the forward and writes it")
    return found


def compiled_by(record: dict) -> str:
    """The compiler and the tile behind recorded layouts."""
    tile = record["layouts"][0]
    return f"Triton {record['made_by']['triton']}, tile {tile['B_r']} × {tile['B_c']}, {tile['warps']} warps"
