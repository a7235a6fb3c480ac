"""Edited copies of the Hopper kernels: with an idea taken out of them, or put in."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module, invalidate_caches
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple

from fa2_lab.bench.problem import Problem
from fa2_lab.kernels import hopper


class Edit(NamedTuple):
    """In one file of fa2_lab/kernels/hopper: a text that stands there once, and what takes its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, eq=False)
class Idea:
    """Something that was tried: the edits take it out of the kernels if it was kept, and else put it in."""

    part: str  # "forward", "backward", or "host": what a forward call costs there
    name: str
    kept: bool
    problems: tuple[Problem, ...]
    edits: tuple[Edit, ...]
    plan: dict  # name -> (as it is, as it becomes): fields of the host's plan that change, too


class Kernels(NamedTuple):
    """The two files that are called, and the two that plan their launches."""

    forward: ModuleType
    backward: ModuleType
    host: ModuleType
    host_backward: ModuleType


def imported(package: str) -> Kernels:
    """The kernels of a package."""
    return Kernels(*(import_module(f"{package}.{name}") for name in Kernels._fields))


def as_they_are() -> Kernels:
    return imported(hopper.__name__)


@cache
def variant(idea: Idea) -> Kernels:
    """The kernels as the idea's edits leave them, imported from a folder that is gone afterwards."""
    package = "hopper_" + hashlib.sha256(repr(vars(idea)).encode()).hexdigest()[:12]  # Triton's cache goes by it
    with TemporaryDirectory() as folder:
        (Path(folder) / package).mkdir()
        for name, text in edited(sources(), idea.edits).items():
            text = text.replace(hopper.__name__, package)
            (Path(folder) / package / f"{name}.py").write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        invalidate_caches()
        try:
            kernels = imported(package)
        finally:
            sys.path.remove(folder)
    if idea.plan:
        change_plan(kernels, idea.part, idea.plan)
    return kernels


def sources() -> dict[str, str]:
    """The files of the kernels by name, without .py."""
    return {path.stem: path.read_text(encoding="utf-8") for path in Path(hopper.__file__).parent.glob("*.py")}


def edited(files: dict[str, str], edits: Sequence[Edit]) -> dict[str, str]:
    """The files with all edits made; each must find its text exactly once."""
    files = dict(files)
    for file, old, new in edits:
        found = files.get(file, "").count(old)
        if found != 1:
            raise ValueError(f"edits: got {old!r}, which stands {found} times in {file}.py; it takes what stands once")
        files[file] = files[file].replace(old, new)
    return files


def change_plan(kernels: Kernels, part: str, plan: dict) -> None:
    """Have these kernels planned as usual, but for some fields."""
    changes = {name: becomes for name, (_, becomes) in plan.items()}
    host, plans = kernels.host, kernels.host_backward
    if part == "backward":
        plans.PLANS = {d: replace(sizes, **changes) for d, sizes in plans.PLANS.items()}
    else:
        usual = host.plan
        host.plan = lambda *kind: replace(usual(*kind), **changes)
