"""Per-process caches: PREPARED holds calls whose kernels are ready, and CHECKED holds tensors that passed a check.

Calls with the same key are checked only once, and their kernels are chosen only once. The key contains everything that
can affect the checks and the choice of kernels: types, dtypes, devices, shapes, strides and options, but neither
addresses nor values. For each key, PREPARED stores the function that computes the calls, along with the function's
launches and all of their arguments except the pointers. Launches that are identical to the compiler share the kernel
that Triton compiled for the first of them. PREPARED also stores the modules of the Hopper kernels and the counters of
their tile schedulers. In addition, relaunch.py caches each descriptor's encodings for the last 1,024 addresses.

Some checks, such as the one on the range of key_lengths, depend on values and must read them before a launch. CHECKED
records which versions of which tensors have passed these checks, without modifying the tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

PREPARED: dict = {}
MAX_ENTRIES = 4096
# {id(x): (weak reference to x, (limits, version, address))}. If the check of x also involved a second tensor, a weak
# reference to that tensor and its (version, address) follow.
CHECKED: dict = {}


def get_or_prepare(key: tuple, make: Callable, *arguments: Any) -> Any:
    """Return the entry of PREPARED under `key`. If it does not exist, create it with make(*arguments)."""
    prepared = PREPARED.get(key, PREPARED)  # PREPARED itself stands for a missing entry, because None is a valid one
    if prepared is PREPARED:
        prepared = keep_prepared(key, make(*arguments))
    return prepared


def keep_prepared(key: tuple, entry: Any) -> Any:
    """Store `entry` in PREPARED under `key`, and return it. If PREPARED is full, remove its oldest entry."""
    if len(PREPARED) >= MAX_ENTRIES:
        PREPARED.pop(next(iter(PREPARED)), None)
    PREPARED[key] = entry
    return entry


def clear_caches() -> None:
    """Clear PREPARED and CHECKED so that every call is checked and prepared again."""
    PREPARED.clear()
    CHECKED.clear()


def tensor_keys(tensors: Sequence[Tensor | None]) -> list[tuple | None]:
    """Return, for each tensor, the properties that belong in a cache key, or None in place of a missing tensor."""
    return [None if x is None else (x.dtype, x.device, x.shape, x.stride(), x.is_neg()) for x in tensors]


# Checked values ---------------------------------------------------------------------------------------------


def was_checked(x: Tensor, limits: tuple, other: Tensor | None = None) -> bool:
    """Return whether x has passed a check with these limits and neither x nor `other` has changed since then."""
    entry = CHECKED.get(id(x))
    if entry is None or entry[0]() is not x or entry[1] != (limits, x._version, x.data_ptr()):
        return False
    return other is None or (entry[2]() is other and entry[3] == (other._version, other.data_ptr()))


def mark_checked(x: Tensor, limits: tuple, other: Tensor | None = None) -> None:
    """Remember that x has passed a check with these limits, until x or the tensor `other` changes.

    Changes are detected by comparing a tensor's version and address. For example, x.data = y leaves the version of x
    unchanged, but changes its address. An in-place change through x.data, or through a NumPy array that shares the
    memory, leaves both the version and the address unchanged, so it is not detected. Inference tensors have no version,
    so they are never remembered.
    """
    if x.is_inference() or (other is not None and other.is_inference()):
        return
    name = id(x)
    entry = ref(x, lambda _: CHECKED.pop(name, None)), (limits, x._version, x.data_ptr())
    CHECKED[name] = entry if other is None else (*entry, ref(other), (other._version, other.data_ptr()))
