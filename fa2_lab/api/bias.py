"""Check biases and compute their cache keys. A bias is a function whose values are added to the scores.

A bias's key is part of the key under which kernels/cache.py stores a prepared call.
"""

from dis import get_instructions
from functools import cache
from inspect import signature
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

NOT_TRACEABLE = (
    "bias: got a function; where torch records (torch.compile, torch.export, meta and fake tensors, create_graph=True) "
    "it takes None"
)
CAPTURED: WeakKeyDictionary = WeakKeyDictionary()  # {jitted function: {captured variable: its value when first seen}}


def check_bias(bias: Any, reference: bool) -> None:
    """Raise an error unless `bias` is None or a @triton.jit function of (head, row, column).

    If `reference` is True, the bias may also be written in NumPy and is called on small arrays to check that it works.
    """
    if bias is None:
        return
    takes = "a @triton.jit function of (head, row, column)"
    if reference:
        takes = "a function of (head, row, column) in NumPy, or a @triton.jit function that runs on NumPy arrays"
    got = f"bias: got {getattr(bias, '__name__', type(bias).__name__)}"
    function = getattr(bias, "fn", bias)
    if not callable(function) or not (reference or is_jitted(bias)):
        raise TypeError(f"{got}; it takes {takes}")
    if not reference:
        if len(signature(function).parameters) != 3:
            raise TypeError(f"{got}{signature(function)}; it takes {takes}")
        return
    try:
        with np.errstate(all="ignore"):
            values = np.asarray(function(0, *np.ogrid[:2, :3]))
            np.broadcast_to(values, (2, 3))
    except Exception as error:
        raise TypeError(f"{got}, which fails on NumPy arrays ({error}); it takes {takes}") from error
    if values.dtype.kind not in "fiub":
        raise TypeError(f"{got}, which gives no numbers; it takes {takes}")


def is_jitted(bias: Any) -> bool:
    """Return whether the function `bias` is decorated with @triton.jit."""
    from fa2_lab.kernels.common.tile import block_coord

    return type(bias) is type(block_coord)


def bias_key(bias: Any) -> Any:
    """Return a bias's key: Triton's hash of its source and constants, or the function itself if it is not jitted.

    Triton reads a jitted function only once. If a global variable that the function uses has changed since then, the
    bias is rejected, because Triton would keep running the version that it compiled earlier.
    """
    if torch.compiler.is_compiling():
        raise ValueError(NOT_TRACEABLE)
    if not hasattr(bias, "cache_key"):
        return bias
    now = captured_values(bias)
    before = CAPTURED.setdefault(bias, now)
    for name, value in now.items():
        old = before.get(name)
        if old is not value and (hasattr(value, "cache_key") or repr(old) != repr(value)):  # repr, because NaN != NaN
            raise ValueError(
                f"bias: got {bias.__name__}, for which {name} was {old} and is {value} now; "
                "after such a change it takes a function that is defined anew"
            )
    return bias.cache_key


def captured_values(jitted: Any, callers: tuple = ()) -> dict[str, Any]:
    """Return {name: value} for the global and closure variables used by a jitted function and its jitted callees.

    `callers` are the functions that lead from the bias to this one. They are not entered again.
    """
    function = jitted.fn
    values = {name: function.__globals__.get(name) for name in globals_of(function.__code__)}
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    values |= dict(zip(function.__code__.co_freevars, cells, strict=True))
    callers = *callers, jitted
    for name, x in list(values.items()):
        if isinstance(x, (np.ndarray, torch.Tensor)):
            got = f"bias: got a function that uses {name}, which is of type {type(x).__name__}"
            raise TypeError(f"{got}; it takes a function whose global variables are numbers of type tl.constexpr")
        if hasattr(x, "cache_key") and x not in callers:
            values |= {f"{name}: {inner}": value for inner, value in captured_values(x, callers).items()}
    return values


@cache
def globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of the global variables that a code object reads."""
    return tuple(line.argval for line in get_instructions(code) if line.opname == "LOAD_GLOBAL")
