"""The assignments' notebooks: the nbgrader sources, the students' versions, and the submissions."""

import json
import re
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "notebooks" / "assignments"
TEXT = FOLDER / "text"
SOLUTION, HIDDEN = ("### BEGIN SOLUTION", "### END SOLUTION"), ("### BEGIN HIDDEN TESTS", "### END HIDDEN TESTS")


@dataclass(frozen=True)
class Assignment:
    """One assignment: its notebook's name, the packages it needs besides NumPy, and the modules of fa2_lab it provides.

    Students may import only these modules of fa2_lab.
    """

    name: str
    needs: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()


ASSIGNMENTS = [
    Assignment("1_online_softmax"),
    Assignment("2_forward"),
    Assignment("3_backward"),
    Assignment("4_triton_forward", needs=("torch", "triton")),
    Assignment("5_break_it", gives=("fa2_lab.reference",)),
    Assignment("6_read_the_machine", gives=("fa2_lab.machine.chips",)),
    Assignment("7_triton_backward", needs=("torch", "triton")),
    Assignment("8_detective", needs=("torch", "triton"), gives=("fa2_lab.machine.asynchrony",)),
    Assignment("9_up_the_ladder", needs=("torch", "triton"), gives=("fa2_lab.tools.xray",)),
]


def find_assignment(name: str) -> Assignment:
    """Return the assignment with this name or number, such as "2"."""
    for assignment in ASSIGNMENTS:
        if name in (assignment.name, assignment.name[:1]):
            return assignment
    raise ValueError(f"assignment: got {name!r}; it takes one of {', '.join(a.name for a in ASSIGNMENTS)}")


class Node(dict):
    """A notebook or a part of it, whose entries are also attributes.

    nbformat provides the same, but importing it takes longer than judging a notebook.
    """

    def __getattr__(self, name: str):
        if name not in self:
            raise AttributeError(name)
        return self[name]

    __setattr__, __delattr__ = dict.__setitem__, dict.__delitem__


def source_notebook(assignment: Assignment) -> Node:
    """Return an assignment's nbgrader source, with solutions and hidden tests."""
    notebook = json.loads((FOLDER / f"{assignment.name}.ipynb").read_text(encoding="utf-8"), object_hook=Node)
    for cell in notebook.cells:
        cell.source = "".join(cell.source)
    return notebook


# The metadata of cells --------------------------------------------------------------------------------------------


def nbgrader_metadata(cell) -> dict:
    """Return the nbgrader metadata of a cell, or {} if the metadata is missing or malformed."""
    metadata = cell.get("metadata") if isinstance(cell, dict) else None
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    return nbgrader if isinstance(nbgrader, dict) else {}


def grade_id(cell) -> str:
    """Return the name that nbgrader gives a cell, or "" for a cell added by a student."""
    name = nbgrader_metadata(cell).get("grade_id", "")
    return name if isinstance(name, str) else ""


def is_solution(cell) -> bool:
    return bool(nbgrader_metadata(cell).get("solution"))


def points_by_step(notebook) -> dict[str, float]:
    """Return {grade_id: points} for a notebook's test cells."""
    return {m["grade_id"]: float(m["points"]) for m in map(nbgrader_metadata, notebook.cells) if m.get("grade")}


# Submissions ----------------------------------------------------------------------------------------------------------

MAX_BYTES = 20 * 2**20  # the most bytes accepted for a submitted notebook
MAX_CELLS = 2000


@dataclass(frozen=True)
class Cell:
    """The parts of a submitted cell that grading uses: `id`, nbgrader's `name`, whether it is code, and its text."""

    id: str
    name: str
    is_code: bool
    source: str


def read_submission(path: Path) -> list[Cell]:
    """Return the cells of a submitted notebook.

    If the notebook cannot be read, raise ValueError with a sentence for the student.
    """
    if path.suffix != ".ipynb":
        raise ValueError(f"{path.name} is not a notebook, because its name does not end in .ipynb")
    try:
        notebook = json.loads(read_bytes(path).decode("utf-8-sig"))  # some editors write a byte-order mark first
    except (UnicodeError, ValueError, RecursionError, OSError) as error:
        reason = (str(error).splitlines() or [""])[0][:120]
        raise ValueError(
            f"{path.name} is not a notebook that can be read ({type(error).__name__}: {reason})"
        ) from error
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise ValueError(f"{path.name} is not a notebook that can be read (it has no list of cells)")
    if len(cells) > MAX_CELLS:
        raise ValueError(f"{path.name} has {len(cells):,} cells; at most {MAX_CELLS:,} are read")
    return [parse_cell(cell) for cell in cells if isinstance(cell, dict)]


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a file. Raises ValueError if it is a link, not a regular file, or too large."""
    if path.is_symlink():
        raise ValueError("it is a symbolic link")
    if not path.is_file():
        raise ValueError("not a file, but a folder, a pipe or a device")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{size:,} bytes; it takes at most {MAX_BYTES:,}")
    return path.read_bytes()


def parse_cell(cell: dict) -> Cell:
    """Parse a cell of a notebook's JSON, whatever its fields contain. Invalid characters become question marks."""
    source = cell.get("source", "")
    source = "".join(x for x in source if isinstance(x, str)) if isinstance(source, list) else source
    source = source.encode("utf-8", "replace").decode() if isinstance(source, str) else ""
    own_id = cell.get("id", "")
    return Cell(own_id if isinstance(own_id, str) else "", grade_id(cell), cell.get("cell_type") == "code", source)


# For students -------------------------------------------------------------------------------------------------------

STUB = r"\1# YOUR CODE HERE\n\1raise NotImplementedError()\n"


def student_version(notebook) -> Node:
    """Return the students' notebook, with locked tests, stubs instead of solutions, and no hidden tests or outputs."""
    notebook = deepcopy(notebook)
    for cell in notebook.cells:
        cell.source = re.sub(block_pattern(*SOLUTION), STUB, cell.source + "\n", flags=re.DOTALL | re.MULTILINE)
        cell.source = re.sub(block_pattern(*HIDDEN), "", cell.source, flags=re.DOTALL | re.MULTILINE).rstrip("\n")
        cell.metadata.pop("fa2_lab", None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if nbgrader_metadata(cell):
            cell.metadata.deletable = False
        if nbgrader_metadata(cell).get("locked"):
            cell.metadata.editable = False
    locked = {
        grade_id(c): crc32(c.source.strip().encode()) for c in notebook.cells if nbgrader_metadata(c).get("locked")
    }
    notebook.metadata["fa2_lab"] = {"steps": points_by_step(notebook), "locked": locked}
    return notebook


def block_pattern(begin: str, end: str) -> str:
    """Return a regular expression for two marks and everything between them. Group 1 is the indentation."""
    return rf"^( *){re.escape(begin)}\n.*?^ *{re.escape(end)}\n"
