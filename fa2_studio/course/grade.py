"""Grade a folder of submissions: give each notebook a score and remarks, whatever it contains, and save the results.

Checks run in one process and the student's code in another, so an assignment must follow these rules:

1. `notebooks.ASSIGNMENTS` names the assignment, the packages it needs and, in `gives`, the modules of fa2_lab that its
   students may import. While it is graded, no other module of the package can be imported.
2. Its module in `checks` contains one function for each step: `step(function, ...) -> Report`. A test cell passes the
   student's function, as in `check.update(update)`, and ends with `report.points(4)`.
3. A check never calls the student's function directly, but always through `guard`. Arguments and results are numbers,
   strings, None, NumPy arrays, and tuples, lists and dicts of these. An argument may also be a function or an object of
   the check.
4. Only the check computes right values, using seeds from the test cell. Anything that students must not see is between
   the marks of hidden tests, or in `keys`.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue

from fa2_lab.tools import files
from fa2_studio.course import results, sandbox, sandbox_package, seeds
from fa2_studio.course.grade_notebook import Graded
from fa2_studio.course.notebooks import ASSIGNMENTS, Assignment, points_by_step, read_bytes, source_notebook
from fa2_studio.course.sandbox import PROJECT, Limits

IGNORED = re.compile(r"^\.|^__|~$|\.ipynb_checkpoints")
MAX_FILES = 10_000  # the most files considered in one student's folder
# Seconds granted to a grading process in addition to the time for its notebook and for starting two sandboxes.
MARGIN_SECONDS = 30.0


class GraderError(RuntimeError):
    """Raised if a missing package or sandbox prevents grading here, in which case no notebook is graded."""


@dataclass(frozen=True)
class GradingSettings:
    """The settings with which a folder is graded."""

    limits: Limits = field(default_factory=Limits)
    jobs: int = 1
    secret: str = ""
    roster: tuple[results.Person, ...] = ()
    # If not empty, only these students are graded, even if their submissions have not changed.
    again: tuple[str, ...] = ()
    trust: bool = False  # grade without a sandbox


# Submissions --------------------------------------------------------------------------------------------------------


@dataclass
class Submission:
    """A student's submission for one assignment, with remarks. `path` is the file to grade, or None without a file."""

    student: str
    assignment: Assignment
    path: Path | None = None
    remarks: list[str] = field(default_factory=list)
    folder: str = ""  # the folder with the file


def find_submissions(
    folder: Path, assignments: list[Assignment], roster: tuple[results.Person, ...] = ()
) -> list[Submission]:
    """Return each student's submission for each assignment, from a folder that contains one folder per student.

    A student who is in the roster but has no folder gets submissions without files.
    """
    homes, known = folders_by_student(folder, roster), {person.folder for person in roster}
    found = [x for name in sorted(homes) for x in submissions_of_student(name, homes[name], assignments)]
    for submission in found:
        submission.remarks += [results.NOT_IN_ROSTER] if roster and submission.student not in known else []
    return found


def folders_by_student(folder: Path, roster: tuple[results.Person, ...] = ()) -> dict[str, list[Path]]:
    """Return {student: folders}.

    A student is named after their folder or, with a roster, after the first folder that the roster lists for them.
    """
    if not folder.is_dir():
        raise ValueError(
            f"folder: got {folder}, which is not a folder; it takes a folder that contains one folder per student"
        )
    homes: dict[str, list[Path]] = {person.folder: [] for person in roster}
    folder_of = {name: person.folder for person in roster for name in person.more}
    for home in sorted(folder.iterdir()):
        if home.is_dir() and not home.is_symlink() and not IGNORED.search(home.name):
            name = unicodedata.normalize("NFC", home.name)
            homes.setdefault(folder_of.get(name, name), []).append(home)
    if not any(homes.values()):
        packed = "".join(f", but {path.name}, which you can unpack there" for path in [*folder.glob("*.zip")][:1])
        raise ValueError(
            f"folder: got {folder}, which contains no folder{packed}; it takes a folder with one folder per student"
        )
    return homes


def submissions_of_student(student: str, homes: list[Path], assignments: list[Assignment]) -> Iterator[Submission]:
    """Yield one student's submission for each assignment.

    A notebook with exactly the assignment's name is preferred, and otherwise the one with the shortest name.
    """
    handed = [path for home in homes for path in files_below(home)]
    names = [unicodedata.normalize("NFC", home.name) for home in homes]

    def is_of(path: Path, name: str) -> bool:
        return name == path.parent.name or name in path.stem.lower()

    others = [p.name for p in handed if not any(is_of(p, a.name) for a in ASSIGNMENTS)]
    for assignment in assignments:
        name = assignment.name
        notebooks = [p for p in handed if is_of(p, name) and (p.suffix == ".ipynb" or p.stem.lower().startswith(name))]
        notebooks.sort(key=lambda p, name=name: (p.suffix != ".ipynb", p.stem != name, len(p.stem), str(p)))
        submission = Submission(student, assignment, path=notebooks[0] if notebooks else None)
        submission.folder = next(
            (x for x, home in zip(names, homes, strict=True) if notebooks and home in notebooks[0].parents), ""
        )
        more = [p.name for p in notebooks[1:] if p.suffix == ".ipynb"]
        submission.remarks += [f"{notebooks[0].name} was graded, not {', '.join(more)}"] if more else []
        there = f", but there is {', '.join(others[:5])}" if others else ""
        submission.remarks += [] if notebooks else [f"nothing was handed in{there}"[:300]]
        if len({*names}) < len(names):
            submission.remarks.append("two folders have the same name, but in different bytes")
        yield submission


def files_below(home: Path) -> list[Path]:
    """Return the files below a student's folder. Links to folders are not followed."""
    found = []
    for place, folders, names in os.walk(home):
        folders[:] = sorted(f for f in folders if not IGNORED.search(f))
        found += [Path(place, name) for name in sorted(names) if not IGNORED.search(name)]
        if len(found) > MAX_FILES:
            return found[:MAX_FILES]
    return found


# Grading ------------------------------------------------------------------------------------------------------------


def grade_folder(
    folder: Path, out: Path, assignments: list[Assignment], settings: GradingSettings
) -> tuple[list[Graded], list[str]]:
    """Grade every submission that is new or has changed, and write records, feedback pages and tables.

    Return all records, and a sentence for each assignment that was left out because its own solution does not score
    full marks here.
    """
    submissions = find_submissions(folder, assignments, settings.roster)
    if unknown := sorted(set(settings.again) - {x.student for x in submissions}):
        names = ", ".join(sorted({x.student for x in submissions}))
        raise ValueError(f"--again: got {', '.join(unknown)}; it takes names of folders in {folder}: {names}")
    used = [a for a in assignments if any(x.path and x.assignment is a for x in submissions)]
    check_grader(used, settings)
    people = {person.folder: person.id or person.folder for person in settings.roster}
    files.check_writable(out, "course grade")
    version = digest(*(p.read_bytes() for p in sorted(sandbox_package.CHECKS.parent.rglob("*.py"))))
    with staged_packages(used) as staged:
        faults = grade_solutions(used, staged, settings, out)
        tasks = []
        for submission in submissions:
            if submission.assignment.name in faults:
                continue
            seed = seeds.seed_of(people.get(submission.student, submission.student), settings.secret)
            text = json.dumps(source_notebook(submission.assignment))
            key = digest(version, text, seed, submission.remarks, submitted_bytes(submission), settings.limits)
            record = results.record_path(out, submission.student, submission.assignment.name)
            kept = results.read_record(record)[1] == key
            if submission.student in settings.again if settings.again else not kept:
                tasks.append((submission, seed, key))

        def done(task: tuple, graded: Graded) -> None:
            graded.sentences = task[0].remarks + graded.sentences
            results.write_record(graded, out, "" if graded.is_unfinished else task[2])

        try:
            grade_all(tasks, staged, settings, done)
        finally:
            results.write_tables(out, settings.roster)
    return results.read_all_records(out), list(faults.values())


def check_grader(assignments: list[Assignment], settings: GradingSettings) -> None:
    """Raise GraderError if the sandbox or a package that the assignments need is missing."""
    needed = {"numpy", "nbformat"} | {name for a in assignments for name in a.needs}
    if missing := sorted(name for name in needed if find_spec(name) is None):
        raise GraderError(
            f"not installed here: {', '.join(missing)}. No notebook was graded. Run pip install 'fa2-lab[course]'"
        )
    if not settings.trust and not sandbox.sandbox_kind():
        raise GraderError(sandbox.NO_SANDBOX)


@contextmanager
def staged_packages(assignments: list[Assignment]):
    """Yield {assignment: folder with the part of the package that its students may import}.

    All folders are deleted at the end.
    """
    with tempfile.TemporaryDirectory(prefix="fa2-course-") as folder:
        os.chmod(folder, 0o755)
        yield {a.name: sandbox_package.write_sandbox_package(Path(folder, a.name), a) for a in assignments}


def grade_solutions(
    assignments: list[Assignment], staged: dict, settings: GradingSettings, out: Path
) -> dict[str, str]:
    """Grade each assignment's own solution, and return {assignment: sentence} for those that miss full marks."""
    with tempfile.TemporaryDirectory(prefix="fa2-course-") as folder:
        tasks = []
        for assignment in assignments:
            path = Path(folder, f"{assignment.name}.ipynb")
            path.write_text(json.dumps(source_notebook(assignment)), encoding="utf-8")
            tasks.append((Submission("", assignment, path), 0, ""))
        proved: list[Graded] = []
        grade_all(tasks, staged, settings, lambda task, graded: proved.append(graded))
    faults = {}
    for solved in proved:
        page = out / "own_solutions" / f"{solved.assignment}.html"
        page.unlink(missing_ok=True)
        if solved.score < solved.full or not solved.most:
            page.parent.mkdir(parents=True, exist_ok=True)
            files.write(page, results.feedback_page(solved))
            why = f": {'; '.join(solved.sentences)}" if solved.sentences else ""
            faults[solved.assignment] = (
                f"{solved.assignment}: its own solution scores {solved.score:g} of {solved.full:g} here{why}. "
                f"Therefore, no notebook was graded in it. What its checks found is in {page}"
            )
    return faults


def grade_all(
    tasks: list[tuple], staged: dict, settings: GradingSettings, done: Callable[[tuple, Graded], None]
) -> None:
    """Grade the tasks, `how.jobs` at a time, with one process and one core per task. Call `done` after each task."""
    from tqdm import tqdm

    cores: SimpleQueue[int] = SimpleQueue()
    for core in range(settings.jobs):
        cores.put(core)

    def graded(task: tuple) -> tuple[tuple, Graded]:
        core = cores.get()
        try:
            return task, grade_one(*task[:2], staged, settings, core, "" if settings.trust else sandbox.sandbox_kind())
        finally:
            cores.put(core)

    with ThreadPoolExecutor(settings.jobs) as pool:
        ended = as_completed([pool.submit(graded, task) for task in tasks])
        for future in tqdm(ended, total=len(tasks), desc="grading", unit="notebook", disable=None):
            done(*future.result())


def grade_one(
    submission: Submission, seed: int, staged: dict, settings: GradingSettings, core: int, kind: str
) -> Graded:
    """Grade one submission in a separate process. If the process fails, only this submission remains unfinished."""
    graded = Graded(
        submission.student,
        submission.assignment.name,
        points_by_step(source_notebook(submission.assignment)),
        is_absent=submission.path is None,
    )
    graded.folder = submission.folder
    if submission.path is None:
        return graded
    task = dict(
        assignment=submission.assignment.name,
        path=str(submission.path.absolute()),
        seed=seed,
        limits=asdict(settings.limits),
    )
    task |= dict(package=str(staged[submission.assignment.name]), sandbox=kind, day=str(date.today()))
    env = os.environ | {"TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET", "1"), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    most = settings.limits.notebook_seconds + 2 * sandbox.START_SECONDS + MARGIN_SECONDS
    try:
        command = [*sandbox.pin_command(core), sys.executable, "-m", "fa2_studio.course.grade_notebook"]
        ended = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, env=env, timeout=most)
        reply = json.loads(ended.stdout)
        if "fault" in reply:
            graded.sentences.append(f"{reply['fault']}; run grade again")
            graded.is_unfinished = True
            return graded
        found = Graded(**reply)
    except (subprocess.TimeoutExpired, OSError, ValueError, TypeError):
        graded.sentences.append("the grading of this notebook did not finish; run grade again")
        graded.is_unfinished = True
        return graded
    found.student, found.assignment, found.folder = graded.student, graded.assignment, graded.folder
    return found


def submitted_bytes(submission: Submission) -> bytes:
    """Return the bytes of a submission's file or, if the file cannot be read, the reason as bytes."""
    try:
        return read_bytes(submission.path) if submission.path else b""
    except (ValueError, OSError) as refusal:
        return str(refusal).encode()


def digest(*parts) -> str:
    """Return the SHA-256 digest of the parts' printed form, which reveals whether any part has changed."""
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogateescape")).hexdigest()
