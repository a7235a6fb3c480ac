"""The Hopper forward as a model that runs anywhere: its rings, mailbox and ping-pong, on NumPy tiles and a clock.

Names and order are those of kernels/hopper, but that V's tiles have releases of their own: there one release stands for
a tile of V and the next of K. One thread block: a producer that starts copies, and consumers that own B_r rows each.
Numbers are computed when a job ends, from what lies in shared memory at that moment; while a copy is on its way, its
stage holds NaN. So a barrier too few shows in the result, and one too many as a Deadlock.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from fa2_lab.machine.asynchrony import SHARED, Barrier, Block, Job, Wait
from fa2_lab.machine.chips import Chip
from fa2_lab.machine.grid import Placed, Schedule
from fa2_lab.tiles import Tiling, cdiv, whole_number

PRODUCER = "producer"


def name(c: int) -> str:
    return f"consumer {c}"


@dataclass(frozen=True)
class Costs:
    """Clocks: of a copy, of Q Kᵀ and of P V of one consumer's tile, and of its exponentials."""

    copy: float = 600.0
    scores: float = 256.0
    values: float = 256.0
    softmax: float = 512.0


def costs(chip: Chip, B_r: int, B_c: int, d: int, copy: float = 600.0) -> Costs:
    """Clocks of a tile if a unit had nothing else to do; `copy` is the time from the start of a copy to its end."""
    product = 2 * B_r * B_c * d / chip.tensor_per_clock
    return Costs(copy, product, product, B_r * B_c / chip.exp_per_clock)


# What they share ----------------------------------------------------------------------------------------------


class Ring:
    """Tiles in shared memory, one to a stage. The producer fills the n-th tile; consumers take it, then release it."""

    def __init__(self, block: Block, tensor: str, stages: int, consumers: int):
        self.block, self.tensor, self.stages = block, tensor, stages
        self.tiles: list = [None] * stages
        self.filled = [Barrier(f"{tensor} filled", 1) for _ in range(stages)]
        self.emptied = [Barrier(f"{tensor} emptied", consumers) for _ in range(stages)]

    def fill(self, n: int, tile: np.ndarray, clocks: float) -> Generator[Wait, None, Job]:
        """Producer: copy a tile into the n-th place, once its stage is empty."""
        stage = n % self.stages
        yield self.emptied[stage].over((n // self.stages & 1) ^ 1)
        self.tiles[stage] = np.full_like(tile, np.nan)  # half of the old tile, half of the new one

        def arrived() -> None:
            self.tiles[stage] = tile
            self.filled[stage].arrive("copy engine")

        return self.block.start("copy", clocks, f"{self.tensor} {n}", arrived)

    def take(self, n: int) -> Generator[Wait, None, Callable[[], np.ndarray]]:
        """Consumer: the n-th tile as soon as it is there: where it lies, not what it holds."""
        stage = n % self.stages
        yield self.filled[stage].over(n // self.stages & 1)
        return lambda: self.tiles[stage]

    def release(self, n: int) -> None:
        """Consumer: the n-th tile is no longer needed here."""
        self.emptied[n % self.stages].arrive(self.block.actor)


class PingPong:
    """Consumers start their products in turn, 0, 1, … and round again. Without `used` nobody waits for anybody."""

    def __init__(self, block: Block, consumers: int, used: bool):
        self.block, self.used = block, used
        self.begun = [Barrier("ping-pong", 1) for _ in range(consumers)]
        if used:
            self.begun[0].arrive("the start")

    def wait(self, c: int, n: int) -> Generator[Wait]:
        """Consumer c waits until it may start its n-th products."""
        if self.used:
            yield self.begun[c].over(n & 1)

    def pass_on(self, c: int) -> None:
        """Consumer c has started its products: the next one may start."""
        if self.used:
            self.begun[(c + 1) % len(self.begun)].arrive(self.block.actor)


class Mailbox:
    """What the producer tells the consumers about each block; it may be one block ahead of them."""

    def __init__(self, block: Block, consumers: int):
        self.block = block
        self.letters: list = [None, None]
        self.filled = [Barrier("mailbox filled", 1) for _ in range(2)]
        self.emptied = [Barrier("mailbox emptied", consumers) for _ in range(2)]

    def send(self, n: int, letter: object) -> Generator[Wait]:
        """Producer: what there is to know of the n-th block."""
        yield self.emptied[n % 2].over((n // 2 & 1) ^ 1)
        self.letters[n % 2] = letter
        self.filled[n % 2].arrive(self.block.actor)

    def wait(self, n: int) -> Generator[Wait, None, Any]:
        """Consumer: until the letter about the n-th block is there; returns it."""
        yield self.filled[n % 2].over(n // 2 & 1)
        return self.letters[n % 2]

    def release(self, n: int) -> None:
        """Consumer: the letter about the n-th block is no longer needed here."""
        self.emptied[n % 2].arrive(self.block.actor)


@dataclass
class Pipes:
    """The shared memory of one thread block."""

    q: Ring  # two stages for each consumer
    k: Ring
    v: Ring
    ping_pong: PingPong
    mailbox: Mailbox


# Rows and their state -----------------------------------------------------------------------------------------


@dataclass
class Rows:
    """The rows of one consumer: where they see what, and their m, l and undivided o."""

    tiling: Tiling
    i: int
    q: Callable[[], np.ndarray]
    d: int
    m: np.ndarray = field(init=False)
    l: np.ndarray = field(init=False)
    o: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rows = self.tiling.rows(self.i)
        b = rows.stop - rows.start
        self.m, self.l, self.o = np.full(b, -np.inf), np.zeros(b), np.zeros((b, self.d))

    def scores(self, k: np.ndarray, j: int) -> np.ndarray:
        """Masked scores of tile (i, j)."""  # (B_r, B_c)
        s = self.q() @ k.T / np.sqrt(self.d)
        return np.where(self.tiling.visible(self.i, j), s, -np.inf)

    def softmax_step(self, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """s into m and l: p, and alpha, by which what came before shrinks."""  # (B_r, B_c), (B_r,)
        m_new = np.maximum(self.m, s.max(axis=1))
        m_ref = np.where(np.isneginf(m_new), 0.0, m_new)
        p, alpha = np.exp(s - m_ref[:, None]), np.exp(self.m - m_ref)
        self.m, self.l = m_new, alpha * self.l + p.sum(axis=1)
        return p, alpha

    def add(self, p: np.ndarray, v: np.ndarray) -> None:
        self.o = self.o + p @ v

    def shrink(self, alpha: np.ndarray) -> None:
        self.o = alpha[:, None] * self.o


# The producer and a consumer ----------------------------------------------------------------------------------


@dataclass
class Work:
    """What one thread block has to do: row blocks of `consumers` times B_r rows, the lowest first."""

    Q: np.ndarray
    K: np.ndarray
    V: np.ndarray
    tiling: Tiling
    consumers: int
    costs: Costs
    O: np.ndarray
    L: np.ndarray

    @property
    def blocks(self) -> int:
        return cdiv(self.tiling.T_r, self.consumers)

    def rows_of(self, t: int) -> list[int]:
        """The consumers' row blocks in the t-th block, heavy before light; some may lie below the last row."""
        first = (self.blocks - 1 - t) * self.consumers
        return list(range(first, first + self.consumers))

    def columns(self, i: int) -> list[int]:
        """The column blocks that row block i visits, from right to left; at least one, but none below the last row."""
        return (self.tiling.visited_cols(i)[::-1] or [0]) if i < self.tiling.T_r else []

    def all_columns(self, t: int) -> list[int]:
        """The column blocks that any consumer of the t-th block visits, from right to left."""
        return sorted({j for i in self.rows_of(t) for j in self.columns(i)}, reverse=True)

    def q(self, i: int) -> np.ndarray:
        return self.Q[self.tiling.rows(i)] if i < self.tiling.T_r else np.zeros((0, self.Q.shape[1]))


def producer(pipes: Pipes, work: Work, counter: Iterator[int]) -> Generator[Wait]:
    """Start every copy as early as its stage is free. V's tile is needed a step later than K's, so K runs ahead."""
    K, V, tiling, copy = work.K, work.V, work.tiling, work.costs.copy
    n = r = 0  # tiles of K, and of V, so far; row blocks so far
    t = next(counter)
    yield from pipes.mailbox.send(r, t)
    while t < work.blocks:
        columns = work.all_columns(t)
        yield from pipes.k.fill(n, K[tiling.cols(columns[0])], copy)
        for c, i in enumerate(work.rows_of(t)):
            yield from pipes.q.fill(r * work.consumers + c, work.q(i), copy)
        for k, v in zip(columns[1:], columns[:-1], strict=True):
            yield from pipes.k.fill(n + 1, K[tiling.cols(k)], copy)
            yield from pipes.v.fill(n, V[tiling.cols(v)], copy)
            n += 1
        t = next(counter)
        yield from pipes.v.fill(n, V[tiling.cols(columns[-1])], copy)
        n += 1
        r += 1
        yield from pipes.mailbox.send(r, t)


def consumer(c: int, block: Block, pipes: Pipes, work: Work, visit: Callable) -> Generator[Wait]:
    """Consumer c: its rows of every row block that this thread block gets."""
    n = r = 0
    t = yield from receive(r, pipes.mailbox)
    while t < work.blocks:
        i = work.rows_of(t)[c]
        all_columns, columns = work.all_columns(t), work.columns(i)
        q_tile = r * work.consumers + c
        q = yield from pipes.q.take(q_tile)
        before = all_columns.index(columns[0]) if columns else len(all_columns)  # tiles that only lower rows see
        for m in range(n, n + before):
            yield from skip(c, m, pipes)
        if columns:
            rows = Rows(work.tiling, i, q, work.Q.shape[1])
            yield from visit(c, n + before, block, rows, columns, pipes, work.costs)
            store(rows, work)
        for m in range(n + before + len(columns), n + len(all_columns)):  # a window: tiles that only upper rows see
            yield from skip(c, m, pipes)
        n += len(all_columns)
        pipes.q.release(q_tile)
        r += 1
        t = yield from receive(r, pipes.mailbox)


def receive(r: int, mailbox: Mailbox) -> Generator[Wait, None, int]:
    """The number of the r-th row block of this program."""
    t = yield from mailbox.wait(r)
    mailbox.release(r)
    return t


def skip(c: int, n: int, pipes: Pipes) -> Generator[Wait]:
    """Skip a tile that these rows do not see, but keep the rings and ping-pong in step."""
    yield from pipes.ping_pong.wait(c, n)
    pipes.ping_pong.pass_on(c)
    for ring in (pipes.k, pipes.v):
        yield from ring.take(n)
        ring.release(n)


def store(rows: Rows, work: Work) -> None:
    """Divide by l and write O and L."""
    l = np.where(rows.l == 0, 1.0, rows.l)  # a row that sees no key: O = 0 and L = −inf
    where = work.tiling.rows(rows.i)
    work.O[where], work.L[where] = rows.o / l[:, None], rows.m + np.log(l)


# Two ways through the tiles -----------------------------------------------------------------------------------


def start_scores(
    c: int, n: int, j: int, block: Block, rows: Rows, pipes: Pipes, costs: Costs
) -> Generator[Wait, None, Job]:
    """Start Q Kᵀ of the n-th tile, column block j."""
    k = yield from pipes.k.take(n)
    yield from pipes.ping_pong.wait(c, n)
    return block.start("tensor", costs.scores, f"S {n}", lambda: rows.scores(k(), j))


def start_values(
    n: int, p: np.ndarray, block: Block, rows: Rows, pipes: Pipes, costs: Costs
) -> Generator[Wait, None, Job]:
    """Start P V of the n-th tile."""
    v = yield from pipes.v.take(n)
    return block.start("tensor", costs.values, f"PV {n}", lambda: rows.add(p, v()))


def exponentiate(n: int, s: np.ndarray, block: Block, rows: Rows, costs: Costs) -> Generator[Wait, None, tuple]:
    """The softmax step, as long as its exponentials take."""
    job = block.start("exp", costs.softmax, f"P {n}", lambda: rows.softmax_step(s))
    yield job.done()
    return job.result


def look_ahead(
    c: int, n: int, block: Block, rows: Rows, columns: list[int], pipes: Pipes, costs: Costs
) -> Generator[Wait]:
    """As the kernel does it: Q Kᵀ of a tile and P V of the one before start together, exponentials run under P V."""
    s = yield from start_scores(c, n, columns[0], block, rows, pipes, costs)
    pipes.ping_pong.pass_on(c)
    yield s.done()
    pipes.k.release(n)
    p, _ = yield from exponentiate(n, s.result, block, rows, costs)
    for j in columns[1:]:
        n += 1
        s = yield from start_scores(c, n, j, block, rows, pipes, costs)
        pv = yield from start_values(n - 1, p, block, rows, pipes, costs)
        pipes.ping_pong.pass_on(c)
        yield s.done()
        pipes.k.release(n)
        p, alpha = yield from exponentiate(n, s.result, block, rows, costs)
        yield pv.done()
        pipes.v.release(n - 1)
        rows.shrink(alpha)
    pv = yield from start_values(n, p, block, rows, pipes, costs)
    yield pv.done()
    pipes.v.release(n)


def in_sequence(
    c: int, n: int, block: Block, rows: Rows, columns: list[int], pipes: Pipes, costs: Costs
) -> Generator[Wait]:
    """As one writes it first: every tile to its end before the next one, every step to its end before the next step."""
    for j in columns:
        s = yield from start_scores(c, n, j, block, rows, pipes, costs)
        pipes.ping_pong.pass_on(c)
        yield s.done()
        pipes.k.release(n)
        p, alpha = yield from exponentiate(n, s.result, block, rows, costs)
        rows.shrink(alpha)
        pv = yield from start_values(n, p, block, rows, pipes, costs)
        yield pv.done()
        pipes.v.release(n)
        n += 1


# One thread block ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one thread block computed, and how."""

    O: np.ndarray
    L: np.ndarray
    block: Block
    pipes: Pipes


def forward(
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    tiling: Tiling,
    consumers: int = 2,
    stages: int = 2,
    ping_pong: bool = False,
    visit: Callable = look_ahead,
    costs: Costs = Costs(),
    tensor: str = SHARED,
) -> Run:
    """One head by one thread block, which draws the numbers 0, 1, 2, … alone."""
    whole_number("consumers", consumers, low=1, high=3)
    whole_number("stages", stages, low=1)
    if tiling.mask.allowed is not None:
        raise ValueError("tiling: got a mask of its own for every entry; it takes one that leaves each row an interval")
    block = Block(tensor=tensor)
    rings = (
        Ring(block, "Q", 2 * consumers, 1),
        Ring(block, "K", stages, consumers),
        Ring(block, "V", stages, consumers),
    )
    pipes = Pipes(*rings, PingPong(block, consumers, ping_pong), Mailbox(block, consumers))
    O, L = np.full(Q.shape, np.nan), np.full(len(Q), np.nan)
    work = Work(Q, K, V, tiling, consumers, costs, O, L)
    actors = {PRODUCER: producer(pipes, work, count())}
    actors |= {name(c): consumer(c, block, pipes, work, visit) for c in range(consumers)}
    return Run(O, L, block.run(actors), pipes)


# Many thread blocks -------------------------------------------------------------------------------------------


def dealt(costs: list[float], SMs: int) -> Schedule:
    """Program p gets blocks p, p + SMs, p + 2 SMs …, decided before anything runs. (Drawn: machine.grid.schedule.)"""
    whole_number("SMs", SMs, low=1)
    free, placed = [0.0] * SMs, []
    for n, cost in enumerate(costs):
        SM = n % SMs
        placed.append(Placed(n, SM, 0, free[SM], free[SM] + cost))
        free[SM] += cost
    return Schedule(tuple(placed), SMs, 1)
