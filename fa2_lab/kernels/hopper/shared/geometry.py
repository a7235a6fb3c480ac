"""Which block comes next and which row sees which key: the geometry of one call, as the Hopper kernels need it.

Rows come in blocks of B_r, and keys in blocks of B_c. A program of the forward takes row blocks and loops over tiles of
B_c keys. A program of the backward takes column blocks and loops over row blocks.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2_lab.kernels.common.tile import block_of, keys_seen, length_of, packed_block
from fa2_lab.kernels.hopper.shared.descriptors import shape_of

NO_ROW = gl.constexpr(2**30)  # more rows than any tensor has


@triton.aggregate
class Scheduler:
    """The tile scheduler, which hands out the blocks of all heads one by one to programs that stay on their SM.

    A program's first block is the one with its own number. It draws every further block from a counter in HBM, so a
    program that finishes early takes more blocks. With fixed shares, the same blocks took up to 1.6 times as long.
    """

    counter: gl.tensor  # pointer to two zeros: blocks drawn, and programs that have left
    blocks: gl.tensor  # of one head
    heads: gl.tensor  # of the whole batch
    l2_group: gl.tensor  # heads that run side by side: see block_of()
    DRAWN: gl.constexpr  # whether the first block is drawn as well, so that only running programs have a number

    @gluon.jit
    def first(self):
        """Return the number of this program's first block among all blocks."""
        return draw(self.counter) if self.DRAWN else gl.program_id(0)

    @gluon.jit
    def more(self, t):
        """Return whether there is a t-th block."""
        return t < self.blocks * self.heads

    @gluon.jit
    def tile_coord(self, t):
        """Return the t-th block's index in its head, and its head."""
        return block_of(t, self.blocks, self.heads, self.l2_group)

    @gluon.jit
    def next(self):
        """Return the number of this program's next block.

        Call it as late as possible: a program that takes its next block too early gets a fixed share again.
        """
        return draw(self.counter) if self.DRAWN else gl.num_programs(0) + draw(self.counter)

    @gluon.jit
    def leave(self):
        """Sign off from the scheduler. The last program to do so resets both counters to zero.

        Launches that share a counter must therefore follow one another: see counter_for().
        """
        if draw(self.counter + 1) == gl.num_programs(0) - 1:
            gl.store(self.counter, 0)
            gl.store(self.counter + 1, 0)


@gluon.jit
def draw(counter):
    """Return the next number of a counter in HBM. Nothing else depends on it, so memory need not be ordered."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@triton.aggregate
class Geometry:
    """The lengths and heads of one call, and the keys that each row sees, which are an interval around its diagonal."""

    N_q: gl.tensor
    N_k: gl.tensor
    H: gl.tensor  # query heads of one batch entry
    group: gl.tensor  # query heads to one head of K and V
    key_lengths: gl.tensor | gl.constexpr  # pointer to (batch,) integers; or None
    RAGGED: gl.constexpr  # whether a block of keys may reach past the last key
    CAUSAL: gl.constexpr  # whether the interval ends `right` keys after the diagonal, else with the last key
    right: gl.tensor | gl.constexpr
    left: gl.tensor | gl.constexpr  # it begins this many keys before the diagonal; None: with the first key
    B_r: gl.constexpr
    B_c: gl.constexpr
    cu_seqlens_q: gl.tensor | gl.constexpr  # where packed sequences begin, or None; N_q and N_k then count all rows
    cu_seqlens_k: gl.tensor | gl.constexpr
    sequences: gl.tensor | gl.constexpr

    @gluon.jit
    def of_sequence(self, N_q, N_k):
        """Return the geometry of one packed sequence, or this one if nothing is packed."""
        if self.cu_seqlens_q is None:
            return self
        else:
            return Geometry(
                N_q, N_k, self.H, self.group, self.key_lengths, self.RAGGED, self.CAUSAL, self.right, self.left,
                self.B_r, self.B_c, self.cu_seqlens_q, self.cu_seqlens_k, self.sequences
            )  # fmt: skip

    @gluon.jit
    def row_block(self, block, bh):
        """Return a row block's first row, its batch entry in Q and in K, its head and its geometry.

        For a packed sequence, its end takes the place of its batch entry. If there is no such block, the first row lies
        outside the rows of the sequence.
        """
        if self.cu_seqlens_q is None:
            row = self.first_row(block)
            batch = bh // self.H
            return row, batch, batch, bh % self.H, self
        else:
            i, q, N_q, k, N_k = packed_block(
                block, self.cu_seqlens_q, self.N_q, self.cu_seqlens_k, self.N_k, self.sequences, self.B_r
            )
            sequence = self.of_sequence(N_q, N_k)
            return sequence.first_row(i), q + N_q, k + N_k, bh, sequence

    @gluon.jit
    def column_block(self, block, batch, T_r):
        """Return a column block's number, its batch entry in K and in Q, the first of this entry's row blocks in a
        head, the number of these row blocks, and the geometry of the block.

        Packed sequences are treated as in row_block(). A sequence without rows still has one row block, so that its dK
        and dV become zeros. A column block that does not exist has no row blocks.
        """
        if self.cu_seqlens_q is None:
            return block, batch, batch, 0, T_r, self
        else:
            j, k, N_k, q, N_q = packed_block(
                block, self.cu_seqlens_k, self.N_k, self.cu_seqlens_q, self.N_q, self.sequences, self.B_c
            )
            before = q // self.B_r + block - j - k // self.B_c
            T_r = gl.where(j * self.B_c < N_k, gl.maximum(gl.cdiv(N_q, self.B_r), 1), 0)
            return j, k + N_k, q + N_q, before, T_r, self.of_sequence(N_q, N_k)

    @gluon.jit
    def first_of(self, batch, head, X):
        """Return where a head's rows begin in L, for rows like those of X. A packed `batch` is its end."""
        if self.cu_seqlens_q is None:
            return (batch * self.H + head).to(gl.int64) * self.N_q
        else:
            _, _, tokens = shape_of(X)
            return head.to(gl.int64) * tokens + batch - self.N_q

    @gluon.jit
    def first_row(self, i):
        """Return the first row of the i-th row block, counted from the heaviest if the mask is causal."""
        if self.CAUSAL:
            i = gl.cdiv(self.N_q, self.B_r) - 1 - i
        return i * self.B_r

    @gluon.jit
    def length(self, batch):
        """Return the number of real keys of a batch entry."""
        return length_of(self.key_lengths, batch, self.N_k)

    @gluon.jit
    def seen(self, row, length):
        """Return the end of a row's interval, which is the number of keys before it."""
        return keys_seen(row + self.right, self.N_q, self.N_k, length, self.CAUSAL)

    @gluon.jit
    def begin(self, row):
        """Return the first column of a row's interval if it has a left bound. It may lie before the first key."""
        return row + self.N_k - self.N_q - self.left

    @gluon.jit
    def tiles(self, row, rows: gl.constexpr, length):
        """Return the end of the tiles that these rows visit. They visit at least one, so that O and L are written."""
        last = gl.minimum(row + rows, self.N_q) - 1
        return gl.maximum(gl.cdiv(self.seen(last, length), self.B_c), 1)

    @gluon.jit
    def first_tile(self, row, end):
        """Return the first tile that the rows from this one on visit, given the end of their tiles."""
        if self.left is None:
            return 0
        else:
            return gl.minimum(gl.maximum(self.begin(row), 0) // self.B_c, end - 1)

    @gluon.jit
    def seen_from(self, col):
        """Return the first row that sees a real key. It may lie before row 0."""
        return col + self.N_q - self.N_k - self.right if self.CAUSAL else 0

    @gluon.jit
    def unseen_from(self, col):
        """Return the first row that no longer sees a key, for rows with a left bound. It may lie before row 0."""
        return col + self.N_q - self.N_k + self.left + 1

    @gluon.jit
    def first_row_block(self, col, length):
        """Return the first row block that sees the column block at `col`, or the last one if none does."""
        i = 0
        if self.CAUSAL:
            i = gl.maximum(self.seen_from(col), 0) // self.B_r
        if self.key_lengths is not None:
            i = gl.where(col >= length, gl.cdiv(self.N_q, self.B_r) - 1, i)
        return i

    @gluon.jit
    def end_of_row_blocks(self, col, length, T_r):
        """Return the end of the row blocks, of T_r, that see the column block at `col`. At least one visits it."""
        end = T_r
        if self.left is not None:
            row = gl.minimum(gl.maximum(self.unseen_from(col + self.B_c - 1), 1), self.N_q)
            end = gl.cdiv(row, self.B_r)
            if self.key_lengths is not None:
                end = gl.where(col >= length, T_r, end)
        return end

    @gluon.jit
    def last_column_block(self, i, length):
        """Return the last column block that visits row block i. All of them visit the last row block."""
        if self.key_lengths is not None:
            length = gl.where((i + 1) * self.B_r >= self.N_q, self.N_k, length)
        return gl.cdiv(self.seen((i + 1) * self.B_r - 1, length), self.B_c) - 1

    @gluon.jit
    def unmasked_from(self, col, length):
        """Return the first row that sees the whole column block at `col`. From this row on, no tile needs a mask."""
        row = 0
        last = col + self.B_c - 1
        if self.CAUSAL:
            row = self.seen_from(last)
        if self.RAGGED:
            row = gl.where(last >= length, NO_ROW, row)
        return row
