"""Recorded runs, one per file figures/data/NAME.json, and the machine, versions and commit that produced each of them.

`fa2-lab bench SUITE` writes bench_SUITE.json on a GPU, and `python -m fa2_studio.compiled` records the resources that
compiled kernels use. Figures, tables and chapters read these files through this module.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
IN_A_CHECKOUT, IN_A_WHEEL = PACKAGE.parent / "figures" / "data", PACKAGE / "data"
FOLDER = IN_A_WHEEL if IN_A_WHEEL.is_dir() else IN_A_CHECKOUT
# The ladder's rungs are compared with the first of these that was measured
LADDER_BASELINES = ("FlashAttention-3", "cuDNN", "fa2_lab")
COMPILE = "python -m fa2_studio.compiled"


@dataclass
class Measurement:
    """The measurements of one problem in one direction: each implementation's value, or the reason why it has none."""

    problem: dict
    direction: str
    values: dict[str, list[float]]  # {name: [median, lower quartile, upper quartile] or [value]}; lower is better
    failed: dict[str, str] = field(default_factory=dict)
    unit: str = "ms"
    flops: float = 0.0
    chip: dict[str, list[float]] = field(default_factory=dict)  # {name: [MHz, watts, 1 if power-limited else 0]}
    machine: dict = field(default_factory=dict)  # the fields of Record.machine that differ for this problem

    def rate(self, name: str) -> float:
        """Return an implementation's speed in TFLOP/s."""
        return self.flops / self.values[name][0] / 1e9

    def ratio(self, name: str, baseline: str) -> float:
        """Return the baseline's value divided by an implementation's value in the same run."""
        return self.values[baseline][0] / self.values[name][0]


@dataclass
class Record:
    """One recorded run of a suite, with its measurements, machine, versions, commit and protocol."""

    suite: str
    machine: dict
    protocol: str
    ceilings: dict[str, float] = field(default_factory=dict)  # measured in the same run: GEMM in TFLOP/s, copy in TB/s
    rows: list[Measurement] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # problems that an interrupted run did not reach
    curves: dict[str, list[float]] = field(default_factory=dict)  # {name: values}, such as the loss at each step
    sustained: list[Measurement] = field(default_factory=list)  # measurements of the same problems, run without pauses
    sustained_protocol: str = ""
    made_by: str = ""  # the command that writes this record, or the reason why no command does

    def setup(self) -> str:
        """Return the GPU and the versions of torch and Triton, formatted for a caption."""
        machines = [self.machine | row.machine for row in self.rows + self.sustained] or [self.machine]
        torch, triton = (" or ".join(sorted({machine[name] for machine in machines})) for name in ("torch", "triton"))
        return f"{self.machine['gpu']}, bf16, torch {torch}, triton {triton}"


def path_of(suite: str, folder: Path | None = None) -> Path:
    """Return the path of a suite's record in `folder`, or in figures/data if `folder` is None."""
    return (folder or FOLDER) / f"bench_{suite}.json"


def load(suite: str, folder: Path | None = None) -> Record:
    """Return the recorded run of a suite. If there is none, raise an error that explains how to measure it."""
    path = path_of(suite, folder)
    how = f"`python -m fa2_lab bench {suite}` measures it on a GPU"
    if not path.exists():
        raise ValueError(f"{path if folder else f'figures/data/{path.name}'} is missing: {how}")
    return read_record(path, how)


def read_record(path: Path, how: str = "leave it out") -> Record:
    """Load a record from a file. If the file is not a valid record, raise an error that ends with the advice `how`."""
    try:
        return from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, AttributeError, json.JSONDecodeError) as wrong:
        raise ValueError(f"{path} is not a record of this version: {how}") from wrong


def to_dict(record: Record) -> dict:
    """Convert a record to the dictionary stored in its JSON file."""
    data = asdict(record)
    for row in data["rows"] + data["sustained"]:
        if not row["machine"]:
            del row["machine"]
    return data


def from_dict(data: dict) -> Record:
    """Return the record described by a dictionary that was loaded from a JSON file."""
    rows = {name: [Measurement(**row) for row in data.get(name, ())] for name in ("rows", "sustained")}
    return Record(**data | rows)


def ladder_baseline(names: Collection[str]) -> str:
    """Return the implementation with which to compare the ladder's rungs: the first of LADDER_BASELINES in `names`."""
    return next(name for name in LADDER_BASELINES if name in names)


def read_json(name: str) -> dict | None:
    """Return the contents of figures/data/NAME.json, or None if there is no such file."""
    file = FOLDER / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def layouts_record() -> dict:
    """Return the recorded layouts of the compiled forward kernel. Raise an error if no layouts are recorded."""
    found = read_json("layouts")
    if found is None:
        raise ValueError(f"figures/data/layouts.json is missing: `{COMPILE}` compiles the forward and writes it")
    return found
