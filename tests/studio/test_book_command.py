"""`fa2-lab book` on a small book: its exit status, what is kept after Ctrl-C; and commands in poor surroundings."""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import nbformat
import pytest

from fa2_lab.paper import PACKAGE
from fa2_lab.tools import command
from fa2_studio.book import chapters, run

CELLS = {
    "00_start": "print(6 * 7)",
    "01_naive_attention": "print('before')\n\n# %%\n1 / 0\n\n# %%\nprint('after')",
    "02_online_softmax": "open('here', 'w').close()\nimport time\ntime.sleep(300)",
}


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A folder with a book of three chapters: one that runs, one with an error, and one that takes very long."""
    (tmp_path / "text").mkdir()
    for name, code in CELLS.items():
        (tmp_path / "text" / f"{name}.py").write_text(f"# %% [markdown]\n# # {name}\n\n# %%\n{code}\n")
    for room in (chapters, run):
        monkeypatch.setattr(room, "TEXT", tmp_path / "text")
        monkeypatch.setattr(room, "NOTEBOOKS", tmp_path)
    return tmp_path


def printed(path) -> list[str]:
    """What each code cell of a notebook printed."""
    cells = nbformat.read(path, as_version=4).cells
    return ["".join(o.get("text", "") for o in c.outputs) for c in cells if c.cell_type == "code"]


def test_a_book_without_errors_ends_with_0_and_is_kept(book, capsys):
    assert command.main(["book", "00", "--folder", str(book / "out")]) == 0
    assert printed(book / "out" / "00_start.ipynb") == ["42\n"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == ["00_start", "1", "cells"] and line.endswith("ok"), line


def test_an_error_in_a_chapter_ends_the_command_with_1_after_the_other_chapters(book, capsys):
    assert command.main(["book", "01", "00", "--folder", str(book / "out")]) == 1
    verdicts = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in verdicts] == ["00_start", "01_naive_attention"]
    assert verdicts[1].endswith("ZeroDivisionError: division by zero"), "the verdict says what went wrong"
    assert printed(book / "out" / "01_naive_attention.ipynb") == ["before\n", "", ""], "nothing runs after an error"


CALL = """
import sys
from pathlib import Path
from fa2_lab.tools import command
from fa2_studio.book import chapters, run
for room in (chapters, run):
    room.NOTEBOOKS = Path(sys.argv[1])
    room.TEXT = room.NOTEBOOKS / "text"
sys.exit(command.main(["book", "00", "02", "--folder", sys.argv[1] + "/out"]))
"""


def test_ctrl_c_ends_with_130_and_leaves_whole_notebooks(book):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where the tests themselves were told not to
    process = subprocess.Popen([sys.executable, "-c", CALL, book], preexec_fn=listens, start_new_session=True, **pipes)
    end = time.monotonic() + 300
    while not (book / "here").exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in told, told
    assert os.listdir(book / "out") == ["00_start.ipynb"], "the chapter that was stopped leaves nothing"
    assert printed(book / "out" / "00_start.ipynb") == ["42\n"]


def test_a_chapter_that_is_not_there_is_refused_with_the_names_of_those_that_are(book, capsys):
    assert command.main(["book", "77"]) == 2
    assert f"got '77'; it takes one of {', '.join(CELLS)}" in capsys.readouterr().err


def test_a_package_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nbclient", None)
    monkeypatch.delitem(sys.modules, "fa2_studio.book.run")  # it is imported when the command runs
    monkeypatch.delattr("fa2_studio.book.run")
    assert command.main(["book", "00"]) == 2
    assert capsys.readouterr().err == "fa2-lab: this needs nbclient, which is not installed: pip install nbclient\n"


CALLS = [  # each in surroundings that have taken a program's files, its letters, or its checks away
    (["where", "FA2.A1.L9"], 0, dict(HOME=None)),
    (["book"], 2, dict(LANG="C", LC_ALL="C")),
    (["errata", "fa2-scale"], 0, dict(PYTHONOPTIMIZE="1", HOME=None, LANG="C", LC_ALL="C")),
]


def test_an_installed_copy_works_anywhere(tmp_path):
    """A copy of the package alone, called from another folder."""
    shutil.copytree(PACKAGE, tmp_path / "site" / "fa2_lab", ignore=shutil.ignore_patterns("__pycache__"))
    for arguments, status, where in CALLS:
        env = os.environ | dict(PYTHONPATH=str(tmp_path / "site")) | where
        env = {name: value for name, value in env.items() if value is not None}
        call = [sys.executable, "-m", "fa2_lab", *arguments]
        done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, timeout=60)
        assert done.returncode == status and b"Traceback" not in done.stderr, (arguments, done.stderr)


WRONG = """
from dataclasses import replace
from fa2_lab import errata
from fa2_lab.tools import command, tour
from fa2_studio.book.verdicts import verdict
same = replace(errata.ERRATA["fa2-scale"], wrong=errata.ERRATA["fa2-scale"].right)
errata.ERRATA = {"fa2-scale": same}
stage = tour.Stage("x", lambda trace: [(tour.FULL.O * 1.01, tour.FULL.O)])
assert False, "not seen: python -O leaves it out"
print(command.main(["errata"]), tour.tour((stage,)))
try:
    verdict("1 = 2", False)
except AssertionError:
    print("stopped")
"""


def test_verdicts_judge_under_python_O():
    done = subprocess.run([sys.executable, "-O", "-c", WRONG], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-2:] == ["1 1", "stopped"], done.stdout + done.stderr
