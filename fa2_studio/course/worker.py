"""The process in the sandbox, which runs a student's code: it runs cells and calls functions on request, and replies.

It makes no checks and contains no right values, because the student's code can read and change everything in it.
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
from fa2_studio.course.seccomp import install_filter

OUTPUT = 20_000  # the characters that are kept of the output of one cell


class Late(BaseException):
    """Raised when the time of a request is over. It is no Exception, so `except Exception` does not catch it."""


class Paper(io.TextIOBase):
    """A text stream that accepts any amount of text and keeps its first OUTPUT characters."""

    def __init__(self):
        self.kept, self.left = [], OUTPUT

    def write(self, text: str) -> int:
        self.kept.append(text[: self.left])
        self.left -= len(self.kept[-1])
        return len(text)


# Before any code of the student runs ----------------------------------------------------------------------------------


def main() -> int:
    """Keep stdin and stdout for messages alone, install the filter, then answer requests until the grader closes."""
    outgoing, incoming = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    filtered = install_filter()
    sys.path[:] = [place for place in sys.path if place not in ("", os.getcwd())]  # import no file of the student's
    os.chdir(os.environ["HOME"])
    for name in sys.argv[1:]:
        import_module(name)  # now, so that no request's time includes it
    worker = Worker(incoming, outgoing)
    channel.send(outgoing, {"filtered": filtered})
    with contextlib.suppress(channel.Closed, BrokenPipeError):
        while True:
            worker.answer(channel.receive(incoming, worker.stand_in))
    return 0


# Serving ------------------------------------------------------------------------------------------------------------


class Worker:
    """The namespace in which a student's cells run, and the requests that the grader can make to it."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing, self.token = incoming, outgoing, ""
        self.space, self.cells = {"__name__": "__main__"}, 0

    def answer(self, request: dict) -> None:
        """Do what a request asks within its time, and send the value or the error with the token of the request."""
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
        """Call the student's function of the name in the request, or the request's probe on it.

        Without a name, the probe is called alone. During the call, functions that the request lends replace the
        student's own functions of the same names.
        """
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
        """Return the value of the call. `theirs` has the student's function, or nothing if the probe runs alone."""
        args = request["args"]
        if not request["probe"]:
            return theirs[0](*args, **request["kwargs"])
        module, probe = request["probe"].split(":")
        return getattr(import_module(f"checks.{module}"), probe)(*theirs, *args, **request["kwargs"])

    def stand_in(self, name: int):
        """Return the stand-in for a function or an object that the grader keeps."""
        return StandIn(self, name)

    def ask(self, name: int, method: str, args, kwargs):
        """Ask the grader to call one of its functions or methods. Return the value or raise the error of that call."""
        question = {"token": self.token, "ask": name, "method": method, "args": args, "kwargs": kwargs}
        channel.send(self.outgoing, question)
        answer = channel.receive(self.incoming, self.stand_in)
        if "error" in answer:
            kind, text = answer["error"]
            raise {"TypeError": TypeError, "IndexError": IndexError}.get(kind, ValueError)(text)
        return answer["value"]


class StandIn:
    """Stand for a function, or an object with methods, of the grader's process: a call here becomes a call there."""

    def __init__(self, worker: Worker, name: int, method: str = ""):
        self._worker, self._name, self._method = worker, name, method

    def __call__(self, *args, **kwargs):
        return self._worker.ask(self._name, self._method, args, kwargs)

    def __getattr__(self, method: str):
        if method.startswith("_"):
            raise AttributeError(method)
        return StandIn(self._worker, self._name, method)


# Time limits ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alarm(seconds: float, late: BaseException):
    """Raise `late` inside the with block once `seconds` are over, and again every 0.5 s, in case code catches it."""

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
    """Return the reply that `act` returns, or one that describes the error it raised or reports that it was late."""
    try:
        with alarm(seconds, Late()):
            return act()
    except Late:
        return {"late": True}
    except BaseException as error:
        return {"error": list(described(error))}


if __name__ == "__main__":
    sys.exit(main())
