"""How a check calls what a student wrote: here, with the package's solutions out of reach, or in another process."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from importlib import import_module

import numpy as np

from fa2_studio.course.probes import NotAllowed

SOLUTIONS = [f"fa2_lab.reference.{name}" for name in ("online_softmax", "naive", "fa1", "fa2", "heads")]
KERNELS = [f"fa2_lab.kernels.portable.{name}" for name in ("forward", "backward")]
TORCH = ["scaled_dot_product_attention"]


class Borrowed(BaseException):
    """A ready-made solution was called. No ordinary except clause swallows it."""

    def __init__(self, name: str):
        super().__init__(f"{name} was called, which is a ready-made solution")


# Calling ------------------------------------------------------------------------------------------------------------


def call(function, *args, **kwargs):
    """A student's function on copies of its arrays, with the package's solutions out of its reach."""
    if isinstance(function, Far):
        return function(*args, **kwargs)
    with alone():
        return call_freely(function, *args, **kwargs)


def call_freely(function, *args, **kwargs):
    """A student's function on copies of its arrays, with what it prints and warns kept back."""
    if isinstance(function, Far):
        return function(*args, **kwargs)
    copies = [a.copy() if type(a) is np.ndarray else a for a in args]
    quiet = Discard()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), np.errstate(all="ignore"):
        return function(*copies, **kwargs)


def beside(probe, function, *args, **kwargs):
    """Run a probe where the student's function is: probe(function, ...), with plain values in and out."""
    if isinstance(function, Far):
        return function.session.probe(probe, function.name, args, kwargs)
    return call(probe, function, *args, **kwargs)


def apart(probe, function, *args):
    """Run a probe where no code of the student's has run: probe(*args). The function says only whose it is."""
    if isinstance(function, Far):
        return function.session.apart(probe, args)
    return call_freely(probe, *args)


class Far:
    """A function of the student's in another process, by its name. Calling it asks that process."""

    def __init__(self, session, name: str):
        self.session, self.name = session, name

    def __call__(self, *args, **kwargs):
        return self.session.call(self.name, args, kwargs)


class Raised(Exception):
    """What a student's code raised in another process: the error's name, what it says, and the line."""

    def __init__(self, kind: str, text: str, where: str = ""):
        super().__init__(f"{kind}: {text}" if text else kind)
        self.where = where


class Stopped(Exception):
    """A student's code did not end in time, or its process ended."""


def raised(kind: str, text: str, where: str) -> Exception:
    """The error that a student's process told of, as a check expects it."""
    if kind in ("NotAllowed", "Borrowed"):
        return NotAllowed(text)
    known = {"NotImplementedError": NotImplementedError, "MemoryError": MemoryError}
    return known[kind](text) if kind in known else Raised(str(kind), str(text), str(where))


# Out of reach -------------------------------------------------------------------------------------------------------

called: list[str] = []  # a bare except clause may swallow Borrowed, but not this


def refuse(*_, **__):
    """What a solution's code is replaced with; its own name is that of the code it replaces."""
    import sys

    from fa2_studio.course import guard

    name = sys._getframe().f_code.co_name
    guard.called.append(name)
    raise guard.Borrowed(name)


@contextlib.contextmanager
def alone():
    """The package's solutions are out of reach inside this block, however they were imported."""
    called.clear()
    kept = [(f, f.__code__) for f in solutions()]
    for function, code in kept:
        function.__code__ = refuse.__code__.replace(co_name=f"{function.__module__}.{code.co_name}")
    try:
        with torch_refuses():
            yield
    finally:
        for function, code in kept:
            function.__code__ = code
    if called:
        raise Borrowed(called[0])


def solutions() -> list[types.FunctionType]:
    """Every function and method of the modules that hold solutions."""
    found = {}
    for name in SOLUTIONS:
        import_module(name)
    for name in [*SOLUTIONS, *KERNELS]:
        module = sys.modules.get(name)  # the kernels only if somebody imported them
        for thing in vars(module).values() if module else ():
            for function in functions_of(thing):
                if function.__module__ == name and not function.__code__.co_freevars:
                    found[id(function)] = function
    return list(found.values())


def functions_of(thing) -> list[types.FunctionType]:
    """A function itself, or the methods of a class."""
    if isinstance(thing, type):
        members = [getattr(m, "__func__", m) for m in vars(thing).values()]
        return [m for m in members if isinstance(m, types.FunctionType)]
    return [thing] if isinstance(thing, types.FunctionType) else []


@contextlib.contextmanager
def torch_refuses():
    """torch's attention refuses too, where torch was imported."""
    functional = getattr(sys.modules.get("torch"), "nn", None)
    functional = getattr(functional, "functional", None)
    kept = {name: getattr(functional, name) for name in TORCH if hasattr(functional, name)}

    def refusing(name):
        def stand_in(*_, **__):
            called.append(name)
            raise Borrowed(name)

        return stand_in

    for name in kept:
        setattr(functional, name, refusing(f"torch.nn.functional.{name}"))
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(functional, name, original)


class Discard(io.TextIOBase):
    """Takes any amount of text and keeps none."""

    def write(self, text: str) -> int:
        return len(text)
