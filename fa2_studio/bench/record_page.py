"""Describe one recorded run in Markdown: what was measured, the medians, all rows, and remarks."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from statistics import median

from fa2_lab.plots.ratios import FAST_PEERS
from fa2_lab.plots.roofline import join_with_and
from fa2_lab.records import Measurement, Record
from fa2_lab.tools import ladder
from fa2_studio.bench.protocol import REPEATED_PROTOCOL, REPEATS, SUSTAINED_PROTOCOL, describe_kernel_timing
from fa2_studio.bench.recording import ABSENT, DIRECTION_WORDS, markdown_table, problem_columns
from fa2_studio.bench.registry import DENSE_SUITES, RECORD_TITLES, RECORDS_WITHOUT_COMMAND, SUITES
from fa2_studio.bench.speed_ratios import format_ratio, peers_in_rows, speed_ratios, wins_and_median
from fa2_studio.book.questions import heading_anchor

CLOCK_AND_POWER = "MHz, W"
PROBLEM_PROPERTIES = ("N", "batch", "heads", "d", "mask")  # properties of a problem, each of which has a column
# The most columns for implementations. A table that needs more may have one line per implementation instead.
MAX_COLUMNS = 10
UNITS_WITHOUT_RATIO = ("nats", "count", "µs on the host")
SUITES_WITHOUT_MEDIANS = ("ladder", "ideas")  # records without medians, because their rows are too diverse
REPETITIONS = r"(\d+) repetitions"
# The timing protocols that the page describes once for all suites.
PROTOCOL_NAMES = {
    describe_kernel_timing(REPEATS): "kernel only",
    SUSTAINED_PROTOCOL: "sustained",
    REPEATED_PROTOCOL: "with host",
}


def record_section(run: Record, usual_machine: dict) -> str:
    """Return the site's section on a record: what it measures, its medians, remarks, spread and all rows."""
    rungs = ["", *ladder.markdown(run)] if run.suite == "ladder" and not run.missing else []
    words = [*remark_sentences(run), *filter(None, map(spread_sentence, split_by_protocol(run)))]
    words.append(f"Measured at commit {commit_text(run, usual_machine)}.")
    rows = details_fold("All rows", [all_rows_tables(run)])
    return "\n".join([subject_sentences(run), "", *median_tables(run), *rungs, "", " ".join(words), "", *rows])


# Protocols ----------------------------------------------------------------------------------------------------


def split_by_protocol(run: Record) -> list[Record]:
    """Split a record into one record per timing protocol, and append the second protocol's name to its suite."""
    name = f"{run.suite}, {second_protocol_name(run)}"
    first = replace(run, sustained=[])
    both = first, replace(first, suite=name, protocol=run.sustained_protocol, rows=run.sustained)
    return [view for view in both if view.rows] or [both[0]]


def second_protocol_name(run: Record) -> str:
    """Return the name of the protocol that `--sustained` uses for this suite."""
    return "with host" if run.suite == "sweep" else "sustained"


def protocol_name(view: Record) -> str:
    """Return the name of the second protocol, such as "sustained", or "" if the record uses the first one."""
    return view.suite.partition(", ")[2]


def text_after(protocol: str, known: str) -> str | None:
    """Return what `protocol` adds to the text `known`, or None if it does not begin with that text.

    The numbers of repetitions in the two texts may differ.
    """
    count = re.search(REPETITIONS, protocol)
    known = re.sub(REPETITIONS, count[0], known) if count else known
    return protocol.removeprefix(known).strip() if protocol.startswith(known) else None


def spread_sentence(view: Record) -> str:
    """Return a sentence on the typical and the largest distance of the quartiles from their median.

    Without quartiles, the sentence is empty.
    """
    kept = [numbers for row in view.rows for numbers in row.values.values() if len(numbers) == 3]
    reach = sorted(max(high - middle, middle - low) / middle for middle, low, high in kept)
    if not reach:
        return ""
    typical, most = reach[len(reach) // 2], reach[-1]
    within = f"typically within {typical:.1%} of their median ({most:.1%} at worst)"
    name = protocol_name(view)
    return f"{f'For the *{name}* timing, half' if name else 'Half'} of the repetitions are {within}."


# Sentences ----------------------------------------------------------------------------------------------------


def subject_sentences(run: Record) -> str:
    """Return sentences that describe what a record measures and its problems."""
    what = SUITES[run.suite].what if run.suite in SUITES else RECORDS_WITHOUT_COMMAND[run.suite]
    verb = "times" if run.suite in (*DENSE_SUITES, "packed", "decode", "ring") else "measures"
    verb = "contains" if run.suite in RECORDS_WITHOUT_COMMAND else verb
    rows = run.rows + run.sustained
    inputs = f" {inputs_sentence(rows)}" if rows else ""
    return f"{record_name(run)} {verb} {what}.{inputs}"


def record_name(run: Record) -> str:
    """Return the name by which sentences refer to a record."""
    return "This record" if run.suite in RECORDS_WITHOUT_COMMAND else f"`bench {run.suite}`"


def inputs_sentence(rows: list[Measurement]) -> str:
    """Return a sentence that states the range of all problem sizes, such as "The inputs are bf16 tensors with …"."""

    def span(key: str) -> str:
        numbers = sorted({row.problem[key] for row in rows})
        ends = [f"{n:,}" for n in dict.fromkeys((numbers[0], numbers[-1]))]
        return (" or " if len(numbers) == 2 else " to ").join(ends)

    dtypes = {row.problem["dtype"].replace("bfloat16", "bf16") for row in rows}
    square = all(row.problem["N_q"] == row.problem["N_k"] for row in rows)
    many = (
        [("heads", "head")]
        if span("heads") == span("kv_heads")
        else [("heads", "query head"), ("kv_heads", "K/V head")]
    )
    sizes = [f"batch size {span('batch')}"]
    sizes += [f"{span(key)} {name}{'s' * (span(key) != '1')}" for key, name in many]
    sizes += [f"{name} = {span(key)}" for name, key in dict(d="d", N="N_q").items() if square or key == "d"]
    sizes += [] if square else [f"{key} = {span(key)}" for key in ("N_q", "N_k")]
    masks = " and ".join(sorted({"causal" if row.problem["causal"] else "non-causal" for row in rows}))
    return f"The inputs are {' and '.join(sorted(dtypes))} tensors with {', '.join(sizes)}, {masks}."


def headline(run: Record) -> str:
    """Return a short summary of a record's outcome."""
    if run.suite == "ladder" and not run.missing:
        return ladder.claim(run)
    if run.suite == "ideas":
        return f"{len({row.problem['idea'] for row in run.rows})} ideas, each measured with and without it"
    ahead = [words for view in split_by_protocol(run) if (words := wins_text(view))]
    if ahead:
        return f"Faster than {'; '.join(ahead)}"
    if found := {peer: each[0] for peer in FAST_PEERS if (each := speed_ratios(run.rows, "fa2_lab", peer))}:
        return join_with_and([f"{format_ratio(x)} times as fast as {peer}" for peer, x in found.items()])
    names, rows = next(iter(median_table_rows(run).items()), ((), []))
    if not rows:
        return join_with_and(
            [f"{value:.3g} {name.split()[1]} ({name.split()[0]})" for name, value in run.ceilings.items()]
        )
    numbers = dict(zip(names, rows[0][2:], strict=True))
    shown = {name: x for name, x in numbers.items() if name in ("fa2_lab", *FAST_PEERS)}
    parts = [f"{name} {x}" for name, x in (shown if len(shown) > 1 else numbers).items()]
    return f"Median {rows[0][0]}: {', '.join(parts)}"


def wins_text(view: Record) -> str:
    """Return on how many problems we are faster than each of FAST_PEERS, or "" if there are too few problems.

    If none of FAST_PEERS was measured, all other implementations are compared instead. If only our portable kernels
    ran, they take the place of `fa2_lab`. Rows of the second protocol do not repeat the peers' names, because the first
    protocol's rows precede them.
    """
    us = "fa2_lab" if any("fa2_lab" in row.values for row in view.rows) else "fa2_lab portable"
    ratios_to = {peer: each for peer in peers_in_rows(view.rows) if len(each := speed_ratios(view.rows, us, peer)) > 1}
    named = [peer for peer in FAST_PEERS if peer in ratios_to] or ratios_to
    counts = {peer: wins_and_median(ratios_to[peer])[0] for peer in named}
    if way := protocol_name(view):
        return f"{way}, on {join_with_and([*counts.values()])}"
    return join_with_and([f"{peer} on {count}" for peer, count in counts.items()])


def remark_sentences(run: Record) -> list[str]:
    """Return further sentences on a record, such as its ceilings, loss curves, protocol and missing numbers."""
    sentences = []
    if run.ceilings and not run.rows:
        parts = [f"{value:.3g} {name.split()[1]} ({name.split()[0]})" for name, value in run.ceilings.items()]
        sentences.append(f"The measured ceilings are {join_with_and(parts)}.")
    if any(row.direction == "loss" for row in run.rows):
        first, *others = run.curves.values()
        apart = max((abs(a - b) for curve in others for a, b in zip(curve, first, strict=True)), default=0.0)
        sentences.append(f"No loss curve ever differs from that of {next(iter(run.curves))} by more than {apart:.2g}.")
    for view in split_by_protocol(run):
        rests = [rest for known in PROTOCOL_NAMES if (rest := text_after(view.protocol, known)) is not None]
        sentences += rests or [view.protocol.removesuffix(".") + "."] if view.protocol else []
    if run.suite == "ampere":
        sentences.append(ampere_sentences(run))
    if run.suite in RECORDS_WITHOUT_COMMAND:
        what = "can make this record again" if run.suite == "ideas" else "writes a record with this name"
        sentences.append(f"No command {what}, because {run.made_by}.")
    if run.missing:
        sentences.append(f"The last run was interrupted before it reached {len(run.missing)} of its rows.")
    return [*filter(None, sentences), *missing_number_sentences(run.rows + run.sustained)]


def missing_number_sentences(rows: list[Measurement]) -> list[str]:
    """Return one sentence for each implementation that lacks some or all numbers, with the reasons."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        for name, why in row.failed.items():
            if why != ABSENT:
                reasons.setdefault(name, {})[reason_clause(why.removesuffix("."))] = None
    some = {name: "Some" if any(name in row.values for row in rows) else "All" for name in reasons}
    return [
        f"{some[name]} numbers for {name} are missing because {join_with_and([*why])}." for name, why in reasons.items()
    ]


def reason_clause(why: str) -> str:
    """Return a recorded reason, or the first sentence of an error, as a clause that can follow "because"."""
    return f'it failed with "{why.split(". ")[0]}"' if re.match(r"\w+: ", why) else why


def ampere_sentences(run: Record) -> str:
    """Return sentences on the speed of our A100 code relative to FlashAttention-2's kernels in PyTorch."""
    speeds = []
    for direction in ("forward", "backward"):
        over = speed_ratios([row for row in run.rows if row.direction == direction], "fa2_lab portable", "torch flash")
        speeds.append(f"{median(over):.2f} in the {direction} pass ({min(over):.2f} to {max(over):.2f})")
    return (
        f"We have no A100. But an {run.machine['gpu']} also runs the A100's instructions, as it does for "
        "FlashAttention-2's own kernels in PyTorch (`torch flash`). If our portable kernels are compiled for an A100 "
        f"and run there, their median speed relative to these kernels is {' and '.join(speeds)}. FlashAttention-2's "
        "backward pass needs 5 matmuls per tile, whereas ours needs 7, because it computes S and dP once for dQ and "
        "once more for dK and dV."
    )


def commit_text(run: Record, usual_machine: dict) -> str:
    """Return the commit (or the fingerprint of the sources), and the directions measured at other commits."""
    parts, apart = [versions_text(run.machine, usual_machine)], {}
    for kind, rows in (("", run.rows), (f"{second_protocol_name(run)} ", run.sustained)):
        for row in rows:
            if row.machine:
                versions = versions_text(run.machine | row.machine, usual_machine)
                apart.setdefault(versions, {})[kind + row.direction] = None
    return "; ".join(parts + [f"{join_with_and([*directions])} at {machine}" for machine, directions in apart.items()])


def versions_text(machine: dict, usual_machine: dict) -> str:
    """Return a machine's commit, followed by the versions that differ from those of the usual machine."""
    both = [
        {k: v for k, v in m.items() if k not in ("commit", "peers", "python")} | m.get("peers", {})
        for m in (machine, usual_machine)
    ]
    others = [f"{name} {version}" for name, version in both[0].items() if both[1].get(name) != version]
    return ", ".join([machine["commit"], *others])


# Tables -------------------------------------------------------------------------------------------------------


def median_tables(run: Record) -> list[str]:
    """Return the lines of one table per set of implementations, with medians over the problems that all of them ran."""
    parts = [markdown_table(["median", "problems", *names], rows) for names, rows in median_table_rows(run).items()]
    return [line for part in parts for line in [*part, ""]][:-1]


def median_table_rows(run: Record) -> dict[tuple[str, ...], list[list[str]]]:
    """Return {names of implementations: rows of their table}.

    An implementation is left out of a direction if it ran only some of its problems and less than a third of the suite.
    """
    lines: dict[tuple[str, ...], list[list[str]]] = {}
    ran = Counter(name for row in run.rows for name in row.values)
    for direction in dict.fromkeys(row.direction for row in run.rows if run.suite not in SUITES_WITHOUT_MEDIANS):
        rows = [row for row in run.rows if row.direction == direction]
        times = Counter(name for row in rows for name in row.values)
        names = tuple(name for name, count in times.items() if count == len(rows) or 3 * ran[name] >= len(run.rows))
        shared = [row for row in rows if names and set(names) <= row.values.keys()]
        if shared:
            columns = {name: [row.rate(name) if row.flops else row.values[name][0] for row in shared] for name in names}
            over = f"{len(shared)} of {len(rows)}" if len(shared) < len(rows) else f"all {len(rows)}"
            cells = [format_number(median(numbers)) for numbers in columns.values()]
            lines.setdefault(names, []).append(
                [f"{DIRECTION_WORDS.get(direction, direction)}, {unit_of(rows[0])}", over, *cells]
            )
    return lines


def all_rows_tables(run: Record) -> str:
    """Return tables with all rows of a record, which may come from an interrupted run."""
    lines = []
    for view in split_by_protocol(run):
        for rows in group_rows_by_table(view.rows):
            lines += [*rows_table(rows, unit_of(rows[0]), protocol_name(view)), ""]
        if any(row.chip for row in view.rows):
            title = f"{protocol_name(view)}, SM clock and power".removeprefix(", ")
            lines += [*rows_table(view.rows, CLOCK_AND_POWER, title), ""]
    return "\n".join(lines)


def group_rows_by_table(rows: list[Measurement]) -> Iterable[list[Measurement]]:
    """Group the rows for tables by their unit and by the set of implementations that ran in their direction."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        names.setdefault(row.direction, {}).update(dict.fromkeys(row.values))
    found: dict[tuple, list[Measurement]] = {}
    for row in rows:
        found.setdefault((unit_of(row), frozenset(names[row.direction])), []).append(row)
    return found.values()


def rows_table(rows: list[Measurement], unit: str, way: str = "") -> list[str]:
    """Return a table with one line per row and one column per implementation, which shows numbers in `unit`.

    If the unit is CLOCK_AND_POWER, the cells show these two quantities. Properties shared by all rows are named above
    the table instead of in a column. If there are more implementations than rows, and more than MAX_COLUMNS, the table
    has one line per implementation instead.
    """
    kept = [row.chip if unit == CLOCK_AND_POWER else row.values for row in rows]
    names = list(dict.fromkeys(name for numbers in kept for name in numbers))
    if unit == CLOCK_AND_POWER:
        cells = [[clock_and_power_cell(*row.chip.get(name, ())) for name in names] for row in rows]
    else:
        cells = [[number_and_ratio_cell(row, name) for name in names] for row in rows]
    titles = [ladder.NAMES.get(name, name) for name in names]
    shapes = [dict(zip((unit, *PROBLEM_PROPERTIES), problem_columns(row), strict=True)) for row in rows]
    shared = {k: v for k, v in shapes[0].items() if k != unit and len(rows) > 1 and all(x[k] == v for x in shapes)}
    shapes = [{k: v.replace(" for K and V", " K/V") for k, v in x.items() if k not in shared} for x in shapes]
    if len(names) > max(len(rows), MAX_COLUMNS):
        columns, lines = [unit, *map(properties_text, shapes)], [list(x) for x in zip(titles, *cells, strict=True)]
    else:
        columns = [*shapes[0], *titles]
        lines = [[*x.values(), *line] for x, line in zip(shapes, cells, strict=True)]
    title = ", ".join(filter(None, [way, properties_text(shared)]))
    above = [f"{title[0].upper()}{title[1:]}:", ""] if title else []
    return [*above, *markdown_table(columns, lines)]


def properties_text(properties: dict[str, str]) -> str:
    """Format properties of a problem as text, such as "forward, N = 4,096, causal"."""
    return ", ".join(f"{name} = {x}" if name in PROBLEM_PROPERTIES[:-1] else x for name, x in properties.items())


def clock_and_power_cell(clock: float = 0.0, watts: float = 0.0, capped: float = 0.0) -> str:
    """Format the MHz and watts during one implementation's run, and note whether the power limit was reached."""
    return f"{clock:,.0f}, {watts:,.0f}{', at the power limit' * bool(capped)}" if clock else "–"


def number_and_ratio_cell(row: Measurement, name: str) -> str:
    """Format an implementation's number, followed in parentheses by the ratio of fa2_lab's speed to its own."""
    if name not in row.values:
        return "–"
    number = f"{row.rate(name):.0f}" if row.flops else f"{row.values[name][0]:,.4g}"
    compared = "fa2_lab" in row.values and name != "fa2_lab" and row.unit not in UNITS_WITHOUT_RATIO
    return f"{number} ({row.ratio('fa2_lab', name):.2f})" if compared else number


def unit_of(row: Measurement) -> str:
    return "TFLOP/s" if row.flops else row.unit


def format_number(x: float) -> str:
    """Format a number with few characters."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


# Markdown -----------------------------------------------------------------------------------------------------


def details_fold(words: str, inside: Iterable[str], title: str = "") -> list[str]:
    """Wrap lines of Markdown in a fold, which shows only the title and a few words until a reader opens it."""
    seen = f"<b>{escape(title)}</b> <span>{escape(words)}</span>" if title else escape(words)
    return [f"<details><summary>{seen}</summary>", "", *inside, "", "</details>"]


def heading_link(view: Record) -> str:
    """Return a link to a record's heading, followed by the second protocol's name if the record uses that protocol."""
    name, comma, way = view.suite.partition(", ")
    return f"[{RECORD_TITLES[name]}](#{heading_anchor(RECORD_TITLES[name])}){comma}{way}"
