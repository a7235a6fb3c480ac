"""Attention over packed sequences, which have different lengths and are concatenated without padding.

q             (total_q, heads, d): the rows of all sequences
k, v          (total_k, kv heads, d): the keys and values of all sequences
cu_seqlens_q  int32 (batch + 1,): the cumulative sequence lengths, from 0 to total_q. Sequence b consists of the rows of
              q from cu_seqlens_q[b] to cu_seqlens_q[b + 1] − 1
cu_seqlens_k  int32 (batch + 1,): the cumulative key lengths, from 0 to total_k. A sequence may have 0 rows, 0 keys, or
              both

No row sees a key of another sequence, and nothing is padded or copied.

On a CPU, the call raises an error if the cumulative lengths do not begin at 0, if they decrease, or if they do not end
with the total number of rows or keys. On a GPU, their values are not checked, because reading them would mean waiting
for the GPU. Instead, the kernels treat the first entry as 0 and clamp every entry to the valid range. Rows after the
last entry see no keys, but they do see the sinks, so their L equals the sink, and gradients of L flow to it. If the
entries decrease, the results on a GPU are meaningless, but the call still terminates, and it reads and writes only its
own tensors. In that case, the deterministic Hopper backward pass returns NaN in dQ.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fa2_lab.api import operators
from fa2_lab.api.checks import check_cu_seqlens, check_cu_seqlens_values, check_packed, check_sinks
from fa2_lab.api.options import GivenOptions, find_prepared, given_options, make_options
from fa2_lab.kernels.arguments import Tensors
from fa2_lab.tiles import whole_number


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Callable | None = None,
    scale: float | None = None,
    max_seqlen_q: int | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention within each packed sequence and return O (total_q, heads, d). Autograd is supported.

    q is (total_q, heads, d), and k and v are (total_k, kv heads, d). All three must have the same dtype: fp16, bf16 or
    fp32. cu_seqlens_q and cu_seqlens_k are int32 tensors of shape (batch + 1,) with the cumulative sequence lengths.

    causal, window  As in attention(), but within each sequence. The diagonal ends at the sequence's last row and last
                    key.
    bias            As in attention(). Rows and columns are counted within each sequence.
    max_seqlen_q    The number of rows in the longest sequence, if known. On Hopper, this argument speeds up batches
                    with one long sequence among short ones by up to 15%. It never changes the result.
    return_lse      If True, return (O, L), where L has shape (heads, total_q) and dtype fp32.

    The other arguments are the same as in attention(). attention_packed() runs the same kernels as attention(), with
    two exceptions: no call runs the decode kernels, and calls with a window run the portable kernels even on Hopper.
    """
    tensors = Tensors(q, k, v, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    dominant_sequence = max_seqlen_q is not None and has_dominant_sequence(max_seqlen_q, q, cu_seqlens_q)
    given = given_options(
        window=window, bias=bias, causal=causal, softcap=softcap, scale=scale, return_lse=return_lse, backend=backend,
        dominant_sequence=dominant_sequence
    )  # fmt: skip
    key, call = find_prepared(tensors, given)
    if call is None:
        check_packed(q, k, v)
        check_cu_seqlens(cu_seqlens_q, cu_seqlens_k, q)
    check_cu_seqlens_values("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    check_cu_seqlens_values("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if call is not None:  # an earlier call with this key passed all checks that do not depend on tensor values
        check_sinks(sinks, call.options)
        return call(tensors)
    options = make_options(GivenOptions(*given), tensors, (q.shape[1], q.shape[0], k.shape[0]))
    return operators.run_checked(key, tensors, options, return_lse)


def has_dominant_sequence(max_seqlen_q: int, q: Any, cu_seqlens_q: Any) -> bool:
    """Return whether the longest sequence requires more work than all others combined.

    The function assumes that the other sequences have equal lengths. max_seqlen_q is used only for this decision, so
    batches whose longest sequences have different lengths can reuse the same prepared kernels.
    """
    longest = whole_number("max_seqlen_q", max_seqlen_q, low=0)
    if not isinstance(q, Tensor) or not isinstance(cu_seqlens_q, Tensor) or q.dim() != 3:
        return False  # attention_packed() rejects this call later
    rows, others = q.shape[0], cu_seqlens_q.numel() - 2
    longest = min(longest, rows)
    return longest**2 * others > (rows - longest) ** 2
