"""`fa2-lab book` on a small book: its exit status, and what is kept."""

import nbformat
import pytest

from fa2_lab.tools import command
from fa2_studio.book import chapters, run

CELLS = {
    "00_start": "import os\nprint(6 * 7, os.listdir())",
    "01_naive_attention": "print('before')\n\n# %%\n1 / 0\n\n# %%\nprint('after')",
}


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A folder with a book of two chapters, one that runs and one with an error."""
    (tmp_path / "text").mkdir()
    for name, code in CELLS.items():
        (tmp_path / "text" / f"{name}.py").write_text(f"# %% [markdown]\n# # {name}\n\n# %%\n{code}\n")
    (tmp_path / "mine.py").touch()
    for module in (chapters, run):
        monkeypatch.setattr(module, "TEXT", tmp_path / "text")
        monkeypatch.setattr(module, "NOTEBOOKS", tmp_path)
    return tmp_path


def printed(path) -> list[str]:
    """What each code cell of a notebook printed."""
    cells = nbformat.read(path, as_version=4).cells
    return ["".join(o.get("text", "") for o in c.outputs) for c in cells if c.cell_type == "code"]


def test_an_error_in_a_chapter_ends_the_command_with_1_after_the_other_chapters(book, capsys):
    assert command.main(["book", "01", "00", "--folder", str(book / "out")]) == 1
    verdicts = capsys.readouterr().out.splitlines()
    assert verdicts[0].split()[:3] == ["00_start", "1", "cells"] and verdicts[0].endswith("ok")
    assert verdicts[1].endswith("ZeroDivisionError: division by zero"), "the verdict says what went wrong"
    assert printed(book / "out" / "00_start.ipynb") == ["42 []\n"], "a reader's mine.py is not there"
    assert printed(book / "out" / "01_naive_attention.ipynb") == ["before\n", "", ""], "nothing runs after an error"
