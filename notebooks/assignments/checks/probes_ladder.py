"""Kernels as text: beside the student's code what they are made of; apart, what a program of them does and becomes."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from .probes import NotAllowed

# Beside the student's code ------------------------------------------------------------------------------------------


def texts(kernel) -> dict:
    """The text of a kernel, of the functions that it calls, and the numbers that they read."""
    from .probes import is_kernel

    if not is_kernel(kernel):
        raise NotAllowed(f"a Triton kernel is asked for: @triton.jit above a def. This is a {type(kernel).__name__}")
    if "raise NotImplementedError" in inspect.getsource(kernel.fn):
        raise NotImplementedError
    found = dict(kernels={}, constants={})
    take(kernel.fn, **found)
    return found


def take(function, kernels: dict, constants: dict) -> None:
    """Add what a function under @triton.jit is made of."""
    import triton.language as tl

    if function.__name__ in kernels:
        return
    source = textwrap.dedent(inspect.getsource(function))
    kernels[function.__name__] = source
    for name in sorted({x.id for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Name)}):
        thing = function.__globals__.get(name)
        thing = thing.value if isinstance(thing, tl.constexpr) else thing
        if type(thing).__name__ in ("InterpretedFunction", "JITFunction"):
            take(thing.fn, kernels, constants)
        elif isinstance(thing, (bool, int, float, str)):
            constants[name] = thing


# Where nothing of the student's has run: a program that was found to be Triton ----------------------------------------


def run(text: str, q, k, v, causal: bool) -> tuple[np.ndarray, np.ndarray, dict]:
    """O and L of a program in Triton's interpreter, and what the meter counted."""
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    from .probes_cases import defined
    from .probes_triton import metered

    Q, K, V = (fenced(torch.tensor(x)) for x in (q, k, v))
    forward = defined(text, "forward")
    with metered() as meter, placed(forward.__code__.co_filename) as places:
        O, L = forward(Q, K, V, causal)
    counted = dict(meter.operations) | dict(loaded=meter.loads["everything"])
    counted["products"] = [[list(place), n] for place, n in sorted(places.items())]
    return O.double().numpy(), L.double().numpy(), counted


@contextmanager
def placed(file: str) -> Iterator[Counter]:
    """The multiplications of each product, by the lines of a file that lead to it, the outermost first."""
    from triton.runtime import interpreter

    places, builder, kept = Counter(), vars(interpreter.interpreter_builder), interpreter.interpreter_builder.create_dot

    def dot(a, b, *rest):
        frame, place = sys._getframe(1), []
        while frame:
            if frame.f_code.co_filename == file:
                place.insert(0, frame.f_lineno)
            frame = frame.f_back
        places[tuple(place[1:])] += a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1]  # without forward's line
        return kept(a, b, *rest)

    builder["create_dot"] = dot
    try:
        yield places
    finally:
        builder["create_dot"] = kept


def fenced(x):
    """The tensor with NaN behind its end, in the same memory."""
    wide = x.new_full((x.numel() + 2**14,), float("nan"))
    wide[: x.numel()] = x.flatten()
    return wide[: x.numel()].view(x.shape)


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
