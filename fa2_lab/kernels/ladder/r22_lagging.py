"""Rung 22, lagging: m is raised to the maximum only if a score exceeds m by more than 8, so that o is seldom rescaled.

Any value can take the place of the maximum, because it cancels out of O and L. The maximum only prevents p from
overflowing, and 2⁸ is far from an overflow. As long as m does not change, the 4 lanes of a row exchange no data. Each
lane therefore keeps its own partial sum of ℓ until the last tile, and multiplications by alpha = 1 are skipped. Two
blocks of inline PTX let a warp jump over the instructions that it does not need.
"""

import math
from collections import namedtuple
from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

NEG_INF = gl.constexpr(float("-inf"))
LOWEST = gl.constexpr(-1.0e30)  # initial value of m; −∞ would give −∞ − (−∞) = NaN in rows without keys
LN2 = gl.constexpr(math.log(2))
LAG = gl.constexpr(8.0)  # m is raised if a score, as an exponent of 2, exceeds m by more than LAG
CONFIGS = {64: (3, 128, 4), 128: (2, 128, 2)}  # {d: (consumers, keys per tile, stages)}, chosen to fit on an SM
counter_on = cache(lambda device: torch.zeros(1, dtype=torch.int32, device=device))  # 0 before and after every launch
Ring = namedtuple("Ring", "tiles filled emptied")  # tiles of shape (stages, 1, rows, d), and two barriers per stage


@gluon.jit
def keys_seen(row, N_q, N_k, CAUSAL: gl.constexpr):
    """Return how many keys each row sees, counting from key 0. If CAUSAL, the last row sees all N_k keys."""
    return gl.minimum(gl.maximum(row + 1 + N_k - N_q, 0), N_k) if CAUSAL else N_k + 0 * row


@gluon.jit
def block_coord(t, N_q, N_k, heads, l2_group, CAUSAL: gl.constexpr, B_r: gl.constexpr, B_c: gl.constexpr):
    """Return the t-th row block's first row, head and number of tiles. l2_group heads run concurrently."""
    T_r = gl.cdiv(N_q, B_r)
    section, within = t // (l2_group * T_r), t % (l2_group * T_r)
    width = gl.minimum(l2_group, heads - section * l2_group)
    i = (T_r - 1 - within // width) * B_r  # start with the row blocks that see the most keys
    T_c = gl.maximum(gl.cdiv(keys_seen(i + B_r - 1, N_q, N_k, CAUSAL), B_c), 1)  # one tile even if no row sees a key
    return i, section * l2_group + within % width, T_c


@gluon.jit
def tile_buffers(X, STAGES: gl.constexpr):
    """Allocate shared memory for STAGES tiles, each with the block shape of descriptor X."""
    return gl.allocate_shared_memory(X.dtype, [STAGES, 1, X.block_shape[1], X.block_shape[2]], X.layout)


@gluon.jit
def ring(tiles, CONSUMERS: gl.constexpr):
    """Create an empty ring from `tiles` in shared memory, with one `filled` and one `emptied` barrier per stage."""
    STAGES: gl.constexpr = tiles.shape[0]
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(emptied.index(stage), count=CONSUMERS)
    return Ring(tiles, filled, emptied)


@gluon.jit
def load(ring, n, X, head, row):
    """Producer: wait until the n-th tile's stage is empty, then start copying the tile of X at (head, row) into it."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.emptied.index(n % STAGES), (n // STAGES & 1) ^ 1)
    mbarrier.expect(ring.filled.index(n % STAGES), X.block_type.nbytes)
    tma.async_load(X, [head, row, 0], ring.filled.index(n % STAGES), ring.tiles.index(n % STAGES))


@gluon.jit
def wait(ring, n):
    """Consumer: wait until the n-th tile has arrived in shared memory, and return it as (rows, d)."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.filled.index(n % STAGES), n // STAGES & 1)
    return ring.tiles.index(n % STAGES).reshape([ring.tiles.shape[2], ring.tiles.shape[3]])


@gluon.jit
def release(ring, n):
    """Consumer: signal to the producer that this consumer has finished reading the n-th tile."""
    mbarrier.arrive(ring.emptied.index(n % ring.tiles.shape[0]), count=1)


@gluon.jit
def send(mailbox, r, t):
    """Producer: send t, the index of this program's r-th row block (or −1 if none is left), to the consumers."""
    mbarrier.wait(mailbox.emptied.index(0), (r & 1) ^ 1)
    mailbox.tiles.index(0).store(gl.full([1], t, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(mailbox.filled.index(0), count=1)


@gluon.jit
def receive(mailbox, r):
    """Consumer: wait for the index of this program's r-th row block, and return it. If none is left, return −1."""
    mbarrier.wait(mailbox.filled.index(0), r & 1)
    t = gl.max(mailbox.tiles.index(0).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(mailbox.emptied.index(0), count=1)
    return t


@gluon.jit
def scores(q_i, k_j):
    """Start the matmul q_i k_jᵀ of two shared-memory tiles. Each warp gets 16 result rows, with 4 lanes per row."""
    B_c: gl.constexpr = k_j.shape[0]
    zero = gl.zeros([64, B_c], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_c, 16]))
    return hopper.warpgroup_mma(q_i, k_j.permute((1, 0)), zero, use_acc=False, is_async=True)  # (64, B_c)  FA2.A1.L8


@gluon.jit
def mask(s_ij, j, seen):
    """Return s_ij with −∞ for masked keys. Row r sees only the keys before key seen[r], and column 0 is key j."""
    col = gl.arange(0, s_ij.shape[1], gl.SliceLayout(0, s_ij.type.layout))[None, :]
    # only two bits of a column's index, col & 6, depend on the lane; the other bits are constants and need no register
    return gl.where((col & ~6) < (seen - j)[:, None] - (col & 6), s_ij, NEG_INF)  # (64, B_c)


@gluon.jit
def split_lanes(x):
    """Reshape a tile to (64, columns / 8, 4, 2) because each of a row's 4 lanes holds 2 of every 8 columns."""
    return x.reshape([64, x.shape[1] // 8, 4, 2])


@gluon.jit
def broadcast_state(state, x):
    """Reshape `state` (64, 4), with one value per row and lane, so that it broadcasts against x from split_lanes()."""
    return gl.convert_layout(state, gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout)))[:, None, :, None]


PTX_UPDATE_ROW_MAX = gl.constexpr("""{
.reg .pred p, some; .reg .f32 a, b, x, y;
mov.f32 $0, $2; mov.f32 $1, $3;
setp.gt.f32 p, $4, $6; setp.gt.or.f32 p, $5, $7, p;
vote.sync.any.pred some, p, -1; @!some bra.uni DONE;
shfl.sync.bfly.b32 x, $4, 1, 31, -1; max.f32 a, $4, x; shfl.sync.bfly.b32 y, $5, 1, 31, -1; max.f32 b, $5, y;
shfl.sync.bfly.b32 x, a, 2, 31, -1; max.f32 a, a, x; shfl.sync.bfly.b32 y, b, 2, 31, -1; max.f32 b, b, y;
max.f32 $0, $0, a; max.f32 $1, $1, b;
DONE:
}""")  # $0, $1: new m of a thread's two rows; $2, $3: old m; $4, $5: largest scores; $6, $7: their limits


@gluon.jit
def update_row_max(m_i, top, limit):
    """Return the new m (64, 4). If a lane's maximum `top` exceeds its `limit`, the warp raises m to the row maxima."""
    return gl.inline_asm_elementwise(PTX_UPDATE_ROW_MAX, "=&f,=&f,f,f,f,f,f,f", [m_i, top, limit], gl.float32,
                                     is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def softmax(s_ij, l_i, m_i, tau_log2):
    """Update l and m with a tile's scores. Return p, alpha (the factor by which to rescale o), and the new l and m."""
    x = split_lanes(s_ij)  # (64, B_c / 8, 4, 2)
    top = gl.convert_layout(tau_log2 * gl.max(gl.max(x, 3), 1), m_i.type.layout)  # (64, 4)
    m_new = update_row_max(m_i, top, m_i + LAG)  # (64, 4)  FA2.A1.L9
    p_ij = gl.exp2(tau_log2 * x - broadcast_state(m_new, x))  # (64, B_c / 8, 4, 2), each at most 2^LAG  FA2.A1.L9
    alpha = gl.exp2(m_i - m_new)  # (64, 4)  FA2.A1.L9
    l_i = alpha * l_i + gl.sum(gl.sum(p_ij, 3), 1)  # (64, 4)  FA2.A1.L9
    return gl.convert_layout(p_ij.reshape(s_ij.shape), s_ij.type.layout), alpha, l_i, m_new


@gluon.jit
def rounded(p, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Round p to fp16 or bf16, two elements per instruction, and return the result as a matmul's left operand."""
    if dtype == gl.bfloat16:
        p = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.bfloat16, is_pure=True, pack=2)
    else:
        p = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], gl.float16, is_pure=True, pack=2)
    return gl.convert_layout(p, gl.DotOperandLayout(0, LAYOUT, 2))


@gluon.constexpr_function
def multiply_unless_one(n):
    """Return PTX that multiplies n elements of o by their row's alpha, unless alpha is 1 in every row of the warp."""
    test = f"setp.eq.f32 p, ${2 * n}, 1.0; setp.eq.and.f32 p, ${2 * n + 2}, 1.0, p; vote.sync.all.pred all, p, -1;"
    products = [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    return "\n".join(["{ .reg .pred p, all;", test, "@all bra.uni DONE;", *products, "DONE: }"])


@gluon.constexpr_function
def in_place(n):
    """Return inline-PTX constraints for n outputs, n inputs in the outputs' registers, and n other inputs."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescale_o(o_i, alpha):
    """Multiply each row of o by its alpha, except in warps where every alpha is 1, which is the usual case."""
    N: gl.constexpr = o_i.shape[1] // 2  # elements of o per thread
    x, a = gl.broadcast(split_lanes(o_i), broadcast_state(alpha, split_lanes(o_i)))
    x = gl.inline_asm_elementwise(multiply_unless_one(N), in_place(N), [x, a], gl.float32, is_pure=True, pack=N)
    return gl.convert_layout(x.reshape([64, 2 * N]), o_i.type.layout)


@gluon.jit
def producer(Q, K, V, counter, q, k, v, mailbox, N_q, N_k, heads, l2_group, CAUSAL: gl.constexpr):
    """Run the producer warp, which fetches row blocks until none is left, and fills each stage once it is empty."""
    B_c: gl.constexpr = K.block_shape[1]
    CONSUMERS: gl.constexpr = q.tiles.shape[0] // 2
    r, first, t = 0, 0, gl.program_id(0)
    blocks = gl.cdiv(N_q, 64 * CONSUMERS) * heads
    while t < blocks:
        send(mailbox, r, t)
        i, head, T_c = block_coord(t, N_q, N_k, heads, l2_group, CAUSAL, 64 * CONSUMERS, B_c)
        for c in gl.static_range(CONSUMERS):
            load(q, CONSUMERS * r + c, Q, head, i + 64 * c)  # FA2.A1.L4
        for n in range(T_c):  # from right to left, so that the masked tiles come first  FA2.A1.L6
            load(k, first + n, K, head, (T_c - 1 - n) * B_c)  # FA2.A1.L7
            if n == T_c - 1:  # fetch t before the last copy, so that t arrives during that copy
                t = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
            load(v, first + n, V, head, (T_c - 1 - n) * B_c)  # FA2.A1.L7
        r, first = r + 1, first + T_c
    send(mailbox, r, -1)
    if t == gl.num_programs(0) + blocks - 1:  # the last program to fetch resets the counter for the next launch
        gl.store(counter, 0)


@gluon.jit
def consumer(c: gl.constexpr, O, L, q, k, v, o, mailbox, N_q, N_k, heads, l2_group, tau_log2, CAUSAL: gl.constexpr):
    """Run consumer warpgroup c, which computes O and L for its 64 rows in every row block of this program."""
    CONSUMERS: gl.constexpr = q.tiles.shape[0] // 2
    B_c: gl.constexpr = k.tiles.shape[2]
    d: gl.constexpr = k.tiles.shape[3]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, d, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B_c, 16]))
    r, first, t = 0, 0, receive(mailbox, 0)
    while t >= 0:
        i, head, T_c = block_coord(t, N_q, N_k, heads, l2_group, CAUSAL, 64 * CONSUMERS, B_c)
        q_n = CONSUMERS * r + c  # index of this consumer's tile of Q; the row block's tiles of K and V start at `first`
        i = i + 64 * c
        row = i + gl.arange(0, 64, ROWS)  # (64,)
        seen = keys_seen(row, N_q, N_k, CAUSAL)  # (64,)
        full = keys_seen(i, N_q, N_k, CAUSAL) // B_c  # every row sees all keys of the first `full` tiles
        used = gl.where(i < N_q, keys_seen(i + 63, N_q, N_k, CAUSAL), 0)  # 0 keys if these rows do not exist
        own_tiles = gl.maximum(gl.cdiv(used, B_c), 1)  # number of tiles to compute, at least one
        begin, end = first + T_c - own_tiles, first + T_c  # only other consumers' rows see the tiles before `begin`

        q_i = wait(q, q_n)  # FA2.A1.L4
        o_i = gl.zeros([64, d], gl.float32, O_LAYOUT)  # FA2.A1.L5
        for n in range(first, begin):
            wait(k, n)
            release(k, n)
            wait(v, n)
            release(v, n)
        s_ij = scores(q_i, wait(k, begin))  # (64, B_c)  FA2.A1.L8
        s_ij = hopper.warpgroup_mma_wait(0, deps=[s_ij])
        release(k, begin)
        if own_tiles > full:
            s_ij = mask(s_ij, (own_tiles - 1) * B_c, seen)
        LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, split_lanes(s_ij).type.layout))
        l_i = gl.zeros([64, 4], gl.float32, LANES)  # FA2.A1.L5
        m_i = gl.full([64, 4], LOWEST, gl.float32, LANES)  # FA2.A1.L5
        p_ij, alpha, l_i, m_i = softmax(s_ij, l_i, m_i, tau_log2)
        p_ij = rounded(p_ij, O.dtype, O_LAYOUT)
        for n in range(begin + 1, end):  # FA2.A1.L6
            j = end - 1 - n
            s_ij = scores(q_i, wait(k, n))  # (64, B_c)  FA2.A1.L8
            o_i = hopper.warpgroup_mma(p_ij, wait(v, n - 1), o_i, is_async=True)  # (64, d)  FA2.A1.L10
            s_ij = hopper.warpgroup_mma_wait(1, deps=[s_ij])
            release(k, n)
            if CAUSAL:
                if j >= full:
                    s_ij = mask(s_ij, j * B_c, seen)
            p_next, alpha, l_i, m_i = softmax(s_ij, l_i, m_i, tau_log2)
            p_next = rounded(p_next, O.dtype, O_LAYOUT)
            o_i, p_ij = hopper.warpgroup_mma_wait(0, deps=[o_i, p_ij])
            release(v, n - 1)
            o_i = rescale_o(o_i, alpha)
            p_ij = p_next
        release(q, q_n)
        o_i = hopper.warpgroup_mma(p_ij, wait(v, end - 1), o_i, is_async=True)  # (64, d)  FA2.A1.L10
        o_i = hopper.warpgroup_mma_wait(0, deps=[o_i])
        release(v, end - 1)

        l_i, m_i = gl.convert_layout(gl.sum(l_i, 1), ROWS), gl.convert_layout(gl.max(m_i, 1), ROWS)  # (64,)
        empty = l_i == 0.0  # a row that sees no key gets O = 0 and L = −∞
        l_i = gl.where(empty, 1.0, l_i)
        o_i = gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, O_LAYOUT))[:, None] * o_i  # (64, d)  FA2.A1.L12
        L_i = gl.where(empty, NEG_INF, (m_i + gl.log2(l_i)) * LN2)  # (64,)  FA2.A1.L13
        tma.store_wait(0)  # wait until TMA has read the previous row block's O from o
        o.index(c).reshape([64, d]).store(o_i.to(O.dtype))
        hopper.fence_async_shared()
        tma.async_store(O, [head, i, 0], o.index(c))  # FA2.A1.L14
        gl.store(L + head.to(gl.int64) * N_q + row, L_i, mask=row < N_q)  # FA2.A1.L15
        r, first = r + 1, first + T_c
        t = receive(mailbox, r)
    tma.store_wait(0)  # wait for the last copy because shared memory is freed when the program ends


@gluon.jit
def forward_kernel(Q, K, V, O, L, counter, N_q, N_k, heads, l2_group, tau_log2, CAUSAL: gl.constexpr,
                   CONSUMERS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Compute O and L for the row blocks that this persistent program fetches. Q, K, V and O are TMA descriptors."""
    q, o = ring(tile_buffers(Q, 2 * CONSUMERS), 1), tile_buffers(O, CONSUMERS)
    k, v = ring(tile_buffers(K, STAGES), CONSUMERS), ring(tile_buffers(V, STAGES), CONSUMERS)
    mailbox = ring(gl.allocate_shared_memory(gl.int32, [1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), CONSUMERS)
    hopper.fence_async_shared()  # make the barriers visible to TMA
    first = (0, O, L, q, k, v, o, mailbox, N_q, N_k, heads, l2_group, tau_log2, CAUSAL)
    second = (1, O, L, q, k, v, o, mailbox, N_q, N_k, heads, l2_group, tau_log2, CAUSAL)
    third = (2, O, L, q, k, v, o, mailbox, N_q, N_k, heads, l2_group, tau_log2, CAUSAL)
    copy = (Q, K, V, counter, q, k, v, mailbox, N_q, N_k, heads, l2_group, CAUSAL)
    if CONSUMERS == 2:
        gl.warp_specialize([(consumer, first), (consumer, second), (producer, copy)], [4, 1], [240, 24])
    else:
        gl.warp_specialize([(consumer, first), (consumer, second), (consumer, third), (producer, copy)],
                           [4, 4, 1], [160, 160, 24])  # fmt: skip


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return O, shaped like q, and L (batch, heads, N_q), the natural log-sum-exp of each row's scores."""
    (batch, heads, N_q, d), N_k = q.shape, k.shape[2]
    O = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    L = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    l2_group = max(1, 2**24 // (2 * N_k * d * q.element_size()))  # number of heads whose K and V fill 16 MiB of L2
    consumers, B_c, stages = CONFIGS[d]
    SMs = torch.cuda.get_device_properties(q.device).multi_processor_count
    grid = (min(SMs, triton.cdiv(N_q, 64 * consumers) * batch * heads),)  # FA2.A1.L1 FA2.A1.L2
    layout = gl.NVMMASharedLayout.get_default_for([1, 64, d], gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16)
    blocks = zip((q, k, v, O), (64, B_c, B_c, 64), strict=True)
    tiles = [TensorDescriptor.from_tensor(X.contiguous().view(-1, *X.shape[2:]), [1, B, d], layout) for X, B in blocks]
    forward_kernel[grid](*tiles, L, counter_on(q.device), N_q, N_k, batch * heads, l2_group, d**-0.5 / math.log(2),
                         CAUSAL=causal, CONSUMERS=consumers, STAGES=stages, num_warps=4,
                         enable_fp_fusion=True)  # fmt: skip
    return O, L  # FA2.A1.L17
