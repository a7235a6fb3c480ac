"""One notebook: the original's tests are run here, the student's code in a box of its own.

The original is rebuilt from the release. Of a submission only text enters: that of the solution cells, the first of
each name, and that of all other code cells as the student's own. Its tests, points and metadata count for nothing.
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
from fa2_studio.course.box import Limits, NotReady, Room
from fa2_studio.course.notebooks import HIDDEN, Cell, grade_id, is_solution, steps

MOST_DEATHS = 8  # how often a student's process is started again in one notebook
OWN_MB = 1024  # of memory for the grader of one notebook, whatever it is handed
MOST_SHOWN = 200_000  # characters of a feedback page


@dataclass
class Graded:
    """One submission after grading. `page` has (kind, title, code, output) for each piece that feedback shows."""

    student: str
    assignment: str
    most: dict[str, float] = field(default_factory=dict)  # points of each step
    got: dict[str, float] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    page: list[list[str]] = field(default_factory=list)
    is_absent: bool = False  # nothing was handed in
    is_unfinished: bool = False  # the machine's fault: it will be graded again
    other_numbers: bool = False  # the notebook was made with another seed than it is graded with

    @property
    def score(self) -> float:
        return round(sum(self.got.values()), 2)

    @property
    def full(self) -> float:
        return sum(self.most.values())

    def show(self, kind: str, title: str, code: str, output: str) -> None:
        """Put a piece on the feedback page, as far as there is place."""
        left = max(0, MOST_SHOWN - sum(len(text) for piece in self.page for text in piece))
        self.page.append([kind, title, code[:left], output[: max(0, left - len(code))]])


# Assembling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AssembledCell:
    """One piece of what is run: a locked cell ("given"), an "answer", a cell of the student's "own", or a "test"."""

    kind: str
    name: str
    source: str
    given: tuple[str, ...] = ()  # of a test: functions that right ones stand for where it lost points


def assemble(original, cells: list[Cell]) -> tuple[list[AssembledCell], list[str]]:
    """The original's locked cells around a student's answers and own cells, and what is said of lost cells."""
    known = {grade_id(c): c for c in original.cells if grade_id(c)}
    by_id = {c.get("id"): grade_id(c) for c in known.values() if c.get("id")}
    answers, own, last = {}, {"": []}, ""
    for cell in cells:
        name = cell.name if cell.name in known else by_id.get(cell.id, "")
        if name and name not in answers:
            answers[name], last = cell, name
        elif cell.is_code:
            own.setdefault(last, []).append(cell)
    parts = [AssembledCell("own", "", c.source) for c in own[""]]
    for name, cell in known.items():
        mine = answers.get(name)
        if not is_solution(cell):
            kind = "test" if name in steps(original) else "given"
            parts.append(
                AssembledCell(kind, name, cell.source, tuple(cell.metadata.get("fa2_lab", {}).get("given", ())))
            )
        elif mine is not None and mine.is_code:
            parts.append(AssembledCell("answer", name, mine.source))
        parts += [AssembledCell("own", "", c.source) for c in own.get(name, [])]
    lost = [f"the cell {name} was deleted" for name in known if name not in answers]
    lost += [f"the cell {name} is not a code cell any more" for name, cell in answers.items() if not cell.is_code]
    return parts, lost


OTHER_NUMBERS = (
    "this notebook has other numbers than those it was graded with, because of another secret, another id, or "
    "another student's file"
)


def is_of_another_seed(original, cells: list[Cell]) -> bool:
    """Whether a submission's tests name another seed than the original's."""
    tests = {grade_id(cell): cell for cell in original.cells if grade_id(cell) in steps(original)}

    def shown(cell) -> list[str]:
        return re.findall(r"\bseed=(\d+)", cell.source.partition(HIDDEN[0])[0])[:1]

    mine = {cell.name: shown(cell) for cell in reversed(cells)}
    return any(mine.get(name) and shown(cell) and mine[name] != shown(cell) for name, cell in tests.items())


def defined(source: str) -> set[str]:
    """The names of the functions that a cell of the original defines."""
    return {node.name for node in ast.parse(source).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def used(source: str) -> set[str]:
    """The names that a cell of the original reads."""
    return {x.id for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}


def asked(original, test: AssembledCell, parts: list[AssembledCell]) -> dict[str, str]:
    """The names of the student's that a test reads, each with the text of its cell."""
    cells = {name: grade_id(cell) for cell in original.cells if is_solution(cell) for name in defined(cell.source)}
    texts = {part.name: part.source for part in parts if part.kind == "answer"}
    return {name: texts.get(cells[name], "") for name in sorted(used(test.source) & set(cells))}


def right_functions(original, names: tuple[str, ...]) -> dict[str, Callable]:
    """The original's own functions of these names. They stay here: a student's process gets what they return."""
    space: dict = {"np": np}
    for cell in original.cells:
        if is_solution(cell) and defined(cell.source) & set(names):
            exec(compile(cell.source, "<right>", "exec"), space)
    return {name: space[name] for name in names}


# Asking a student's process -------------------------------------------------------------------------------------------


class Session:
    """A student's process over one notebook. If it ends, the next question finds a new one in the same state."""

    def __init__(self, open_room: Callable[[bool], Room], limits: Limits):
        self.open_room, self.limits, self.room, self.clean = open_room, limits, None, None
        self.until = time.monotonic() + limits.notebook_seconds
        self.done: list[str] = []  # the cells that ran, for a new process
        self.lent: dict[str, Callable] = {}  # right functions that stand for earlier ones of the student's
        self.opened, self.ready = 0, set()
        self.begin_step()

    def begin_step(self) -> None:
        self.step_until = time.monotonic() + self.limits.cell_seconds
        self.over, self.stopped, self.deaths = "", "", 0

    def cell(self, source: str) -> tuple[str, str]:
        """Run a cell: what it printed, and what it raised."""
        reply = self.ask({"do": "cell", "source": source}, self.limits.cell_seconds)
        self.done.append(source)
        return str(reply.get("printed", "")), str(error_of(reply) or "")

    def call(self, name: str, args: tuple, kwargs: dict, probe: Callable | None = None, is_theirs: bool = True):
        """What a function of the student's returns, or a probe of the checks beside it, or the error that was raised;
        Stopped once the step's time is over."""
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
        if error := error_of(reply):
            raise error
        return reply.get("value")

    def apart(self, probe: Callable, args: tuple):
        """Run a probe in a process of its own, in which nothing of the student's runs."""
        mine, self.room = self.room, self.clean
        try:
            return self.call("", args, {}, probe, is_theirs=False)
        finally:
            self.clean, self.room = self.room, mine

    def ask(self, request: dict, seconds: float, is_theirs: bool = True) -> dict:
        """The reply to a request, or Stopped with a sentence. Without seconds, it has those that its step has left."""
        try:
            if self.room is None:
                self.open(is_theirs)
            now = time.monotonic()
            if now > self.until:
                raise Stopped("the time for this notebook was over")
            reply = self.room.ask(request, max(0.0, min((seconds or self.step_until - now), self.until - now)))
            if reply.get("late"):
                raise Stopped(f"it did not finish within {self.limits.cell_seconds:g} s")
        except Stopped:
            self.end()
            raise
        return reply

    def open(self, is_theirs: bool) -> None:
        """A new process; one of the student's is brought to where the last one was. The first of each kind takes its
        time to start, and that is nobody's."""
        if self.opened > MOST_DEATHS:
            raise Stopped("the process ended too often")
        began = time.monotonic()
        self.room, self.opened = self.open_room(not is_theirs), self.opened + 1
        if is_theirs not in self.ready:
            self.ready.add(is_theirs)
            took = time.monotonic() - began
            self.until, self.step_until = self.until + took, self.step_until + took
        for source in self.done if is_theirs else ():
            left = self.until - time.monotonic()
            self.room.ask({"do": "cell", "source": source}, max(0.0, min(self.limits.cell_seconds, left)))

    def end(self) -> None:
        """End the process that was asked last; the next question starts a new one."""
        if self.room is not None:
            self.room.close()
        self.room = None

    def close(self) -> None:
        self.end()
        self.room, self.clean = self.clean, None
        self.end()


def error_of(reply: dict) -> Exception | None:
    """The error that a reply names."""
    error = reply.get("error")
    if error is None:
        return None
    texts = [str(x)[:1000] for x in error] if isinstance(error, list) else []
    return raised(*texts) if len(texts) == 3 else Raised("an answer that cannot be read", "")


# Judging ------------------------------------------------------------------------------------------------------------


def grade_notebook(original, cells: list[Cell], open_room: Callable[[bool], Room], limits: Limits) -> Graded:
    """Run a student's answers against the original's tests."""
    graded = Graded("", "", steps(original))
    parts, lost = assemble(original, cells)
    graded.sentences += lost
    session, space = Session(open_room, limits), {}
    try:
        for part in parts:
            if part.kind == "test":
                run_step(part, session, space, asked(original, part, parts), graded)
            else:
                run_cell(part, session, space, graded)
        follow_through(original, parts, session, space, graded)
    finally:
        session.close()
    return graded


def run_cell(part: AssembledCell, session: Session, space: dict, graded: Graded) -> None:
    """A cell that is not a test, in the student's process; a locked one here as well, for the tests."""
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
    """One step's tests: its points, and what was said."""
    points, shown, hidden, sentence = judged(part, session, space, names)
    graded.got[part.name] = min(points, graded.most[part.name])
    graded.sentences += [f"{part.name.removeprefix('test_')}: {sentence}"] if sentence else []
    graded.show("visible", part.name, "", shown)
    if hidden:
        graded.show("hidden", part.name, "", hidden)


def judged(part: AssembledCell, session: Session, space: dict, names: dict[str, str]) -> tuple[float, str, str, str]:
    """Points, what the visible and the hidden checks printed, and a remark."""
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
    except Exception as error:  # what a check did not expect of an answer costs this step
        sentence = f"{type(error).__name__}: {error}"[:300]
    sentence = sentence or session.over or session.stopped or getattr(space.get("report"), "refused", "")
    hidden = re.sub(r"^ {11}expected.*\n", "", papers[1].getvalue(), flags=re.MULTILINE)  # no number to look up
    return (points if points >= 0 else 0.0), papers[0].getvalue(), hidden, sentence


def follow_through(original, parts: list[AssembledCell], session: Session, space: dict, graded: Graded) -> None:
    """A step that lost points is tried again with what right functions return, for the earlier steps its cell names."""
    for part in parts:
        if not part.given or graded.got.get(part.name, 0) >= graded.most.get(part.name, 0):
            continue
        session.lent = right_functions(original, part.given)
        points, shown, hidden, _ = judged(part, session, space, asked(original, part, parts))
        if points > graded.got[part.name]:
            graded.got[part.name] = min(points, graded.most[part.name])
            given = " and ".join(filter(None, (", ".join(part.given[:-1]), part.given[-1])))
            step, got = part.name.removeprefix("test_"), f"{points:g} point{'s' * (points != 1)}"
            graded.sentences.append(f"{step}: {got} from a second run with correct versions of {given}")
            graded.show("again", part.name, "", shown + hidden)
            place = max(n for n, (_, name, *_) in enumerate(graded.page[:-1]) if name == part.name)
            graded.page.insert(place + 1, graded.page.pop())
    session.lent = {}


# A process of its own -------------------------------------------------------------------------------------------------


def main() -> int:
    """Grade one submission, given as JSON, and print what came of it."""
    task = json.load(sys.stdin)
    limits = Limits(**task["limits"])
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (OWN_MB * 2**20,) * 2)
    assignment = notebooks.named(task["assignment"])
    original = seeds.seeded(notebooks.source(assignment), task["seed"])
    original = seeds.on_day(original, task["seed"], task["day"])
    try:
        cells = notebooks.read(Path(task["path"]))
    except ValueError as unreadable:
        graded = Graded("", "", steps(original), sentences=[str(unreadable)])
    else:

        def open_room(clean: bool) -> Room:
            return Room(Path(task["package"]), limits, task["box"], assignment.needs, clean)

        try:
            graded = grade_notebook(original, cells, open_room, limits)
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
