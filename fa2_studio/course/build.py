"""Build the assignments' notebooks from their texts, as `course build` does."""

from pathlib import Path

import jupytext
import nbformat

from fa2_lab.tools import files
from fa2_studio.course import seeds
from fa2_studio.course.notebooks import ASSIGNMENTS, FOLDER, HIDDEN, SOLUTION, TEXT, grade_id

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebook_from_text(path: Path) -> nbformat.NotebookNode:
    """Build an nbgrader source from a text whose cells are marked with locked="id", solution="id" or test="id".

    A solution extends to the end of its cell. A test also has a mark such as points=4. Students see only a test's first
    line, because the lines after it are hidden. If a test marked given="kind" loses points, it is run again with the
    correct function `kind` in place of the student's function.
    """
    notebook = jupytext.read(path, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{path.stem[:1]}-{number:03d}"
        cell.source = with_end_marks(cell)
        cell.metadata = nbformat.from_dict(nbgrader_metadata(cell))
    ids = [grade_id(cell) for cell in notebook.cells if grade_id(cell)]
    if len(set(ids)) < len(ids):
        raise ValueError(f"{path.name}: two cells have the same name in {ids}")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return seeds.with_seed(notebook, seed=0)


def with_end_marks(cell) -> str:
    """Add to a cell's text the lines that its marks require, and return the text.

    These are the end of a solution, the begin and end of hidden tests, and the call report.points(…) of a test.
    """
    if "solution" in cell.metadata:
        return f"{cell.source}\n    {SOLUTION[1]}"
    if "test" not in cell.metadata:
        return cell.source
    visible, _, hidden = cell.source.partition("\n")
    fenced = [HIDDEN[0], hidden.strip(), HIDDEN[1]] if hidden else []
    return "\n".join([visible, *fenced, f"report.points({cell.metadata['points']})"])


def nbgrader_metadata(cell) -> dict:
    """Return the nbgrader metadata for a cell's marks, or {} for a cell without marks."""
    own = dict(cell.metadata)
    kind = next((k for k in ("locked", "solution", "test") if k in own), None)
    if kind is None:
        return {}
    marks = {"schema_version": 3, "cell_type": cell.cell_type, "task": False}
    marks |= {"grade": kind == "test", "solution": kind == "solution", "locked": kind != "solution"}
    marks |= {"grade_id": f"test_{own[kind]}" if kind == "test" else own[kind]}
    given = {"fa2_lab": {"given": own["given"].split()}} if "given" in own else {}
    return {"nbgrader": marks | ({"points": own["points"]} if kind == "test" else {})} | given


def build_notebooks() -> list[Path]:
    """Write every assignment's nbgrader source from its text, and return the files."""
    files.check_writable(FOLDER, "course build")
    texts = [(TEXT / f"{a.name}.py", FOLDER / f"{a.name}.ipynb") for a in ASSIGNMENTS]
    return [files.write(path, nbformat.writes(notebook_from_text(text)) + "\n") for text, path in texts]
