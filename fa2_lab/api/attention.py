"""The public function attention().

Prepared kernels are kept in a cache. A call's cache key consists of the types, dtypes, devices, shapes and strides of
its tensors, and of the values of its other arguments. The first call with a given key checks the arguments and prepares
the kernels. Later calls with the same key launch the prepared kernels immediately.

TROUBLESHOOTING.md lists the differences between attention() and torch.nn.functional.scaled_dot_product_attention.

If scores exceed about 10⁶ in magnitude, fp32 cannot represent L accurately enough to recompute P. O is still correct,
but the gradients are unreliable.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fa2_lab.api import operators
from fa2_lab.api.checks import check_key_lengths, check_key_lengths_values, check_sinks, check_tensors
from fa2_lab.api.options import GivenOptions, find_prepared, given_options, make_options
from fa2_lab.kernels.arguments import Tensors
from fa2_lab.tiles import whole_number


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
    """Return O = softmax(scale · q kᵀ) v for q (batch, heads, N_q, d) and for k and v (batch, kv heads, N_k, d).

    q, k and v must have the same dtype: fp16, bf16 or fp32. The batch size, N_q and N_k may be 0. O has the shape of q
    and the same order of dimensions in memory. Likewise, each gradient has the shape and the order of dimensions of its
    input. The rows of O and of the gradients are always contiguous, and no two of their elements share memory, even if
    q, k or v is a view whose rows are not contiguous or whose elements share memory.

    causal       If True, row r sees the columns up to r + N_k − N_q, so the last query is aligned with the last key.
    window       A pair (left, right). Row r sees the columns from r + N_k − N_q − left to r + N_k − N_q + right. If
                 left or right is None, the window has no limit on that side. causal=True sets right to 0.
    softcap      A number c. After scaling, each score s is replaced by c · tanh(s / c). None means no cap.
    sinks        A float tensor of shape (heads,). In each head, every row's softmax includes one additional score, that
                 head's sink, which has no key and no value. The sink is not scaled, capped or masked, and gradients
                 flow to it. A sink of −∞ has no effect. A sink of +∞ is not allowed, because it would leave no
                 probability for any key. A finite sink must not overflow fp32 inside the kernel, so its magnitude is
                 limited to 10³⁸ times the softcap or, without a softcap, to 10³⁸ times the scale. The limit never
                 exceeds 10³⁸, and it is 10³⁸ if there is no softcap and the scale is below 10⁻¹⁰. An invalid sink
                 raises an error if its value can be read without waiting for a GPU. Otherwise, the results are NaN. A
                 sink of NaN is not an error, just as a NaN in q, k or v is not, but it makes O and L NaN in its head.
    bias         A @triton.jit function of (head, row, column). Its return value is added to each score, after the scale
                 and the softcap have been applied. A value of −∞ masks the key. `head` is the index of the query head.
                 `row` is the query's position among the keys, which is r + N_k − N_q for row r of q. The diagonal is
                 therefore at column = row, so ALiBi is −slope · (row − column) for all N_q and N_k. The three arguments
                 have dtype int32 and broadcast against each other. No gradient flows to a bias. With
                 backend="reference", the function may also be written in NumPy. Under torch.compile or torch.export,
                 passing a bias raises an error.
    scale        The factor by which the scores are multiplied. None means 1/√d. Its magnitude can be at most 10³⁰,
                 because the kernels compute in fp32.
    key_lengths  An integer tensor of shape (batch,) with the number of keys in each sequence, from 0 to N_k. The
                 position of the diagonal depends on N_k, not on these lengths. On a GPU, the range of the lengths is
                 checked the first time that a tensor is passed, and again whenever that tensor has been modified. Each
                 check waits for the GPU. In a CUDA graph or a compiled function, the range is not checked, and a length
                 outside the range is clamped. A modification that torch does not track, such as one through NumPy or
                 .data, does not trigger a new check.
    dropout_p    The probability that dropout sets an entry of P to 0.
    seed         An integer from 0 to 2⁶⁴ − 1 that determines which entries dropout sets to 0. If it is None, the seed
                 is drawn from torch's random number generator.
    num_splits   An integer from 1 to 256. If there are few queries, every sequence's keys are divided into this many
                 splits, regardless of the batch size. If num_splits is None or 0, the number of splits is chosen to
                 fill the GPU, which is faster, but the last bits of a row then depend on the other sequences in the
                 batch.
    return_lse   If True, return (O, L), where L has shape (batch, heads, N_q) and dtype fp32. L is the log-sum-exp of
                 each row's scores, including the row's sink.
    backend      "triton" runs the Triton kernels. "portable" also runs Triton kernels, but not those for Hopper.
                 "reference" runs the NumPy reference in float64. "auto" runs the Triton kernels if they can handle the
                 tensors, and the NumPy reference otherwise.

    The forward pass of a call with few queries runs the decode kernels, even with backend="portable", unless the call
    has a bias or dropout. A call has few queries if N_q is at most 16 and there are at most 16 query rows per K/V head
    (heads / kv heads · N_q), or at most 64 such rows if num_splits is given or N_k is at least 2048.

    On Hopper, all other calls in fp16 or bf16 use the Hopper kernels for every d from 32 to 128 that is divisible by 8.
    For larger d up to 256, only the forward pass uses them. The portable kernels run everything else: small calls,
    calls with a softcap, sinks, a bias, dropout, or a window with d above 128, calls in which an address or a stride is
    not a multiple of 16 bytes, and the backward pass if the scale's magnitude is below 2⁻⁶⁰.

    In the Hopper forward kernel, the running maximum may lag behind the exact maximum, so that exponentials can reach
    2⁸ instead of 1. This saves at least 5% of the time, but it makes the results less accurate. In bf16, the error of O
    is 3 to 4% larger than with the exact maximum if the elements of q, k and v are normally distributed, and 10 to 17%
    larger if one element in a thousand is an outlier. With outliers, the errors of dQ and dK also grow by up to 10%.
    With backend="portable", the maximum is exact.

    Batch invariance means that a sequence's O and L have the same bits in a batch of any size and at any position in
    the batch, regardless of the other sequences and their lengths. To make a call batch-invariant, pass one of the
    following two arguments:

    num_splits          for calls with at most 16 queries, at most 64 query rows per K/V head (heads / kv heads · N_q),
                        and neither a bias nor dropout
    backend="portable"  for all other calls. With "auto" on Hopper, the choice of kernel and tiles depends on the batch
                        size, and so may the last bits of O and L

    The bits match only on the same GPU, with the same version of Triton and the same mask. If a sequence moves to
    another position in the batch, dropout draws a different mask for it. If sequences are padded and have key_lengths,
    causal and window are still relative to N_k, so N_k must be the same in every batch. A single query without a window
    is an exception, because its keys are masked by its key length alone.
    """
    tensors = Tensors(q, k, v, key_lengths, sinks=sinks)
    given = given_options(
        window=window, bias=bias, causal=causal, softcap=softcap, scale=scale, return_lse=return_lse, backend=backend,
        num_splits=num_splits, dropout_p=dropout_p
    )  # fmt: skip
    key, call = find_prepared(tensors, given)
    if seed is not None:
        seed = whole_number("seed", seed, low=0, high=2**64 - 1)
    if call is not None:  # an earlier call with this key passed all checks that do not depend on tensor values
        if key_lengths is not None:
            check_key_lengths_values(key_lengths, k.shape[2])
        if sinks is not None:
            check_sinks(sinks, call.options)
        return call(tensors._replace(seed=seed_tensor(seed, q.device)) if dropout_p else tensors)
    check_tensors(q, k, v)
    if key_lengths is not None:
        check_key_lengths(key_lengths, q, k.shape[2])
    options = make_options(GivenOptions(*given), tensors, (*q.shape[1:3], k.shape[2]))
    if dropout_p:
        tensors = tensors._replace(seed=seed_tensor(seed, q.device))
    return operators.run_checked(key, tensors, options, return_lse)


def seed_tensor(seed: int | None, device: torch.device) -> Tensor:
    """Return the seed as an int64 tensor of shape (1,) on the given device, without waiting for the device.

    If `seed` is None, torch's generator draws the seed, even in a CUDA graph.
    """
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    return torch.full((1,), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)
