"""`fa2-lab course`: build, release, bundle, check, grade, leaderboard."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDS = {
    "build": ("jupytext", "nbformat"),
    "release": ("nbgrader", "nbformat"),
    "bundle": ("nbgrader", "nbformat", "yaml"),
    "leaderboard": ("nbformat",),
    "grade": ("nbgrader", "nbformat", "IPython", "yaml"),
    "check": ("nbformat", "IPython"),
}


def main(argv: list[str]) -> int:
    """0: all well. 1: the grader is not in order, or a checked notebook is not full. 2: the call makes no sense."""
    options = parser().parse_args(argv)
    missing = [name for name in NEEDS[options.command] if find_spec(name) is None]
    if missing:
        print(f"course {options.command} needs {', '.join(missing)}: pip install 'fa2-lab[course]'", file=sys.stderr)
        return 1
    return options.run(options)


def parser() -> argparse.ArgumentParser:
    """The commands and what each takes."""
    top = argparse.ArgumentParser(prog="fa2-lab course", description="Assignments that grade themselves.")
    commands = top.add_subparsers(title="commands", metavar="command", dest="command", required=True)
    check = commands.add_parser("check", help="run the checks of one notebook; what a student runs alone")
    check.add_argument("notebook", type=Path)
    release = commands.add_parser("release", help="write the student versions: no solution, no hidden test")
    release.add_argument("folder", type=Path, nargs="?", default=Path("release"))
    grade = commands.add_parser("grade", help="grade a folder that has a folder for each student")
    grade.add_argument("folder", type=Path)
    grade.add_argument("--out", type=Path, default=Path("graded"), help="where scores.csv and feedback/ go")
    grade.add_argument("--jobs", type=int, default=1, help="notebooks graded at a time")
    grade.add_argument("--class", type=Path, dest="about", help="a YAML file with students, due dates, late rules")
    grade.add_argument("--again", nargs="+", default=[], metavar="STUDENT", help="grade these, and only these, again")
    bundle = commands.add_parser("bundle", help="write what a class gets: seeded notebooks, AGENTS.md, no solution")
    bundle.add_argument("folder", type=Path, nargs="?", default=Path("bundle"))
    bundle.add_argument("--class", type=Path, dest="about", help="a YAML file with students and a secret for seeds")
    board = commands.add_parser("leaderboard", help="rank the cards of assignment 9 in a folder that was graded")
    board.add_argument("folder", type=Path, nargs="?", default=Path("graded"))
    for one in (release, bundle, grade):
        one.add_argument("--only", nargs="+", default=[], help="names or numbers of assignments, such as 2")
    for one in (check, grade):
        one.add_argument("--cell-seconds", type=float, default=60, help="time for one cell")
        one.add_argument("--notebook-seconds", type=float, default=300, help="time for one notebook")
        one.add_argument("--memory-mb", type=int, default=4096, help="memory for one notebook; 0 for no limit")
    build = commands.add_parser("build", help="renew the nbgrader sources from their text twins")
    bundle.set_defaults(run=run_bundle)
    board.set_defaults(run=run_leaderboard)
    for one, run in ((check, run_check), (release, run_release), (grade, run_grade), (build, run_build)):
        one.set_defaults(run=run)
    return top


def chosen(names: list[str]) -> list:
    """The assignments named in full or by number; all of them when none is named."""
    from fa2_studio.course.notebooks import written

    known = written()
    if not known:
        raise ValueError("there are no assignments beside this package; work in a checkout of the repository")
    for name in names:
        if not any(name in (a.name, a.name[:1]) for a in known):
            raise ValueError(f"assignment: got {name!r}; it takes one of {', '.join(a.name for a in known)}")
    return [a for a in known if not names or a.name in names or a.name[:1] in names]


def limits(options):
    from fa2_studio.course.sandbox import Limits

    for name in ("cell_seconds", "notebook_seconds", "memory_mb"):
        if getattr(options, name) < (0 if name == "memory_mb" else 1):
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(options, name)}; it takes a positive number")
    return Limits(options.cell_seconds, options.notebook_seconds, options.memory_mb)


def run_build(options) -> int:
    from fa2_lab.tools import files
    from fa2_studio.course.twins import build

    files.checkout("course build")
    print("\n".join(str(path) for path in build()))
    return 0


def run_release(options) -> int:
    from fa2_studio.course.notebooks import release

    for path in release(options.folder, chosen(options.only)):
        print(path)
    return 0


def run_check(options) -> int:
    from fa2_studio.course.grade import check_alone

    graded = check_alone(options.notebook, limits(options))
    for sentence in graded.sentences:
        print(f"note: {sentence}")
    for _, code, said in graded.page:
        if said and not code:
            print(said)
    print(f"{graded.score:g} of {graded.full:g} points by the checks that you can see")
    return 0 if graded.score >= graded.full else 1


def run_grade(options) -> int:
    from fa2_studio.course import due, grade, results, sandbox

    if options.jobs < 1:
        raise ValueError(f"--jobs: got {options.jobs}; it takes a positive number")
    assignments = chosen(options.only)
    about = due.read(options.about, [a.name for a in assignments]) if options.about else due.Class()
    how = grade.Grading(limits(options), options.jobs, about, tuple(options.again))
    sandbox.keep_to_oneself()
    try:
        graded = grade.grade_folder(options.folder, options.out, assignments, how)
    except grade.GraderError as fault:
        print(f"fa2-lab course: {fault}", file=sys.stderr)
        return 1
    for g in graded:
        said = results.printable(" | ".join(filter(None, [g.late, *g.sentences])))[:100]
        print(f"{results.printable(g.student):20} {g.assignment:20} {g.score:6g} of {g.full:<4g} {said}")
    print(f"{options.out / 'scores.csv'}, {options.out / 'scores_wide.csv'} and {options.out / 'feedback'}")
    return 0


def run_bundle(options) -> int:
    from fa2_studio.course import kit

    students, secret = kit.class_of(options.about)
    for home in kit.bundle(options.folder, chosen(options.only), students, secret):
        print(home)
    return 0


def run_leaderboard(options) -> int:
    from fa2_studio.course import kit

    for place, card in enumerate(kit.cards(options.folder), start=1):
        time = "" if card.milliseconds is None else f"{card.milliseconds:9.3f} ms"
        print(f"{place:3}  {card.student:20}{card.instructions:7.2f} instructions a score{time}")
    print(kit.leaderboard(options.folder))
    return 0
