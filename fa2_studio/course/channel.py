"""Messages between the grader and the box: each a line of JSON of a limited size, arrays in it as text, no pickle.

Whatever arrives is data. Reading it runs nothing, and a message that makes no sense is a ValueError.
"""

import base64
import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module

import numpy as np

MOST = 2 * 2**20  # bytes of one message: this limits arrays, lists and texts alike
NUMBERS = "biufc"  # kinds of NumPy arrays that may travel


class Closed(Exception):
    """The other side is gone."""


def send(stream, message, refer: Callable | None = None) -> None:
    """Write one message. `refer(thing)` names what only its own process can call; without it such a thing is opaque."""
    line = json.dumps(_packed(message, refer)).encode()
    if len(line) > MOST:
        raise ValueError(f"a message of {len(line):,} bytes; it takes at most {MOST:,}")
    stream.write(line + b"\n")
    stream.flush()


def receive(stream, resolve: Callable | None = None):
    """Read one message. `resolve(name)` makes what stands for the grader's things; only the box has one."""
    line = stream.readline(MOST + 1)
    if len(line) > MOST:
        raise ValueError(f"a message that is too long; it takes at most {MOST:,} bytes")
    if not line.endswith(b"\n"):
        raise Closed
    try:
        return json.loads(line, object_hook=partial(_unpacked, resolve=resolve))
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"a message that cannot be read ({type(error).__name__})") from error


def _packed(value, refer):
    """A value as JSON. Lists stand for themselves; what JSON has no word for is {mark: what}."""

    def inner(values) -> list:
        return [_packed(x, refer) for x in values]

    if isinstance(value, int) and not isinstance(value, bool):
        return int(value) if abs(value) < 2**63 else {"opaque": "int of more than 63 bits"}
    if value is None or isinstance(value, (bool, str)) or type(value) is float:
        return value
    if not refer and hasattr(value, "__array__") and not isinstance(value, np.generic):  # such as a tensor of torch
        value = np.asarray(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in NUMBERS:
        axes = np.argsort([-abs(step) for step in value.strides], kind="stable").tolist()
        data = np.asarray(value).transpose(axes).tobytes()  # the layout stays: it may be what a kernel trips over
        text = base64.b64encode(data).decode()
        return {"array": [text, value.dtype.str, list(value.shape), axes, isinstance(value, np.generic)]}
    if isinstance(value, list):
        return inner(value)
    if isinstance(value, tuple):
        return {"tuple": inner(value)}
    if isinstance(value, dict):
        return {"dict": [inner(pair) for pair in value.items()]}
    if isinstance(value, slice):
        return {"slice": inner((value.start, value.stop, value.step))}
    if value is Ellipsis:
        return {"dots": None}
    if refer and is_dataclass(value) and not isinstance(value, type):
        named = {f.name: getattr(value, f.name) for f in fields(value) if f.repr}
        return {"data": [type(value).__module__, type(value).__qualname__, _packed(named, refer)]}
    return {"far": refer(value)} if refer else {"opaque": type(value).__name__[:60]}


def _unpacked(marked: dict, resolve):
    """What {mark: what} stands for; what is in it has been unpacked."""
    ((mark, inside),) = marked.items()
    if mark in PLAIN:
        return PLAIN[mark](inside)
    if mark == "far" and resolve:
        return resolve(inside)
    if mark == "data" and resolve:
        return _data(*inside)
    raise ValueError(f"a message with the unknown mark {mark[:40]!r}")


def _array(text: str, kind: str, shape: list, axes: list, is_scalar: bool):
    """An array of its own memory, its axes in that memory from the slowest to the fastest, or a NumPy scalar."""
    dtype = np.dtype(kind)
    if dtype.kind not in NUMBERS:
        raise ValueError("an array that holds no numbers")
    array = np.frombuffer(base64.b64decode(text), dtype, count=math.prod(shape)).copy()
    array = array.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes).astype(int))
    return array[()] if is_scalar else array


def _data(module: str, name: str, named: dict):
    """A dataclass of the package with the fields that were sent; what was not is left empty."""
    kind = getattr(import_module(module), name)
    thing = object.__new__(kind)
    for f in fields(kind):
        object.__setattr__(thing, f.name, named.get(f.name))
    return thing


PLAIN = {
    "array": lambda inside: _array(*inside),
    "tuple": tuple,
    "dict": dict,
    "slice": lambda inside: slice(*inside),
    "dots": lambda _: ...,
    "opaque": lambda name: type(str(name), (), {})(),
}
