"""Which kernels compute a call: Hopper's own on Hopper, for what they take; the portable ones for everything else."""

from functools import cache

import torch

from fa2_lab.kernels import forward as portable


def forward(Q, K, V, key_lengths, seed, causal, scale, dropout_p):
    """(O, L) of one call. Both kernels define L in the same way, so either's may go into any backward."""
    hopper = hopper_forward(Q.device)
    if seed is None and hopper is not None and hopper.supports(Q, K, V, key_lengths):
        return hopper.forward(Q, K, V, key_lengths, causal, scale)
    return portable.forward(Q, K, V, key_lengths, seed, causal, scale, dropout_p)


@cache
def hopper_forward(device: torch.device):
    """Hopper's forward, on such a GPU and with a Triton whose Gluon has what it needs; else None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    try:
        from fa2_lab.kernels.hopper import forward
    except ImportError:
        return None
    return forward if forward.host.multiprocessors(device) else None
