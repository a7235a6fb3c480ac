"""Relaunch a compiled kernel on other tensors with little host time.

At every launch, Triton's own Python code examines all arguments again, asks the driver about every pointer and encodes
every tensor descriptor. With four descriptors, this takes 14 µs. This module records, once, the arguments that Triton
passes to the driver, and later launches replace only the addresses. If this is not possible, Triton's own call is used,
which gives the same results but is slower.

The module relies on internals that Triton 3.6 to 3.9 have in common. INSIDE in triton_versions.py lists them. The `run`
of a compiled kernel is a callable object that receives the grid, the stream, the function, packed metadata, launch
metadata, two hooks and the kernel's arguments, and passes them to its `launch`, the driver's C function. For kernels
with descriptors, `launch` is a Python wrapper around the C function. The wrapper replaces each descriptor by (the
encoded TMA descriptor, *shape, *strides). The order of the arguments of `launch` differs between versions, so it is
determined by recording a call.
"""

import copy
import functools
import types
from operator import is_
from typing import Any

from triton import knobs
from triton.language import constexpr
from triton.runtime import driver

NOWHERE = 0, 1, 1  # a grid without programs


def relaunch(compiled: Any, grid: Any, stream: Any, arguments: Any, described: int = 0, pointers: int = 0) -> Any:
    """Return a function of (stream, addresses) that launches the kernel `compiled`, or None if that is impossible.

    The first `described` of the kernel's arguments are tensor descriptors, and the next `pointers` arguments are
    pointers. All other arguments are the same in every launch.
    """
    try:
        return Relaunch(compiled, grid, stream, arguments, described, pointers)
    except Exception:
        return None  # this Triton is another inside


class Relaunch:
    """A recorded launch, which can be repeated on other tensors."""

    def __init__(self, compiled: Any, grid: Any, stream: Any, arguments: Any, described: int, pointers: int) -> None:
        self.compiled = compiled  # while it lives, the GPU keeps its code
        arguments = [*arguments, *[None] * (len(compiled.src.fn.arg_names) - len(arguments))]
        handed = handed_over(compiled, stream, arguments)
        self.listed = as_given(handed[-1], arguments)  # since Triton 3.7 the kernel's own arguments are one
        base, own = (handed[:-1], handed[-1]) if self.listed else (handed[: -len(arguments)], handed[-len(arguments) :])
        scratch = compiled.metadata.global_scratch_size + compiled.metadata.profile_scratch_size  # of this launch alone
        if scratch or not as_given(own, arguments) or base[:4] != [*NOWHERE, stream]:
            raise ValueError("an unknown order of arguments")
        self.hooks = [x for x in base if type(x).__name__ == "HookChain"]
        self.base = [*grid, *(None if type(x).__name__ == "HookChain" else x for x in base[3:])]
        self.meta = [*compiled.metadata.tensordesc_meta] if described else []
        self.encode = [*map(encoder, own[:described], self.meta)]
        self.rest = [*map(plain, own[described + pointers :])]  # so that no tensor is kept alive
        self.launcher = compiled.run.launch
        if described:
            self.launcher, seen = taken_apart(compiled.run.launch, handed)
            theirs = seen[-1] if self.listed else seen[len(base) :]
            mine = self.own([*(X.base.data_ptr() for X in own[:described]), *[0] * pointers])
            others = pointers + len(self.rest)
            if len(mine) != len(theirs) or not all(map(alike, mine[:-others], theirs)):
                raise ValueError("descriptors are taken apart in another way")

    def resized(self, grid: Any, described: Any, rest: Any) -> "Relaunch":
        """Return a copy of this launch with a new grid, new descriptors (`described`) and other new arguments (`rest`).

        The new arguments must lead to the same compiled kernel, that is, Launch.compiled_as() must be equal for both
        launches.
        """
        found = copy.copy(self)
        found.base = [*grid, *self.base[3:]]
        found.encode = [*map(encoder, described, self.meta)]
        found.rest = [*map(plain, rest)]
        return found

    def __call__(self, stream: Any, addresses: Any) -> bool:
        """Launch the kernel on the tensors with these addresses, and return True.

        If a profiler has installed a launch hook, return False instead of launching, because only Triton's own call
        reports to the hook.
        """
        for hook in self.hooks:
            if hook.calls:
                return False
        base = self.base.copy()
        base[3] = stream
        own = self.own(addresses)
        if self.listed:
            self.launcher(*base, own)
        else:
            self.launcher(*base, *own)
        return True

    def own(self, addresses: Any) -> list:
        """Return the kernel's arguments for these addresses: encoded descriptors, pointers, and the recorded rest."""
        own = []
        for encode, address in zip(self.encode, addresses):  # noqa: B905  (strict costs time)
            own += encode(address)
        own += addresses[len(self.encode) :]
        own += self.rest
        return own


def seen_by_compiler(kernel: Any, arguments: dict[str, Any]) -> tuple:
    """Return, for each argument of a launch, what affects the compiled kernel.

    For a constant, this is its value. For an integer, it is the width and, if the kernel is specialized on the integer,
    whether it is 1 and whether 16 divides it.
    """
    try:
        parameters = last_parameters(kernel, len(arguments))
    except AttributeError:
        return (object(),)  # this Triton is another inside: no launch is like another
    return tuple([told(arguments[name], constant, looked_at) for name, constant, looked_at in parameters])


@functools.cache
def last_parameters(kernel: Any, many: int) -> list[tuple[str, bool, bool]]:
    """Return the last `many` parameters of a kernel as (name, whether it is a constant, whether it is specialized)."""
    return [(p.name, bool(p.is_constexpr), not p.do_not_specialize) for p in kernel.params[-many:]]


def told(x: Any, constant: bool, looked_at: bool) -> Any:
    """Return the properties of the argument x that affect the compiled kernel.

    For a constant, they are its type and value. `looked_at` is whether the kernel is specialized on the value of x.
    """
    kind: Any = type(x)
    if kind is constexpr:
        return type(x.value), x.value
    if constant or kind is bool or x is None:
        return kind, x
    if kind is int:
        width = 0 if -(2**31) <= x < 2**31 else 4 if x < 2**63 else 8
        return width + (x == 1) + 2 * (x % 16 == 0) if looked_at else width
    if kind is float:
        return kind
    return (kind, *[told(y, constant, looked_at) for y in x]) if isinstance(x, tuple) else (kind, x)


def handed_over(compiled: Any, stream: Any, arguments: list) -> list:
    """Return the arguments that Triton would pass to its `launch`, recorded by a copy of `run`.

    The recording uses an empty grid, so that no program runs even if a later Triton calls its driver in another way.
    """
    run, seen = copy.copy(compiled.run), []
    run.launch = lambda *everything: seen.extend(everything)
    beside = None, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook  # the launch has no metadata
    run(*NOWHERE, stream, compiled.function, compiled.packed_metadata, *beside, *arguments)
    return seen


def as_given(handed: Any, arguments: Any) -> bool:
    """Return whether `handed` consists of the very objects in `arguments`, in the same order."""
    return isinstance(handed, (list, tuple)) and len(handed) == len(arguments) and all(map(is_, handed, arguments))


def plain(x: Any) -> Any:
    """Return x with all tuples in it, even nested ones, as plain tuples, which are unpacked three times as fast."""
    return tuple(map(plain, x)) if isinstance(x, tuple) else x


def taken_apart(launch: Any, handed: list) -> tuple[Any, list]:
    """Return the driver's C function that the Python function `launch` calls, and the arguments that it would receive.

    The arguments are recorded by a copy of `launch` in which another function replaces the C function.
    """
    seen: list = []
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    recording = cells | dict(launcher=types.CellType(lambda *everything: seen.extend(everything)))
    like = launch.__code__, launch.__globals__, launch.__name__, launch.__defaults__, tuple(recording.values())
    types.FunctionType(*like)(*handed)
    return cells["launcher"].cell_contents, seen


def alike(mine: Any, theirs: Any) -> bool:
    """Return whether two arguments are equal, or are both TMA descriptors, which cannot be compared."""
    return mine == theirs or (type(mine) is type(theirs) and not isinstance(mine, (int, float, tuple)))


def encoder(described: Any, meta: Any) -> Any:
    """Return a function that turns an address into the arguments that replace a tensor descriptor.

    The function caches its results for the last 1,024 addresses.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    utils = driver.active.utils
    encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # its name before 3.7
    fixed: tuple = meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"]
    fixed += described.shape, described.strides, 0
    sizes = *described.shape, *described.strides
    return functools.lru_cache(1024)(lambda address: (encode(address, *fixed), *sizes))
