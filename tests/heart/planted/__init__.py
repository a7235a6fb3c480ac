"""Faults to plant, by room: each a file, an exact text in it, what to put there instead, and the test that must see it.

A row belongs here if no tool would invent it: a tag on the wrong line, a drawing's arrow the wrong way round, a mark, a
threshold, an exit status, a key of a cache that forgets something. `python -m planted` plants them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


class Fault(NamedTuple):
    """One fault, and the test that says what is wrong."""

    file: str
    right: str
    wrong: str
    test: str

    def planted(self, root: Path = ROOT) -> str:
        """The file's text with the fault in it."""
        text = (root / self.file).read_text(encoding="utf-8")
        if text.count(self.right) != 1:
            raise ValueError(
                f"{self.file} has {self.right!r} {text.count(self.right)} times: plant the fault elsewhere"
            )
        return text.replace(self.right, self.wrong)

    def __str__(self) -> str:
        return f"{self.file}: {self.right!r} → {self.wrong!r}, {self.test}"


def rooms() -> dict[str, list[Fault]]:
    """{room: its faults}"""
    names = sorted(path.stem for path in HERE.glob("[a-z]*.py"))
    return {name: [Fault(*row) for row in import_module(f"planted.{name}").FAULTS] for name in names}
