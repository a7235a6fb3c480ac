"""Judges of what readers write in chapters 12b and 13: an order of copies, and the order of a step."""

from collections.abc import Callable, Iterator
from itertools import product

from fa2_lab.machine.asynchrony import Barrier, Block, Job
from fa2_studio.book.ring import PAUSE, Ring, run


def verdict(tried: Callable[[], str]) -> None:
    try:
        says = tried()
    except RuntimeError as mistake:
        says = f"wrong: {mistake}"
    except Exception as failure:
        says = f"wrong: {type(failure).__name__}: {failure}"
    print(says)


# Chapter 12b: the copies of a row block -------------------------------------------------------------------------------


def judge_copies(copies: Callable, T: int = 4) -> None:
    """Whether a producer of T tiles neither hangs nor overwrites, with one to three stages, in any order of events."""
    verdict(lambda: try_copies(copies, T))


def try_copies(copies: Callable, T: int) -> str:
    if copies(Ring(1, 2), Ring(1, 2), T) is None:
        return f"not written yet: {copies.__name__} yields nothing"
    right = [f"{what}{n}" for n in range(T + 1) for what, n in (("K", n), ("V", n - 1)) if 0 <= n < T]
    for stages, seed in product((1, 2, 3), range(100)):
        K, V, seen = Ring(stages, 2), Ring(stages, 2), ([], [])
        consumers = {f"consumer {c}": wiping(K, V, T, seen[c]) for c in range(2)}
        ended = run({"the producer": copies(K, V, T)} | consumers, seed)
        if ended != "all done":
            raise RuntimeError(f"stages: {stages}; nobody can go on: {ended}")
        for tiles in seen:
            if tiles != right:
                n = next(n for n, tile in enumerate(tiles) if tile != right[n])
                raise RuntimeError(f"stages: {stages}; where {right[n]} should be there was {tiles[n]}")
    return "right: with one, two and three stages, in 100 orders of events each"


def wiping(K: Ring, V: Ring, T: int, seen: list) -> Iterator[tuple]:
    """A consumer that takes V's first tile before it releases K's."""

    def read(ring, n, what):
        stage = yield from ring.take(n)
        yield PAUSE
        tile = ring.tiles[stage]
        seen.append(f"{what}{tile}")

    for n in range(T):
        yield from read(K, n, "K")
        if n > 0:
            yield from read(V, n - 1, "V")
        else:
            yield from V.take(0)
        K.release(n)
    yield from read(V, T - 1, "V")


# Chapter 13: the order of a step --------------------------------------------------------------------------------------

CONSUMERS = ("consumer 0", "consumer 1")
NEEDS = {"S": "", "P": "S", "dP": "", "dV": "P", "dK": "P dP", "dQ": "P dP", "add dQ": "dQ"}


class Watched(Block):
    """A thread block that refuses work whose operands are not there. One unit is slow, so that waits are needed."""

    def __init__(self, ds_filled: Barrier, slow: str):
        super().__init__()
        self.ds_filled, self.slow = ds_filled, slow

    def start(self, unit: str, clocks: float, label: str, *more: Callable) -> Job:
        what, _, n = label.rpartition(" ")
        both = CONSUMERS if what == "dQ" else (self.actor,)
        needed = [(c, f"{x} {n}") for c in both for x in NEEDS[what].split()]
        if what == "add dQ" and int(n) > 0:
            needed.append((self.actor, f"add dQ {int(n) - 1}"))
        ended = {(job.actor, job.label) for job in self.jobs}
        for c, job in needed:
            if (c, job) not in ended:
                raise RuntimeError(f"{self.actor} starts {label} before {job} of {c} has ended")
        if what == "dQ" and any(self.ds_filled.came[c] <= int(n) for c in CONSUMERS):
            raise RuntimeError(f"{self.actor} starts {label} before both have arrived at ds_filled")
        return super().start(unit, 20 * clocks if unit == self.slow else clocks, label, *more)


def judge_step(order: Callable, T: int = 50) -> None:
    """Whether an order of the backward's step leaves nothing out and waits for all that it needs, and its time."""
    verdict(lambda: try_step(order, T))


def try_step(order: Callable, T: int) -> str:
    for slow, steps in (("tensor", 4), ("exp", 4), ("copy", 4), ("", T)):
        ds_filled = Barrier("dS filled", arrivals=2)
        block = Watched(ds_filled, slow)
        actors = {c: order(block, ds_filled, steps) for c in CONSUMERS}
        if None in actors.values():
            return f"not written yet: {order.__name__} yields nothing"
        done = {(job.actor, job.label) for job in block.run(actors).jobs}
        for c, n, what in product(CONSUMERS, range(steps), NEEDS):
            if (c, f"{what} {n}") not in done:
                raise RuntimeError(f"{c} leaves out {what} {n}")
    return f"right: {block.clock / T:,.0f} clocks a step"
