"""A class: seeds for each student, the bundle that students get, the leaderboard, tables and feedback pages."""

import csv
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("nbgrader", reason="nbgrader is not installed: pip install 'fa2-lab[course]'")
import nbformat
from course_play import played

from fa2_studio.course import climb, command, detective, judge, kit, predict, results, seeds
from fa2_studio.course.notebooks import FOLDER, grade_id, is_solution, source, written

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


# The bundle -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundled(tmp_path_factory):
    """The bundles of two students."""
    folder = tmp_path_factory.mktemp("class")
    (folder / "class.yaml").write_text("secret: autumn\nstudents: [ada, bob]\n", encoding="utf-8")
    assert command.main(["bundle", str(folder / "out"), "--class", str(folder / "class.yaml")]) == 0
    return folder / "out"


def test_a_bundle_has_every_assignment_and_asks_assistants_to_teach(bundled):
    for home in (bundled / "ada", bundled / "bob"):
        files = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
        assert files == {f"{name}/{name}.ipynb" for name in ASSIGNMENTS} | {"README.md", "AGENTS.md"}
        assert "teach, do not solve" in (home / "AGENTS.md").read_text(encoding="utf-8")


def test_a_bundle_holds_no_solution_and_no_hidden_test(bundled):
    marks = re.compile(r"### BEGIN (?:SOLUTION|HIDDEN TESTS)\n(.*?)### END", re.DOTALL)
    for name in ASSIGNMENTS:
        told = nbformat.read(bundled / "ada" / name / f"{name}.ipynb", 4)
        told = {line.strip() for cell in told.cells for line in cell.source.splitlines()}
        cells = [cell.source for cell in source(ASSIGNMENTS[name]).cells]
        shown = {line.strip() for text in cells for line in marks.sub("", text).splitlines()}
        secret = {line.strip() for text in cells for part in marks.findall(text) for line in part.splitlines()} - shown
        assert len(secret) > 10 and not {line for line in secret if len(line) > 6} & told, name


def test_bundles_differ_where_seeds_speak_and_nowhere_else(bundled):
    for name in ASSIGNMENTS:
        ada, bob = (nbformat.read(bundled / student / name / f"{name}.ipynb", 4) for student in ("ada", "bob"))
        differ = {grade_id(a) for a, b in zip(ada.cells, bob.cells, strict=True) if a.source != b.source}
        spoken = {grade_id(c) for c in source(ASSIGNMENTS[name]).cells if "seed=0" in c.source and grade_id(c)}
        assert spoken <= differ <= spoken | set(seeds.WRITTEN), name
        mine = seeds.seeded(source(ASSIGNMENTS[name]), seeds.seed_of("ada", "autumn"))
        tests = {grade_id(c): c.source for c in mine.cells if grade_id(c).startswith("test_")}
        assert {f"seed={seeds.seed_of('ada', 'autumn')}" in tests[test] for test in spoken} <= {True}, name


def test_a_student_checks_a_notebook_of_the_bundle(bundled, tmp_path, capsys):
    name = "6_read_the_machine"
    path = bundled / "ada" / name / f"{name}.ipynb"
    notebook, solved = nbformat.read(path, 4), {grade_id(c): c.source for c in source(ASSIGNMENTS[name]).cells}
    for cell in notebook.cells:
        if grade_id(cell) == "by_hand":
            cell.source = solved["by_hand"]
    mine = tmp_path / path.name
    nbformat.write(notebook, mine)
    assert command.main(["check", str(mine)]) == 1
    said = capsys.readouterr().out
    assert (
        "by_hand: 2 of 2 points" in said and "waves: 0 of 2 points" in said and "2 of 20 points by the checks" in said
    )


@pytest.mark.parametrize("students", ["[../ada]", "[a/b]", "ada", "[]"])
def test_a_class_that_cannot_be_is_refused_by_name(students, tmp_path):
    (tmp_path / "class.yaml").write_text(f"students: {students}\n", encoding="utf-8")
    options = SimpleNamespace(folder=tmp_path / "out", about=tmp_path / "class.yaml", only=["1"])
    with pytest.raises(ValueError, match="students: got "):
        command.run_bundle(options)


def test_what_the_assistants_are_told_of_the_package_is_there():
    for name in re.findall(r"`(fa2_lab/[a-z_/]+)`", (FOLDER / "AGENTS.md").read_text(encoding="utf-8")):
        assert FOLDER.parents[1].joinpath(name).is_dir(), name


# The leaderboard --------------------------------------------------------------------------------------------------


def test_the_leaderboard_ranks_what_the_checks_said_and_not_what_a_student_printed(tmp_path, capsys):
    def page(student: str, *parts: str) -> None:
        home = tmp_path / "feedback" / student
        home.mkdir(parents=True)
        (home / f"{kit.NINTH}.html").write_text("".join(parts), encoding="utf-8")

    def card(x: float, copies: int = 8) -> str:
        return f"<pre>  {climb.CARD} {x:.2f} instructions a score, 127 registers, {copies} copies in a round</pre>"

    page("ada", "<h2>compiled: 5 of 5</h2>", card(9.25), "<h2>gpu: 0 of 0</h2><pre></pre>")
    page("bob", "<h2>compiled: 2 of 5</h2>", card(16.4), "<h2>gpu: 2 of 0</h2><pre>  yours 0.700 ms, rung 03 2.1</pre>")
    page("eve", card(0.1), "<h2>compiled: 0 of 5</h2><pre>NOT YET</pre>", card(0.1))
    page("fay", "<h2>compiled: 2.5 of 5</h2>", card(11.5))
    page("gil", "<h2>compiled: 3.75 of 5</h2>", card(8.66, copies=0))
    assert [c.student for c in kit.cards(tmp_path)] == ["bob", "ada", "fay", "gil"]
    assert command.main(["leaderboard", str(tmp_path)]) == 0 and "9.25 instructions" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "leaderboard.csv").open(encoding="utf-8")))
    assert [(r["place"], r["student"], r["milliseconds"]) for r in rows] == [
        ("1", "bob", "0.7"),
        ("2", "ada", ""),
        ("3", "fay", ""),
        ("4", "gil", ""),
    ]
    with pytest.raises(ValueError, match="folder: got "):
        kit.cards(tmp_path / "feedback")


def test_the_card_that_a_check_prints_is_the_one_that_is_read(monkeypatch, capsys):
    monkeypatch.setattr(climb, "costs", lambda function: (9.25, 127, 8))
    assert climb.compiled(None).passed == 4
    assert kit.CARD.search(capsys.readouterr().out).groups() == ("9.25", "127", "8")


# Tables and pages -------------------------------------------------------------------------------------------------


MARKUP = "<script>1 < 2 & 3</script>"


def answered() -> judge.Graded:
    """A graded notebook in which markup stands wherever a student can write."""
    points = dict(most={"test_a": 4.0, "test_b": 3.0}, got={"test_a": 0.5, "test_b": 3.0})
    page = [["", MARKUP, MARKUP], ["test_b: 3 of 3", "", MARKUP]]
    return judge.Graded("ann & bo", "1_x", **points, sentences=[MARKUP, "second"], page=page)


def test_feedback_shows_what_a_student_wrote(tmp_path):
    results.keep(answered(), tmp_path)
    page = (tmp_path / "feedback" / "ann & bo" / "1_x.html").read_text(encoding="utf-8")
    assert "<script" not in page, "a student's markup is part of the page"
    escaped = "&lt;script&gt;1 &lt; 2 &amp; 3&lt;/script&gt;"
    assert page.count(escaped) == 4, "remark, answer, what it printed, and what the checks said"
    assert "ann &amp; bo: 1_x" in page and "ann & bo" not in page
    assert "3.5 of 7 points" in page and "b: 3 of 3" in page


def test_scores_csv_says_who_got_what_of_how_much(tmp_path):
    results.keep(answered(), tmp_path)
    results.write_scores(tmp_path)
    with open(tmp_path / "scores.csv", newline="", encoding="utf-8") as file:
        header, row = csv.reader(file)
    assert header == ["student", "assignment", "score", "max_score", "late", "steps", "remarks"]
    assert row == ["ann & bo", "1_x", "3.5", "7", "", "a 0.5/4; b 3/3", f"{MARKUP} | second"]


@pytest.mark.parametrize(
    "name, shown", [("=1+1", "'=1+1"), ("@x", "'@x"), ("a\nb", "a?b"), ("\udcff", "?"), ("Łuk", "Łuk")]
)
def test_names_are_no_formulas_and_have_no_line_breaks(name, shown):
    assert results.printable(name) == shown


def test_a_record_that_was_cut_short_counts_as_none(tmp_path):
    results.keep(answered(), tmp_path, "key")
    path = results.record_path(tmp_path, "ann & bo", "1_x")
    assert results.kept(path)[1] == "key" and results.kept(path)[0] == answered()
    path.write_text(path.read_text()[:-9])
    assert results.kept(path) == (judge.Graded("", ""), "")
