"""The attention of each implementation for causal sequences of different lengths, packed or padded."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from fa2_studio.bench.peers.dense import Attend, O_of, function_of
from fa2_studio.bench.problem import Missing, TensorSequence

MAX_ROWS = 2**18  # the most rows of a padded call; with this many, the call needs more than ten tensors of 1 GiB each


class Packed(NamedTuple):
    """A call and its tensors q, k, v and dO.

    Given one of these tensors or O, `last` returns the last sequence of that tensor, with shape (1, heads, N, d).
    """

    attention: Attend
    tensors: TensorSequence
    last: Callable[[torch.Tensor], torch.Tensor]


def pad_sequences(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Convert a tensor of shape (tokens, heads, d) to (batch, heads, N, d), with zeros after each sequence."""
    return torch.nn.utils.rnn.pad_sequence(x.split(list(lengths)), batch_first=True).transpose(1, 2).contiguous()


def padded_attention(lengths: Sequence[int], tensors: TensorSequence) -> Packed:
    """Return attention() for padded sequences, using key_lengths. Raises Missing if there are too many rows."""
    from fa2_lab.api.attention import attention

    rows = len(lengths) * max(lengths)
    if rows > MAX_ROWS:
        raise Missing(f"padding would turn {sum(lengths):,} tokens into {rows:,} rows")
    count = torch.tensor(lengths, dtype=torch.int32, device=tensors[0].device)
    call = partial(attention, causal=True, key_lengths=count)
    return Packed(call, [pad_sequences(x, lengths) for x in tensors], lambda x: x[-1:, :, : lengths[-1]])


def varlen_call(function: Callable, lengths: Sequence[int], tensors: TensorSequence, *more: int, **options) -> Packed:
    """Return a call to a function that accepts cu_seqlens for q and k.

    `more` holds the longest lengths, if the function needs them.
    """
    starts = torch.tensor([0, *lengths], device=tensors[0].device).cumsum(0).int()

    def call(q, k, v):
        return O_of(function(q, k, v, starts, starts, *more, **options))

    return Packed(call, tensors, lambda x: x[-lengths[-1] :].transpose(0, 1)[None])


def ours(lengths: Sequence[int], tensors: TensorSequence) -> Packed:
    """Return a call to our attention_packed()."""
    function = function_of("fa2_lab.api.packed", "attention_packed")
    return varlen_call(function, lengths, tensors, causal=True, max_seqlen_q=max(lengths))


def package(lengths: Sequence[int], tensors: TensorSequence, module: str) -> Packed:
    """Return a call to one of Dao's packages."""
    function, longest = function_of(module, "flash_attn_varlen_func"), max(lengths)
    return varlen_call(function, lengths, tensors, longest, longest, causal=True)


def torch_varlen(lengths: Sequence[int], tensors: TensorSequence) -> Packed:
    """Return a call to PyTorch's varlen_attn, whose argument for the causal mask depends on the PyTorch version."""
    function, longest = function_of("torch.nn.attention.varlen", "varlen_attn"), max(lengths)
    old = "is_causal" in inspect.signature(function).parameters
    causal = dict(is_causal=True) if old else dict(window_size=(-1, 0))
    return varlen_call(function, lengths, tensors, longest, longest, **causal)
