"""Host code that prepares the three launches of the Hopper backward pass.

The first launch zeroes the fp32 accumulators in HBM and writes the initial values of the accumulators of S and dP. The
second launch computes dK and dV and accumulates dQ. The third launch scales and rounds the accumulated dQ, and writes
it in row-major order. The accumulators and the initial values are described in accumulators.py.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.common.softmax import scale_log2_of
from fa2_lab.kernels.contiguous import contiguous_like, result_stand_in
from fa2_lab.kernels.hopper.backward import configs
from fa2_lab.kernels.hopper.backward.accumulators import bwd_postprocess, bwd_preprocess
from fa2_lab.kernels.hopper.backward.configs import BackwardConfig
from fa2_lab.kernels.hopper.backward.kernel import backward_kernel
from fa2_lab.kernels.hopper.shared import host
from fa2_lab.kernels.hopper.shared.descriptors import copyable, descriptor, matrix_descriptor
from fa2_lab.kernels.launches import USE_PDL, Launch, dense_shape, dense_strides, on_device_of, program_count, sm_count
from fa2_lab.tiles import cdiv


def prepare(dO: Tensor, O: Tensor, tensors: Tensors, options: Options, deterministic: bool = False) -> Callable | None:
    """Return a function of (dO, dL, O, L, tensors) that computes dQ, dK and dV. For unsupported calls, return None.

    The function takes the arguments of any call with these shapes and options. If TMA cannot address them, the function
    returns None. If `deterministic` is set, the gradients are bitwise identical in every run, as semaphore.py explains.
    """
    Q, K, V, sequences = tensors.q, tensors.k, tensors.v, tensors.sequences
    if Q.shape[-1] not in configs.DIMENSIONS or options.scale < configs.SMALLEST_SCALE:
        return None
    if not host.supports(Q, K, V, tensors.key_lengths) or not copyable(dO.shape, dO.stride()):
        return None
    if sequences and options.has_window:
        return None  # with a window, the producer would have to send more fields per packed sequence
    tensors, dO, O = host.pack_gqa(tensors, options, dO, O)
    config, parts = choose(tensors, options, deterministic)
    acc_init_shape, dq_accum_shape, dk_accum_shape, counters = shapes(tensors.q, K, config, sequences)
    divided = parts > 1  # if divided, dK and dV also have accumulators, which follow those of dQ
    accum_lines = dq_accum_shape[0] + 2 * dk_accum_shape[0] * divided
    accum_shape = accum_lines + counters[0] * deterministic, 32  # all accumulators and counters are zeroed together
    preprocess = prepare_preprocess(dO, O, tensors, options, config, accum_shape)
    main = prepare_main(dO, tensors, options, config, parts, deterministic)
    postprocess = prepare_postprocess(tensors, options, config, divided)

    def call(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors) -> tuple | None:
        Q, K, V, cu_q, cu_k = tensors.q, tensors.k, tensors.v, tensors.cu_seqlens_q, tensors.cu_seqlens_k
        if not host.tma_aligned(dO, Q, K, V, O, L, dL):
            return None
        dQ, dK, dV = contiguous_like(Q), contiguous_like(K), contiguous_like(V)
        new_fp32 = functools.partial(torch.empty, dtype=torch.float32, device=Q.device)
        acc_init, accum = new_fp32(acc_init_shape), new_fp32(accum_shape)
        dk_dv = (accum[dq_accum_shape[0] :], accum[dq_accum_shape[0] + dk_accum_shape[0] :]) if divided else (dK, dV)
        final_dk_dv = (dK, dV) if divided else (None, None)  # the third launch rounds the accumulated dK and dV
        sem_counters, checked_cu_k = (accum[accum_lines:].view(torch.int32), cu_k) if deterministic else (None, None)
        with on_device_of(Q):
            # In a custom operator, this call launches a kernel that zeroes the counters. The call precedes all
            # launches, because a kernel between two launches would keep the second one from starting early.
            counter = host.scheduler_counter(Q, options.in_custom_op)
            preprocess(O, dO, L, dL, acc_init, accum, cu_q, checked_cu_k)
            main(Q, K, V, dO, acc_init, accum, *dk_dv, counter, tensors.key_lengths, sem_counters, cu_q, cu_k)
            postprocess(accum, dQ, *final_dk_dv, cu_q, cu_k)
        return dQ, dK, dV  # FA2.A2.L20

    return call


def choose(tensors: Tensors, options: Options, deterministic: bool) -> tuple[BackwardConfig, int]:
    """Return the launch's configuration, and the number of parts into which each column block is divided.

    Packed sequences are treated as if they had equal lengths.
    """
    Q, K, sequences, masked = tensors.q, tensors.k, tensors.sequences, options.bounds != (None, None)
    (_, H, N_q, d), (_, H_kv, _, _) = dense_shape(Q), dense_shape(K)
    N_q = cdiv(N_q, sequences or 1)
    config = configs.choose(d, N_q, masked, ragged(tensors), deterministic)
    column_blocks, group = program_count(K, 128, sequences), H // H_kv
    steps, SMs = group * cdiv(N_q, config.B_r), sm_count(Q.device)
    return config, configs.choose_parts(column_blocks, steps, SMs, masked, group, config.d_pad)


def ragged(tensors: Tensors) -> bool:
    """Return whether a column block may extend past the last key."""
    return tensors.key_lengths is not None or tensors.sequences is not None or dense_shape(tensors.k)[2] % 128 != 0


def shapes(Q: Tensor, K: Tensor, config: BackwardConfig, sequences: int | None) -> tuple[tuple[int, int], ...]:
    """Return the shapes (lines, elements per line) of four fp32 matrices in HBM.

    1. the initial values of S and dP
    2. the accumulators of dQ
    3. the accumulators of dK, which have the same shape as those of dV
    4. the counters of semaphore.py

    Each of the last three matrices is a sequence of complete (64, d_pad) tiles.
    """
    row_blocks, column_blocks = program_count(Q, config.B_r, sequences), program_count(K, 128, sequences)
    lines_of_32 = config.d_pad // 32
    dq_lines, dk_lines = row_blocks * config.B_r * lines_of_32, column_blocks * 128 * lines_of_32
    counters = cdiv(2 * (row_blocks + column_blocks), 64 * config.d_pad) * 2 * config.d_pad
    return (row_blocks, 2 * config.B_r), (dq_lines, 32), (dk_lines, 32), (counters, 32)


def prepare_preprocess(
    dO: Tensor, O: Tensor, tensors: Tensors, options: Options, config: BackwardConfig, accum_shape: tuple[int, int]
) -> Launch:
    """Return the launch that zeroes the accumulators and writes the initial values of S and dP.

    The launch has one program per 64 rows. `accum_shape` is the combined shape of all accumulators.
    """
    Q, K, sequences = tensors.q, tensors.k, tensors.sequences
    (_, H, N_q, d), (_, _, N_k, _) = dense_shape(Q), dense_shape(K)
    return Launch(
        *(bwd_preprocess, program_count(Q, config.B_r, sequences) * config.B_r // 64, dict(num_warps=4, num_stages=1)),
        **dict(O_strides=dense_strides(O), dO_strides=dense_strides(dO), H=H, N_q=N_q, N_k=N_k, sequences=sequences),
        **dict(tiles=accum_shape[0] // (2 * config.d_pad)),
        **dict(scale_log2=scale_log2_of(options.scale), d=d, d_pad=config.d_pad, B_r=config.B_r),
    )


def prepare_main(
    dO: Tensor, tensors: Tensors, options: Options, config: BackwardConfig, parts: int, deterministic: bool
) -> Launch:
    """Return the launch that computes dK and dV and accumulates dQ, with at most one program per SM.

    Each column block is divided into `parts` parts, each processed by a different program. If `deterministic` is set,
    all parts of a K/V head run concurrently.
    """
    Q, K, V, sequences = tensors.q, tensors.k, tensors.v, tensors.sequences
    masked, scale = options.bounds != (None, None), options.scale
    (batch, H, N_q, d), (_, H_kv, *_) = dense_shape(Q), dense_shape(K)
    acc_init_shape, dq_accum_shape, dk_accum_shape, _ = shapes(Q, K, config, sequences)
    describe = functools.partial(descriptor, d=config.d_pad)
    if parts > 1:
        dk_dv = 2 * (matrix_descriptor(dk_accum_shape, (min(128, 2 * config.d_pad), 32), swizzle=128),)
    else:
        dk_dv = tuple(describe(result_stand_in(X), 64) for X in (K, V))
    acc_init = matrix_descriptor(acc_init_shape, (1, 2 * config.B_r))
    dq_accum = matrix_descriptor(dq_accum_shape, (config.B_r * config.d_pad // 64, 32), swizzle=128)
    heads = batch * H_kv * parts  # the scheduler treats each part of a K/V head as a separate head
    SMs, column_blocks = sm_count(Q.device), program_count(K, 128, sequences)
    n_sequences = sequences or 1
    if deterministic:
        l2_group = parts * configs.deterministic_l2_group(cdiv(N_q, n_sequences), d, H // H_kv)
    else:
        rows = 1 if options.has_window else cdiv(N_q, n_sequences * parts)  # rows read concurrently
        bytes_per_head = rows * (H // H_kv) * 4 * (d + config.d_pad)  # for Q, dO and the accumulators of dQ
        blocks_per_head = cdiv(column_blocks, batch * H_kv * n_sequences)
        l2_group = configs.l2_group(blocks_per_head, heads, SMs, masked, H // H_kv, bytes_per_head)
    descriptors = describe(Q, config.B_r), describe(K, 128), describe(V, 128), describe(dO, config.B_r)
    return Launch(
        backward_kernel,
        min(SMs, column_blocks * parts),
        config.compiler_options | USE_PDL,
        (*descriptors, acc_init, dq_accum, *dk_dv),
        **dict(group=H // H_kv, T_r=acc_init_shape[0] // (batch * H), heads=heads, parts=parts, sequences=sequences),
        **dict(l2_group=min(heads, l2_group), left=options.left, right=options.right, scale_log2=scale_log2_of(scale)),
        **dict(CAUSAL=options.causal, RAGGED=ragged(tensors), CONFIG=config),
    )


def prepare_postprocess(tensors: Tensors, options: Options, config: BackwardConfig, divided: bool) -> Launch:
    """Return the launch that writes dQ from its accumulators, as well as dK and dV if `divided` is set.

    Each program processes one consumer's tile. There are two such tiles per row block and, for dK and dV together, four
    per column block.
    """
    Q, K, V, sequences = tensors.q, tensors.k, tensors.v, tensors.sequences
    (batch, H, N_q, d), (_, H_kv, N_k, _) = dense_shape(Q), dense_shape(K)
    row_blocks, column_blocks = program_count(Q, config.B_r, sequences), program_count(K, 128, sequences)
    out_strides = tuple(dense_strides(result_stand_in(X)) for X in (Q, K, V))
    return Launch(
        *(bwd_postprocess, 2 * row_blocks + 4 * column_blocks * divided, dict(num_warps=4, num_stages=1) | USE_PDL),
        **dict(strides=out_strides, batch=batch, H=H, H_kv=H_kv, N_q=N_q, N_k=N_k, sequences=sequences),
        **dict(scale=options.scale, d=d, d_pad=config.d_pad, B_r=config.B_r),
    )


def is_fastest(Q: Tensor, K: Tensor) -> bool:
    """Return whether the Hopper backward kernels are the fastest choice for calls with Q and K of these shapes."""
    (batch, H, N_q, d), (_, H_kv, N_k, _) = dense_shape(Q), dense_shape(K)
    return configs.is_fastest(d, N_q, N_k, batch * H, H != H_kv, sm_count(Q.device))
