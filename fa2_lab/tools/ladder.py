"""`fa2-lab ladder` prints every rung, `ladder 07 08` prints one change, and `ladder 08 --run` runs one rung."""

import argparse
import sys
import textwrap

from fa2_lab.kernels import ladder
from fa2_lab.machine import reasons
from fa2_lab.records import Measurement, Record, ladder_baseline, load
from fa2_lab.tools import rung_diff

SUITE, D = "ladder", 128
NAMES = {"triton_tutorial": "Triton's tutorial 06"}  # a kernel that `bench ladder --beside` times along with the rungs
MASKS = {False: "no mask", True: "causal"}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="fa2-lab ladder", description="Print the ladder of kernels, one change per rung."
    )
    parser.add_argument(
        "rungs", nargs="*", help="one rung (08) or two (07 08); if none is given, print the whole table"
    )
    parser.add_argument("--run", action="store_true", help="check one rung, and print what it compiles to and its time")
    arguments = parser.parse_args(argv)
    if len(arguments.rungs) > 2 or (arguments.run and len(arguments.rungs) != 1):
        raise ValueError(f"rungs: got {len(arguments.rungs)}; it takes none, one or two, and one with --run")
    names = [ladder.find(rung) for rung in arguments.rungs]
    if arguments.run:
        from fa2_lab.tools import rung_check  # imported only here, because it loads torch, which the tables do not need

        rung_check.report_rung(names[0])
        return 0
    results = load(SUITE)
    if not names:
        print(table(results))
        return 0
    old = names[0] if len(names) == 2 else compared_with(names[0])
    print(page(results, old, names[-1], sys.stdout.isatty()))
    return 0


def compared_with(name: str) -> str:
    """Return the rung that `name` is compared with: the previous rung or, for x23, rung 23."""
    if name in ladder.VARIANTS:
        return ladder.find(name[1:3])
    order = next(order for order in (ladder.RUNGS, ladder.SIDE, ladder.BACKWARD) if name in order)
    return order[max(0, order.index(name) - 1)]


# The table ------------------------------------------------------------------------------------------------------

COLUMNS = ("TFLOP/s", "causal", "share", "predicted", "causal", "measured", "causal", "per SM", "registers", "GHz")
WIDTHS = (8, 7, 6, 11, 7, 10, 7, 8, 11, 6)


class Shown:
    """One row of the ladder's table, for a rung or for another implementation, such as cuDNN.

    `change` holds the speedups over the previous rung. It is empty for the first rung and for other implementations.
    """

    def __init__(self, results: Record, name: str, peer: str) -> None:
        self.change = (
            [reasons.rung_gain(results, before(name), name, causal) for causal in MASKS] if climbs(name) else []
        )
        reason = reasons.reason(name) if name in ladder.RUNGS else reasons.FIRST_RUNG
        self.limit, self.removes, self.missed = reason.limit, reason.removes, reason.missed
        self.name = label(name)
        rows = [reasons.forward_row(results, causal, D) for causal in MASKS]
        speeds = [f"{row.rate(name):.0f}" if row and name in row.values else "-" for row in rows]
        share = f"{rows[0].ratio(name, peer):.0%}" if rows[0] and name in rows[0].values else "-"
        steps = [x.prediction for x in self.change] + [reasons.speedup_text(x.measured) for x in self.change]
        held = [both_masks(name, what) for what in ("programs", "registers")]
        clock = [f"{x:.2f}" for x in reasons.clock_and_power(results, name)[:1]]
        self.numbers = [*speeds, share, *(steps or 4 * ["-"]), *held, *(clock or "-")]


def climbs(name: str) -> bool:
    """Return whether `name` is a rung that has a previous rung."""
    return name in ladder.RUNGS[1:]


def before(name: str) -> str:
    """Return the name of the rung before `name`."""
    return ladder.RUNGS[ladder.RUNGS.index(name) - 1]


def label(name: str) -> str:
    """Return the number and short name of a rung, such as "05 deferred", or the name of another implementation."""
    return f"{name[1:3]} {ladder.change(name)[0]}" if name in ladder.RUNGS else NAMES.get(name, name)


def both_masks(name: str, what: str) -> str:
    """Return a compiled rung's property, such as "registers", as "a/b": a without a mask, and b with a causal mask."""
    facts = [reasons.compiled_rungs().get((name, causal, D)) for causal in MASKS]
    return "/".join(f"{row[what]}" for row in facts if row) if all(facts) else "-"


def unmasked(results: Record) -> Measurement:
    """Return the measurement without a mask for the problem shown in the ladder's table."""
    row = reasons.forward_row(results, causal=False, d=D)
    if row is None:
        raise ValueError("the record has no row of the table's shape yet: `fa2-lab bench ladder` measures the rest")
    return row


def lines(results: Record) -> list[Shown]:
    """Return the rows of the ladder's table: all rungs, followed by the other implementations."""
    values = unmasked(results).values
    peer = ladder_baseline(values)
    return [Shown(results, name, peer) for name in (*ladder.RUNGS, *(x for x in values if x not in ladder.RUNGS))]


def setting(results: Record) -> str:
    """Return a paragraph that explains the columns of the ladder's table."""
    row = unmasked(results)
    peer = ladder_baseline(row.values)
    shape = f"{results.machine['gpu']}, bf16, forward, 16,384 tokens, N = {reasons.N:,}, d = {D}"
    text = (
        f"{shape}. The share is the rung's speed divided by {peer}'s, without a mask. Predicted (by "
        "machine/ladder_model.py) and measured are the rung's speed divided by that of the previous rung. A ≤ marks "
        "the largest speedup that the share of busy tensor cores allows. Per SM is the number of programs that fit at "
        "the same time, and registers are those of a thread that runs matmuls. In a/b, a is without a mask and b is "
        "causal. GHz is the SM clock in a run without pauses, or else cycles divided by time. A - was not measured."
    )
    if newer := [name[1:3] for name in ladder.RUNGS if name not in row.values and name not in row.failed]:
        text += f" Measured before rung {', '.join(newer)} was added, with fa2_lab as it was then."
    beside = "triton_tutorial" in row.values
    return text + f" {NAMES['triton_tutorial']} uses TMA copies in bf16, and was tuned for each shape." * beside


def table(results: Record) -> str:
    """Return the ladder's table as text, followed by an explanation of each prediction that is off by more than 10%."""
    every = lines(results)
    head = "".join(f"{x:>{width}}" for x, width in zip(COLUMNS, WIDTHS, strict=True))
    text = [textwrap.fill(setting(results), 120), "", f"{'rung':22}{head}  limited before → removed"]
    for line in every:
        columns = "".join(f"{x:>{width}}" for x, width in zip(line.numbers, WIDTHS, strict=True))
        cause = f"  {line.limit} → {line.removes}" if line.limit else ""
        text.append(f"{line.name:22}{columns}{cause}".rstrip())
    misses = [f"{line.name}: {line.missed}" for line in every if any(step.misses for step in line.change)]
    if misses:
        text += ["", "Predictions that miss by more than a tenth:", *(textwrap.fill(x, 120) for x in misses)]
    return "\n".join(text)


def claim(results: Record) -> str:
    """Return a clause that compares the speeds of the first and the last rung with that of the ladder's baseline."""
    row = unmasked(results)
    peer, climbed = ladder_baseline(row.values), [name for name in ladder.RUNGS if name in row.values]
    first, last = (f"{row.ratio(name, peer):.0%}" for name in (climbed[0], climbed[-1]))
    climb = f"the forward kernel climbs from {first} to {last} of {peer}'s speed"
    return f"In {len(climbed) - 1} changes, {climb}"


def markdown(results: Record) -> list[str]:
    """Return the lines of the ladder's table in Markdown, inside a collapsed <details> element."""
    every = lines(results)
    text = [f"<details><summary>{claim(results)}: every rung</summary>", "", setting(results), ""]
    text += [
        f"| rung | {' | '.join(COLUMNS)} | limited before | removed |",
        f"| --- |{len(COLUMNS) * ' ---: |'} --- | --- |",
    ]
    text += [f"| {line.name} | {' | '.join(line.numbers)} | {line.limit} | {line.removes} |" for line in every]
    misses = [f"- {line.name}: {line.missed}" for line in every if any(step.misses for step in line.change)]
    if misses:
        text += ["", "Predictions that miss by more than a tenth:", "", *misses]
    return [*text, "", "</details>"]


# A page about one change ----------------------------------------------------------------------------------------


def page(results: Record, old: str, new: str, colours: bool = False) -> str:
    """Return a page about one change: its purpose, the hypothesis, the diff, the measurements, and the next rung."""
    name, sentence = ladder.change(new)
    parts = [f"Rung {new.split('_')[0].removeprefix('r')}, {name}: {sentence}"]
    if climbs(new) and old == before(new):
        parts.append(hypothesis(results, old, new))
    if old != new:
        parts.append(f"{old} → {new}\n{rung_diff.diff(old, new, colours)}")
    parts += filter(None, [numbers(results, old, new), following(new)])
    return "\n\n".join(parts)


def hypothesis(results: Record, old: str, new: str) -> str:
    """Return text about the change from rung `old` to `new`: the limit of `old`, the hypothesis, and the speedups."""
    why = reasons.reason(new)
    text = [
        f"Limit of {old[1:3]}:  {why.limit}",
        f"Removes:      {why.removes}",
        textwrap.fill(f"Hypothesis:   {why.why}", 120),
        "",
    ]
    shapes = {
        f"d {d}, {MASKS[causal]}": reasons.rung_gain(results, old, new, causal, d) for causal, d in reasons.SHAPES
    }
    text.append("".join(f"{x:>17}" for x in ("", *shapes)))
    predicted = [step.prediction for step in shapes.values()]
    measured = [reasons.speedup_text(step.measured) for step in shapes.values()]
    for what, speedups in (("predicted ×", predicted), ("measured ×", measured)):
        text.append(f"{what:17}" + "".join(f"{speedup:>17}" for speedup in speedups))
    if any(step.misses for step in shapes.values()):
        text += ["", textwrap.fill(f"The prediction misses: {why.missed}", 120)]
    return "\n".join(text)


def rungs_table(results: Record, **numbers: str) -> str:
    """Return a Markdown table with one row for each of the named rungs.

    Each keyword names a rung, and its value names the hardware counter to show. For example, r05="L2 bytes" adds a row
    for rung 05 with its L2 bytes.
    """
    heads = ("rung", "about", "predicted", "causal", "measured", "causal", "per SM", "counter", "before → after")
    text = [f"| {' | '.join(heads)} |", "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |"]
    for name, counter in ((ladder.find(number), counter) for number, counter in numbers.items()):
        changes = [reasons.rung_gain(results, before(name), name, causal) for causal in MASKS]
        cells = [x.prediction for x in changes] + [f"**{reasons.speedup_text(x.measured)}**" for x in changes]
        a, b = (reasons.hardware_counters(results, rung).get(counter) for rung in (before(name), name))
        moved = f"{short(a)} → {short(b)}" if a is not None and b is not None else ""
        cells.append(" → ".join(both_masks(rung, "programs") for rung in (before(name), name)))
        text.append(f"| {' | '.join([label(name), reasons.reason(name).cause, *cells, counter, moved])} |")
    return "\n".join(text)


def following(name: str) -> str:
    """Return a sentence that names the next rung and the limit that it removes, or "" if there is no next rung."""
    if name not in ladder.RUNGS[:-1]:
        return ""
    after = ladder.RUNGS[ladder.RUNGS.index(name) + 1]
    return f"Next: {label(after)}. {reasons.reason(after).limit[:1].upper()}{reasons.reason(after).limit[1:]}."


def numbers(results: Record, old: str, new: str) -> str:
    """Return text about two rungs: their speeds on all recorded problems, and how their code and counters differ.

    A counter is shown only if it changed by more than 10%.
    """
    text = [f"{'recorded, TFLOP/s':48}{old[:3]:>8}{new[:3]:>8}"]
    for row in results.rows:
        if row.flops and {old, new} <= set(row.values):
            p = row.problem
            shape = f"N {p['N_q']:,}, batch {p['batch']}, {p['heads']} heads, d {p['d']}, {MASKS[p['causal']]}"
            text.append(f"{shape:48}{row.rate(old):8.0f}{row.rate(new):8.0f}  × {row.ratio(new, old):.2f}")
    for d, causal in ((D, False), (D, True), (64, False)):
        facts = [reasons.compiled_rungs().get((name, causal, d)) for name in (old, new)]
        if all(facts):
            a, b = ({name: row[name] for name in reasons.COMPILED if name in row} for row in facts if row)
            text += [f"{f'{n}, {MASKS[causal]}, d {d}':48}{a[n]:>8}{b[n]:>8}" for n in a if n in b and a[n] != b[n]]
    counted = [reasons.hardware_counters(results, name) for name in (old, new)]
    a, b = counted
    text += [f"{n:48}{short(a[n]):>8}{short(b[n]):>8}" for n in a if n in b and differ(a[n], b[n])]
    return "\n".join(text) if len(text) > 1 else "not recorded yet: `fa2-lab bench ladder` measures it on a GPU"


def differ(a: float, b: float) -> bool:
    """Return whether a and b differ by more than 10% of the larger magnitude."""
    return abs(a - b) > 0.1 * max(abs(a), abs(b))


def short(n: float) -> str:
    """Return a number of at least 0 in short form, such as "1.23M" for 1,234,567."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= 0.9995 * size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.3g}"
