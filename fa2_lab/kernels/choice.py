"""Which kernels compute a call: decode for few queries, Hopper's own on Hopper, the portable ones for the rest."""

import torch

from fa2_lab.kernels.decode import plan as decode
from fa2_lab.kernels.portable import backward as portable_backward
from fa2_lab.kernels.portable import forward as portable
from fa2_lab.kernels.prepared import Options, has_gaps, kind_of, prepared, rows_contiguous


def forward(Q, K, V, options: Options, key_lengths=None, seed=None, sinks=None, cu_q=None, cu_k=None):
    """(O, L) of one call. All kernels define L in the same way, so anyone's may go into any backward."""
    key = "forward", options, *map(kind_of, (Q, K, V, key_lengths, sinks, cu_q, cu_k))
    call = prepared(key, prepare_any, Q, K, V, options, key_lengths, sinks, cu_q, cu_k)
    return call(Q, K, V, key_lengths, seed, sinks, cu_q, cu_k)


def prepare_any(Q, K, V, options: Options, key_lengths=None, sinks=None, cu_q=None, cu_k=None):
    """prepare() for tensors in any strides: where a last dimension is not contiguous, copies are taken."""
    if not any(map(has_gaps, (Q, K, V, key_lengths, sinks, cu_q, cu_k))):
        return prepare(Q, K, V, options, key_lengths, sinks, cu_q)

    def on_copies(*tensors):
        Q, K, V, *others = map(rows_contiguous, tensors)
        return forward(Q, K, V, options, *others)

    return on_copies


def for_hopper(options: Options, sinks) -> bool:
    """Whether Hopper's own kernels compute such calls: without dropout, softcap and sinks, if not asked otherwise."""
    return not (options.dropout_p or options.portable) and options.softcap is sinks is None


def prepare(Q, K, V, options: Options, key_lengths=None, sinks=None, cu_q=None):
    """What computes (O, L) for calls of one kind, given (Q, K, V, key_lengths, seed, sinks, cu_q, cu_k)."""
    many = sequences(cu_q)
    if cu_q is None and not options.dropout_p and decode.is_decode(Q, K):
        return decode.prepare(Q, K, V, options, key_lengths)
    hopper = hopper_forward(Q.device) if for_hopper(options, sinks) else None
    takes = hopper is not None and hopper.enough_work(Q, K, options.causal)
    own = hopper.prepare(Q, K, V, options, key_lengths, many) if takes else None
    if own is None:
        return portable.prepare(Q, K, V, options, key_lengths, sequences=many)

    def call(Q, K, V, key_lengths, seed, sinks, cu_q=None, cu_k=None):
        found = own(Q, K, V, key_lengths, cu_q, cu_k)
        rest = None if found else portable.prepare(Q, K, V, options, key_lengths, sequences=many)
        return found or rest(Q, K, V, key_lengths, seed, sinks, cu_q, cu_k)

    return call


def backward(dO, Q, K, V, O, L, options, dL=None, key_lengths=None, seed=None, sinks=None, cu_q=None, cu_k=None):
    """(dQ, dK, dV) of one call, and dsinks where there are sinks."""
    same_bits = torch.are_deterministic_algorithms_enabled()
    key = "backward", options, same_bits, *map(kind_of, (dO, Q, K, V, O, dL, key_lengths, sinks, cu_q, cu_k))
    call = prepared(key, prepare_any_backward, dO, Q, K, V, O, options, dL, key_lengths, sinks, same_bits, cu_q, cu_k)
    return call(dO, Q, K, V, O, L, dL, key_lengths, seed, sinks, cu_q, cu_k)


def prepare_any_backward(dO, Q, K, V, O, options: Options, dL, key_lengths, sinks, same_bits, cu_q, cu_k):
    """prepare_backward() for tensors in any strides."""
    dense = dL is None or dL.is_contiguous()
    if dense and not any(map(has_gaps, (dO, Q, K, V, O, key_lengths, sinks, cu_q, cu_k))):
        return prepare_backward(dO, Q, K, V, O, options, key_lengths, sinks, same_bits, cu_q)

    def on_copies(dO, Q, K, V, O, L, dL, *others):
        dO, Q, K, V, O, *others = map(rows_contiguous, (dO, Q, K, V, O, *others))
        return backward(dO, Q, K, V, O, L, options, dL if dense else dL.contiguous(), *others)

    return on_copies


def prepare_backward(dO, Q, K, V, O, options: Options, key_lengths, sinks, same_bits, cu_q=None):
    """What computes the gradients for calls of one kind, given (dO, Q, K, V, O, L, dL, key_lengths, seed, sinks, …)."""
    many = sequences(cu_q)
    hopper = hopper_backward(Q.device) if for_hopper(options, sinks) else None
    takes = hopper is not None and hopper.enough_work(Q, K)
    own = hopper.prepare(dO, Q, K, V, O, options, key_lengths, same_bits, many) if takes else None
    if own is None:
        return portable_backward.prepare(dO, Q, K, V, O, options, sequences=many)

    def call(dO, Q, K, V, O, L, dL, key_lengths, seed, sinks, cu_q=None, cu_k=None):
        found = own(dO, Q, K, V, O, L, dL, key_lengths, cu_q, cu_k)
        rest = None if found else portable_backward.prepare(dO, Q, K, V, O, options, sequences=many)
        return found or rest(dO, Q, K, V, O, L, dL, key_lengths, seed, sinks, cu_q, cu_k)

    return call


def sequences(cu_q) -> int | None:
    """How many packed sequences there are; None where tensors are not packed."""
    return None if cu_q is None else cu_q.shape[0] - 1


def hopper_forward(device: torch.device):
    """Hopper's forward, on such a GPU and with a Triton whose Gluon has what it needs; else None."""
    return prepared(("Hopper's kernels", device), hopper_kernels, device)[0]


def hopper_backward(device: torch.device):
    """Hopper's backward, where there is its forward; else None."""
    return prepared(("Hopper's kernels", device), hopper_kernels, device)[1]


def hopper_kernels(device: torch.device) -> tuple:
    """Hopper's forward and backward; None for what this GPU or this Triton does not have."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None, None
    try:
        from fa2_lab.kernels.hopper.forward import launch as forward
    except ImportError:
        return None, None
    if not forward.host.multiprocessors(device):
        return None, None
    try:
        from fa2_lab.kernels.hopper.backward import launch as backward
    except ImportError:
        return forward, None
    return forward, backward
