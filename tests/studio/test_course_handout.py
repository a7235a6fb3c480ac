"""What students receive: bundles without answers, seeds, each student's own cases, and packages for Gradescope."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'fa2-lab[course]'")
import nbformat
from checks import detective, listing, predict
from checks.probes import NotAllowed
from checks.report import Failed
from course_class import FIRST, run_checks, submission, write_book

from fa2_studio.course import command, notebooks, planted_bugs, sandbox, seeds
from fa2_studio.course.notebooks import FOLDER, HIDDEN, PROJECT, SOLUTION, grade_id, is_solution, source_notebook

ASSIGNMENTS = {a.name: a for a in notebooks.ASSIGNMENTS}


# The bundle ---------------------------------------------------------------------------------------------------------


def secret_lines(name: str) -> set[str]:
    """Return the lines of an assignment's solutions and hidden tests that no assignment shows to students."""
    inside, shown = set(), set()
    for other in ASSIGNMENTS:
        for cell in source_notebook(ASSIGNMENTS[other]).cells:
            is_secret = False
            for line in map(str.strip, cell.source.splitlines()):
                if line in (*SOLUTION, *HIDDEN):
                    is_secret = line in (SOLUTION[0], HIDDEN[0])
                elif not is_secret:
                    shown.add(line)
                elif other == name:
                    inside.add(line)
    return {line for line in inside - shown if len(line) > 8}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Write the bundles of two students, and return their folder."""
    folder = tmp_path_factory.mktemp("class")
    (folder / "class.csv").write_text("folder,id,name\nada,1,Ada\nbob,2,Bob\n")
    (folder / "secret").write_text("autumn")
    (folder / "fa2_lab-1-py3-none-any.whl").write_text("a wheel")
    words = ["bundle", str(folder / "out"), "--roster", str(folder / "class.csv"), "--secret", str(folder / "secret")]
    assert command.main([*words, "--wheel", str(folder / "fa2_lab-1-py3-none-any.whl")]) == 0
    return folder / "out"


def notebook_texts(node) -> list[str]:
    """Return all strings in a notebook, including keys and metadata."""
    if isinstance(node, dict):
        return [text for key, value in node.items() for text in (key, *notebook_texts(value))]
    if isinstance(node, list):
        joined = ["".join(node)] if node and all(isinstance(x, str) for x in node) else []
        return joined + [text for value in node for text in notebook_texts(value)]
    return [node] if isinstance(node, str) else []


def folder_text(folder: Path) -> str:
    """Return all text of a folder, with the strings of its notebooks."""
    parts = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        text = path.read_text(encoding="utf-8")
        parts.append("\n".join(notebook_texts(json.loads(text))) if path.suffix == ".ipynb" else text)
    return "\n".join(parts)


def test_bundle_has_only_notebooks_and_visible_checks(bundle):
    files = {str(p.relative_to(bundle / "ada")) for p in (bundle / "ada").rglob("*") if p.is_file()}
    checks = {f"checks/{p.name}" for p in (FOLDER / "checks").glob("*.py")}
    others = {"README.md", "AGENTS.md", "fa2_lab-1-py3-none-any.whl"}
    assert files == {f"{name}.ipynb" for name in ASSIGNMENTS} | others | checks


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_bundle_contains_no_solution_hidden_test_or_key(name, bundle):
    everything, secrets = folder_text(bundle / "ada"), secret_lines(name)
    lines = {line.strip() for line in everything.splitlines()}
    secrets -= {"draw = np.random.default_rng(seed).standard_normal"}
    assert len(secrets) >= 6 and not secrets & lines
    assert not [s for s in secrets if len(s) > 75 and s in everything]
    assert not re.search(r"(BEGIN|END) (SOLUTION|HIDDEN)", everything)
    for bug in (*planted_bugs.HANGS, *planted_bugs.RACES, *planted_bugs.WRONG):
        assert repr(bug.right) not in everything and f'PlantedBug("{bug.cause}"' not in everything


def test_bundle_of_one_assignment_has_only_its_checks(tmp_path):
    assert command.main(["bundle", str(tmp_path), "--only", "1", "2"]) == 0
    names = {p.name for p in (tmp_path / "checks").iterdir()}
    assert {"softmax.py", "tiled.py", "guard.py"} <= names
    assert not names & {"break_it.py", "detective.py", "gradients.py"}


def test_student_check_needs_only_bundle_and_package(bundle, tmp_path):
    """Nothing of the checkout but fa2_lab is there, as after `pip install fa2-lab`."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "fa2_lab").symlink_to(PROJECT / "fa2_lab")
    path = bundle / "ada" / "2_forward.ipynb"
    book = nbformat.read(path, 4)
    solved = {grade_id(c): c.source for c in source_notebook(ASSIGNMENTS["2_forward"]).cells}
    for cell in book.cells:
        cell.source = solved["kind"] if grade_id(cell) == "kind" else cell.source
    nbformat.write(book, path)
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PYTHONIOENCODING": "ascii"}  # Windows has no "×" either
    call = [sys.executable, "-m", "checks", path.name]
    result = subprocess.run(call, cwd=path.parent, env=env, capture_output=True, text=True)
    assert "kind: 2 of 2 points" in result.stdout and "2 of 16 points" in result.stdout, result.stdout + result.stderr
    assert "UnicodeEncodeError" not in result.stdout
    assert result.returncode == 1


# Seeds --------------------------------------------------------------------------------------------------------------


def test_seeds_differ_by_student_and_need_the_secret():
    drawn = {seeds.seed_of(f"student {n}", "autumn") for n in range(200)}
    assert len(drawn) == 200 and min(drawn) > 0
    assert seeds.seed_of("ada", "autumn") != seeds.seed_of("ada", "spring")
    assert seeds.seed_of("ada", "") == 0 and seeds.seed_of("J\udcfcrgen", "autumn") > 0


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_seed_0_is_the_original_and_no_seed_changes_answers(name):
    original = source_notebook(ASSIGNMENTS[name])
    assert seeds.with_seed(original, 0) == original
    seeded = seeds.with_seed(original, 5)
    assert [c.source for c in seeded.cells if is_solution(c)] == [c.source for c in original.cells if is_solution(c)]
    text = "".join(c.source for c in original.cells if grade_id(c))
    assert (seeded != original) == ("seed=0" in text)


@pytest.mark.parametrize("seed", range(8))
def test_every_seed_changes_the_numbers_to_compute(seed):
    notebook = seeds.with_seed(source_notebook(ASSIGNMENTS["6_read_the_machine"]), seed)
    notebook.cells = [c for c in notebook.cells if grade_id(c) in {"setup", "question", "by_hand", "test_by_hand"}]
    check_points, printed = run_checks(notebook)
    assert check_points == {"test_by_hand": 2.0}, printed
    assert len({predict.question(other) for other in range(8)}) == 8


# Detective cases ----------------------------------------------------------------------------------------------------


class StudentAnswer:
    """A student's answer in the form that the grader has it, which is a text."""

    def __init__(self, **parts):
        self.parts = parts

    def __str__(self):
        return f"def answer():\n    return dict({', '.join(f'{k}={v!r}' for k, v in self.parts.items())})\n"


@pytest.fixture
def check_points(monkeypatch):
    """Return a function that returns the numbers of visible and of hidden checks that an answer passes with a seed."""
    monkeypatch.setattr(detective.guard, "text", str)

    def check_points(step: str, answer, seed: int) -> tuple[int, int]:
        path, bug = planted_bugs.program_and_bug(step, seed)
        case = detective.IN_MODEL if path == planted_bugs.PIPELINE else detective.IN_TRITON
        text = planted_bugs.broken_program(path, bug, seed)
        text = text[text.index("def pipeline" if path == planted_bugs.PIPELINE else "@triton.jit") :]
        monkeypatch.setattr(detective, "text_of", lambda program: text)
        hidden = planted_bugs.check_naming(step, answer, seed).passed
        return detective.check_step(step, case, answer, None, seed).passed, hidden

    return check_points


def right_answer(step: str, seed: int) -> StudentAnswer:
    """Return the right answer to the planted bug of a step and a seed."""
    path, bug = planted_bugs.program_and_bug(step, seed)
    line = sorted(planted_bugs.wrong_lines(path, bug, seed))[0]
    pair = tuple(planted_bugs.rename_variables(path, text, seed).rstrip("\n") for text in (bug.wrong, bug.right))
    runs = dict(shows=bug.shows or dict(tiles=7), hides=bug.hides or dict(tiles=7))
    return StudentAnswer(line=line, cause=bug.cause, mend=[pair], **runs)


@pytest.mark.parametrize("step", ["hang", "race"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 398319954])
def test_planted_pipeline_bugs_can_be_found_and_fixed(step, seed, check_points, capsys):
    assert check_points(step, right_answer(step, seed), seed) == (3, 2), capsys.readouterr().out
    answer = right_answer(step, seed)
    for part, wrong in dict(line="yield qk.done()", cause="corner").items():
        assert check_points(step, StudentAnswer(**(answer.parts | {part: wrong})), seed) == (3, 1)


def test_hidden_cases_depend_on_student_and_day():
    """What is learned from one hand-in serves no second one, and no neighbour."""
    for name, assignment in ASSIGNMENTS.items():
        book = source_notebook(assignment)
        drawn = {
            "".join(c.source for c in seeds.with_day(seeds.with_seed(book, seed), seed, day).cells)
            for seed in (1, 2) for day in ("2030-01-01", "2030-01-02")
        }  # fmt: skip
        assert len(drawn) == 4 or name.startswith(("5", "8")), name


def test_one_answer_does_not_pass_for_two_seeds(check_points):
    drawn = [seeds.seed_of(f"student {n}", "autumn") for n in range(7)]
    answer = right_answer("hang", drawn[0])
    full = [seed for seed in drawn if check_points("hang", answer, seed) == (3, 2)]
    assert full == [drawn[0]]


DENSE = """    hidden = causal & (np.arange(len(K)) > np.arange(len(Q))[:, None] + len(K) - len(Q))
    scores_ = np.where(hidden, -np.inf, Q @ K.T)
    p_ = np.exp(scores_ - scores_.max(1, keepdims=True))
    return p_ @ V / p_.sum(1, keepdims=True), 0"""


def test_dense_attention_or_removed_clocks_do_not_pass_as_a_fix(check_points, capsys):
    answer = right_answer("race", 0)
    first_line = "    block, B_c = ThreadBlock(), 4\n"
    names = "names that the program already has"
    cheats = [
        ("new words and signs", (first_line, DENSE + "\n" + first_line)),
        ("new words and signs", ("return O, block.clock", 'return f"{[' + "Q @ K.T, " * 9 + ']}", block.clock')),
        ("new words and signs", ("return O, block.clock", "return O, " + "block.clock, " * 100_000)),
        ("clocks", ("return O, block.clock", "return O, 0")),
        (names, ("return O, block.clock", "return exec('')")),
        (names, ('f"stage {s} filled"', "f'{exec(s)}'")),
    ]
    for message, replacement in cheats:
        mend = answer.parts["mend"] + [replacement] if message == "clocks" else [replacement]
        assert check_points("race", StudentAnswer(**(answer.parts | dict(mend=mend))), 0)[0] == 2
        assert message in capsys.readouterr().out


def test_nan_is_rejected_as_a_hand_computed_number(capsys):
    names = ("thread blocks", "waves on an A100", "KiB of shared memory", "MiB moved")
    assert predict.by_hand(lambda: dict.fromkeys(names, float("nan"))).passed == 0


def test_answer_dictionary_must_be_a_literal(monkeypatch):
    monkeypatch.setattr(detective.guard, "text", str)
    twice = "if 1:\n        return dict(cause='corner')\n    return dict(cause='phase')"
    for body in ("return dict(cause=find())", twice, "return answers[0]"):
        with pytest.raises(Failed, match="only texts and numbers"):
            detective.answer_of(f"def hang():\n    {body}\n", "cause")
    harmless = "'A text.'\n    print(f'{1}')\n    return dict(cause='phase')"
    assert detective.answer_of(f"def hang():\n    {harmless}\n", "cause") == "phase"
    with pytest.raises(NotImplementedError):
        detective.answer_of("def hang():\n    raise NotImplementedError()\n", "cause")


def test_planted_kernel_bugs_match_one_line_and_all_are_drawn():
    for bugs in (planted_bugs.HANGS, planted_bugs.RACES, planted_bugs.WRONG):
        drawn = [planted_bugs.bug_of_seed(bugs, seed) for seed in range(60)]
        assert {drawn.count(bug) for bug in bugs} <= set(range(10, 31))
    for bug in planted_bugs.WRONG:
        assert planted_bugs.broken_program(planted_bugs.KERNEL, bug, 5) and bug.cause in detective.CAUSES


# Kernels as text -----------------------------------------------------------------------------------------------------


FORBIDDEN = ["tl.core.os", "l.handle.data[:] = 1", "import os", "np.exp(l)", "().__class__", "tl.load = l"]
FORBIDDEN += ["tl.math.core.os", "t = tl; t.core", "m = tl.math; m.core", "(tl if l else tl).core", "tl.math.wraps(l)"]
FORBIDDEN += ["{0 for getattr in (1,)}; getattr(tl.load, '__globals__')", "tl.cdiv.run", "tl.tensor.mro()"]
# Triton's interpreter says no, and its compiler yes
FORBIDDEN += ["l = f'{l:05}' == '1'", "l = tl.constexpr(3) is 3"]


@pytest.mark.parametrize("line", FORBIDDEN)
def test_student_kernel_may_contain_only_triton(line):
    pytest.importorskip("triton", reason="Triton is not installed")
    with pytest.raises(NotAllowed):
        listing.kernel("f", f"@triton.jit\ndef f(l):\n    {line}\n", {"f"})


def test_student_kernel_signature_may_contain_only_triton():
    calls = ("f(l) -> __import__('os').getpid()", "f(l, x=exec('1'))", "f(l: exec('1'))", "f(l, x=exec('1'), exec=1)")
    for first in calls:
        with pytest.raises(NotAllowed):
            listing.kernel("f", f"@triton.jit\ndef {first}:\n    pass\n", {"f"})


@pytest.mark.parametrize("name", ["exec", "torch", "forward", "range", "a-b"])
def test_student_kernel_may_not_shadow_builtin_names(name):
    """A kernel called exec would let the first line of another, which is read before it, call Python's own."""
    first = "@triton.jit\ndef f(x=exec('import os')):\n    pass\n"
    with pytest.raises(NotAllowed, match="is called"):
        listing.program({"f": first, name: f"@triton.jit\ndef {name}(x):\n    return x\n"}, {})


def test_student_kernel_may_use_the_triton_language():
    pytest.importorskip("triton", reason="Triton is not installed")
    for line in ("x = tl.math.exp2(l).to(tl.float32).to(l.dtype.element_ty)", "y: tl.constexpr = triton.cdiv(3, 2)"):
        assert line in listing.kernel("f", f"@triton.jit\ndef f(l, B: tl.constexpr):\n    {line}\n", {"f"})


# Gradescope ---------------------------------------------------------------------------------------------------------


def test_gradescope_package_has_all_required_files(tmp_path):
    assert command.main(["gradescope", str(tmp_path / "made"), "--only", "3"]) == 0
    with zipfile.ZipFile(tmp_path / "made" / "3_backward.zip") as archive:
        archive.extractall(tmp_path / "source")
    text = "import fa2_studio.course\nfrom checks import tiled, gradients, break_it\nprint(tiled.io_model.__file__)"
    env = os.environ | {"PYTHONPATH": str(tmp_path / "source")}
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.startswith(str(tmp_path / "source")), done.stderr


def test_gradescope_package_grades_in_the_platforms_layout(tmp_path):
    """source/ unpacked, submission/, results/: the score, and for each step what the checks said, hints included."""
    if os.getuid() == 0 and not sandbox.can_switch_user("user", Path(sys.prefix)):
        pytest.skip("no other user can read this Python, and the platform's container grades as another one")
    assert command.main(["gradescope", str(tmp_path / "made"), "--only", "1"]) == 0
    home = tmp_path / "autograder"
    with zipfile.ZipFile(tmp_path / "made" / f"{FIRST.name}.zip") as archive:
        archive.extractall(home / "source")
        assert all(archive.getinfo(name).external_attr >> 16 & 0o111 for name in ("setup.sh", "run_autograder"))
        assert "notebooks/assignments/2_forward.ipynb" not in archive.namelist()
    run = (home / "source" / "run_autograder").read_text()
    assert f"fa2_studio.course.handout {FIRST.name}" in run
    write_book(submission(answers={"merge": "def merge(a, b): return a"}), home / "submission", "my homework.ipynb")
    text = f"from fa2_studio.course.handout import *\ngrade_on_gradescope({FIRST.name!r}, Path({str(home)!r}))"
    env = os.environ | {"PYTHONPATH": str(home / "source")}
    done = subprocess.run([sys.executable, "-c", text], cwd=home / "source", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((home / "results" / "results.json").read_text())
    assert found["score"] == 9.75 == sum(test["score"] for test in found["tests"])
    merge = next(test for test in found["tests"] if test["name"] == "merge")
    assert merge["max_score"] == 3 and "hint" in merge["output"] and "NOT YET" in merge["output"]
