"""Simulate the events of the ring in chapters 12a and 12b in random order.

Actors are generators that yield a barrier, the phase whose end they wait for, and a description of the wait.
"""

import random
from collections.abc import Callable, Iterator

import numpy as np

from fa2_lab.machine.asynchrony import Barrier

# A wait that ends immediately, which gives another actor the chance to run first.
PAUSE = (Barrier("nothing", 1), 1, "")


class RingModel:
    """A ring of stages, each of which holds one tile and has two barriers, `filled` and `emptied`."""

    def __init__(self, stages: int, consumers: int, name: str = "the ring"):
        self.stages, self.tiles, self.name = stages, [None] * stages, name
        self.latest = [None] * stages  # number of the tile in each stage, set when its copy starts
        self.filled = [Barrier("filled", 1) for _ in range(stages)]
        self.emptied = [Barrier("emptied", consumers) for _ in range(stages)]

    def load(self, n: int) -> Iterator[tuple]:
        """As the producer, wait until the stage of tile n is empty, and then copy the tile, whose content is n."""
        yield self.acquire(n)
        yield from self.copy(n)

    def acquire(self, n: int) -> tuple:
        stage = n % self.stages
        return self.emptied[stage], (n // self.stages & 1) ^ 1, f"room for {self.name}'s tile {n}"

    def copy(self, n: int) -> Iterator[tuple]:
        self.latest[n % self.stages] = n
        self.tiles[n % self.stages] = np.nan  # during the copy, the stage contains neither the old nor the new tile
        yield PAUSE
        self.tiles[n % self.stages] = n
        self.filled[n % self.stages].arrive("copy engine")

    def wait(self, n: int) -> Iterator[tuple]:
        """As a consumer, wait for tile n, and return its stage."""
        stage = n % self.stages
        yield self.filled[stage], n // self.stages & 1, f"{self.name}'s tile {n}"
        return stage

    def release(self, n: int) -> None:
        """As a consumer, release tile n, which is no longer needed."""
        self.emptied[n % self.stages].arrive("consumer")


def run_actors(actors: dict, seed: int) -> str:
    """Run all actors until each has ended or all of them wait.

    Return "all done", or a text that states what each of the waiting actors waits for.
    """
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


def try_consumer(consumer: Callable, seed: int, stages: int = 2, consumers: int = 3, T: int = 6) -> tuple[str, list]:
    """Run a producer of T tiles with several consumers. Return the outcome and the tiles that each consumer read."""
    ring, seen = RingModel(stages, consumers), [[] for _ in range(consumers)]
    actors = {f"consumer {c}": consumer(ring, T, c, seen) for c in range(consumers)}
    actors["producer"] = (wait for n in range(T) for wait in ring.load(n))
    return run_actors(actors, seed), seen
