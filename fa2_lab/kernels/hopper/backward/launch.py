"""From torch to the three launches of the Hopper backward."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa2_lab.kernels.common.softmax import base_2
from fa2_lab.kernels.hopper.backward import sizes
from fa2_lab.kernels.hopper.backward.kernel import backward_kernel
from fa2_lab.kernels.hopper.backward.sums import bwd_postprocess, bwd_preprocess
from fa2_lab.kernels.hopper.shared import host
from fa2_lab.kernels.hopper.shared.descriptors import copyable, descriptor, lines
from fa2_lab.kernels.launch import USE_PDL, Launch, multiprocessors, on_device_of, programs, shape, strides
from fa2_lab.kernels.prepared import Options, like, shaped_like


def prepare(dO: Tensor, Q: Tensor, K: Tensor, V: Tensor, O: Tensor, options: Options, key_lengths: Tensor | None = None,
            deterministic: bool = False, sequences: int | None = None) -> Callable | None:  # fmt: skip
    """What computes dQ, dK and dV for calls of one kind, given (dO, Q, K, V, O, L, dL, key_lengths); dL may be None.

    None for a kind not taken, and from a call for tensors that the copy engine cannot address. Sums are the same bit by
    bit each time if `deterministic` asks for it: see semaphore.py.
    `sequences`: how many are packed in Q, K and V, (tokens, heads, d); then the call takes their starts, cu_seqlens_q
    and cu_seqlens_k.
    """
    if Q.shape[-1] not in sizes.DIMENSIONS or options.scale < sizes.SMALLEST_SCALE:
        return None
    if not host.fits(Q, K, V, key_lengths) or not copyable(dO.shape, dO.stride()):
        return None
    if sequences and options.windowed:
        return None  # of a packed sequence consumers are told too little for a window
    chosen, parts = choose(Q, K, options, key_lengths, deterministic, sequences)
    starts, dQ_sums, dK_sums, counters = shapes(Q, K, chosen, sequences)
    divided = parts > 1  # then dK and dV are sums, too, and lie behind those of dQ
    lines_of_sums = dQ_sums[0] + 2 * dK_sums[0] * divided
    all_sums = lines_of_sums + counters[0] * deterministic, 32  # all are cleared together
    before = prepare_before(dO, Q, K, O, options, chosen, all_sums, sequences)
    main = prepare_main(dO, Q, K, V, options, key_lengths, chosen, parts, deterministic, sequences)
    after = prepare_after(Q, K, V, options, chosen, divided, sequences)

    def call(dO: Tensor, Q: Tensor, K: Tensor, V: Tensor, O: Tensor, L: Tensor, dL: Tensor | None,
             key_lengths: Tensor | None, cu_seqlens_q: Tensor | None = None,
             cu_seqlens_k: Tensor | None = None) -> Any:  # fmt: skip
        if not host.aligned(dO, Q, K, V, O, L, dL):
            return None
        dQ, dK, dV = map(like, (Q, K, V))
        start, sums = (torch.empty(*shape, dtype=torch.float32, device=Q.device) for shape in (starts, all_sums))
        columns = (sums[dQ_sums[0] :], sums[dQ_sums[0] + dK_sums[0] :]) if divided else (dK, dV)
        rounded = (dK, dV) if divided else (None, None)
        dq_semaphore, ordered = (
            (sums[lines_of_sums:].view(torch.int32), cu_seqlens_k) if deterministic else (None, None)
        )
        with on_device_of(Q):
            counter = host.counter_for(Q, options.traced)  # now: the three kernels follow each other without a gap
            before(O, dO, L, dL, start, sums, cu_seqlens_q, ordered)
            main(Q, K, V, dO, start, sums, *columns, counter, key_lengths, dq_semaphore, cu_seqlens_q, cu_seqlens_k)
            after(sums, dQ, *rounded, cu_seqlens_q, cu_seqlens_k)
        return dQ, dK, dV  # FA2.A2.L20

    return call


def choose(Q: Tensor, K: Tensor, options: Options, key_lengths: Tensor | None, deterministic: bool,
           sequences: int | None) -> tuple[sizes.BackwardSizes, int]:  # fmt: skip
    """The sizes, and into how many parts each column block is divided; what suits the causal mask suits windows.

    Packed sequences pass for equally long.
    """
    causal = options.window != (None, None)
    (_, H, N_q, d), (_, H_kv, _, _) = shape(Q), shape(K)
    N_q = -(-N_q // (sequences or 1))
    chosen = sizes.choose(d, N_q, causal, ragged(K, key_lengths, sequences), deterministic)
    column_blocks, group = programs(K, 128, sequences), H // H_kv
    steps, SMs = group * -(-N_q // chosen.B_r), multiprocessors(Q.device)
    return chosen, sizes.parts_for(column_blocks, steps, SMs, causal, group, chosen.d_pad)


def ragged(K: Tensor, key_lengths: Tensor | None, sequences: int | None) -> bool:
    """Whether a column block may reach past the last key."""
    return key_lengths is not None or sequences is not None or shape(K)[2] % 128 != 0


def shapes(Q: Tensor, K: Tensor, chosen: sizes.BackwardSizes, sequences: int | None) -> tuple[tuple[int, int], ...]:
    """(lines, numbers in each) of what S and dP start from, of the sums of dQ, of those of dK, and of the semaphores.

    The last three are whole tiles of 64 rows.
    """
    row_blocks, column_blocks = programs(Q, chosen.B_r, sequences), programs(K, 128, sequences)
    lines_of_32 = chosen.d_pad // 32
    dQ_sums, dK_sums = row_blocks * chosen.B_r * lines_of_32, column_blocks * 128 * lines_of_32
    counters = -(-2 * (row_blocks + column_blocks) // (64 * chosen.d_pad)) * 2 * chosen.d_pad
    return (row_blocks, 2 * chosen.B_r), (dQ_sums, 32), (dK_sums, 32), (counters, 32)


def prepare_before(dO: Tensor, Q: Tensor, K: Tensor, O: Tensor, options: Options, chosen: sizes.BackwardSizes,
                   sums: tuple[int, int], sequences: int | None) -> Launch:  # fmt: skip
    """Clear the sums, and make what S and dP start from: one program for each 64 rows."""
    (_, H, N_q, d), (_, _, N_k, _) = shape(Q), shape(K)
    return Launch(
        *(bwd_preprocess, programs(Q, chosen.B_r, sequences) * chosen.B_r // 64, dict(num_warps=4, num_stages=1)),
        **dict(O_strides=strides(O), dO_strides=strides(dO), H=H, N_q=N_q, N_k=N_k, sequences=sequences),
        **dict(tiles=sums[0] // (2 * chosen.d_pad)),
        **dict(scale_log2=base_2(options.scale), d=d, d_pad=chosen.d_pad, B_r=chosen.B_r),
    )


def prepare_main(dO: Tensor, Q: Tensor, K: Tensor, V: Tensor, options: Options,
                 key_lengths: Tensor | None, chosen: sizes.BackwardSizes, parts: int, deterministic: bool,
                 sequences: int | None) -> Launch:  # fmt: skip
    """dK, dV and the sums of dQ: one program for each SM. With `deterministic` a head's parts run side by side."""
    causal, scale = options.window != (None, None), options.scale
    (batch, H, N_q, d), (_, H_kv, *_) = shape(Q), shape(K)
    starts, dQ_sums, dK_sums, _ = shapes(Q, K, chosen, sequences)
    describe = functools.partial(descriptor, d=chosen.d_pad)
    if parts > 1:
        columns = 2 * (lines(dK_sums, (128, 32), swizzle=128),)
    else:
        columns = tuple(describe(shaped_like(X), 64) for X in (K, V))
    sums = lines(starts, (1, 2 * chosen.B_r)), lines(dQ_sums, (chosen.B_r * chosen.d_pad // 64, 32), swizzle=128)
    heads = batch * H_kv * parts  # to the scheduler each part of a K/V head is a head
    SMs, column_blocks = multiprocessors(Q.device), programs(K, 128, sequences)
    many = sequences or 1
    if deterministic:
        l2_group = parts * sizes.l2_group_in_turn(-(-N_q // many), d, H // H_kv)
    else:
        rows = 1 if options.windowed else -(-N_q // (many * parts))  # that are in use together
        bytes_each = rows * (H // H_kv) * 4 * (d + chosen.d_pad)  # of Q, dO and the sums of dQ
        l2_group = sizes.l2_group(-(-column_blocks // (batch * H_kv * many)), heads, SMs, causal, H // H_kv, bytes_each)
    return Launch(
        backward_kernel,
        min(SMs, column_blocks * parts),
        chosen.options | USE_PDL,
        (describe(Q, chosen.B_r), describe(K, 128), describe(V, 128), describe(dO, chosen.B_r), *sums, *columns),
        **dict(group=H // H_kv, T_r=starts[0] // (batch * H), heads=heads, parts=parts, sequences=sequences),
        **dict(l2_group=min(heads, l2_group), left=options.left, right=options.right, scale=base_2(scale)),
        **dict(CAUSAL=options.causal, RAGGED=ragged(K, key_lengths, sequences), SIZES=chosen),
    )


def prepare_after(Q: Tensor, K: Tensor, V: Tensor, options: Options, chosen: sizes.BackwardSizes, divided: bool,
                  sequences: int | None) -> Launch:  # fmt: skip
    """dQ from its sums, and dK and dV if they are sums: one program for each consumer's part of a tile."""
    (batch, H, N_q, d), (_, H_kv, N_k, _) = shape(Q), shape(K)
    row_blocks, column_blocks = programs(Q, chosen.B_r, sequences), programs(K, 128, sequences)
    out_strides = tuple(strides(shaped_like(X)) for X in (Q, K, V))
    return Launch(
        *(bwd_postprocess, 2 * row_blocks + 4 * column_blocks * divided, dict(num_warps=4, num_stages=1) | USE_PDL),
        **dict(strides=out_strides, batch=batch, H=H, H_kv=H_kv, N_q=N_q, N_k=N_k, sequences=sequences),
        **dict(scale=options.scale, d=d, d_pad=chosen.d_pad, B_r=chosen.B_r),
    )


def enough_work(Q: Tensor, K: Tensor) -> bool:
    """Whether this kernel is the fastest for such a call."""
    (batch, H, N_q, d), (_, H_kv, N_k, _) = shape(Q), shape(K)
    return sizes.enough_work(d, N_q, N_k, batch * H, H != H_kv, multiprocessors(Q.device))
