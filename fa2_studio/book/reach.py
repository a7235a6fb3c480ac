"""Where the chapters run: a table of chapters and machines, and copies of the chapters for Colab and Kaggle.

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
    "The kernels were measured on an H200 and on an H100. For the other GPUs, they were compiled but not run. For a T4 "
    "(sm_75), Triton compiles them without tensor cores, and in 16-bit precision thousands of registers spill. So use "
    "the interpreter there (`TRITON_INTERPRET=1`), and take timings from the recorded runs."
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


# Colab and Kaggle -----------------------------------------------------------------------------------------------

FETCH = """# Colab or Kaggle (there Internet must be on): fetch the project at the commit that this copy was made from
import os

home = next(path for path in ("/kaggle/working", "/content", os.getcwd()) if os.path.isdir(path))
!git clone -q https://github.com/{repository} {{home}}/fa2_lab && git -C {{home}}/fa2_lab checkout -q {commit}
%pip install -q --no-deps -e {{home}}/fa2_lab
%cd -q {{home}}/fa2_lab/notebooks
"""
PREPARE = """import os
import subprocess
import sys
from importlib import metadata

sys.path.insert(0, os.path.dirname(os.getcwd()))


def version(name):
    try:
        return tuple(int(part) for part in metadata.version(name).split(".")[:2])
    except metadata.PackageNotFoundError:
        return (0, 0)


if version("torch") < (2, 11):
    %pip install -q -U "torch>=2.11" "triton>=3.6"
if version("triton") < (3, 6):  # torch for CPUs brings none
    %pip install -q -U "triton>=3.6"
print({name: version(name) for name in ("torch", "triton", "numpy")})

query = "nvidia-smi --query-gpu=compute_cap --format=csv,noheader"
chips = subprocess.run(query, shell=True, capture_output=True, text=True).stdout.split()
if not chips or not chips[0][0].isdigit() or float(chips[0]) < 8:
    # No GPU, or one such as a T4, for which Triton has no tensor cores: everything runs as on a laptop.
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")"""
TAGS = ["nbval-skip", "skip-execution"]


def origin() -> tuple[str, str] | None:
    """The repository on GitHub and the commit, where GitHub's machines build the site; elsewhere None."""
    found = os.environ.get("GITHUB_REPOSITORY"), os.environ.get("GITHUB_SHA")
    return found if all(found) else None


def button(chapter: Chapter) -> str:
    """Links to a chapter's copy on Colab and Kaggle, which pages.yml keeps in a branch of its own."""
    if origin() is None:
        return ""
    copy = f"{origin()[0]}/blob/colab/{chapter.name}.ipynb"
    kaggle = f"https://kaggle.com/kernels/welcome?src=https://github.com/{copy}"
    return f"[Open in Colab](https://colab.research.google.com/github/{copy}) · [Kaggle]({kaggle})"


def write_for_colab(folder: Path) -> None:
    """The chapters, each with a first cell that fetches the project and settles who runs its kernels."""
    if origin() is None:
        raise ValueError("book --colab: got no GITHUB_REPOSITORY and GITHUB_SHA; it takes them from the environment")
    files.check_writable(folder, "book --colab")
    repository, commit = origin()
    for chapter in written():
        notebook = nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4)
        source = FETCH.format(repository=repository, commit=commit) + PREPARE
        cell = nbformat.v4.new_code_cell(source, id=f"{chapter.number}-colab", metadata={"tags": TAGS})
        notebook.cells.insert(0, cell)
        files.write(folder / f"{chapter.name}.ipynb", nbformat.writes(notebook) + "\n")


if __name__ == "__main__":
    page = files.checkout("the table of machines") / "TROUBLESHOOTING.md"
    between = re.compile(r"(<!-- machines: .*?-->\n).*?(\n<!-- end of machines -->)", flags=re.DOTALL)
    files.write(page, between.sub(lambda ends: ends[1] + table() + ends[2], page.read_text(encoding="utf-8")))
