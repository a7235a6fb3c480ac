"""What the Hopper backward's warps hand each other: orders for column blocks, and the rows that each of them sees.

A column block is 128 keys of one K/V head, 64 for each of two consumer warpgroups. Its rows come in row blocks, from
every query head that shares the K/V head, or from a part of them if the column block is divided among programs. Only
the producer knows where all this lies; consumers are told the rest.

compute-sanitizer's racecheck names write() and read() here: it does not see that barriers in memory order them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fa2_lab.kernels.hopper.shared.pipeline import accumulator, aggregate, all_threads, barriers, matrix, one

CONSUMERS = gl.constexpr(2)
COLS = gl.constexpr(64)  # of one consumer
NOBODY = gl.constexpr(2**30)  # a row that no tile reaches


@aggregate
class Columns:
    """What holds for all column blocks: lengths, heads, and which rows see a column."""

    N_k: gl.tensor
    shift: gl.tensor  # N_q − N_k: with CAUSAL, see seen_from()
    H: gl.tensor  # query heads of one batch entry
    group: gl.tensor  # query heads to one head of K and V
    T_r: gl.tensor  # row blocks of one query head
    parts: gl.tensor  # into how many the row blocks of a column block are divided
    key_lengths: gl.tensor  # pointer to (batch,) int32, to nothing of use without KEYS
    KEYS: gl.constexpr
    RAGGED: gl.constexpr  # whether a column block may reach past the last key
    CAUSAL: gl.constexpr
    B_r: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, N_k, shift, H, group, T_r, parts, key_lengths, KEYS, RAGGED, CAUSAL, B_r):
        self.N_k = N_k
        self.shift = shift
        self.H = H
        self.group = group
        self.T_r = T_r
        self.parts = parts
        self.key_lengths = key_lengths
        self.KEYS = gl.constexpr(KEYS)
        self.RAGGED = gl.constexpr(RAGGED)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.B_r = gl.constexpr(B_r)

    @gluon.jit
    def length(self, batch):
        """How many keys of this batch entry are real; a length outside [0, N_k] counts as the nearest one inside."""
        if self.KEYS:
            length = gl.load(self.key_lengths + batch).to(gl.int64)
            return gl.minimum(gl.maximum(length, 0), self.N_k).to(gl.int32)
        else:
            return self.N_k

    @gluon.jit
    def seen_from(self, col):
        """The first row that sees a column; the causal diagonal ends in the bottom right corner."""
        return col + self.shift if self.CAUSAL else 0

    @gluon.jit
    def first(self, col, length):
        """The first row block that sees a column block; the last one where nobody does: one step there is the least."""
        i = 0
        if self.CAUSAL:
            i = gl.maximum(self.seen_from(col), 0) // self.B_r
        if self.KEYS:
            i = gl.where(col >= length, self.T_r - 1, i)
        return i

    @gluon.jit
    def part(self, part, steps):
        """The first step of a part, and the one after its last; there may be none."""
        return steps * part // self.parts, steps * (part + 1) // self.parts

    @gluon.jit
    def full(self, col, length):
        """The row from which on tiles need no mask."""
        row = 0
        last = col + CONSUMERS * COLS - 1
        if self.CAUSAL:
            row = self.seen_from(last)
        if self.RAGGED:
            row = gl.where(last >= length, NOBODY, row)
        return row

    @gluon.jit
    def limits(self, c: gl.constexpr, r, orders):
        """Consumer c, the r-th order: for each of its columns the first row that sees it; and full()."""  # (64,)
        _, _, col = orders.place(r)
        full, seen_from, length = orders.limits(r)
        key = c * COLS + gl.arange(0, COLS, gl.SliceLayout(1, accumulator(self.B_r)))
        seen_from += key if self.CAUSAL else 0 * key
        if self.RAGGED:
            seen_from = gl.where(key < length - col, seen_from, NOBODY)
        return seen_from, full


# Orders -----------------------------------------------------------------------------------------------------


@aggregate
class Orders:
    """What a consumer must know of its next column block, in eight numbers; the producer writes one order ahead."""

    numbers: gl.shared_memory_descriptor
    filled: gl.shared_memory_descriptor  # consumers wait here for an order
    emptied: gl.shared_memory_descriptor  # the producer waits here until both are done with the one before the last

    @gluon.constexpr_function
    def __init__(self, numbers, filled, emptied):
        self.numbers = numbers
        self.filled = filled
        self.emptied = emptied

    @gluon.jit
    def give(self, r, steps, batch, head, col, full, seen_from, length, number):
        """Producer: the r-th order; 0 steps means that there are no more."""
        mbarrier.wait(self.emptied.index(r & 1), (r >> 1 & 1) ^ 1)
        at = (r & 1) * 8
        write(self.numbers.index(at), steps)
        write(self.numbers.index(at + 1), batch)
        write(self.numbers.index(at + 2), head)
        write(self.numbers.index(at + 3), col)
        write(self.numbers.index(at + 4), full)
        write(self.numbers.index(at + 5), seen_from)
        write(self.numbers.index(at + 6), length)
        write(self.numbers.index(at + 7), number)
        all_threads()
        mbarrier.arrive(self.filled.index(r & 1), count=1)

    @gluon.jit
    def steps(self, r):
        """Consumer: wait for the r-th order; how many row blocks see its columns."""
        mbarrier.wait(self.filled.index(r & 1), r >> 1 & 1)
        return read(self.numbers.index((r & 1) * 8))

    @gluon.jit
    def place(self, r):
        """Consumer: batch, K/V head and first column of the r-th order."""
        at = (r & 1) * 8
        return (
            read(self.numbers.index(at + 1)),
            read(self.numbers.index(at + 2)),
            read(self.numbers.index(at + 3)),
        )

    @gluon.jit
    def limits(self, r):
        """Consumer: the first row that needs no mask, the first that sees column `col`, and how many keys are real."""
        at = (r & 1) * 8
        return (
            read(self.numbers.index(at + 4)),
            read(self.numbers.index(at + 5)),
            read(self.numbers.index(at + 6)),
        )

    @gluon.jit
    def number(self, r):
        """Consumer: the column block's number among all."""
        return read(self.numbers.index((r & 1) * 8 + 7))

    @gluon.jit
    def done(self, r):
        """Consumer: the r-th order is carried out."""
        all_threads()
        mbarrier.arrive(self.emptied.index(r & 1), count=1)


@gluon.jit
def orders():
    """No order yet."""
    numbers = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Orders(numbers, barriers(2, 1), barriers(2, CONSUMERS))


@gluon.jit
def write(place, x):
    """One number into shared memory."""
    place.store(gl.full([1], x, gl.int32, one(gl.num_warps())))


@gluon.jit
def read(place):
    """One number from shared memory, for every thread."""
    return gl.max(place.load(one(gl.num_warps())), 0)


# Rows -------------------------------------------------------------------------------------------------------


@aggregate
class Rows:
    """Row blocks, two at a time: tiles of Q and dO, and for each row what S and dP start from (see sums.py)."""

    q: gl.shared_memory_descriptor  # (2, 1, 1, B_r, d)
    do: gl.shared_memory_descriptor
    starts: gl.shared_memory_descriptor  # (2, 1, 2 · B_r)
    places: gl.shared_memory_descriptor  # of the last four: first row, number among all row blocks, side of K
    filled: gl.shared_memory_descriptor
    emptied: gl.shared_memory_descriptor
    B_r: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, q, do, starts, places, filled, emptied, B_r):
        self.q = q
        self.do = do
        self.starts = starts
        self.places = places
        self.filled = filled
        self.emptied = emptied
        self.B_r = gl.constexpr(B_r)

    @gluon.jit
    def fill(self, n, r, Q, dO, starts, batch, head, i, number):
        """Producer: start the copies of row block i, the n-th of all, once its slot is empty."""
        slot = n & 1
        filled = self.filled.index(slot)
        mbarrier.wait(self.emptied.index(slot), (n >> 1 & 1) ^ 1)
        write(self.places.index((n & 3) * 4), i * self.B_r)
        write(self.places.index((n & 3) * 4 + 1), number)
        write(self.places.index((n & 3) * 4 + 2), r & 1)
        all_threads()
        mbarrier.expect(filled, Q.block_type.nbytes + dO.block_type.nbytes + starts.block_type.nbytes)
        tma.async_copy_global_to_shared(Q, [batch, head, i * self.B_r, 0], filled, self.q.index(slot))
        tma.async_copy_global_to_shared(starts, [number, 0], filled, self.starts.index(slot))
        tma.async_copy_global_to_shared(dO, [batch, head, i * self.B_r, 0], filled, self.do.index(slot))

    @gluon.jit
    def wait(self, n):
        """Consumer: until the n-th row block is there."""
        mbarrier.wait(self.filled.index(n & 1), n >> 1 & 1)

    @gluon.jit
    def tiles(self, n):
        """Consumer: Q and dO."""  # (B_r, d) each
        return matrix(self.q.index(n & 1)), matrix(self.do.index(n & 1))

    @gluon.jit
    def start(self, n, which: gl.constexpr):
        """Consumer: what S (0) or dP (1) start from, a number for each row."""  # (1, B_r)
        both = self.starts.index(n & 1)
        both = both._reinterpret(gl.float32, [2, self.B_r], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return both.index(which).load(gl.SliceLayout(0, accumulator(self.B_r)))[None, :]

    @gluon.jit
    def first(self, n):
        """Consumer: the first row's index in its head."""
        return read(self.places.index((n & 3) * 4))

    @gluon.jit
    def number(self, n):
        """Consumer: the number among all row blocks, still known when the next row block is under way."""
        return read(self.places.index((n & 3) * 4 + 1))

    @gluon.jit
    def side(self, n):
        """Consumer: which of two places K is in. Kept instead of read anew, K's addresses would take 14 registers."""
        return read(self.places.index((n & 3) * 4 + 2))

    @gluon.jit
    def release(self, n):
        """Consumer: Q, dO and starts are no longer needed here."""
        mbarrier.arrive(self.emptied.index(n & 1), count=1)


@gluon.jit
def rows(Q, dO, starts):
    """Two slots for tiles as the descriptors say."""
    B_r: gl.constexpr = Q.block_shape[2]
    shape: gl.constexpr = [2, 1, 1, B_r, Q.block_shape[3]]
    q = gl.allocate_shared_memory(Q.dtype, shape, Q.layout)
    do = gl.allocate_shared_memory(Q.dtype, shape, dO.layout)
    start = gl.allocate_shared_memory(gl.float32, [2, 1, 2 * B_r], starts.layout)
    places = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Rows(q, do, start, places, barriers(2, 1), barriers(2, CONSUMERS), B_r)
