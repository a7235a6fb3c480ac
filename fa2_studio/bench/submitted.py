"""Other people's GPUs: a record of the paper's grid, sealed for a pull request, and their rows beside ours."""

import hashlib
import json
import re
from pathlib import Path
from statistics import median

from fa2_lab import __version__
from fa2_lab.records import FOLDER, Record, from_dict, load, path_of, to_dict
from fa2_lab.tools import files
from fa2_studio.bench.results import table

WANTED = ("A100", "RTX 4090", "L4", "MI300")  # GPUs that kernels are compiled for, and that nobody has measured
PEERS = ("torch flash", "cuDNN", "FlashAttention-3")
HOW = "\nThese GPUs have not been measured yet: {}. [CONTRIBUTING.md](CONTRIBUTING.md#how-to-add) describes how."
AGAIN = "`fa2-lab bench paper --folder mine`, then `fa2-lab bench submit --folder mine`"


def checksum(record: dict) -> str:
    """Of what a record says, however its file is laid out."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def submit(measured: Path | None) -> Path:
    """Seal the paper's grid that lies in a folder; returns the file for the pull request."""
    if measured is None:
        raise ValueError(f"folder: got none; it takes where your record lies: {AGAIN}")
    root = files.checkout("bench submit")
    record = load("paper", measured)
    gpu, commit = record.machine["gpu"], record.machine["commit"]
    ours = [row for row in record.rows if "fa2_lab" in row.values]
    if gpu.startswith("no GPU") or record.missing or not ours or ours != record.rows:
        got = (
            f"{len(ours)} of {len(record.rows)} rows with numbers of ours on {gpu}, {len(record.missing)} not measured"
        )
        raise ValueError(f"record: got {got}; it takes a whole run on a GPU: {AGAIN}")
    if any("changes" in code for code in (commit, *(row.machine.get("commit", "") for row in record.rows))):
        raise ValueError(f"record: got commit {commit}; it takes a run of committed sources: {AGAIN}")
    name = re.sub(r"[^a-z0-9]+", "_", f"{gpu} {commit}".lower()).strip("_")
    path = root / "figures" / "data" / "submitted" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    sealed = dict(version=__version__, checksum=checksum(to_dict(record)), record=to_dict(record))
    return files.write(path, json.dumps(sealed, indent=1) + "\n")


def opened(path: Path) -> Record:
    """The record in a submitted file, or one sentence on what is wrong with it."""
    try:
        sealed = json.loads(path.read_text(encoding="utf-8"))
        version, seal, record = sealed["version"], sealed["checksum"], sealed["record"]
        if version != __version__:
            raise ValueError(f"{path.name}: got version {version}; it takes {__version__}: {AGAIN}")
        if seal != checksum(record):
            raise ValueError(f"{path.name}: got numbers that its checksum does not fit; it takes them as measured")
        return from_dict(record)
    except (KeyError, TypeError, json.JSONDecodeError) as wrong:
        raise ValueError(f"{path.name}: got no submitted record; it takes what this writes: {AGAIN}") from wrong


def gpus(folder: Path | None = None) -> list[str]:
    """A line for each GPU and direction: ours, what others sent, and who is wanted; then what could not be read."""
    runs = [(load(name, folder), "here") for name in ("paper", "h100") if path_of(name, folder).exists()]
    refused = []
    for path in sorted(((folder or FOLDER) / "submitted").glob("*.json")):
        try:
            runs.append((opened(path), "**submitted**"))
        except ValueError as why:
            refused.append(f"\nLeft out: {why}.")
    columns = ["GPU", "measured", "direction", "fa2_lab, median TFLOP/s", *(f"over {peer}, median" for peer in PEERS)]
    lines = []
    for run, by in runs:
        for direction in dict.fromkeys(row.direction for row in run.rows):
            rows = [row for row in run.rows if row.direction == direction and "fa2_lab" in row.values]
            rate = middle([row.rate("fa2_lab") for row in rows], places=0)
            over = [middle([row.ratio("fa2_lab", peer) for row in rows if peer in row.values]) for peer in PEERS]
            about = f"{by}, {run.machine['commit']}, triton {run.machine['triton']}"
            lines.append([run.machine["gpu"], about, direction, rate, *over])
    seen = " ".join(run.machine["gpu"] for run, _ in runs)
    wanted = [gpu for gpu in WANTED if not re.search(rf"\b{gpu}", seen)]
    return [*table(columns, lines), *([HOW.format(", ".join(wanted))] if wanted else []), *refused]


def middle(found: list[float], places: int = 2) -> str:
    return f"{median(found):.{places}f}" if found else "–"
