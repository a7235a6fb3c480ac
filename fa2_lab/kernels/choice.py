"""Which kernels compute a call: decode for few queries, Hopper's own on Hopper, the portable ones for the rest."""

from functools import cache

import torch

from fa2_lab.kernels.decode import kernel as decode
from fa2_lab.kernels.portable import backward as portable_backward
from fa2_lab.kernels.portable import forward as portable


def forward(Q, K, V, key_lengths, seed, causal, scale, dropout_p):
    """(O, L) of one call. All kernels define L in the same way, so anyone's may go into any backward."""
    call = prepare(Q, K, V, key_lengths, seed, causal, scale, dropout_p)
    return call(Q, K, V, key_lengths, seed)


def prepare(Q, K, V, key_lengths, seed, causal, scale, dropout_p):
    """What serves calls of one kind, given (Q, K, V, key_lengths, seed)."""
    if decode.wins(Q, K, seed):
        return decode.prepare(Q, K, V, key_lengths, causal, scale)
    hopper = hopper_forward(Q.device)
    if seed is not None or hopper is None or not hopper.pays(Q, K, causal):
        return portable.prepare(Q, K, V, key_lengths, causal, scale, dropout_p)

    def call(Q, K, V, key_lengths, seed):
        found = hopper.forward(Q, K, V, key_lengths, causal, scale)
        return found or portable.forward(Q, K, V, key_lengths, seed, causal, scale, dropout_p)

    return call


def backward(dO, dL, Q, K, V, O, L, key_lengths, seed, causal, scale, dropout_p):
    """(dQ, dK, dV) of one call. Hopper's own adds up in any order: not where torch is asked for the same bits."""
    hopper = hopper_backward(Q.device)
    same_bits = torch.are_deterministic_algorithms_enabled()
    if seed is None and hopper is not None and not same_bits and hopper.pays(Q, K):
        found = hopper.backward(dO, dL, Q, K, V, O, L, key_lengths, causal, scale)
        if found is not None:
            return found
    return portable_backward.backward(dO, dL, Q, K, V, O, L, key_lengths, seed, causal, scale, dropout_p)


@cache
def hopper_backward(device: torch.device):
    """Hopper's backward, where there is its forward; else None."""
    if hopper_forward(device) is None:
        return None
    try:
        from fa2_lab.kernels.hopper.backward import kernel as backward
    except ImportError:
        return None
    return backward


@cache
def hopper_forward(device: torch.device):
    """Hopper's forward, on such a GPU and with a Triton whose Gluon has what it needs; else None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from fa2_lab.kernels.hopper.forward import kernel as forward
    except ImportError:
        return None
    return forward if forward.host.multiprocessors(device) else None
