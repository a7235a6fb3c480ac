"""Why each rung of the ladder is there: what limited the one before, what the change removes, what it should give."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from fa2_lab.kernels import ladder
from fa2_lab.machine import ladder as model
from fa2_lab.records import Measurement, Record, recorded

UNKNOWN = "The model counts instructions and programs on an SM. It knows no wait of one product for another."


class Reason(NamedTuple):
    """One change: in a few words for the table, and as a hypothesis that a measurement can refute."""

    cause: str  # what it is about
    limit: str  # what limited the rung before
    removes: str  # what the change takes away, or adds
    why: str
    missed: str = UNKNOWN  # what the prediction leaves out; shown where it misses by more than a tenth
    modelled: bool = True  # predicted by fa2_lab.machine.ladder; if not, only a limit follows from the counters


NOTHING = Reason("", "", "", "Nothing comes before this rung: it is where the climb begins.")
UNWRITTEN = Reason("", "", "", "fa2_lab/machine/reasons.md says nothing of this rung yet.")


def read(page: str) -> dict[str, Reason]:
    """The reasons of reasons.md, by the rungs' numbers."""
    found = {}
    for part in page.split("\n## ")[1:]:
        try:
            head, why, *fields = filter(None, part.split("\n"))
            (number, cause), said = head.split(" · "), dict(line[2:].split(": ", 1) for line in fields)
            modelled = "predicted" not in said
            found[number] = Reason(cause, said["before"], said["goes"], why, said.get("missed", UNKNOWN), modelled)
        except (KeyError, ValueError) as wrong:
            raise ValueError(f"reasons.md: got {part!r}; it takes what stands under the other rungs") from wrong
    return found


REASONS = read(Path(__file__).with_name("reasons.md").read_text(encoding="utf-8"))


def reason(rung: str) -> Reason:
    """Why a rung is there."""
    number = ladder.find(rung)[1:3]
    return REASONS.get(number, NOTHING if number == "00" else UNWRITTEN)


# Predicted and measured -----------------------------------------------------------------------------------------

SHAPES = tuple((causal, d) for d in (128, 64) for causal in (False, True))
N, TOKENS, HIDDEN = 4096, 16384, 2048  # of the shape in which the table is
TENSOR = "tensor cores at work, %"
MISS = 0.1


class Step(NamedTuple):
    """One change in one shape: how many times faster it should be and was."""

    predicted: float | None
    measured: float | None
    at_most: bool = False  # the prediction is only a limit

    @property
    def misses(self) -> bool:
        """Whether the prediction is wrong by more than a tenth."""
        if self.predicted is None or self.measured is None:
            return False
        if self.at_most:
            return self.measured > (1 + MISS) * self.predicted
        return abs(self.measured / self.predicted - 1) > MISS

    @property
    def prediction(self) -> str:
        """As a table shows it."""
        return f"{'≤ ' * (self.at_most and self.predicted is not None)}{times(self.predicted)}"


def times(factor: float | None) -> str:
    """A factor as a table shows it."""
    return "-" if factor is None else f"{factor:.2f}"


def step(record: Record, before: str, after: str, causal: bool = False, d: int = 128) -> Step:
    """The change from one rung to another in the shape that fills the GPU."""
    row = timed(record, causal, d)
    measured = row.ratio(after, before) if row and {before, after} <= row.values.keys() else None
    if reason(after).modelled:
        return Step(predicted(before, after, causal, d), measured)
    return Step(predicted=None if causal else most(record, before, d), measured=measured, at_most=True)


def timed(record: Record, causal: bool, d: int) -> Measurement | None:
    """The forward pass of 16,384 tokens in sequences of 4,096."""
    for row in record.rows:
        p = row.problem
        shape = (p["N_q"], p["batch"] * N, p["heads"] * p["d"], p["d"], p["causal"])
        if row.direction == "forward" and shape == (N, TOKENS, HIDDEN, d, causal):
            return row
    return None


def predicted(before: str, after: str, causal: bool, d: int, heads: int | None = None) -> float | None:
    """What the model says of a change; None where a rung's compiled numbers are not recorded."""
    old, new = (modelled(name, causal, d) for name in (before, after))
    if old is None or new is None:
        return None
    return model.speedup(old, new, heads or TOKENS // N * HIDDEN // d, N, causal)


def most(record: Record, before: str, d: int) -> float | None:
    """What a change can gain at most, if the tensor cores then never stop: by the counter of the rung before."""
    for row in record.rows:
        p = row.problem
        if row.direction == "counters" and (p["rung"], p["d"], p["causal"]) == (before, d, False):
            return 100 / row.values[TENSOR][0] if TENSOR in row.values else None
    return None


# What was compiled and counted ----------------------------------------------------------------------------------

COMPILED = ("registers", "programs", "spills", "shared", "instructions", "exponentials", "waits")


@cache
def facts() -> dict[tuple[str, bool, int], dict]:
    """What the compiler made of each rung: {(rung, causal, d): its numbers}.

    Each has the numbers of COMPILED, keys and consumers. registers: of a thread that multiplies. programs: on an SM at
    the same time. instructions, exponentials, waits and keys: of the loop without a mask, for one tile, and not of the
    backward's rungs.
    """
    rows = (recorded("rungs") or {}).get("rungs", [])
    return {(row["rung"], row["causal"], row["d"]): row for row in rows}


def modelled(name: str, causal: bool, d: int) -> model.Rung | None:
    """What the model knows of a rung; None where it is not recorded."""
    if name == ladder.RUNGS[0]:
        return model.Rung(number=0, programs=1, instructions=0, exponentials=0, d=d)  # three kernels, which HBM limits
    row = facts().get((name, causal, d))
    if row is None:
        return None
    numbers = (row[x] for x in ("programs", "instructions", "exponentials", "d", "keys", "consumers"))
    return model.Rung(int(name[1:3]), *numbers)


def counters(record: Record, name: str) -> dict[str, float]:
    """What the hardware counted of a rung without a mask."""
    rows = [row for row in record.rows if row.direction == "counters" and row.problem["rung"] == name]
    rows = [row for row in rows if not row.problem["causal"]]
    return {what: x[0] for what, x in max(rows, key=lambda row: row.problem["d"]).values.items()} if rows else {}


def chip(record: Record, name: str) -> tuple[float, ...]:
    """The SM clock in GHz and power in watts while a rung runs again and again without a pause, and no mask.

    Where that was not measured, the clock alone: counted cycles over time.
    """
    for row in record.sustained:
        if name in row.chip and (row.problem["d"], row.problem["causal"]) == (128, False):
            clock, watts = row.chip[name][:2]
            return clock / 1e3, watts
    main, cycles = timed(record, causal=False, d=128), counters(record, name).get("SM cycles")
    return (cycles / main.values[name][0] / 1e6,) if main and cycles and name in main.values else ()
