"""Relaunch a compiled kernel on other tensors with little host overhead.

At every launch, Triton's own Python code examines all arguments, queries the driver about every pointer, and encodes
every tensor descriptor. With four descriptors, this takes 14 µs. This module records once which arguments Triton passes
to the driver, and replaces only the addresses in later launches. If a launch cannot be recorded in this way, Triton's
own call is used, which gives the same results but is slower.

The module relies on internals shared by Triton 3.6 to 3.9 (listed in triton_versions.py). A compiled kernel's `run` is
a callable object. It receives the grid, the stream, the function, packed metadata, launch metadata, two hooks and the
kernel's arguments, and passes them to its `launch`, the driver's C function. For kernels with descriptors, `launch` is
a Python wrapper around the C function. The wrapper replaces each descriptor with (the encoded TMA descriptor, *shape,
*strides). Because the order of `launch`'s arguments differs between versions, it is determined by recording a call.
"""

import copy
import functools
import types
from operator import is_
from typing import Any

from triton import knobs
from triton.language import constexpr
from triton.runtime import driver

EMPTY_GRID = 0, 1, 1  # a grid without programs


def relaunch(compiled: Any, grid: Any, stream: Any, arguments: Any, n_descriptors: int = 0, n_pointers: int = 0) -> Any:
    """Return a function of (stream, addresses) that launches the kernel `compiled`, or None if it cannot be relaunched.

    The first `n_descriptors` of the kernel's arguments are tensor descriptors, and the next `n_pointers` arguments are
    pointers. All other arguments are the same in every launch.
    """
    try:
        return Relaunch(compiled, grid, stream, arguments, n_descriptors, n_pointers)
    except Exception:
        return None  # Triton's internals have changed, so the caller uses Triton's own launch


class Relaunch:
    """A recorded launch, which can be repeated on other tensors."""

    def __init__(
        self, compiled: Any, grid: Any, stream: Any, arguments: Any, n_descriptors: int, n_pointers: int
    ) -> None:
        self.compiled = compiled  # this reference keeps the kernel's code on the GPU
        arguments = [*arguments, *[None] * (len(compiled.src.fn.arg_names) - len(arguments))]
        launch_args = recorded_launch_args(compiled, stream, arguments)
        self.args_in_list = are_same_objects(launch_args[-1], arguments)  # true since Triton 3.7
        base, kernel_args = launch_args[: -len(arguments)], launch_args[-len(arguments) :]
        if self.args_in_list:
            base, kernel_args = launch_args[:-1], launch_args[-1]
        scratch = compiled.metadata.global_scratch_size + compiled.metadata.profile_scratch_size  # bytes
        if scratch or not are_same_objects(kernel_args, arguments) or base[:4] != [*EMPTY_GRID, stream]:
            raise ValueError("an unknown order of arguments")
        self.hooks = [x for x in base if type(x).__name__ == "HookChain"]
        self.base = [*grid, *(None if type(x).__name__ == "HookChain" else x for x in base[3:])]
        self.meta = [*compiled.metadata.tensordesc_meta] if n_descriptors else []
        self.encoders = [*map(descriptor_encoder, kernel_args[:n_descriptors], self.meta)]
        # Plain tuples unpack faster than named ones. None of these arguments is a tensor, so no tensor is kept alive.
        self.rest = [*map(as_plain_tuples, kernel_args[n_descriptors + n_pointers :])]
        self.c_launch = compiled.run.launch
        if n_descriptors:
            self.c_launch, driver_args = unwrapped_launcher(compiled.run.launch, launch_args)
            expected = driver_args[-1] if self.args_in_list else driver_args[len(base) :]
            computed = self.kernel_args([*(X.base.data_ptr() for X in kernel_args[:n_descriptors]), *[0] * n_pointers])
            others = n_pointers + len(self.rest)
            if len(computed) != len(expected) or not all(map(same_argument, computed[:-others], expected)):
                raise ValueError("descriptors are taken apart in another way")

    def with_arguments(self, grid: Any, descriptors: Any, rest: Any) -> "Relaunch":
        """Return a copy of this launch with a new grid, new `descriptors` and other new arguments (`rest`).

        The new arguments must lead to the same compiled kernel, so Launch.compile_key() must be the same for the old
        and the new launch.
        """
        copied = copy.copy(self)
        copied.base = [*grid, *self.base[3:]]
        copied.encoders = [*map(descriptor_encoder, descriptors, self.meta)]
        copied.rest = [*map(as_plain_tuples, rest)]
        return copied

    def __call__(self, stream: Any, addresses: Any) -> bool:
        """Launch the kernel on the tensors with these addresses, and return True.

        If a profiler has installed a launch hook, return False instead of launching, because only Triton's own call
        runs the hook.
        """
        for hook in self.hooks:
            if hook.calls:
                return False
        base = self.base.copy()
        base[3] = stream
        kernel_args = self.kernel_args(addresses)
        if self.args_in_list:
            self.c_launch(*base, kernel_args)
        else:
            self.c_launch(*base, *kernel_args)
        return True

    def kernel_args(self, addresses: Any) -> list:
        """Return the kernel's arguments for these addresses: encoded descriptors, pointers, and recorded arguments."""
        kernel_args = []
        for encode, address in zip(self.encoders, addresses):  # noqa: B905  (strict costs time)
            kernel_args += encode(address)
        kernel_args += addresses[len(self.encoders) :]
        kernel_args += self.rest
        return kernel_args


def specialization_key(kernel: Any, arguments: dict[str, Any]) -> tuple:
    """Return the properties of each launch argument that affect the compiled kernel.

    A constant is represented by its value. An integer is represented by its width and, if the kernel is specialized on
    it, by two flags: whether it is 1 and whether it is a multiple of 16.
    """
    try:
        parameters = trailing_parameters(kernel, len(arguments))
    except AttributeError:
        return (object(),)  # Triton's internals have changed, so this key matches no other, and nothing is reused
    return tuple([specialization(arguments[name], constant, special) for name, constant, special in parameters])


@functools.cache
def trailing_parameters(kernel: Any, count: int) -> list[tuple[str, bool, bool]]:
    """Return (name, is constant, is specialized) for each of the last `count` parameters of a kernel."""
    return [(p.name, bool(p.is_constexpr), not p.do_not_specialize) for p in kernel.params[-count:]]


def specialization(x: Any, constant: bool, specialized: bool) -> Any:
    """Return the properties of the argument x that affect the compiled kernel.

    A constant is represented by its type and value. `specialized` is True if the kernel is specialized on x.
    """
    kind: Any = type(x)
    if kind is constexpr:
        return type(x.value), x.value
    if constant or kind is bool or x is None:
        return kind, x
    if kind is int:
        width = 0 if -(2**31) <= x < 2**31 else 4 if x < 2**63 else 8
        return width + (x == 1) + 2 * (x % 16 == 0) if specialized else width
    if kind is float:
        return kind
    return (kind, *[specialization(y, constant, specialized) for y in x]) if isinstance(x, tuple) else (kind, x)


def recorded_launch_args(compiled: Any, stream: Any, arguments: list) -> list:
    """Return the arguments that the kernel's `run` would pass to its `launch`, as recorded by a copy of `run`.

    The recording uses an empty grid, so no program runs even if a later Triton version calls its driver differently.
    """
    run, launch_args = copy.copy(compiled.run), []
    run.launch = lambda *everything: launch_args.extend(everything)
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    launch_metadata = None
    run(*EMPTY_GRID, stream, compiled.function, compiled.packed_metadata, launch_metadata, *hooks, *arguments)
    return launch_args


def are_same_objects(values: Any, arguments: Any) -> bool:
    """Return whether `values` contains exactly the objects of `arguments`, in the same order."""
    return isinstance(values, (list, tuple)) and len(values) == len(arguments) and all(map(is_, values, arguments))


def as_plain_tuples(x: Any) -> Any:
    """Return x with all tuples, including nested ones, replaced by plain tuples, which unpack three times as fast."""
    return tuple([as_plain_tuples(y) if isinstance(y, tuple) else y for y in x]) if isinstance(x, tuple) else x


def unwrapped_launcher(launch: Any, launch_args: list) -> tuple[Any, list]:
    """Return the driver's C function that the Python function `launch` calls, and the arguments that it would receive.

    The arguments are recorded by a copy of `launch` that calls a recording function instead of the C function.
    """
    driver_args: list = []
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    recording = cells | dict(launcher=types.CellType(lambda *everything: driver_args.extend(everything)))
    parts = launch.__code__, launch.__globals__, launch.__name__, launch.__defaults__, tuple(recording.values())
    types.FunctionType(*parts)(*launch_args)
    return cells["launcher"].cell_contents, driver_args


def same_argument(mine: Any, theirs: Any) -> bool:
    """Return whether two arguments are equal. Two TMA descriptors are treated as equal, as they cannot be compared."""
    return mine == theirs or (type(mine) is type(theirs) and not isinstance(mine, (int, float, tuple)))


def descriptor_encoder(descriptor: Any, meta: Any) -> Any:
    """Return a function that converts an address into the arguments that take the place of a tensor descriptor.

    `meta` is Triton's record of the compiled descriptor, including its swizzle and block size. The returned function
    caches the results for the last 1,024 addresses.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    utils = driver.active.utils
    encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # the name in Triton 3.6
    fixed: tuple = meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"]
    fixed += descriptor.shape, descriptor.strides, 0
    sizes = *descriptor.shape, *descriptor.strides
    return functools.lru_cache(1024)(lambda address: (encode(address, *fixed), *sizes))
