"""The recorded gain of each idea for the Hopper kernels, as measured in earlier versions of the kernels."""

from collections.abc import Sequence
from statistics import geometric_mean

from fa2_lab.records import Measurement, load


def worths() -> list[dict]:
    """Return for each idea and measured problem the speed with the idea divided by the speed without it, in one run."""
    rows = [row for row in load("ideas").rows if {"with it", "without it"} <= row.values.keys()]
    return [row.problem | dict(worth=row.ratio("with it", "without it")) for row in rows]


def table(part: str = "") -> list[str]:
    """Return a Markdown table of each idea's prediction and result, for one part ("forward", "backward") or for all.

    An idea is kept on the problems on which it is faster, and the record lists these problems.
    """
    record = load("ideas")
    lines = ["| idea | predicted | measured | without pauses | kept |", "|---|---|---|---|---|"]
    foretold = [row.problem for row in record.rows if "prediction" in row.problem and part in ("", row.direction)]
    for idea, prediction in dict.fromkeys((problem["idea"], problem["prediction"]) for problem in foretold):
        rested, hot = (
            [row for row in rows if row.problem["idea"] == idea and part in ("", row.direction)]
            for rows in (record.rows, record.sustained)
        )
        kept = sum(row.problem["kept"] for row in rested)
        verdict = "no" if not kept else "yes" if kept == len(rested) else f"for {kept} of {len(rested)}"
        lines.append(f"| {idea} | {prediction} | {reach(rested)} | {reach(hot)} | {verdict} |")
    return lines


def reach(rows: Sequence[Measurement]) -> str:
    """Return the speedup of an idea as text: the geometric mean, the lowest and the highest."""
    worth = [row.ratio("with it", "without it") for row in rows]
    return f"{geometric_mean(worth):.3f} ({min(worth):.2f} to {max(worth):.2f})" if worth else "–"
