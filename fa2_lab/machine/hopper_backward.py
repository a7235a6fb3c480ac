"""The Hopper backward as a model that runs anywhere: one pass over column blocks, on NumPy tiles and a clock.

Names and order are those of kernels/hopper/backward/kernel.py; rings, mailbox and units are the forward model's. Two
consumers own half of a column block each. They meet at dS, which dQ needs from both, and the copy engine adds dQ for
them. A barrier too few shows in the result, and one too many as a Deadlock.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from fa2_lab.machine.asynchrony import SHARED, Barrier, Block, Job, Wait
from fa2_lab.machine.chips import Chip
from fa2_lab.machine.hopper import PRODUCER, Mailbox, Ring, name
from fa2_lab.tiles import Tiling, whole_number

CONSUMERS = 2


@dataclass(frozen=True)
class Costs:
    """Clocks: of a copy, of each product of one consumer, of its exponentials, and of an addition in HBM."""

    copy: float = 600.0
    product: float = 256.0
    softmax: float = 256.0
    add: float = 600.0
    slow: float = 1.0  # how many times as long consumer 1 takes for its exponentials


@dataclass(frozen=True)
class Late:
    """Which products start later than they could: see Sizes in kernels/hopper/backward/sizes.py."""

    dv: bool = True  # dV's product after dS, not before dQ is handed over
    dk: bool = False  # dK's product in the next step


def costs(chip: Chip, B_r: int, d: int, copy: float = 600.0, add: float = 600.0) -> Costs:
    """Clocks of a consumer's 64 columns and B_r rows, if a unit had nothing else to do."""
    return Costs(copy, 2 * 64 * B_r * d / chip.tensor_per_clock, 64 * B_r / chip.exp_per_clock, add)


# What they share ----------------------------------------------------------------------------------------------


class Exchange:
    """dS of both consumers, one below the other, for this row block and the ones before: `places` of them."""

    def __init__(self, block: Block, places: int):
        self.block = block
        self.places: list[list] = [[None] * CONSUMERS for _ in range(places)]
        self.filled = Barrier("dS filled", CONSUMERS)

    def share(self, c: int, n: int, ds: np.ndarray) -> None:
        """Consumer c shows its dS of the n-th row block."""
        self.places[n % len(self.places)][c] = ds
        self.filled.arrive(self.block.actor)

    def both(self, n: int) -> Generator[Wait, None, Callable[[], np.ndarray]]:
        """Both consumers' dS of the n-th row block, as soon as they are there: where they lie, not what they are."""
        yield self.filled.over(n & 1)
        return lambda: np.vstack(self.places[n % len(self.places)])  # (2 · columns, B_r)


class Sums:
    """dQ in HBM, and for each consumer one place where its part waits to be added."""

    def __init__(self, block: Block, dQ: np.ndarray, clocks: float):
        self.block, self.dQ, self.clocks = block, dQ, clocks
        self.places: list = [None] * CONSUMERS
        self.last: list[Job | None] = [None] * CONSUMERS

    def add(self, c: int, rows: slice, cols: slice, part: np.ndarray) -> Generator[Wait]:
        """Have a part added by the copy engine, once it has read the part before."""
        if last := self.last[c]:
            yield last.done()
        self.places[c] = part

        def added() -> None:
            self.dQ[rows, cols] += self.places[c]

        self.last[c] = self.block.start("copy", self.clocks, f"dQ {rows.start}", added)


@dataclass
class Pipes:
    """The shared memory of one thread block."""

    mailbox: Mailbox
    k: Ring
    v: Ring
    rows: Ring  # Q and dO, and what S and dP begin at
    ds: Exchange
    sums: Sums


# The work -----------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """All column blocks of one head."""

    Q: np.ndarray
    K: np.ndarray
    V: np.ndarray
    dO: np.ndarray
    starts: np.ndarray  # (N_q, 2): −L/τ, −D
    tiling: Tiling
    costs: Costs
    late: Late
    dK: np.ndarray
    dV: np.ndarray

    @property
    def tau(self) -> float:
        return self.Q.shape[1] ** -0.5

    def rows_of(self, j: int) -> list[int]:
        """The row blocks that see column block j; the last one where nobody does: one step is the least."""
        return self.tiling.visited_rows(j) or [self.tiling.T_r - 1]

    def row_block(self, i: int) -> np.ndarray:
        """Q, dO, −L/τ and −D of row block i, side by side, as one barrier announces them."""  # (B_r, 2d + 2)
        rows = self.tiling.rows(i)
        return np.hstack([self.Q[rows], self.dO[rows], self.starts[rows]])


@dataclass
class Columns:
    """A consumer's half of column block j: where k and v are, and its dk and dv."""

    c: int
    j: int
    k: Callable[[], np.ndarray]
    v: Callable[[], np.ndarray]
    work: Work
    dk: np.ndarray = field(init=False)
    dv: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        cols, half = self.work.tiling.cols(self.j), self.work.tiling.B_c // CONSUMERS
        self.mine = slice(self.c * half, min((self.c + 1) * half, cols.stop - cols.start))
        width = max(0, self.mine.stop - self.mine.start)
        self.dk, self.dv = np.zeros((2, width, self.work.Q.shape[1]))

    def scores(self, i: int, rows: Callable[[], np.ndarray]) -> np.ndarray:
        """S, keys down, from −L/τ on, or from −∞ where a row does not see a column."""  # (columns, B_r)
        visible = self.work.tiling.visible(i, self.j)[:, self.mine].T
        q, _, start, _ = split(rows())
        return np.where(visible, start + self.k()[self.mine] @ q.T, -np.inf)

    def dp(self, rows: Callable[[], np.ndarray]) -> np.ndarray:
        """dP − D, keys down."""  # (columns, B_r)
        _, do, _, start = split(rows())
        return start + self.v()[self.mine] @ do.T

    def add(self, grad: str, left: np.ndarray, right: np.ndarray) -> None:
        """Add a product to dk or dv."""
        setattr(self, grad, getattr(self, grad) + left @ right)

    def store(self) -> None:
        """Write dK and dV."""
        first = self.work.tiling.cols(self.j).start
        mine = slice(first + self.mine.start, first + self.mine.start + len(self.dk))
        self.work.dK[mine], self.work.dV[mine] = self.work.tau * self.dk, self.dv


def split(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """q, do (B_r, d), −L/τ and −D (B_r,) of a row block."""
    d = (rows.shape[1] - 2) // 2
    return rows[:, :d], rows[:, d : 2 * d], rows[:, -2], rows[:, -1]


# The producer and a consumer ----------------------------------------------------------------------------------


def producer(pipes: Pipes, work: Work, counter: Iterator[int]) -> Generator[Wait]:
    """Announce every column block, and start every copy as early as its stage is free."""
    n = r = 0  # row blocks, and column blocks, so far
    j = next(counter)
    while j < work.tiling.T_c:
        cols, row_blocks = work.tiling.cols(j), work.rows_of(j)
        yield from pipes.mailbox.send(r, (j, row_blocks))
        yield from pipes.k.fill(r, work.K[cols], work.costs.copy)
        yield from pipes.v.fill(r, work.V[cols], work.costs.copy)
        for i in row_blocks:
            yield from pipes.rows.fill(n, work.row_block(i), work.costs.copy)
            n += 1
        r += 1
        j = next(counter)
    yield from pipes.mailbox.send(r, None)


def consumer(c: int, block: Block, pipes: Pipes, work: Work) -> Generator[Wait]:
    """Consumer c: its half of every column block that this thread block gets."""
    n = r = 0
    letter = yield from pipes.mailbox.wait(r)
    while letter is not None:
        j, row_blocks = letter
        k = yield from pipes.k.take(r)
        v = yield from pipes.v.take(r)
        own = Columns(c, j, k, v, work)
        before: Any = None
        for i in row_blocks:
            before = yield from step(n, i, before, own, block, pipes)
            n += 1
        pipes.v.release(r)
        if work.late.dk:
            yield from finish_dk(before, start_dk(before, own, block), pipes)
        dq = yield from start_dq(n - 1, own, block, pipes)
        yield dq.done()
        pipes.k.release(r)
        yield from add_dq(before.i, dq, own, pipes)
        own.store()
        pipes.mailbox.release(r)
        r += 1
        letter = yield from pipes.mailbox.wait(r)


@dataclass(frozen=True)
class Begun:
    """What a step leaves to the next one: the n-th row block is i, its rows, and its dS."""

    n: int
    i: int
    rows: Callable[[], np.ndarray]
    ds: np.ndarray


def step(
    n: int, i: int, before: Begun | None, own: Columns, block: Block, pipes: Pipes
) -> Generator[Wait, None, Begun]:
    """The n-th row block, i: add to dk and dv; of the one before multiply dQ, and with late.dk dK."""
    price, late = own.work.costs, own.work.late
    rows = yield from pipes.rows.take(n)
    if before and late.dk:
        dk = start_dk(before, own, block)
    s = block.start("tensor", price.product, f"S {n}", lambda: own.scores(i, rows))
    if before:
        dq = yield from start_dq(n - 1, own, block, pipes)
    yield s.done()
    if before and late.dk:
        yield from finish_dk(before, dk, pipes)
    clocks = price.softmax * (price.slow if own.c else 1)
    p = block.start("exp", clocks, f"P {n}", lambda: np.exp(own.work.tau * s.result))
    yield p.done()
    if not late.dv:
        dv = start_dv(n, p.result, rows, own, block)
    if before:
        yield dq.done()
        yield from add_dq(before.i, dq, own, pipes)
    dp = block.start("tensor", price.product, f"dP {n}", lambda: own.dp(rows))
    yield dp.done()
    now = Begun(n, i, rows, p.result * dp.result)
    pipes.ds.share(own.c, n, now.ds)
    if late.dv:
        dv = start_dv(n, p.result, rows, own, block)
    if late.dk:
        yield dv.done()
    else:
        dk = start_dk(now, own, block)
        yield dv.done()
        yield from finish_dk(now, dk, pipes)
    return now


def start_dv(n: int, p: np.ndarray, rows: Callable[[], np.ndarray], own: Columns, block: Block) -> Job:
    """Start to add P dO."""
    return block.start("tensor", own.work.costs.product, f"dV {n}", lambda: own.add("dv", p, split(rows())[1]))


def start_dk(of: Begun, own: Columns, block: Block) -> Job:
    """Start to add dS Q."""
    product = own.work.costs.product
    return block.start("tensor", product, f"dK {of.n}", lambda: own.add("dk", of.ds, split(of.rows())[0]))


def finish_dk(of: Begun, dk: Job, pipes: Pipes) -> Generator[Wait]:
    """Wait for dK's product; Q and dO are free then."""
    yield dk.done()
    pipes.rows.release(of.n)


def start_dq(n: int, own: Columns, block: Block, pipes: Pipes) -> Generator[Wait, None, Job]:
    """Start this consumer's part of the n-th row block's dQ: all columns of the block, half of those of dQ."""
    ds = yield from pipes.ds.both(n)
    return block.start("tensor", own.work.costs.product, f"dQ {n}", lambda: ds().T @ own.k()[:, part(own)])


def add_dq(i: int, dq: Job, own: Columns, pipes: Pipes) -> Generator[Wait]:
    """Have it added to HBM."""
    yield from pipes.sums.add(own.c, own.work.tiling.rows(i), part(own), dq.result)


def part(own: Columns) -> slice:
    """The columns of dQ that a consumer multiplies."""
    d = own.work.Q.shape[1]
    return slice(own.c * d // CONSUMERS, (own.c + 1) * d // CONSUMERS)


# One thread block ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one thread block computed, and how."""

    dQ: np.ndarray
    dK: np.ndarray
    dV: np.ndarray
    block: Block
    pipes: Pipes


def backward(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    O: np.ndarray,
    L: np.ndarray,
    dO: np.ndarray,
    tiling: Tiling,
    places: int = 2,
    costs: Costs = Costs(),
    tensor: str = SHARED,
    late: Late = Late(),
) -> Run:
    """One head by one thread block, column block after column block; `places` for dS. tiling.B_c must be even."""
    whole_number("places", places, low=1)
    if tiling.B_c % CONSUMERS:
        raise ValueError(f"B_c: got {tiling.B_c}; it takes an even number, half for each consumer")
    block, nobody = Block(tensor=tensor), np.isneginf(L)
    starts = np.where(nobody, -np.inf, -L * np.sqrt(Q.shape[1])), np.where(nobody, 0.0, -(dO * O).sum(axis=1))
    dQ, dK, dV = np.zeros(Q.shape), np.full(K.shape, np.nan), np.full(V.shape, np.nan)
    work = Work(Q, K, V, dO, np.stack(starts, axis=1), tiling, costs, late, dK, dV)
    k, v, rows = (Ring(block, tensor, stages, CONSUMERS) for tensor, stages in (("K", 2), ("V", 1), ("rows", 2)))
    pipes = Pipes(Mailbox(block, CONSUMERS), k, v, rows, Exchange(block, places), Sums(block, dQ, costs.add))
    actors = {PRODUCER: producer(pipes, work, count())}
    actors |= {name(c): consumer(c, block, pipes, work) for c in range(CONSUMERS)}
    block.run(actors)
    return Run(work.tau * dQ, dK, dV, block, pipes)
