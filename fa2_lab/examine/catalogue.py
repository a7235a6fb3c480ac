"""The known mistakes and the recognized argument names, both read from the tables in catalogue.md."""

import re
from pathlib import Path
from typing import NamedTuple

PARTS = ("conventions", "O", "L", "gradients", "memory", "remarks")  # the sections of catalogue.md, in their order


class Mistake(NamedTuple):
    """A row of the catalogue. `part` names its section, for example the output in which the mistake shows.

    Rows in the sections "conventions" and "remarks" are not mistakes. All other rows are.
    """

    name: str
    depends_on: str  # contains "B" or "sides" if the tile size matters, and "bits" if the precision does
    description: str
    reference: str
    part: str
    edits: list[tuple[str, str]]  # (expression in right(), its replacement)


def tables() -> list[list[list[str]]]:
    """Return the table of each section of catalogue.md, as a list of rows, each of which is a list of cells."""
    sections = Path(__file__).with_name("catalogue.md").read_text(encoding="utf-8").split("\n## ")[1:]
    return [[[x.strip() for x in y[1:-1].split("|")] for y in z.splitlines()[4:] if y] for z in sections]


*MISTAKES, KEYS, PLACES, ROWS, OF_ROWS, OF_KEYS, OF_TILES, OF_L, OF_DS, OF_SLOPE, FACTORS, ARGUMENTS = tables()
CATALOGUE = {
    name: Mistake(name, depends_on, description, reference, part, re.findall("`([^`]*)` → `([^`]*)`", "".join(code)))
    for part, rows in zip(PARTS, MISTAKES, strict=True)
    for name, depends_on, description, reference, *code in rows
}
ROLES = {name: role for role, _, names in ARGUMENTS for name in names.split()}  # {argument name in a function: role}
