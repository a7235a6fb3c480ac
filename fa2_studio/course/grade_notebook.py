"""Grade one notebook: run the original's tests in this process, and the student's code in a sandbox.

The original is rebuilt from the release. A submission contributes only the text of its code cells. The first cell with
the name of a solution cell is the student's answer, and cells without such a name are additions by the student. The
tests, the points and all other metadata of a submission are ignored.
"""

import ast
import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from checks.cells import run_source
from checks.guard import Far, Raised, Stopped, raised
from checks.meter import lending

from fa2_studio.course import notebooks, seeds
from fa2_studio.course.notebooks import HIDDEN, Cell, grade_id, is_solution, points_by_step
from fa2_studio.course.sandbox import Limits, NotReady, SandboxProcess

MAX_RESTARTS = 8  # the most times that a notebook's processes are restarted
GRADER_MB = 1024  # the most memory of this process, whatever a submission contains
MAX_PAGE_LENGTH = 200_000  # the most characters on a feedback page
SHARE_GIVEN_BACK = 0.75  # share of a check's points kept if an earlier step has already shown the same mistake


@dataclass
class Graded:
    """The result of grading one submission. `page` lists [kind, title, code, output] per part of the feedback page."""

    student: str
    assignment: str
    most: dict[str, float] = field(default_factory=dict)  # the maximum points for each step
    got: dict[str, float] = field(default_factory=dict)  # the student's points for each step
    sentences: list[str] = field(default_factory=list)
    page: list[list[str]] = field(default_factory=list)
    is_absent: bool = False  # nothing was handed in
    is_unfinished: bool = False  # grading failed because of the machine, so the next run grades it again
    folder: str = ""  # name of the folder with the submission, if the student has several folders
    other_numbers: bool = False  # the student's notebook was made with a different seed from the one used for grading

    @property
    def score(self) -> float:
        return round(sum(self.got.values()), 2)

    @property
    def full(self) -> float:
        return sum(self.most.values())

    def show(self, kind: str, title: str, code: str, output: str) -> None:
        """Append a part to the feedback page, and truncate it if the page would exceed MAX_PAGE_LENGTH characters."""
        left = max(0, MAX_PAGE_LENGTH - sum(len(text) for piece in self.page for text in piece))
        self.page.append([kind, title, code[:left], output[: max(0, left - len(code))]])


# Assembling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AssembledCell:
    """One cell to run. `kind` is "given" (locked), "answer", "own" (added by the student) or "test"."""

    kind: str
    name: str
    source: str
    given: tuple[str, ...] = ()  # for a test: the earlier functions to replace with correct ones in a second run


def assemble(original, cells: list[Cell]) -> tuple[list[AssembledCell], list[str]]:
    """Return the cells to run, and a remark for each cell of the original that the student deleted or changed.

    The cells are the original's locked cells and tests, the student's answers in place of the original's solutions, and
    the cells that the student added, each after the named cell that it followed in the submission.
    """
    own_cells = {grade_id(c): c for c in original.cells if grade_id(c)}
    by_id = {c.get("id"): grade_id(c) for c in own_cells.values() if c.get("id")}
    answers, own, last = {}, {"": []}, ""
    for cell in cells:
        name = cell.name if cell.name in own_cells else by_id.get(cell.id, "")
        if name and name not in answers:
            answers[name], last = cell, name
        elif cell.is_code:
            own.setdefault(last, []).append(cell)
    parts = [AssembledCell("own", "", c.source) for c in own[""]]
    for name, cell in own_cells.items():
        answer = answers.get(name)
        if not is_solution(cell):
            kind = "test" if name in points_by_step(original) else "given"
            parts.append(
                AssembledCell(kind, name, cell.source, tuple(cell.metadata.get("fa2_lab", {}).get("given", ())))
            )
        elif answer is not None and answer.is_code:
            parts.append(AssembledCell("answer", name, answer.source))
        parts += [AssembledCell("own", "", c.source) for c in own.get(name, [])]
    lost = [f"the cell {name} was deleted" for name in own_cells if name not in answers]
    lost += [f"the cell {name} is not a code cell any more" for name, cell in answers.items() if not cell.is_code]
    if not is_of_another_seed(original, cells):  # then more differs
        texts = {part.name: part.source for part in parts if part.kind == "given"}
        changed = [
            name for name, text in texts.items() if name in answers and answers[name].source.strip() != text.strip()
        ]
        lost += [f"the cell {name} was changed, but grading ran it as it was handed out" for name in changed]
    return parts, lost


OTHER_NUMBERS = "this notebook has other numbers than those that it was graded with"


def is_of_another_seed(original, cells: list[Cell]) -> bool:
    """Return True if the tests in a submission use a different seed from those in the original."""
    tests = {grade_id(cell): cell for cell in original.cells if grade_id(cell) in points_by_step(original)}

    def shown(cell) -> list[str]:
        return re.findall(r"\bseed=(\d+)", cell.source.partition(HIDDEN[0])[0])[:1]

    handed_in = {cell.name: shown(cell) for cell in reversed(cells)}
    return any(handed_in.get(name) and shown(cell) and handed_in[name] != shown(cell) for name, cell in tests.items())


def defined_names(source: str) -> set[str]:
    """Return the names of the functions and classes defined in a cell of the original."""
    return {node.name for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def used_names(source: str) -> set[str]:
    """Return the names read in a cell of the original."""
    return {x.id for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}


def cells_of_answers(original, test: AssembledCell, parts: list[AssembledCell]) -> dict[str, str]:
    """Return {name: source of the student's cell that should define it} for the answers that a test uses."""
    cells = {
        name: grade_id(cell) for cell in original.cells if is_solution(cell) for name in defined_names(cell.source)
    }
    texts = {part.name: part.source for part in parts if part.kind == "answer"}
    return {name: texts.get(cells[name], "") for name in sorted(used_names(test.source) & set(cells))}


def original_functions(original, names: tuple[str, ...]) -> dict[str, Callable]:
    """Return the original's functions with these names.

    The functions stay in this process. The student's process receives only their results.
    """
    space: dict = {"np": np}
    for cell in original.cells:
        if is_solution(cell) and defined_names(cell.source) & set(names):
            exec(compile(cell.source, "<right>", "exec"), space)
    return {name: space[name] for name in names}


# Requests to a student's process --------------------------------------------------------------------------------------


class Session:
    """The process that runs a student's cells. If it ends, the next request starts a new one and repeats the cells."""

    def __init__(self, open_process: Callable[[bool], SandboxProcess], limits: Limits):
        self.open_process, self.limits, self.process, self.clean = open_process, limits, None, None
        self.until = time.monotonic() + limits.notebook_seconds
        self.done: list[str] = []  # cells that have run, and that a new process runs again
        self.lent: dict[str, Callable] = {}  # correct functions that replace the student's own in a second run
        self.named: dict[str, set[str]] = {}  # {step: hints of the mistakes that it has shown}
        self.opened, self.ready = 0, set()
        self.begin_step()

    def begin_step(self) -> None:
        self.step_until = time.monotonic() + self.limits.cell_seconds
        self.over, self.stopped, self.deaths = "", "", 0

    def cell(self, source: str) -> tuple[str, str]:
        """Run a cell. Return what it printed, and the text of the error that it raised or "" if it raised none."""
        reply = self.ask({"do": "cell", "source": source}, self.limits.cell_seconds)
        self.done.append(source)
        return str(reply.get("printed", "")), str(exception_of(reply) or "")

    def call(self, name: str, args: tuple, kwargs: dict, probe: Callable | None = None, is_theirs: bool = True):
        """Call one of the student's functions in their process, and return its value or raise its error.

        If a `probe` (a function of the checks) is given, the process calls the probe on the student's function instead.
        Without a name, it calls the probe alone. Raises Stopped if the process ends or the step's time is over.
        """
        if self.over:
            raise Stopped(self.over)
        place = f"{probe.__module__.rpartition('.')[2]}:{probe.__name__}" if probe else ""
        lent = {key: lending(right, args) for key, right in self.lent.items() if key != name}
        request = {"do": "call", "probe": place, "name": name, "args": args, "kwargs": kwargs, "lent": lent}
        try:
            reply = self.ask(request, 0.0, is_theirs)
        except Stopped as end:
            self.deaths, self.stopped = self.deaths + 1, str(end)
            if self.deaths > 1 or time.monotonic() > self.step_until:
                self.over = str(end)
            raise
        if error := exception_of(reply):
            raise error
        return reply.get("value")

    def apart(self, probe: Callable, args: tuple):
        """Run a probe in a clean process, which never runs the student's code."""
        student_process, self.process = self.process, self.clean
        try:
            return self.call("", args, {}, probe, is_theirs=False)
        finally:
            self.clean, self.process = self.process, student_process

    def ask(self, request: dict, seconds: float, is_theirs: bool = True) -> dict:
        """Return the reply to a request. Raises Stopped, with a sentence for the student, if no reply comes in time.

        If `seconds` is 0, the request may take the rest of its step's time.
        """
        try:
            if self.process is None:
                self.open(is_theirs)
            now = time.monotonic()
            if now > self.until:
                raise Stopped("the time for this notebook was over")
            reply = self.process.ask(request, max(0.0, min((seconds or self.step_until - now), self.until - now)))
            if reply.get("late"):
                raise Stopped(f"it did not finish within {self.limits.cell_seconds:g} s")
        except Stopped:
            self.end()
            raise
        return reply

    def open(self, is_theirs: bool) -> None:
        """Start a process. A process for the student's code (`is_theirs`) first runs the cells that have run before.

        The first start of each kind of process is free: its duration is added to the time for the notebook and for the
        step.
        """
        if self.opened > MAX_RESTARTS:
            raise Stopped("the process ended too often")
        began = time.monotonic()
        self.process, self.opened = self.open_process(not is_theirs), self.opened + 1
        if is_theirs not in self.ready:
            self.ready.add(is_theirs)
            took = time.monotonic() - began
            self.until, self.step_until = self.until + took, self.step_until + took
        for source in self.done if is_theirs else ():
            left = self.until - time.monotonic()
            self.process.ask({"do": "cell", "source": source}, max(0.0, min(self.limits.cell_seconds, left)))

    def end(self) -> None:
        """End the process that handled the last request. The next request starts a new one."""
        if self.process is not None:
            self.process.close()
        self.process = None

    def close(self) -> None:
        self.end()
        self.process, self.clean = self.clean, None
        self.end()


def exception_of(reply: dict) -> Exception | None:
    """Convert the error in a reply to an exception, or return None if the reply contains no error."""
    error = reply.get("error")
    if error is None:
        return None
    texts = [str(x)[:1000] for x in error] if isinstance(error, list) else []
    return raised(*texts) if len(texts) == 3 else Raised("an answer that cannot be read", "")


# Grading ------------------------------------------------------------------------------------------------------------


def grade_notebook(
    original, cells: list[Cell], open_process: Callable[[bool], SandboxProcess], limits: Limits
) -> Graded:
    """Run the original's tests on a student's answers, and return the points and the feedback."""
    graded = Graded("", "", points_by_step(original))
    parts, lost = assemble(original, cells)
    graded.sentences += lost
    session, space = Session(open_process, limits), {}
    try:
        for part in parts:
            if part.kind == "test":
                run_step(part, session, space, cells_of_answers(original, part, parts), graded)
            else:
                run_cell(part, session, space, graded)
        retry_with_right_versions(original, parts, session, space, graded)
    finally:
        session.close()
    return graded


def run_cell(part: AssembledCell, session: Session, space: dict, graded: Graded) -> None:
    """Run a cell that is not a test in the student's process. A locked cell also runs here, because tests need it."""
    if part.kind == "given":
        with redirect_stdout(io.StringIO()):
            run_source(part.source, part.name, space)
    try:
        printed, error = session.cell(part.source)
    except Stopped as end:
        printed, error = "", str(end)
    if error:
        graded.sentences.append(f"{part.name or 'a cell of your own'}: {error}"[:300])
    if part.kind != "given":
        graded.show("code", part.name or "a cell of your own", part.source, "\n".join(filter(None, (printed, error))))


def run_step(part: AssembledCell, session: Session, space: dict, names: dict[str, str], graded: Graded) -> None:
    """Run a step's test cell, and add its points, remark and output to `graded`."""
    points, shown, hidden, sentence = run_test(part, session, space, names)
    points, why = charge_mistake_once(part, points, graded.most[part.name], session, space.get("report"))
    graded.got[part.name] = min(points, graded.most[part.name])
    graded.sentences += [f"{part.name.removeprefix('test_')}: {said}" for said in (sentence, why) if said]
    graded.show("visible", part.name, "", shown)
    if hidden:
        graded.show("hidden", part.name, "", hidden)


def run_test(part: AssembledCell, session: Session, space: dict, names: dict[str, str]) -> tuple[float, str, str, str]:
    """Run a test cell. Return its points, the output of its visible checks, that of its hidden checks, and a remark.

    Each of `names` becomes a stand-in that calls the student's function with this name in the student's process.
    """
    session.begin_step()
    space |= {name: Far(session, name, text) for name, text in names.items()}
    space.pop("report", None)
    papers, points, sentence = [io.StringIO(), io.StringIO()], 0.0, ""
    visible, _, rest = part.source.partition(HIDDEN[0])
    hidden, _, end = rest.partition(HIDDEN[1]) if rest else ("", "", "")
    if not rest:
        visible, _, end = visible.rstrip().rpartition("\n")
    try:
        for text, paper in zip((visible, hidden), papers, strict=True):
            with redirect_stdout(paper):
                exec(compile(text, f"<{part.name}>", "exec"), space)
        with redirect_stdout(papers[bool(hidden)]):
            points = float(eval(end.strip(), space))
    except NotReady:
        raise
    except Exception as error:  # the answer behaved unexpectedly, so this step gets no points
        sentence = f"{type(error).__name__}: {error}"[:300]
    sentence = sentence or session.over or session.stopped or getattr(space.get("report"), "refused", "")
    hidden = re.sub(r"^ {11}expected.*\n", "", papers[1].getvalue(), flags=re.MULTILINE)  # hide right values
    return (points if points >= 0 else 0.0), papers[0].getvalue(), hidden, sentence


def charge_mistake_once(part: AssembledCell, points: float, most: float, session: Session, report) -> tuple[float, str]:
    """Return a step's points, adjusted so that a mistake costs points only once, and a remark on the adjustment.

    A check that failed because of a mistake already shown by an earlier step gets most of its points, unless the step
    is run again with correct functions. If a result was accepted because a known mistake explains it, although no
    earlier step has shown this mistake, the step gets no points, because the mistake may have been made on purpose.
    """
    failed, passed = getattr(report, "named", []), getattr(report, "forgiven", [])
    session.named.setdefault(part.name, {hint for known in failed + passed for hint in known})
    steps = list(session.named)
    earlier = {hint for step in steps[: steps.index(part.name)] for hint in session.named[step]}
    if unpaid := [known[0] for known in passed if not earlier & {*known}]:
        return 0.0, f"no points, because no earlier step has the mistake that explains the result: {unpaid[0]}"
    again = [known[0] for known in failed if earlier & {*known}]
    if not again or part.given or report.refused:
        return points, ""
    back = round(SHARE_GIVEN_BACK * most * len(again) / report.total, 2)
    why = f"{back:g} points back, because an earlier step has lost points by the same mistake: {again[0]}"
    return points + back, why


def retry_with_right_versions(
    original, parts: list[AssembledCell], session: Session, space: dict, graded: Graded
) -> None:
    """Run each test that lost points again, with correct versions of the earlier functions that its cell names.

    This way, a mistake in an earlier step costs no points in this one. The better of the two runs counts.
    """
    for part in parts:
        if not part.given or graded.got.get(part.name, 0) >= graded.most.get(part.name, 0):
            continue
        session.lent = original_functions(original, part.given)
        points, shown, hidden, _ = run_test(part, session, space, cells_of_answers(original, part, parts))
        points, _ = charge_mistake_once(part, points, graded.most[part.name], session, space.get("report"))
        if points > graded.got[part.name]:
            graded.got[part.name] = min(points, graded.most[part.name])
            given = " and ".join(filter(None, (", ".join(part.given[:-1]), part.given[-1])))
            step, got = part.name.removeprefix("test_"), f"{points:g} point{'s' * (points != 1)}"
            graded.sentences.append(f"{step}: {got} from a second run with correct versions of {given}")
            graded.show("again", part.name, "", shown + hidden)
            place = max(n for n, (_, name, *_) in enumerate(graded.page[:-1]) if name == part.name)
            graded.page.insert(place + 1, graded.page.pop())
    session.lent = {}


# The process that grades one submission -------------------------------------------------------------------------------


def limit_own_memory() -> None:
    """Limit the memory of this process to GRADER_MB.

    The limit does not apply to its children, because the student's process has a separate one.
    """
    with contextlib.suppress(ImportError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]  # only root can raise the hard limit again
        resource.setrlimit(resource.RLIMIT_DATA, (GRADER_MB * 2**20, hard))


def main() -> int:
    """Grade one submission. Read the task as JSON from stdin, and print the result or a machine fault as JSON."""
    task = json.load(sys.stdin)
    limits = Limits(**task["limits"])
    limit_own_memory()
    assignment = notebooks.find_assignment(task["assignment"])
    original = seeds.with_seed(notebooks.source_notebook(assignment), task["seed"])
    original = seeds.with_day(original, task["seed"], task["day"])
    try:
        cells = notebooks.read_submission(Path(task["path"]))
    except ValueError as unreadable:
        graded = Graded("", "", points_by_step(original), sentences=[str(unreadable)])
    else:

        def open_process(clean: bool) -> SandboxProcess:
            return SandboxProcess(Path(task["package"]), limits, task["sandbox"], assignment.needs, clean)

        try:
            graded = grade_notebook(original, cells, open_process, limits)
        except NotReady as fault:
            json.dump({"fault": str(fault)}, sys.stdout)
            return 1
        if is_of_another_seed(original, cells):
            graded.other_numbers = True
            graded.sentences.insert(0, OTHER_NUMBERS)
    json.dump(asdict(graded), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
