"""Edited copies of the Hopper kernels and of decode: with an idea taken out of them, or put in."""

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

from fa2_lab.kernels import hopper
from fa2_lab.kernels.decode import kernel as decode
from fa2_lab.machine import splits
from fa2_lab.studio.bench.problem import Problem


class Edit(NamedTuple):
    """In one of the copied files: a text that stands there once, and what takes its place."""

    file: str  # of fa2_lab/kernels/hopper, or "decode" or "splits"
    old: str
    new: str


@dataclass(frozen=True, eq=False)
class Idea:
    """Something that was tried: the edits take it out of the kernels if it was kept, and else put it in."""

    part: str  # "forward", "backward", "decode", or "host": what a forward call costs there
    name: str
    kept: bool
    problems: tuple[Problem, ...]
    edits: tuple[Edit, ...]
    plan: dict  # name -> (as it is, as it becomes): fields of the host's plan that change, too; of decode's Blocks


def kept(part: str, name: str, problems: tuple[Problem, ...], *edits: Edit, **plan) -> Idea:
    """It is in the kernels; the edits, or other fields of the plan, take it out."""
    return Idea(part, name, True, problems, edits, plan)


def dropped(part: str, name: str, problems: tuple[Problem, ...], *edits: Edit, **plan) -> Idea:
    """It did not help there; the edits, or other fields of the plan, put it in."""
    return Idea(part, name, False, problems, edits, plan)


class Kernels(NamedTuple):
    """Hopper's two files that are called, the two that plan their launches, and decode, which does both."""

    forward: ModuleType
    backward: ModuleType
    host: ModuleType
    host_backward: ModuleType
    decode: ModuleType


def as_they_are() -> Kernels:
    return Kernels(*(import_module(f"{hopper.__name__}.{name}") for name in Kernels._fields[:-1]), decode)


@cache
def variant(idea: Idea) -> Kernels:
    """The kernels as the idea's edits leave them, imported from a folder that is gone afterwards."""
    package = "variant_" + hashlib.sha256(repr(vars(idea)).encode()).hexdigest()[:12]  # Triton's cache goes by it
    with TemporaryDirectory() as folder:
        (Path(folder) / package).mkdir()
        for name, text in edited(sources(), idea.edits).items():
            (Path(folder) / package / f"{name}.py").write_text(at_home(text, package), encoding="utf-8")
        sys.path.insert(0, folder)
        invalidate_caches()
        try:
            kernels = Kernels(*(import_module(f"{package}.{name}") for name in Kernels._fields))
        finally:
            sys.path.remove(folder)
    kernels.decode.recipe = kernels.decode.plan_decode  # the plans that are kept are not its own
    if idea.plan:
        change_plan(kernels, idea.part, idea.plan)
    return kernels


def sources() -> dict[str, str]:
    """The files of the kernels by name, without .py."""
    paths = [*Path(hopper.__file__).parent.glob("*.py"), Path(decode.__file__), Path(splits.__file__)]
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def at_home(text: str, package: str) -> str:
    """The text of a copy, importing the other copies."""
    text = text.replace(hopper.__name__, package)
    return text.replace("from fa2_lab.machine import splits\n", f"from {package} import splits\n")


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
    if part == "decode":
        sizes = kernels.decode.sizes

        def changed(*kind):
            blocks, at_once = sizes(*kind)
            return replace(blocks, **changes), at_once

        kernels.decode.sizes = changed
        return
    host = kernels.host_backward if part == "backward" else kernels.host
    usual = host.plan
    host.plan = lambda *kind: replace(usual(*kind), **changes)
