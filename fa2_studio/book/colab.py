"""Write copies of the chapters for Colab and Kaggle, and links to these copies."""

import os
from pathlib import Path

import nbformat

from fa2_lab.tools import files
from fa2_studio.book.chapters import NOTEBOOKS, Chapter, written

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
    """Return the GitHub repository and the commit if GitHub builds the site, or None otherwise."""
    found = os.environ.get("GITHUB_REPOSITORY"), os.environ.get("GITHUB_SHA")
    return found if all(found) else None


def links(chapter: Chapter) -> str:
    """Return links to a chapter's copy on Colab and Kaggle, or "" outside GitHub.

    pages.yml keeps these copies in a separate branch.
    """
    if origin() is None:
        return ""
    copy = f"{origin()[0]}/blob/colab/{chapter.name}.ipynb"
    kaggle = f"https://kaggle.com/kernels/welcome?src=https://github.com/{copy}"
    return f"[Open in Colab](https://colab.research.google.com/github/{copy}) · [Kaggle]({kaggle})"


def write_for_colab(folder: Path) -> None:
    """Write the chapters with an additional first cell, which fetches the project and sets up the interpreter."""
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
