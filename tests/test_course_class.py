"""A class: seeds for each student, and the bundle that students get."""

import pytest

pytest.importorskip("nbgrader", reason="nbgrader is not installed: pip install 'fa2-lab[course]'")
from course_play import played

from fa2_lab.studio.course import predict, seeds
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
