"""A fixed order of the additions to dQ, so that dQ has the same bits in every run.

Each place to which several consumers add has a counter in global memory, which counts the additions so far. A consumer
leaves its part of dQ in shared memory and goes on. Its writer, a warp of its own, waits for the turn of that part, has
the copy engine add it, and increases the counter when that is done. In a row block, the last column block that sees it
adds first, and then the others follow to the left.

No writer waits forever. The part that it waits for belongs to a column block with a lower number at the tile scheduler,
and every number, even the first of a program, is drawn by a program that already runs. This needs packed sequences
whose starts never run backwards. Otherwise some column blocks that are waited for are handed out to no program, so for
such starts bwd_preprocess (sums.py) makes the counters begin past every turn, and no writer waits at all. Under the
causal mask no writer waits long, because no column block further right sees the first rows that a column block visits.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fa2_lab.kernels.hopper.backward.rows import CONSUMERS
from fa2_lab.kernels.hopper.backward.sums import as_held
from fa2_lab.kernels.hopper.shared.mailbox import all_threads
from fa2_lab.kernels.hopper.shared.pipeline import barriers

UNTIL = gl.constexpr("""{
.reg .pred early;
.reg .u32 count;
AGAIN:
ld.acquire.gpu.global.u32 count, [$1];
setp.lt.u32 early, count, $2;
@early bra AGAIN;
fence.proxy.async.global;
mov.u32 $0, count;
}""")  # the fence: the copy engine, which reaches memory by another way, must not add before this
IN_MEMORY = gl.constexpr("cp.async.bulk.wait_group 0; mov.u32 $0, 0;")


@triton.aggregate
class Semaphore:
    """Counters for each consumer's part of a row block, followed by those for its part of a column block.

    They begin at 0, unless starts run backwards. Without USED nobody waits, and there are no counters.
    """

    counters: gl.tensor | gl.constexpr  # pointer, or None
    handed: gl.shared_memory_descriptor  # two barriers a consumer: a part of dQ lies there, and it has been read
    USED: gl.constexpr

    @gluon.jit
    def hand_over(self, c: gl.constexpr, dq, place):
        """Consumer c: leave its part of a row block for its writer. Call wait_for_room() first."""
        tma.store_wait(0)  # dK and dV go through the same place
        place.store(as_held(dq))
        fence_async_shared()
        mbarrier.arrive(self.handed.index(2 * c), count=1)

    @gluon.jit
    def wait_for_room(self, c: gl.constexpr, n):
        """Consumer c: wait until its parts of all row blocks before the n-th have been read."""
        if self.USED:
            mbarrier.wait(self.handed.index(2 * c + 1), (n & 1) ^ 1)

    @gluon.jit
    def add(self, c: gl.constexpr, n, rows, sums, place):
        """Writer: have consumer c's part of the n-th row block added when it is its turn."""
        mbarrier.wait(self.handed.index(2 * c), n & 1)
        number, turn = rows.number(n) * CONSUMERS + c, rows.turn(n)
        self.wait(number, turn)
        tma.async_atomic_add(sums, [number * place.shape[0], 0], place)  # FA2.A2.L15
        tma.store_wait(0)
        all_threads()
        mbarrier.arrive(self.handed.index(2 * c + 1), count=1)
        self.pass_on(number)

    @gluon.jit
    def wait(self, number, turn):
        """Wait until `turn` consumers have added to the place with this number."""
        given = [self.counters + number, turn]
        gl.inline_asm_elementwise(UNTIL, "=r,l,r", given, gl.int32, is_pure=False, pack=1)

    @gluon.jit
    def pass_on(self, number):
        """Pass the turn to the next consumer, once everything given to the copy engine is in memory."""
        gl.inline_asm_elementwise(IN_MEMORY, "=r", [], gl.int32, is_pure=False, pack=1)
        all_threads()  # one of them has given it to the copy engine, another one counts
        gl.atomic_add(self.counters + number, 1, sem="release")


@gluon.jit
def new_semaphore(counters):
    """Create the semaphore of all consumers and their writers."""
    USED: gl.constexpr = counters is not None
    return Semaphore(counters, barriers(2 * CONSUMERS, 1, USED), USED)
