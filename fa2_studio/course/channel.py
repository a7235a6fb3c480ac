"""Messages between the grader and the box: plain values and NumPy arrays, no pickle, each of a limited size.

Whatever arrives is data. Reading it runs nothing, and a message that makes no sense is a ValueError.
"""

import json
import math
import struct
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module

import numpy as np

MOST_TEXT = 2 * 2**20  # bytes of one message without its arrays; this limits lists, too
MOST_ARRAYS = 32 * 2**20  # bytes of all arrays of one message
HEAD = struct.Struct(">QQ")  # bytes of the text, bytes of the arrays behind it
NUMBERS = "biufc"  # kinds of NumPy arrays that may travel


class Closed(Exception):
    """The other side is gone."""


def send(stream, message, refer: Callable | None = None) -> None:
    """Write one message. `refer(thing)` names what only its own process can call; without it such a thing is opaque."""
    arrays: list[bytes] = []
    text = json.dumps(_packed(message, arrays, refer)).encode()
    size = sum(map(len, arrays))
    check_size(len(text), size)
    stream.write(HEAD.pack(len(text), size) + text + b"".join(arrays))
    stream.flush()


def receive(stream, resolve: Callable | None = None, trusted: bool = False):
    """Read one message. `resolve(name)` makes what stands for the other side's things; `trusted` allows dataclasses."""
    text_size, size = HEAD.unpack(_exactly(stream, HEAD.size))
    check_size(text_size, size)
    text, arrays = _exactly(stream, text_size), _exactly(stream, size)
    try:
        return _unpacked(json.loads(text), arrays, resolve, trusted)
    except (TypeError, KeyError, IndexError, AttributeError, RecursionError, UnicodeError, OverflowError) as error:
        raise ValueError(f"a message that cannot be read ({type(error).__name__})") from error


def check_size(text: int, arrays: int) -> None:
    """Refuse a message that is too large before it is read or written."""
    if text > MOST_TEXT or arrays > MOST_ARRAYS:
        raise ValueError(
            f"a message of {text:,} bytes and {arrays:,} bytes of arrays; it takes at most {MOST_TEXT:,} and "
            f"{MOST_ARRAYS:,}"
        )


def _exactly(stream, size: int) -> bytes:
    """So many bytes, or Closed."""
    kept = bytearray()
    while len(kept) < size:
        more = stream.read(size - len(kept))
        if not more:
            raise Closed
        kept += more
    return bytes(kept)


def _packed(value, arrays: list[bytes], refer):
    """A value as JSON; its arrays' bytes are put aside. Lists stand for themselves, other containers are marked."""

    def inner(x):
        return _packed(x, arrays, refer)

    if isinstance(value, int) and not isinstance(value, bool):
        return int(value) if abs(value) < 2**63 else {"opaque": "int of more than 63 bits"}
    if value is None or isinstance(value, (bool, str)) or type(value) is float:
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in NUMBERS:
        first, axes = sum(map(len, arrays)), np.argsort([-abs(step) for step in value.strides], kind="stable").tolist()
        arrays.append(np.asarray(value).transpose(axes).tobytes())  # a layout may be what a kernel trips over
        return {"array": [value.dtype.str, list(value.shape), first, isinstance(value, np.generic), axes]}
    if isinstance(value, list):
        return [inner(x) for x in value]
    if isinstance(value, tuple):
        return {"tuple": [inner(x) for x in value]}
    if isinstance(value, dict):
        return {"dict": [[inner(k), inner(v)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [inner(x) for x in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"dots": 0}
    if refer and is_dataclass(value) and not isinstance(value, type):
        named = {f.name: inner(getattr(value, f.name)) for f in fields(value) if f.repr}
        return {"data": [type(value).__module__, type(value).__qualname__, named]}
    return {"far": refer(value)} if refer else {"opaque": type(value).__name__[:60]}


def _unpacked(value, arrays: bytes, resolve, trusted: bool):
    """What a packed value stands for."""

    def inner(x):
        return _unpacked(x, arrays, resolve, trusted)

    if isinstance(value, list):
        return [inner(x) for x in value]
    if not isinstance(value, dict):
        return value
    ((mark, inside),) = value.items()
    if mark == "array":
        return _array(arrays, *inside)
    if mark == "tuple":
        return tuple(inner(x) for x in inside)
    if mark == "dict":
        return {inner(k): inner(v) for k, v in inside}
    if mark == "slice":
        return slice(*(inner(x) for x in inside))
    if mark == "dots":
        return ...
    if mark == "far" and resolve:
        return resolve(inside)
    if mark == "data" and trusted:
        module, name, named = inside
        return _data(getattr(import_module(module), name), {k: inner(v) for k, v in named.items()})
    if mark == "opaque":
        return type(str(inside), (), {})()
    raise ValueError(f"a message with the unknown mark {str(mark)[:40]!r}")


def _array(arrays: bytes, kind: str, shape: list, first: int, is_scalar: bool, axes: list):
    """An array of its own memory, its axes in that memory from the slowest to the fastest, or a NumPy scalar."""
    dtype = np.dtype(kind)
    if dtype.kind not in NUMBERS:
        raise ValueError("an array that holds no numbers")
    array = np.frombuffer(arrays, dtype, count=math.prod(shape), offset=first).copy()
    array = array.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes).astype(int))
    return array[()] if is_scalar else array


def _data(kind: type, named: dict):
    """A dataclass of the package with the fields that were sent; what was not is left empty."""
    thing = object.__new__(kind)
    for f in fields(kind):
        object.__setattr__(thing, f.name, named.get(f.name))
    return thing
