"""A fixed order of the additions to dQ, so that it is the same, bit by bit, each time.

Every place that is added to has a counter in HBM: how many have added so far. A consumer waits for its turn, has its
part added, and counts when the addition has ended, which is a step later: so it waits for nothing then. At a row block
it is the turn of the last column block that sees it first, and so on to the left.

Nobody waits for ever: whoever is waited for has a lower number at the tile scheduler, and every number, also a
program's first, is drawn by a program that runs. And under the causal mask nobody waits long: the first rows that a
column block visits are seen by no column block further right.

Counters and sums both live in L2, where additions that have ended are ended for everybody. So counts are relaxed: a
release would have the memory system finish all else, too, and took a tenth of the time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2_lab.kernels.hopper.shared.aggregate import aggregate

LOOK = gl.constexpr("ld.relaxed.gpu.global.u32 $0, [$1];")
UNTIL = gl.constexpr("""{
.reg .pred p;
.reg .u32 count;
mov.u32 count, $3;
AGAIN:
setp.lt.u32 p, count, $2;
vote.sync.any.pred p, p, -1;
@!p bra.uni DONE;
ld.relaxed.gpu.global.u32 count, [$1];
bra.uni AGAIN;
DONE:
fence.proxy.async.global;
mov.u32 $0, count;
}""")  # the fence: the copy engine, which reaches memory by another way, must not add before this


@aggregate
class Turns:
    """Counters, all 0 at first: for each consumer's part of a row block, then for its part of a column block."""

    counters: gl.tensor  # pointer; without USED nobody waits, and nobody reads it
    USED: gl.constexpr

    @gluon.jit
    def look(self, place):
        """How many have added to this place; the answer is on its way while other things are done."""
        return gl.inline_asm_elementwise(LOOK, "=r,l", [self.counters + place], gl.int32, is_pure=False, pack=1)

    @gluon.jit
    def wait(self, place, turn, count):
        """Until so many have added to this place, where it had this count."""
        given = [self.counters + place, turn, count]
        gl.inline_asm_elementwise(UNTIL, "=r,l,r,r", given, gl.int32, is_pure=False, pack=1)

    @gluon.jit
    def pass_on(self, place, when=None):
        """It is the next one's turn. All threads must have met since the addition was in memory."""
        gl.atomic_add(self.counters + place, 1, mask=when, sem="relaxed")


@gluon.jit
def in_memory(later: gl.constexpr):
    """Wait until all that the copy engine was given is in HBM, but for the `later` last."""
    gl.inline_asm_elementwise(wait_group(later), "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def wait_group(later):
    """tma.store_wait returns sooner, when the engine has read shared memory."""
    return f"cp.async.bulk.wait_group {later}; mov.u32 $0, 0;"
