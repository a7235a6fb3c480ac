"""The process in the sandbox, which runs a student's cells, calls functions on request, and sends the results.

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

MAX_OUTPUT = 20_000  # number of characters kept from a cell's output


class TimeOver(BaseException):
    """Raised when a request's time is over. It is not an Exception, so `except Exception` does not catch it."""


class CappedOutput(io.TextIOBase):
    """A text stream that accepts any amount of text and keeps its first MAX_OUTPUT characters."""

    def __init__(self):
        self.kept, self.left = [], MAX_OUTPUT

    def write(self, text: str) -> int:
        self.kept.append(text[: self.left])
        self.left -= len(self.kept[-1])
        return len(text)


# Before any of the student's code runs --------------------------------------------------------------------------------


def main() -> int:
    """Reserve stdin and stdout for messages, install the filter, and answer requests until the stream is closed."""
    outgoing, incoming = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    filtered = install_filter()
    # Prevent imports of the student's files.
    sys.path[:] = [place for place in sys.path if place not in ("", os.getcwd())]
    os.chdir(os.environ["HOME"])
    for name in sys.argv[1:]:
        import_module(name)  # imported now, so the time does not count towards a request
    worker = Worker(incoming, outgoing)
    channel.send(outgoing, {"filtered": filtered})
    with contextlib.suppress(channel.Closed, BrokenPipeError):
        while True:
            worker.answer(channel.receive(incoming, worker.stand_in))
    return 0


# Serving ------------------------------------------------------------------------------------------------------------


class Worker:
    """The namespace in which a student's cells run, and the requests that the grader can send."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing, self.token = incoming, outgoing, ""
        self.space, self.cells = {"__name__": "__main__"}, 0

    def answer(self, request: dict) -> None:
        """Execute a request within its time limit, and send its value or error with the request's token."""
        self.token = request["token"]
        output = CappedOutput()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), np.errstate(all="ignore"):
            reply = reply_in_time(request["seconds"], lambda: {"value": getattr(self, f"do_{request['do']}")(request)})
        reply |= {"token": self.token, "printed": "".join(output.kept)}
        try:
            channel.send(self.outgoing, reply)
        except ValueError as too_large:
            channel.send(self.outgoing, {"token": self.token, "error": ["ValueError", str(too_large), ""]})

    def do_cell(self, request: dict) -> None:
        """Run a cell."""
        self.cells += 1
        run_source(request["source"], str(self.cells), self.space)

    def do_call(self, request: dict):
        """Call the student's function named in the request, or call the request's probe on that function.

        Without a name, the probe is called alone. During the call, the functions lent by the request replace the
        student's functions with the same names.
        """
        name = request["name"]
        if name and name not in self.space:
            raise NameError(f"name {name!r} is not defined")
        functions = [self.space[name]] if name else []
        before = dict(self.space)
        self.space |= {key: lent(there, request["args"]) for key, there in request["lent"].items()}
        try:
            return self.call_function(functions, request)
        finally:
            for key in request["lent"]:
                self.space.pop(key, None)
            self.space |= {key: before[key] for key in request["lent"] if key in before}

    def call_function(self, functions: list, request: dict):
        """Return the value of the call. `functions` holds the student's function, or is empty for a probe alone."""
        args = request["args"]
        if not request["probe"]:
            return functions[0](*args, **request["kwargs"])
        module, probe = request["probe"].split(":")
        return getattr(import_module(f"checks.{module}"), probe)(*functions, *args, **request["kwargs"])

    def stand_in(self, name: int):
        """Return the stand-in for a function or an object that remains in the grader."""
        return StandIn(self, name)

    def ask(self, name: int, method: str, args, kwargs):
        """Ask the grader to call one of its functions or methods, and return the result or raise the error."""
        question = {"token": self.token, "ask": name, "method": method, "args": args, "kwargs": kwargs}
        channel.send(self.outgoing, question)
        answer = channel.receive(self.incoming, self.stand_in)
        if "error" in answer:
            kind, text = answer["error"]
            raise {"TypeError": TypeError, "IndexError": IndexError}.get(kind, ValueError)(text)
        return answer["value"]


class StandIn:
    """A stand-in for a function or an object in the grader's process. A call here becomes a call there."""

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
    """Raise `late` inside the with block after `seconds`, and again every 0.5 s in case the code catches it."""

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


def reply_in_time(seconds: float, act) -> dict:
    """Return the reply from `act`, or a reply that describes its error or reports that it was late."""
    try:
        with alarm(seconds, TimeOver()):
            return act()
    except TimeOver:
        return {"late": True}
    except BaseException as error:
        return {"error": list(described(error))}


if __name__ == "__main__":
    sys.exit(main())
