"""The public function attention().

Prepared kernels are cached. A call's cache key consists of the types, dtypes, devices, shapes and strides of its
tensors and the values of its other arguments. The first call with a key checks its arguments and prepares its kernels.
Later calls with the same key launch the prepared kernels at once.

TROUBLESHOOTING.md lists how attention() differs from torch.nn.functional.scaled_dot_product_attention.

If scores are larger than about 10⁶ in magnitude, L in fp32 is too coarse to recompute P from it. O is still right, but
the gradients are unreliable.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fa2_lab.api import operators
from fa2_lab.api.bias import bias_key, check_bias
from fa2_lab.api.checks import (
    check_flags_and_scale,
    check_key_lengths,
    check_key_lengths_values,
    check_masks,
    check_not_jit_traced,
    check_num_splits,
    check_sinks,
    check_tensors,
    check_transforms,
    runs_on_triton,
)
from fa2_lab.kernels import interpreter
from fa2_lab.kernels.prepared import PREPARED, Tensors
from fa2_lab.tiles import real_number, whole_number

interpreter.enable_without_gpu(torch.cuda.is_available())


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
    """Return O = softmax(scale · q kᵀ) v for q (batch, heads, N_q, d) and k, v (batch, kv heads, N_k, d).

    q, k and v must have the same dtype: fp16, bf16 or fp32. Batch, N_q and N_k may be 0. O has the same shape and the
    same dimension order in memory as q, and each gradient has those of its input. The rows of O and of the gradients
    are always contiguous, and no two of their elements share memory, even if q, k or v are views for which this is not
    true.

    causal       If True, row r sees the columns up to r + N_k − N_q, so the last query is aligned with the last key.
    window       A pair (left, right): row r sees columns r + N_k − N_q − left … r + N_k − N_q + right. A bound of None
                 means unbounded. causal=True means right = 0.
    softcap      A number c. After the scale, each score s becomes c · tanh(s / c). None means no cap.
    sinks        A float tensor (heads,). Every row of a head gets one more score, its sink, which has no key and no
                 value. The sink is not scaled, capped or masked, and gradients flow to it. A sink of −∞ has no effect.
                 A sink of +∞ would leave no probability for any key. fp32 cannot hold a sink of more than 10³⁸ times
                 the softcap or, without a softcap, 10³⁸ times a scale from 10⁻¹⁰ to 1. Such sinks are refused if their
                 values can be read without waiting for a GPU. Otherwise, the results are NaN.
    bias         A @triton.jit function of (head, row, column). The value that it returns is added to each score, after
                 the scale and the softcap, and −∞ masks a key. `head` is the index of q's head. `row` is the position
                 of the query among the keys: row r of q is row r + N_k − N_q, which is also the column of its diagonal.
                 ALiBi is therefore −slope · (row − column) for all N_q and N_k. The three arguments are int32 and
                 broadcast against each other. No gradient flows to a bias. With backend="reference", the same function
                 may be written in NumPy. While torch.compile or torch.export traces, a bias is refused.
    scale        The factor by which the scores are multiplied. None means 1/√d. Its magnitude is at most 10³⁰, because
                 the kernels compute in fp32.
    key_lengths  An integer tensor (batch,) with values from 0 to N_k: the number of keys in each sequence. The position
                 of the diagonal depends on N_k, not on these lengths. On a GPU, the range is checked once per tensor
                 and version, and this check waits for the GPU. In a CUDA graph or a compiled function, the range is not
                 checked, and a length out of range is clamped. A change that torch does not count as a new version,
                 such as one through NumPy or through .data, is not checked either.
    dropout_p    The probability with which dropout sets an entry of P to 0.
    seed         A whole number from 0 to 2⁶⁴ − 1, which decides which entries dropout sets to 0. With None, torch's
                 generator draws a seed.
    num_splits   A number from 1 to 256. If there are few queries, the keys of every sequence are cut into this number
                 of splits, whatever the batch size. With None or 0, there are enough splits to fill the GPU. This
                 choice is faster, but then the other sequences in the batch change the last bits of a row.
    return_lse   If True, return (O, L) with L (batch, heads, N_q) in fp32. L is the logarithm of each row's sum of
                 exponentials, which includes the row's sink.
    backend      "triton" runs the Triton kernels. "portable" also runs Triton, but not the kernels for Hopper.
                 "reference" runs the NumPy ladder in float64. "auto" selects the first of these three that can run on
                 the tensors.

    On Hopper, fp16 and bf16 use the Hopper kernels for every d from 32 to 128 that is divisible by 8, and in the
    forward pass for larger d up to 256. Calls that are small or have a softcap, sinks, a bias, dropout, or a window
    with d above 128 run the portable kernels. In the Hopper forward kernel, the running maximum may lag by up to 8 in
    powers of two, which saves at least 5% of the time. In bf16, this makes the error of O 3 to 4% larger than with the
    exact maximum if the elements of q, k and v are normally distributed, and 10 to 17% larger if one element in a
    thousand is an outlier. With outliers, the errors of dQ and dK also grow by up to 10%. With backend="portable", the
    maximum is exact.

    Batch invariance means that O and L of a sequence have the same bits in a batch of any size and at any position in
    the batch, whatever the other sequences and their lengths are. A call needs one of two options to be
    batch-invariant:

    num_splits          in calls with at most 16 queries, at most 64 query rows per K/V head (heads / kv heads · N_q),
                        and neither a bias nor dropout
    backend="portable"  in all other calls. With "auto" on Hopper, the size of the batch decides which kernel and which
                        tiles are used, so the last bits of O and L may depend on it

    Batch invariance holds on one GPU, with one version of Triton and one mask. Dropout draws a different mask if a
    sequence changes its position in the batch. If sequences are padded and have key_lengths, causal and window still
    count from N_k, so N_k has to be the same. A single query without a window is masked by its length alone.
    """
    option_values: tuple = causal, softcap, scale, dropout_p, num_splits, return_lse, backend
    if bias is not None:
        option_values = *option_values, bias_key(bias)
    key, call = find_prepared((q, k, v, key_lengths, sinks), window, option_values)
    if seed is not None:
        seed = whole_number("seed", seed, low=0, high=2**64 - 1)
    if call is not None:  # a call of its kind has passed all checks except those of values
        if key_lengths is not None:
            check_key_lengths_values(key_lengths, k.shape[2])
        if sinks is not None:
            check_sinks(sinks, call.options)
        drawn = seed_tensor(seed, q.device) if dropout_p else None
        return call(Tensors(q, k, v, key_lengths, drawn, sinks))
    check_tensors(q, k, v)
    if key_lengths is not None:
        check_key_lengths(key_lengths, q, k.shape[2])
    scale = check_flags_and_scale(causal, scale, q.shape[3], return_lse)
    options = check_masks(causal, window, softcap, sinks, q, (*q.shape[1:3], k.shape[2]))
    dropout_p = real_number("dropout_p", dropout_p, "a probability, 0 ≤ p < 1", lambda p: 0 <= p < 1)
    options = options._replace(portable=backend == "portable", reference=not runs_on_triton(backend, q.device.type))
    options = options._replace(scale=scale, dropout_p=dropout_p, num_splits=check_num_splits(num_splits), bias=bias)
    check_bias(bias, options.reference)
    check_sinks(sinks, options)
    drawn = seed_tensor(seed, q.device) if dropout_p else None
    return operators.compute(key, Tensors(q, k, v, key_lengths, drawn, sinks), options, return_lse)


def find_prepared(tensors: tuple, window: tuple | list | None, option_values: tuple) -> tuple[tuple | None, Any]:
    """Return (key, call): the key of this call, and the call that was prepared for this key, or None if there is none.

    The key contains everything on which the checks and the choice of kernels depend. `option_values` are the
    arguments besides `tensors` and `window`. Both results are None while torch.compile or torch.export traces, or under
    fake tensors. They are also None if an argument is invalid, because the checks then report the error.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return None, None
    check_transforms()
    try:
        bounds = None if window is None else (type(window), *window, *map(type, window))
        tensor_keys = [
            None if x is None else (type(x), x.layout, x.dtype, x.device, x.shape, x.stride(), x.is_neg())
            for x in tensors
        ]
        key = *tensor_keys, bounds, *option_values, *map(type, option_values)  # types, for True == 1 == 1.0
        call = PREPARED.get(key)
    except (AttributeError, RuntimeError, TypeError):
        return None, None
    if call is None:
        check_not_jit_traced()
    return key, call


def seed_tensor(seed: int | None, device: torch.device) -> Tensor:
    """Return the seed as an int64 tensor (1,) on the device, without waiting for the device.

    If `seed` is None, torch's generator draws a seed, which also works in a CUDA graph.
    """
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    return torch.full((1,), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)
