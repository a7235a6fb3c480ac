"""A semaphore that fixes the order of the additions to dQ, which makes dQ bitwise identical in every run.

Each tile in HBM to which several consumers add has a counter of the additions so far. A consumer stores its partial dQ
in shared memory and moves on. Its writer, a separate warp, waits until the counter equals this partial dQ's position in
the order (its turn), adds the partial dQ with TMA, and increments the counter once the addition has finished. For each
row block, the last column block that processes it adds first, and the other column blocks follow from right to left.

No writer waits forever. A writer waits only for column blocks that the tile scheduler handed out earlier, and each of
these column blocks, including a program's first one, was fetched by a program that is already running. This guarantee
requires that the starts of packed sequences never decrease. If they do, some of the column blocks for which writers
wait are never fetched. In this case, bwd_preprocess (accumulators.py) sets the counters past every turn, so that no
writer waits at all. Under the causal mask, waits are short because the first rows that a column block processes see no
column block further right.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fa2_lab.kernels.hopper.backward.accumulators import to_fragment_order
from fa2_lab.kernels.hopper.backward.rows import CONSUMERS
from fa2_lab.kernels.hopper.shared.mailbox import all_threads
from fa2_lab.kernels.hopper.shared.pipeline import barriers

PTX_SPIN_UNTIL = gl.constexpr("""{
.reg .pred early;
.reg .u32 count;
AGAIN:
ld.acquire.gpu.global.u32 count, [$1];
setp.lt.u32 early, count, $2;
@early bra AGAIN;
fence.proxy.async.global;
mov.u32 $0, count;
}""")  # the fence keeps TMA, which accesses memory through a different proxy, from adding too early
PTX_WAIT_BULK_GROUP = gl.constexpr("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")


@triton.aggregate
class Semaphore:
    """Counters of additions in HBM: one per consumer and row block, followed by one per consumer and column block.

    Each writer waits until the counter of the tile to which it adds reaches its turn. Counters start at 0. If the
    starts of packed sequences decrease (invalid input), the counters start past the last turn instead, so that no
    writer waits forever. If USED is false, there are no counters, and no writer waits.
    """

    counters: gl.tensor | gl.constexpr  # pointer to the counters, or None
    # Each consumer has two barriers. The first one signals that a result has been stored, and the second one signals
    # that the result has been read.
    handed: gl.shared_memory_descriptor
    USED: gl.constexpr

    @gluon.jit
    def hand_over(self, c: gl.constexpr, dq, buffer):
        """Consumer c: store its partial result dq in the shared-memory buffer, from which its writer adds dq to HBM.

        Call wait_for_room() first.
        """
        tma.store_wait(0)  # wait until earlier copies of dK and dV have read the buffer
        buffer.store(to_fragment_order(dq))
        fence_async_shared()
        mbarrier.arrive(self.handed.index(2 * c), count=1)

    @gluon.jit
    def wait_for_room(self, c: gl.constexpr, n):
        """Consumer c: wait until its writer has read the partial results of all row blocks before the n-th."""
        if self.USED:
            mbarrier.wait(self.handed.index(2 * c + 1), (n & 1) ^ 1)

    @gluon.jit
    def add(self, c: gl.constexpr, n, row_blocks, accum, buffer):
        """Writer: wait until consumer c may add its partial dQ for row block n, and then add it to `accum` with TMA."""
        mbarrier.wait(self.handed.index(2 * c), n & 1)
        sem_index = row_blocks.read(n, "row_block_id") * CONSUMERS + c
        self.wait(sem_index, row_blocks.read(n, "dq_turn"))
        tma.async_atomic_add(accum, [sem_index * buffer.shape[0], 0], buffer)  # FA2.A2.L15
        tma.store_wait(0)
        all_threads()
        mbarrier.arrive(self.handed.index(2 * c + 1), count=1)
        self.pass_on(sem_index)

    @gluon.jit
    def wait(self, sem_index, turn):
        """Wait until `turn` consumers have added to the tile whose counter has index `sem_index`."""
        given = [self.counters + sem_index, turn]
        gl.inline_asm_elementwise(PTX_SPIN_UNTIL, "=r,l,r", given, gl.int32, is_pure=False, pack=1)

    @gluon.jit
    def pass_on(self, sem_index):
        """Increment the counter with index `sem_index` once all of TMA's additions are in memory.

        This allows the next consumer to add to the tile.
        """
        gl.inline_asm_elementwise(PTX_WAIT_BULK_GROUP, "=r", [], gl.int32, is_pure=False, pack=1)
        all_threads()  # the thread that started the TMA addition may not be the one that increments the counter
        gl.atomic_add(self.counters + sem_index, 1, sem="release")


@gluon.jit
def new_semaphore(counters):
    """Create the semaphore that all consumers and their writers share."""
    USED: gl.constexpr = counters is not None
    return Semaphore(counters, barriers(2 * CONSUMERS, 1, USED), USED)
