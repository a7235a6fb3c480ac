"""The process that runs a student's code: it executes cells and calls functions as it is told, and answers.

It judges nothing and knows no right value. Everything in it belongs to the student.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import io
import signal
import sys
import traceback
import types
from importlib import import_module
from importlib.machinery import PathFinder

import numpy as np

import fa2_studio.course.channel as channel

OUTPUT_CHARACTERS = 100_000  # of one cell
FINISHED = ("flash_attn", "xformers", "sageattention", "flashinfer")
TORCH_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward")


class Late(BaseException):
    """The time of a request is over. No ordinary except clause swallows it."""


class Paper(io.TextIOBase):
    """Takes any amount of text and keeps the first part."""

    def __init__(self, room: int = OUTPUT_CHARACTERS):
        self.kept, self.room = [], room

    def write(self, text: str) -> int:
        self.kept.append(text[: self.room])
        self.room -= len(self.kept[-1])
        return len(text)

    def isatty(self) -> bool:
        return False


# Serving ------------------------------------------------------------------------------------------------------------


def serve(incoming, outgoing, confined: dict) -> None:
    """Answer requests until the other side closes."""
    worker = Worker(incoming, outgoing)
    channel.send(outgoing, {"ready": True, "confined": confined})
    with contextlib.suppress(channel.Closed, BrokenPipeError):
        while True:
            worker.answer(channel.receive(incoming, worker.stand_in, trusted=True))


class Worker:
    """The student's namespace and what can be asked of it."""

    def __init__(self, incoming, outgoing):
        self.incoming, self.outgoing, self.token = incoming, outgoing, ""
        self.shell = quiet_shell()
        sys.meta_path.insert(0, OffLimits())

    def answer(self, request: dict) -> None:
        """Do what is asked, within its time, and send what came of it under the token of the request."""
        self.token = request["token"]
        paper = Paper()
        with contextlib.redirect_stdout(paper), contextlib.redirect_stderr(paper), np.errstate(all="ignore"):
            reply = in_time(request["seconds"], lambda: getattr(self, f"do_{request['do']}")(request))
        reply |= {"token": self.token, "printed": "".join(paper.kept)}
        try:
            channel.send(self.outgoing, reply)
        except ValueError as too_large:
            channel.send(self.outgoing, {"token": self.token, "error": ["ValueError", str(too_large), ""]})

    def do_cell(self, request: dict) -> dict:
        """Run a cell as a notebook does, magics and all."""
        result = self.shell.run_cell(request["source"])
        torch_refuses()
        error = result.error_before_exec or result.error_in_exec
        if isinstance(error, (Late, MemoryError)):
            raise error
        return {"value": None} if error is None else failure(error)

    def do_call(self, request: dict) -> dict:
        """Call something of the student's."""
        theirs = self.shell.user_ns[request["name"]] if request["name"] in self.shell.user_ns else missing(request)
        return {"value": theirs(*request["args"], **request["kwargs"])}

    def do_beside(self, request: dict) -> dict:
        """Run a probe on something of the student's."""
        theirs = self.shell.user_ns[request["name"]] if request["name"] in self.shell.user_ns else missing(request)
        module, name = request["probe"].split(":")
        probe = getattr(import_module(module), name)
        return {"value": probe(theirs, *request["args"], **request["kwargs"])}

    def do_apart(self, request: dict) -> dict:
        """Run a probe alone."""
        module, name = request["probe"].split(":")
        return {"value": getattr(import_module(module), name)(*request["args"])}

    def do_given(self, request: dict) -> dict:
        """Put right versions of some functions in the place of the student's; they call each other alone."""
        space = {"__name__": "right"}
        for source in request["cells"]:
            exec(compile(source, "<given>", "exec"), space)
        self.shell.user_ns.update({name: space[name] for name in request["names"]})
        return {"value": None}

    def do_names(self, request: dict) -> dict:
        """Which of some names the student has defined."""
        return {"value": [name for name in request["names"] if name in self.shell.user_ns]}

    def stand_in(self, name: int):
        """What stands here for a function or an object of the grader's."""
        return StandIn(self, name)

    def ask(self, name: int, method: str, args, kwargs):
        """Have the grader call something of its own."""
        question = {"token": self.token, "ask": name, "method": method, "args": args, "kwargs": kwargs}
        channel.send(self.outgoing, question)
        answer = channel.receive(self.incoming, self.stand_in, trusted=True)
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


def missing(request: dict):
    raise NameError(f"name {request['name']!r} is not defined")


# What becomes of a request --------------------------------------------------------------------------------------------


def in_time(seconds: float, act) -> dict:
    """The reply of an act, or what it raised, or that it was late. The alarm rings again for code that swallows it."""

    def ring(*_):
        raise Late

    has_alarm = hasattr(signal, "setitimer")
    try:
        try:
            if has_alarm:
                signal.signal(signal.SIGALRM, ring)
                signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01), 0.5)
            return act()
        finally:
            if has_alarm:
                signal.setitimer(signal.ITIMER_REAL, 0)
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
    return {"error": [name[:60], text, line_of(error)]}


def line_of(error: BaseException) -> str:
    """Where in the student's cells an error was raised, if it was."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "ipython-input" in f.filename or "ipykernel_" in f.filename
    ]
    return f"line {frames[-1].lineno} of the cell with {frames[-1].name}: {frames[-1].line}"[:300] if frames else ""


# Around the student's code ------------------------------------------------------------------------------------------


def quiet_shell():
    """IPython without history, colours, and tracebacks of its own."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "NoColor" if hasattr(InteractiveShell, "colors") else ""
    shell = InteractiveShell.instance(config=config)
    shell.showtraceback = shell.showsyntaxerror = lambda *_, **__: None
    return shell


class OffLimits(importlib.abc.MetaPathFinder):
    """Says why something cannot be imported here: finished attention, or a part of this package that was not given."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in FINISHED:
            raise ModuleNotFoundError(f"{name} is finished attention, which is off limits here", name=name)
        if not name.startswith("fa2_lab."):
            return None
        if spec := PathFinder.find_spec(name, path, target):
            return spec
        raise ModuleNotFoundError(f"{name} is off limits in this assignment", name=name)


def torch_refuses() -> None:
    """torch's finished attention refuses to be called, once torch is there."""
    torch = sys.modules.get("torch")
    functional = getattr(getattr(torch, "nn", None), "functional", None)
    for name in TORCH_ATTENTION:
        if isinstance(getattr(functional, name, None), (types.FunctionType, types.BuiltinFunctionType)):
            setattr(functional, name, refusing(f"torch.nn.functional.{name}"))


def refusing(name: str):
    class Refused:
        def __call__(self, *_, **__):
            raise Borrowed(f"{name} was called, which is a ready-made solution")

    return Refused()


class Borrowed(BaseException):
    """A ready-made solution was called."""
