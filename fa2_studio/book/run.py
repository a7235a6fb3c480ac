"""Run the notebooks' sources, and write the notebooks with their outputs to a folder or to notebooks/."""

import os
import re
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm

from fa2_lab.tools import files
from fa2_studio.book.chapters import NOTEBOOKS, TEXT, Chapter, navigation, written

SOURCE = {"jupytext": {"notebook_metadata_filter": "-all", "cell_metadata_filter": "tags"}}
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
QUESTION = "**Predict.**"
ANSWER = re.compile(r"(```python\n(.*?)\n```\n)(\n```text\n.*?\n```\n)?", flags=re.DOTALL)  # code and its output
HIDE_CODE = "hide-input"  # tag of a cell whose code readers can skip
# An interactive figure, of which only the static version is recorded.
FRAME = re.compile(r"<iframe.*?</iframe>", flags=re.DOTALL)
SHOW_LINE = re.compile(r'^(?:show|live)\("[^\n]*\)$', flags=re.MULTILINE)  # the line of a cell that shows a picture
LANGUAGE = {"language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}}


class Executed(NamedTuple):
    """The result of running one notebook."""

    name: str
    cells: int
    seconds: float
    error: str  # empty when every cell ran


def read_source(chapter: Chapter) -> nbformat.NotebookNode:
    """Read a chapter's source, and return a notebook without outputs, with new navigation bars and stable cell ids."""
    notebook = jupytext.read(TEXT / f"{chapter.name}.py", fmt="py:percent")
    bar = navigation(chapter.name, written())
    cells = [c for c in notebook.cells if "navigation" not in c.metadata.get("tags", [])]
    ends = [nbformat.v4.new_markdown_cell(bar, metadata={"tags": ["navigation"]}) for _ in range(2)]
    notebook.cells = [ends[0], *cells, ends[1]]
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{chapter.number}-{number:03d}"
    fold_code(notebook.cells)
    notebook.metadata = nbformat.from_dict(KERNEL | LANGUAGE)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def fold_code(cells: list[nbformat.NotebookNode]) -> None:
    """Collapse, in JupyterLab, the cells whose code readers can skip."""
    for cell in cells:
        if HIDE_CODE in cell.metadata.get("tags", []):
            cell.metadata["jupyter"] = {"source_hidden": True}


def write_source(chapter: Chapter) -> None:
    """Copy the navigation bars and the outputs of code in answers from a chapter's notebook back to its source."""
    notebook = nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4)
    notebook.metadata = nbformat.from_dict(SOURCE)
    for cell in notebook.cells:
        cell.metadata.pop("jupyter", None)  # read_source() derives the folds from the text
    files.write(TEXT / f"{chapter.name}.py", jupytext.writes(notebook, fmt="py:percent"))


def execute(chapter: Chapter, cell_timeout: int = 600) -> tuple[nbformat.NotebookNode, Executed]:
    """Run one notebook in a fresh kernel and an empty folder, isolated from a reader's files."""
    notebook, scratch = read_source(chapter), TemporaryDirectory()
    client = NotebookClient(
        notebook,
        timeout=cell_timeout,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        shutdown_kernel="immediate",  # a busy kernel prints an error if it is shut down gently
        resources={"metadata": {"path": scratch.name}},
    )
    start, error = time.perf_counter(), ""
    try:
        client.reset_execution_trackers()
        with client.setup_kernel():  # not client.execute(), which would catch Ctrl-C
            count = 0
            for index, cell in enumerate(notebook.cells):
                if cell.cell_type == "code":
                    count += 1
                    client.execute_cell(cell, index, execution_count=count)
                elif QUESTION in cell.source:
                    cell.source = ANSWER.sub(partial(run_answer, client, index), cell.source)
                    notebook.cells[index] = cell
    except CellExecutionError as failure:
        error = f"{failure.ename}: {failure.evalue}"
    except Exception as failure:  # the kernel has died
        error = f"{type(failure).__name__}: {failure}"
    finally:
        scratch.cleanup()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for output in cell.outputs:
                if "text/html" in output.get("data", {}):
                    output.data["text/html"] = FRAME.sub("", output.data["text/html"])
    notebook.metadata = nbformat.from_dict(KERNEL | LANGUAGE)
    code = sum(c.cell_type == "code" for c in notebook.cells)
    return notebook, Executed(chapter.name, code, time.perf_counter() - start, error)


def run_answer(client: NotebookClient, index: int, code: re.Match) -> str:
    """Run the code in a question's fold, and return the code followed by its output."""
    cell = client.execute_cell(nbformat.v4.new_code_cell(code[2]), index, store_history=False)
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream").rstrip()
    return code[1] + (f"\n```text\n{printed}\n```\n" if printed else "")


def write_notebook(notebook: nbformat.NotebookNode, folder: Path, chapter: Chapter) -> None:
    files.write(folder / f"{chapter.name}.ipynb", nbformat.writes(notebook) + "\n")


def run_all(folder: Path, chapters: list[Chapter]) -> list[Executed]:
    """Run the chapters one after another, write them to a folder, and continue if one fails."""
    files.check_writable(folder, "book")
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    results = []
    for chapter in tqdm(chapters, desc="notebooks", unit="notebook", disable=None):
        notebook, result = execute(chapter)
        write_notebook(notebook, folder, chapter)
        results.append(result)
    return results


def write_blank(folder: Path, chapters: list[Chapter]) -> None:
    """Write the chapters without outputs, for readers who want to answer the questions before seeing the results."""
    files.check_writable(folder, "book --blank")
    for chapter in chapters:
        write_notebook(read_source(chapter), folder, chapter)


def record_outputs(chapters: list[Chapter]) -> list[Executed]:
    """Renew all outputs of the committed notebooks, including those that their sources repeat."""
    files.check_writable(TEXT, "book --record")
    results = run_all(NOTEBOOKS, chapters)
    for chapter in chapters:
        write_source(chapter)
    return results


def redraw_pictures(chapters: list[Chapter]) -> list[str]:
    """Renew only the pictures in the committed notebooks. Return one line for each notebook."""
    from fa2_lab.plots.live import live
    from fa2_lab.plots.show import show

    files.check_writable(NOTEBOOKS, "book --pictures")
    lines = []
    for chapter in tqdm(chapters, desc="notebooks", unit="notebook", disable=None):
        notebook = nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and SHOW_LINE.search(cell.source)]
        for cell in cells:
            redrawn, _ = eval(SHOW_LINE.search(cell.source)[0], {"show": show, "live": live})._repr_mimebundle_()
            shown = next(output for output in cell.outputs if "text/html" in output.get("data", {}))
            shown.data.update(redrawn | {"text/html": FRAME.sub("", redrawn["text/html"])})
        write_notebook(notebook, NOTEBOOKS, chapter)
        lines.append(f"{chapter.name:22} {len(cells):3} pictures")
    return lines
