"""Record as they are kept: figures/data/bench_SUITE.json, with everything that made them; and as a table."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from dataclasses import asdict, replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from fa2_lab.paper import PACKAGE
from fa2_lab.records import Measurement, Record, path_of
from fa2_lab.tools import files

ABSENT = "not installed"


def save(record: Record, folder: Path | None = None) -> Path:
    """Keep a record, whole at any time."""
    path = path_of(record.suite, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    return files.write(path, json.dumps(asdict(record), indent=1) + "\n")


def views(results: Record) -> list[Record]:
    """The results of each protocol that has any, as results of their own."""
    sustained = replace(results, rows=results.sustained, protocol=results.sustained_protocol, sustained=[], ceilings={})
    return [view for view in (replace(results, sustained=[]), sustained) if view.rows] or [results]


def joined(old: Record | None, new: Record) -> Record:
    """The new rows, and those of an earlier run of the same code on the same machine that were not taken anew."""
    if old is None or old.machine != new.machine:
        return new

    def rows(kind: str) -> list[Measurement]:
        found = {(repr(row.problem), row.direction): row for row in (*getattr(old, kind), *getattr(new, kind))}
        return list(found.values())

    return replace(
        new,
        protocol=new.protocol or old.protocol,
        sustained_protocol=new.sustained_protocol or old.sustained_protocol,
        ceilings=old.ceilings | new.ceilings,
        curves=old.curves | new.curves,
        rows=rows("rows"),
        sustained=rows("sustained"),
    )


def machine() -> dict:
    """What the numbers depend on: GPU (or what takes its place), driver, versions, commit."""
    import torch

    from fa2_studio.bench.peers import DISTRIBUTIONS

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    gpu = torch.cuda.is_available()
    return dict(
        gpu=torch.cuda.get_device_name() if gpu else f"no GPU, {platform.machine()}",
        driver=(_output(query).splitlines() or ["unknown"])[0] if gpu else "none",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_version("triton"),
        cudnn=str(torch.backends.cudnn.version()),
        peers={peer: found for peer, name in DISTRIBUTIONS.items() if (found := _version(name)) != ABSENT},
        commit=commit(),
    )


def commit(folder: Path = files.ROOT) -> str:
    """The commit; a fingerprint of the sources where there is no git or they differ from the commit."""
    found = _output(["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"])
    return sources() if not found or found.endswith("-dirty") else found


def sources() -> str:
    """A fingerprint of the package's sources; results.sources() tells it of any checkout."""
    files = sorted(PACKAGE.rglob("*.py"))
    return "sources " + hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _version(package: str) -> str:
    """Of an installed distribution; of a module by that name that lies beside them without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = import_module(package) if package.isidentifier() and find_spec(package) else None
        return getattr(module, "__version__", ABSENT)


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def table(results: Record, baseline: str) -> str:
    """Ratios to the baseline of the same run first, then TFLOP/s or what was measured; one table for each unit."""
    machine = results.machine
    ceilings = ", ".join(f"{name} {value:.3g}" for name, value in results.ceilings.items())
    made = "{gpu}, torch {torch}, triton {triton}, {commit}".format(**machine)
    lines = [f"{made}; {results.protocol}."]
    lines += [f"ceilings: {ceilings}"] if ceilings else []
    lines += [f"spread: {said}"] if (said := spread(results.rows)) else []
    for unit in dict.fromkeys(unit_of(row) for row in results.rows):
        lines += ["", *block([row for row in results.rows if unit_of(row) == unit], unit, baseline)]
    reasons = {f"{name}: {why}" for row in results.rows for name, why in row.failed.items()}
    return "\n".join([*lines, "", *sorted(reasons), *(f"not measured: {m}" for m in results.missing)])


def spread(rows: list[Measurement]) -> str:
    """How far the middle half of the repetitions reaches from the median, or nothing where no spread was kept."""
    kept = [numbers for row in rows for numbers in row.values.values() if len(numbers) == 3]
    reach = sorted(max(high - median, median - low) / median for median, low, high in kept)
    if not reach:
        return ""
    return f"the middle half lies within {reach[len(reach) // 2]:.1%} of the median, at worst within {reach[-1]:.1%}"


def unit_of(row: Measurement) -> str:
    return "TFLOP/s" if row.flops else row.unit


def block(rows: list[Measurement], unit: str, baseline: str) -> list[str]:
    """The lines of one table: rows with the same unit."""
    columns = list(dict.fromkeys(name for row in rows for name in [*row.values, *row.failed]))
    width = max(16, *(len(name) + 2 for name in columns))
    names = "".join(f"{name:>{width}}" for name in columns)
    compared = any(baseline in row.values for row in rows)
    title = f"{baseline} / contestant ({unit})" if compared else unit
    first = max(48, *(len(label(row)) for row in rows))
    return [f"{title:{first}}{names}"] + [
        f"{label(row):{first}}" + "".join(f"{cell(row, name, baseline):>{width}}" for name in columns) for row in rows
    ]


def label(row: Measurement) -> str:
    """A problem in a few words."""
    p = row.problem
    N = f"{p['N_q']}" if p["N_q"] == p["N_k"] else f"{p['N_q']}×{p['N_k']}"
    heads = f"{p['heads']}" if p["heads"] == p["kv_heads"] else f"{p['heads']}/{p['kv_heads']}"
    what = p.get("rung", row.direction) + (f", {p['idea']}" if "idea" in p else "")
    mask = p.get("mask") or ("causal" if p["causal"] else "full")
    return f"{what:11} N {N} b {p['batch']} h {heads} d {p['d']} {mask}"


def cell(row: Measurement, name: str, baseline: str) -> str:
    """One entry of the table."""
    if name not in row.values:
        return "-"
    number = f"({row.rate(name):.0f})" if row.flops else f"({row.values[name][0]:.4g})"
    return f"{row.ratio(name, baseline):.2f} {number}" if baseline in row.values else number
