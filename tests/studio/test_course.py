"""The assignments: solutions get full marks, empty notebooks none, and wrong answers their points and feedback."""

import json
import re

import pytest

pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'fa2-lab[course]'")
import nbformat
import numpy as np
from checks import guard, softmax, truth
from checks.cells import described
from checks.report import Report
from course_class import grade_books, needs_interpreter, run_checks
from course_costs import grade_in_process, with_mistake
from course_wrong import GAMED_ANSWERS, MISTAKES, WRONG_ANSWERS

from fa2_studio.course import notebooks, sandbox, seeds
from fa2_studio.course.build import notebook_from_text
from fa2_studio.course.notebooks import TEXT, grade_id, source_notebook

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as wrong kernels give
ASSIGNMENTS = {a.name: a for a in notebooks.ASSIGNMENTS}
for_each_assignment = pytest.mark.parametrize("name", ASSIGNMENTS)
FIRST_STEPS = {  # the steps that tell of a mistake, if no cell is named. In 5 and 6, all steps are quick
    "1": ["update", "merge", "finalize"],
    "2": ["kind", "row_block"],
    "3": ["row_dots", "tile_gradients", "backward"],
    "4": ["one_tile", "loop"],
    "7": ["tile", "rows"],
    "9": ["right"],
}


def only_steps(notebook, steps):
    """Return the notebook with only the cells of some steps, for assignments whose steps are independent."""
    names = {"setup", "hanging", "racing", "ragged", "forward", "kernel", "sizes"}
    names |= {*steps, *(f"test_{step}" for step in steps)}
    notebook.cells = [cell for cell in notebook.cells if grade_id(cell) in names]
    return notebook


# Sources and their twins ------------------------------------------------------------------------------------------


@for_each_assignment
def test_assignment_matches_its_source(name):
    pytest.importorskip("jupytext", reason="jupytext is not installed: pip install 'fa2-lab[dev]'")
    built, committed = notebook_from_text(TEXT / f"{name}.py"), source_notebook(ASSIGNMENTS[name])
    assert built == committed, "run `python -m fa2_lab course build`"
    nbformat.validate(committed)


@for_each_assignment
def test_assignment_source_names_its_requirements(name):
    notebook = source_notebook(ASSIGNMENTS[name])
    text = notebook.cells[0].source
    for part in ("| step | points |", "*Time: ", ". Before this: ", ". Hardware: ", "**How it is graded.**"):
        assert part in text, part
    assert "off limits" in text.lower() and all(f"`{points}`" in text for points in ASSIGNMENTS[name].gives)
    printed = [float(points) for points in re.findall(r"^\| \d\. .*\| ([\d.]+)", text, re.MULTILINE)]
    points = list(notebooks.points_by_step(notebook).values())
    assert printed == points, "the table of points is not that of the test cells"
    assert all(c.cell_type == "code" for c in notebook.cells if grade_id(c))


# Solved, empty, wrong -----------------------------------------------------------------------------------------------


@for_each_assignment
def test_assignment_solution_scores_full_marks(name, tmp_path):
    """With the sandbox, if there is one. `grade` runs the same check before it grades any submission."""
    for need in ASSIGNMENTS[name].needs:
        pytest.importorskip(need, reason=f"{need} is not installed")
    books = {"own": source_notebook(ASSIGNMENTS[name])}
    solved = grade_books(tmp_path, books, sandbox.sandbox_kind(), name=name)["own"]
    lost = [output for *_, output in solved.page if "NOT YET" in output]
    assert solved.score == solved.full and not solved.sentences, (solved.sentences, lost)


@for_each_assignment
def test_empty_assignment_scores_nothing(name):
    needs_interpreter(name)
    points, printed = run_checks(notebooks.student_version(source_notebook(ASSIGNMENTS[name])))
    assert set(points.values()) == {0.0} and "not written yet" in printed and "ALARM" not in printed, printed


@pytest.mark.parametrize("number", "1234679")
def test_assignment_solution_scores_full_marks_with_any_seed(number):
    """The planted bugs of 8, which also has other answers with other seeds, have tests of their own."""
    needs_interpreter(number)
    seed, book = 398319954, source_notebook(notebooks.find_assignment(number))
    original = seeds.with_day(seeds.with_seed(book, seed), seed, "2030-01-01")
    solved = grade_in_process(number, original, original)
    assert solved.got == solved.most, [output for *_, output in solved.page if "NOT YET" in output]


WRONG_IDS = [f"{w[0]}: {[*w[1]]}"[:60] for w in WRONG_ANSWERS]


@pytest.mark.parametrize(("number", "pairs", "keeps", "messages"), WRONG_ANSWERS, ids=WRONG_IDS)
def test_wrong_answer_gets_its_points_and_feedback(number, pairs, keeps, messages):
    needs_interpreter(number)
    book = with_mistake(number, pairs)
    points, printed = run_checks(only_steps(book, keeps) if number in "4789" else book)
    flat = re.sub(r"\s+", " ", printed)
    for part in messages:
        assert re.sub(r"\s+", " ", part) in flat, printed
    assert {step: points[f"test_{step}"] for step in keeps} == pytest.approx(keeps, abs=0.01), printed


@pytest.mark.parametrize(("number", "cell", "pairs", "hint"), MISTAKES, ids=[f"{x[0]}: {x[3]}"[:50] for x in MISTAKES])
def test_common_mistake_is_named_in_feedback(number, cell, pairs, hint):
    needs_interpreter(number)
    book = with_mistake(number, pairs, cell)
    steps = [cell] if number in "478" and cell else FIRST_STEPS.get(number)
    _, printed = run_checks(only_steps(book, steps) if steps else book)
    assert hint in re.sub(r"\s+", " ", printed), printed


KIND_MISTAKE = {"if not causal or col_end - 1 <= row + offset": "if True"}


@pytest.mark.parametrize(
    ("number", "pairs", "step", "message", "wrong_message"),
    [
        ("3", {"tau * (ds @ k_j)": "ds @ k_j"}, "tile_gradients", "dQ, which is τ dS K", "P has to be 0 in a row"),
        ("2", KIND_MISTAKE, "kind", "Every tile is called", "wrong sign"),
        ("1", {"alpha * l +": "l +", "alpha[:, None] * o +": "o +"}, "update", "l is not rescaled", "m can be any"),
    ],
)
def test_special_case_check_does_not_blame_another_mistake(number, pairs, step, message, wrong_message):
    _, printed = run_checks(only_steps(with_mistake(number, pairs), [step]))
    assert message in printed and wrong_message not in printed, printed


@pytest.mark.parametrize("wrong", ["s = q_i @ k_j.T", "s = tau * (q_i @ k_j.reshape(k_j.shape[::-1]))"])
def test_smallest_failing_problem_is_reported_with_its_right_answer(wrong):
    pairs = {"s = tau * (q_i @ k_j.T)": wrong}
    _, printed = run_checks(only_steps(with_mistake("2", pairs), ["kind", "row_block"]))
    pattern = r"smallest Q = (.*), K = (.*), V = (.*), tau = (.*), tiles .*: O should be (.*), but .* makes it (.*)"
    Q, K, V, tau, right, other = re.search(pattern, printed).groups()
    Q, K, V, right, other = (np.array(json.loads(x), dtype=float) for x in (Q, K, V, right, other))
    assert np.allclose(truth.attended(Q, K, V, scale=float(tau))["O"], right, atol=1e-3)
    assert not np.allclose(right, other, atol=0.1) and len(Q) == 1 and len(K) <= 3


@pytest.mark.parametrize("name", GAMED_ANSWERS)
def test_answer_that_games_the_checks_loses_points(name):
    number, pairs, most = GAMED_ANSWERS[name]
    got = grade_in_process(number, with_mistake(number, pairs))
    assert got.score < most, got.page


def test_nondeterministic_student_test_gets_no_points(capsys):
    """Such as one that draws without a seed. Here each thing is refused once."""
    seen = set()

    def coin(thing):
        assert thing in seen or seen.add(thing)

    report = softmax.caught_minus_alarms(Report("own"), coin, {"wrong": 1}, {"right": 2}, "hint")
    assert report.passed == 0 and "two answers about" in capsys.readouterr().out


def test_student_test_that_times_out_on_right_versions_loses_their_share(capsys):
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


def test_student_function_cannot_print_or_change_inputs(capsys):
    x = np.zeros(3)

    def careless(x):
        print("hello")
        x[:] = np.log(np.zeros(3))
        return x

    assert np.isneginf(guard.call(careless, x)).all() and (x == 0).all()
    assert capsys.readouterr().out.strip().startswith("note: careless changed an argument in place")


def test_feedback_names_errors_by_their_public_type():
    """Python 3.13 has a SyntaxError of a private kind."""
    private = type("_IncompleteInputError", (SyntaxError,), {})
    assert described(private("incomplete input"))[0] == "SyntaxError"
    assert described(KeyError("x"))[:2] == ("KeyError", "'x'")
