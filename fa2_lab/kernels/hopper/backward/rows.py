"""Input to the consumers of the Hopper backward kernel: row blocks of Q and dO, and the rows that see each key.

A column block consists of 128 keys of a K/V head, 64 for each of the two consumer warpgroups. The rows that see these
keys belong to row blocks of all query heads that share the K/V head. If the column block is divided among programs,
each program processes only its part of these row blocks. Only the producer computes the indices of the row blocks, and
it passes them to the consumers.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fa2_lab.kernels.common.constants import FAR_ROW
from fa2_lab.kernels.hopper.shared.descriptors import tile_at
from fa2_lab.kernels.hopper.shared.mailbox import IntRecords, all_threads, new_int_records
from fa2_lab.kernels.hopper.shared.pipeline import acc_layout, barriers, matrix, stacked

CONSUMERS = gl.constexpr(2)
COLS = gl.constexpr(64)  # columns per consumer
COLUMN_BLOCK_FIELDS = gl.constexpr(  # a column block's fields in the mailbox; if `steps` is 0, no block is left
    ("steps", "k_batch_or_end", "head", "col", "unmasked_from", "row_begin", "length", "col_block_id")
)
# The fields of a row block. `k_stage` is among them because keeping K's addresses would take 14 registers.
ROW_BLOCK_FIELDS = gl.constexpr(("row", "row_block_id", "k_stage"))
ORDERED_COLUMN_BLOCK_FIELDS = gl.constexpr(  # used if dK and dV are accumulated in a fixed order (semaphore.py)
    (*COLUMN_BLOCK_FIELDS.value, "dkv_turn", "sem_index")
)
# The fields of a row block if dQ is accumulated in a fixed order.
ORDERED_ROW_BLOCK_FIELDS = gl.constexpr((*ROW_BLOCK_FIELDS.value, "dq_turn"))


@triton.aggregate
class RowBounds:
    """The rows that see a consumer's 64 columns, and the first row that sees the whole column block."""

    begin: gl.tensor  # (64,): for each column, the first row that sees it
    unmasked_from: gl.tensor  # the first row that sees the whole column block
    end: gl.tensor | gl.constexpr  # first row after those that see the first column, or None without a left bound
    CUT: gl.constexpr  # whether some tiles may need a mask


@gluon.jit
def seeing_rows(c: gl.constexpr, r, mailbox, geometry):
    """Return the RowBounds of consumer c's columns in the r-th column block."""
    CUT: gl.constexpr = geometry.HAS_RIGHT_BOUND or geometry.RAGGED or geometry.left is not None
    unmasked_from = mailbox.read(r, "unmasked_from")
    begin = first_seeing_rows(c, r, mailbox, geometry)
    if geometry.left is None:
        return RowBounds(begin, unmasked_from, end=None, CUT=CUT)
    else:
        end = geometry.row_end(mailbox.read(r, "col"))
        return RowBounds(begin, unmasked_from, end, CUT)


@gluon.jit
def first_seeing_rows(c: gl.constexpr, r, mailbox, geometry):
    """Return, for each of consumer c's 64 columns in the r-th column block, the first row that sees it."""
    row_begin = mailbox.read(r, "row_begin")
    key = c * COLS + gl.arange(0, COLS, gl.SliceLayout(1, acc_layout(geometry.B_r)))
    row_begin += key if geometry.HAS_RIGHT_BOUND else 0 * key
    if geometry.RAGGED:
        row_begin = gl.where(key < mailbox.read(r, "length") - mailbox.read(r, "col"), row_begin, FAR_ROW)
    return row_begin


@triton.aggregate
class RowBlockPipeline:
    """A two-stage ring (circular buffer) of row blocks.

    Each stage contains tiles of Q and dO, and the initial values of the accumulators of S and dP (see accumulators.py).
    """

    q: gl.shared_memory_descriptor  # (2, …, B_r, d)
    do: gl.shared_memory_descriptor
    acc_init: gl.shared_memory_descriptor  # (2, 1, 2 · B_r)
    fields: IntRecords  # the fields of the last four row blocks
    filled: gl.shared_memory_descriptor
    emptied: gl.shared_memory_descriptor
    B_r: gl.constexpr

    @gluon.jit
    def load(self, n, k_stage, Q, dO, acc_init, batch_or_end, head, i, N_q, row_block_id, dq_turn):
        """Producer: once the stage is empty, start copying this program's n-th row block, row block i of a head.

        N_q is the number of rows in the head or packed sequence. `row_block_id` is row block i's index among all row
        blocks of the call. `dq_turn` is the number of column blocks that must add to this row block's dQ before the
        current one. `k_stage` is the stage of K's ring that contains the column block's keys.
        """
        stage = n & 1
        filled = self.filled.index(stage)
        mbarrier.wait(self.emptied.index(stage), (n >> 1 & 1) ^ 1)
        self.fields.write(n, (i * self.B_r, row_block_id, k_stage, dq_turn))
        all_threads()
        mbarrier.expect(filled, Q.block_type.nbytes + dO.block_type.nbytes + acc_init.block_type.nbytes)
        at = tile_at(Q, batch_or_end, head, i * self.B_r, N_q)
        tma.async_load(Q, at, filled, self.q.index(stage))
        tma.async_load(acc_init, [row_block_id, 0], filled, self.acc_init.index(stage))
        tma.async_load(dO, at, filled, self.do.index(stage))

    @gluon.jit
    def wait(self, n):
        """Consumer: wait until the n-th row block has arrived in shared memory."""
        mbarrier.wait(self.filled.index(n & 1), n >> 1 & 1)

    @gluon.jit
    def tiles(self, n):
        """Consumer: return the n-th row block's tiles of Q and dO, each (B_r, d), in shared memory."""
        return matrix(self.q.index(n & 1)), matrix(self.do.index(n & 1))

    @gluon.jit
    def load_acc_init(self, n, which: gl.constexpr):
        """Consumer: return the initial values of S (if `which` is 0) or of dP (if `which` is 1) as (1, B_r)."""
        # TMA will overwrite these values, so exchange_ds() issues a fence between this read and release().
        both = self.acc_init.index(n & 1)
        both = both.reinterpret(gl.float32, [2, self.B_r], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        return both.index(which).load(gl.SliceLayout(0, acc_layout(self.B_r)))[None, :]

    @gluon.jit
    def read(self, n, name: gl.constexpr):
        """Consumer: return field `name` of the n-th row block. The field stays readable during the next row block."""
        return self.fields.read(n, name)

    @gluon.jit
    def release(self, n):
        """Consumer: signal to the producer that this consumer has finished reading the n-th row block's tiles."""
        mbarrier.arrive(self.emptied.index(n & 1), count=1)


@gluon.jit
def new_row_block_pipeline(Q, dO, acc_init, fields: gl.constexpr):
    """Create an empty two-stage ring for tiles of the tensor descriptors Q, dO and `acc_init`."""
    B_r: gl.constexpr = Q.block_shape[-2]
    q = gl.allocate_shared_memory(Q.dtype, stacked(2, Q.block_shape), Q.layout)
    do = gl.allocate_shared_memory(Q.dtype, stacked(2, Q.block_shape), dO.layout)
    init = gl.allocate_shared_memory(gl.float32, [2, 1, 2 * B_r], acc_init.layout)
    return RowBlockPipeline(q, do, init, new_int_records(fields, 4), barriers(2, 1), barriers(2, CONSUMERS), B_r)
