"""The reason for each rung of the ladder: the limit of the previous rung, the cost that goes and a prediction."""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from fa2_lab.kernels import ladder
from fa2_lab.machine import ladder_model as model
from fa2_lab.records import Measurement, Record, read_json

NOT_MODELLED = (
    "The model counts instructions and programs per SM. It does not know that one matmul can wait for another."
)


class Reason(NamedTuple):
    """The reason for one rung: keywords for the ladder's table, and a hypothesis that a measurement can refute."""

    cause: str  # the topic of the rung, in a word or two
    limit: str  # what limited the previous rung
    removes: str  # what the change removes or adds
    why: str
    missed: str = NOT_MODELLED  # what the model leaves out, which is shown if the prediction is off by more than 10%
    modelled: bool = True  # whether ladder_model predicts the gain; if not, the counters give an upper bound


FIRST_RUNG = Reason("", "", "", "No rung comes before this one, because the climb begins here.")
UNWRITTEN = Reason("", "", "", "fa2_lab/machine/reasons.md has no entry for this rung yet.")


def parse_reasons(page: str) -> dict[str, Reason]:
    """Parse the text of reasons.md and return {rung number: Reason}."""
    reasons = {}
    for part in page.split("\n## ")[1:]:
        try:
            head, why, first, _, *rows = filter(None, part.split("\n"))
            (number, cause), said = head.split(" · "), dict(row[2:-2].split(" | ", 1) for row in (first, *rows))
            modelled = "predicted" not in said
            reasons[number] = Reason(
                cause, said["before"], said["goes"], why, said.get("missed", NOT_MODELLED), modelled
            )
        except (KeyError, ValueError) as wrong:
            raise ValueError(f"reasons.md: got {part!r}; it takes the same lines as the other rungs") from wrong
    return reasons


REASONS = parse_reasons(Path(__file__).with_name("reasons.md").read_text(encoding="utf-8"))


def reason(rung: str) -> Reason:
    """Return the Reason for a rung. Rung 00 and rungs without an entry in reasons.md get a placeholder."""
    number = ladder.find(rung)[1:3]
    return REASONS.get(number, FIRST_RUNG if number == "00" else UNWRITTEN)


# Predicted and measured -----------------------------------------------------------------------------------------

SHAPES = tuple((causal, d) for d in (128, 64) for causal in (False, True))
N, TOKENS, HIDDEN = 4096, 16384, 2048  # the problem size in the ladder's table
TENSOR_BUSY = "tensor cores at work, %"
MISS_MARGIN = 0.1


class RungGain(NamedTuple):
    """The predicted and measured speedup of one rung over the previous one, for a single problem."""

    predicted: float | None
    measured: float | None
    at_most: bool = False  # whether the prediction is only an upper bound

    @property
    def misses(self) -> bool:
        """Whether the measured speedup differs from the prediction by more than 10%.

        If the prediction is an upper bound, the result is True only if the speedup exceeds it by more than 10%.
        """
        if self.predicted is None or self.measured is None:
            return False
        if self.at_most:
            return self.measured > (1 + MISS_MARGIN) * self.predicted
        return abs(self.measured / self.predicted - 1) > MISS_MARGIN

    @property
    def prediction(self) -> str:
        """The predicted speedup as printed in a table, preceded by ≤ if it is only an upper bound."""
        return f"{'≤ ' * (self.at_most and self.predicted is not None)}{speedup_text(self.predicted)}"


def speedup_text(factor: float | None) -> str:
    """Return a speedup formatted for a table, or "-" if there is none."""
    return "-" if factor is None else f"{factor:.2f}"


def rung_gain(record: Record, before: str, after: str, causal: bool = False, d: int = 128) -> RungGain:
    """Return the predicted and measured speedup of rung `after` over `before`, for 16,384 tokens with N = 4,096."""
    row = forward_row(record, causal, d)
    measured = row.ratio(after, before) if row and {before, after} <= row.values.keys() else None
    if reason(after).modelled:
        return RungGain(predicted_speedup(before, after, causal, d), measured)
    return RungGain(predicted=None if causal else max_speedup(record, before, d), measured=measured, at_most=True)


def forward_row(record: Record, causal: bool, d: int) -> Measurement | None:
    """Return the forward measurement for 16,384 tokens in sequences of length 4,096, or None if there is none."""
    for row in record.rows:
        p = row.problem
        shape = (p["N_q"], p["batch"] * N, p["heads"] * p["d"], p["d"], p["causal"])
        if row.direction == "forward" and shape == (N, TOKENS, HIDDEN, d, causal):
            return row
    return None


def predicted_speedup(before: str, after: str, causal: bool, d: int, heads: int | None = None) -> float | None:
    """Return the predicted speedup of rung `after` over `before`, or None if the model lacks data for one of them."""
    old, new = (model_input(name, causal, d) for name in (before, after))
    if old is None or new is None:
        return None
    return model.speedup(old, new, heads or TOKENS // N * HIDDEN // d, N, causal)


def max_speedup(record: Record, before: str, d: int) -> float | None:
    """Return the largest possible speedup over the rung `before`, or None if its hardware counters are not recorded.

    A kernel with this speedup would keep the tensor cores busy all the time. The speedup is therefore the reciprocal of
    the fraction of time during which `before` keeps them busy, according to the counters.
    """
    for row in record.rows:
        p = row.problem
        if row.direction == "counters" and (p["rung"], p["d"], p["causal"]) == (before, d, False):
            return 100 / row.values[TENSOR_BUSY][0] if TENSOR_BUSY in row.values else None
    return None


# Records of compiled kernels and hardware counters --------------------------------------------------------------

COMPILED = ("registers", "programs", "spills", "shared", "instructions", "exponentials", "waits")


@cache
def compiled_rungs() -> dict[tuple[str, bool, int], dict]:
    """Return {(rung, causal, d): recorded properties of the compiled kernel}.

    The properties are those listed in COMPILED, plus `keys` and `consumers`. `registers` is the number of registers of
    each thread that runs matmuls, and `programs` is the number of programs that one SM can run concurrently.
    `instructions`, `exponentials`, `waits` and `keys` are counted per tile in the unmasked loop and are missing for the
    backward rungs.
    """
    rows = (read_json("rungs") or {}).get("rungs", [])
    return {(row["rung"], row["causal"], row["d"]): row for row in rows}


def model_input(name: str, causal: bool, d: int) -> model.Rung | None:
    """Return ladder_model's input for a rung, or None if the rung's properties are not recorded."""
    if name == ladder.RUNGS[0]:
        return model.Rung(number=0, programs=1, instructions=0, exponentials=0, d=d)  # three kernels, limited by HBM
    row = compiled_rungs().get((name, causal, d))
    if row is None:
        return None
    numbers = (row[x] for x in ("programs", "instructions", "exponentials", "d", "keys", "consumers"))
    return model.Rung(int(name[1:3]), *numbers)


def hardware_counters(record: Record, name: str) -> dict[str, float]:
    """Return {hardware counter: value} as recorded for a rung without a mask, or {} if there is no such record."""
    rows = [row for row in record.rows if row.direction == "counters" and row.problem["rung"] == name]
    rows = [row for row in rows if not row.problem["causal"]]
    return {what: x[0] for what, x in max(rows, key=lambda row: row.problem["d"]).values.items()} if rows else {}


def clock_and_power(record: Record, name: str) -> tuple[float, ...]:
    """Return the SM clock in GHz and the power in watts while a rung runs without pauses (d = 128, no mask).

    If neither was measured, return only the clock, computed from the number of cycles and the time. If the cycles were
    not counted either, return an empty tuple.
    """
    for row in record.sustained:
        if name in row.chip and (row.problem["d"], row.problem["causal"]) == (128, False):
            clock, watts = row.chip[name][:2]
            return clock / 1e3, watts
    main, cycles = forward_row(record, causal=False, d=128), hardware_counters(record, name).get("SM cycles")
    return (cycles / main.values[name][0] / 1e6,) if main and cycles and name in main.values else ()
