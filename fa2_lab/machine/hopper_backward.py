"""The Hopper backward as a timetable that runs anywhere: who starts which job when, and who waits for whom.

Names and order are those of kernels/hopper/backward/kernel.py; rings, mailbox and units are the forward model's. Two
consumers own half of a column block each. They meet at dS, which dQ needs from both, and the copy engine adds dQ for
them. Nothing is multiplied here: that the kernel itself waits for all that it reads, tests see without a GPU.
"""

from collections.abc import Generator
from dataclasses import dataclass

from fa2_lab.machine.asynchrony import SHARED, Barrier, Block, Job, Wait
from fa2_lab.machine.chips import Chip
from fa2_lab.machine.hopper import PRODUCER, Mailbox, Ring, name
from fa2_lab.tiles import Tiling

CONSUMERS = 2


@dataclass(frozen=True)
class Costs:
    """Clocks: of a copy, of each product of one consumer, of its exponentials, and of an addition in HBM."""

    copy: float = 600.0
    product: float = 256.0
    softmax: float = 256.0
    add: float = 600.0


def costs(chip: Chip, B_r: int, d: int, copy: float = 600.0, add: float = 600.0) -> Costs:
    """Clocks of a consumer's 64 columns and B_r rows, if a unit had nothing else to do."""
    return Costs(copy, 2 * 64 * B_r * d / chip.tensor_per_clock, 64 * B_r / chip.exp_per_clock, add)


class Shared:
    """The shared memory of one thread block, and the last addition of each consumer."""

    def __init__(self, block: Block) -> None:
        self.mailbox = Mailbox(block, CONSUMERS)
        self.k, self.v = Ring(block, "K", 2, CONSUMERS), Ring(block, "V", 1, CONSUMERS)
        self.rows = Ring(block, "rows", 2, CONSUMERS)  # Q and dO, and what S and dP begin at
        self.ds = Barrier("dS filled", CONSUMERS)
        self.places = 2  # of dS
        self.added: list[Job | None] = [None] * CONSUMERS


@dataclass
class Consumer:
    """A consumer and what it needs to know."""

    c: int
    block: Block
    shared: Shared
    tiling: Tiling
    costs: Costs
    n: int = 0  # row blocks so far

    def run(self) -> Generator[Wait]:
        """Its half of every column block that this thread block gets."""
        shared, r = self.shared, 0
        while row_blocks := (yield from shared.mailbox.wait(r)):
            yield from shared.k.take(r)
            yield from shared.v.take(r)
            for before in [None, *row_blocks[:-1]]:
                yield from self.step(before)
                self.n += 1
            shared.v.release(r)
            dq = yield from self.start_dq()
            yield dq.done()
            shared.k.release(r)
            yield from self.add_dq(row_blocks[-1])
            shared.mailbox.release(r)
            r += 1

    def step(self, before: int | None) -> Generator[Wait]:
        """The n-th row block: its S, P, dV, dP, dK; and the dQ of the row block before, beside P."""
        shared, n = self.shared, self.n
        yield from shared.rows.take(n)
        s = self.product(f"S {n}")
        if before is not None:
            dq = yield from self.start_dq()
        yield s.done()
        yield self.block.start("exp", self.costs.softmax, f"P {n}").done()
        dv = self.product(f"dV {n}")
        if before is not None:
            yield dq.done()
            yield from self.add_dq(before)
        yield self.product(f"dP {n}").done()
        shared.ds.arrive(self.block.actor)
        dk = self.product(f"dK {n}")
        yield dv.done()
        yield dk.done()
        shared.rows.release(n)

    def product(self, label: str) -> Job:
        return self.block.start("tensor", self.costs.product, label)

    def start_dq(self) -> Generator[Wait, None, Job]:
        """This consumer's half of the last row block's dQ, once both have shown their dS of it."""
        yield self.shared.ds.over((self.n - 1) & 1)
        return self.product(f"dQ {self.n - 1}")

    def add_dq(self, i: int) -> Generator[Wait]:
        """Have it added in HBM, once the copy engine has read the part before."""
        if last := self.shared.added[self.c]:
            yield last.done()
        self.shared.added[self.c] = self.block.start("copy", self.costs.add, f"dQ {i * self.tiling.B_r}")


def producer(shared: Shared, tiling: Tiling, costs: Costs) -> Generator[Wait]:
    """Announce every column block, and start every copy as early as its stage is free."""
    n = 0
    for j in range(tiling.T_c):
        row_blocks = tiling.visited_rows(j) or [tiling.T_r - 1]  # the last one where nobody sees these columns
        yield from shared.mailbox.send(j, row_blocks)
        yield from shared.k.fill(j, costs.copy)
        yield from shared.v.fill(j, costs.copy)
        for _ in row_blocks:
            yield from shared.rows.fill(n, costs.copy)
            n += 1
    yield from shared.mailbox.send(tiling.T_c, None)


def backward(tiling: Tiling, costs: Costs = Costs(), tensor: str = SHARED) -> tuple[Block, Shared]:
    """One head by one thread block, column block after column block."""
    block = Block(tensor=tensor)
    shared = Shared(block)
    actors = {PRODUCER: producer(shared, tiling, costs)}
    actors |= {name(c): Consumer(c, block, shared, tiling, costs).run() for c in range(CONSUMERS)}
    return block.run(actors), shared
