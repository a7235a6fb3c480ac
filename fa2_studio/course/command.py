"""`fa2-lab course`: build, bundle, grade and compare assignments."""

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

NEEDS = ("jupytext", "nbformat", "tqdm")


def main(argv: list[str]) -> int:
    """Run one command of the course and return the exit status.

    The status is 0 on success, 1 if the grader cannot grade here, and 2 if the arguments are wrong.
    """
    arguments = argument_parser().parse_args(argv)
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        print(f"course {arguments.command} needs {', '.join(missing)}: pip install 'fa2-lab[course]'", file=sys.stderr)
        return 1
    return arguments.run(arguments)


def argument_parser() -> argparse.ArgumentParser:
    """Return the argument parser for all commands."""
    top = argparse.ArgumentParser(prog="fa2-lab course", description="Assignments that grade themselves.")
    commands = top.add_subparsers(title="commands", metavar="command", dest="command", required=True)
    bundle = commands.add_parser(
        "bundle", help="write what students get: notebooks and visible checks, without solutions"
    )
    bundle.add_argument("folder", type=Path, nargs="?", default=Path("bundle"))
    bundle.add_argument(
        "--wheel", type=Path, help="the package as a file (fa2_lab-….whl), which is put into each bundle"
    )
    grade = commands.add_parser("grade", help="grade a folder that contains one folder per student")
    grade.add_argument("folder", type=Path)
    grade.add_argument("--out", type=Path, default=Path("graded"), help="the folder for the tables and for feedback/")
    grade.add_argument(
        "--jobs", type=int, default=1, help="how many notebooks are graded at a time, each on its own core"
    )
    grade.add_argument(
        "--again",
        nargs="+",
        default=[],
        metavar="STUDENT",
        help="grade only these students, even if they have been graded",
    )
    grade.add_argument("--trust", action="store_true", help="run students' code without a sandbox")
    grade.add_argument("--cell-seconds", type=float, default=60, help="the limit for a cell or a step, in seconds")
    grade.add_argument("--notebook-seconds", type=float, default=300, help="the limit for a notebook, in seconds")
    grade.add_argument("--memory-mb", type=int, default=4096, help="the memory for a notebook, in MB")
    similar = commands.add_parser("similar", help="list pairs of submissions that share lines which few others have")
    similar.add_argument("folder", type=Path)
    scope = commands.add_parser("gradescope", help="write an autograder package for Gradescope for each assignment")
    scope.add_argument("folder", type=Path, nargs="?", default=Path("gradescope"))
    build = commands.add_parser("build", help="rebuild the notebooks of this checkout from their texts")
    for one in (bundle, grade):
        one.add_argument("--roster", type=Path, help="a CSV file with the columns folder, id and name")
        one.add_argument(
            "--secret", type=Path, help="a file with any text; with it, each id of the roster gets its own numbers"
        )
    for one in (bundle, grade, scope, similar):
        one.add_argument("--only", nargs="+", default=[], help="names or numbers of assignments, such as 2")
    runs = {bundle: run_bundle, grade: run_grade, scope: run_gradescope, build: run_build}
    runs[similar] = run_similar
    for one, run in runs.items():
        one.set_defaults(run=run)
    return top


def chosen_assignments(names: list[str]) -> list:
    """Return the assignments with these names or numbers, or all assignments if none is named."""
    from fa2_studio.course import notebooks

    return [notebooks.find_assignment(name) for name in dict.fromkeys(names)] if names else notebooks.ASSIGNMENTS


def secret_of(arguments) -> str:
    """Return the secret read from its file, or "" if no file is given."""
    if arguments.secret is None:
        return ""
    if arguments.roster is None:
        raise ValueError(
            "--secret: it takes --roster as well, because a student's numbers depend on the secret and on the id"
        )
    try:
        return arguments.secret.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--secret: {arguments.secret}: {error}; it takes a file with any text in it") from error


def run_build(arguments) -> int:
    from fa2_lab.tools import files
    from fa2_studio.course import build

    files.checkout("course build")
    print("\n".join(str(path) for path in build.build_notebooks()))
    return 0


def run_bundle(arguments) -> int:
    from fa2_studio.course import handout, results

    people, assignments = results.read_roster(arguments.roster), chosen_assignments(arguments.only)
    homes = handout.write_bundle(arguments.folder, assignments, people, secret_of(arguments), arguments.wheel)
    print("\n".join(str(home) for home in homes))
    if people and arguments.secret is None:
        print("note: without --secret, all bundles have the same numbers", file=sys.stderr)
    if arguments.wheel is None:
        print("note: without --wheel, the bundles contain no fa2_lab-….whl for students to install", file=sys.stderr)
    return 0


def run_gradescope(arguments) -> int:
    from fa2_studio.course import handout

    print(
        "\n".join(str(path) for path in handout.write_gradescope(arguments.folder, chosen_assignments(arguments.only)))
    )
    return 0


def run_similar(arguments) -> int:
    from fa2_studio.course import results, similar

    pairs = [
        (a, pair) for a in chosen_assignments(arguments.only) for pair in similar.similar_pairs(arguments.folder, a)
    ]
    for assignment, pair in pairs:
        names = f"{results.safe_for_spreadsheet(pair.first)} and {results.safe_for_spreadsheet(pair.second)}"
        print(f"{assignment.name}: {names} share {len(pair.shared)} of {pair.of} lines, such as {pair.shared[0][:80]}")
    if not pairs:
        print("no two submissions share such lines")
    return 0


def run_grade(arguments) -> int:
    from fa2_studio.course import grade, results, sandbox

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 1 <= arguments.jobs <= cores:
        raise ValueError(f"--jobs: got {arguments.jobs}; it takes 1 to {cores}, the cores of this machine")
    for name in ("cell_seconds", "notebook_seconds", "memory_mb"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(arguments, name)}; it takes a positive number")
    limits = sandbox.Limits(arguments.cell_seconds, arguments.notebook_seconds, arguments.memory_mb)
    people = results.read_roster(arguments.roster)
    settings = grade.GradingSettings(
        limits, arguments.jobs, secret_of(arguments), people, tuple(arguments.again), arguments.trust
    )
    kind = "" if arguments.trust else sandbox.sandbox_kind()
    print(f"{'WARNING: ' * arguments.trust}sandbox: {sandbox.describe_sandbox(kind)}", file=sys.stderr)
    try:
        graded, faults = grade.grade_folder(
            arguments.folder, arguments.out, chosen_assignments(arguments.only), settings
        )
    except grade.GraderError as fault:
        print(f"fa2-lab course: {fault}", file=sys.stderr)
        return 1
    homes, absent = grade.folders_by_student(arguments.folder, people), 0
    for g in (g for g in graded if g.student in homes):
        remarks = results.safe_for_spreadsheet(" | ".join(g.sentences))[:100]
        absent += g.is_absent and "but there is" not in remarks
        if not g.is_absent or "but there is" in remarks:
            score = results.points_text(g) or "-"
            print(
                f"{results.safe_for_spreadsheet(g.student):20} {g.assignment:20} {score:>6} of {g.full:<4g} {remarks}"
            )
    if absent:
        print(f"nothing was handed in for {absent} other pairs of a student and an assignment (scores.csv)")
    if ghosts := sorted({g.student for g in graded} - set(homes)):
        names = ", ".join(map(results.safe_for_spreadsheet, ghosts))
        print(
            f"WARNING: {arguments.out} also has results of {names}, without a folder in {arguments.folder}. "
            "If they are old, delete their folders in records/ and feedback/, and grade again",
            file=sys.stderr,
        )
    if others := [f"{results.safe_for_spreadsheet(g.student)} {g.assignment}" for g in graded if g.other_numbers]:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        print(
            "WARNING: these notebooks have other numbers than those they are graded with: "
            f"{', '.join(others[:5])}{more}. "
            "Either the roster does not list the folder under the right id, or the bundles were made with another "
            "--secret or other ids, or the student handed in another student's file",
            file=sys.stderr,
        )
    print(f"{arguments.out}: scores.csv, canvas.csv, moodle.csv and feedback/")
    for fault in faults:
        print(f"fa2-lab course: {fault}", file=sys.stderr)
    return 1 if faults else 0
