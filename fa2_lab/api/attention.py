"""The public call. A new kind of call is checked and prepared; those after it go to its kernels at once.

How it differs from torch.nn.functional.scaled_dot_product_attention is listed in TROUBLESHOOTING.md.

Where |scores| pass about 10⁶, L in fp32 is too coarse to find P again: O stays right, gradients are not to be trusted.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fa2_lab.api import operators
from fa2_lab.api.checks import (
    check_bias,
    check_dropout,
    check_lengths,
    check_masks,
    check_num_splits,
    check_numbers,
    check_range,
    check_recording,
    check_seed,
    check_sinks,
    check_tensors,
    check_transforms,
    kind_of,
    runs_on_triton,
)
from fa2_lab.kernels import interpreter
from fa2_lab.kernels.prepared import PREPARED, Options, Tensors

interpreter.decide(torch.cuda.is_available())


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Callable | None = None,
    scale: float | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """O = softmax(scale · q kᵀ) v for q (batch, heads, N_q, d) and k, v (batch, kv heads, N_k, d), fp16, bf16 or fp32.

    Batch, N_q and N_k may be 0. O and the gradients have the shape of their tensors and the order in which those have
    their dimensions in memory, but their rows are contiguous and nothing in them overlaps, whatever view came in.

    window       (left, right): row r sees columns r + N_k − N_q − left … r + N_k − N_q + right; None is unbounded, and
                 causal means right = 0
    softcap      c: scores become c · tanh(scores / c) after the scale
    sinks        floats (heads,): one more score in every row of a head, without a key or a value, neither scaled,
                 capped nor masked; gradients flow to it. −∞ is no sink. +∞ would leave no key a share, and fp32 cannot
                 hold a sink of more than 10³⁸ times the softcap or, without a softcap, a scale from 10⁻¹⁰ to 1. Such
                 sinks are refused if they can be seen without waiting for a GPU; otherwise they give NaN
    bias         a @triton.jit function of (head, row, column) that returns what is added to each score, after the scale
                 and the softcap. `head` counts the heads of q. `row` is counted among the keys, as the column of its
                 diagonal is: row r of q is row r + N_k − N_q. ALiBi is therefore −slope · (row − column), whatever N_q
                 and N_k are. All three are int32 and broadcast against each other. −∞ hides a key. No gradient flows to
                 a bias. The reference takes the same function in NumPy. Where torch records, as in torch.compile, a
                 bias is refused
    scale        None means 1/√d; at most 10³⁰ in size, because the kernels compute in fp32
    key_lengths  integers (batch,), from 0 to N_k. On a GPU their range is looked up once per tensor and version, which
                 waits for the GPU; in a CUDA graph or a compiled function it is not, and a length outside is clamped.
                 The diagonal stays where N_k puts it
    dropout_p    probability of a zero in P; seed: from 0 to 2⁶⁴ − 1
    num_splits   from 1 to 256: with few queries, the keys of every sequence are read in so many parts, whatever the
                 batch. None or 0 means as many as fill the GPU, which is faster, but then other sequences in the batch
                 change the last bits of a row
    return_lse   (O, L) with L (batch, heads, N_q), the logarithm of each row's sum of exponentials with its sink
    backend      "triton"; "portable", Triton kernels without Hopper's own; "reference", the NumPy ladder in float64;
                 "auto", the first that can run on these tensors

    On Hopper, fp16 and bf16 have their own kernels for every d from 32 to 128 that is divisible by 8, and for larger d,
    up to 256, in the forward pass. These kernels leave small calls, softcap, sinks, bias, dropout, and a window with d
    above 128 to the portable kernels. Their running maximum may lag by up to 8 in powers of two, which saves at least
    5% of the time. In bf16, this makes the error of O 3 to 4% larger on normal numbers, and 10 to 17% larger if one
    number in a thousand is an outlier; in that case the errors of dQ and dK also grow by up to 10%. With
    backend="portable" the maximum is exact.

    Batch invariance means that O and L of a sequence have the same bits in a batch of any size and at any place in it,
    whatever the other sequences and their lengths are. It needs

    - num_splits, if there are at most 16 queries, at most 64 query rows per K/V head (heads / kv heads · N_q), and
      neither a bias nor dropout;
    - backend="portable" in all other calls. With "auto" on Hopper, the size of the batch decides which kernel and which
      tiles they use, so their last bits may depend on it. Dropout draws another mask at another place in the batch.

    The promise is for one GPU, one version of Triton and the same mask. If key_lengths pad a sequence, causal and
    window count from N_k, so N_k has to be the same; one query without a window is masked by its length alone.
    """
    asked: tuple = causal, softcap, scale, dropout_p, num_splits, return_lse, backend
    if bias is not None:
        asked = *asked, kind_of(bias)
    key, call = recall((q, k, v, key_lengths, sinks), window, asked)
    if seed is not None:
        seed = check_seed(seed)
    if call is not None:  # one of its kind has passed all checks but those of values
        if key_lengths is not None:
            check_range(key_lengths, k.shape[2])
        if sinks is not None:
            check_sinks(sinks, call.options)
        drawn = seed_tensor(seed, q.device) if dropout_p else None
        return call(Tensors(q, k, v, key_lengths, drawn, sinks))
    check_tensors(q, k, v)
    if key_lengths is not None:
        check_lengths(key_lengths, q, k.shape[2])
    options = check_masks(causal, window, softcap, sinks, q, (*q.shape[1:3], k.shape[2]))
    scale = check_numbers(causal, scale, q.shape[3], return_lse)
    who: dict[str, Any] = dict(portable=backend == "portable", reference=not runs_on_triton(backend, q.device.type))
    who |= dict(num_splits=check_num_splits(num_splits), bias=bias)
    options = options._replace(scale=scale, dropout_p=check_dropout(dropout_p), **who)
    check_bias(bias, options.reference)
    check_sinks(sinks, options)
    drawn = seed_tensor(seed, q.device) if dropout_p else None
    return operators.compute(key, Tensors(q, k, v, key_lengths, drawn, sinks), options, return_lse)


def by_reference(tensors: Tensors, options: Options) -> Any:
    """Return (O, L) of one sequence, whose q, k and v are (1, heads, N, d), by the reference."""
    asked: dict[str, Any] = dict(window=options.window, softcap=options.softcap, scale=options.scale)
    asked |= dict(sinks=tensors.sinks, bias=options.bias, return_lse=True, backend="reference")
    return attention(tensors.q, tensors.k, tensors.v, **asked)


def recall(tensors: tuple, window: tuple | list | None, asked: tuple) -> tuple[tuple | None, Any]:
    """The kind of a call, all that the checks and the choice of a kernel look at; and what was prepared for it.

    None in their place while torch records, and where something is not what it should be: the checks will say so.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return None, None
    check_transforms()
    try:
        bounds = None if window is None else (type(window), *window, *map(type, window))
        seen = [
            None if x is None else (type(x), x.layout, x.dtype, x.device, x.shape, x.stride(), x.is_neg())
            for x in tensors
        ]
        key = *seen, bounds, *asked, *map(type, asked)  # types, for True == 1 == 1.0
        found = PREPARED.get(key)
    except (AttributeError, RuntimeError, TypeError):
        return None, None
    if found is None:
        check_recording()
    return key, found


def seed_tensor(seed: int | None, device: torch.device) -> Tensor:
    """The seed on the device, without waiting for it; None draws from torch's generator there, also in a CUDA graph."""
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    return torch.full((1,), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)
