"""How a check calls what a student wrote: here, or, where work is graded, in another process."""

from __future__ import annotations

import inspect
import os
from contextlib import redirect_stderr, redirect_stdout

import numpy as np

from .probes import NotAllowed


def call(function, *args, **kwargs):
    """A student's function on copies of its arrays, with what it prints and warns kept back."""
    if isinstance(function, Far):
        return function(*args, **kwargs)
    copies = [a.copy() if type(a) is np.ndarray else a for a in args]
    nowhere = open(os.devnull, "w", encoding="utf-8", errors="replace")
    with nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere), np.errstate(all="ignore"):
        came = function(*copies, **kwargs)
    if any(
        type(a) is np.ndarray and not np.array_equal(a, b, equal_nan=True) for a, b in zip(args, copies, strict=True)
    ):
        print(f"  note: {name_of(function)} changed an argument in place, but its caller may still need the old values")
    return came


def beside(probe, function, *args, **kwargs):
    """Run a probe where the student's function is: probe(function, ...), with plain values in and out."""
    if isinstance(function, Far):
        return function.session.call(function.name, args, kwargs, probe)
    return call(probe, function, *args, **kwargs)


def apart(probe, function, *args):
    """Run a probe where no code of the student's has run: probe(*args). The function says only whose it is."""
    if isinstance(function, Far):
        return function.session.apart(probe, args)
    return call(probe, *args)


def text(function) -> str:
    """The text of a student's function, as it stands in their notebook."""
    return function.text if isinstance(function, Far) else inspect.getsource(function)


def name_of(function) -> str:
    """What a student's function is called."""
    return function.name if isinstance(function, Far) else getattr(function, "__name__", "")


class Far:
    """A function of the student's in another process, by its name and its cell. Calling it asks that process."""

    def __init__(self, session, name: str, text: str = ""):
        self.session, self.name, self.text = session, name, text

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
    """The error that a student's process named, as a check expects it."""
    if kind == "NotAllowed":
        return NotAllowed(text)
    known = {"NotImplementedError": NotImplementedError, "MemoryError": MemoryError}
    return known[kind](text) if kind in known else Raised(str(kind), str(text), str(where))
