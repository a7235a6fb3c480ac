"""The known mistakes, as catalogue.md lists them."""

from pathlib import Path
from typing import NamedTuple

PARTS = ("reads", "O", "L", "gradients", "memory", "remarks")  # the sections of catalogue.md, in their order


class Mistake(NamedTuple):
    """One line of the catalogue. `part` is where it is seen; those of "reads" are conventions, and not wrong."""

    name: str
    varies: str  # "B" if it depends on the tile, "bits" if on a dtype
    says: str
    read: str
    part: str


def catalogue() -> dict[str, Mistake]:
    """Every mistake by its name."""
    found = {}
    sections = Path(__file__).with_name("catalogue.md").read_text(encoding="utf-8").split("\n## ")[1:]
    for part, section in zip(PARTS, sections, strict=True):
        for line in section.splitlines()[4:]:
            if line:
                name, varies, says, read = (cell.strip() for cell in line[1:-1].split("|"))
                found[name] = Mistake(name, varies, says, read, part)
    return found


CATALOGUE = catalogue()
