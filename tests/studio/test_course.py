"""The assignments: solutions score full marks, empty notebooks nothing, wrong answers what they deserve and why."""

import json
import re
from importlib.util import find_spec

import pytest

pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'fa2-lab[course]'")
import nbformat
import numpy as np
from checks import guard, softmax, truth
from checks.cells import described
from checks.report import Report
from course_costs import graded, slipped
from course_play import outcome as played
from course_wrong import GAINS, SLIPS, WRONG

from fa2_lab.kernels import interpreter
from fa2_studio.course import notebooks, seeds
from fa2_studio.course.notebooks import TEXT, grade_id, is_solution, source
from fa2_studio.course.texts import from_text

ASSIGNMENTS = {a.name: a for a in notebooks.ASSIGNMENTS}
each = pytest.mark.parametrize("name", ASSIGNMENTS)
TRITON = [a.name for a in ASSIGNMENTS.values() if "triton" in a.needs]


def versions(name: str) -> dict:
    """Return {key: notebook} for all versions of a Triton assignment that are graded here."""
    original = source(ASSIGNMENTS[name])
    books = {"solved": original, "empty": notebooks.student_version(original)}
    if name in SEEDED:
        books["seeded"] = steps_alone(seeds.seeded(original, SEED), SEEDED[name])
    for _, right, wrong, keeps, _ in (row for row in WRONG if row[0] == name):
        books[str(wrong)] = steps_alone(with_answer(name, right, wrong), keeps)
    return books


def beside(name: str):
    """Return an assignment as a parameter. Those in Triton run beside the tests, in a process with the interpreter."""
    return pytest.param(name, marks=pytest.mark.beside("course_play.py", name)) if name in TRITON else name


@pytest.fixture
def outcome(request):
    """Return a function that returns the points and the printed text of one version of an assignment."""

    def found(name: str, key: str, notebook=None) -> tuple[dict[str, float], str]:
        if name not in TRITON:
            return played(notebook)
        if missing := [need for need in ASSIGNMENTS[name].needs if find_spec(need) is None]:
            pytest.skip(f"{name} needs {', '.join(missing)}")
        if misfit := interpreter.version_conflict():
            pytest.skip(misfit)
        return request.getfixturevalue("rows")[0][key]

    return found


def steps_alone(notebook, steps):
    """Return the notebook with only the cells of some steps, for assignments whose steps are independent."""
    names = {"setup", "hanging", "racing", "ragged", "forward", "kernel", "sizes"}
    names |= {*steps, *(f"test_{step}" for step in steps)}
    notebook.cells = [cell for cell in notebook.cells if grade_id(cell) in names]
    return notebook


def with_answer(name: str, right: str, wrong: str):
    """Return the solved notebook of an assignment with one or several pieces of its solution replaced."""
    notebook = source(ASSIGNMENTS[name])
    for old, new in [(right, wrong)] if isinstance(right, str) else zip(right, wrong, strict=True):
        places = [cell for cell in notebook.cells if is_solution(cell) and old in cell.source]
        assert len(places) == 1, f"{old!r} stands in {len(places)} solutions of {name}"
        places[0].source = places[0].source.replace(old, new)
    return notebook


# Sources and their twins ------------------------------------------------------------------------------------------


@each
def test_source_and_twin_are_the_same(name):
    pytest.importorskip("jupytext", reason="jupytext is not installed: pip install 'fa2-lab[dev]'")
    made, kept = from_text(TEXT / f"{name}.py"), source(ASSIGNMENTS[name])
    assert made == kept, "run `python -m fa2_lab course build`"
    nbformat.validate(kept)


@each
def test_a_source_says_what_a_student_needs(name):
    notebook = source(ASSIGNMENTS[name])
    text = notebook.cells[0].source
    for part in ("| step | points |", "*Time: ", ". Before this: ", ". Hardware: ", "**How it is graded.**"):
        assert part in text, part
    assert "off limits" in text.lower() and all(f"`{given}`" in text for given in ASSIGNMENTS[name].gives)
    told = [float(points) for points in re.findall(r"^\| \d\. .*\| ([\d.]+)", text, re.MULTILINE)]
    given = list(notebooks.steps(notebook).values())
    assert told == given, "the table of points is not that of the test cells"
    assert all(c.cell_type == "code" for c in notebook.cells if grade_id(c))


# Solved, empty, wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [beside(name) for name in ASSIGNMENTS])
def test_the_solution_scores_full_marks(name, outcome):
    notebook = source(ASSIGNMENTS[name])
    points, printed = outcome(name, "solved", notebook)
    assert points == notebooks.steps(notebook), printed
    assert not re.search("note: .*Error", printed), "a cell that students are given fails"


@pytest.mark.parametrize("name", [beside(name) for name in ASSIGNMENTS])
def test_the_empty_student_version_scores_nothing(name, outcome):
    points, printed = outcome(name, "empty", notebooks.student_version(source(ASSIGNMENTS[name])))
    assert set(points.values()) == {0.0}, printed
    assert "not written yet" in printed and "ALARM" not in printed


SEED = 398319954  # of some student
SEEDED = {  # steps whose numbers and lengths are a student's own, with those that they need
    "1_online_softmax": ["update", "merge", "finalize"],
    "2_forward": ["kind", "row_block", "forward"],
    "3_backward": ["row_dots", "tile_gradients", "backward", "grouped", "dropped"],
    "4_triton_forward": ["one_tile", "loop", "full"],
    "7_triton_backward": ["row_dots", "tile", "columns", "rows", "one_pass"],
    "9_up_the_ladder": ["right", "meter"],
}


@pytest.mark.parametrize("name", [beside(name) for name in SEEDED])
def test_the_solution_scores_full_marks_with_a_student_s_own_seed(name, outcome):
    notebook = steps_alone(seeds.seeded(source(ASSIGNMENTS[name]), SEED), SEEDED[name])
    points, printed = outcome(name, "seeded", notebook)
    full = notebooks.steps(source(ASSIGNMENTS[name]))
    assert points == {f"test_{step}": full[f"test_{step}"] for step in SEEDED[name]}, printed


@pytest.mark.parametrize(
    ("name", "right", "wrong", "keeps", "said"),
    [pytest.param(*w, marks=getattr(beside(w[0]), "marks", ())) for w in WRONG],
    ids=[f"{w[0]}: {w[2]}"[:60] for w in WRONG],
)
def test_an_answer_gets_what_it_deserves(name, right, wrong, keeps, said, outcome):
    notebook = with_answer(name, right, wrong)
    points, printed = outcome(name, str(wrong), notebook)
    flat = re.sub(r"\s+", " ", printed)
    for part in said:
        assert re.sub(r"\s+", " ", part) in flat, printed
    assert {step: points[f"test_{step}"] for step in keeps} == pytest.approx(keeps, abs=0.01), printed


@pytest.mark.parametrize(("number", "pairs", "hint"), SLIPS, ids=[f"{row[0]}: {row[2]}"[:50] for row in SLIPS])
def test_a_slip_is_named(number, pairs, hint):
    name = notebooks.named(number).name
    steps = {
        "1": ["update", "merge", "finalize"],
        "2": ["kind", "row_block"],
        "3": ["row_dots", "tile_gradients", "backward"],
    }[number]
    _, printed = played(steps_alone(with_answer(name, list(pairs), list(pairs.values())), steps))
    assert re.search(rf"hint +.*{re.escape(hint)}", printed), printed


@pytest.mark.parametrize(
    ("number", "pairs", "step", "said", "false"),
    [
        ("3", {"tau * (ds @ k_j)": "ds @ k_j"}, "tile_gradients", "dQ, which is τ dS K", "P has to be 0 in a row"),
        ("1", {"alpha * l +": "l +", "alpha[:, None] * o +": "o +"}, "update", "l is not rescaled", "m can be any"),
    ],
)
def test_a_check_of_a_special_case_does_not_blame_it_for_another_slip(number, pairs, step, said, false):
    name = notebooks.named(number).name
    _, printed = played(steps_alone(with_answer(name, list(pairs), list(pairs.values())), [step]))
    assert said in printed and false not in printed, printed


@pytest.mark.parametrize("wrong", ["s = q_i @ k_j.T", "s = tau * (q_i @ k_j.reshape(k_j.shape[::-1]))"])
def test_the_smallest_problem_is_one_and_its_right_answer_is_right(wrong):
    pairs = {"s = tau * (q_i @ k_j.T)": wrong}
    _, printed = played(steps_alone(with_answer("2_forward", list(pairs), list(pairs.values())), ["kind", "row_block"]))
    said = r"smallest Q = (.*), K = (.*), V = (.*), tau = (.*), tiles .*: O should be (.*), but .* makes it (.*)"
    Q, K, V, tau, right, other = re.search(said, printed).groups()
    Q, K, V, right, other = (np.array(json.loads(x), dtype=float) for x in (Q, K, V, right, other))
    assert np.allclose(truth.dense(Q, K, V, float(tau), causal=False)[0], right, atol=1e-3)
    assert not np.allclose(right, other, atol=0.1) and len(Q) == 1 and len(K) <= 3


@pytest.mark.parametrize("name", GAINS)
def test_what_is_not_deserved_is_not_gained(name):
    number, pairs, most = GAINS[name]
    got = graded(number, slipped(number, pairs))
    assert got.score < most, got.page


def test_a_student_s_test_that_gives_two_answers_of_one_thing_is_worth_nothing(capsys):
    """Such as one that draws without a seed. Here each thing is refused once."""
    seen = set()

    def coin(thing):
        assert thing in seen or seen.add(thing)

    report = softmax.caught_minus_alarms(Report("own"), coin, {"wrong": 1}, {"right": 2}, "hint")
    assert report.passed == 0 and "two answers about" in capsys.readouterr().out


def test_a_student_s_test_that_is_too_late_on_right_things_is_told_so_and_loses_their_share(capsys):
    """Two wrong things are caught, and one of two right ones takes too long."""

    def slow(thing):
        assert thing > 0
        if thing > 1:
            raise guard.Stopped

    report = softmax.caught_minus_alarms(Report("own"), slow, {"w": -1, "x": 0}, {"y": 1, "z": 2}, "hint")
    printed = capsys.readouterr().out
    assert report.passed / report.total == 0.5
    assert "z is correct, but your test did not finish in time" in printed and "rejected" not in printed
    assert "accepted 1 of 2 correct versions in time" in printed


# Plain parts ----------------------------------------------------------------------------------------------------------


def test_what_a_student_s_function_prints_and_changes_stays_inside(capsys):
    x = np.zeros(3)

    def careless(x):
        print("hello")
        x[:] = np.log(np.zeros(3))
        return x

    assert np.isneginf(guard.call(careless, x)).all() and (x == 0).all()
    assert capsys.readouterr().out.strip().startswith("note: careless changed an argument in place")


def test_an_error_is_told_by_its_public_name():
    """Python 3.13 has a SyntaxError of a private kind."""
    private = type("_IncompleteInputError", (SyntaxError,), {})
    assert described(private("incomplete input"))[0] == "SyntaxError"
    assert described(KeyError("x"))[:2] == ("KeyError", "'x'")
