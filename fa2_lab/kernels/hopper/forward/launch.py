"""Host code that prepares the launch of the Hopper forward kernel."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.common.softmax import scale_log2_of
from fa2_lab.kernels.contiguous import contiguous_like, result_stand_in
from fa2_lab.kernels.hopper.forward import configs
from fa2_lab.kernels.hopper.forward.kernel import forward_kernel
from fa2_lab.kernels.hopper.shared import host
from fa2_lab.kernels.hopper.shared.descriptors import descriptor
from fa2_lab.kernels.launches import Launch, dense_shape, on_device_of, program_count, sm_count
from fa2_lab.tiles import cdiv


def prepare(tensors: Tensors, options: Options) -> Callable | None:
    """Return a function that computes O, shaped like Q, and L in fp32. For unsupported calls, return None.

    The function takes the `tensors` of any call with these shapes and options. If TMA cannot address them, the function
    returns None.
    """
    Q, K, V, sequences = tensors.q, tensors.k, tensors.v, tensors.sequences
    if Q.shape[-1] not in configs.DIMENSIONS or not host.supports(Q, K, V, tensors.key_lengths):
        return None
    if options.has_window and (sequences or Q.shape[-1] > 128):
        return None
    (batch, H, N_q, _), device = dense_shape(Q), Q.device
    L_shape = (batch, H, N_q) if sequences is None else (H, N_q)
    (packed,) = host.pack_gqa(tensors, options)
    launch = prepare_launch(packed, options)

    def call(tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        Q, K, V = tensors.q, tensors.k, tensors.v
        if not host.tma_aligned(Q, K, V):
            return None
        O = contiguous_like(Q)
        L = torch.empty(*L_shape, dtype=torch.float32, device=device)
        optional = tensors.key_lengths, tensors.cu_seqlens_q, tensors.cu_seqlens_k
        with on_device_of(Q):
            launch(Q, K, V, O, L, host.scheduler_counter(Q, options.in_custom_op), *optional)
        return O, L  # FA2.A1.L17

    return call


def prepare_launch(tensors: Tensors, options: Options) -> Launch:
    """Return the launch of the Hopper forward kernel, with at most one program per SM.

    For packed sequences, the configuration is normally chosen as if all sequences had equal lengths. If one sequence is
    known to account for most of the work, it is chosen as if all rows belonged to a single sequence.
    """
    Q, K, V, sequences = tensors.q, tensors.k, tensors.v, tensors.sequences
    causal, has_key_lengths = options.causal, tensors.key_lengths is not None
    n_sequences = 1 if options.dominant_sequence else sequences or 1
    (batch, H, N_q, d), (_, H_kv, N_k, _) = dense_shape(Q), dense_shape(K)
    SMs, group, O = sm_count(Q.device), H // H_kv, result_stand_in(Q)
    ragged = has_key_lengths or sequences is not None
    if options.has_window:
        config = configs.choose_for_window(d, causal)
    else:
        lengths = cdiv(N_q, n_sequences), cdiv(N_k, n_sequences)
        config = configs.choose(d, *lengths, n_sequences * batch * H, SMs, causal, has_key_lengths)
    describe = functools.partial(descriptor, d=config.d_pad)
    return Launch(
        forward_kernel,
        min(SMs, program_count(Q, config.rows, sequences)),
        config.compiler_options,
        (describe(Q, 64), describe(K, config.B_c), describe(V, config.B_c), describe(O, 64)),
        **dict(sequences=sequences, left=options.left, right=options.right, scale_log2=scale_log2_of(options.scale)),
        **dict(group=group, l2_group=group * configs.l2_group(cdiv(N_k, n_sequences), d, batch * H_kv, causal)),
        **dict(CAUSAL=causal, RAGGED=ragged or N_k % config.B_c != 0, CONFIG=config),
    )


def is_fastest(Q: Tensor, K: Tensor) -> bool:
    """Return whether the Hopper forward kernel is the fastest choice for calls with Q and K of these shapes."""
    (batch, H, N_q, d), (_, _, N_k, _) = dense_shape(Q), dense_shape(K)
    return configs.is_fastest(d, N_q, N_k, batch * H, sm_count(Q.device))
