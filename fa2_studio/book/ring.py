"""The ring of chapters 12a and 12b, event by event: actors are generators, and chance picks who goes on.

An actor yields a barrier, the phase whose end it waits for, and words that say what it waits for.
"""

import random
from collections.abc import Callable, Iterator

import numpy as np

from fa2_lab.machine.asynchrony import Barrier

PAUSE = (Barrier("nothing", 1), 1, "")  # over at once: somebody else may go first


class RingModel:
    """Stages for tiles, and two barriers for each."""

    def __init__(self, stages: int, consumers: int, name: str = "the ring"):
        self.stages, self.tiles, self.name = stages, [None] * stages, name
        self.latest = [None] * stages  # tiles that are there or on their way
        self.filled = [Barrier("filled", 1) for _ in range(stages)]
        self.emptied = [Barrier("emptied", consumers) for _ in range(stages)]

    def fill(self, n: int) -> Iterator[tuple]:
        """Producer: tile n, which holds the number n, as soon as its stage is empty."""
        yield self.room(n)
        yield from self.copy(n)

    def room(self, n: int) -> tuple:
        stage = n % self.stages
        return self.emptied[stage], (n // self.stages & 1) ^ 1, f"room for {self.name}'s tile {n}"

    def copy(self, n: int) -> Iterator[tuple]:
        self.latest[n % self.stages] = n
        self.tiles[n % self.stages] = np.nan  # on its way: neither old nor new
        yield PAUSE
        self.tiles[n % self.stages] = n
        self.filled[n % self.stages].arrive("copy engine")

    def take(self, n: int) -> Iterator[tuple]:
        """Consumer: wait for tile n; returns its stage."""
        stage = n % self.stages
        yield self.filled[stage], n // self.stages & 1, f"{self.name}'s tile {n}"
        return stage

    def release(self, n: int) -> None:
        """Consumer: tile n is no longer needed here."""
        self.emptied[n % self.stages].arrive("consumer")


def run(actors: dict, seed: int) -> str:
    """Run all actors to their ends, or until everybody waits; returns how it ended."""
    chance, asleep = random.Random(seed), dict.fromkeys(actors, PAUSE)
    while asleep:
        awake = [name for name, (bar, phase, _) in asleep.items() if bar.over(phase).ready()]
        if not awake:
            return "; ".join(f"{name} waits for {words}" for name, (*_, words) in asleep.items())
        name = chance.choice(awake)
        asleep[name] = next(actors[name], None)
        if asleep[name] is None:
            del asleep[name]
    return "all done"


def try_out(consumer: Callable, seed: int, stages: int = 2, consumers: int = 3, T: int = 6) -> tuple[str, list]:
    """A producer of T tiles and some consumers: how it ended, and what each consumer has read."""
    ring, seen = RingModel(stages, consumers), [[] for _ in range(consumers)]
    actors = {f"consumer {c}": consumer(ring, T, c, seen) for c in range(consumers)}
    actors["producer"] = (wait for n in range(T) for wait in ring.fill(n))
    return run(actors, seed), seen
