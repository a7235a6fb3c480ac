"""How a run becomes a record: what it was made with, and what of an earlier run stays."""

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from fa2_lab.paper import PACKAGE
from fa2_lab.records import Measurement, Record, path_of
from fa2_lab.tools import files
from fa2_studio.bench import contestants

ABSENT = "not installed"


def save(record: Record, folder: Path | None = None) -> Path:
    """Keep a record, whole at any time."""
    path = path_of(record.suite, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    return files.write(path, json.dumps(asdict(record), indent=1) + "\n")


def joined(old: Record | None, new: Record) -> Record:
    """The new rows, and those of an earlier run of the same code on the same machine that were not taken anew."""
    if old is None or old.machine != new.machine:
        return new

    def rows(kind: str) -> list[Measurement]:
        both = (*getattr(old, kind), *getattr(new, kind))
        return list({(repr(row.problem), row.direction): row for row in both}.values())

    return replace(
        new,
        protocol=new.protocol or old.protocol,
        sustained_protocol=new.sustained_protocol or old.sustained_protocol,
        ceilings=old.ceilings | new.ceilings,
        curves=old.curves | new.curves,
        rows=rows("rows"),
        sustained=rows("sustained"),
    )


def shape_of(row: Measurement) -> list[str]:
    """What a row measures, and its problem: N, batch, heads, d, mask."""
    p = row.problem
    N = f"{p['N_q']:,}" if p["N_q"] == p["N_k"] else f"{p['N_q']:,} × {p['N_k']:,}"
    heads = f"{p['heads']}" if p["heads"] == p["kv_heads"] else f"{p['heads']} on {p['kv_heads']}"
    what = p.get("rung", row.direction) + (f", {p['idea']}" if "idea" in p else "")
    return [what, N, f"{p['batch']}", heads, f"{p['d']}", p.get("mask") or ("causal" if p["causal"] else "full")]


def label(row: Measurement) -> str:
    """The same in a few words."""
    what, N, batch, heads, d, mask = shape_of(row)
    return f"{what}, N {N}, batch {batch}, heads {heads}, d {d}, {mask}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> list[str]:
    """The lines of a table in Markdown, the last few of its columns to the right."""
    rules = ["---"] * (len(columns) - right) + ["---:"] * right
    return [f"| {' | '.join(cells)} |" for cells in (columns, rules, *rows)]


def named(record: Record) -> Record:
    """The record with this checkout's commit, if it was measured where git was not, and the sources are these."""
    here = commit()
    if record.machine["commit"] != sources() or "sources" in here:
        return record
    return replace(record, machine=record.machine | dict(commit=f"{here} ({sources()})"))


# What a record is made with -----------------------------------------------------------------------------------


def machine() -> dict:
    """What the numbers depend on: GPU (or what takes its place), driver, versions, commit."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    gpu = torch.cuda.is_available()
    distributions = contestants.preparing("distribution")
    return dict(
        gpu=torch.cuda.get_device_name() if gpu else f"no GPU, {platform.machine()}",
        driver=(output_of(query).splitlines() or ["unknown"])[0] if gpu else "none",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=version("triton"),
        cudnn=str(torch.backends.cudnn.version()),
        peers={name: found for name, package in distributions.items() if (found := version(package)) != ABSENT},
        commit=commit(),
    )


def commit(folder: Path = files.ROOT) -> str:
    """The commit, and a fingerprint of the sources beside it where they differ; without git the fingerprint alone."""
    git = ["git", "-C", str(folder)]
    name = output_of([*git, "rev-parse", "--short", "HEAD"])
    if not name:
        return sources()
    changed = output_of([*git, "status", "--porcelain", "--", "fa2_lab", "fa2_studio"])
    return f"{name} with changes ({sources()})" if changed else name


def sources() -> str:
    """A fingerprint of the package's sources; of another checkout, this function there gives it."""
    files = sorted(PACKAGE.rglob("*.py"))
    return "sources " + hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def version(package: str) -> str:
    """Of an installed distribution; of a module by that name that lies beside them without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = import_module(package) if package.isidentifier() and find_spec(package) else None
        return getattr(module, "__version__", ABSENT)


def output_of(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
