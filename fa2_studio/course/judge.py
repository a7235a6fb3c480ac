"""One notebook: the original's tests are run here, the student's code in a process of its own.

The original is rebuilt from the release. Of a submission only text enters: that of the solution cells, the first of
each name, and that of all other code cells as the student's own. Its tests, points and metadata count for nothing.
"""

from __future__ import annotations

import ast
import io
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field

from fa2_studio.course.guard import Far, Raised, Stopped, raised
from fa2_studio.course.notebooks import CHECK, Cell, grade_id, is_solution, steps
from fa2_studio.course.sandbox import Died, Late, Limits, Room

EXTRA = {"test_gpu": 2.0}  # steps whose points come on top
MOST_DEATHS = 8  # how often a student's process is started again in one notebook


@dataclass
class Graded:
    """One submission after grading. `page` has (title, code, what was said) for each cell that feedback shows."""

    student: str
    assignment: str
    most: dict[str, float] = field(default_factory=dict)  # points of each step
    got: dict[str, float] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    page: list[list[str]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # what each step took
    confined: dict = field(default_factory=dict)  # what the box kept apart
    late: str = ""
    factor: float = 1.0  # what lateness leaves of the points

    @property
    def score(self) -> float:
        return round(self.factor * sum(self.got.values()), 2)

    @property
    def full(self) -> float:
        return sum(self.most.values())


# Assembling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One piece of what is run: a locked cell ("given"), an "answer", a cell of the student's "own", or a "test"."""

    kind: str
    name: str
    source: str
    given: tuple[str, ...] | None = None  # for a test: the functions that may be replaced by right ones


def assemble(original, cells: list[Cell]) -> tuple[list[Part], list[str]]:
    """The original's locked cells around a student's answers and own cells, and the names of deleted cells."""
    known = {grade_id(c): c for c in original.cells if grade_id(c)}
    by_id = {c.get("id"): grade_id(c) for c in known.values() if c.get("id")}
    answers, own, last = {}, {"": []}, ""
    for cell in cells:
        name = cell.name if cell.name in known else by_id.get(cell.id, "")
        if name and name not in answers:
            answers[name], last = cell, name
        elif cell.is_code:
            own.setdefault(last, []).append(cell)
    parts = [Part("own", "", c.source) for c in own[""]]
    for name, cell in known.items():
        mine = answers.get(name)
        if not is_solution(cell):
            given = cell.metadata.get("fa2_lab", {}).get("given")
            kind = "test" if name in steps(original) else "given"
            parts.append(Part(kind, name, cell.source, None if given is None else tuple(given)))
        elif mine is not None and mine.is_code:
            parts.append(Part("answer", name, mine.source))
        parts += [Part("own", "", c.source) for c in own.get(name, [])]
    return parts, [name for name in known if name not in answers]


def parsed(source: str) -> ast.Module:
    """A cell as a tree; one that is no Python is empty."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def defined(source: str) -> set[str]:
    """The names that a cell binds at its outermost level."""
    names = set()
    for node in parsed(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {x.id for target in node.targets for x in ast.walk(target) if isinstance(x, ast.Name)}
    return names


def used(source: str) -> set[str]:
    """The names that a cell reads."""
    return {x.id for x in ast.walk(parsed(source)) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}


def asked(source: str) -> set[str]:
    """The names that a test hands to the checks first: check.update(update) asks for update."""
    calls = [x for x in ast.walk(parsed(source)) if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute)]
    checks = [x for x in calls if isinstance(x.func.value, ast.Name) and x.func.value.id == CHECK]
    return {x.args[0].id for x in checks if x.args and isinstance(x.args[0], ast.Name)}


def tested(original) -> dict[str, list[str]]:
    """{test: the names of the student's that it is about}."""
    tests = {grade_id(c): c.source for c in original.cells if grade_id(c) in steps(original)}
    answers = {name for cell in original.cells if is_solution(cell) for name in defined(cell.source)}
    return {name: sorted(used(source) & answers | asked(source)) for name, source in tests.items()}


# Asking a student's process -------------------------------------------------------------------------------------------


class Session:
    """A student's process over one notebook. If it ends, the next question finds a new one in the same state."""

    def __init__(self, open_room: Callable[[], Room], limits: Limits):
        self.open_room, self.limits, self.room, self.clean = open_room, limits, None, None
        self.until = time.monotonic() + limits.notebook_seconds
        self.done: list[str] = []  # the cells that ran, for a new process
        self.opened, self.confined = 0, {}
        self.begin_step()

    def begin_step(self) -> None:
        self.step_until = time.monotonic() + self.limits.cell_seconds
        self.over, self.stopped, self.deaths = "", "", 0

    def cell(self, source: str) -> tuple[str, str]:
        """Run a cell: what it printed, and what it raised."""
        reply = self.ask({"do": "cell", "source": source}, self.limits.cell_seconds)
        self.done.append(source)
        error = error_of(reply)
        return str(reply.get("printed", "")), str(error or "")

    def call(self, name: str, args: tuple, kwargs: dict):
        return self.value({"do": "call", "name": name, "args": args, "kwargs": kwargs})

    def probe(self, probe: Callable, name: str, args: tuple, kwargs: dict):
        place = f"{probe.__module__}:{probe.__name__}"
        return self.value({"do": "beside", "probe": place, "name": name, "args": args, "kwargs": kwargs})

    def apart(self, probe: Callable, args: tuple):
        """Run a probe in a process of its own, in which nothing of the student's runs."""
        request = {"do": "apart", "probe": f"{probe.__module__}:{probe.__name__}", "args": args}
        return self.value(request, self.ask_apart)

    def ask_apart(self, request: dict, seconds: float) -> dict:
        mine, self.room = self.room, self.clean
        try:
            return self.ask(request, seconds, open_room=self.open_clean)
        finally:
            self.clean, self.room = self.room, mine

    def open_clean(self) -> None:
        self.room = self.open_room()

    def value(self, request: dict, ask: Callable | None = None):
        """What a function of the student's returns, or the error it raised; Stopped once the step's time is over."""
        if self.over:
            raise Stopped(self.over)
        try:
            reply = (ask or self.ask)(request, self.step_until - time.monotonic())
        except Stopped as end:
            self.deaths, self.stopped = self.deaths + 1, str(end)
            if self.deaths > 1 or time.monotonic() > self.step_until:
                self.over = str(end)
            raise
        if error := error_of(reply):
            raise error
        return reply.get("value")

    def ask(self, request: dict, seconds: float, open_room: Callable | None = None) -> dict:
        """The reply to a request, or Stopped with a sentence."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise Stopped("the notebook's time was up")
        try:
            if self.room is None:
                (open_room or self.open)()
            reply = self.room.ask(request, max(0.0, min(seconds, left)))
        except Late:
            self.end()
            raise Stopped(
                f"it did not end within {self.limits.cell_seconds:g} s and could not be interrupted"
            ) from None
        except Died as end:
            self.end()
            why = str(end) or "too much memory, exit(), or a crash"
            raise Stopped(f"the process ended here ({why})") from None
        if reply.get("late"):
            raise Stopped(f"it did not end within {self.limits.cell_seconds:g} s")
        return reply

    def open(self) -> None:
        """A new process, brought to where the last one was."""
        if self.opened > MOST_DEATHS:
            raise Stopped("the process ended too often")
        self.opened += 1
        self.room = self.open_room()
        self.confined = self.room.confined
        for source in self.done:
            self.room.ask({"do": "cell", "source": source}, self.limits.cell_seconds)

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
    """The error that a reply tells of."""
    error = reply.get("error")
    if error is None:
        return None
    texts = [str(x)[:1000] for x in error] if isinstance(error, list) else []
    return raised(*texts) if len(texts) == 3 else Raised("an answer", "that cannot be read")


# Judging ------------------------------------------------------------------------------------------------------------


def grade_notebook(
    original, cells: list[Cell], open_room: Callable[[], Room], limits: Limits, follow: bool = True
) -> Graded:
    """Run a student's answers against the original's tests."""
    graded = Graded("", "", steps(original))
    parts, deleted = assemble(original, cells)
    graded.sentences += [f"the cell {name} was deleted" for name in deleted]
    session = Session(open_room, limits)
    try:
        space = {}
        for part in parts:
            if part.kind == "test":
                run_step(part, session, space, tested(original)[part.name], graded)
            else:
                run_cell(part, session, space, graded)
    finally:
        session.close()
    graded.confined = session.confined
    if follow:
        follow_through(original, parts, open_room, limits, graded)
    return graded


def run_cell(part: Part, session: Session, space: dict, graded: Graded) -> None:
    """A cell that is not a test, in the student's process; a locked one here as well, for the tests."""
    if part.kind == "given":
        with redirect_stdout(io.StringIO()):
            exec(compile(part.source, f"<{part.name}>", "exec"), space)
    try:
        printed, error = session.cell(part.source)
    except Stopped as end:
        printed, error = "", str(end)
    if error:
        graded.sentences.append(f"{part.name or 'a cell of your own'}: {error}"[:300])
    if part.kind != "given":
        graded.page.append([part.name, part.source, "\n".join(filter(None, (printed, error)))])


def run_step(part: Part, session: Session, space: dict, names: list[str], graded: Graded) -> None:
    """One step's tests: its points, and what was said."""
    began = time.monotonic()
    points, said, sentence = judged(part, session, space, names)
    most = EXTRA.get(part.name, graded.most[part.name])
    graded.got[part.name] = min(points, most)
    graded.seconds[part.name] = round(time.monotonic() - began, 2)
    graded.sentences += [f"{part.name}: {sentence}"] if sentence else []
    graded.page.append([f"{part.name}: {graded.got[part.name]:g} of {graded.most[part.name]:g}", "", said])


def judged(part: Part, session: Session, space: dict, names: list[str]) -> tuple[float, str, str]:
    """Points, printed text and a remark of one test cell. Its names of the student's stand for the other process."""
    session.begin_step()
    space |= {name: Far(session, name) for name in names}
    space.pop("report", None)
    paper, points, sentence = io.StringIO(), 0.0, ""
    with redirect_stdout(paper):
        try:
            tree = ast.parse(part.source)
            last = ast.Expression(tree.body.pop().value)
            exec(compile(tree, f"<{part.name}>", "exec"), space)
            points = float(eval(compile(last, f"<{part.name}>", "eval"), space))
        except Exception as error:  # what a check did not expect of an answer costs this step
            sentence = f"{type(error).__name__}: {error}"[:300]
    sentence = sentence or session.over or session.stopped or getattr(space.get("report"), "refused", "")
    return (points if points >= 0 else 0.0), paper.getvalue(), sentence


# Follow-through marks -------------------------------------------------------------------------------------------------


def follow_through(original, parts: list[Part], open_room, limits: Limits, graded: Graded) -> None:
    """Steps that lost points are tried again with right functions in the place of earlier ones that are wrong."""
    todo = retried(original, parts, graded)
    if not todo:
        return
    session, space, scratch = Session(open_room, limits), {}, Graded("", "", graded.most)
    try:
        for part in parts:
            if part.kind != "test":
                run_cell(part, session, space, scratch)
        for part in (p for p in parts if p.name in todo and p.kind == "test"):
            right = right_cells(original, todo[part.name])
            session.ask({"do": "given", "cells": right, "names": todo[part.name]}, limits.cell_seconds)
            points, _, _ = judged(part, session, space, tested(original)[part.name])
            points = min(points, EXTRA.get(part.name, graded.most[part.name]))
            if points > graded.got[part.name]:
                graded.got[part.name] = points
                right = ", ".join(todo[part.name])
                graded.sentences.append(f"{part.name}: {points:g} points, with the right {right} in the place of yours")
    except Stopped:
        pass
    finally:
        session.close()


def retried(original, parts: list[Part], graded: Graded) -> dict[str, list[str]]:
    """{step: functions of earlier steps that are replaced when it is tried again}."""
    tests = [part for part in parts if part.kind == "test"]
    return {test.name: names for test in tests if (names := replaceable(test, original, parts, graded))}


def replaceable(test: Part, original, parts: list[Part], graded: Graded) -> list[str]:
    """Functions of earlier steps that lost points, that the student's code uses, and that this test is not about."""
    if graded.got[test.name] >= graded.most[test.name]:
        return []
    about, earlier = tested(original), []
    for part in parts[: parts.index(test)]:
        if part.kind == "test" and graded.got[part.name] < graded.most[part.name]:
            earlier += about[part.name]
    answered = any(name in defined_by_answers(original, test.name) for name in about[test.name])
    allowed = test.given if test.given is not None else (earlier if answered else ())
    text = "\n".join(part.source for part in parts if part.kind in ("answer", "own"))
    calls = {name for name in earlier if text.count(name) > text.count(f"def {name}(")}
    return sorted(calls & set(allowed) - set(about[test.name]))


def right_cells(original, names: list[str]) -> list[str]:
    """The locked cells, and the solutions of these names with those that they use: no other solution."""
    answers = [c.source for c in original.cells if is_solution(c)]
    wanted = set(names)
    while more := {x for a in answers if defined(a) & wanted for x in used(a)} - wanted:
        wanted |= more
    locked = [
        c.source for c in original.cells if grade_id(c) and not is_solution(c) and grade_id(c) not in steps(original)
    ]
    return locked + [a for a in answers if defined(a) & wanted]


def defined_by_answers(original, test: str) -> set[str]:
    """What is defined by the solution cell just before a test; nothing if the step has none of its own."""
    before = None
    for cell in original.cells:
        if grade_id(cell) == test:
            return defined(before.source) if before is not None and is_solution(before) else set()
        before = cell if cell.cell_type == "code" else before
    return set()
