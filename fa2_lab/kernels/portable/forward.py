"""The portable forward pass: Algorithm 1 of FlashAttention-2, with one program per row block of a head."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa2_lab.kernels import launches, tables
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.common.constants import LN2, LOG2E, NEG_INF
from fa2_lab.kernels.common.softmax import apply_softcap, make_scales, softmax_step
from fa2_lab.kernels.common.tile import (
    DropoutKey,
    KeyBounds,
    aligned_strides,
    apply_dropout,
    block_coord,
    block_count,
    col_bounds,
    column_ranges,
    head_ptr,
    head_view,
    in_col_bounds,
    key_length,
    load_columns,
    load_tile,
    packed_block,
    store_rows,
)
from fa2_lab.kernels.contiguous import contiguous_like, result_stand_in


class BiasContext(NamedTuple):
    """The head and the diagonal, which a bias needs in addition to the row and the column."""

    head: tl.tensor
    # the column of row 0's diagonal, which is added to row indices before they are passed to a bias
    diagonal: tl.tensor


class RowBlock(NamedTuple):
    """A row block's rows, the columns begin:end that each row sees, and each row's L and D in the backward pass."""

    row: tl.tensor  # (B_r,)
    begin: tl.tensor  # (B_r, 1)
    end: tl.tensor  # (B_r, 1)
    L_i: tl.tensor  # (B_r,), or None in the forward pass
    D_i: tl.tensor  # (B_r,), or None in the forward pass


@triton.jit
def eval_bias(bias: tl.constexpr, bias_context, row, col):
    """Return bias(head, row, column) in fp32 for these rows and columns. The caller adds the result to the scores."""
    one = tl.full((1, 1), 1.0, tl.float32)  # in Triton's interpreter, a bias may return a Python number
    return tl.cast(one * bias(bias_context.head, row + bias_context.diagonal, col), tl.float32)


@triton.jit
def visit_tiles(state, q_i, K, V, span, keys, row_block, window, scales, bias_context, dropout, const,
                bias: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Process the tiles in `span` for a row block, and return the updated softmax state.

    The state consists of o_i, m_i (B_r,) and l_i (B_r,), where o_i is a tuple of pieces (B_r, const.o_chunk). K and V
    are Heads. `span` is the ColSpan of the tiles, and `keys` are the KeyBounds, outside which no key is read. `window`
    is (left, right). `dropout` is a DropoutKey or None, and `bias` is a function or None. If MASKED is true, each
    column is compared with each row's bounds in the RowBlock.
    """
    o_i, m_i, l_i = state
    row = row_block.row
    B_c: tl.constexpr = const.B_c
    key_begin = None if window[0] is None else keys.begin
    for n in range(span.begin, span.end, B_c):  # FA2.A1.L6
        col0 = n + tl.where(n >= span.skip_at, span.skip_cols, 0)
        col = col0 + tl.arange(0, B_c)  # (B_c,)
        k_j = load_tile(K, col0, keys.length, const, B_c, MASKED, key_begin)  # (B_c, d)  FA2.A1.L7
        s_ij = tl.dot(q_i, k_j.T, input_precision="ieee")  # (B_r, B_c), before scaling by τ  FA2.A1.L8
        s_ij = apply_softcap(s_ij, scales.softcap_factor)
        if bias is not None:
            b_ij = eval_bias(bias, bias_context, row[:, None], col[None, :])  # (B_r, B_c)
            s_ij = s_ij + b_ij * tl.div_rn(LOG2E, scales.scale_log2)
        if MASKED:
            s_ij = tl.where(in_col_bounds(row_block.begin, row_block.end, col[None, :], window), s_ij, NEG_INF)
        p_ij, alpha, m_i, l_i = softmax_step(s_ij, m_i, l_i, scales, MASKED or bias is not None)  # FA2.A1.L9
        if dropout is not None:  # dropout follows the row sum because l also counts the dropped keys
            p_ij = apply_dropout(p_ij, row[:, None], col[None, :], dropout)
        new_o_i = ()
        for c in tl.static_range(0, const.d, const.o_chunk):
            v_j = load_columns(V, c, col0, keys.length, const, B_c, MASKED, key_begin)  # (B_c, o_chunk)  FA2.A1.L7
            o_c = alpha[:, None] * o_i[c // const.o_chunk]
            new_o_i += (tl.dot(p_ij.to(v_j.dtype), v_j, o_c, input_precision="ieee"),)  # FA2.A1.L10
        o_i = new_o_i
    return o_i, m_i, l_i


@triton.jit(do_not_specialize=launches.UNSPECIALIZED)
def forward_kernel(Q, K, V, O, L, key_lengths, seed, sinks, cu_seqlens_q, cu_seqlens_k, strides, H, group, N_q, N_k,
                   batch_heads, l2_group, sequences, window, scales, dropout_rule, const,
                   bias: tl.constexpr):  # fmt: skip
    """Compute O_i and L_i for row block i of a query head. `group` query heads share a K/V head."""
    B_r: tl.constexpr = const.B_r
    T_r = block_count(N_q, sequences, B_r)  # FA2.A1.L1 FA2.A1.L2
    i, bh = block_coord(tl.program_id(0), T_r, batch_heads, l2_group)  # FA2.A1.L3
    if window[1] is not None:
        i = T_r - 1 - i  # start with the last row block because later row blocks see more keys
    batch, head = bh // H, bh % H
    Q_strides, K_strides, V_strides, O_strides = aligned_strides(strides)
    q_base, k_base, L_h = batch, batch, tl.cast(bh, tl.int64) * N_q
    if cu_seqlens_q is not None:  # a packed sequence is addressed by its first row, not by a batch entry
        i, q_base, N_q, k_base, N_k = packed_block(i, cu_seqlens_q, N_q, cu_seqlens_k, N_k, sequences, B_r)
        L_h += q_base
    Q = head_view(Q, Q_strides, q_base, head)
    K = head_view(K, K_strides, k_base, head // group)
    V = head_view(V, V_strides, k_base, head // group)
    O = head_ptr(O, O_strides, q_base, head)
    row = i * B_r + tl.arange(0, B_r)  # (B_r,)
    length = key_length(key_lengths, batch, N_k)
    begin, end = col_bounds(row[:, None], N_q, N_k, length, window)  # (B_r, 1)
    masked_cols, full_cols = column_ranges(i, N_q, N_k, length, window, const)
    keys = KeyBounds(col_bounds(i * B_r, N_q, N_k, length, window)[0], length)
    dropout = None if seed is None else DropoutKey(seed, dropout_rule, head, batch)
    bias_context = BiasContext(head, N_k - N_q)

    q_i = load_tile(Q, i * B_r, N_q, const, B_r, RAGGED=True)  # (B_r, d)  FA2.A1.L4
    o_i = ()
    for _ in tl.static_range(0, const.d, const.o_chunk):
        o_i += (tl.zeros((B_r, const.o_chunk), tl.float32),)  # FA2.A1.L5
    m_i = tl.full((B_r,), NEG_INF, tl.float32)  # FA2.A1.L5
    l_i = tl.zeros((B_r,), tl.float32)  # FA2.A1.L5
    if sinks is not None:  # a sink acts like a key that every row sees, but contributes only to l, not to o
        m_i = l_i + tl.load(sinks + head).to(tl.float32) * tl.div_rn(LOG2E, scales.scale_log2)
        l_i += 1.0
    # Tiles on the diagonal are processed first. The order does not affect the result, but in the opposite order, ptxas
    # makes each matmul wait for the previous one, and the kernel is 15% slower.
    state, row_block = (o_i, m_i, l_i), RowBlock(row, begin, end, None, None)
    state = visit_tiles(state, q_i, K, V, masked_cols, keys, row_block, window, scales, bias_context, dropout,
                        const, bias, MASKED=True)  # fmt: skip
    o_i, m_i, l_i = visit_tiles(state, q_i, K, V, full_cols, keys, row_block, window, scales, bias_context, dropout,
                                const, bias, MASKED=False)  # fmt: skip

    l_i = tl.where(l_i == 0.0, 1.0, l_i)  # a row that sees no key gets O = 0 and L = −∞
    L_i = (m_i * scales.scale_log2 + tl.log2(l_i)) * LN2  # (B_r,)  FA2.A1.L13
    for c in tl.static_range(0, const.d, const.o_chunk):
        o_c = o_i[c // const.o_chunk] / l_i[:, None]  # (B_r, o_chunk)  FA2.A1.L12
        store_rows(O + c, o_c, i * B_r, O_strides[2], N_q, B_r, min(const.d - c, const.o_chunk),  # FA2.A1.L14
                   const.o_chunk)  # fmt: skip
    tl.store(L + L_h + row, L_i, mask=row < N_q)  # FA2.A1.L15


def prepare(tensors: Tensors, options: Options, config: tables.KernelConfig | None = None) -> Callable:
    """Return a function of `tensors` that runs the portable forward kernel for calls like this one (see dispatch.py).

    Each launch has one program per row block. If `config` is None, the configuration is taken from the tables.
    """
    Q, K, sequences = tensors.q, tensors.k, tensors.sequences
    config = config or tables.choose_config("forward", Q, options.causal)
    (batch, H, N_q, _), device = launches.dense_shape(Q), Q.device
    L_shape = (batch, H, N_q) if sequences is None else (H, N_q)
    launch = launches.Launch(
        *(forward_kernel, launches.program_count(Q, config.B_r, sequences), config.compiler_options()),
        strides=launches.all_strides(Q, K, tensors.v, result_stand_in(Q)),
        **launches.size_arguments(Q, K, owned=Q, streamed=K, sequences=sequences),
        **dict(window=launches.window_bounds(options), scales=make_scales(options.scale, options.softcap)),
        **dict(dropout_rule=launches.dropout_rule(options.dropout_p), const=config.constants(Q), bias=options.bias),
    )

    def call(tensors: Tensors) -> tuple[Tensor, Tensor]:
        O = contiguous_like(tensors.q)
        L = torch.empty(*L_shape, dtype=torch.float32, device=device)
        optional = tensors.key_lengths, tensors.seed, tensors.sinks, tensors.cu_seqlens_q, tensors.cu_seqlens_k
        with launches.on_device_of(O):
            launch(tensors.q, tensors.k, tensors.v, O, L, *optional)
        return O, L  # FA2.A1.L17

    return call
