"""Synchronization of a thread block's warps: rings of tiles in shared memory, and ping-pong.

A thread block has one producer warp, which starts the TMA copies, and one to three consumer warpgroups of 4 warps,
which compute. Producer and consumers synchronize only at barriers in shared memory. A barrier flips its phase, 0 or 1,
once all expected arrivals have occurred. A warp that waits at a barrier specifies the phase that has to end.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from fa2_lab.kernels.hopper.shared.descriptors import tile_at


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr, USED: gl.constexpr = True):
    """Allocate `number` barriers, each of whose phases ends after `arrivals` arrivals.

    USED must be false if no warp ever waits on the barriers. In that case, the barriers are not initialized, because
    the compiler reuses their memory, for example for a mailbox's fields. If they were initialized, these fields would
    contain 0x1ffffe, the bits of a new barrier, once the GPU has paused and resumed a process.
    """
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number if USED else 0):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


# Rings of tiles ---------------------------------------------------------------------------------------------


@triton.aggregate
class TmaPipeline:
    """A ring (circular buffer) of tiles in shared memory, filled by TMA copies, with one tile per stage.

    The methods correspond to those of CUTLASS's pipelines: acquire() to producer_acquire, wait() to consumer_wait, and
    release() to consumer_release. load() first calls acquire() if the ring has its own barriers for empty stages, and
    then starts the copy. `filled` and `emptied` correspond to CUTLASS's full and empty barriers.
    """

    tiles: gl.shared_memory_descriptor  # (stages, …, rows, d)
    filled: gl.shared_memory_descriptor  # one barrier per stage, on which consumers wait for the producer's copy
    emptied: gl.shared_memory_descriptor  # one barrier per stage, on which the producer waits until the stage is empty
    stages: gl.constexpr
    OWN_EMPTY_BARRIERS: gl.constexpr  # whether the ring uses its own `emptied` barriers instead of another ring's

    @gluon.jit
    def load(self, n, source, batch_or_end, head, row, N):
        """Producer: start copying rows of `source`, beginning with row `row`, into the n-th tile's stage.

        If OWN_EMPTY_BARRIERS is set, first wait until the stage is empty. Otherwise, the caller must ensure that it is
        empty. Rows at or beyond N are filled with zeros.
        """
        stage = n % self.stages
        if self.OWN_EMPTY_BARRIERS:
            self.acquire(n)
        mbarrier.expect(self.filled.index(stage), source.block_type.nbytes)
        at = tile_at(source, batch_or_end, head, row, N)
        tma.async_load(source, at, self.filled.index(stage), self.tiles.index(stage))

    @gluon.jit
    def acquire(self, n):
        """Producer: wait until the n-th tile's stage is empty."""
        mbarrier.wait(self.emptied.index(n % self.stages), (n // self.stages & 1) ^ 1)

    @gluon.jit
    def wait(self, n):
        """Consumer: wait until the n-th tile has arrived in shared memory, and return it as (rows, d)."""
        stage = n % self.stages
        mbarrier.wait(self.filled.index(stage), n // self.stages & 1)
        return matrix(self.tiles.index(stage))

    @gluon.jit
    def release(self, n):
        """Consumer: signal to the producer that this consumer has finished reading the n-th tile."""
        mbarrier.arrive(self.emptied.index(n % self.stages), count=1)


@gluon.jit
def new_pipeline(source, stages: gl.constexpr, consumers: gl.constexpr, OWN_EMPTY_BARRIERS: gl.constexpr = True):
    """Create an empty ring of `stages` stages for tiles with the block shape of descriptor `source`.

    A stage is empty again once `consumers` consumers have released its tile. If OWN_EMPTY_BARRIERS is false, consumers
    never release this ring's tiles. The forward kernel uses this option for V's ring because a consumer releases K's
    tile n only when it has also finished with V's tile n − 1. The producer must therefore wait for K's stage first.
    """
    tiles = gl.allocate_shared_memory(source.dtype, stacked(stages, source.block_shape), source.layout)
    emptied = barriers(stages, consumers, OWN_EMPTY_BARRIERS)
    return TmaPipeline(tiles, barriers(stages, 1), emptied, stages, OWN_EMPTY_BARRIERS)


# Ping-pong --------------------------------------------------------------------------------------------------


@triton.aggregate
class PingPong:
    """The order in which consumers start their matmuls: one after another, each during another consumer's softmax.

    The last consumer is followed by consumer 0. If USED is false, consumers do not wait for each other.
    """

    # One barrier per consumer, on which the consumer waits until the preceding one has started its matmuls.
    begun: gl.shared_memory_descriptor
    consumers: gl.constexpr
    USED: gl.constexpr

    @gluon.jit
    def wait(self, c: gl.constexpr, n):
        """Wait until consumer c may start its matmuls for the n-th time."""
        if self.USED:
            mbarrier.wait(self.begun.index(c), n & 1)

    @gluon.jit
    def pass_on(self, c: gl.constexpr):
        """Allow the next consumer to start its matmuls. Call this method once consumer c has started its own."""
        if self.USED:
            mbarrier.arrive(self.begun.index((c + 1) % self.consumers), count=1)


@gluon.jit
def new_ping_pong(consumers: gl.constexpr, USED: gl.constexpr):
    """Create the barriers with which `consumers` consumers take turns, starting with consumer 0.

    If USED is false, the consumers do not take turns.
    """
    begun = barriers(consumers, 1, USED)
    if USED:
        mbarrier.arrive(begun.index(0), count=1)
    return PingPong(begun, consumers, USED)


# Tiles ------------------------------------------------------------------------------------------------------


@gluon.jit
def matrix(tile):
    """Return a tile in shared memory as (rows, d), without its leading dimensions of size 1."""
    return tile.reshape([tile.shape[-2], tile.shape[-1]])


@gluon.constexpr_function
def stacked(n, block):
    """Return the shape of an array that holds n tiles of shape `block`."""
    return [n, *block]


@gluon.jit
def zero_oob_rows(tile, real, BEFORE: gl.constexpr = False):
    """Zero the rows of a tile at or beyond `real` or, if BEFORE is set, the rows before `real`.

    P is 0 for the keys in these rows, but the product of 0 and an unused key or value may be NaN. All consumers write
    the same bits, so they may write concurrently.
    """
    ROWS: gl.constexpr = tile.shape[0]
    PART: gl.constexpr = 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if real > 0 if BEFORE else real < ROWS:
        for at in gl.static_range(0, ROWS, PART):
            part = tile.slice(at, PART, 0)
            row = at + gl.arange(0, PART, gl.SliceLayout(1, LAYOUT))
            keep = row >= real if BEFORE else row < real
            x = part.load(LAYOUT)
            part.store(gl.where(keep[:, None], x, gl.zeros_like(x)))
        fence_async_shared()


@gluon.jit
def matmul_over_d(a, b, acc, SKIP_LAST_QUARTER: gl.constexpr, USE_ACC: gl.constexpr = True):
    """Start the matmul a bᵀ, and return its accumulator. If USE_ACC is set, the accumulator is initialized to acc.

    If SKIP_LAST_QUARTER is set, the matmul leaves out the last quarter of the columns of a and b, which is padding.
    """
    HALF: gl.constexpr = a.shape[1] // 2
    if SKIP_LAST_QUARTER:
        left, b_left = a.slice(0, HALF, 1), b.slice(0, HALF, 1)
        acc = warpgroup_mma(left, b_left.permute((1, 0)), acc, use_acc=USE_ACC, is_async=True)
        right, b_right = a.slice(HALF, HALF // 2, 1), b.slice(HALF, HALF // 2, 1)
        return warpgroup_mma(right, b_right.permute((1, 0)), acc, is_async=True)
    else:
        return warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def opaque_smem(tile):
    """Return a tile in shared memory unchanged, but make the compiler compute its addresses at this point.

    Otherwise, the compiler would keep the addresses in registers.
    """
    zero = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
    return tile.reinterpret(tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout).index(zero)


@gluon.constexpr_function
def acc_layout(columns):
    """Return the layout of a warpgroup's (64, columns) accumulator in a matmul: 16 rows per warp, 4 lanes per row."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def as_operand(p, dtype: gl.constexpr, columns: gl.constexpr):
    """Convert p to `dtype` and to the layout of the left operand of a matmul whose result has `columns` columns.

    No element moves to another thread.
    """
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc_layout(columns), 2))
