"""The process in the box that runs a student's code: it executes cells and calls functions as it is told, and answers.

It judges nothing and knows no right value. Everything in it belongs to the student.
"""

import ast
import contextlib
import importlib.abc
import io
import json
import linecache
import os
import re
import signal
import sys
import threading
import traceback
from importlib import import_module
from importlib.machinery import PathFinder

import numpy as np

from fa2_studio.course import channel

OUTPUT = 20_000  # characters of one cell
FILE_BYTES = 100 * 2**20  # of one file that a notebook writes
PROCESSES = 64  # threads count
FINISHED = ("flash_attn", "xformers", "sageattention", "flashinfer")
TORCH_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward")
OWN = ("fa2_lab", "fa2_studio", "checks")


class Late(BaseException):
    """The time of a request is over. No ordinary except clause swallows it."""


class Paper(io.TextIOBase):
    """Takes any amount of text and keeps the first part."""

    def __init__(self):
        self.kept, self.room = [], OUTPUT

    def write(self, text: str) -> int:
        self.kept.append(text[: self.room])
        self.room -= len(self.kept[-1])
        return len(text)


# Before anything of the student's runs --------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Limit this process, then serve in it."""
    about = json.loads(argv[0])
    outgoing, incoming = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nowhere, number)
    keep_to(about)
    os.dup2(nowhere, 2)
    worker = Worker(incoming, outgoing)
    channel.send(outgoing, {"ready": True})
    with contextlib.suppress(channel.Closed, BrokenPipeError):
        while True:
            worker.answer(channel.receive(incoming, worker.stand_in))
    return 0


def keep_to(about: dict) -> None:
    """One core, limits that every process here inherits, and a user that owns nothing, as far as they are to be had."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[about["core"] % len(cores)]})
    if hasattr(os, "nice"):
        os.nice(5)
    with contextlib.suppress(ImportError):
        import resource

        # CUDA reserves far more addresses than it uses: on a GPU machine only private memory is counted.
        memory = resource.RLIMIT_DATA if os.path.exists("/dev/nvidiactl") else resource.RLIMIT_AS
        wanted = {memory: about["memory_mb"] * 2**20, resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_CORE: 0}
        wanted |= {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_CPU: int(about["seconds"]) + 60}
        if about["uid"]:  # elsewhere the user's other processes would count
            wanted[resource.RLIMIT_NPROC] = PROCESSES
        for which, value in wanted.items():
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(which, (value, value))
    if about["uid"] and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(*[about["uid"]] * 3)
        os.setresuid(*[about["uid"]] * 3)


# Serving ------------------------------------------------------------------------------------------------------------


class Worker:
    """The student's namespace and what can be asked of it."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing, self.token = incoming, outgoing, ""
        self.space, self.cells = {"__name__": "__main__"}, 0
        sys.meta_path.insert(0, OffLimits())

    def answer(self, request: dict) -> None:
        """Do what is asked, within its time, and send what came of it under the token of the request."""
        self.token = request["token"]
        paper = Paper()
        with contextlib.redirect_stdout(paper), contextlib.redirect_stderr(paper), np.errstate(all="ignore"):
            reply = in_time(request["seconds"], lambda: {"value": getattr(self, f"do_{request['do']}")(request)})
        reply |= {"token": self.token, "printed": "".join(paper.kept)}
        try:
            channel.send(self.outgoing, reply)
        except ValueError as too_large:
            channel.send(self.outgoing, {"token": self.token, "error": ["ValueError", str(too_large), ""]})

    def do_cell(self, request: dict) -> None:
        """Run a cell; a notebook's magics are left out."""
        source, self.cells = without_magics(request["source"]), self.cells + 1
        file = f"<cell {self.cells}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # Triton reads the source
        try:
            exec(compile(ast.parse(source, file), file, "exec"), self.space)
        finally:
            torch_refuses()

    def do_call(self, request: dict):
        """Call something of the student's."""
        return self.theirs(request)(*request["args"], **request["kwargs"])

    def do_beside(self, request: dict):
        """Run a probe on something of the student's."""
        return probe(request)(self.theirs(request), *request["args"], **request["kwargs"])

    def do_apart(self, request: dict):
        """Run a probe alone."""
        return probe(request)(*request["args"])

    def theirs(self, request: dict):
        if request["name"] not in self.space:
            raise NameError(f"name {request['name']!r} is not defined")
        return self.space[request["name"]]

    def stand_in(self, name: int):
        """What stands here for a function or an object of the grader's."""
        return StandIn(self, name)

    def ask(self, name: int, method: str, args, kwargs):
        """Have the grader call something of its own."""
        question = {"token": self.token, "ask": name, "method": method, "args": args, "kwargs": kwargs}
        channel.send(self.outgoing, question)
        answer = channel.receive(self.incoming, self.stand_in)
        if "error" in answer:
            kind, text = answer["error"]
            raise {"TypeError": TypeError, "IndexError": IndexError}.get(kind, ValueError)(text)
        return answer["value"]


class StandIn:
    """A function, or an object with methods, that lives in the grader's process."""

    def __init__(self, worker: Worker, name: int, method: str = ""):
        self._worker, self._name, self._method = worker, name, method

    def __call__(self, *args, **kwargs):
        return self._worker.ask(self._name, self._method, args, kwargs)

    def __getattr__(self, method: str):
        if method.startswith("_"):
            raise AttributeError(method)
        return StandIn(self._worker, self._name, method)


def without_magics(source: str) -> str:
    """A cell as Python; only one that is none may hold a notebook's magics."""
    with contextlib.suppress(SyntaxError, ValueError):
        ast.parse(source)
        return source
    return re.sub(r"^(\s*)[%!].*", r"\1pass", source, flags=re.MULTILINE)


def probe(request: dict):
    module, name = request["probe"].split(":")
    return getattr(import_module(f"checks.{module}"), name)


# What becomes of a request --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alarm(seconds: float, late: type[BaseException]):
    """Raise `late` in what is done inside once its time is over, and again for code that swallows it."""

    def ring(*_):
        raise late

    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def in_time(seconds: float, act) -> dict:
    """The reply of an act, or what it raised, or that it was late."""
    try:
        with alarm(seconds, Late):
            return act()
    except Late:
        return {"late": True}
    except BaseException as error:
        return failure(error)


def failure(error: BaseException) -> dict:
    """An error as plain text: its name, what it says, and the student's line; a private name is its base's."""
    if type(error).__name__ == "InterpreterError" and error.__cause__:  # Triton's interpreter wraps what was raised
        error = error.__cause__
    try:
        text = str(error)[:1000]
        if isinstance(error, SyntaxError):  # its own words name a file that no student knows
            text = f"{error.msg}, in line {error.lineno}: {(error.text or '').strip()}"[:1000]
    except BaseException:
        text = ""
    name = next(cls.__name__ for cls in type(error).__mro__ if not cls.__name__.startswith("_"))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("<cell")]
    where = f"line {frames[-1].lineno} of the cell with {frames[-1].name}: {frames[-1].line}"[:300] if frames else ""
    return {"error": [name[:60], text, where]}


# Around the student's code ------------------------------------------------------------------------------------------


class OffLimits(importlib.abc.MetaPathFinder):
    """Says why something cannot be imported here: finished attention, or a part of this package that was not given."""

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top in FINISHED:
            raise ModuleNotFoundError(f"{name} is finished attention, which is off limits here", name=name)
        if top not in OWN:
            return None
        if spec := PathFinder.find_spec(name, path, target):
            return spec
        raise ModuleNotFoundError(f"{name} is off limits in this assignment", name=name)


def torch_refuses() -> None:
    """torch's finished attention refuses to be called, once torch is there."""
    functional = getattr(getattr(sys.modules.get("torch"), "nn", None), "functional", None)
    for name in TORCH_ATTENTION:
        if hasattr(functional, name):
            setattr(functional, name, refusing(f"torch.nn.functional.{name}"))


def refusing(name: str):
    def refused(*_, **__):
        raise Borrowed(f"{name} was called, which is a ready-made solution")

    return refused


class Borrowed(BaseException):
    """A ready-made solution was called."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
