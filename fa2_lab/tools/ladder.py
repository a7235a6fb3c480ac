"""`fa2-lab ladder`: every rung, its one change and what it reached; `fa2-lab ladder 07 08`: one change and its diff."""

from __future__ import annotations

import argparse
import sys

from fa2_lab.kernels import ladder
from fa2_lab.records import Measurement, Record, compared_with, load
from fa2_lab.tools import steps

SUITE, N, D = "ladder", 4096, 128
NAMES = {"triton_tutorial": "Triton's tutorial 06"}  # of a file that was timed by `bench ladder --beside`


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fa2-lab ladder", description="The ladder of kernels, one change a rung.")
    parser.add_argument("rungs", nargs="*", help="one rung (08) or two (07 08); without any, the whole table")
    asked = parser.parse_args(argv).rungs
    if len(asked) > 2:
        raise ValueError(f"rungs: got {len(asked)}; it takes none, one or two")
    names = [ladder.find(rung) for rung in asked]
    results = load(SUITE)
    if not names:
        print(table(results))
        return 0
    order = next(order for order in (ladder.RUNGS, ladder.SIDE, ladder.BACKWARD) if names[0] in order)
    before = order[max(0, order.index(names[0]) - 1)] if len(names) == 1 else names[0]
    after = names[-1]
    name, sentence = ladder.change(after)
    print(f"Rung {after.split('_')[0].removeprefix('r')}, {name}: {sentence}\n")
    if before != after:
        print(f"{before} → {after}\n{steps.diff(before, after, sys.stdout.isatty())}")
    print(step(results, before, after))
    return 0


def rows(results: Record, direction: str) -> dict:
    """The rows of the main shape: by mask where they are timed, by rung where they are counted."""
    all_rows = [row for row in results.rows if row.direction == direction]
    if direction == "forward":
        main = [
            row for row in all_rows if (row.problem["N_q"], row.problem["d"], row.problem["heads"]) == (N, D, 2048 // D)
        ]
        return {row.problem["causal"]: row for row in main}
    return {row.problem["rung"]: row for row in all_rows if row.problem["d"] == D or row.problem["rung"] in ladder.SIDE}


COLUMNS = ("TFLOP/s", "causal", "share", "regs", "per SM", "tensor")


def cells(results: Record) -> list[tuple[str, list[str], str]]:
    """(name, a number for each column, the one change) of each rung, then of the peers, which have no change."""
    timed, compiled, counted = (rows(results, what) for what in ("forward", "compiled", "counters"))
    peer, lines = compared_with(timed[False].values), []
    for name in (*ladder.RUNGS, *(name for name in timed[False].values if name not in ladder.RUNGS)):
        short_name, sentence = ladder.change(name) if name in ladder.RUNGS else (NAMES.get(name, name), "")
        read = compiled[name].values if name in compiled else {}
        numbers = [speed(timed[False], name), speed(timed[True], name), share(timed[False], name, peer)]
        numbers += [one(read, "registers"), one(read, "programs on an SM"), percent(counted, name)]
        lines.append((f"{name[1:3]} {short_name}" if sentence else short_name, numbers, sentence))
    return lines


def setting(results: Record) -> str:
    """What the table's numbers are of."""
    timed = rows(results, "forward")[False]
    peer = compared_with(timed.values)
    where = f"{results.machine['gpu']}, bf16, forward, 16,384 tokens, N = {N:,}, d = {D}; share: of {peer}, no mask"
    text = f"{where}; tensor: share of the cycles in which the tensor cores work; -: not measured here."
    if newer := [name[1:3] for name in ladder.RUNGS if name not in timed.values and name not in timed.failed]:
        text += f" Measured before rung {' and '.join(newer)} was added, with fa2_lab as it was then."
    beside = "triton_tutorial" in timed.values
    return text + f" {NAMES['triton_tutorial']}: with bulk copies, in bf16, the best of three sizes." * beside


def table(results: Record) -> str:
    """A line for each rung, then the peers."""
    lines = [setting(results), ""]
    for name, numbers, sentence in [("rung", list(COLUMNS), "the one change"), *cells(results)]:
        columns = "".join(f"{x:>{width}}" for x, width in zip(numbers, (8, 8, 7, 6, 8, 8), strict=True))
        lines.append(f"{name:22}{columns}  {sentence}".rstrip())
    return "\n".join(lines)


def claim(results: Record) -> str:
    """The whole ladder in a line."""
    shares = [numbers[2] for _, numbers, _ in cells(results)[: len(ladder.RUNGS)] if numbers[2] != "-"]
    peer = compared_with(rows(results, "forward")[False].values)
    return f"From {shares[0]} to {shares[-1]} of {peer} in {len(shares) - 1} changes"


def markdown(results: Record) -> list[str]:
    """The same table for a page, under a line that can be opened."""
    lines = [f"<details><summary>{claim(results)}: every rung</summary>", "", setting(results), ""]
    lines += [f"| rung | {' | '.join(COLUMNS)} | the one change |", "| --- |" + " ---: |" * len(COLUMNS) + " --- |"]
    lines += [f"| {name} | {' | '.join(numbers)} | {sentence} |" for name, numbers, sentence in cells(results)]
    return [*lines, "", "</details>"]


def speed(row: Measurement, name: str) -> str:
    return f"{row.rate(name):.0f}" if name in row.values else "-"


def share(row: Measurement, name: str, peer: str) -> str:
    return f"{row.ratio(name, peer):.0%}" if name in row.values else "-"


def one(values: dict, name: str) -> str:
    return f"{values[name][0]:.0f}" if name in values else "-"


def percent(counted: dict, rung: str) -> str:
    values = counted[rung].values if rung in counted else {}
    return one(values, "tensor cores at work, %") + ("%" if "tensor cores at work, %" in values else "")


def step(results: Record, before: str, after: str) -> str:
    """What the change did in the record: speed in every shape, registers, and the counter that moved most."""
    lines = ["", f"{'recorded, TFLOP/s':48}{before[:3]:>8}{after[:3]:>8}"]
    for row in results.rows:
        if row.flops and {before, after} <= set(row.values):
            p = row.problem
            shape = f"N {p['N_q']:,}, batch {p['batch']}, {p['heads']} heads, d {p['d']}, "
            what = shape + ("causal" if p["causal"] else "no mask")
            lines.append(f"{what:48}{row.rate(before):8.0f}{row.rate(after):8.0f}  × {row.ratio(after, before):.2f}")
    for kind in ("compiled", "counters"):
        by_rung = rows(results, kind)
        if before in by_rung and after in by_rung:
            a, b = by_rung[before].values, by_rung[after].values
            lines += [f"{n:48}{short(a[n][0]):>8}{short(b[n][0]):>8}" for n in a if n in b and differ(a[n][0], b[n][0])]
    return "\n".join(lines) if len(lines) > 2 else "\nnot recorded yet: `fa2-lab bench ladder` measures it on a GPU"


def differ(a: float, b: float) -> bool:
    """Whether a number moved by more than a tenth."""
    return abs(a - b) > 0.1 * max(abs(a), abs(b))


def short(x: float) -> str:
    """A number in at most seven characters."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(x) >= size:
            return f"{x / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{x:.3g}"
