"""The geometry of a call to the Hopper kernels: the order of its blocks, and the keys that each row sees.

Rows are divided into blocks of B_r, and keys into blocks of B_c. In the forward pass, each program fetches row blocks
and loops over tiles of B_c keys. In the backward pass, each program fetches column blocks and loops over row blocks.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2_lab.kernels.common.constants import FAR_ROW
from fa2_lab.kernels.common.tile import block_coord, key_length, keys_seen, packed_block
from fa2_lab.kernels.hopper.shared.descriptors import shape_of


@triton.aggregate
class Scheduler:
    """The tile scheduler of a persistent kernel, which assigns the blocks of all heads to programs one by one.

    Unless DYNAMIC_FIRST is set, program i starts with block i. The indices of all other blocks are fetched from a
    counter in HBM, so programs that finish early compute more blocks. Static scheduling took up to 1.6 times as long
    for the same blocks.
    """

    counter: gl.tensor  # pointer to two counters: the fetched blocks and the finished programs
    blocks: gl.tensor  # number of blocks per head
    heads: gl.tensor  # number of heads in the whole batch
    l2_group: gl.tensor  # number of heads processed concurrently: see block_coord()
    # Whether a program's first block comes from the counter, like its later blocks. If so, only running programs own
    # blocks, and the waits in semaphore.py always end.
    DYNAMIC_FIRST: gl.constexpr

    @gluon.jit
    def first(self):
        """Return the index of this program's first block in the processing order of all blocks."""
        return fetch_and_add(self.counter) if self.DYNAMIC_FIRST else gl.program_id(0)

    @gluon.jit
    def more(self, t):
        """Return whether block t exists. If it does not, all blocks have been assigned."""
        return t < self.blocks * self.heads

    @gluon.jit
    def block_coord(self, t):
        """Return block t's index within its head, and the index of the head."""
        return block_coord(t, self.blocks, self.heads, self.l2_group)

    @gluon.jit
    def next(self):
        """Fetch and return the index of this program's next block.

        Call this method as late as possible. A block that is fetched early stays with its program even if another
        program becomes free first, which worsens the load balance.
        """
        return fetch_and_add(self.counter) if self.DYNAMIC_FIRST else gl.num_programs(0) + fetch_and_add(self.counter)

    @gluon.jit
    def leave(self):
        """Tell the scheduler that this program has finished. The last program to finish resets both counters to zero.

        Launches that share the counters must therefore not overlap (see scheduler_counter()).
        """
        if fetch_and_add(self.counter + 1) == gl.num_programs(0) - 1:
            gl.store(self.counter, 0)
            gl.store(self.counter + 1, 0)


@gluon.jit
def fetch_and_add(counter):
    """Increment a counter in HBM and return its old value. The counter guards no data, so relaxed order is enough."""
    return gl.atomic_add(counter, 1, sem="relaxed")


@triton.aggregate
class Geometry:
    """The lengths and the numbers of heads in a call, and the keys that each row sees.

    The keys that a row sees form a contiguous range around the row's diagonal, called the row's interval. In the
    methods, `length` is the number of real keys.
    """

    # If sequences are packed, N_q and N_k are totals over all sequences, except in the results of of_sequence().
    N_q: gl.tensor
    N_k: gl.tensor
    H: gl.tensor  # query heads per batch entry
    group: gl.tensor  # query heads per K/V head
    key_lengths: gl.tensor | gl.constexpr  # pointer to the number of real keys in each batch entry, or None
    RAGGED: gl.constexpr  # whether a block of keys may extend past the last key
    # Whether a row's interval ends `right` keys after the row's diagonal. If not, it ends with the last key. With a
    # causal mask, `right` is 0.
    HAS_RIGHT_BOUND: gl.constexpr
    right: gl.tensor | gl.constexpr
    left: gl.tensor | gl.constexpr  # an interval begins `left` keys before the diagonal or, if left is None, at key 0
    B_r: gl.constexpr
    B_c: gl.constexpr
    cu_seqlens_q: gl.tensor | gl.constexpr  # starts of packed sequences, or None if sequences are not packed
    cu_seqlens_k: gl.tensor | gl.constexpr
    sequences: gl.tensor | gl.constexpr

    @gluon.jit
    def of_sequence(self, N_q, N_k):
        """Return the geometry of a packed sequence with N_q rows and N_k keys, or self if the call is not packed."""
        if self.cu_seqlens_q is None:
            return self
        else:
            return Geometry(
                N_q, N_k, self.H, self.group, self.key_lengths, self.RAGGED, self.HAS_RIGHT_BOUND, self.right,
                self.left, self.B_r, self.B_c, self.cu_seqlens_q, self.cu_seqlens_k, self.sequences
            )  # fmt: skip

    @gluon.jit
    def row_block(self, block, bh):
        """Return five values that describe a row block.

        1. the row block's first row
        2. the batch entry or, for a packed sequence, the row of Q at which the sequence ends
        3. the batch entry or, for a packed sequence, the row of K at which the sequence ends
        4. the row block's head
        5. the geometry of the row block's sequence

        `block` is the row block's index within its head, and `bh` is the head's index in the batch. tile_at() needs the
        second and third values. If the row block does not exist, the first row is outside the sequence.
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
        """Return six values that describe a column block.

        1. the column block's index in its sequence
        2. the batch entry or, for a packed sequence, the row of K at which the sequence ends
        3. the batch entry or, for a packed sequence, the row of Q at which the sequence ends
        4. the index, within a head, of the sequence's first row block
        5. the sequence's number of row blocks
        6. the geometry of the sequence

        `block` is the column block's index within its head, and T_r is the number of row blocks per head. A sequence
        without rows is treated as if it had one row block, so that its dK and dV are set to zero. For a column block
        that does not exist, the number of row blocks is 0.
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
    def first_L_index(self, batch_or_end, head, X):
        """Return the index in L of a head's first row. X is the descriptor of a tensor with the same rows as L.

        `batch_or_end` is the batch entry or, for a packed sequence, the row of X at which the sequence ends.
        """
        if self.cu_seqlens_q is None:
            return (batch_or_end * self.H + head).to(gl.int64) * self.N_q
        else:
            _, _, tokens = shape_of(X)
            return head.to(gl.int64) * tokens + batch_or_end - self.N_q

    @gluon.jit
    def first_row(self, i):
        """Return the first row of the i-th row block in a head's processing order.

        With a right bound, the last row block comes first because it has the most work under a causal mask.
        """
        if self.HAS_RIGHT_BOUND:
            i = gl.cdiv(self.N_q, self.B_r) - 1 - i
        return i * self.B_r

    @gluon.jit
    def length(self, batch):
        """Return the number of real keys in a batch entry."""
        return key_length(self.key_lengths, batch, self.N_k)

    @gluon.jit
    def col_end(self, row, length):
        """Return the index of the first key after those that row `row` sees."""
        return keys_seen(row + self.right, self.N_q, self.N_k, length, self.HAS_RIGHT_BOUND)

    @gluon.jit
    def col_begin(self, row):
        """Return the first column that row `row` sees in a call with a left bound. The result can be negative."""
        return row + self.N_k - self.N_q - self.left

    @gluon.jit
    def tile_end(self, row, rows: gl.constexpr, length):
        """Return the end of the range of tiles that must be processed for the block of `rows` rows starting at `row`.

        At least one tile is processed for every row block, so that O and L are always written.
        """
        last = gl.minimum(row + rows, self.N_q) - 1
        return gl.maximum(gl.cdiv(self.col_end(last, length), self.B_c), 1)

    @gluon.jit
    def tile_begin(self, row, end):
        """Return the index of the first tile that must be processed for the block of rows that starts at `row`.

        The block's last tile has the index end − 1.
        """
        if self.left is None:
            return 0
        else:
            return gl.minimum(gl.maximum(self.col_begin(row), 0) // self.B_c, end - 1)

    @gluon.jit
    def row_begin(self, col):
        """Return the first row that sees key `col`, which must be a real key. The result can be negative."""
        return col + self.N_q - self.N_k - self.right if self.HAS_RIGHT_BOUND else 0

    @gluon.jit
    def row_end(self, col):
        """Return the first row after those that see key `col`. A left bound is required. The result can be negative."""
        return col + self.N_q - self.N_k + self.left + 1

    @gluon.jit
    def first_row_block(self, col, length):
        """Return the first row block that sees the column block starting at column `col`.

        If no row block sees it, return the last row block."""
        i = 0
        if self.HAS_RIGHT_BOUND:
            i = gl.maximum(self.row_begin(col), 0) // self.B_r
        if self.key_lengths is not None:
            i = gl.where(col >= length, gl.cdiv(self.N_q, self.B_r) - 1, i)
        return i

    @gluon.jit
    def end_of_row_blocks(self, col, length, T_r):
        """Return the end of the range of row blocks that see the column block starting at column `col`.

        T_r is the number of row blocks in the sequence. At least one of them is processed for every column block.
        """
        end = T_r
        if self.left is not None:
            row = gl.minimum(gl.maximum(self.row_end(col + self.B_c - 1), 1), self.N_q)
            end = gl.cdiv(row, self.B_r)
            if self.key_lengths is not None:
                end = gl.where(col >= length, T_r, end)
        return end

    @gluon.jit
    def last_column_block(self, i, length):
        """Return the index of the last column block that processes row block i.

        For the last row block, this is the last column block of the sequence.
        """
        if self.key_lengths is not None:
            length = gl.where((i + 1) * self.B_r >= self.N_q, self.N_k, length)
        return gl.cdiv(self.col_end((i + 1) * self.B_r - 1, length), self.B_c) - 1

    @gluon.jit
    def unmasked_from(self, col, length):
        """Return the first row that sees all columns of the column block starting at column `col`.

        From this row on, no tile of the column block needs a mask, unless the window has a left bound.
        """
        row = 0
        last = col + self.B_c - 1
        if self.HAS_RIGHT_BOUND:
            row = self.row_begin(last)
        if self.RAGGED:
            row = gl.where(last >= length, FAR_ROW, row)
        return row
