"""A forward of the ladder's form: beside the student's code what it launches; apart, it is run, compiled and timed."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
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

TYPES = (bool, int, float, str, type(None))


# Beside the student's code ------------------------------------------------------------------------------------------


def recorded(forward, heads: tuple[int, int], N_q: int, N_k: int, d: int, causal: bool) -> dict:
    """What one call launches, on tensors that have a shape and no numbers: kernels, arguments, calls of torch."""
    import torch
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("Triton was imported before the first cell: restart the notebook")
    q, k, v = (torch.empty(*heads, n, d, dtype=torch.float16, device="meta") for n in (N_q, N_k, N_k))
    tape = Tape([q, k, v])

    def run(kernel, *args, grid, warmup, **options):
        bound = dict(zip(kernel.arg_names, args, strict=False)) | options
        grid = grid(bound) if callable(grid) else grid
        tape.take_kernel(kernel)
        tape.steps.append(["launch", kernel.fn.__name__, ("tuple", [int(n) for n in grid]), tape.plain(list(args)),
                           {name: tape.plain(x) for name, x in options.items()}])  # fmt: skip

    kept, InterpretedFunction.run = InterpretedFunction.run, run
    try:
        with tape.watching():
            results = forward(q, k, v, causal)
    finally:
        InterpretedFunction.run = kept
    if not isinstance(results, (tuple, list)) or len(results) != 2:
        raise TypeError(f"forward gives O and L, not {type(results).__name__}")
    return dict(heads=list(heads), kernels=tape.kernels, constants=tape.constants, steps=tape.steps,
                results=[tape.plain(x) for x in results])  # fmt: skip


def texts(kernel) -> dict:
    """The text of one kernel, of what it calls, and the numbers that it reads."""
    from .probes import is_kernel

    if not is_kernel(kernel):
        raise NotAllowed(f"a Triton kernel is asked for: @triton.jit above a def. This is a {type(kernel).__name__}")
    if "raise NotImplementedError" in inspect.getsource(kernel.fn):
        raise NotImplementedError
    tape = Tape([])
    tape.take_kernel(kernel)
    return dict(kernels=tape.kernels, constants=tape.constants)


class Tape:
    """The calls of torch and the launches, in their order; tensors by their numbers."""

    def __init__(self, tensors: list):
        self.tensors, self.steps, self.kernels, self.constants = list(tensors), [], {}, {}

    def watching(self):
        """While this is on, every call of torch is taken down."""
        from torch.utils._python_dispatch import TorchDispatchMode

        tape = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                kwargs = kwargs or {}
                step = ["torch", str(function), [tape.plain(x) for x in args],
                        {name: tape.plain(x) for name, x in kwargs.items()}]  # fmt: skip
                made = function(*args, **kwargs)
                tape.steps.append(
                    [*step, [tape.number(x) for x in (made if isinstance(made, (tuple, list)) else [made])]]
                )
                return made

        return Watch()

    def number(self, tensor) -> int:
        """A tensor's number; a new one gets the next."""
        for number, known in enumerate(self.tensors):
            if known is tensor:
                return number
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def plain(self, value):
        """A value as a message can carry it; what has no number and no name is marked as other."""
        import torch
        import triton.language as tl

        known = [number for number, tensor in enumerate(self.tensors) if tensor is value]
        if known:
            return "tensor", known[0]
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, tl.constexpr):
            return self.plain(value.value)
        if isinstance(value, TYPES):
            return value
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return "torch", str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return "device", ""
        if isinstance(value, tl.dtype):
            return "tl", value.name.replace("fp", "float") if value.name != "bf16" else "bfloat16"
        if isinstance(value, (tuple, list)):
            inner = [self.plain(x) for x in value]
            return inner if isinstance(value, list) else ("tuple", inner)
        if type(value).__name__ == "TensorDescriptor":
            return "descriptor", [
                self.plain(x) for x in (value.base, list(value.shape), list(value.strides), list(value.block_shape))
            ]
        return "other", type(value).__name__

    def take_kernel(self, kernel) -> None:
        """The text of a kernel, of the functions that it calls, and the numbers that it reads."""
        import triton.language as tl

        function = kernel.fn
        if function.__name__ in self.kernels:
            return
        source = textwrap.dedent(inspect.getsource(function))
        self.kernels[function.__name__] = source
        for name in sorted({x.id for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Name)}):
            thing = function.__globals__.get(name)
            if type(thing).__name__ in ("InterpretedFunction", "JITFunction"):
                self.take_kernel(thing)
            elif isinstance(thing, (bool, int, float, str, tl.constexpr)):
                self.constants[name] = self.plain(thing)


# Where nothing of the student's has run: a listing, text that the grader wrote ----------------------------------------


def run(text: str, q, k, v, causal: bool) -> tuple[np.ndarray, np.ndarray, dict]:
    """O and L of a listing in Triton's interpreter, and what the meter counted."""
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


def compiled(text: str, chip: str, d: int, N: int) -> list[tuple[dict, str, list]]:
    """(numbers, machine code, the lines of its products) of every kernel that a listing launches."""
    xray = import_module("fa2_lab.tools.xray.compile").xray
    with TemporaryDirectory(prefix="ladder-") as folder:
        path = Path(folder, "mine.py")
        path.write_text(text, encoding="utf-8")
        kernels = [(x.numbers, x.stages) for x in xray(str(path), chip, d=d, N=N, dtype="float16")]
    return [(numbers, stages["sass"], product_lines(stages["ttir"])) for numbers, stages in kernels]


def product_lines(ttir: str) -> list[list[int]]:
    """For each product of a compiled kernel the lines that lead to it, the outermost first."""
    said = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttir, re.MULTILINE))

    def lines(mark: str) -> list[int]:
        text = said.get(mark, mark)
        if place := re.match(r'".*":(\d+):\d+$', text):
            return [int(place[1])]
        return [n for inner in reversed(re.findall(r"#loc\d*", text)) for n in lines(inner)]

    return [lines(mark) for mark in re.findall(r"= tt\.dot\b.* loc\((#loc\d*)\)", ttir)]


def timed(text: str, rung: str) -> tuple[float, float, float]:
    """Milliseconds on a GPU of a listing and of a rung, given as text, and how far apart their O are."""
    with TemporaryDirectory(prefix="ladder-") as folder:
        for name, source in (("mine", text), ("rung", rung), ("clock", CLOCK)):
            Path(folder, f"{name}.py").write_text(source, encoding="utf-8")
        command = ["env", "TRITON_INTERPRET=0", sys.executable, "clock.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the clock gave no reason"])[-1][:300])
    return tuple(json.loads(done.stdout.splitlines()[-1]))


CLOCK = """
import itertools
import json
import mine, rung
import torch
from triton.testing import do_bench

inputs = [torch.randn(3, 2, 16, 8192, 64, device="cuda", dtype=torch.float16).unbind() for _ in range(4)]
turn = itertools.cycle(inputs)  # other numbers in each call: what memory kept of the last one is no answer
times = [do_bench(lambda m=m: m.forward(*next(turn), True), return_mode="median") for m in (mine, rung)]
apart = [(mine.forward(*x, True)[0].float() - rung.forward(*x, True)[0].float()).abs().max().item() for x in inputs]
print(json.dumps([*times, max(apart)]))
"""
