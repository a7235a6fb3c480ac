"""Grading a folder of submissions: every notebook gets a score and a sentence, whatever is in it.

What an assignment keeps to, so that its checks can run in another process than the student's code:

1. `notebooks.ASSIGNMENTS` names it, the packages it needs, and in `gives` the modules of this package that its
   students may import, such as "fa2_lab.machine.chips". Everything else of the package is not there when it is graded.
2. Its checking module has one function for each step: `step(function, ...) -> Report`. A test cell names what the
   student wrote, `check.update(update)`, and ends in `report.points(4)`.
3. A check never calls what a student wrote. It asks `guard.call(function, *arguments)`. Arguments and results are
   numbers, strings, None, NumPy arrays, and tuples, lists and dicts of these. An argument may also be a function, or
   an object whose methods are called, such as a kernel under test: the student's code then calls back into the check.
4. What has to run beside the student's code, such as launching or compiling a kernel, is a function `probe(theirs,
   *arguments)` of `probes.py` (or of another module whose name begins with probes). It imports nothing that holds an
   answer and returns plain values. A check runs it by `guard.beside(probe, function, *arguments)`; or, where even the
   probe must be out of the student's reach, by `guard.apart(probe, function, *arguments)` in a process of its own.
5. Right values are computed in the checking module alone, from seeds that the test cell gives.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from fa2_lab.tools import files
from fa2_studio.course import due, judge, notebooks, results, rules, sandbox
from fa2_studio.course.judge import Graded, grade_notebook
from fa2_studio.course.notebooks import FOLDER, Assignment, as_cell, read, source, steps
from fa2_studio.course.sandbox import BOX, Limits, Room

NEVER = re.compile(r"^\.|^__|~$|\.ipynb_checkpoints")
MOST_FILES = 10_000  # of one student that are looked at
MARGIN = 90.0  # seconds that a grading process may take beyond its notebook's own
WITHOUT = {  # what a student's code can do where the box has no such wall
    "user": "act as you, as far as no other wall stands in the way",
    "network": "use the network",
    "files": "read solutions, and change or delete all that you can: grade a copy of the submissions",
    "processes": "see the other processes of this machine",
    "signals": "end processes that are yours, this one included",
}


class GraderError(RuntimeError):
    """The grader itself is not in order: nobody is graded."""


# One notebook, in a process that can be lost ------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One submission to be graded."""

    student: str
    assignment: str
    cells: list
    original: object
    stage: Path
    limits: Limits
    hidden: tuple[str, ...] = ()
    follow: bool = True


def run_task(task: Task, answer: Path) -> None:
    """Grade one submission and leave what came of it in a file. Runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sandbox.die_with_parent()
    sandbox.keep_to_oneself()

    def open_room() -> Room:
        return Room(task.stage, task.limits, task.hidden)

    graded = grade_notebook(task.original, task.cells, open_room, task.limits, task.follow)
    graded.student, graded.assignment = task.student, task.assignment
    files.write(answer, json.dumps(asdict(graded)))


def run_tasks(tasks: list[Task], jobs: int, done: Callable[[Task, Graded], None]) -> None:
    """Grade several at a time, each in a process of its own; `done` is told of each as it ends."""
    how = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    sandbox.become_subreaper()
    others = set(sandbox.children().get(os.getpid(), []))
    waiting, running = list(tasks), {}
    with tempfile.TemporaryDirectory(prefix="fa2-course-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    task = waiting.pop(0)
                    answer = Path(folder, f"{len(waiting)}.json")
                    process = how.Process(target=run_task, args=(task, answer))
                    process.start()
                    running[process] = (task, answer, time.monotonic() + 2 * task.limits.notebook_seconds + MARGIN)
                multiprocessing.connection.wait([p.sentinel for p in running], timeout=1.0)
                for process in [p for p, (_, _, until) in running.items() if ended(p, until)]:
                    task, answer, _ = running.pop(process)
                    end_strays(others | {p.pid for p in running})
                    done(task, answered(task, answer))
        finally:
            for process in running:
                process.kill()
                process.join()
            end_strays(others)


def ended(process, until: float) -> bool:
    """Whether a process is over; one whose time is up is made so."""
    if process.is_alive() and time.monotonic() > until:
        process.kill()
        process.join()
    return not process.is_alive()


def answered(task: Task, answer: Path) -> Graded:
    """What a grading process found, or that it was lost."""
    graded, _ = results.kept(answer)
    with suppress(OSError, ValueError, TypeError):
        graded = Graded(**json.loads(answer.read_text(encoding="utf-8")))
        answer.unlink()
        return graded
    sentence = "the grading of this notebook did not come to an end; grade it alone to see why"
    return Graded(task.student, task.assignment, steps(task.original), sentences=[sentence])


def end_strays(known: set) -> None:
    """End what a submission left behind: children of this process that are none of its own."""
    for pid in set(sandbox.children().get(os.getpid(), [])) - known:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# A folder of them -----------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What a student handed in for one assignment: the file that counts, or none, and remarks."""

    student: str
    assignment: str
    path: Path | None = None
    remarks: list[str] = field(default_factory=list)
    late: tuple[str, float] = "", 1.0  # in words, and the factor that it leaves of the points


def submissions(folder: Path, assignments: list[Assignment], students: tuple[str, ...] = ()) -> list[Found]:
    """Each student's file for each assignment, in a folder with one folder for each student."""
    if not folder.is_dir():
        raise ValueError(f"folder: got {folder}, which is no folder; it takes one with a folder for each student")
    homes = {p.name: p for p in folder.iterdir() if p.is_dir() and not p.is_symlink() and not NEVER.search(p.name)}
    if not homes:
        raise ValueError(f"folder: got {folder}, without a folder in it; it takes one with a folder for each student")
    return [one for name in sorted({*homes, *students}) for one in of_student(name, homes.get(name), assignments)]


def of_student(student: str, home: Path | None, assignments: list[Assignment]) -> list[Found]:
    """One student's files. The file named exactly as the assignment counts, or else the one with the shortest name."""
    files = files_below(home) if home else []
    found = []
    for assignment in assignments:
        mine = [p for p in files if assignment.name in (p.parent.name, p.stem) or assignment.name in p.stem]
        mine = [p for p in mine if p.suffix == ".ipynb" or p.stem.startswith(assignment.name)]
        mine.sort(key=lambda p: (p.suffix != ".ipynb", p.stem != assignment.name, len(p.stem), str(p)))
        one = Found(student, assignment.name, mine[0] if mine else None)
        more = [p.name for p in mine[1:] if p.suffix == ".ipynb"]
        one.remarks += [f"{mine[0].name} was graded, not {', '.join(more)}"] if more else []
        others = ", ".join(p.name for p in files[:5])
        one.remarks += [] if mine else [f"nothing handed in{f'; there is {others}' if others else ''}"[:300]]
        found.append(one)
    return found


def files_below(home: Path) -> list[Path]:
    """Everything under a student's folder that is no folder; links to folders are not followed."""
    found = []
    for place, folders, names in os.walk(home):
        folders[:] = sorted(f for f in folders if not NEVER.search(f))
        found += [Path(place, name) for name in sorted(names) if not NEVER.search(name)]
        if len(found) > MOST_FILES:
            return found[:MOST_FILES]
    return found


@dataclass
class Grading:
    """How a folder is graded."""

    limits: Limits = field(default_factory=Limits)
    jobs: int = 1
    about: due.Class = field(default_factory=due.Class)
    again: tuple[str, ...] = ()  # students who are graded even if nothing changed
    warn: Callable[[str], None] = lambda sentence: print(sentence, file=sys.stderr)


def grade_folder(folder: Path, out: Path, assignments: list[Assignment], how: Grading) -> list[Graded]:
    """Grade every submission that has no record yet. Writes records, feedback pages and tables; returns all records."""
    todo = submissions(folder, assignments, how.about.students)
    used = [a for a in assignments if any(one.path and one.assignment == a.name for one in todo)]
    if missing := missing_packages(used):
        raise GraderError(
            f"not installed here: {', '.join(missing)}. pip install 'fa2-lab[course]'. Nobody was graded."
        )
    files.check_writable(out, "course grade")
    hidden = out_of_sight(folder, out)
    with stages(used) as stage:
        before = rules.fingerprint(rules.PACKAGE, *stage.values())
        prove_grader(used, stage, hidden, how)
        tasks = []
        for one in todo:
            task, graded, key = prepare(one, assignments, stage, hidden, how, before)
            if how.again and one.student not in how.again:
                continue
            if not how.again and results.kept(results.record_path(out, one.student, one.assignment))[1] == key:
                continue
            if task is None:
                results.keep(graded, out, key)
            else:
                tasks.append((task, one, key))
        try:
            grade_tasks(tasks, out, how, before, stage)
        finally:
            results.write_scores(out)
    return results.all_kept(out)


def grade_tasks(tasks: list, out: Path, how: Grading, before: str, stage: dict) -> None:
    """Grade, and keep each result as it comes. Stops if a submission changed the package."""
    known = {id(task): (one, key) for task, one, key in tasks}
    with tqdm(total=len(tasks), desc="grading", unit="notebook", disable=None) as bar:

        def done(task: Task, graded: Graded) -> None:
            one, key = known[id(task)]
            if rules.fingerprint(rules.PACKAGE, *stage.values()) != before:
                raise GraderError(
                    f"the package changed while {one.student}'s {one.assignment} was graded. Stopped there."
                )
            graded.sentences = one.remarks + graded.sentences
            graded.late, graded.factor = one.late
            results.keep(graded, out, key)
            bar.update()

        run_tasks([task for task, _, _ in tasks], how.jobs, done)


def prepare(one: Found, assignments, stage: dict, hidden: tuple, how: Grading, version: str):
    """A task, or what is known without one, and the key that tells whether it was graded before."""
    assignment = next(a for a in assignments if a.name == one.assignment)
    original = seeded(source(assignment), one.student, how.about.secret)
    nothing = Graded(one.student, one.assignment, steps(original), sentences=one.remarks)
    one.late = lateness(one, how)
    if one.path is None:
        return None, nothing, digest(version, original, one.late[0], one.remarks)
    try:
        cells = read(one.path)
    except ValueError as unreadable:
        nothing.sentences = [*one.remarks, str(unreadable)]
        return None, nothing, digest(version, original, one.late[0], nothing.sentences)
    box = stage[one.assignment]
    task = Task(one.student, one.assignment, cells, original, box, how.limits, hidden)
    return task, nothing, digest(version, original, one.late[0], one.remarks, cells, how.limits)


def lateness(one: Found, how: Grading) -> tuple[str, float]:
    return how.about.lateness(one.student, one.assignment, due.handed_in(one.path)) if one.path else ("", 1.0)


def digest(*parts) -> str:
    return hashlib.sha256(repr(parts).encode("utf-8", "replace")).hexdigest()


def seeded(original, student: str, secret: str):
    """The original with the student's own numbers."""
    from fa2_studio.course import seeds

    return seeds.seeded(original, seeds.seed_of(student, secret)) if secret else original


# Before anybody is graded -------------------------------------------------------------------------------------------


def missing_packages(assignments: list[Assignment]) -> list[str]:
    """Packages that grading these assignments needs and that are not here."""
    needed = {"numpy", "nbformat", "IPython"}
    needed |= {package for a in assignments for package in a.needs}
    return sorted(name for name in needed if find_spec(name) is None)


@contextmanager
def stages(assignments: list[Assignment]):
    """{assignment: the folder with the part of the package that its students get}."""
    folder = Path(tempfile.mkdtemp(prefix="fa2-course-stage-"))
    try:
        folder.chmod(0o755)
        for assignment in assignments:
            preload(assignment)
        yield {a.name: rules.stage(folder / a.name, a.gives) for a in assignments}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def preload(assignment: Assignment) -> None:
    """Import the checks now, so that processes that are forked off have them."""
    probes = [f"probes{part}" for part in ("", "_triton") if "triton" in assignment.needs]
    for module in probes:
        with suppress(ImportError):
            importlib.import_module(f"fa2_studio.course.{module}")
    for cell in source(assignment).cells:
        for module in re.findall(r"^from fa2_lab\.studio\.course import (\w+)", cell.source, re.MULTILINE):
            with suppress(ImportError):
                importlib.import_module(f"fa2_studio.course.{module}")


def out_of_sight(*more: Path) -> tuple[str, ...]:
    """Folders that no submission may see: solutions, other submissions, results, this user's own."""
    root = files.ROOT
    checkout = [root / name for name in ("notebooks", "tests", ".git")] if (root / "pyproject.toml").is_file() else []
    places = [rules.PACKAGE, FOLDER, *checkout, Path.home(), *more]
    return tuple(dict.fromkeys(str(p.resolve()) for p in places))


def prove_grader(assignments: list[Assignment], stage: dict, hidden: tuple, how: Grading) -> None:
    """The own solution of each must score full marks here and now, or nobody is graded. Tells what is not boxed."""
    tasks = []
    for assignment in assignments:
        original = source(assignment)
        cells = [as_cell(cell) for cell in original.cells]
        tasks.append(Task("", assignment.name, cells, original, stage[assignment.name], how.limits, hidden))
    proved: list[Graded] = []
    run_tasks(tasks, how.jobs, lambda task, graded: proved.append(graded))
    for solved in proved:
        if solved.score < solved.full:
            why = "; ".join(solved.sentences) or "see its own output"
            raise GraderError(
                f"{solved.assignment}: its own solution scores {solved.score:g} of {solved.full:g} here ({why}). "
                "Nobody was graded: the fault lies with this machine or these limits."
            )
    for wall in BOX:
        if any(not solved.confined.get(wall) for solved in proved):
            how.warn(f"WARNING: on this machine a student's code can {WITHOUT[wall]}.")


# What a student runs alone --------------------------------------------------------------------------------------------


def check_alone(path: Path, limits: Limits) -> Graded:
    """A student's own notebook with the tests that it carries. A step whose test cell was deleted scores 0."""
    import nbformat

    cells = read(path)
    submitted = nbformat.from_dict(json.loads(notebooks.content(path).decode("utf-8-sig")))
    submitted.cells = [c for c in submitted.cells if c.get("cell_type") == "code"]
    for cell in submitted.cells:  # a file holds a text as a list of its lines
        cell.source = "".join(cell.source)
    promised = dict(submitted.metadata.get("fa2_lab", {}).get("steps", {}))
    name = next((a.name for a in notebooks.ASSIGNMENTS if a.name in path.stem), "")
    assignment = next((a for a in notebooks.ASSIGNMENTS if a.name == name), Assignment(name, ""))
    answers: list[Graded] = []
    with stages_of(assignment) as stage:
        task = Task("", name, cells, submitted, stage, limits, follow=False)
        run_tasks([task], 1, lambda _, graded: answers.append(graded))
    graded = answers[0]
    for step, points in promised.items():
        if step not in graded.most:
            graded.most[step], graded.got[step] = points, 0.0
            graded.sentences.append(f"the cell {step} was deleted")
    for step, names in judge.retried(submitted, judge.assemble(submitted, cells)[0], graded).items():
        names = ", ".join(names)
        graded.sentences.append(f"{step} uses your {names}: when it is graded, it is tried with a right one as well")
    graded.sentences += slow(graded, limits)
    return graded


@contextmanager
def stages_of(assignment: Assignment):
    with tempfile.TemporaryDirectory(prefix="fa2-course-stage-") as folder:
        os.chmod(folder, 0o755)
        yield rules.stage(Path(folder), assignment.gives)


def slow(graded: Graded, limits: Limits) -> list[str]:
    """Where a slower machine could part a student's own check from the grade."""
    return [
        f"{step} took {seconds:.0f} s here; when it is graded it has {limits.cell_seconds:g} s"
        for step, seconds in graded.seconds.items()
        if limits.cell_seconds / 3 < seconds < limits.cell_seconds
    ]
