"""A class: seeds for each student, and the bundle that students get."""

import pytest

pytest.importorskip("nbgrader", reason="nbgrader is not installed: pip install 'fa2-lab[course]'")
from course_play import played

from fa2_lab.studio.course import detective, predict, seeds
from fa2_lab.studio.course.notebooks import grade_id, is_solution, source, written

ASSIGNMENTS = {a.name: a for a in written()}


def cells(name: str, *kept: str, seed: int = 0):
    """The solved notebook of an assignment for a seed, with its set-up and some steps alone."""
    notebook = seeds.seeded(source(ASSIGNMENTS[name]), seed)
    names = {"setup", *seeds.WRITTEN, *kept, *(f"test_{step}" for step in kept)}
    notebook.cells = [cell for cell in notebook.cells if grade_id(cell) in names]
    return notebook


# Seeds ------------------------------------------------------------------------------------------------------------


def test_a_seed_is_a_student_s_own_and_needs_the_secret():
    drawn = {seeds.seed_of(f"student {n}", "autumn") for n in range(200)}
    assert len(drawn) == 200 and min(drawn) > 0
    assert seeds.seed_of("ada", "autumn") == seeds.seed_of("ada", "autumn") != seeds.seed_of("ada", "spring")
    assert seeds.seed_of("ada", "") == 0


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_seed_0_is_the_notebook_as_it_stands_and_no_seed_touches_an_answer(name):
    original = source(ASSIGNMENTS[name])
    assert seeds.seeded(original, 0) == original
    mine = seeds.seeded(original, 5)
    assert [c.source for c in mine.cells if is_solution(c)] == [c.source for c in original.cells if is_solution(c)]
    text = "".join(c.source for c in original.cells if grade_id(c))
    assert (mine != original) == ("seed=0" in text)


@pytest.mark.parametrize("seed", range(8))
def test_every_seed_asks_for_other_numbers_by_hand(seed):
    points, printed = played(cells("6_read_the_machine", "by_hand", seed=seed))
    assert points == {"test_by_hand": 2.0}, printed
    answers = played(cells("6_read_the_machine", "by_hand"))[1]
    assert len({predict.question(other) for other in range(8)}) == 8 and "ok       waves on an A100" in answers


# Detective cases --------------------------------------------------------------------------------------------------


def answer(case: detective.Case, slip: detective.Slip) -> dict:
    """What a student who has seen through a slip returns."""
    line = sorted(detective.wrong_lines(case.path, slip))[0]
    mend = [(slip.wrong.rstrip("\n"), slip.right.rstrip("\n"))]
    return dict(line=line, cause=slip.cause, mend=mend, shows=slip.shows, hides=slip.hides)


@pytest.mark.parametrize(
    ("step", "slip"),
    [("hang", slip) for slip in detective.HANGS] + [("race", slip) for slip in detective.RACES],
    ids=lambda x: getattr(x, "cause", x),
)
def test_every_planted_slip_of_the_pipeline_can_be_found_mended_and_proven(step, slip, capsys):
    found = answer(detective.IN_MODEL, slip)
    report = detective.judge(step, detective.IN_MODEL, slip, lambda: found, seed=3)
    assert report.passed == report.total == 5, capsys.readouterr().out
    slips = dict(line="yield qk.done()", cause="corner", mend=[], shows=slip.hides, hides=slip.shows)
    for wrong in slips.items():
        report = detective.judge(step, detective.IN_MODEL, slip, lambda wrong=wrong: found | dict([wrong]), seed=3)
        assert report.passed == 4, f"{wrong}: {capsys.readouterr().out}"


def test_every_slip_of_the_kernel_stands_in_it_once_and_all_slips_come_up():
    for slip in detective.WRONG:
        assert detective.wrong_lines(detective.KERNEL, slip) and slip.cause in detective.CAUSES
    for slips in (detective.HANGS, detective.RACES, detective.WRONG):
        drawn = [detective.planted(slips, seed) for seed in range(60)]
        assert {drawn.count(slip) for slip in slips} <= set(range(10, 31))
    assert detective.planted(detective.HANGS, 0) is detective.HANGS[0]


def test_the_cells_of_the_cases_are_those_of_seed_0_and_the_causes_are_told():
    text = {grade_id(c) or n: c.source for n, c in enumerate(source(ASSIGNMENTS["8_detective"]).cells)}
    assert {name: text[name] for name in ("hanging", "racing", "ragged")} == {
        name: seeds.WRITTEN[name](0) for name in ("hanging", "racing", "ragged")
    }
    everything = "\n".join(text.values())
    assert all(f"| `{cause}` | {words} |" in everything for cause, words in detective.CAUSES.items())
    for run in (detective.RUN, detective.SHAPE):
        assert all(f"`{name}={value}`" in everything for name, value in run.items())
