"""The process in the box that runs a student's code: it executes cells and calls functions as it is told, and answers.

It judges nothing and knows no right value. Everything in it belongs to the student.
"""

import contextlib
import io
import os
import signal
import sys
import threading
from importlib import import_module

import numpy as np
from checks.cells import described, run_source
from checks.probes import lent

from fa2_studio.course import channel
from fa2_studio.course.seal import seal

OUTPUT = 20_000  # characters of one cell


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


def main() -> int:
    """Keep what messages come and go by, and serve."""
    outgoing, incoming = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    sealed = seal()
    sys.path[:] = [place for place in sys.path if place not in ("", os.getcwd())]  # nothing is imported from a stage
    os.chdir(os.environ["HOME"])
    for name in sys.argv[1:]:
        import_module(name)  # before anybody's time begins
    worker = Worker(incoming, outgoing)
    channel.send(outgoing, {"sealed": sealed})
    with contextlib.suppress(channel.Closed, BrokenPipeError):
        while True:
            worker.answer(channel.receive(incoming, worker.stand_in))
    return 0


# Serving ------------------------------------------------------------------------------------------------------------


class Worker:
    """The student's namespace and what can be asked of it."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing, self.token = incoming, outgoing, ""
        self.space, self.cells = {"__name__": "__main__"}, 0

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
        """Run a cell."""
        self.cells += 1
        run_source(request["source"], str(self.cells), self.space)

    def do_call(self, request: dict):
        """Call something of the student's; or a probe, on it or, without a name, alone."""
        name = request["name"]
        if name and name not in self.space:
            raise NameError(f"name {name!r} is not defined")
        theirs = [self.space[name]] if name else []
        mine = dict(self.space)
        self.space |= {key: lent(there, request["args"]) for key, there in request["lent"].items()}
        try:
            return self.called(theirs, request)
        finally:
            for key in request["lent"]:
                self.space.pop(key, None)
            self.space |= {key: mine[key] for key in request["lent"] if key in mine}

    def called(self, theirs: list, request: dict):
        """What comes of a call, or of a probe."""
        args = request["args"]
        if not request["probe"]:
            return theirs[0](*args, **request["kwargs"])
        module, probe = request["probe"].split(":")
        return getattr(import_module(f"checks.{module}"), probe)(*theirs, *args, **request["kwargs"])

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


# What becomes of a request --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alarm(seconds: float, late: BaseException):
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
        with alarm(seconds, Late()):
            return act()
    except Late:
        return {"late": True}
    except BaseException as error:
        return {"error": list(described(error))}


if __name__ == "__main__":
    sys.exit(main())
