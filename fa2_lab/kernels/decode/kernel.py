"""Decode: few queries over a long cache. The keys are split among programs, and what each found of them is merged.

The tiles of all heads lie end to end, and every program takes an equal share of them, across heads if need be. Where
heads are of one length and a team of programs for each fills the GPU, the team takes the tiles of its head in turn:
what is read at a time lies closer together. (The rules are machine/splits.py.) Slot w + h of the scratch holds what
program w found of head h, if it did not read all of it. The query heads of a group are rows of one tile, so that a key
is read once for all of them. The cache is a tensor, or pages behind a block table.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from fa2_lab.kernels import interpreter, launch
from fa2_lab.kernels.decode.turns import sequence_of, share_of, turns_before, turns_of
from fa2_lab.kernels.portable.forward import LN2, NEG_INF
from fa2_lab.kernels.portable.tile import keys_seen, length_of, load_rows
from fa2_lab.kernels.prepared import kind_of, prepared
from fa2_lab.machine import splits

# What a program finds -------------------------------------------------------------------------------------------


@triton.jit
def part(parts, slots, slot, R, d_pad: tl.constexpr):
    """Where a slot keeps the o, m and l of its first row, of R: first the o of all slots, then all m, then all l."""
    row = tl.cast(slot, tl.int64) * R
    rows = tl.cast(slots, tl.int64) * R
    return parts + row * d_pad, parts + rows * d_pad + row, parts + rows * (d_pad + 1) + row


@triton.jit
def finalize(m, l, scale_log2):
    """SoftmaxState.finalize: what o is divided by, and L. A row that sees no key: O = 0 and L = −∞."""
    whole = tl.where(l == 0.0, 1.0, l)
    return whole, (m * scale_log2 + tl.log2(whole)) * LN2  # FA2.A1.L13


# Its keys, one tile after the other -----------------------------------------------------------------------------


@triton.jit
def place_of(table, pages, first, length, B_c: tl.constexpr, PAGE: tl.constexpr):
    """Where keys first … first + B_c lie: their pages, and their rows in them; one page where a tile lies in one."""
    if PAGE % B_c == 0:
        page, row = tl.load(table + first // PAGE), first % PAGE
    else:
        col = first + tl.arange(0, B_c)
        page, row = tl.load(table + col // PAGE, mask=col < length, other=0), col % PAGE
    return tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64), row


@triton.jit
def load_keys(X, place, first, strides, length, B_c: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr,
              PAGE: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Keys or values first … first + B_c of one head. From `length` on they read as zero and are not touched."""
    if PAGE == 0:
        return load_rows(X, first, strides[2], length, B_c, d, d_pad, MASKED, UPCAST)
    elif PAGE % B_c == 0:
        page, row = place
        return load_rows(X + page * strides[0], row, strides[2], length - first + row, B_c, d, d_pad, True, UPCAST)
    else:
        page, row = place
        real = (first + tl.arange(0, B_c) < length)[:, None] & (tl.arange(0, d_pad) < d)[None, :]
        at = X + (page * strides[0] + row.to(tl.int64) * strides[2])[:, None] + tl.arange(0, d_pad)[None, :]
        x = tl.load(at, mask=real, other=0.0)
        return x.to(tl.float32) if UPCAST else x  # (B_c, d_pad)


@triton.jit
def visit_keys(q_i, K, V, table, pages, K_strides, V_strides, first, last, step, length, seen, scales,
               B_r: tl.constexpr, B_c: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr, PAGE: tl.constexpr,
               LATE: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """The state m_i (B_r,), l_i (B_r,), o_i (B_r, d) of one row block after a tile at every step, `first` to `last`.

    Few rows leave registers for a sum of every column, so that warps, which hold columns apart, add up at the end only.
    LATE, the queries are put in place after the first keys were asked for: for programs that begin several heads.
    """
    FEW: tl.constexpr = B_r == 16
    scale_log2, coarse, huge = scales
    o_i = tl.zeros((B_r, d_pad), tl.float32)  # FA2.A1.L5
    m_i = tl.full((B_r,), NEG_INF, tl.float32)  # FA2.A1.L5
    l_i = tl.zeros((B_r, B_c) if FEW else (B_r,), tl.float32)  # FA2.A1.L5
    all_see = tl.min(seen, 0)
    for j in range(first, last, step):  # FA2.A1.L6
        col = j + tl.arange(0, B_c)  # (B_c,)
        place = place_of(table, pages, j, length, B_c, PAGE) if PAGE else None
        k_j = load_keys(K, place, j, K_strides, length, B_c, d, d_pad, PAGE, MASKED, UPCAST)  # (B_c, d)  FA2.A1.L7
        # Always q_i; but the compiler does not know, and so cannot put it in place before the loop.
        q_j = tl.where(j < last, q_i, 0.0) if FEW and LATE else q_i
        s_ij = tl.dot(q_j, k_j.T, input_precision="ieee")  # (B_r, B_c)  FA2.A1.L8
        if MASKED and (not FEW or j + B_c > all_see):
            s_ij = tl.where(col[None, :] < seen[:, None], s_ij, NEG_INF)
        m_new = tl.maximum(m_i, tl.max(s_ij, 1))  # (B_r,)  FA2.A1.L9
        m_ref = tl.where(m_new == NEG_INF, 0.0, m_new)
        c_i = tl.where(tl.abs(m_ref) < huge, scale_log2, coarse)  # (B_r,)
        p_ij = tl.exp2(s_ij * c_i[:, None] - (m_ref * c_i)[:, None])  # (B_r, B_c)  FA2.A1.L9
        alpha = tl.exp2((m_i - m_ref) * c_i)  # (B_r,)  FA2.A1.L9
        l_i = alpha[:, None] * l_i + p_ij if FEW else alpha * l_i + tl.sum(p_ij, 1)  # FA2.A1.L9
        m_i = m_new
        v_j = load_keys(V, place, j, V_strides, length, B_c, d, d_pad, PAGE, MASKED, UPCAST)  # (B_c, d)  FA2.A1.L7
        o_i = tl.dot(p_ij.to(v_j.dtype), v_j, alpha[:, None] * o_i, input_precision="ieee")  # (B_r, d)  FA2.A1.L10
    return m_i, tl.sum(l_i, 1) if FEW else l_i, o_i


@triton.jit
def group_pointers(X, strides, b, row, kv_head, group, N_q):
    """Pointers to the queries that share a K/V head, as rows: row r is query r % N_q of the group's head r // N_q."""
    at = (kv_head * group + row // N_q).to(tl.int64) * strides[1] + (row % N_q).to(tl.int64) * strides[2]
    return X + tl.cast(b, tl.int64) * strides[0] + at  # (B_r,)


@triton.jit
def attend(Q, K, V, O, L, table, Q_strides, K_strides, V_strides, O_strides, pages, width, H, group, N_q, N_k, b, h,
           row_blocks, length, first, last, step, alone, part_at, scales, CAUSAL: tl.constexpr, PAGE: tl.constexpr,
           d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr, B_c: tl.constexpr, EARLY: tl.constexpr,
           LATE: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Row block h of sequence b over every tile from `first` to `last`: O and L if it is `alone`, else a part."""
    r, e = tl.arange(0, B_r), tl.arange(0, d_pad)
    kv_head, row = h // row_blocks, h % row_blocks * B_r + r
    real = row < group * N_q
    Q_at = group_pointers(Q, Q_strides, b, row, kv_head, group, N_q)
    q_i = tl.load(Q_at[:, None] + e[None, :], mask=real[:, None] & (e < d)[None, :], other=0.0)  # FA2.A1.L4
    if UPCAST:
        q_i = q_i.to(tl.float32)
    seen = keys_seen(row % N_q, N_q, N_k if table is None else length, length, CAUSAL)  # (B_r,)
    K_h, V_h = K + tl.cast(kv_head, tl.int64) * K_strides[1], V + tl.cast(kv_head, tl.int64) * V_strides[1]
    table_b = table
    if table is None:
        K_h += tl.cast(b, tl.int64) * K_strides[0]
        V_h += tl.cast(b, tl.int64) * V_strides[0]
    else:
        table_b += tl.cast(b, tl.int64) * width
    m_i, l_i, o_i = visit_keys(q_i, K_h, V_h, table_b, pages, K_strides, V_strides, first, last, step, length, seen,
                               scales, B_r, B_c, d, d_pad, PAGE, LATE, MASKED, UPCAST)  # fmt: skip
    if EARLY:  # merge_kernel may be launched from now on, and will wait until this kernel has ended
        tl.extra.cuda.gdc_launch_dependents()

    if alone:
        whole, L_i = finalize(m_i, l_i, scales[0])
        O_i = (o_i * (1.0 / whole)[:, None]).to(O.dtype.element_ty)  # (B_r, d)  FA2.A1.L12
        O_at = group_pointers(O, O_strides, b, row, kv_head, group, N_q)
        tl.store(O_at[:, None] + e[None, :], O_i, mask=real[:, None] & (e < d)[None, :])  # FA2.A1.L14
        L_at = (b * H + kv_head * group).to(tl.int64) * N_q + row
        tl.store(L + L_at, L_i, mask=real)  # FA2.A1.L15
    else:
        o_at, m_at, l_at = part_at
        tl.store(o_at + r[:, None] * d_pad + e[None, :], o_i, mask=real[:, None])
        tl.store(m_at + r, m_i, mask=real)
        tl.store(l_at + r, l_i, mask=real)


UNSPECIALIZED = ["H", "group", "N_k", "batch", "heads", "pages", "width", "R", "programs", "slots", "least", "team"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def team_kernel(Q, K, V, O, L, parts, Q_strides, K_strides, V_strides, O_strides, H, group, N_q, N_k, heads, R, slots,
                team, scale_log2, coarse, huge, CAUSAL: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr,
                B_r: tl.constexpr, B_c: tl.constexpr, EARLY: tl.constexpr, ROW_BLOCKS: tl.constexpr,
                ALONE: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Program w of the team for head h: tiles w, w + team, …; ALONE it is a team of one, which takes them all."""
    w, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part_at = part(parts, slots, w + (b * heads + h) * (team + 1), R, d_pad)
    attend(Q, K, V, O, L, None, Q_strides, K_strides, V_strides, O_strides, 0, 0, H, group, N_q, N_k, b, h,
           ROW_BLOCKS, N_k, w * B_c, N_k, team * B_c, ALONE, part_at, (scale_log2, coarse, huge), CAUSAL, 0, d, d_pad,
           B_r, B_c, EARLY, False, MASKED, UPCAST)  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def share_kernel(Q, K, V, O, L, parts, key_lengths, table, Q_strides, K_strides, V_strides, O_strides, pages, width, H,
                 group, N_q, N_k, batch, heads, R, programs, slots, least, scale_log2, coarse, huge,
                 CAUSAL: tl.constexpr, PAGE: tl.constexpr, d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr,
                 B_c: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Program w: its share of all turns. A head that it reads from end to end is finished here, others are parts.

    `heads` counts the K/V heads of one sequence, times their row blocks; N_k is the most keys that a sequence may have.
    """
    w = tl.program_id(0)
    T = turns_before(batch, key_lengths, N_k, heads, B_c)
    share = share_of(T, programs, least, key_lengths)
    t, end = w * share, tl.minimum((w + 1) * share, T)
    b, begin = sequence_of(t, key_lengths, N_k, heads, batch, B_c)
    length = length_of(key_lengths, tl.minimum(b, batch - 1), N_k)
    h = (t - begin) // turns_of(length, B_c)
    begin += h * turns_of(length, B_c)  # the first turn of head h
    while t < end:
        after = begin + turns_of(length, B_c)
        stop = tl.minimum(end, after)
        first, last = tl.maximum(t - begin - 1, 0) * B_c, (stop - begin - 1) * B_c
        alone, part_at = (t == begin) & (stop == after), part(parts, slots, w + b * heads + h, R, d_pad)
        attend(Q, K, V, O, L, table, Q_strides, K_strides, V_strides, O_strides, pages, width, H, group, N_q, N_k, b, h,
               tl.cdiv(group * N_q, B_r), length, first, last, B_c, alone, part_at, (scale_log2, coarse, huge), CAUSAL,
               PAGE, d, d_pad, B_r, B_c, EARLY, True, True, UPCAST)  # fmt: skip
        t, h, begin = stop, h + 1, after
        if (h == heads) & (t < end):
            b, h = b + 1, 0
            length = length_of(key_lengths, b, N_k)


# The merge ------------------------------------------------------------------------------------------------------


@triton.jit
def merge(m, l, o, m_w, l_w, o_w, scales):
    """SoftmaxState.merge, line by line: one state (), (), (d,) and several more (PARTS,), (PARTS,), (PARTS, d)."""
    scale_log2, coarse, huge = scales
    m_new = tl.maximum(m, tl.max(m_w, 0))  # merge: m
    m_ref = tl.where(m_new == NEG_INF, 0.0, m_new)  # merge: finite(m)
    c = tl.where(tl.abs(m_ref) < huge, scale_log2, coarse)
    alpha, beta = tl.exp2((m - m_ref) * c), tl.exp2((m_w - m_ref) * c)  # merge: alpha, beta
    l = alpha * l + tl.sum(beta * l_w, 0)  # merge: l
    o = alpha * o + tl.sum(beta[:, None] * o_w, 0)  # merge: o
    return m_new, l, o


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_kernel(O, L, parts, key_lengths, O_strides, H, group, N_q, N_k, batch, heads, R, programs, slots, least,
                 team, scale_log2, coarse, huge, d: tl.constexpr, d_pad: tl.constexpr, B_r: tl.constexpr,
                 B_c: tl.constexpr, EARLY: tl.constexpr, TEAMS: tl.constexpr, PARTS: tl.constexpr,
                 WIDTH: tl.constexpr):  # fmt: skip
    """WIDTH columns of a row of O, and its L: parts lie in neighbouring slots, from the head's first reader on."""
    pid, piece = tl.program_id(0) // (d_pad // WIDTH), tl.program_id(0) % (d_pad // WIDTH)
    b, head, n = pid // (H * N_q), pid // N_q % H, pid % N_q
    row = head % group * N_q + n
    h = head // group * tl.cdiv(group * N_q, B_r) + row // B_r
    if TEAMS:
        first = (b * heads + h) * team
        last = first + team - 1
    else:
        share = share_of(turns_before(batch, key_lengths, N_k, heads, B_c), programs, least, key_lengths)
        turns = turns_of(length_of(key_lengths, b, N_k), B_c)
        begin = turns_before(b, key_lengths, N_k, heads, B_c) + h * turns
        first, last = begin // share, (begin + turns - 1) // share
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if first == last:
        return  # its program has finished it
    e = piece * WIDTH + tl.arange(0, WIDTH)
    m, l, o = -float("inf"), 0.0, tl.zeros((WIDTH,), tl.float32)
    for w in range(first, last + 1, PARTS):
        reader = w + tl.arange(0, PARTS)  # (PARTS,)
        real = reader <= last
        o_at, m_at, l_at = part(parts, slots, reader + b * heads + h, R, d_pad)
        m_w = tl.load(m_at + row % B_r, mask=real, other=NEG_INF)
        l_w = tl.load(l_at + row % B_r, mask=real, other=0.0)
        o_w = tl.load((o_at + row % B_r * d_pad)[:, None] + e[None, :], mask=real[:, None], other=0.0)  # (PARTS, WIDTH)
        m, l, o = merge(m, l, o, m_w, l_w, o_w, (scale_log2, coarse, huge))

    whole, L_i = finalize(m, l, scale_log2)
    O_i = (o / whole).to(O.dtype.element_ty)  # (WIDTH,)  FA2.A1.L12
    O += tl.cast(b, tl.int64) * O_strides[0] + tl.cast(head, tl.int64) * O_strides[1]
    O += tl.cast(n, tl.int64) * O_strides[2]
    tl.store(O + e, O_i, mask=e < d)  # FA2.A1.L14
    tl.store(L + pid, L_i, mask=piece == 0)  # FA2.A1.L15


# The launch -----------------------------------------------------------------------------------------------------

ROWS = 64  # of one tile at most
WIDEST = 32  # columns that a program of the merge takes
MOST_BLOCKS = 65535  # of a grid's second and third dimension
# by d: (B_c, warps, stages, programs on an SM)
HOPPER = {16: (128, 4, 4, 2), 32: (128, 4, 4, 2), 64: (128, 4, 3, 2), 128: (64, 4, 3, 2), 256: (32, 4, 3, 2)}
AMPERE = {16: (128, 4, 3, 2), 32: (128, 4, 3, 2), 64: (64, 4, 3, 2), 128: (32, 4, 3, 2), 256: (16, 4, 3, 2)}
CDNA = {16: (128, 4, 2, 2), 32: (128, 4, 2, 2), 64: (64, 4, 2, 2), 128: (32, 4, 2, 2), 256: (16, 4, 2, 2)}
FP32 = {16: (64, 4, 2, 2), 32: (64, 4, 2, 2), 64: (64, 4, 2, 2), 128: (64, 4, 2, 2), 256: (16, 4, 2, 2)}
INTERPRETED = 64, 1, 1, 4


class Early(launch.Blocks):
    """Of a kernel that is launched while the one before it still runs, and waits for it by itself (Hopper and on)."""

    def compiler_options(self) -> dict:
        return super().compiler_options() | dict(launch_pdl=True)


@dataclass(frozen=True)
class Recipe:
    """All that calls on tensors of the same shapes and strides have in common."""

    teams: bool  # or shares
    split: launch.Plan
    merge: launch.Plan | None  # nothing to merge where every program takes whole heads
    scratch: int  # numbers in fp32


def wins(Q, K, seed) -> bool:
    """Whether decode takes such tensors and is the faster kernel: few rows to a K/V head, or a longer cache."""
    if seed is not None or Q.shape[2] > 16:
        return False
    rows = Q.shape[1] // K.shape[1] * Q.shape[2]
    return rows <= 16 or (rows <= ROWS and K.shape[2] >= 2048)


def decode(Q, K, V, key_lengths, causal, scale, table=None, programs=None):
    """O like Q, and L (batch, heads, N_q): attention of a few queries, whose result does not depend on the split.

    With a table (batch, width), K and V are pages (pages, page_size, kv heads, d), in which key_lengths keys are real.
    """
    return prepare(Q, K, V, key_lengths, causal, scale, table, programs)(Q, K, V, key_lengths, table=table)


def prepare(Q, K, V, key_lengths, causal, scale, table=None, programs=None):
    """decode() for calls of one kind, given (Q, K, V, key_lengths, no seed, table): what is the same is done once."""
    made = recipe(Q, K, V, key_lengths, table, causal, programs, scale)
    (batch, H, N_q, _), device, floats = Q.shape, Q.device, launch.scales(scale)

    def call(Q, K, V, key_lengths, seed=None, table=None):
        O = torch.empty_like(Q)
        L = torch.empty(batch, H, N_q, dtype=torch.float32, device=device)
        parts = torch.empty(made.scratch, dtype=torch.float32, device=device)
        with launch.on_device_of(Q):
            if made.teams:
                made.split.launch(team_kernel, (Q, K, V, O, L, parts), floats)
            else:
                made.split.launch(share_kernel, (Q, K, V, O, L, parts, key_lengths, table), floats)
            if made.merge is not None:
                made.merge.launch(merge_kernel, (O, L, parts, key_lengths), floats)
        return O, L

    return call


def recipe(Q, K, V, key_lengths, table, causal, programs, scale=0.0) -> Recipe:
    """The launches for one kind of call."""
    key = "decode", causal, programs, scale, *map(kind_of, (Q, K, V, key_lengths, table))
    return prepared(key, plan_decode, Q, K, V, key_lengths, table, causal, programs)


def plan_decode(Q, K, V, key_lengths, table, causal, programs) -> Recipe:
    """How the turns are shared out, and both kernels' arguments."""
    (batch, H, N_q, d), O = Q.shape, torch.empty_like(Q, device="meta")
    H_kv, N_k, PAGE, pages, width, *cache_strides = cache_of(K, V, table)
    strides = Q.stride()[:3], *cache_strides, O.stride()[:3]
    rows, equal = H // H_kv * N_q, batch * H_kv if key_lengths is None else 0
    blocks, at_once = sizes(Q, rows, table is not None, equal, N_k)
    R, d_pad, row_blocks = min(blocks.B_r, rows), blocks.d_pad, triton.cdiv(rows, blocks.B_r)
    heads, turns = H_kv * row_blocks, triton.cdiv(N_k, blocks.B_c) + 1
    least = splits.least_share(R, d_pad, blocks.B_c, Q.element_size())
    teams = equal and not programs and max(batch, heads) <= MOST_BLOCKS
    team = splits.team(at_once, batch * heads, turns - 1, least) if teams else 0
    programs = programs or team * batch * heads or at_once
    slots = programs + batch * heads
    if equal:
        least = max(triton.cdiv(batch * heads * turns, programs), least)
    kind = Early if early(Q.device) else launch.Blocks
    common, shares = (H, H // H_kv, N_q, N_k), (batch, heads, R, programs, slots, least)
    constants = d, d_pad, blocks.B_r, blocks.B_c, kind is Early
    if team:
        masked = N_k % blocks.B_c != 0 or (causal and N_q > 1)  # some tile holds what some row must not see
        fixed, own = (*strides, *common, heads, R, slots, team), (row_blocks, team == 1, masked, blocks.upcast)
        split = launch.Plan(blocks, (team, heads, batch), fixed, (causal, *constants, *own))
    else:
        fixed = *strides, pages, width, *common, *shares
        split = launch.Plan(blocks, programs, fixed, (causal, PAGE, *constants, blocks.upcast))
    merge = None
    if not equal or least % turns:  # a program's share is no whole number of heads
        PARTS = min(64, max(4, triton.next_power_of_2(programs // (batch * heads) + 2)))
        WIDTH = min(d_pad, WIDEST)
        few = kind(blocks.B_r, blocks.B_c, min(4, max(1, PARTS * WIDTH // 1024)), 1, blocks.registers and 128)
        fixed, own = (strides[3], *common, *shares, team), (team > 0, PARTS, WIDTH)
        merge = launch.Plan(few, batch * H * N_q * (d_pad // WIDTH), fixed, (*constants, *own))
    return Recipe(team > 0, split, merge, slots * R * (d_pad + 2) if merge else 0)


def cache_of(K, V, table) -> tuple:
    """K/V heads, most keys of a sequence, page size, pages, table's width; strides (sequence or page, head, key)."""
    if table is None:
        return K.shape[1], K.shape[2], 0, 0, 0, K.stride()[:3], V.stride()[:3]
    (pages, PAGE, H_kv, _), width = K.shape, table.shape[1]
    return H_kv, width * PAGE, PAGE, pages, width, *((x.stride(0), x.stride(2), x.stride(1)) for x in (K, V))


def sizes(Q: torch.Tensor, rows: int, paged=False, equal=0, N_k=0) -> tuple[launch.Blocks, int]:
    """Block sizes for so many rows, and how many programs run at once; `equal` counts heads of one length N_k.

    Hopper reads best with 96 KiB on their way to each SM: with more requests queue up, and some SMs wait longer than
    others. That is one program on an SM if whole heads fill the SMs so, or at d 128 teams for one query each; at d 64
    else three with smaller tiles. Where a program may have to begin several heads, two cover for each other.
    """
    d_pad, SMs, table, entry, fp32 = launch.padded(Q.shape[3]), 1, None, INTERPRETED, Q.dtype == torch.float32
    if not interpreter.switched_on():
        SMs, table = multiprocessors(Q.device), family()
        entry = (FP32 if fp32 else table)[d_pad]
    B_c, warps, stages, held = entry
    B_r = min(ROWS, max(16, triton.next_power_of_2(rows)))
    if table is HOPPER and not fp32 and d_pad in (64, 128) and B_r == 16:
        team = splits.team(SMs, equal, triton.cdiv(N_k, B_c)) if 0 < equal <= SMs else 0
        if team == 1 or (team and d_pad == 128 and Q.shape[2] == 1):
            stages, held = 4, 1
        elif d_pad == 64 and not splits.whole(SMs * held, equal):
            B_c, held = B_c // 2, 3
    if B_r == ROWS:  # a large state leaves few registers
        B_c, stages = 16 if table is AMPERE else max(16, B_c // 2), stages + (table is HOPPER)
    stages += 2 * (paged and stages > 2)  # the entries of the table are on their way before the pages are
    registers = None if table in (None, CDNA) else 240 if fp32 else 168 if held == 3 else 255
    blocks = launch.Blocks(B_r, B_c, warps, stages, registers, d_pad=d_pad, upcast=launch.upcast(Q))
    return blocks, SMs * held


def family() -> dict:
    """The table for the GPU that the current driver speaks to."""
    theirs = launch.family()
    return HOPPER if theirs is launch.HOPPER else CDNA if theirs is launch.CDNA else AMPERE


@cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; of one that is not here, an H100's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def early(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it still runs."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
