"""Triton kernels: beside the student's code their texts; apart, what they do on a meter, and what they are compiled to.

The meter counts what all programs of a launch do together: elements loaded from and stored to each tensor, elements
added to it by atomic adds, multiplications of products, exponentials, divisions, and entries that a mask goes over; of
each product its rows, its inner length, its columns and its precision, as tl.dot was asked for it; and of each tensor
how often something past its end was reached, and which elements never were.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from .cells import described
from .probes import NotAllowed
from .probes_cases import defined

FENCE = 2**14  # elements behind a tensor's end that are not its own
KERNELS = (JITFunction, interpreter.InterpretedFunction)  # of Triton's own making, compiled or interpreted


# Beside the student's code ------------------------------------------------------------------------------------------


def texts(kernel) -> dict:
    """The text of a kernel, of the functions that it calls, and the numbers that they read."""
    if type(kernel) not in KERNELS:
        raise NotAllowed(f"this is a {type(kernel).__name__} instead of a Triton kernel, a def under @triton.jit")
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))))
    if any(isinstance(x, ast.Raise) and "NotImplementedError" in ast.unparse(x) for x in nodes):
        raise NotImplementedError
    found = dict(kernels={}, constants={})
    take(kernel.fn, **found)
    return found


def take(function, kernels: dict, constants: dict) -> None:
    """Add what a function under @triton.jit is made of."""
    if function.__name__ in kernels:
        return
    source = textwrap.dedent(inspect.getsource(function))
    kernels[function.__name__] = source
    for name in sorted({x.id for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Name)}):
        thing = function.__globals__.get(name)
        thing = thing.value if isinstance(thing, tl.constexpr) else thing
        if type(thing) in KERNELS:
            take(thing.fn, kernels, constants)
        elif isinstance(thing, (bool, int, float, str)):
            constants[name] = thing


# Where none of it has run: the meter --------------------------------------------------------------------------------


@dataclass
class Meter:
    """What the programs of a launch did."""

    loads: Counter = field(default_factory=Counter)
    stores: Counter = field(default_factory=Counter)
    adds: Counter = field(default_factory=Counter)
    operations: Counter = field(default_factory=Counter)
    products: Counter = field(default_factory=Counter)
    past: Counter = field(default_factory=Counter)  # accesses of the memory after each tensor's end
    missed: Counter = field(default_factory=Counter)  # elements that were neither loaded nor stored
    misfits: Counter = field(default_factory=Counter)  # what errors of products say, by their lines
    places: Counter = field(default_factory=Counter)  # multiplications by the lines of `file` that lead to them


@contextmanager
def metered(file: str, **tensors: torch.Tensor) -> Iterator[Meter]:
    """Count while kernels of a file run. Tensors are known by their addresses, fences included."""
    meter, builder = Meter(), interpreter.interpreter_builder
    ends = {name: x.untyped_storage() for name, x in tensors.items()}
    ends = {name: (x.data_ptr(), x.data_ptr() + x.nbytes()) for name, x in ends.items()}
    reached = {name: np.zeros(x.numel(), dtype=bool) for name, x in tensors.items()}

    def count(where: Counter, pointers, mask) -> None:
        touched = np.asarray(pointers.data)
        touched = touched if mask is None else touched[np.asarray(mask.data, dtype=bool)]
        where["everything"] += touched.size
        inside = 0
        for name, (first, end) in ends.items():
            mine = (touched[(touched >= first) & (touched < end)] - first) // tensors[name].element_size()
            own = mine[mine < reached[name].size].astype(int)
            reached[name][own] = True
            where[name] += mine.size
            meter.past[name] += mine.size - own.size
            inside += mine.size
        if ends and inside < touched.size:  # the interpreter would crash, or overwrite what is not its own
            raise IndexError("a pointer is far outside of every tensor: by how much does it grow from row to row?")

    def load(pointers, mask, *rest, **more):
        count(meter.loads, pointers, mask)
        return kept["create_masked_load"](pointers, mask, *rest, **more)

    def store(pointers, value, mask, *rest, **more):
        count(meter.stores, pointers, mask)
        return kept["create_masked_store"](pointers, value, mask, *rest, **more)

    def atomic(kind, pointers, value, mask, *rest):
        """An add is one; an exchange, a maximum and the like are stores. Each gives the old value, as a load does."""
        count(meter.adds if kind.name in ("ADD", "FADD") else meter.stores, pointers, mask)
        meter.loads["everything"] += int(np.sum(mask.data))
        return kept["create_atomic_rmw"](kind, pointers, value, mask, *rest)

    def swap(pointers, *rest):
        meter.loads["everything"] += np.size(pointers.data)
        count(meter.stores, pointers, None)
        return kept["create_atomic_cas"](pointers, *rest)

    def dot(a, b, d, precision, *rest):
        size = (*a.data.shape[-2:], b.data.shape[-1])
        meter.operations["multiplications of products"] += math.prod(size)
        asked = getattr(precision, "name", str(precision)).lower()
        meter.products[(*size, asked if str(a.dtype) == "fp32" else str(a.dtype))] += 1
        meter.places[lines_to(sys._getframe(1), file)] += math.prod(size)
        return kept["create_dot"](a, b, d, precision, *rest)

    def counting(name: str, kind: str):
        def counted(*operands):
            result = kept[name](*operands)
            meter.operations[kind] += np.size(result.data)
            return result

        return counted

    watched = dict(
        create_masked_load=load,
        create_masked_store=store,
        create_atomic_rmw=atomic,
        create_atomic_cas=swap,
        create_dot=dot,
        create_exp=counting("create_exp", "exponentials"),
        create_exp2=counting("create_exp2", "exponentials"),
        create_fdiv=counting("create_fdiv", "divisions"),
        create_select=counting("create_select", "masked entries"),
    )
    kept = {name: getattr(builder, name) for name in watched}
    vars(builder).update(watched)
    try:
        yield meter
        meter.missed.update({name: np.flatnonzero(~x).tolist() for name, x in reached.items() if not x.all()})
    finally:
        for name in watched:
            with suppress(KeyError):
                del vars(builder)[name]


def lines_to(frame, file: str) -> tuple[int, ...]:
    """The lines of a file that lead to a frame, the outermost first."""
    lines = []
    while frame:
        lines += [frame.f_lineno] if frame.f_code.co_filename == file else []
        frame = frame.f_back
    return tuple(lines[::-1])


def fenced(x: torch.Tensor, beyond: float = math.nan) -> torch.Tensor:
    """The tensor with elements behind its end, in the same memory, that nobody may use."""
    wide = x.new_full((x.numel() + FENCE,), beyond)
    wide[: x.numel()] = x.flatten()
    return wide[: x.numel()].view(x.shape)


def fence(x: torch.Tensor) -> torch.Tensor:
    """What stands behind a fenced tensor."""
    return x.flatten().as_strided((x.numel() + FENCE,), (1,))[x.numel() :]


def launch(text: str, name: str, *more) -> tuple[dict, dict, list[str]]:
    """Run a kernel of a program, as `launched` does. If the operands of a product misfit, add what the error said.

    The kernel then runs again with products that turn an operand themselves, so that the rest can be checked.
    """
    try:
        return launched(text, name, *more)
    except Exception as error:
        said = described(error)[1:]
        if "reduction dimensions" not in said[0]:
            raise
        with suppress(Exception):
            came, counted, spilled = launched(text.replace("tl.dot(", "fitting(") + FITTING, name, *more)
            return came, counted | dict(misfits=dict([said])), spilled
        raise


FITTING = """

def fitting(input, other, *more, **named):
    if input.shape[1] != other.shape[0]:
        input, other = (input, other.T) if input.shape[1] == other.shape[1] else (input.T, other)
    return tl.dot(input, other, *more, **named)
"""


def launched(
    text: str, name: str, programs: int, tensors: dict, outputs: dict, options: dict
) -> tuple[dict, dict, list[str]]:
    """Run a kernel of a program on the tensors, then the outputs, then the options, in fp32.

    Inputs have NaN behind their end, outputs a number that must stay. The outputs, what the meter counted, and the
    outputs behind whose end something was written.
    """
    kernel = defined(text, name)
    given = {name: torch.tensor(x, dtype=torch.float32) for name, x in (tensors | outputs).items()}
    given = {name: fenced(x, 5.0 if name in outputs else math.nan) for name, x in given.items()}
    with metered(kernel.fn.__code__.co_filename, **given) as meter:
        kernel[(programs,)](*given.values(), **options)
    spilled = [name for name in outputs if not (fence(given[name]) == 5.0).all()]
    counted = {kind: dict(counts) for kind, counts in vars(meter).items()}
    return {name: given[name].numpy().copy() for name in outputs}, counted, spilled


# A program with a forward(q, k, v, causal) ----------------------------------------------------------------------------


def run(text: str, q, k, v, causal: bool, beyond: float = math.nan) -> tuple[np.ndarray, np.ndarray, dict]:
    """Its O and L in Triton's interpreter, and what the meter counted. `beyond` stands behind the end of Q, K and V."""
    forward = defined(text, "forward")
    with metered(forward.__code__.co_filename) as meter:
        O, L = forward(*(fenced(torch.tensor(x), beyond) for x in (q, k, v)), causal)
    counted = dict(meter.operations) | dict(loaded=meter.loads["everything"])
    counted["products"] = [[list(place[1:]), n] for place, n in sorted(meter.places.items())]  # without forward's line
    return O.double().numpy(), L.double().numpy(), counted


def compiled(text: str, chip: str, d: int, N: int) -> tuple[dict, str, list]:
    """Numbers, machine code and the lines of the products of the kernel that a program launches."""
    xray = import_module("fa2_lab.tools.xray.compile").xray
    with TemporaryDirectory(prefix="ladder-") as folder:
        path = Path(folder, "mine.py")
        path.write_text(text, encoding="utf-8")
        (kernel,) = xray(str(path), chip, d=d, N=N, dtype="float16")
    return kernel.numbers, kernel.stages["sass"], product_lines(kernel.stages["ttir"])


def product_lines(ttir: str) -> list[list[int]]:
    """For each product of a compiled kernel the lines that lead to it, the outermost first."""
    said = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttir, re.MULTILINE))

    def lines(mark: str) -> list[int]:
        text = said.get(mark, mark)
        if place := re.match(r'".*":(\d+):\d+$', text):
            return [int(place[1])]
        return [n for inner in reversed(re.findall(r"#loc\d*", text)) for n in lines(inner)]

    return [lines(mark) for mark in re.findall(r"= tt\.dot\b.* loc\((#loc\d*)\)", ttir)]
