"""Launch a compiled kernel again, on other tensors, with little work on the host.

In every launch Triton looks at all arguments anew, asks the driver about every pointer, and encodes every tensor
descriptor, in Python: 14 µs for four of them. Here the arguments that it hands to the driver are written down once, and
later launches put new addresses into them.
"""

import copy
import functools
import types

from triton.runtime import driver


def relaunch(compiled, grid, stream, described=(), pointers=(), numbers=(), floats=(), constants=()):
    """What launches `compiled` from now on, called with (stream, addresses, floats); None where that cannot be.

    The kernel's arguments are descriptors, then pointers, then numbers that stay as they are, then floats, constants.
    """
    try:
        return Relaunch(compiled, grid, stream, described, pointers, numbers, floats, constants)
    except (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError):
        return None  # this Triton is another inside; its own call still works


class Relaunch:
    """One launch, written down."""

    def __init__(self, compiled, grid, stream, described, pointers, numbers, floats, constants):
        arguments = *described, *pointers, *numbers, *floats, *constants
        arguments += (None,) * (len(compiled.src.fn.arg_names) - len(arguments))
        self.launcher, (*base, last) = written_down(compiled, grid, arguments, stream)
        self.own = len(base) if isinstance(last, (list, tuple)) else None  # since Triton 3.7 a kernel's are a list
        self.all = [*base, last] if self.own is None else [*base, *last]
        self.maps = [at for at, x in enumerate(self.all) if type(x).__name__ == "PyCUtensorMap"]
        self.encode = [*map(encoder, described, compiled.metadata.tensordesc_meta if described else ())]
        scratch = compiled.metadata.global_scratch_size + compiled.metadata.profile_scratch_size
        if self.all[:4] != [*grid, stream] or len(self.maps) != len(self.encode) or scratch:
            raise ValueError("an unknown order of arguments")
        first = len(self.all) - len(arguments) + len(described)  # descriptors alone become several arguments each
        self.pointers = slice(first, first + len(pointers))
        first += len(pointers) + len(numbers)
        self.floats = slice(first, first + len(floats))
        self.all[self.pointers] = [0] * len(pointers)  # keep no tensor alive
        self.hooks = [(at, x) for at, x in enumerate(self.all) if type(x).__name__ == "HookChain"]
        for at, _ in self.hooks:
            self.all[at] = None

    def __call__(self, stream, addresses, floats=()):
        arguments = self.all.copy()
        arguments[3] = stream
        for at, encode, address in zip(self.maps, self.encode, addresses):  # noqa: B905  (strict costs time)
            arguments[at] = encode(address)
        for at, hook in self.hooks:
            if hook.calls:  # a profiler's; to call none of them takes a microsecond
                arguments[at] = hook
        arguments[self.pointers] = addresses[len(self.maps) :]
        arguments[self.floats] = floats
        if self.own is not None:
            arguments[self.own :] = (arguments[self.own :],)
        self.launcher(*arguments)


def written_down(compiled, grid, arguments, stream):
    """Triton's innermost launcher, and what it would be called with: a double of `compiled` writes it down instead."""
    double, run = copy.copy(compiled), copy.copy(compiled.run)
    inner, seen = run.launch, []
    launcher, run.launch = inner, lambda *everything: seen.extend(everything)
    if isinstance(inner, types.FunctionType):  # where there are tensor descriptors, which it takes apart
        cells = dict(zip(inner.__code__.co_freevars, inner.__closure__, strict=True))
        launcher, cells["launcher"] = cells["launcher"].cell_contents, types.CellType(run.launch)
        run.launch = types.FunctionType(inner.__code__, inner.__globals__, closure=tuple(cells.values()))
    double._run = run
    double[grid](*arguments, stream=stream)
    return launcher, seen


def encoder(described, meta):
    """The function from an address to what the copy engine is told of such a tensor there."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    utils = driver.active.utils
    encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # its name before 3.7
    fixed = meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"]
    fixed += described.shape, described.strides, 0
    return functools.lru_cache(64)(lambda address: encode(address, *fixed))
