"""The Hopper forward as a timetable that runs anywhere: its rings, mailbox and ping-pong, on units and a clock.

Names and order are those of kernels/hopper, but that V's tiles have releases of their own: there one release stands for
a tile of V and the next of K. One thread block: a producer that starts copies, and consumers that own B_r rows each.
Nothing is multiplied here: that the kernel itself waits for all that it reads, tests see without a GPU.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

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
        self.filled = [Barrier(f"{tensor} filled", 1) for _ in range(stages)]
        self.emptied = [Barrier(f"{tensor} emptied", consumers) for _ in range(stages)]

    def fill(self, n: int, clocks: float) -> Generator[Wait, None, Job]:
        """Producer: copy the n-th tile into its place, once that stage is empty."""
        stage = n % self.stages
        yield self.emptied[stage].over((n // self.stages & 1) ^ 1)
        return self.block.start("copy", clocks, f"{self.tensor} {n}", lambda: self.filled[stage].arrive("copy engine"))

    def take(self, n: int) -> Generator[Wait]:
        """Consumer: wait until the n-th tile is there."""
        yield self.filled[n % self.stages].over(n // self.stages & 1)

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


# The producer and a consumer ----------------------------------------------------------------------------------


@dataclass
class Work:
    """What one thread block has to do: row blocks of `consumers` times B_r rows, the lowest first."""

    tiling: Tiling
    consumers: int
    costs: Costs

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


def producer(pipes: Pipes, work: Work, counter: Iterator[int]) -> Generator[Wait]:
    """Start every copy as early as its stage is free. V's tile is needed a step later than K's, so K runs ahead."""
    copy = work.costs.copy
    n = r = 0  # tiles of K, and of V, so far; row blocks so far
    t = next(counter)
    yield from pipes.mailbox.send(r, t)
    while t < work.blocks:
        columns = work.all_columns(t)
        yield from pipes.k.fill(n, copy)
        for c in range(work.consumers):
            yield from pipes.q.fill(r * work.consumers + c, copy)
        for _ in columns[1:]:
            yield from pipes.k.fill(n + 1, copy)
            yield from pipes.v.fill(n, copy)
            n += 1
        t = next(counter)
        yield from pipes.v.fill(n, copy)
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
        yield from pipes.q.take(q_tile)
        before = all_columns.index(columns[0]) if columns else len(all_columns)  # tiles that only lower rows see
        for m in range(n, n + before):
            yield from skip(c, m, pipes)
        if columns:
            yield from visit(c, n + before, block, columns, pipes, work.costs)
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


# Two ways through the tiles -----------------------------------------------------------------------------------


def start_scores(c: int, n: int, block: Block, pipes: Pipes, costs: Costs) -> Generator[Wait, None, Job]:
    """Start Q Kᵀ of the n-th tile."""
    yield from pipes.k.take(n)
    yield from pipes.ping_pong.wait(c, n)
    return block.start("tensor", costs.scores, f"S {n}")


def start_values(n: int, block: Block, pipes: Pipes, costs: Costs) -> Generator[Wait, None, Job]:
    """Start P V of the n-th tile."""
    yield from pipes.v.take(n)
    return block.start("tensor", costs.values, f"PV {n}")


def exponentiate(n: int, block: Block, costs: Costs) -> Wait:
    """The softmax step, as long as its exponentials take."""
    return block.start("exp", costs.softmax, f"P {n}").done()


def look_ahead(c: int, n: int, block: Block, columns: list, pipes: Pipes, costs: Costs) -> Generator[Wait]:
    """As the kernel does it: Q Kᵀ of a tile and P V of the one before start together, exponentials run under P V."""
    s = yield from start_scores(c, n, block, pipes, costs)
    pipes.ping_pong.pass_on(c)
    yield s.done()
    pipes.k.release(n)
    yield exponentiate(n, block, costs)
    for _ in columns[1:]:
        n += 1
        s = yield from start_scores(c, n, block, pipes, costs)
        pv = yield from start_values(n - 1, block, pipes, costs)
        pipes.ping_pong.pass_on(c)
        yield s.done()
        pipes.k.release(n)
        yield exponentiate(n, block, costs)
        yield pv.done()
        pipes.v.release(n - 1)
    pv = yield from start_values(n, block, pipes, costs)
    yield pv.done()
    pipes.v.release(n)


def in_sequence(c: int, n: int, block: Block, columns: list, pipes: Pipes, costs: Costs) -> Generator[Wait]:
    """As one writes it first: every tile to its end before the next one, every step to its end before the next step."""
    for _ in columns:
        s = yield from start_scores(c, n, block, pipes, costs)
        pipes.ping_pong.pass_on(c)
        yield s.done()
        pipes.k.release(n)
        yield exponentiate(n, block, costs)
        pv = yield from start_values(n, block, pipes, costs)
        yield pv.done()
        pipes.v.release(n)
        n += 1


# One thread block ---------------------------------------------------------------------------------------------


def forward(
    tiling: Tiling,
    consumers: int = 2,
    stages: int = 2,
    ping_pong: bool = False,
    visit: Callable = look_ahead,
    costs: Costs = Costs(),
    tensor: str = SHARED,
) -> tuple[Block, Pipes]:
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
    work = Work(tiling, consumers, costs)
    actors = {PRODUCER: producer(pipes, work, count())}
    actors |= {name(c): consumer(c, block, pipes, work, visit) for c in range(consumers)}
    return block.run(actors), pipes


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
