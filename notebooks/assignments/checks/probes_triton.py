"""Where no code of the student's has run: Triton kernels in Triton's interpreter, on fenced tensors and on a meter.

The meter counts what all programs of a launch do together: elements loaded from and stored to each tensor, elements
added to it by atomic adds, multiplications of products, exponentials, divisions, and entries that a mask goes over; and
of each product its rows, its inner length, its columns and its precision, as tl.dot was asked for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from triton.runtime import interpreter

from .probes_cases import defined

FENCE = 128  # rows behind a tensor's end that are not its own


@dataclass
class Meter:
    """What the programs of a launch did."""

    loads: Counter = field(default_factory=Counter)
    stores: Counter = field(default_factory=Counter)
    adds: Counter = field(default_factory=Counter)
    operations: Counter = field(default_factory=Counter)
    products: Counter = field(default_factory=Counter)


@contextmanager
def metered(**tensors: torch.Tensor) -> Iterator[Meter]:
    """Count while kernels run. Tensors are known by their addresses, fences included."""
    meter, builder = Meter(), interpreter.interpreter_builder
    ends = {name: x.untyped_storage() for name, x in tensors.items()}
    ends = {name: (x.data_ptr(), x.data_ptr() + x.nbytes()) for name, x in ends.items()}

    def count(where: Counter, pointers, mask) -> None:
        touched = np.asarray(pointers.data)
        touched = touched if mask is None else touched[np.asarray(mask.data, dtype=bool)]
        where["everything"] += touched.size
        for name, (first, end) in ends.items():
            where[name] += int(((touched >= first) & (touched < end)).sum())

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
        meter.products[(*size, getattr(precision, "name", str(precision)).lower())] += 1
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
    finally:
        for name in watched:
            with suppress(KeyError):
                del vars(builder)[name]


def fenced(x: np.ndarray, beyond: float = np.nan) -> torch.Tensor:
    """The array in fp32 with rows behind its end, in the same memory, that nobody may use."""
    wide = torch.full((len(x) + FENCE, *x.shape[1:]), beyond, dtype=torch.float32)
    wide[: len(x)] = torch.as_tensor(np.ascontiguousarray(x), dtype=torch.float32)
    return wide[: len(x)]


def fence(x: torch.Tensor) -> torch.Tensor:
    """What stands behind a fenced tensor."""
    return x.as_strided((len(x) + FENCE, *x.shape[1:]), x.stride())[len(x) :]


def launch(
    text: str, name: str, programs: int, tensors: dict, outputs: dict, options: dict
) -> tuple[dict, dict, list[str]]:
    """Run a kernel of a program on the tensors, then the outputs, then the options, in fp32.

    Inputs have NaN behind their end, outputs a number that must stay. The outputs, what the meter counted, and the
    outputs behind whose end something was written.
    """
    kernel = defined(text, name)
    given = {name: fenced(x) for name, x in tensors.items()}
    given |= {name: fenced(x, 5.0) for name, x in outputs.items()}
    with metered(**given) as meter:
        kernel[(programs,)](*given.values(), **options)
    spilled = [name for name in outputs if not (fence(given[name]) == 5.0).all()]
    counted = {kind: dict(counts) for kind, counts in vars(meter).items()}
    return {name: given[name].numpy().copy() for name in outputs}, counted, spilled
