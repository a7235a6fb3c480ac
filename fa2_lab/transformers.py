"""Use fa2_lab as an attention implementation in Hugging Face transformers. Importing this module registers "fa2_lab".

    import fa2_lab.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fa2_lab")

In transformers, a mask is a function of a row and a column. This module computes, once for all layers, which contiguous
range of columns each row sees. It supports causal masks, sliding windows, padding on either side, and several
concatenated sequences, given by position_ids or cu_seq_lens_q. Grouped-query attention, sinks, a softcap and a KV cache
work without further configuration. If a row sees more than one range, the module raises an error that names the mask.
In each call of the model, the module reads the padding and the sequence boundaries, which makes the host wait for the
GPU.

With a static cache, `generate` builds the mask before it calls the model and, on a GPU, also compiles the model. Each
call then receives the whole cache, and a separate tensor holds the number of keys stored in it so far, so that the
model is not recompiled as the cache fills.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from fa2_lab.api.attention import attention
from fa2_lab.api.checks import describe
from fa2_lab.api.packed import attention_packed

NAME = "fa2_lab"
TAKES = "it takes causal and bidirectional masks, sliding windows and padding on either side"
REFUSED = ("position_bias", "head_mask", "output_attentions")  # options of `eager` that this module rejects


@dataclass(eq=False)
class Interval(masking_utils.BlockMask):
    """A mask for the transformers library that stores the contiguous range of keys that each row sees.

    It is a BlockMask with four dimensions, because transformers accepts only tensors and BlockMasks.
    """

    size: tuple[int, int, int, int]  # batch, 1, rows, columns
    causal: bool
    left: int | None  # columns visible to the left of the diagonal, as in attention(window=…); None means all
    right: int | None
    keys: int  # the attention uses the first `keys` keys of the cache
    first: list[int] | None = None  # index of each batch entry's first key, or None if no entry is padded on the left
    lengths: Tensor | None = None  # number of keys per batch entry, if padding or unused cache slots may follow them
    starts: Tensor | None = None  # cumulative lengths of the sequences in all entries, as in attention_packed()
    longest: int | None = None  # the length of the longest of these sequences

    ndim = 4  # GPT-2 reads this attribute, as it would from a tensor
    __str__ = object.__str__

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The mask's shape, (batch, 1, rows, columns).

        It is called `shape` because the transformers library reads that attribute, as it would from a tensor.
        """
        return self.size

    def contiguous(self) -> "Interval":
        """Return the mask itself. `generate` calls this method, as it would on a tensor."""
        return self

    def to(self, device: torch.device | str, **_: Any) -> "Interval":
        """Return the mask with its tensors on `device`, because a model's layers may be spread over several devices."""
        moved = {name: x.to(device) for name in ("lengths", "starts") if (x := getattr(self, name)) is not None}
        return replace(self, **moved)


def register() -> None:
    """Register "fa2_lab" as an attn_implementation of transformers."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, interval)


# The mask -----------------------------------------------------------------------------------------------------


def interval(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Interval:
    """Return an Interval that represents the mask described by these arguments from transformers.

    Row r of the mask corresponds to token q_offset + r, and column c to token kv_offset + c. Raise an error if any row
    sees more than one contiguous range of keys.
    """
    causal, left, right = False, None, None
    sequences: tuple = ()
    for part in parts_of(mask_function):
        if part == "causal_mask_function":
            causal = True
        elif part[0] == "packed_sequence_mask_function":
            sequences = sequences_of(part[1])
        elif part[0] == "sliding_window_overlay":  # a window of w columns includes the diagonal
            left = part[1] - 1
        else:  # a bidirectional window of w columns on each side of the diagonal
            left = right = part[1]
    keys, kv_offset, size = kv_length, int(kv_offset), (batch_size, 1, q_length, kv_length)
    if causal or left is not None:  # the last row's diagonal is at the last key
        keys = int(q_offset) + q_length - kv_offset
        if not 1 <= keys <= kv_length or (keys < kv_length and not causal):
            raise ValueError(
                f"mask: got {q_length} rows from {int(q_offset)}, {kv_length} columns from {kv_offset}; {TAKES}"
            )
    room = keys < kv_length or isinstance(q_offset, Tensor)  # true for a static cache
    if room and q_length == 1 and (left is None or left >= keys - 1):
        return row_of_a_cache(size, keys, kv_offset, attention_mask, device)
    seen = padding(attention_mask, kv_offset, keys)
    right = None if causal else right
    return Interval(size, causal, left, right, keys, *seen, *sequences)


def row_of_a_cache(
    size: tuple[int, int, int, int],
    keys: int,
    kv_offset: int,
    attention_mask: Tensor | None,
    device: torch.device | None,
) -> Interval:
    """Return the mask for a single row that sees all keys stored in a static cache so far.

    `size` is the mask's shape, and `keys` is the number of stored keys, including padding. The mask stores the number
    of visible keys in a tensor, so that the model is not recompiled when this number grows.
    """
    batch, *_, room = size
    if attention_mask is None:
        attention_mask = torch.ones(batch, kv_offset + keys, device=device)
    first, lengths = padding(attention_mask[:, : kv_offset + keys], kv_offset, room)
    if lengths is None:
        lengths = torch.tensor([room - b for b in first or [0] * batch], dtype=torch.int32, device=device)
    return Interval(size, causal=False, left=None, right=None, keys=room, first=first, lengths=lengths)


def parts_of(mask_function: Callable) -> list:
    """Return the masks that mask_function intersects, as a list of (name, value with which the mask was created).

    A causal mask is returned as its name alone, and a bidirectional mask is omitted.
    """
    name, _, inner = mask_function.__qualname__.partition(".<locals>.")
    if mask_function.__module__ == masking_utils.__name__:
        if name == "and_masks":
            return [x for part in closure(mask_function)["mask_functions"] for x in parts_of(part)]
        if name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            return [(name, closure(mask_function)["sliding_window"])]
        if name == "remap_positions_for_packed_sequence":  # remapping preserves distances within a sequence
            return parts_of(closure(mask_function)["mask_function"])
        if name == "packed_sequence_mask_function":
            return [(name, closure(mask_function)["packed_sequence_mask"])]
        if name in ("causal_mask_function", "bidirectional_mask_function"):
            return [name] if name == "causal_mask_function" else []
    raise ValueError(f"mask: got {name or inner}; {TAKES}")


def closure(function: Callable) -> dict[str, Any]:
    """Return {name: value} for the variables in a function's closure.

    The closure is needed because transformers provides no public way to find out how a mask was created, other than
    evaluating the mask for every row and column.
    """
    return dict(inspect.getclosurevars(function).nonlocals)


def sequences_of(sequence: Tensor) -> tuple[Tensor, int]:
    """Return the cumulative sequence lengths and the maximum length, given the index of each token's sequence."""
    begins = torch.ones_like(sequence, dtype=torch.bool)
    begins[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    found = begins.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(found, (0, 1), value=sequence.numel()).int()
    return starts, int(starts.diff().max())


def padding(attention_mask: Tensor | None, kv_offset: int, keys: int) -> tuple[list[int] | None, Tensor | None]:
    """Return, for each batch entry, the index of the first real key and the number of real keys.

    The first result is None if no batch entry has padding on the left. The second result is None if none has padding on
    the right.
    """
    if attention_mask is None:
        return None, None
    real = attention_mask[:, kv_offset : kv_offset + keys].bool()
    real = torch.nn.functional.pad(real, (0, keys - real.shape[1]))
    if real.all():
        return None, None
    first, count = real.int().argmax(1), real.sum(1)
    column = torch.arange(keys, device=real.device)
    if (real != ((column >= first[:, None]) & (column < (first + count)[:, None]))).any():
        raise ValueError(f"attention_mask: got padding between the real tokens of a sequence; {TAKES}")
    lengths = None if (first + count == keys).all() else count.int()
    return first.tolist() if first.any() else None, lengths


# The attention ------------------------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Interval | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention in the form that transformers expects.

    Return O (batch, N, heads, d), and None instead of the attention weights.
    """
    for name in REFUSED:
        if more.get(name) is not None and more[name] is not False:
            raise ValueError(f"{name}: got {type(more[name]).__name__}; attn_implementation='fa2_lab' takes none")
    if torch.is_autocast_enabled(query.device.type):  # convert q, k and v, as torch's own attention does
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    seen = attention_mask
    if seen is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        seen = without_mask(bool(causal), sliding_window, (len(query), 1, query.shape[2], key.shape[2]))
    elif not isinstance(seen, Interval):
        what = describe(seen) if isinstance(seen, Tensor) else type(seen).__name__
        raise ValueError(f"attention_mask: got {what}, made elsewhere; {TAKES}")
    starts = more.get("cu_seq_lens_q")  # cumulative lengths, used only without position_ids and padding
    if starts is not None and seen.starts is seen.first is seen.lengths is None:
        seen = replace(seen, starts=starts.int())
    window = None if seen.left is None and seen.right is None else (seen.left, seen.right)
    options: dict[str, Any] = dict(causal=seen.causal, window=window, softcap=softcap, sinks=s_aux, scale=scaling)
    if seen.starts is not None:
        if dropout:
            raise ValueError(f"dropout: got {dropout}; with several sequences in a row it takes 0")
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (tokens, heads, d)
        O: Any = attention_packed(q, k, v, seen.starts, seen.starts, max_seqlen_q=seen.longest, **options)
        return O.unflatten(0, (query.shape[0], -1)), None
    options["dropout_p"] = dropout
    key, value = (x[:, :, : seen.keys] for x in (key, value))
    if seen.first is None:
        O = attention(query, key, value, key_lengths=seen.lengths, **options)
    else:  # run each batch entry separately, from its first key; the diagonal still ends at the last key
        Os: list[Any] = []
        for b, first in enumerate(seen.first):
            one = query[b : b + 1], key[b : b + 1, :, first:], value[b : b + 1, :, first:]
            lengths = None if seen.lengths is None else seen.lengths[b : b + 1]
            Os.append(attention(*one, key_lengths=lengths, **options))
        O = torch.cat(Os)
    return O.transpose(1, 2).contiguous(), None


def without_mask(causal: bool, sliding_window: int | None, size: tuple[int, int, int, int]) -> Interval:
    """Return the mask for a model that does not pass a mask. `size` is (batch, 1, rows, columns)."""
    *_, N_q, N_k = size
    if causal and N_q not in (1, N_k):
        raise ValueError(f"attention_mask: got None for {N_q} causal rows and {N_k} columns; {TAKES}")
    # The window includes the diagonal even in bidirectional models, as in transformers' own calls to flash-attn.
    left = None if sliding_window is None else sliding_window - 1
    return Interval(size, causal, left, right=None if causal else left, keys=N_k)


register()
