"""Which block is next, and which keys its rows see: the geometry of a launch, as the Hopper kernels ask for it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

ROWS = gl.constexpr(64)  # of one consumer: what one warpgroup multiplies at a time


@aggregate
class Work:
    """All blocks of all heads, in the order in which they are begun.

    `at_once` heads run side by side, so that what they share stays in the L2 cache; within them block 0 of every head
    comes before block 1: from heavy to light, if block 0 is the heaviest.
    """

    blocks: gl.tensor  # of one head
    heads: gl.tensor  # of the whole batch
    at_once: gl.tensor

    @gluon.constexpr_function
    def __init__(self, blocks, heads, at_once):
        self.blocks = blocks
        self.heads = heads
        self.at_once = at_once

    @gluon.jit
    def place(self, t):
        """The t-th block: its index, and its head."""
        section = t // (self.at_once * self.blocks)
        within = t % (self.at_once * self.blocks)
        width = gl.minimum(self.at_once, self.heads - section * self.at_once)
        return within // width, section * self.at_once + within % width


@aggregate
class Heads:
    """What holds for all heads: their lengths, and which keys a row sees."""

    N_q: gl.tensor
    N_k: gl.tensor
    H: gl.tensor  # query heads of one batch entry
    group: gl.tensor  # query heads to one head of K and V
    key_lengths: gl.tensor  # pointer to (batch,) integers, to nothing of use without KEYS
    KEYS: gl.constexpr
    RAGGED: gl.constexpr  # whether a tile may reach past the last key
    CAUSAL: gl.constexpr
    CONSUMERS: gl.constexpr
    B_c: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, N_q, N_k, H, group, key_lengths, KEYS, RAGGED, CAUSAL, CONSUMERS, B_c):
        self.N_q = N_q
        self.N_k = N_k
        self.H = H
        self.group = group
        self.key_lengths = key_lengths
        self.KEYS = gl.constexpr(KEYS)
        self.RAGGED = gl.constexpr(RAGGED)
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.B_c = gl.constexpr(B_c)

    @gluon.jit
    def first_row(self, i):
        """The first row of a program's row block; where rows differ in weight, block 0 is the heaviest."""
        if self.CAUSAL:
            i = gl.cdiv(self.N_q, ROWS * self.CONSUMERS) - 1 - i
        return i * ROWS * self.CONSUMERS

    @gluon.jit
    def length(self, batch):
        """How many keys of this batch entry are real; a length outside [0, N_k] counts as the nearest one inside."""
        if self.KEYS:
            return gl.minimum(gl.maximum(gl.load(self.key_lengths + batch), 0), self.N_k).to(gl.int32)
        else:
            return self.N_k

    @gluon.jit
    def seen(self, row, length):
        """How many keys a row sees, counted from the left: the causal diagonal ends in the bottom right corner."""
        if self.CAUSAL:
            return gl.minimum(gl.maximum(row + 1 + self.N_k - self.N_q, 0), length)
        else:
            return length + 0 * row

    @gluon.jit
    def tiles(self, row, rows: gl.constexpr, length):
        """How many tiles these rows visit; at least one, which gives a row that sees no key its O = 0 and L = −inf."""
        last = gl.minimum(row + rows, self.N_q) - 1
        return gl.maximum(gl.cdiv(self.seen(last, length), self.B_c), 1)


# Numbers that are drawn --------------------------------------------------------------------------------------


@gluon.jit
def draw(counter):
    """The next number of a counter in HBM; memory is not ordered by it, because nothing else is handed over."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def leave(counter):
    """The last program to leave puts both counters back."""
    if draw(counter + 1) == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)
