"""Run the functions of Hopper's kernels in Python on NumPy tiles: one warp after another, and nothing in parallel.

The very lines that a GPU runs compute which rows and keys a block has, which scores are masked, which rows are zeroed,
where results are stored, and whose turn it is. Layouts, barriers and registers have no meaning here. The softmax,
assembly and the copy engine have plain stand-ins. The copy engine's stand-in gets the same descriptors as a GPU's.
"""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
from hopper_language import (
    GLUON,
    GpuInt,
    Pointer,
    Tile,
    constructor,
    field_names,
    mma_wait,
    new_aggregate,
    numpy_mma,
    unjitted,
    zero_oob_rows,
)

from fa2_lab.kernels.arguments import Tensors
from fa2_lab.kernels.common import tile
from fa2_lab.kernels.hopper.backward import accumulators, launch, products, rows
from fa2_lab.kernels.hopper.backward import kernel as backward
from fa2_lab.kernels.hopper.backward import semaphore as semaphores
from fa2_lab.kernels.hopper.forward import kernel as forward
from fa2_lab.kernels.hopper.forward import softmax
from fa2_lab.kernels.hopper.shared import descriptors, geometry, pipeline
from fa2_lab.kernels.tables import power_of_2

# The copy engine ------------------------------------------------------------------------------------------------


class DescriptorStub:
    """An array, (batch, heads, N, d) or packed, whose tiles are fetched and stored as its descriptor says."""

    dtype, block_type = "half", SimpleNamespace(nbytes=0)

    def __init__(self, X, rows: int, d: int):
        like = torch.empty(X.shape, dtype=torch.float16, device="meta")
        vars(self).update(vars(descriptors.descriptor(like, rows, d)), numbers=X.reshape(-1), d=X.shape[-1])
        assert X.flags.c_contiguous and self.numbers.base is not None

    def rows(self, at):
        """Yield (row of the tile, its slice of memory) for the rows that exist.

        Addresses wrap at 64 bits as on a GPU, and a number has 2 bytes.
        """
        for i in range(self.block_shape[-2]):
            index = [int(n) for n in (*at[:-2], at[-2] + i, 0)]
            if all(0 <= n < size for n, size in zip(index, self.shape, strict=True)):
                assert max(index) < 2**31
                start = 2 * sum(n * step for n, step in zip(index, self.strides, strict=True)) % 2**64 // 2
                assert start + self.d <= self.numbers.size
                yield i, slice(start, start + self.d)

    def fetch(self, at):
        tile = np.zeros(self.block_shape[-2:]).view(Tile)
        for i, span in self.rows(at):
            tile[i, : self.d] = self.numbers[span]
        return tile

    def put(self, at, tile):
        for i, span in self.rows(at):
            assert np.isnan(self.numbers[span]).all(), "written twice"
            self.numbers[span] = tile.held[i, : self.d]


class SharedTile:
    """A place in shared memory from which a tile is stored. Before it is filled again, it must have been read."""

    def store(self, x):
        assert not TMA.reading
        self.held = x

    def index(self, n):
        return self

    def reinterpret(self, *_):
        return self


def simulate_on_numpy(monkeypatch) -> None:
    """Replace the GPU functions in the kernels' modules by their Python functions and by stand-ins."""
    far_row = GpuInt(2**30)
    far_row.value = 2**30
    matmul_over_d = pipeline.matmul_over_d.fn
    for module in (tile, descriptors, geometry, pipeline, forward, softmax, backward, rows, products, semaphores):
        stand_ins = unjitted(module) | dict(tl=GLUON, gl=GLUON, ROWS=64, COLS=64, CONSUMERS=2, NEG_INF=-np.inf)
        stand_ins |= dict(LN2=np.log(2), acc_layout=lambda columns: None, zero_oob_rows=zero_oob_rows)
        stand_ins |= dict(matrix=lambda x: x, matmul_over_d=matmul_over_d, opaque_smem=lambda x: x)
        stand_ins |= dict(warpgroup_mma=numpy_mma, warpgroup_mma_wait=mma_wait, as_operand=lambda x, *_: x)
        stand_ins |= dict(stacked=lambda n, block: [n, *block], fence_async_shared=lambda: None, FAR_ROW=far_row)
        stand_ins |= dict(gdc_wait=TMA.others_end)
        stand_ins |= dict(tma=TMA, mbarrier=BARRIER_STUB, all_threads=lambda: None, **STAND_INS.get(module, {}))
        for name, x in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, x)


class TmaStub:
    """A copy engine that copies at once, but counts as reading shared memory until `store_wait` is called.

    It loads what the kernel before has written only after `others_end`, with which a kernel waits for that kernel.
    """

    reading = waited = False

    def others_end(self):
        self.waited = True

    def store_wait(self, n):
        self.reading = False

    def async_store(self, X, at, tile):
        X.put(at, tile)
        self.reading = True

    def async_load(self, X, at, filled, stage):
        assert self.waited
        stage.append(X.fetch(at))

    def async_atomic_add(self, accum, at, buffer):
        add_tile(buffer.parts.pop(0), accum, at[0], buffer)
        self.reading = True


TMA = TmaStub()
BARRIER_STUB = SimpleNamespace(wait=lambda *_: None, expect=lambda *_: None, arrive=lambda *_, count: None)


# The forward's softmax, without assembly ------------------------------------------------------------------------


def initial_state(s, scale_log2):
    """Return the first m, its scale, and l, for each row's four lanes.

    m is stored at half of scale_log2, as the kernels do for rows with huge scores.
    """
    m, scale, l = (np.full((len(s), 4), x).view(Tile) for x in (softmax.LOWEST.value, scale_log2 / 2, 0.0))
    return m, scale, l


def softmax_step(s, m, scale, l, scale_log2):
    """Return p, and m, its scale, l and alpha for each row's four lanes. m is the exact maximum."""
    top = np.maximum(m, scale * s.max(1)[:, None])
    p, alpha = np.exp2((scale[:, :1] * s - top[:, :1]) * 2), np.exp2((m - top) * 2)
    return p, top, scale, alpha * l + p.sum(1)[:, None] / 4, alpha


GEOMETRY_CLASS = geometry.Geometry
STAND_INS = {
    descriptors: dict(gl=descriptors.gl),
    geometry: dict(Geometry=constructor(GEOMETRY_CLASS, *field_names(geometry, "Geometry"))),
    forward: dict(
        initial_state=initial_state,
        softmax_step=softmax_step,
        rescale_o=lambda o, alpha: o * alpha[:, :1],
        rounded=lambda p, dtype: p,
        ColumnBounds=constructor(softmax.ColumnBounds, "end", "end_full_tile", "begin", "first_full_tile"),
    ),
    rows: dict(RowBounds=constructor(rows.RowBounds, "begin", "unmasked_from", "end", "CUT")),
}


# Rings and mailboxes that keep all stages -------------------------------------------------------------------------


class ReleaseCounter:
    """Asserts that one reader releases all stages in order and none twice. On a GPU, a missing release is a hang."""

    def __init__(self, first=0, step=1):
        self.next, self.step = first, step

    def release(self, n):
        assert n == self.next
        self.next += self.step


class Ring(ReleaseCounter):
    """A ring that keeps all tiles with which it was filled, and checks the releases of the running consumer."""

    def __init__(self):
        super().__init__()
        self.filled = []
        self.tiles = SimpleNamespace(dtype=None, index=lambda n: self.filled[n])

    def load(self, n, X, batch, head, row, N):
        assert n == len(self.filled)
        self.filled.append(X.fetch(descriptors.tile_at(X, batch, head, row, N)))

    def acquire(self, n):
        pass

    def wait(self, n):
        return self.filled[n]


class Mailbox(ReleaseCounter):
    """A mailbox that keeps all messages."""

    def __init__(self, names):
        super().__init__()
        self.names, self.sent = names, []

    def send(self, n, values):
        self.sent.append(values)

    def wait(self, n):
        pass

    def read(self, n, name):
        return self.sent[n][self.names.index(name)]

    def was_read(self):
        """Assert that all messages were released, and begin again for the next reader.

        Only the last message, which announces the end, needs no release.
        """
        assert self.next >= len(self.sent) - 1
        self.next = 0


class RecordedMailbox(Mailbox):
    """The mailbox from which consumers learn about row blocks. It also notes which stage of K was filled last."""

    def __init__(self, names, k):
        super().__init__(names)
        self.k = k

    def write(self, n, values):
        row, number, _, turn = values
        self.sent.append((row, number, len(self.k.filled) - 1, turn))


class DqHandover:
    """A semaphore that keeps a consumer's parts of dQ for its writer, and the turns of its additions to dK and dV."""

    USED = True

    def __init__(self, lines: int):
        self.parts, self.owed, self.added, self.room, self.shape = [], [], Counter(), True, (lines, 32)

    def wait_for_room(self, c, n):
        assert n == len(self.parts)
        self.room = True

    def hand_over(self, c, dq, buffer):
        assert self.room
        self.room = False
        unjitted(semaphores.Semaphore)["hand_over"](SimpleNamespace(handed=SharedTile()), c, dq, buffer)
        self.parts.append(buffer.held)

    def wait(self, number, turn):
        assert self.room and self.added[number] == turn
        self.owed.append(number)

    def pass_on(self, number):
        assert self.owed.pop() == number and not TMA.reading
        self.added[number] += 1

    def written(self, c, sums, smem):
        """Run the writer, which adds each part at its turn and passes the turn on, and assert that none is left."""
        semaphore = new_aggregate(semaphores.Semaphore, dict(handed=SharedTile(), USED=True))
        semaphore.wait, semaphore.pass_on = self.wait, self.pass_on
        backward.writer(
            c, sums, SimpleNamespace(**vars(smem) | dict(semaphore=semaphore, dq=SimpleNamespace(index=lambda c: self)))
        )
        smem.mailbox.was_read()
        assert self.room and not self.owed and not self.parts


class EndlessStages:
    """Stages of which every `index` returns a new one. All are kept."""

    def __init__(self):
        self.kept = []

    def index(self, n):
        self.kept.append([])
        return self.kept[-1]


def scheduler(blocks: int, heads: int, l2_group: int, only=None):
    """Return a scheduler that gives one program all blocks, or only block `only`."""
    numbers = iter(range(blocks * heads) if only is None else [only])
    only_program = new_aggregate(geometry.Scheduler, dict(blocks=blocks, heads=heads, l2_group=l2_group))
    only_program.first = only_program.next = lambda: GpuInt(next(numbers, blocks * heads))
    only_program.leave = lambda: None
    return only_program


def call_geometry(Q, K, lengths, window, B_r, B_c, starts=None, RAGGED=True):
    """Return the geometry of a call with tensors of these shapes. `starts` has both cu_seqlens of packed sequences."""
    (_, H, N_q, _), (_, H_kv, N_k, _) = ((1, Q[1], Q[0], 0), (1, K[1], K[0], 0)) if starts else (Q, K)
    left, right = window
    sizes = dict(N_q=N_q, N_k=N_k, H=H, group=H // H_kv, B_r=B_r, B_c=B_c, left=left, right=right or 0)
    flags = dict(RAGGED=RAGGED, HAS_RIGHT_BOUND=right is not None, key_lengths=lengths)
    cu_seqlens_q, cu_seqlens_k = map(Pointer, starts) if starts else (None, None)
    packed = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    packed |= dict(sequences=len(starts[0]) - 1 if starts else None)
    call = new_aggregate(GEOMETRY_CLASS, sizes | flags | packed)
    if not starts:
        call.length = lambda entry: GpuInt(min(lengths[entry], N_k) if lengths else N_k)
    return call


def blocks_per_head(n, geometry, B):
    """Return the number of blocks of B rows that the scheduler hands out per head."""
    return tile.block_count(GpuInt(n), geometry.sequences, B)


def run_forward(Q, K, V, window, lengths=None, B_c=64, consumers=2, starts=None):
    """Run the forward kernel, and return O and L, with NaN where nothing was written.

    With `starts`, the sequences are packed.
    """
    call = call_geometry(Q.shape, K.shape, lengths, window, 64 * consumers, B_c, starts)
    O, L = np.full(Q.shape, np.nan), np.full(Q.shape[1::-1] if starts else Q.shape[:3], np.nan)
    d, heads = Q.shape[-1], L.size // call.N_q
    padding = dict(d_pad=power_of_2(d), skip_last_quarter=4 * d <= 3 * power_of_2(d))
    sizes = SimpleNamespace(consumers=consumers, separate_O_buffer=consumers < 3, low_reg_schedule=True, **padding)
    smem = SimpleNamespace(q=Ring(), k=Ring(), v=Ring(), config=sizes)
    smem.mailbox = Mailbox((forward.PACKED_ROW_BLOCK_FIELDS if starts else forward.ROW_BLOCK_FIELDS).value)
    smem.ping_pong = SimpleNamespace(wait=lambda c, n: turns.append(n), pass_on=lambda c: None)
    smem.o, turns = SimpleNamespace(index=lambda c: SharedTile()), []
    blocks = blocks_per_head(call.N_q, call, call.B_r)
    Q, K, V, O_desc = (DescriptorStub(X, rows, sizes.d_pad) for X, rows in ((Q, 64), (K, B_c), (V, B_c), (O, 64)))
    forward.producer(Q, K, V, smem, scheduler(blocks, heads, 1), call)
    for c in range(consumers):
        smem.k.next, smem.q.next, smem.q.step = 0, c, consumers
        turns.clear()
        forward.consumer(c, O_desc, Pointer(L.reshape(-1)), smem, call, d**-0.5 / np.log(2))
        assert turns == list(range(len(smem.k.filled))) and smem.k.next == len(turns) == len(smem.v.filled)
        assert smem.q.next == len(smem.q.filled) + c and not TMA.reading
        smem.mailbox.was_read()
    return O, L


def ordered_additions(N_q, N_k, window, lengths=None, group=1, parts=1, B_r=64, l2_group=1, starts=None):
    """Yield [(place, turn), …] for each of the scheduler's blocks in the backward: where and when a consumer adds."""
    batch = len(lengths or [N_k])
    Q, K = ((N_q, 2 * group, 8), (N_k, 2, 8)) if starts else ((batch, 2 * group, N_q, 8), (batch, 2, N_k, 8))
    call = call_geometry(Q, K, lengths, window, B_r, 128, starts)
    T_r, T_c = blocks_per_head(N_q, call, B_r), blocks_per_head(N_k, call, 128)
    Q = SimpleNamespace(shape=(0, N_q, 2 * group) if starts else Q, block_shape=[1] * (5 if starts else 4))
    for number in range(T_c * batch * 2 * parts):
        added, no_load = [], SimpleNamespace(load=lambda *_: None)
        mailbox = Mailbox(rows.ORDERED_COLUMN_BLOCK_FIELDS.value)
        semaphore, sizes = SimpleNamespace(USED=True), SimpleNamespace(last_first=False)
        smem = SimpleNamespace(mailbox=mailbox, k=no_load, v=no_load, semaphore=semaphore, config=sizes)
        smem.row_blocks = SimpleNamespace(load=lambda *shown, added=added: added.append(shown[-2:]))
        blocks = scheduler(T_c, batch * 2 * parts, l2_group * parts, only=number)
        backward.producer(Q, None, None, None, None, smem, blocks, call, T_r, parts)
        if parts > 1 and added:
            added.append((mailbox.read(0, "sem_index"), mailbox.read(0, "dkv_turn")))
        yield added


def initial_scores_and_dP(L, D, d: int, B_r: int):
    """Return the initial values of S and dP of each row block, as bwd_preprocess writes them for (batch, heads, N)."""
    blocks = -(-L.shape[2] // B_r)
    initial = np.zeros((2, *L.shape[:2], blocks * B_r))
    initial[0] = -np.inf
    initial[0, :, :, : L.shape[2]] = -L / d**-0.5
    initial[0][np.isposinf(initial[0])] = -np.inf
    initial[1, :, :, : L.shape[2]] = np.where(L == -np.inf, 0.0, -D)
    return initial.reshape(2, -1, B_r).swapaxes(0, 1)


def run_backward(Q, K, V, dO, initial, window, sizes, lengths=None, parts=1, starts=None, turns=False):
    """Run the backward kernel, and return dK and dV, with NaN where nothing was written, and three sums.

    The sums are those of dQ, and with several parts of dK and dV, in the order in which HBM has them. `initial` has
    the initial values of S and dP of each row block. Consumers exchange their dS, so each runs twice: first to show its
    dS, then to use the dS of the other. With `turns`, their writers add in turn.
    """
    B_r, d = sizes.B_r, Q.shape[-1]
    k, cu = torch.empty(K.shape, device="meta"), None if starts is None else torch.empty(len(starts[0]), device="meta")
    ragged = launch.ragged(Tensors(k, k, k, key_lengths=lengths, cu_seqlens_q=cu, cu_seqlens_k=cu))
    call = call_geometry(Q.shape, K.shape, lengths, window, B_r, 128, starts, ragged)
    T_r, T_c = blocks_per_head(call.N_q, call, B_r), blocks_per_head(call.N_k, call, 128)
    heads = K.size // d // call.N_k
    dK, dV = np.full(K.shape, np.nan), np.full(V.shape, np.nan)
    lines = [len(initial) * B_r * sizes.d_pad] + 2 * [T_c * heads * 128 * sizes.d_pad]
    all_sums = [np.zeros(n) for n in lines]
    Q, dO = DescriptorStub(Q, B_r, sizes.d_pad), DescriptorStub(dO, B_r, sizes.d_pad)
    K, V, dK_desc, dV_desc = (DescriptorStub(X, n, sizes.d_pad) for X, n in ((K, 128), (V, 128), (dK, 64), (dV, 64)))

    mailbox = Mailbox(rows.ORDERED_COLUMN_BLOCK_FIELDS.value)
    smem = SimpleNamespace(k=Ring(), v=Ring(), config=sizes, mailbox=mailbox, ds_filled=None)
    smem.dq, smem.shown = SharedTile(), {}
    stages = {name: EndlessStages() for name in ("q", "do", "acc_init", "filled", "emptied")}
    smem.row_blocks = new_aggregate(
        rows.RowBlockPipeline,
        dict(stages, fields=RecordedMailbox(rows.ORDERED_ROW_BLOCK_FIELDS.value, smem.k), B_r=B_r),
    )
    smem.row_blocks.tiles = lambda n: (stages["q"].kept[n][0], stages["do"].kept[n][0])
    smem.row_blocks.load_acc_init = lambda n, which: stages["acc_init"].kept[n][0][None, which]
    smem.row_blocks.wait = lambda n: None
    if parts > 1:
        dK_desc, dV_desc = (SimpleNamespace(dtype=None, numbers=x) for x in all_sums[1:])
    blocks = scheduler(T_c, heads * parts, parts)
    smem.semaphore = without_turns = SimpleNamespace(USED=turns, wait_for_room=lambda c, n: None)
    initial = SimpleNamespace(block_type=DescriptorStub.block_type, fetch=lambda at, x=initial: x[at[0]])
    TMA.waited = False
    backward.producer(Q, K, V, dO, initial, smem, blocks, call, T_r, GpuInt(parts))
    for smem.shown_all in (False, True):
        for x in (dK, dV):
            x.fill(np.nan)
        for x in all_sums:
            x.fill(0)
        for c in range(2):
            smem.k.next = smem.v.next = 0
            row_blocks = ReleaseCounter()
            smem.row_blocks.release = row_blocks.release
            dq_accum = SimpleNamespace(numbers=all_sums[0])
            smem.semaphore = DqHandover(2 * sizes.W) if turns else without_turns
            backward.consumer(c, dK_desc, dV_desc, dq_accum, smem, call, d**-0.5 / np.log(2))
            assert not TMA.reading and row_blocks.next == len(smem.row_blocks.fields.sent)
            assert smem.k.next == len(smem.k.filled) == smem.v.next
            smem.mailbox.was_read()
            if turns:
                smem.semaphore.written(c, dq_accum, smem)
    return dK, dV, all_sums


def start_dq(c, n, smem):
    """Start the matmul for dQ with the dS of both consumers, or return 0 while they only show their dS."""
    if not smem.shown_all:
        return 0
    smem.ds = SimpleNamespace(index=lambda _: np.concatenate([smem.shown[n, 0], smem.shown[n, 1]]).view(Tile))
    return products.start_dq(c, n, smem)


def exchange_ds(c, n, ds, smem):
    smem.shown[n, c] = ds


def add_tile(x, described, at, buffer):
    """Add a tile to a sum as the copy engine does, beginning at line `at`, where a line has 32 numbers."""
    if np.ndim(x):
        held = accumulators.to_fragment_order.fn(torch.from_numpy(np.array(x))).numpy().reshape(-1)
        described.numbers[32 * at : 32 * at + held.size] += held


STAND_INS[backward] = dict(exchange_ds=exchange_ds, start_dq=start_dq, add_tile=add_tile)
STAND_INS[semaphores] = dict(to_fragment_order=lambda x: x)
