"""Triton's versions: one file knows them, and no other one reaches inside Triton."""

import ast
import re
from pathlib import Path

import pytest

from fa2_lab.kernels import triton_versions
from fa2_lab.paper import PACKAGE

triton = pytest.importorskip("triton")

ALLOWED = {PACKAGE / "kernels" / name for name in ("triton_versions.py", "relaunch.py")}


def dotted(node: ast.AST) -> str:
    """a.b.c of such an expression, else nothing."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def inside(source: str) -> set[str]:
    """What a source names of Triton that is not public: what begins with an underscore, and triton.runtime."""
    named, where = set(), {}  # where a local name comes from
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
            where |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            where |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    named |= set(where.values())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            first, _, rest = name.partition(".")
            named.add(f"{where.get(first, first)}.{rest}")
    return {name for name in named if re.match(r"triton\.(runtime\b|(\w+\.)*_(?!_))", name)}


@pytest.mark.parametrize("path", sorted({*PACKAGE.rglob("*.py")} - ALLOWED), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nobody_else_reaches_inside_triton(path: Path):
    source = path.read_text(encoding="utf-8")
    assert not inside(source) and "kernels.relaunch" not in source


def test_what_reaches_inside_is_found():
    assert all(inside(path.read_text(encoding="utf-8")) for path in ALLOWED)


def test_what_is_inside_was_seen_in_tested_versions():
    assert all(
        entry.seen_in and set(entry.seen_in) <= set(triton_versions.TESTED) for entry in triton_versions.INTERNALS
    )


@pytest.mark.parametrize("version, holds", [("3.6.0", 1), ("3.7.1", 2), ("3.8.0", 1), ("3.10.0", 4), ("4.0.0+git", 4)])
def test_an_entry_holds_until_the_next_one(version, holds, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    assert triton_versions.by_triton({"3.6": 1, "3.7": 2, "3.8": 1, "3.9": 4}) == holds


def test_a_triton_that_is_too_old_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    says = "Triton 3.5.1 is too old for these kernels: install 'triton>=3.6'"
    with pytest.raises(RuntimeError, match=re.escape(says)):
        triton_versions.prepare()
    assert triton_versions.version_conflict("3.5.1", "2.3.5") == says
