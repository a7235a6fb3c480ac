"""`fa2-lab book` on a small book: its exit status, and what is kept after Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import nbformat
import pytest

from fa2_lab.tools import command
from fa2_studio.book import chapters, run

CHAPTER_CODE = {
    "00_start": "import os\nprint(6 * 7, os.listdir())",
    "01_naive_attention": "print('before')\n\n# %%\n1 / 0\n\n# %%\nprint('after')",
    "02_online_softmax": "open({here!r}, 'w').close()\nimport time\ntime.sleep(300)",
}


@pytest.fixture
def book(tmp_path, monkeypatch):
    """Make a book of three chapters: one that runs, one with an error, one that takes very long. Return its folder."""
    (tmp_path / "text").mkdir()
    for name, code in CHAPTER_CODE.items():
        code = code.replace("{here!r}", repr(str(tmp_path / "here")))
        (tmp_path / "text" / f"{name}.py").write_text(f"# %% [markdown]\n# # {name}\n\n# %%\n{code}\n")
    (tmp_path / "mine.py").touch()
    for module in (chapters, run):
        monkeypatch.setattr(module, "TEXT", tmp_path / "text")
        monkeypatch.setattr(module, "NOTEBOOKS", tmp_path)
    return tmp_path


def printed(path) -> list[str]:
    """Return what each code cell of a notebook printed."""
    cells = nbformat.read(path, as_version=4).cells
    return ["".join(o.get("text", "") for o in c.outputs) for c in cells if c.cell_type == "code"]


def test_book_exits_with_1_if_a_chapter_fails_but_runs_the_others(book, capsys):
    assert command.main(["book", "01", "00", "--folder", str(book / "out")]) == 1
    verdicts = capsys.readouterr().out.splitlines()
    assert verdicts[0].split()[:3] == ["00_start", "1", "cells"] and verdicts[0].endswith("ok")
    assert verdicts[1].endswith("ZeroDivisionError: division by zero"), "the verdict says what went wrong"
    assert printed(book / "out" / "00_start.ipynb") == ["42 []\n"], "a reader's mine.py is not there"
    assert printed(book / "out" / "01_naive_attention.ipynb") == ["before\n", "", ""], "nothing runs after an error"


RUN_BOOK = """
import sys
from pathlib import Path
from fa2_lab.tools import command
from fa2_studio.book import chapters, run
for module in (chapters, run):
    module.NOTEBOOKS = Path(sys.argv[1])
    module.TEXT = module.NOTEBOOKS / "text"
sys.exit(command.main(["book", "00", "02", "--folder", sys.argv[1] + "/out"]))
"""


def test_ctrl_c_in_book_leaves_whole_notebooks(book):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where the tests themselves were told not to
    call = [sys.executable, "-c", RUN_BOOK, book]
    process = subprocess.Popen(call, preexec_fn=listens, start_new_session=True, **pipes)
    deadline = time.monotonic() + 300
    while not (book / "here").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert os.listdir(book / "out") == ["00_start.ipynb"], "the chapter that was stopped leaves nothing"
    assert printed(book / "out" / "00_start.ipynb") == ["42 []\n"]
