"""Where the chapters run: a table of chapters and machines, and copies of the NumPy chapters for Colab.

`python -m fa2_studio.book.reach` writes the table into TROUBLESHOOTING.md.
"""

import os
import re
from pathlib import Path

import nbformat

from fa2_lab.tools import files
from fa2_lab.tools.xray.compile import CHIPS
from fa2_studio.book.chapters import NOTEBOOKS, TEXT, Chapter, written

MACHINES = {"laptop": "", "T4": "sm_75", "A100": "sm_80", "H100, H200": "sm_90", "MI300": "gfx942"}
KINDS = {  # of chapters, and what in a chapter's source says so; the first that is found
    "Hopper's kernels": r"fa2_lab\.kernels\.hopper",
    "kernels": r"\bimport triton\b",
    "torch, and the record": r"\bfa2_(lab\.(kernels|api|distributed)|studio\.bench)\b|fa2_lab\.attention",
    "NumPy": "",
}
NOTE = (
    "Measured on an H200 and on an H100; for the other GPUs the kernels were compiled and not run. For a T4 (sm_75) "
    "Triton compiles them without tensor cores, and in 16 bits thousands of registers spill: use the interpreter there "
    "(`TRITON_INTERPRET=1`), and read times from the record."
)


def kind(chapter: Chapter) -> str:
    text = (TEXT / f"{chapter.name}.py").read_text(encoding="utf-8")
    return next(name for name, pattern in KINDS.items() if re.search(pattern, text))


def way(kind: str, chip: str) -> str:
    """How the cells of such a chapter run on a chip; "" is a machine without a GPU."""
    if kind in ("NumPy", "torch, and the record"):
        return "in full"
    if kind == "Hopper's kernels" and chip != "sm_90":
        return "model, and the record"
    return "compiled" if chip in CHIPS else "compiled, slow" if chip else "interpreted"


def table() -> str:
    """One row for each kind of chapter."""
    lines = [f"| chapters | about | {' | '.join(MACHINES)} |", "| --- | --- |" + " --- |" * len(MACHINES)]
    for name in reversed(KINDS):
        numbers = [chapter.number for chapter in written() if kind(chapter) == name]
        if numbers:
            lines.append(f"| {', '.join(numbers)} | {name} | {' | '.join(way(name, c) for c in MACHINES.values())} |")
    return "\n".join([*lines, "", NOTE])


# Colab ----------------------------------------------------------------------------------------------------------

INSTALL = """# Colab: fetch the project at the commit that this copy was made from
!git clone -q https://github.com/{repository} /content/fa2_lab && git -C /content/fa2_lab checkout -q {commit}
%cd -q /content/fa2_lab/notebooks
import sys

sys.path.insert(0, "/content/fa2_lab")"""
TAGS = ["nbval-skip", "skip-execution"]  # nothing of this is run by tests


def origin() -> tuple[str, str] | None:
    """The repository on GitHub and the commit, where GitHub's machines build the site; elsewhere None."""
    found = os.environ.get("GITHUB_REPOSITORY"), os.environ.get("GITHUB_SHA")
    return found if all(found) else None


def on_colab(chapter: Chapter) -> bool:
    return kind(chapter) == "NumPy"


def button(chapter: Chapter) -> str:
    """A link to a chapter's copy for Colab, which pages.yml keeps in a branch of its own."""
    if origin() is None or not on_colab(chapter):
        return ""
    address = f"https://colab.research.google.com/github/{origin()[0]}/blob/colab/{chapter.name}.ipynb"
    return f"[Open in Colab]({address})"


def write_for_colab(folder: Path) -> None:
    """The chapters that need NumPy alone, each with a first cell that fetches the project."""
    if origin() is None:
        raise ValueError("book --colab: got no GITHUB_REPOSITORY and GITHUB_SHA; it takes them from the environment")
    files.check_writable(folder, "book --colab")
    repository, commit = origin()
    for chapter in filter(on_colab, written()):
        notebook = nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4)
        source = INSTALL.format(repository=repository, commit=commit)
        cell = nbformat.v4.new_code_cell(source, id=f"{chapter.number}-colab", metadata={"tags": TAGS})
        notebook.cells.insert(0, cell)
        files.write(folder / f"{chapter.name}.ipynb", nbformat.writes(notebook) + "\n")


if __name__ == "__main__":
    page = files.checkout("the table of machines") / "TROUBLESHOOTING.md"
    between = re.compile(r"(<!-- machines: .*?-->\n).*?(\n<!-- end of machines -->)", flags=re.DOTALL)
    files.write(page, between.sub(lambda ends: ends[1] + table() + ends[2], page.read_text(encoding="utf-8")))
