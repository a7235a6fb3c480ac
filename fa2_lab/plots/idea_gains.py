"""The recorded gain from each idea for the Hopper kernels, measured on earlier versions of these kernels."""

from collections.abc import Sequence
from statistics import geometric_mean

from fa2_lab.records import Measurement, load

SHORT_WORDINGS = {  # {wording of an idea or a prediction in the record: shorter wording for the table}
    "a ring's stage by & and >>, not by % and //": "computing a tile's stage with `&` and `>>` instead of `%` and `//`",
    "each thread arrives at a barrier by itself, not its warpgroup at once": "each thread arrives at a barrier by"
    " itself, instead of one arrival per warpgroup",
    "instructions in an order that takes more registers: of each thread 40 bytes have none": "an order of instructions"
    " that takes more registers (40 bytes per thread spill)",
    "that order, and which columns a row sees found only where a tile is masked: 16 bytes have none": "the same order,"
    " and a row's visible columns are computed only in masked tiles (16 bytes per thread spill)",
    "in a CUDA graph the scheduler's counter is not cleared before a launch": "in a CUDA graph, the scheduler's counter"
    " is not cleared before each launch",
    "windows: at d 128 three consumers, at d 64 ping-pong": "windows: three consumers at d = 128, ping-pong at d = 64",
    "packed sequences: sizes for the longest, not for the mean length": "packed sequences: sizes chosen for the longest"
    " sequence, not for the mean length",
    "the next row block's first Q Kᵀ before this one's last P V": "the next row block's first Q Kᵀ starts before the"
    " current row block's last P V",
    "two consumers in turns under the causal mask, where keys are many more than rows": "ping-pong with two consumers"
    " under the causal mask, if there are many more keys than rows",
    "the same bits: instructions in an order that takes more registers": "deterministic: an order of instructions that"
    " takes more registers",
    "the same bits: heads of 16 MiB at a time, not of 8": "deterministic: heads of 16 MiB side by side, not of 8 MiB",
    "the same bits: heads of 4 MiB at a time, not of 8": "deterministic: heads of 4 MiB side by side, not of 8 MiB",
    "each of the three kernels starts while the one before ends, and waits by itself": "each of the three kernels"
    " starts while the previous one ends, and itself waits for that end",
    "under the causal mask as many heads at once as 32 MiB of L2 hold, two to eight, not eight": "causal: two to eight"
    " heads side by side, as many as 32 MiB of L2 hold, instead of always eight",
    "+0.5 to 1% at d 64: 6 instructions fewer a tile": "+0.5 to 1% at d = 64, with 6 instructions fewer per tile",
    "+1 to 3% at d 64, +0.5% at d 128": "+1 to 3% at d = 64, +0.5% at d = 128",
    "+2% at d 64, causal, from N = 4,096 on": "+2% at d = 64, causal, from N = 4,096 on",
    "1 to 2 µs less a forward, and a backward": "1 to 2 µs less per forward pass and per backward pass",
    "+1 to 3% at N ≤ 2048, +0.5% at 16384": "+1 to 3% for N ≤ 2,048, +0.5% for N = 16,384",
    "4%, as in a first shape": "+4%, as for a first shape",
    "2% faster": "+2%",
    "2 to 4% faster": "+2 to 4%",
    "3 µs less, as decode's merge": "3 µs less, as for decode's merge",
    "+3% where windows are long": "+3% if windows are long",
    "faster where eight take more": "faster if eight heads take more",
}


def gains() -> list[dict]:
    """Return a list with one dictionary for each idea and each problem on which the idea was measured."""
    rows = [row for row in load("ideas").rows if {"with it", "without it"} <= row.values.keys()]
    return [row.problem | dict(gain=row.ratio("with it", "without it")) for row in rows]


def table(part: str = "") -> list[str]:
    """Return the lines of a Markdown table of the ideas, their predicted gains and their results.

    `part` is "forward" or "backward", or empty for both. The record lists the problems that each idea speeds up, and
    the kernels use the idea only for these problems.
    """
    record = load("ideas")
    lines = ["| idea | predicted | measured | without pauses | kept |", "|---|---|---|---|---|"]
    predicted_problems = [
        row.problem for row in record.rows if "prediction" in row.problem and part in ("", row.direction)
    ]
    for idea, prediction in dict.fromkeys((problem["idea"], problem["prediction"]) for problem in predicted_problems):
        rested, hot = (
            [row for row in rows if row.problem["idea"] == idea and part in ("", row.direction)]
            for rows in (record.rows, record.sustained)
        )
        n_kept = sum(row.problem["kept"] for row in rested)
        verdict = "no" if not n_kept else "yes" if n_kept == len(rested) else f"for {n_kept} of {len(rested)}"
        words = " | ".join(SHORT_WORDINGS.get(text, text) for text in (idea, prediction))
        lines.append(f"| {words} | {speedup_range(rested)} | {speedup_range(hot)} | {verdict} |")
    return lines


def speedup_range(rows: Sequence[Measurement]) -> str:
    """Format an idea's speedups: the geometric mean, the lowest and the highest."""
    speedups = [row.ratio("with it", "without it") for row in rows]
    return f"{geometric_mean(speedups):.3f} ({min(speedups):.2f} to {max(speedups):.2f})" if speedups else "–"
