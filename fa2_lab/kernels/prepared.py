"""The one table of prepared calls, so that checks and choices are made once for all calls of one kind.

A kind is all that checks and choices look at: types, dtypes, devices, shapes, strides and options. Where tensors lie
and what values they hold are no part of it. PREPARED keeps for each kind what was made for it: who serves the call, and
its launches with every argument but the pointers. Nothing below this table keeps a table of its own.

A few values are looked at before a launch, such as the range of key_lengths. SEEN keeps which tensors passed, as they
were then; nothing is written onto the tensors. forget() empties both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor

PREPARED: dict = {}
MOST = 4096
SEEN: dict = {}  # {id of a tensor: (weak references to it and to those it was looked at with, their state)}


class Options(NamedTuple):
    """What a caller may ask for, besides tensors."""

    causal: bool
    scale: float
    dropout_p: float = 0.0


def prepared(key: tuple, make: Callable, *arguments) -> Any:
    """What make(*arguments) made when this key was first asked for."""
    found = PREPARED.get(key)
    if found is None:
        found = keep(key, make(*arguments))
    return found


def keep(key: tuple, made: Any) -> Any:
    """Put `made` into the table."""
    if len(PREPARED) >= MOST:
        PREPARED.clear()
    PREPARED[key] = made
    return made


def forget() -> None:
    """From now on every check and every choice is made anew."""
    PREPARED.clear()
    SEEN.clear()


def kind_of(x: Tensor | None) -> tuple | None:
    """What checks and choices look at in a tensor that is already known to be one."""
    return None if x is None else (x.dtype, x.device, x.shape, x.stride())


# Values that were looked at -----------------------------------------------------------------------------------


def was_seen(tensors: tuple[Tensor, ...], limits: tuple) -> bool:
    """Whether these very tensors, unchanged since, were found to keep within these limits."""
    found = SEEN.get(id(tensors[0]))
    if found is None:
        return False
    references, state = found
    return all(r() is x for r, x in zip(references, tensors, strict=True)) and state == state_of(tensors, limits)


def remember_seen(tensors: tuple[Tensor, ...], limits: tuple) -> None:
    """From now on was_seen() is true of them, until one changes. Inference tensors do not tell when they change."""
    if not any(x.is_inference() for x in tensors):
        first = id(tensors[0])
        references = [ref(tensors[0], lambda _: SEEN.pop(first, None)), *map(ref, tensors[1:])]
        SEEN[first] = references, state_of(tensors, limits)


def state_of(tensors: tuple[Tensor, ...], limits: tuple) -> list:
    """The versions of tensors, which count their changes; where they lie, for x.data = y is not counted; the limits."""
    return [limits, *((x._version, x.device, x.data_ptr()) for x in tensors)]
