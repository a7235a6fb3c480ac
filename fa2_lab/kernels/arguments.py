"""A call's arguments, grouped in two named tuples: Tensors and Options."""

from typing import Any, NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """The tensors of a call. A field is None if the call has no such tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    key_lengths: Tensor | None = None
    seed: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # first row of each packed sequence (cumulative lengths)
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None  # if given, k and v are pages of shape (pages, page_size, kv heads, d)

    @property
    def sequences(self) -> int | None:
        """The number of packed sequences, or None if the call is not packed."""
        return None if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1


class Options(NamedTuple):
    """The options of a call: all arguments other than the tensors."""

    causal: bool
    scale: float
    dropout_p: float = 0.0
    left: int | None = None  # number of columns that a row sees to the left of its diagonal, or None for no limit
    right: int | None = None  # columns that it sees to the right, or None for no limit or a causal mask
    softcap: float | None = None
    num_splits: int = 0  # number of splits per sequence in decode, or 0 for as many as fill the GPU
    exclude_hopper: bool = False  # whether to exclude the Hopper kernels; the decode kernels may still be used
    dominant_sequence: bool = False  # whether one packed sequence accounts for most of the work
    reference: bool = False  # whether the NumPy reference handles the call
    # Whether the call runs in a custom operator, where new memory may belong to a CUDA graph and must not be cached.
    in_custom_op: bool = False
    # A function of (head, row, column) whose values are added to the scores. Custom operators do not accept it.
    bias: Any = None

    @property
    def has_window(self) -> bool:
        """Whether a window, rather than just the causal mask, limits the columns that rows see."""
        return self.left is not None or self.right is not None

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """The window (left, right) around the diagonal. The causal mask has right = 0, and None means no bound."""
        return self.left, 0 if self.causal else self.right
