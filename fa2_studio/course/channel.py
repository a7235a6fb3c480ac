"""Messages between the grader and the sandbox, sent as lines of JSON of limited size, with arrays encoded as text.

Messages contain only data. Pickle is not used, so reading a message runs no code. An invalid message raises ValueError.
"""

import base64
import json
import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module

import numpy as np

MAX_BYTES = 2 * 2**20  # the most bytes of one message, which also limits the arrays, lists and texts in it
NUMBER_KINDS = "biufc"  # the kinds of NumPy dtypes that messages may contain


class Closed(Exception):
    """Raised if the other process has closed its end."""


def send(stream, message, refer: Callable | None = None) -> None:
    """Write one message. Raises ValueError if it is too large.

    `refer(thing)` returns the number by which the other process can call a function or object that cannot be sent.
    Without `refer`, only the name of its type is sent.
    """
    line = json.dumps(_pack(message, refer)).encode()
    if len(line) > MAX_BYTES:
        raise ValueError(f"a message of {len(line):,} bytes; it takes at most {MAX_BYTES:,}")
    stream.write(line + b"\n")
    stream.flush()


def receive(stream, resolve: Callable | None = None):
    """Read one message. Raises ValueError if it cannot be read, and Closed at the end of the stream.

    `resolve(number)` returns the stand-in for a function or an object of the grader. Only the sandbox passes `resolve`.
    """
    line = stream.readline(MAX_BYTES + 1)
    if len(line) > MAX_BYTES:
        raise ValueError(f"a message that is too long; it takes at most {MAX_BYTES:,} bytes")
    if not line.endswith(b"\n"):
        raise Closed
    try:
        return json.loads(line, object_hook=partial(_unpack, resolve=resolve))
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"a message that cannot be read ({type(error).__name__})") from error


def _pack(value, refer):
    """Convert a value to a form that JSON supports. A value without a counterpart in JSON becomes {mark: content}."""

    def pack_all(values) -> list:
        return [_pack(x, refer) for x in values]

    if isinstance(value, int) and not isinstance(value, bool):
        return int(value) if abs(value) < 2**63 else {"opaque": "int of more than 63 bits"}
    if value is None or isinstance(value, (bool, str)) or type(value) is float:
        return value
    if not refer and hasattr(value, "__array__") and not isinstance(value, np.generic):  # such as a PyTorch tensor
        value = np.asarray(value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in NUMBER_KINDS:
        axes = np.argsort([-abs(step) for step in value.strides], kind="stable").tolist()
        # The strides are kept, because a kernel may fail due to them.
        data = np.asarray(value).transpose(axes).tobytes()
        text = base64.b64encode(data).decode()
        return {"array": [text, value.dtype.str, list(value.shape), axes, isinstance(value, np.generic)]}
    if isinstance(value, list):
        return pack_all(value)
    if isinstance(value, tuple):
        return {"tuple": pack_all(value)}
    if isinstance(value, dict):
        return {"dict": [pack_all(pair) for pair in value.items()]}
    if isinstance(value, slice):
        return {"slice": pack_all((value.start, value.stop, value.step))}
    if value is Ellipsis:
        return {"dots": None}
    if refer and is_dataclass(value) and not isinstance(value, type):
        by_name = {f.name: getattr(value, f.name) for f in fields(value) if f.repr}
        return {"data": [type(value).__module__, type(value).__qualname__, _pack(by_name, refer)]}
    return {"far": refer(value)} if refer else {"opaque": type(value).__name__[:60]}


def _unpack(marked: dict, resolve):
    """Return the value that {mark: content} represents. The content has already been unpacked."""
    ((mark, content),) = marked.items()
    if mark in UNPACKERS:
        return UNPACKERS[mark](content)
    if mark == "far" and resolve:
        return resolve(content)
    if mark == "data" and resolve:
        return _unpack_dataclass(*content)
    raise ValueError(f"a message with the unknown mark {mark[:40]!r}")


def _unpack_array(text: str, kind: str, shape: list, axes: list, is_scalar: bool):
    """Return an array in new memory, or a NumPy scalar. `axes` are in memory order, from the slowest to the fastest."""
    dtype = np.dtype(kind)
    if dtype.kind not in NUMBER_KINDS:
        raise ValueError("an array that holds no numbers")
    array = np.frombuffer(base64.b64decode(text), dtype, count=math.prod(shape)).copy()
    array = array.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes).astype(int))
    return array[()] if is_scalar else array


def _unpack_dataclass(module: str, name: str, named: dict):
    """Return an instance of one of the package's dataclasses. Fields that were not sent are None."""
    kind = getattr(import_module(module), name)
    thing = object.__new__(kind)
    for f in fields(kind):
        object.__setattr__(thing, f.name, named.get(f.name))
    return thing


UNPACKERS = {
    "array": lambda content: _unpack_array(*content),
    "tuple": tuple,
    "dict": dict,
    "slice": lambda content: slice(*content),
    "dots": lambda _: ...,
    "opaque": lambda name: type(str(name), (), {})(),
}
