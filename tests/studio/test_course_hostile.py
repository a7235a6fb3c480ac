"""Hostile submissions: each gets what it deserves, nobody else suffers, and nothing of it stays."""

import hashlib
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("nbgrader", reason="nbgrader is not installed: pip install 'fa2-lab[course]'")
import course_hostile as hostile
from course_wrong import WRONG

from fa2_studio.course import grade, notebooks, rules, sandbox
from fa2_studio.course.notebooks import HIDDEN, source
from fa2_studio.course.sandbox import Limits

FIRST = hostile.FIRST
QUICK = Limits(cell_seconds=6, notebook_seconds=120, memory_mb=2048)


def hidden_lines() -> set[str]:
    """The lines of hidden tests alone."""
    texts = re.findall(f"{HIDDEN[0]}(.*?){HIDDEN[1]}", "".join(c.source for c in source(FIRST).cells), re.S)
    return {line.strip() for text in texts for line in text.splitlines() if line.strip()}


def digest(folder: Path) -> dict:
    return {
        str(p): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not p.is_symlink() and "__pycache__" not in str(p)
    }


def graded_class(folder: Path, submissions: dict, walls: str = "namespaces") -> tuple[dict, list[str]]:
    """{name: what it got} and the warnings, with zoe, whose work is right and who stands in the middle of the class."""
    submissions = {**submissions, "zoe": hostile.Hostile()}
    for name, one in submissions.items():
        hostile.hand_in(one, folder / "in" / name)
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("the instructor's own")
    targets = [str(folder), str(rules.PACKAGE), str(notebooks.FOLDER), str(Path.home())]
    hostile.hand_in(hostile.vandal(targets), folder / "in" / "a vandal")
    before = digest(folder / "in") | digest(rules.PACKAGE) | digest(notebooks.FOLDER)
    warnings = []
    how = grade.Grading(replace(QUICK, walls=walls), jobs=2, warn=warnings.append)
    found = grade.grade_folder(folder / "in", folder / "out", [FIRST], how)
    assert digest(folder / "in") | digest(rules.PACKAGE) | digest(notebooks.FOLDER) == before
    assert (folder / "out" / "notes.txt").read_text() == "the instructor's own"
    return {g.student: g for g in found}, warnings


QUICKLY = {name: one for name, one in (hostile.GAIN | hostile.HARM).items() if one.quick}
SLOWLY = {name: one for name, one in (hostile.GAIN | hostile.HARM).items() if not one.quick}


ALIVE: list[int] = []  # processes below this one before the class is graded


@pytest.fixture(scope="module")
def quick_class(tmp_path_factory):
    """Graded with a folder for temporary files of its own, in which nothing may stay."""
    folder = tmp_path_factory.mktemp("class")
    (folder / "tmp").mkdir()
    ALIVE.extend(sandbox.descendants(os.getpid()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        return graded_class(folder, QUICKLY)[0], folder


@pytest.fixture(scope="module")
def whole_class(tmp_path_factory):
    return graded_class(tmp_path_factory.mktemp("class"), SLOWLY)[0]


def judge_one(graded, one):
    assert one.score - 0.01 <= graded.score <= max(one.score, one.most) + 0.01, graded.sentences
    assert any(remark in "; ".join(graded.sentences) for remark in one.remark.split("|")), graded.sentences


def test_there_are_forty_hostile_and_sixty_wrong_submissions():
    count = len(hostile.GAIN) + len(hostile.HARM) + 1  # and the vandal
    assert count >= 40 and len(WRONG) >= 60
    told = (notebooks.FOLDER / "INSTRUCTOR.md").read_text(encoding="utf-8")
    assert f"tests show that {count} hostile submissions" in told


@pytest.mark.parametrize("name", QUICKLY)
def test_a_hostile_submission_gets_what_it_deserves(name, quick_class):
    judge_one(quick_class[0][name], QUICKLY[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SLOWLY)
def test_the_other_hostile_submissions_get_what_they_deserve(name, whole_class):
    judge_one(whole_class[name], SLOWLY[name])


def test_nobody_else_suffers(quick_class):
    graded, _ = quick_class
    assert graded["zoe"].score == 12 and not graded["zoe"].sentences
    assert graded["a vandal"].score == 12  # it broke nothing, not even its own work
    assert os.listdir(quick_class[1] / "tmp") == []


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="this system does not tell what runs")
def test_nothing_outlives_its_grading(quick_class):
    commands = [Path(p, "cmdline").read_bytes() for p in Path("/proc").glob("[0-9]*") if Path(p, "cmdline").exists()]
    stage = str(quick_class[1]).encode()
    assert not [c for c in commands if b"course.sandbox" in c and stage in c]
    known = {child for pid in ALIVE for child in (pid, *sandbox.descendants(pid))}  # compilers of other tests
    assert set(sandbox.descendants(os.getpid())) <= known or os.environ.get("PYTEST_XDIST_WORKER")


def test_feedback_shows_markup_and_runs_none_of_it(quick_class):
    for page in (quick_class[1] / "out" / "feedback").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "<script" not in text and "src=" not in text
        assert not [line for line in hidden_lines() if len(line) > 25 and line in text], page


# Where there are no namespaces ----------------------------------------------------------------------------------------

ELSEWHERE = ("the solution from this disk", "a debugger on every process", "killing everything", "no way out",
             "a full disk", "memory that is nobody's", "twenty daemons")  # fmt: skip


@pytest.mark.skipif(os.uname().sysname != "Linux", reason="Landlock is Linux's")
def test_without_namespaces_landlock_keeps_files_signals_and_network_apart(tmp_path):
    graded, warnings = graded_class(
        tmp_path, {name: (hostile.GAIN | hostile.HARM)[name] for name in ELSEWHERE}, "landlock"
    )
    if any("change or delete" in warning for warning in warnings):
        pytest.skip("this kernel has no Landlock, and grade says so")
    assert {name: graded[name].score for name in ELSEWHERE} == {
        name: (hostile.GAIN | hostile.HARM)[name].score for name in ELSEWHERE
    }
    assert graded["zoe"].score == graded["a vandal"].score == 12
    assert any("see the other processes" in warning for warning in warnings)
    assert not any("network" in warning or "end processes" in warning for warning in warnings)


def test_a_warning_names_every_wall_that_is_missing(tmp_path):
    hostile.hand_in(hostile.Hostile(), tmp_path / "in" / "zoe")
    warnings = []
    how = grade.Grading(Limits(600, 3000, walls="none"), warn=warnings.append)
    (graded,) = grade.grade_folder(tmp_path / "in", tmp_path / "out", [FIRST], how)
    assert graded.score == 12
    for wall in ("use the network", "change or delete", "other processes", "end processes"):
        assert any(wall in w for w in warnings), warnings
