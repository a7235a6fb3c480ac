"""Create the record of a run: note the machine and the versions, and keep earlier rows that were not measured again."""

import hashlib
import json
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from fa2_lab.paper import PACKAGE
from fa2_lab.records import Measurement, Record, path_of, to_dict
from fa2_lab.tools import files
from fa2_studio.bench import implementations

ABSENT = "not installed"
BENCH = Path(__file__).parent
DIRECTION_WORDS = {"both": "forward and backward"}  # directions whose name does not describe them


def save_record(record: Record, folder: Path | None = None) -> Path:
    """Write a record atomically, which ensures that its file is never incomplete."""
    path = path_of(record.suite, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    return files.write(path, json.dumps(to_dict(record), indent=1) + "\n")


def merge_records(old: Record | None, new: Record) -> Record:
    """Return the new rows, and those of an earlier run on the same GPU that were not measured again.

    A direction that was measured completely replaces the earlier one. If the run was interrupted, earlier rows fill in
    for the missing ones. The record names the machine of most rows, and every other row notes how its machine differs.
    """
    if old is None or old.machine["gpu"] != new.machine["gpu"]:
        return new
    both = replace(new, **{kind: merge_rows(old, new, kind) for kind in ("rows", "sustained")})
    every = both.rows + both.sustained
    most = Counter(json.dumps(row.machine) for row in every).most_common(1)
    machine = json.loads(most[0][0]) if most else new.machine
    for row in every:
        row.machine = {name: value for name, value in row.machine.items() if value != machine.get(name)}
    first, then = (old, new) if machine == new.machine else (new, old)
    return replace(
        both,
        machine=machine,
        protocol=new.protocol or old.protocol,
        sustained_protocol=new.sustained_protocol or old.sustained_protocol,
        ceilings=first.ceilings | then.ceilings,
        curves=new.curves or old.curves,
    )


def merge_rows(old: Record, new: Record, kind: str) -> list[Measurement]:
    """Merge the rows of two runs, each with a complete description of its machine. New rows replace old ones."""
    rows = {}
    done = set() if new.missing else {row.direction for row in getattr(new, kind)}
    for run, without in ((old, done), (new, ())):
        for row in getattr(run, kind):
            if row.direction not in without:
                rows[repr(row.problem), row.direction] = replace(row, machine=run.machine | row.machine)
    return list(rows.values())


def problem_columns(row: Measurement) -> list[str]:
    """Return a row's table cells: what it measures, and the problem's properties (N, batch, heads, d and mask)."""
    p = row.problem
    N = f"{p['N_q']:,}" if p["N_q"] == p["N_k"] else f"{p['N_q']:,} × {p['N_k']:,}"
    heads = f"{p['heads']}" if p["heads"] == p["kv_heads"] else f"{p['heads']}, {p['kv_heads']} for K and V"
    what = p.get("rung", row.direction) + "".join(f", {p[key]}" for key in ("idea", "variant") if key in p)
    return [what, N, f"{p['batch']}", heads, f"{p['d']}", p.get("mask") or ("causal" if p["causal"] else "non-causal")]


def problem_text(row: Measurement) -> str:
    """Return a short text on what a row measures and on its problem."""
    what, N, batch, heads, d, mask = problem_columns(row)
    lengths = "N_q = {}, N_k = {}".format(*N.split(" × ")) if " × " in N else f"N = {N}"
    shared = heads.replace(", ", " query heads, ").replace(" for K and V", " K/V heads")
    heads = shared if shared != heads else f"{heads} head{'s' * (heads != '1')}"
    return f"{DIRECTION_WORDS.get(what, what)}, {lengths}, batch size {batch}, {heads}, d = {d}, {mask}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, in which columns of numbers are right-aligned."""
    numeric = [all(re.match(r"\d|[–-]?$", cell) for cell in cells) for cells in zip(*rows, strict=True)]
    rules = ["---:" if numbers else "---" for numbers in numeric or [False] * len(columns)]
    return [f"| {' | '.join(cells)} |" for cells in (columns, rules, *rows)]


def with_commit_name(record: Record) -> Record:
    """Return the record with this checkout's commit, if it was measured on these sources but without git."""
    here, fingerprint = commit_name(), sources_fingerprint()
    if "sources" in here:
        return record

    def with_name(machine: dict) -> dict:
        return machine | dict(commit=f"{here} ({fingerprint})") if machine.get("commit") == fingerprint else machine

    def all_of(rows: list[Measurement]) -> list[Measurement]:
        return [replace(row, machine=with_name(row.machine)) for row in rows]

    known = dict(machine=with_name(record.machine), rows=all_of(record.rows), sustained=all_of(record.sustained))
    return replace(record, **known)


# The environment of a run -------------------------------------------------------------------------------------


def environment() -> dict:
    """Return everything on which the numbers depend: the GPU (or the processor without one), versions and commit."""
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    gpu = torch.cuda.is_available()
    distributions = implementations.values_of("distribution")
    versions = {name: installed_version(package) for name, package in distributions.items()}
    return dict(
        gpu=torch.cuda.get_device_name() if gpu else f"no GPU, {platform.machine()}",
        driver=(output_of(query).splitlines() or ["unknown"])[0] if gpu else "none",
        python=platform.python_version(),
        torch=torch.__version__,
        triton=installed_version("triton"),
        ptxas=ptxas_version() if gpu and not torch.version.hip else "none",
        cudnn=str(torch.backends.cudnn.version()),
        peers={name: version for name, version in versions.items() if version != ABSENT},
        commit=commit_name(),
    )


def ptxas_version() -> str:
    """Return the version of the assembler ptxas that Triton uses for this GPU, such as "13.4"."""
    import torch
    from triton.backends.nvidia.compiler import get_ptxas_version

    major, minor = torch.cuda.get_device_capability()
    text = get_ptxas_version(10 * major + minor)
    version = re.search(r"release (\d+\.\d+)", text)
    return version[1] if version else text.strip()


def commit_name(folder: Path = files.ROOT) -> str:
    """Return the commit, with a fingerprint if the sources were changed, or the fingerprint alone without git."""
    git = ["git", "-C", str(folder)]
    name = output_of([*git, "rev-parse", "--short", "HEAD"])
    if not name:
        return sources_fingerprint()
    changed = output_of([*git, "status", "--porcelain", "--", "fa2_lab", "fa2_studio"])
    return f"{name} with changes ({sources_fingerprint()})" if changed else name


def sources_fingerprint() -> str:
    """Return a fingerprint of the sources of the package and of the bench, both of which can change a measurement."""
    paths = [path for folder in (PACKAGE, BENCH) for path in sorted(folder.rglob("*.py"))]
    return "sources " + hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def installed_version(package: str) -> str:
    """Return the version of an installed distribution or, if there is none, of the module with this name."""
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
