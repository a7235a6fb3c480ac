"""Triton's versions: one file knows them, and no other one reaches inside Triton."""

import re

import pytest

from fa2_lab.kernels import triton_versions
from fa2_lab.paper import PACKAGE

triton = pytest.importorskip("triton")

FILES_USING_INTERNALS = {PACKAGE / "kernels" / name for name in ("triton_versions.py", "relaunch.py")}


def test_tritons_internals_are_used_only_in_the_listed_files():
    """What is not public begins with an underscore or is in triton.runtime, which every version may move."""
    inside = re.compile(
        r"^ *(from|import) triton(\.\w+)*\.(runtime|_)|from triton import .*runtime|kernels\.relaunch import", re.M
    )
    found = {path for path in PACKAGE.rglob("*.py") if inside.search(path.read_text(encoding="utf-8"))}
    assert found == FILES_USING_INTERNALS


@pytest.mark.parametrize("version, holds", [("3.6.0", 1), ("3.7.1", 2), ("3.8.0", 1), ("3.10.0", 4), ("4.0.0+git", 4)])
def test_version_table_entry_applies_until_the_next_entry(version, holds, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    assert triton_versions.by_triton({"3.6": 1, "3.7": 2, "3.8": 1, "3.9": 4}) == holds


def test_too_old_triton_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    says = "Triton 3.5.1 is too old for these kernels: install 'triton>=3.6'"
    with pytest.raises(RuntimeError, match=re.escape(says)):
        triton_versions.check_and_patch()
    assert triton_versions.version_conflict("3.5.1", "2.3.5") == says
