"""The portable backward kernels: Algorithm 2 of FlashAttention-2 in two passes, which fix the order of every sum.

In the first pass, each program owns a row block, keeps dQ_i on chip, and computes D_i for the second pass. In the
second pass, each program owns a column block and keeps dK_j and dV_j on chip. Both passes compute S and dP. Rung b00 of
the ladder follows the paper instead, with a single pass that accumulates dQ with atomic additions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa2_lab.kernels import launches, tables
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.common.constants import LOG2E, NEG_INF
from fa2_lab.kernels.common.softmax import Scales, apply_softcap, make_scales
from fa2_lab.kernels.common.tile import (
    DropoutKey,
    DropoutRule,
    KeyBounds,
    accumulate_dot,
    aligned_strides,
    apply_dropout,
    block_coord,
    block_count,
    col_bounds,
    column_ranges,
    head_ptr,
    head_view,
    in_col_bounds,
    in_row_bounds,
    key_length,
    load_tile,
    packed_block,
    row_bounds,
    row_ranges,
    store_rows,
)
from fa2_lab.kernels.contiguous import contiguous_like, result_stand_in
from fa2_lab.kernels.portable.forward import BiasContext, RowBlock, eval_bias


class QueryTensors(NamedTuple):
    """The per-query tensors of all heads, with one row or element per query, and the strides of Q and dO."""

    Q: tl.tensor
    dO: tl.tensor
    L: tl.tensor
    D: tl.tensor
    N: tl.tensor  # rows in a head, or in one packed sequence
    head_stride: tl.tensor  # distance between heads in L and D
    Q_strides: tuple
    dO_strides: tuple


class Group(NamedTuple):
    """The group of query heads that share a K/V head."""

    q_base: tl.tensor  # the batch entry, or the first row of a packed sequence
    heads_before: tl.tensor  # number of query heads in the earlier batch entries
    first: tl.tensor
    size: tl.tensor


class ColumnBlock(NamedTuple):
    """A column block's tiles of K and V, its columns, and the bounds of the rows begin:end that see each column."""

    k_j: tl.tensor  # (B_c, d)
    v_j: tl.tensor  # (B_c, d)
    col: tl.tensor  # (B_c,)
    begin: tl.tensor  # (B_c, 1)
    end: tl.tensor  # (B_c, 1)


class BackwardScalars(NamedTuple):
    """The scalar factors and the dropout rule of the backward pass."""

    scale: float  # τ
    scales: Scales
    dropout_rule: DropoutRule


@triton.jit
def load_row_values(X, bh, head_stride, row, N_q, RAGGED: tl.constexpr):
    """Load the elements of X (L, dL or D) for the rows `row` of a head."""
    at = X + tl.cast(bh, tl.int64) * head_stride + row
    x = tl.load(at, mask=row < N_q, other=0.0) if RAGGED else tl.load(at)
    # Summing over a dimension of size 1 leaves the values unchanged, but makes Triton load each value once per block
    # instead of once per thread.
    return tl.sum(x[:, None], 1)


@triton.jit
def mask_empty_rows(L_i, row, N_q):
    """Return L_i with ∞ in rows that see no key or do not exist, which makes their P zero regardless of the bias."""
    return tl.where((L_i == NEG_INF) | (row >= N_q), float("inf"), L_i)


@triton.jit
def probabilities(x, y, L_i, b_ij, visible, scales, MASKED: tl.constexpr):
    """Recompute a tile's P from L_i. Return P, and the scores after the softcap but before the scale and the bias b_ij.

    The scores are x yᵀ, where x is q_i and y is k_j or, if the tile is transposed, x is k_j and y is q_i. L_i, b_ij and
    `visible` have the tile's shape or broadcast to it.
    """
    s_ij = tl.dot(x, y.T, input_precision="ieee")  # (B_r, B_c), before scaling by τ  FA2.A2.L10
    s_ij = apply_softcap(s_ij, scales.softcap_factor)
    # Compute τ S − L in base 2 with a single FMA because rounding τ S first would lose digits of large scores.
    if b_ij is None:
        power = s_ij * scales.scale_log2 - L_i * LOG2E  # (B_r, B_c)  FA2.A2.L10 FA2.A2.L11
    else:  # compute b − L first because it is small unless P is negligible
        power = s_ij * scales.scale_log2 + (b_ij * LOG2E - L_i * LOG2E)
    if MASKED:
        power = tl.minimum(power, 100.0)  # prevents masked entries from overflowing; visible entries stay far below 100
    p_ij = tl.exp2(power)  # (B_r, B_c)  FA2.A2.L11
    if MASKED:  # masked entries include those of all rows that see no key, where L = −∞
        p_ij = tl.where(visible, p_ij, 0.0)
    return p_ij, s_ij


@triton.jit
def score_gradients(p_ij, s_ij, x, y, D_i, row, col, scales, dropout):
    """Return a tile's dS, the gradient of the scores after scaling by τ but before any softcap.

    dP is x yᵀ, where x is do_i and y is v_j. If the tile is transposed as in probabilities(), x is v_j and y is do_i.
    """
    dp_ij = tl.dot(x, y.T, input_precision="ieee")  # (B_r, B_c)  FA2.A2.L13
    if dropout is not None:
        dp_ij = apply_dropout(dp_ij, row, col, dropout)
    ds_ij = p_ij * (dp_ij - D_i)  # (B_r, B_c)  FA2.A2.L14
    return ds_ij if scales.softcap_factor is None else ds_ij * (1 - s_ij * s_ij)  # (c tanh(s / c))′ = 1 − tanh²(s / c)


@triton.jit
def visit_rows(dk_j, dv_j, columns, queries, span, group, window, scalars, bias_context, seed, const,
               bias: tl.constexpr, GROUPED: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add to dk_j and dv_j (B_c, d) the contributions of the rows in `span` of every query head in the group.

    Return dk_j and dv_j. `columns` is a ColumnBlock, `queries` are QueryTensors, `span` is a RowSpan, and `scalars` are
    BackwardScalars. GROUPED means that the group has several query heads, and MASKED means that the rows may need a
    mask.
    """
    B_r: tl.constexpr = const.B_r
    k_j, v_j, col, scales = columns.k_j, columns.v_j, columns.col, scalars.scales
    N_q = queries.N
    end, second_begin, second_end = span.end, span.second_begin, span.second_end
    tiles = tl.cdiv(end - span.begin, B_r) + (tl.cdiv(second_end - second_begin, B_r) if MASKED else 0)
    start = tl.where(span.begin < end, span.begin, second_begin) if MASKED else span.begin
    head = group.first
    row0 = start
    for _ in range(0, group.size * tiles if GROUPED else tiles):  # FA2.A2.L8
        bh = group.heads_before + head
        row = row0 + tl.arange(0, B_r)  # (B_r,)
        # q_base is the batch entry here. In calls with packed sequences, it is a row, but those calls do not support
        # dropout.
        dropout = None if seed is None else DropoutKey(seed, scalars.dropout_rule, head, group.q_base)
        Q = head_view(queries.Q, queries.Q_strides, group.q_base, head)
        q_i = load_tile(Q, row0, N_q, const, B_r, RAGGED=MASKED)  # (B_r, d)  FA2.A2.L9
        L_i = load_row_values(queries.L, bh, queries.head_stride, row, N_q, RAGGED=MASKED)  # (B_r,)  FA2.A2.L9
        # Here, S, P, dP and dS are transposed: (B_c, B_r).
        visible = in_row_bounds(columns.begin, columns.end, row[None, :], window)
        b_ji = None
        if bias is not None:
            b_ji = eval_bias(bias, BiasContext(head, bias_context.diagonal), row[None, :], col[:, None])
            visible = visible & (row < N_q)[None, :]  # past the last row, a bias may be NaN
            L_i = mask_empty_rows(L_i, row, N_q)
        p_ji, s_ji = probabilities(k_j, q_i, L_i[None, :], b_ji, visible, scales, MASKED)
        kept_ji = p_ji
        if dropout is not None:
            kept_ji = apply_dropout(p_ji, row[None, :], col[:, None], dropout)
        dO = head_view(queries.dO, queries.dO_strides, group.q_base, head)
        do_i = load_tile(dO, row0, N_q, const, B_r, RAGGED=MASKED)  # (B_r, d)  FA2.A2.L9
        D_i = load_row_values(queries.D, bh, queries.head_stride, row, N_q, RAGGED=MASKED)  # (B_r,)  FA2.A2.L9
        ds_ji = score_gradients(p_ji, s_ji, v_j, do_i, D_i[None, :], row[None, :], col[:, None], scales, dropout)
        dv_j = accumulate_dot(dv_j, kept_ji.to(do_i.dtype), do_i)  # (B_c, d)  FA2.A2.L12
        ds_ji = ds_ji.to(q_i.dtype)
        dk_j = accumulate_dot(dk_j, ds_ji, q_i)  # (B_c, d)  FA2.A2.L16
        row0 += B_r
        if MASKED:  # after the rows before `end`, continue at row `second_begin`
            row0 = tl.where(row0 < end, row0, tl.maximum(row0, second_begin))
        if GROUPED:  # after the last row of the span, continue with the first row of the next query head
            head += (row0 >= second_end).to(tl.int32)
            row0 = tl.where(row0 >= second_end, start, row0)
    return dk_j, dv_j


@triton.jit(do_not_specialize=launches.UNSPECIALIZED)
def bwd_dkdv(Q, K, V, dO, L, D, dK, dV, key_lengths, seed, cu_seqlens_q, cu_seqlens_k, strides, H, group, N_q, N_k,
             batch_heads, l2_group, sequences, window, scalars, const, bias: tl.constexpr,
             GROUPED: tl.constexpr):  # fmt: skip
    """Compute dK_j and dV_j for column block j of a K/V head, summed over the query heads that share the K/V head."""
    B_c: tl.constexpr = const.B_c
    T_c = block_count(N_k, sequences, B_c)  # FA2.A2.L1
    j, b_kv = block_coord(tl.program_id(0), T_c, batch_heads, l2_group)  # FA2.A2.L5
    batch, head_kv = b_kv // (H // group), b_kv % (H // group)
    q_base, k_base, heads_before, head_stride = batch, batch, batch * H, N_q
    if cu_seqlens_q is not None:  # a packed sequence is addressed by its first row, not by a batch entry
        j, k_base, N_k, q_base, N_q = packed_block(j, cu_seqlens_k, N_k, cu_seqlens_q, N_q, sequences, B_c)
        L, D = L + q_base, D + q_base
    Q_strides, K_strides, V_strides, dO_strides, dK_strides, dV_strides = aligned_strides(strides)
    K, V = head_view(K, K_strides, k_base, head_kv), head_view(V, V_strides, k_base, head_kv)
    col = j * B_c + tl.arange(0, B_c)  # (B_c,)
    length = key_length(key_lengths, batch, N_k)
    masked_rows, full_rows = row_ranges(j * B_c, N_q, N_k, length, window, const)
    begin, end = row_bounds(col[:, None], N_q, N_k, length, window)  # (B_c, 1)
    # Keys before `key_begin` are not read because no row sees them.
    key_begin = None if window[0] is None else col_bounds(0 * j, N_q, N_k, length, window)[0]

    k_j = load_tile(K, j * B_c, length, const, B_c, RAGGED=True, begin=key_begin)  # (B_c, d)  FA2.A2.L6
    v_j = load_tile(V, j * B_c, length, const, B_c, RAGGED=True, begin=key_begin)  # (B_c, d)  FA2.A2.L6
    dk_j = tl.zeros((B_c, const.d_pad), tl.float32)  # FA2.A2.L7
    dv_j = tl.zeros((B_c, const.d_pad), tl.float32)  # FA2.A2.L7
    columns = ColumnBlock(k_j, v_j, col, begin, end)
    queries = QueryTensors(Q, dO, L, D, N_q, head_stride, Q_strides, dO_strides)
    query_group = Group(q_base, heads_before, head_kv * group if GROUPED else head_kv, group)
    bias_context = BiasContext(query_group.first, N_k - N_q)
    dk_j, dv_j = visit_rows(dk_j, dv_j, columns, queries, masked_rows, query_group, window, scalars, bias_context, seed,
                            const, bias, GROUPED, MASKED=True)  # fmt: skip
    dk_j, dv_j = visit_rows(dk_j, dv_j, columns, queries, full_rows, query_group, window, scalars, bias_context, seed,
                            const, bias, GROUPED, MASKED=False)  # fmt: skip

    dK, dV = head_ptr(dK, dK_strides, k_base, head_kv), head_ptr(dV, dV_strides, k_base, head_kv)
    # dk_j is already the sum over all query heads in the group, which share the scale τ, so one multiplication is
    # enough.
    store_rows(dK, dk_j * scalars.scale, j * B_c, dK_strides[2], N_k, B_c, const.d, const.d_pad)  # FA2.A2.L18
    store_rows(dV, dv_j, j * B_c, dV_strides[2], N_k, B_c, const.d, const.d_pad)  # FA2.A2.L18


@triton.jit
def visit_columns(dq_i, q_i, do_i, row_block, K, V, span, keys, window, scales, bias_context, dropout, const,
                  bias: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add the contributions of the tiles in `span` to dq_i (B_r, d), and return dq_i.

    All other arguments are the same as those of visit_tiles() in forward.py.
    """
    B_c: tl.constexpr = const.B_c
    row = row_block.row
    key_begin = None if window[0] is None else keys.begin
    for n in range(span.begin, span.end, B_c):
        col0 = n + tl.where(n >= span.skip_at, span.skip_cols, 0)
        col = col0 + tl.arange(0, B_c)  # (B_c,)
        k_j = load_tile(K, col0, keys.length, const, B_c, MASKED, key_begin)  # (B_c, d)
        v_j = load_tile(V, col0, keys.length, const, B_c, MASKED, key_begin)  # (B_c, d)
        visible = in_col_bounds(row_block.begin, row_block.end, col[None, :], window)
        b_ij = None if bias is None else eval_bias(bias, bias_context, row[:, None], col[None, :])
        p_ij, s_ij = probabilities(q_i, k_j, row_block.L_i[:, None], b_ij, visible, scales, MASKED)
        ds_ij = score_gradients(
            p_ij, s_ij, do_i, v_j, row_block.D_i[:, None], row[:, None], col[None, :], scales, dropout
        )
        dq_i = accumulate_dot(dq_i, ds_ij.to(k_j.dtype), k_j)  # (B_r, d)  FA2.A2.L15
    return dq_i


@triton.jit(do_not_specialize=launches.UNSPECIALIZED)
def bwd_dq(Q, K, V, O, dO, L, dL, D, dQ, key_lengths, seed, cu_seqlens_q, cu_seqlens_k, strides, H, group, N_q, N_k,
           batch_heads, l2_group, sequences, window, scalars, const, bias: tl.constexpr):  # fmt: skip
    """Compute D_i and dQ_i for row block i of a query head. As in the forward pass, each program owns one row block."""
    B_r: tl.constexpr = const.B_r
    T_r = block_count(N_q, sequences, B_r)  # FA2.A2.L1 FA2.A2.L2
    i, bh = block_coord(tl.program_id(0), T_r, batch_heads, l2_group)
    if window[1] is not None:
        i = T_r - 1 - i  # start with the row blocks that see the most keys
    batch, head = bh // H, bh % H
    Q_strides, K_strides, V_strides, O_strides, dO_strides, dQ_strides = aligned_strides(strides)
    q_base, k_base, head_stride = batch, batch, N_q
    if cu_seqlens_q is not None:
        i, q_base, N_q, k_base, N_k = packed_block(i, cu_seqlens_q, N_q, cu_seqlens_k, N_k, sequences, B_r)
        L, D, dL = L + q_base, D + q_base, None if dL is None else dL + q_base
    K, V = head_view(K, K_strides, k_base, head // group), head_view(V, V_strides, k_base, head // group)
    row = i * B_r + tl.arange(0, B_r)  # (B_r,)
    length = key_length(key_lengths, batch, N_k)
    begin, end = col_bounds(row[:, None], N_q, N_k, length, window)  # (B_r, 1)
    masked_cols, full_cols = column_ranges(i, N_q, N_k, length, window, const)
    keys = KeyBounds(col_bounds(i * B_r, N_q, N_k, length, window)[0], length)

    Q, O = head_view(Q, Q_strides, q_base, head), head_view(O, O_strides, q_base, head)
    dO = head_view(dO, dO_strides, q_base, head)
    q_i = load_tile(Q, i * B_r, N_q, const, B_r, RAGGED=True)  # (B_r, d)
    do_i = load_tile(dO, i * B_r, N_q, const, B_r, RAGGED=True)  # (B_r, d)
    L_i = load_row_values(L, bh, head_stride, row, N_q, RAGGED=True)  # (B_r,)
    o_i = load_tile(O, i * B_r, N_q, const, B_r, RAGGED=True).to(tl.float32)  # (B_r, d)
    D_i = tl.sum(do_i * o_i, 1)  # (B_r,)  FA2.A2.L4
    if dL is not None:  # if the loss also depends on L, subtract dL from D to add the term P ∘ dL to dS
        D_i = tl.where(L_i == NEG_INF, 0.0, D_i - load_row_values(dL, bh, head_stride, row, N_q, RAGGED=True))
    tl.store(D + tl.cast(bh, tl.int64) * head_stride + row, D_i, mask=row < N_q)  # FA2.A2.L4
    scales = scalars.scales
    dropout = None if seed is None else DropoutKey(seed, scalars.dropout_rule, head, batch)
    bias_context = BiasContext(head, N_k - N_q)
    if bias is not None:
        L_i = mask_empty_rows(L_i, row, N_q)
    row_block = RowBlock(row, begin, end, L_i, D_i)
    dq_i = tl.zeros((B_r, const.d_pad), tl.float32)
    dq_i = visit_columns(dq_i, q_i, do_i, row_block, K, V, full_cols, keys, window, scales, bias_context, dropout,
                         const, bias, MASKED=False)  # fmt: skip
    if masked_cols.begin < masked_cols.end:
        dq_i = visit_columns(dq_i, q_i, do_i, row_block, K, V, masked_cols, keys, window, scales, bias_context, dropout,
                             const, bias, MASKED=True)  # fmt: skip
    dQ = head_ptr(dQ, dQ_strides, q_base, head)
    store_rows(dQ, dq_i * scalars.scale, i * B_r, dQ_strides[2], N_q, B_r, const.d, const.d_pad)


def prepare(dO: Tensor, O: Tensor, tensors: Tensors, options: Options) -> Callable:
    """Return a function of (dO, dL, O, L, tensors) that runs the portable backward kernels for calls like this one."""
    dq_launch = prepare_dq(dO, O, tensors, options)
    dkdv_launch = prepare_dkdv(dO, tensors, options)

    def call(dO: Tensor, dL: Tensor | None, O: Tensor, L: Tensor, tensors: Tensors) -> tuple:
        Q, K, V, sinks = tensors.q, tensors.k, tensors.v, tensors.sinks
        optional = optional_tensors(tensors)
        D, dQ, dK, dV = torch.empty_like(L), contiguous_like(Q), contiguous_like(K), contiguous_like(V)
        with launches.on_device_of(Q):
            dq_launch(Q, K, V, O, dO, L, dL, D, dQ, *optional)
            dkdv_launch(Q, K, V, dO, L, D, dK, dV, *optional)
        return dQ, dK, dV, *(() if sinks is None else [sink_gradients(sinks, L, D)])  # FA2.A2.L20

    return call


def optional_tensors(tensors: Tensors) -> tuple[Tensor | None, ...]:
    """Return the optional tensors that both backward kernels take as their last pointers. Each of them may be None."""
    return tensors.key_lengths, tensors.seed, tensors.cu_seqlens_q, tensors.cu_seqlens_k


def sink_gradients(sinks: Tensor, L: Tensor, D: Tensor) -> Tensor:
    """Return the gradient of each sink, which is the sum of dS = −P D over all rows, with P = exp(sink − L).

    For a score, the gradient is dS = P (dP − D). For a sink, dP is 0 because a sink has no value.
    """
    p = torch.exp(sinks.float()[:, None] - L.nan_to_num())  # avoids −∞ − (−∞) if a row's L and its sink are both −∞
    return -(p * D).sum(-1).view(-1, len(sinks)).sum(0).to(sinks.dtype)


def prepare_dq(
    dO: Tensor, O: Tensor, tensors: Tensors, options: Options, config: tables.KernelConfig | None = None
) -> launches.Launch:
    """Return the launch that computes D and dQ, with one program per row block of a query head."""
    Q, K, sequences = tensors.q, tensors.k, tensors.sequences
    config = config or tables.choose_config("dq", Q, options.causal)
    return launches.Launch(
        *(bwd_dq, launches.program_count(Q, config.B_r, sequences), config.compiler_options()),
        strides=launches.all_strides(Q, K, tensors.v, O, dO, result_stand_in(Q)),
        **launches.size_arguments(Q, K, owned=Q, streamed=K, sequences=sequences),
        **dict(const=config.constants(Q), **common_arguments(options)),
    )


def prepare_dkdv(
    dO: Tensor, tensors: Tensors, options: Options, config: tables.KernelConfig | None = None
) -> launches.Launch:
    """Return the launch that computes dK and dV, with one program per column block of a K/V head."""
    Q, K, V, sequences = tensors.q, tensors.k, tensors.v, tensors.sequences
    config = config or tables.choose_config("dkdv", Q, options.causal)
    return launches.Launch(
        *(bwd_dkdv, launches.program_count(K, config.B_c, sequences), config.compiler_options()),
        strides=launches.all_strides(Q, K, V, dO, *(result_stand_in(x) for x in (K, V))),
        **launches.size_arguments(Q, K, owned=K, streamed=Q, sequences=sequences),
        **dict(const=config.constants(Q), GROUPED=Q.shape[1] != K.shape[1], **common_arguments(options)),
    )


def common_arguments(options: Options) -> dict:
    """Return the keyword arguments, other than sizes, that both passes share: the window, the scalars and the bias."""
    scales = make_scales(options.scale, options.softcap)
    scalars = BackwardScalars(options.scale, scales, launches.dropout_rule(options.dropout_p))
    return dict(window=launches.window_bounds(options), scalars=scalars, bias=options.bias)
