"""The Hopper forward over time: two rings, a producer and consumers, on the units of an SM.

One thread block with a row block for each consumer, all tiles visited. Rings and order are those of kernels/hopper,
but that V's tiles have releases of their own: there one release stands for a tile of V and the next of K. Nothing is
multiplied here: that the kernel itself waits for all that it reads, tests see without a GPU.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass

from fa2_lab.machine.asynchrony import SHARED, Barrier, Block, Job, Wait
from fa2_lab.machine.chips import Chip
from fa2_lab.tiles import whole_number


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


class Ring:
    """Tiles in shared memory, one to a stage. The producer fills the n-th tile; consumers take it, then release it."""

    def __init__(self, block: Block, tensor: str, stages: int, consumers: int):
        self.block, self.tensor, self.stages = block, tensor, stages
        self.filled = [Barrier(f"{tensor} filled", 1) for _ in range(stages)]
        self.emptied = [Barrier(f"{tensor} emptied", consumers) for _ in range(stages)]

    def fill(self, n: int, clocks: float) -> Generator[Wait]:
        """Producer: copy the n-th tile into its place, once that stage is empty."""
        stage = n % self.stages
        yield self.emptied[stage].over((n // self.stages & 1) ^ 1)
        self.block.start("copy", clocks, f"{self.tensor} {n}", lambda: self.filled[stage].arrive("copy engine"))

    def take(self, n: int) -> Generator[Wait]:
        """Consumer: wait until the n-th tile is there."""
        yield self.filled[n % self.stages].over(n // self.stages & 1)

    def release(self, n: int) -> None:
        """Consumer: the n-th tile is no longer needed here."""
        self.emptied[n % self.stages].arrive(self.block.actor)


def producer(T: int, k: Ring, v: Ring, copy: float) -> Generator[Wait]:
    """Start every copy as early as its stage is free. V's tile is needed a step later than K's, so K runs ahead."""
    yield from k.fill(0, copy)
    for n in range(1, T):
        yield from k.fill(n, copy)
        yield from v.fill(n - 1, copy)
    yield from v.fill(T - 1, copy)


# Two ways through T tiles ---------------------------------------------------------------------------------------


def product(what: str, n: int, ring: Ring, clocks: float) -> Generator[Wait, None, Job]:
    """Start Q Kᵀ or P V with the n-th tile of K or V."""
    yield from ring.take(n)
    return ring.block.start("tensor", clocks, f"{what} {n}")


def softmax(n: int, s: Job, block: Block, k: Ring, costs: Costs) -> Generator[Wait]:
    """When the scores are there: K is free, and the softmax step takes as long as its exponentials."""
    yield s.done()
    k.release(n)
    yield block.start("exp", costs.softmax, f"P {n}").done()


def look_ahead(T: int, block: Block, k: Ring, v: Ring, costs: Costs) -> Generator[Wait]:
    """As the kernel does it: Q Kᵀ of a tile and P V of the one before start together, exponentials run under P V."""
    s = yield from product("S", 0, k, costs.scores)
    yield from softmax(0, s, block, k, costs)
    for n in range(1, T):
        s = yield from product("S", n, k, costs.scores)
        pv = yield from product("PV", n - 1, v, costs.values)
        yield from softmax(n, s, block, k, costs)
        yield pv.done()
        v.release(n - 1)
    pv = yield from product("PV", T - 1, v, costs.values)
    yield pv.done()
    v.release(T - 1)


def in_sequence(T: int, block: Block, k: Ring, v: Ring, costs: Costs) -> Generator[Wait]:
    """As one writes it first: every tile to its end before the next one, every step to its end before the next step."""
    for n in range(T):
        s = yield from product("S", n, k, costs.scores)
        yield from softmax(n, s, block, k, costs)
        pv = yield from product("PV", n, v, costs.values)
        yield pv.done()
        v.release(n)


def forward(
    T: int,
    consumers: int = 2,
    stages: int = 2,
    visit: Callable = look_ahead,
    costs: Costs = Costs(),
    tensor: str = SHARED,
) -> Block:
    """One thread block whose consumers visit T tiles each."""
    for name, value in (("T", T), ("consumers", consumers), ("stages", stages)):
        whole_number(name, value, low=1)
    block = Block(tensor=tensor)
    k, v = Ring(block, "K", stages, consumers), Ring(block, "V", stages, consumers)
    actors = {"producer": producer(T, k, v, costs.copy)}
    actors |= {f"consumer {c}": visit(T, block, k, v, costs) for c in range(consumers)}
    return block.run(actors)
