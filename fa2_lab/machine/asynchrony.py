"""An event-driven simulation of one thread block, in which actors wait for each other while hardware units work.

An actor is a warp or a group of four warps that act together. It is written as a generator that starts jobs and yields
a Wait whenever it has to pause. The units (copy engine, tensor cores, exponential lanes) execute the jobs. Copies run
concurrently, each at full speed. The other units execute each actor's jobs in order. If several actors have jobs for
such a unit, it either divides its time equally among the actors or executes all jobs in the order in which they were
started. The simulation offers both policies because NVIDIA does not document how a GPU divides its tensor cores among
warps.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

SIDE_BY_SIDE, SHARED, IN_ORDER = "side by side", "shared", "in order"
POLICIES = {"copy": SIDE_BY_SIDE, "tensor": SHARED, "exp": SHARED}
NEGLIGIBLE = 1e-6  # a job with fewer clock cycles left counts as ended, because the rest is a rounding error


class Deadlock(RuntimeError):
    """Raised if all actors are waiting and no running job could end any of their waits."""


@dataclass(frozen=True)
class Wait:
    """A condition that an actor waits for. The actor yields the Wait and resumes once `ready` returns True."""

    ready: Callable[[], bool]
    description: str


class Barrier:
    """A barrier whose phase (0, 1, 0, …) ends once the expected number of actors have arrived."""

    def __init__(self, name: str, arrivals: int) -> None:
        self.name, self.expected = name, arrivals
        self.phase, self.missing = 0, arrivals
        self.arrival_counts: Counter[str] = Counter()  # {actor: number of arrivals}

    def arrive(self, who: str) -> None:
        self.arrival_counts[who] += 1
        self.missing -= 1
        if self.missing == 0:
            self.phase, self.missing = self.phase ^ 1, self.expected

    def over(self, phase: int) -> Wait:
        """Return a Wait for the end of `phase`. As on a GPU, a phase is identified only by its parity, a single bit."""
        return Wait(lambda: self.phase != phase, self.name)


@dataclass(eq=False)
class Job:
    """One job on a unit, with its actor, its label, and its start and end in clock cycles.

    `result` is computed when the job ends.
    """

    unit: str
    actor: str
    label: str
    clocks: float
    compute: Callable[[], object]
    remaining: float
    begun: Any = None  # clock cycle at which the unit began to execute the job
    ended: Any = None
    result: Any = None

    def done(self) -> Wait:
        return Wait(lambda: self.ended is not None, f"{self.unit}: {self.label}")


class ThreadBlock:
    """A simulated thread block, with its clock, its running jobs and its finished jobs."""

    def __init__(self, **policies: str) -> None:
        self.policies = POLICIES | policies
        self.clock, self.actor = 0.0, ""
        self.running: list[Job] = []
        self.jobs: list[Job] = []  # the finished jobs, in the order in which they ended

    def start(self, unit: str, clocks: float, label: str, compute: Callable[[], object] = lambda: None) -> Job:
        """Start a job of `clocks` clock cycles on `unit` for the running actor and return the job without waiting."""
        job = Job(unit, self.actor, label, clocks, compute, clocks)
        self.running.append(job)
        return job

    def run(self, actors: Mapping[str, Generator[Wait]]) -> "ThreadBlock":
        """Run all actors and their jobs to completion and return the block.

        Whenever all actors are waiting, the clock advances to the end of the next job.
        """
        waits = {name: Wait(lambda: True, "the start") for name in actors}
        while waits:
            resumed = [name for name in actors if name in waits and self._resume(name, actors[name], waits)]
            if waits and not resumed:
                if not self.running:
                    reasons = "; ".join(f"{name} waits for {wait.description}" for name, wait in waits.items())
                    raise Deadlock(reasons)
                self._advance()
        while self.running:  # finish the jobs for which no actor waits
            self._advance()
        return self

    def _resume(self, name: str, actor: Generator[Wait], waits: dict[str, Wait]) -> bool:
        """Run the actor called `name` to its next Wait if its current Wait is over. Return whether the actor ran.

        `waits` holds the current Wait of each waiting actor.
        """
        if not waits[name].ready():
            return False
        self.actor = name
        try:
            waits[name] = next(actor)
        except StopIteration:
            del waits[name]
        return True

    def _advance(self) -> None:
        """Advance the clock until the next job ends.

        Jobs that end at the same time do so in the order in which they were started.
        """
        served = self._served()
        served_by_unit = Counter(job.unit for job in served)
        speed = {job: 1 if self.policies[job.unit] == SIDE_BY_SIDE else 1 / served_by_unit[job.unit] for job in served}
        step = min(job.remaining / speed[job] for job in served)
        for job in served:
            job.begun = self.clock if job.begun is None else job.begun
            job.remaining -= step * speed[job]
        self.clock += step
        for job in [job for job in served if job.remaining < NEGLIGIBLE]:
            self.running.remove(job)
            job.ended, self.actor = self.clock, f"{job.unit} engine"
            job.result = job.compute()
            self.jobs.append(job)

    def _served(self) -> list[Job]:
        """Return the jobs that the units are working on now.

        Depending on its policy, a unit works on all of its jobs ("side by side"), on the first job of each actor
        ("shared"), or only on the job that was started first ("in order").
        """
        seen, served = set(), []
        for job in self.running:
            queue = {SIDE_BY_SIDE: id(job), SHARED: job.actor, IN_ORDER: None}[self.policies[job.unit]]
            if (job.unit, queue) not in seen:
                served.append(job)
            seen.add((job.unit, queue))
        return served

    def busy_fraction(self, unit: str, since: float = 0.0) -> float:
        """Return the fraction of the time between `since` and the end of the last job during which `unit` was busy."""
        intervals = sorted(
            (max(job.begun, since), job.ended) for job in self.jobs if job.unit == unit and job.ended > since
        )
        covered, reached = 0.0, since
        for begun, ended in intervals:
            covered += max(0.0, ended - max(begun, reached))
            reached = max(reached, ended)
        return covered / (max(job.ended for job in self.jobs) - since)
