"""What the Hopper kernels share: buffers in a ring, turns on the tensor cores, tickets for work.

A thread block holds one producer warp, which starts the bulk copies, and one to three consumer warpgroups of 4 warps,
which compute. They meet only at barriers in shared memory. A barrier has a phase: it flips from 0 to 1 to 0 each time
all expected arrivals are in, and whoever waits names the phase whose end it waits for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate

all_threads = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name before Triton 3.7


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr, USED: gl.constexpr = True):
    """`number` barriers, each of which ends its phase when `arrivals` have come.

    What nobody waits for must not become a barrier. The compiler lets others write to its memory, here the numbers that
    were drawn; when the GPU stopped a process and went on with it, they read 0x1ffffe instead: a new barrier's bits.
    """
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number if USED else 0):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


# Buffers ----------------------------------------------------------------------------------------------------


@aggregate
class Ring:
    """`slots` tiles of shared memory in a circle: the producer fills the n-th, consumers take it, then release it."""

    tiles: gl.shared_memory_descriptor  # (slots, 1, 1, rows, d)
    filled: gl.shared_memory_descriptor  # one barrier a slot: consumers wait here for the producer's copy
    emptied: gl.shared_memory_descriptor  # one barrier a slot: the producer waits here for all consumers
    slots: gl.constexpr
    released: gl.constexpr  # whether anybody releases its tiles; else another ring's releases tell of them

    @gluon.constexpr_function
    def __init__(self, tiles, filled, emptied, slots, released):
        self.tiles = tiles
        self.filled = filled
        self.emptied = emptied
        self.slots = gl.constexpr(slots)
        self.released = gl.constexpr(released)

    @gluon.jit
    def fill(self, n, source, batch, head, row):
        """Producer: copy rows from `row` on into the n-th tile, once its slot is empty; past the end come zeros."""
        slot = n % self.slots
        if self.released:
            self.wait_for_room(n)
        mbarrier.expect(self.filled.index(slot), source.block_type.nbytes)
        tma.async_copy_global_to_shared(source, [batch, head, row, 0], self.filled.index(slot), self.tiles.index(slot))

    @gluon.jit
    def wait_for_room(self, n):
        """Producer: until the slot of the n-th tile is empty."""
        mbarrier.wait(self.emptied.index(n % self.slots), (n // self.slots & 1) ^ 1)

    @gluon.jit
    def take(self, n):
        """Consumer: the n-th tile, as soon as it is there."""  # (rows, d)
        slot = n % self.slots
        mbarrier.wait(self.filled.index(slot), n // self.slots & 1)
        return matrix(self.tiles.index(slot))

    @gluon.jit
    def release(self, n):
        """Consumer: the n-th tile is no longer needed here."""
        mbarrier.arrive(self.emptied.index(n % self.slots), count=1)


@gluon.jit
def matrix(tile):
    """A tile without its two leading dimensions of 1."""  # (rows, d)
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def ring(source, slots: gl.constexpr, consumers: gl.constexpr, RELEASED: gl.constexpr = True):
    """A ring of tiles as `source` describes them, emptied by so many consumers."""
    tiles = gl.allocate_shared_memory(
        source.dtype, [slots, 1, 1, source.block_shape[2], source.block_shape[3]], source.layout
    )
    return Ring(tiles, barriers(slots, 1), barriers(slots, consumers, RELEASED), slots, RELEASED)


# Turns ------------------------------------------------------------------------------------------------------


@aggregate
class Turns:
    """Who may start products now: consumer 0, 1, … and round again, so that one multiplies while another exponentiates.

    Without `used` nobody waits for anybody.
    """

    begun: gl.shared_memory_descriptor  # one barrier a consumer: it waits here for the consumer before it
    consumers: gl.constexpr
    used: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, begun, consumers, used):
        self.begun = begun
        self.consumers = gl.constexpr(consumers)
        self.used = gl.constexpr(used)

    @gluon.jit
    def wait(self, c: gl.constexpr, n):
        """Consumer c waits for its n-th turn."""
        if self.used:
            mbarrier.wait(self.begun.index(c), n & 1)

    @gluon.jit
    def pass_on(self, c: gl.constexpr):
        """Consumer c has started its products: the next one may start."""
        if self.used:
            mbarrier.arrive(self.begun.index((c + 1) % self.consumers), count=1)


@gluon.jit
def turns(consumers: gl.constexpr, used: gl.constexpr):
    """Turns that begin with consumer 0."""
    begun = barriers(consumers, 1, used)
    if used:
        mbarrier.arrive(begun.index(0), count=1)
    return Turns(begun, consumers, used)


# Tickets ----------------------------------------------------------------------------------------------------


@aggregate
class Tickets:
    """Which block is next: the producer draws a number from a counter in HBM, and tells the consumers where that is.

    So a program that is done early takes more. Dealt in advance, the same blocks took up to 1.6 times as long.
    """

    numbers: gl.shared_memory_descriptor  # two tickets of three: row, batch entry, head
    filled: gl.shared_memory_descriptor  # consumers wait here for the ticket
    emptied: gl.shared_memory_descriptor  # the producer waits here until all have read the one before the last

    @gluon.constexpr_function
    def __init__(self, numbers, filled, emptied):
        self.numbers = numbers
        self.filled = filled
        self.emptied = emptied

    @gluon.jit
    def give(self, r, row, batch, head):
        """Producer: where the r-th block is; a row below 0 says that there are no more."""
        slot = r % 2
        mbarrier.wait(self.emptied.index(slot), (r // 2 & 1) ^ 1)
        self.numbers.index(3 * slot).store(gl.full([1], row, gl.int32, one(gl.num_warps())))
        self.numbers.index(3 * slot + 1).store(gl.full([1], batch, gl.int32, one(gl.num_warps())))
        self.numbers.index(3 * slot + 2).store(gl.full([1], head, gl.int32, one(gl.num_warps())))
        all_threads()
        mbarrier.arrive(self.filled.index(slot), count=1)

    @gluon.jit
    def get(self, r):
        """Consumer: where the r-th block is."""
        slot = r % 2
        mbarrier.wait(self.filled.index(slot), r // 2 & 1)
        row = gl.max(self.numbers.index(3 * slot).load(one(gl.num_warps())), 0)
        batch = gl.max(self.numbers.index(3 * slot + 1).load(one(gl.num_warps())), 0)
        head = gl.max(self.numbers.index(3 * slot + 2).load(one(gl.num_warps())), 0)
        all_threads()
        mbarrier.arrive(self.emptied.index(slot), count=1)
        return row, batch, head


@gluon.constexpr_function
def one(warps):
    """One number, the same in every thread."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon.jit
def tickets(consumers: gl.constexpr):
    """Tickets for so many consumers."""
    numbers = gl.allocate_shared_memory(gl.int32, [6, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Tickets(numbers, barriers(2, 1), barriers(2, consumers))


# Tiles in registers ------------------------------------------------------------------------------------------


@gluon.constexpr_function
def accumulator(columns):
    """How one warpgroup holds 64 rows of a product: 16 rows to a warp, a row in the hands of 4 lanes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def as_operand(p, dtype: gl.constexpr, columns: gl.constexpr):
    """p in half precision as the left operand of a product with so many columns: in the registers where it is."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, accumulator(columns), 2))
