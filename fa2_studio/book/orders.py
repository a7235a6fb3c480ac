"""Check the reader's solutions in chapters 12b and 13: an order of copies, and the order of work in a backward step."""

from collections.abc import Callable, Iterator
from itertools import product

from fa2_lab.machine.asynchrony import Barrier, Job, ThreadBlock
from fa2_studio.book.build import invitation
from fa2_studio.book.ring import PAUSE, RingModel, run_actors


def print_outcome(attempt: Callable[[], str]) -> None:
    try:
        says = attempt()
    except RuntimeError as mistake:
        says = f"wrong: {mistake}"
    except Exception as failure:
        says = f"wrong: {type(failure).__name__}: {failure}"
    print(says)


CONSUMERS = ("consumer 0", "consumer 1")

# Chapter 12b: the copies of a row block -------------------------------------------------------------------------------


def check_copies(copies: Callable) -> None:
    """Print whether a producer neither hangs nor overwrites a tile that is still needed.

    The producer runs with one, two and three stages, each time with 100 random orders of events.
    """
    print_outcome(lambda: try_copies(copies))


def try_copies(copies: Callable) -> str:
    T = 4
    if copies(RingModel(1, 2), RingModel(1, 2), T) is None:
        return invitation(copies.__name__)
    for stages, seed in product((1, 2, 3), range(100)):
        K, V = RingModel(stages, 2, "K"), RingModel(stages, 2, "V")
        consumers = {c: watchful_consumer(K, V, T, c) for c in CONSUMERS}
        try:
            ended = run_actors({"the producer": only_waits(copies(K, V, T))} | consumers, seed)
        except RuntimeError as mistake:
            raise RuntimeError(f"with stages = {stages}, {mistake}") from None
        if ended != "all done":
            over = "" if "the producer" in ended else "the producer has ended; "
            raise RuntimeError(f"with stages = {stages}, no actor can go on: {over}{ended}")
    return "right: with one, two and three stages, in 100 orders of events each"


def only_waits(producer: Iterator) -> Iterator[tuple]:
    """Yield what a producer yields. Raises RuntimeError for anything that is not a wait."""
    for wait in producer:
        if not isinstance(wait, tuple):
            raise RuntimeError(
                "you yielded a copy or a part of a wait. Write `yield K.acquire(n)` and `yield from K.copy(n)`"
            )
        yield wait


def watchful_consumer(K: RingModel, V: RingModel, T: int, actor: str) -> Iterator[tuple]:
    """Run a consumer that waits for the first tile of V before it releases the first tile of K.

    Raises RuntimeError if a tile is overwritten before it has been read.
    """

    def read(ring, n):
        stage = yield from ring.wait(n)
        yield PAUSE
        if ring.tiles[stage] != n:
            over = f"tile {ring.latest[stage]}"
            raise RuntimeError(f"{ring.name}'s tile {n} was overwritten by {over} before {actor} had read it")

    for n in range(T):
        yield from read(K, n)
        if n > 0:
            yield from read(V, n - 1)
        else:
            yield from V.wait(0)
        K.release(n)
    yield from read(V, T - 1)


# Chapter 13: the order of a step --------------------------------------------------------------------------------------

NEEDS = {"S": "", "P": "S", "dP": "", "dV": "P", "dK": "P dP", "dQ": "P dP", "add dQ": "dQ"}


class WatchedBlock(ThreadBlock):
    """A thread block that raises RuntimeError if a job starts before its operands exist.

    To reveal a missing wait, the unit `slow` takes 20 times as long as usual for the consumers in `slow_actors`.
    Slowing down only one consumer also reveals a missing wait for the other one.
    """

    def __init__(self, ds_filled: Barrier, slow: str, slow_actors: tuple[str, ...]):
        super().__init__()
        self.ds_filled, self.slow, self.slow_actors = ds_filled, slow, slow_actors
        # {(actor, label): (clock, number of jobs begun earlier)}
        self.begun: dict[tuple[str, str], tuple[float, int]] = {}

    def start(self, unit: str, clocks: float, label: str, *more: Callable) -> Job:
        what, _, n = label.rpartition(" ")
        if what not in NEEDS or not n.isdigit():
            raise RuntimeError(
                f"{label!r} is not a label. A label is one of {', '.join(NEEDS)}, followed by the number of the step"
            )
        both = CONSUMERS if what == "dQ" else (self.actor,)
        needed = [(c, f"{x} {n}") for c in both for x in NEEDS[what].split()]
        if what == "add dQ" and int(n) > 0:
            needed.append((self.actor, f"add dQ {int(n) - 1}"))
        ended = {(job.actor, job.label) for job in self.jobs}
        for c, job in needed:
            if (c, job) not in ended:
                raise RuntimeError(f"{self.actor} starts {label} before {job} of {c} has ended")
        if what == "dQ" and any(self.ds_filled.arrival_counts[c] <= int(n) for c in CONSUMERS):
            raise RuntimeError(f"{self.actor} starts {label} before both consumers have arrived at ds_filled")
        self.begun[self.actor, label] = (self.clock, len(self.begun))
        slow = unit == self.slow and self.actor in self.slow_actors
        return super().start(unit, 20 * clocks if slow else clocks, label, *more)

    def differences_from_task(self, steps: int) -> list[str]:
        """Describe how an order whose operands are right still differs from the order that the exercise requires."""
        ended = {(job.actor, job.label): job.ended for job in self.jobs}
        found = []
        for c, n in product(CONSUMERS, range(steps - 1)):
            s, dp, dq, following = (self.begun[c, x] for x in (f"S {n}", f"dP {n}", f"dQ {n}", f"S {n + 1}"))
            if s[0] != dp[0]:
                found.append("S and dP are not started together")
            if dq[1] > following[1]:
                found.append("dQ is not in its own step")
            if following[0] >= ended[c, f"add dQ {n}"]:
                found.append("a step waits for its own addition to dQ")
        return list(dict.fromkeys(found))


def check_step(order: Callable) -> None:
    """Print whether an order for a backward step is complete and waits for all operands, and how long it takes."""
    print_outcome(lambda: try_step(order))


def try_step(order: Callable) -> str:
    T = 50
    both = [(unit, CONSUMERS, 4) for unit in ("tensor", "exp", "copy")]
    for slow, slow_actors, steps in (*both, ("exp", CONSUMERS[1:], 4), ("", (), T)):
        ds_filled = Barrier("dS filled", arrivals=2)
        block = WatchedBlock(ds_filled, slow, slow_actors)
        actors = {c: order(block, ds_filled, steps) for c in CONSUMERS}
        if None in actors.values():
            return invitation(order.__name__)
        done = {(job.actor, job.label) for job in block.run(actors).jobs}
        for c, n, what in product(CONSUMERS, range(steps), NEEDS):
            if (c, f"{what} {n}") not in done:
                raise RuntimeError(f"{c} leaves out {what} {n}")
    pace, other = f"{block.clock / T:,.0f} clocks per step", block.differences_from_task(T)
    return (
        f"the operands are right, but the task is not done: {'; '.join(other)} ({pace})" if other else f"right: {pace}"
    )
