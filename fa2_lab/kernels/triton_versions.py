"""The differences between Triton's versions, and the internals of Triton that the project uses.

The kernels use the API names of the newest Triton, and add_newest_names() makes these names available in older
versions. by_triton() selects values that depend on the version, such as tile sizes.

The project uses the internals of Triton listed below. If a later version lacks an internal that only relaunch.py uses,
launches become slower. If it lacks a Gluon name, the portable kernels run instead of the Hopper kernels.

- launches.py and tables.py read the GPU and its stream from runtime.driver.active, which offline.py replaces with a
  GPU that is not present. relaunch.py encodes descriptors with the driver's
  utils.fill_tma_descriptor (or fill_tma_descriptor_tiled);
- tables.py reads knobs.runtime.override_arch, and relaunch.py reads launch_enter_hook and launch_exit_hook (each a
  HookChain);
- launches.py and relaunch.py read JITFunction.arg_names and CompiledKernel.src.fn.arg_names;
- relaunch.py uses CompiledKernel.run and .function, CudaLauncher.launch, and tensordesc_meta, global_scratch_size and
  profile_scratch_size in CompiledKernel.metadata;
- reserve_shared_memory() changes CompiledKernel.metadata and .packed_metadata;
- dispatch.py recognizes where an error was raised by looking for the module names triton.runtime.jit and
  triton.compiler;
- speed_up_interpreter() replaces functions of runtime.interpreter, such as _patch_lang;
- add_newest_names() makes language.core._aggregate and builder.create_async_tma_reduce (until 3.7) and
  shared_memory_descriptor._reinterpret (until 3.8) public.
"""

import os
from contextlib import suppress
from dataclasses import replace
from functools import cache, wraps
from typing import Any

with suppress(ImportError):  # allow TESTED to be read even if Triton is not installed
    import triton
    from triton.runtime import driver as driver

    from fa2_lab.kernels.relaunch import relaunch as relaunch
    from fa2_lab.kernels.relaunch import specialization_key as specialization_key

TESTED = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
OLDEST = "3.6"


def major_minor(version: str) -> tuple[int, ...]:
    """Return (major, minor) for a version, such as (3, 9) for "3.9.0"."""
    return tuple(int(part) for part in version.split(".")[:2])


def by_triton(entries: dict[str, Any]) -> Any:
    """Return the entry for the installed version of Triton.

    Each entry is valid from its own version up to, but not including, the next entry's version.
    """
    installed = major_minor(triton.__version__)
    return entries[max((version for version in entries if major_minor(version) <= installed), key=major_minor)]


def version_conflict(triton: str, numpy: str, interpreted: bool = True) -> str:
    """Return what to install if these Triton and NumPy versions cannot run the kernels, or "" if they can.

    `interpreted` is True if Triton's interpreter runs the kernels.
    """
    if major_minor(triton) < major_minor(OLDEST):
        return f"Triton {triton} is too old for these kernels: install 'triton>={OLDEST}'"
    if interpreted and major_minor(triton) < (3, 7) and major_minor(numpy) >= (2, 4):
        return (
            f"the interpreter of Triton {triton} does not work with NumPy {numpy}: install 'triton>=3.7' or 'numpy<2.4'"
        )
    return ""


def check_and_patch() -> None:
    """Raise an error if Triton is too old. Otherwise, speed up Triton's interpreter.

    Call this function before importing a kernel.
    """
    if conflict := version_conflict(triton.__version__, numpy="", interpreted=False):
        raise RuntimeError(f"fa2_lab: {conflict}; backend='reference' runs everywhere")
    speed_up_interpreter()


# Newest names -------------------------------------------------------------------------------------------------


@cache
def add_newest_names() -> None:
    """Make the API names of the newest Triton available in an older installed version.

    Call this function before importing the first Gluon kernel.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import tma

    old_names = {
        (tma, "async_load"): "async_copy_global_to_shared",  # until 3.7
        (tma, "async_store"): "async_copy_shared_to_global",
        (gl, "barrier"): "thread_barrier",  # until 3.6
        (gl.shared_memory_descriptor, "reinterpret"): "_reinterpret",  # until 3.8
    }
    for (owner, name), old in old_names.items():
        if not hasattr(owner, name):
            setattr(owner, name, getattr(owner, old))
    if not hasattr(tma, "async_atomic_add"):
        tma.async_atomic_add = atomic_add()
    if not hasattr(triton, "aggregate"):
        triton.aggregate = aggregate


def atomic_add() -> Any:
    """Return a replacement for tma.async_atomic_add, which is missing in Triton before version 3.8.

    The replacement uses TMA to add a tile in shared memory to a tensor in HBM.
    """
    from triton._C.libtriton import ir
    from triton.experimental.gluon.language._core import builtin

    @builtin
    def async_atomic_add(described: Any, at: Any, tile: Any, _semantic: Any = None) -> None:
        at = _semantic._convert_to_ir_values(at, require_i64=False)
        kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
        _semantic.builder.create_async_tma_reduce(kind, described.handle, at, tile.handle)

    return async_atomic_add


def aggregate(cls: Any) -> Any:
    """Convert the class `cls` to an aggregate, as triton.aggregate does in Triton 3.8 and later.

    An aggregate is a class whose annotated fields are passed to kernel functions as a single argument.
    """
    constexpr, fields = triton.language.constexpr, cls.__annotations__

    def __init__(self: Any, *values: Any, **named: Any) -> None:
        values = *values, *(named[name] for name in list(fields)[len(values) :])
        for (name, annotation), value in zip(fields.items(), values, strict=True):
            setattr(self, name, constexpr(value) if annotation is constexpr else value)

    vars(__init__)["__triton_builtin__"] = True  # prevents Triton from compiling this method
    cls.__init__ = __init__
    return triton.language.core._aggregate(cls)


def reserve_shared_memory(kernel: Any, least_bytes: int) -> None:
    """Make a compiled kernel request at least `least_bytes` bytes of shared memory, even if it needs less.

    Call this function before the kernel's first launch.
    """
    metadata = kernel.metadata._replace(shared=max(kernel.metadata.shared, least_bytes))
    kernel.metadata, kernel.packed_metadata = metadata, (metadata.num_warps, metadata.num_ctas, metadata.shared)


# The interpreter ----------------------------------------------------------------------------------------------


@cache
def speed_up_interpreter() -> None:
    """Speed up Triton's interpreter almost threefold by skipping three steps that do not affect results.

    To run a kernel, the interpreter patches triton.language and restores it afterwards. It repeats both steps for every
    function that the kernel calls, although doing them once is enough. It also computes every integer sum twice to
    detect overflow, and rebuilds a table of all types whenever it looks up a NumPy dtype. If `debug` is on, the
    overflow check is kept.

    If the interpreter is off, or if Triton's internal names have changed, do nothing.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    with suppress(AttributeError, ImportError):
        from triton import language
        from triton.runtime import interpreter

        replace_all, empty_scope = interpreter._patch_lang, interpreter._LangPatchScope
        builder = interpreter.interpreter_builder
        modules, is_builtin = (language, language.core), language.core.is_builtin
        numpy_dtype, known = interpreter._get_np_dtype, dict[str, Any]()

        @wraps(replace_all)
        def replace_once(function: Any) -> Any:
            """Patch Triton's functions unless a caller has already done so. Return an object that restores them."""
            seen = [module for module in modules if any(x is module for x in function.__globals__.values())]
            first = not seen or any(is_builtin(module.load) for module in seen)  # true if `load` is still the original
            return replace_all(function) if first else empty_scope()

        @wraps(numpy_dtype)
        def numpy_dtype_once(dtype: Any) -> Any:
            """Return the NumPy dtype for the elements of a Triton type."""
            name = dtype.scalar.name
            if name not in known:
                known[name] = numpy_dtype(dtype)
            return known[name]

        if not builder.options.debug:
            builder.options = replace(builder.options, sanitize_overflow=False)
        interpreter._patch_lang, interpreter._get_np_dtype = replace_once, numpy_dtype_once
