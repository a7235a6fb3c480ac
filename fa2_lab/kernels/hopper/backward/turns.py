"""A fixed order of the additions to dQ, so that it is the same, bit by bit, each time.

Every place that is added to has a counter in HBM: how many have added so far. A consumer waits for its turn, has its
part added, and counts a step later, when the addition has long ended. At a row block it is the turn of the last column
block that sees it first, and so on to the left.

Nobody waits for ever: whoever is waited for has a lower number at the tile scheduler, and every number, also a
program's first, is drawn by a program that runs. And under the causal mask nobody waits long: the first rows that a
column block visits are seen by no column block further right.

Counters are relaxed: counters and sums meet in L2, and what the copy engine says is in memory has ended there. By the
letter of PTX's rules `release` would be asked for; with it a thread waits for all that it has written elsewhere, too.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2_lab.kernels.hopper.shared.aggregate import aggregate
from fa2_lab.kernels.hopper.shared.mailbox import all_threads

LOOK = gl.constexpr("ld.relaxed.gpu.global.u32 $0, [$1];")
UNTIL = gl.constexpr("""{
.reg .pred p;
.reg .u32 count;
mov.u32 count, $3;
setp.ge.u32 p, count, $2;
vote.sync.all.pred p, p, -1;
@p bra.uni DONE;
AGAIN:
ld.acquire.gpu.global.u32 count, [$1];
setp.lt.u32 p, count, $2;
vote.sync.any.pred p, p, -1;
@p bra.uni AGAIN;
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
    def pass_on(self, place, later: gl.constexpr, when=None):
        """It is the next one's turn, as soon as all is in HBM that the copy engine was given but the `later` last."""
        gl.inline_asm_elementwise(in_memory(later), "=r", [], gl.int32, is_pure=False, pack=1)
        all_threads()  # one of them has given it to the copy engine, another one counts
        gl.atomic_add(self.counters + place, 1, mask=when, sem="relaxed")


@gluon.constexpr_function
def in_memory(later):
    """Wait until all additions and copies that this thread has started, but the last ones, can be seen by everybody."""
    return f"cp.async.bulk.wait_group {later}; mov.u32 $0, 0;"
