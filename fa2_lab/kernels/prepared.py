"""The table of prepared calls, which lets all calls with the same key share one round of checks and choices.

The key contains everything on which checks and choices depend: types, dtypes, devices, shapes, strides and options, but
neither addresses nor values. For each key, PREPARED stores the function that computes such a call, and its launches
with all arguments except the pointers. Launches that look the same to the compiler share the kernel that Triton
compiled for the first of them. PREPARED also stores the modules of the Hopper kernels and the counters of their tile
schedulers. Besides this table, only relaunch.py stores data per call: the last 1,024 addresses of each descriptor.

A few checks depend on values, such as the check on the range of key_lengths, and read them before a launch. CHECKED
records which versions of which tensors have passed these checks, without writing anything to the tensors.
clear_caches() empties both tables.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

PREPARED: dict = {}
MAX_ENTRIES = 4096
# {id(x): (weak reference to x, (limits, version, address))}. If the check of x also depended on a second tensor, the
# entry continues with the weak reference and the (version, address) of that tensor.
CHECKED: dict = {}


class Tensors(NamedTuple):
    """The tensors of a call. A field is None if the call does not have this tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_lengths: Tensor | None = None
    seed: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # where packed sequences begin
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None  # with one, k and v are pages (pages, page_size, kv heads, d)

    @property
    def sequences(self) -> int | None:
        """The number of packed sequences, or None if the call is not packed."""
        return None if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


class Options(NamedTuple):
    """The options of a call, which are all its arguments except the tensors."""

    causal: bool
    scale: float
    dropout_p: float = 0.0
    left: int | None = None  # columns that a row sees before its diagonal; None means all
    right: int | None = None  # columns that it sees after its diagonal, if the mask is not causal
    softcap: float | None = None
    num_splits: int = 0  # of the keys of each sequence in decode; 0 means as many as fill the GPU
    force_portable: bool = False  # whether the portable kernels compute it also on Hopper
    dominant_sequence: bool = False  # whether one of the packed sequences has most of the work
    reference: bool = False  # whether the NumPy ladder computes it
    in_custom_op: bool = False  # whether it goes through the custom operator, whose memory a CUDA graph may own
    bias: Any = None  # a function of (head, row, column), added to the scores; operators do not take it

    @property
    def portable_only(self) -> bool:
        """Whether the call uses dropout or a bias, which only the portable kernels support."""
        return self.dropout_p > 0 or self.bias is not None

    @property
    def has_window(self) -> bool:
        """Whether a window, and not only the causal mask, limits the columns that rows see."""
        return self.left is not None or self.right is not None

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """The window (left, right) around the diagonal, with right = 0 for the causal mask. None means unbounded."""
        return self.left, 0 if self.causal else self.right


def get_or_prepare(key: tuple, make: Callable, *arguments: Any) -> Any:
    """Return make(*arguments), stored in PREPARED under `key`."""
    prepared = PREPARED.get(key, PREPARED)  # PREPARED itself stands for a missing entry, because None is a valid one
    if prepared is PREPARED:
        prepared = keep_prepared(key, make(*arguments))
    return prepared


def keep_prepared(key: tuple, entry: Any) -> Any:
    """Store `entry` in PREPARED under `key`, and return it. If PREPARED is full, its oldest entry is removed."""
    if len(PREPARED) >= MAX_ENTRIES:
        PREPARED.pop(next(iter(PREPARED)), None)
    PREPARED[key] = entry
    return entry


def clear_caches() -> None:
    """Empty the tables PREPARED and CHECKED, so that every check and every choice is made again."""
    PREPARED.clear()
    CHECKED.clear()


def tensor_keys(tensors: Sequence[Tensor | None]) -> list[tuple | None]:
    """Return the properties of each tensor on which checks and choices depend, or None for a missing tensor."""
    return [None if x is None else (x.dtype, x.device, x.shape, x.stride(), x.is_neg()) for x in tensors]


def needs_copy(x: Tensor | None) -> bool:
    """Return whether kernels need a copy of x, because its rows are not contiguous or it has a pending negation."""
    if x is None:
        return False
    strided = x.stride(-1) != 1 and x.shape[-1] > 1
    return strided or (not torch.compiler.is_compiling() and x.is_neg())  # torch.compile negates before


def rows_contiguous(x: Any) -> Any:
    """Return x, or a copy with contiguous rows if x needs one, as needs_copy() tells.

    The copy is made by clone(), because contiguous() would not change a tensor without elements.
    """
    return x.clone(memory_format=torch.contiguous_format) if x is not None and needs_copy(x) else x


def contiguous_like(x: Tensor, device: str | None = None) -> Tensor:
    """Return a new tensor with the shape and the dimension order in memory of x, as torch's own operators do.

    Its rows are always contiguous, and no two of its elements share memory, even if elements of x do. On the device
    "meta", it has a shape and strides, but no memory.
    """
    made = torch.empty_like(x, device=device)
    if made.stride(-1) == 1 or made.shape[-1] <= 1:
        return made
    return torch.empty_like(x, device=device, memory_format=torch.contiguous_format)


def layout_of_result(x: Tensor) -> Tensor:
    """Return a tensor with the shape and strides of contiguous_like(x), of which nothing else may be used.

    A tensor without gaps has them itself, in (batch, heads, N, d) as well as in (batch, N, heads, d). For all others, a
    tensor on the device "meta" is made, which takes torch a tenth of a millisecond.
    """
    if x.is_contiguous() or (x.dim() == 4 and x.transpose(1, 2).is_contiguous()):
        return x
    return contiguous_like(x, device="meta")


# Values that were checked -----------------------------------------------------------------------------------


def was_checked(x: Tensor, limits: tuple, other: Tensor | None = None) -> bool:
    """Return whether x has passed a check with these limits, and neither x nor `other` has changed since then."""
    entry = CHECKED.get(id(x))
    if entry is None or entry[0]() is not x or entry[1] != (limits, x._version, x.data_ptr()):
        return False
    return other is None or (entry[2]() is other and entry[3] == (other._version, other.data_ptr()))


def mark_checked(x: Tensor, limits: tuple, other: Tensor | None = None) -> None:
    """Remember that x has passed a check with these limits, until x or the tensor `other` changes.

    Changes are detected by a tensor's version and address. For example, x.data = y does not increase the version, but
    it changes the address of x. An in-place change through x.data, or through a NumPy array that shares the memory,
    does not increase the version and is not detected. Inference tensors have no version, so they are never remembered.
    """
    if x.is_inference() or (other is not None and other.is_inference()):
        return
    name = id(x)
    entry = ref(x, lambda _: CHECKED.pop(name, None)), (limits, x._version, x.data_ptr())
    CHECKED[name] = entry if other is None else (*entry, ref(other), (other._version, other.data_ptr()))
