"""Where the chapters run: the table, and the copies for Colab and Kaggle."""

import os
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from fa2_lab.tools import command
from fa2_studio.book import colab
from fa2_studio.book.chapters import NOTEBOOKS, TEXT, written


def test_machine_table_lists_every_chapter_as_its_head_says():
    page = (NOTEBOOKS.parent / "TROUBLESHOOTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\dA-D][\w, ]*) \| ([^|]+) \|", page.split("## What runs where")[1], re.MULTILINE)
    pairs = [(number, what) for numbers, what in rows for number in numbers.split(", ")]
    assert sorted(number for number, _ in pairs) == sorted(c.number for c in written())
    about = dict(pairs)
    for chapter in written():
        head = re.sub(r"\n# ?", " ", (TEXT / f"{chapter.name}.py").read_text(encoding="utf-8"))
        assert ("Hardware: any laptop with NumPy." in head) == (about[chapter.number] == "NumPy"), chapter.name


def test_colab_copies_install_the_project_at_one_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/fa2_lab")
    monkeypatch.setenv("GITHUB_SHA", "0123abc")
    assert command.main(["book", "--colab", str(tmp_path)]) == 0
    assert {p.stem for p in tmp_path.iterdir()} == {c.name for c in written()}
    for chapter in written():
        copy = nbformat.read(tmp_path / f"{chapter.name}.ipynb", as_version=4)
        nbformat.validate(copy)
        first, *rest = copy.cells
        assert rest == nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4).cells
        assert "github.com/someone/fa2_lab " in first.source and "checkout -q 0123abc\n" in first.source
        copy = f"someone/fa2_lab/blob/colab/{chapter.name}.ipynb)"
        colab_link, kaggle_link = colab.links(chapter).split(" · ")
        assert colab_link.endswith(f"google.com/github/{copy}") and kaggle_link.endswith(
            f"?src=https://github.com/{copy}"
        )


def test_colab_buttons_need_a_repository(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert all(colab.links(c) == "" for c in written())
    assert command.main(["book", "--colab", str(tmp_path / "copies")]) == 2
    assert "got no GITHUB_REPOSITORY" in capsys.readouterr().err and not (tmp_path / "copies").exists()


@pytest.mark.parametrize("gpu, interpreted", [("", True), ("7.5", True), ("8.9", False), ("No devices", True)])
def test_colab_copies_use_the_interpreter_on_old_gpus(tmp_path, monkeypatch, gpu, interpreted):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{gpu}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")  # put back afterwards
    monkeypatch.setattr(sys, "path", [*sys.path])
    exec(re.sub(r"%pip.*", "pass", colab.PREPARE), {})
    assert (os.environ.get("TRITON_INTERPRET") == "1") == interpreted


@pytest.mark.exhaustive
@pytest.mark.parametrize("chapter", written(), ids=lambda chapter: chapter.name)
def test_colab_copy_runs_without_a_gpu(chapter, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/fa2_lab")
    monkeypatch.setenv("GITHUB_SHA", "0123abc")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    colab.write_for_colab(tmp_path)
    copy = nbformat.read(tmp_path / f"{chapter.name}.ipynb", as_version=4)
    copy.cells[0].source = re.sub(r"%pip.*", "pass", colab.PREPARE)  # the project is here, and so is what it needs
    copy.cells[0].metadata.tags = []  # or it would be passed over
    NotebookClient(copy, timeout=300, resources={"metadata": {"path": NOTEBOOKS}}).execute()
    assert "torch" in copy.cells[0].outputs[0].text
