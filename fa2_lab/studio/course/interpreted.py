"""Students' Triton kernels in Triton's interpreter, on fenced tensors and on a meter.

The meter counts what all programs of a launch do together: elements loaded from and stored to each tensor, elements
added to it by atomic adds, multiplications of products, exponentials, divisions, and entries that a mask goes over.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # with a GPU too: only the interpreter can count

import torch
import triton
from triton.runtime import interpreter

from fa2_lab.studio.course.guard import call_freely
from fa2_lab.studio.course.report import Failed

FENCE = 128  # rows behind a tensor's end that are not its own


@dataclass
class Meter:
    """What the programs of a launch did."""

    loads: Counter = field(default_factory=Counter)
    stores: Counter = field(default_factory=Counter)
    adds: Counter = field(default_factory=Counter)
    operations: Counter = field(default_factory=Counter)


@contextmanager
def metered(**tensors: torch.Tensor) -> Iterator[Meter]:
    """Count while kernels run. Tensors are known by their addresses, fences included."""
    meter, builder = Meter(), interpreter.interpreter_builder
    ends = {name: x.untyped_storage() for name, x in tensors.items()}
    ends = {name: (x.data_ptr(), x.data_ptr() + x.nbytes()) for name, x in ends.items()}

    def count(where: Counter, pointers, mask) -> None:
        touched = np.asarray(pointers.data)[np.asarray(mask.data, dtype=bool)]
        for name, (first, end) in ends.items():
            where[name] += int(((touched >= first) & (touched < end)).sum())

    def load(pointers, mask, *rest):
        count(meter.loads, pointers, mask)
        return kept["create_masked_load"](pointers, mask, *rest)

    def store(pointers, value, mask, *rest):
        count(meter.stores, pointers, mask)
        return kept["create_masked_store"](pointers, value, mask, *rest)

    def add(kind, pointers, value, mask, *rest):
        count(meter.adds, pointers, mask)
        return kept["create_atomic_rmw"](kind, pointers, value, mask, *rest)

    def dot(a, b, *rest):
        meter.operations["multiplications of products"] += a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1]
        return kept["create_dot"](a, b, *rest)

    def counting(name: str, kind: str):
        def counted(*operands):
            result = kept[name](*operands)
            meter.operations[kind] += np.size(result.data)
            return result

        return counted

    watched = dict(
        create_masked_load=load,
        create_masked_store=store,
        create_atomic_rmw=add,
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
    finally:
        for name in watched:
            with suppress(KeyError):
                del vars(builder)[name]


def check_kernel(kernel) -> None:
    """A kernel that was written, and that the interpreter runs."""
    if not hasattr(kernel, "run") or not hasattr(kernel, "__getitem__"):
        raise Failed("a Triton kernel: a function under @triton.jit", type(kernel).__name__)
    if "raise NotImplementedError" in inspect.getsource(kernel.fn):
        raise NotImplementedError
    if not isinstance(kernel, interpreter.InterpretedFunction):
        raise Failed("a kernel in Triton's interpreter", "Triton was imported before the first cell: restart")


def fenced(x: np.ndarray, beyond: float = np.nan) -> torch.Tensor:
    """The array in fp32 with rows behind its end, in the same memory, that nobody may use."""
    wide = torch.full((len(x) + FENCE, *x.shape[1:]), beyond, dtype=torch.float32)
    wide[: len(x)] = torch.as_tensor(np.ascontiguousarray(x), dtype=torch.float32)
    return wide[: len(x)]


def fence(x: torch.Tensor) -> torch.Tensor:
    """What stands behind a fenced tensor."""
    return x.as_strided((len(x) + FENCE, *x.shape[1:]), x.stride())[len(x) :]


def launch(kernel, programs: int, tensors: dict[str, np.ndarray], outputs: dict[str, np.ndarray], **options):
    """Run a kernel on the tensors, then the outputs, then the options: the outputs in float64, and the meter.

    Inputs have NaN behind their end. Outputs have a number there, which must stay.
    """
    check_kernel(kernel)
    given = {name: fenced(x) for name, x in tensors.items()}
    given |= {name: fenced(x, 5.0) for name, x in outputs.items()}
    with metered(**given) as meter:
        call_freely(lambda: kernel[(programs,)](*given.values(), **options))
    for name in outputs:
        if not (fence(given[name]) == 5.0).all():
            raise Failed(
                "nothing written behind the last row", f"memory behind {name} changed", hint="tl.store takes a mask=."
            )
    return {name: given[name].double().numpy() for name in outputs}, meter


def at_most(what: str, came: int, most: int, hint: str) -> None:
    """Fail where more was done than need be."""
    if came > most:
        raise Failed(f"at most {most:,} {what}", f"{came:,}", hint=hint)


def cdiv(a: int, b: int) -> int:
    return triton.cdiv(a, b)
