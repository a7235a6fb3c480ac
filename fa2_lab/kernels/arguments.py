"""A call's arguments, in two records: Tensors and Options."""

from typing import Any, NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """A call's tensors. A field is None if the call does not have that tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_lengths: Tensor | None = None
    seed: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # cumulative lengths: the rows at which packed sequences begin
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None  # if given, k and v are pages: (pages, page_size, kv heads, d)

    @property
    def sequences(self) -> int | None:
        """The number of packed sequences, or None if the call is not packed."""
        return None if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


class Options(NamedTuple):
    """A call's options: all its arguments except the tensors."""

    causal: bool
    scale: float
    dropout_p: float = 0.0
    left: int | None = None  # number of columns each row sees to the left of its diagonal; None means no limit
    right: int | None = None  # number of columns to the right of the diagonal, if the mask is not causal
    softcap: float | None = None
    num_splits: int = 0  # splits of each sequence's keys in decode; 0 means enough splits to fill the GPU
    exclude_hopper: bool = False  # whether the Hopper kernels must not be used; the decode kernels may be
    dominant_sequence: bool = False  # whether one of the packed sequences has most of the work
    reference: bool = False  # whether the NumPy reference computes the call
    in_custom_op: bool = False  # inside the custom operator, new memory may be a CUDA graph's and must not be cached
    bias: Any = None  # a function of (head, row, column), added to the scores; custom operators do not take it

    @property
    def needs_portable(self) -> bool:
        """Whether the call uses dropout or a bias, which only the portable kernels support."""
        return self.dropout_p > 0 or self.bias is not None

    @property
    def has_window(self) -> bool:
        """Whether a window, and not just the causal mask, limits the columns that rows see."""
        return self.left is not None or self.right is not None

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """The window (left, right) around the diagonal, with right = 0 for the causal mask. None means unbounded."""
        return self.left, 0 if self.causal else self.right
