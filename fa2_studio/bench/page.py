"""Write recorded runs as Markdown: RESULTS.md, all tables, and the README's parts. Every number is from a record."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import median

from fa2_lab.plots import ratios as ratio_plot
from fa2_lab.plots.roofline import join_with_and
from fa2_lab.records import FOLDER, Measurement, Record, load, loaded, path_of
from fa2_lab.tools import files, ladder
from fa2_studio.bench import implementations
from fa2_studio.bench.protocol import REPEATED, REPEATS, SUSTAINED, rested
from fa2_studio.bench.registry import GRIDS, OTHERS, SUITES, TITLES
from fa2_studio.bench.results import ABSENT, DIRECTIONS, label, named, save, shape_of, table
from fa2_studio.judges import command as judges
from fa2_studio.judges.suites import SUITES as JUDGES

MARKERS = "<!-- {}: written by `python -m fa2_lab bench --results` -->", "<!-- end of {} -->"  # of README's parts
LEAD = Path(__file__).with_name("results.md")  # text on how to read the page and how each implementation is called
CHIP = "MHz, W"
PROPERTIES = ("N", "batch", "heads", "d", "mask")  # properties of a problem, which have a column each
MOST = 10  # if a table had more columns of implementations than this, it may get a line for each of them instead
BEHIND = ("measured", "problems", "lowest ratio", "problem with that ratio")
RIVALS = ("FlashAttention-3", "FlashAttention-4", "cuDNN")  # the fastest other implementations
NO_RATIO = ("nats", "count", "µs on the host")
TIMES = ("ms", "µs", "µs per token")
NO_MEDIANS = ("ladder", "ideas")  # records without medians, because their rows are of many kinds
REPETITIONS = r"(\d+) repetitions"
WAYS = {
    rested(REPEATS): "kernel only",
    SUSTAINED: "sustained",
    REPEATED: "with host",
}  # the protocols that the page describes once for all suites


def results_page(folder: Path | None = None) -> str:
    """Return RESULTS.md: which implementation is faster where, and a summary of every record."""
    runs = recorded(folder)
    lines = opening(runs, label)
    for title, _, text in background(folder):
        lines += ["", f"## {title}", "", *text]
    lines += ["", "## What we measured", "", RECORDS]
    for run in runs:
        name = record_name(run)
        about = what_is_measured(run).replace(name, f"[{name}](figures/data/{path_of(run.suite).name})", 1)
        lines += ["", f"### {TITLES[run.suite]}", "", about, "", *medians(run), "", " ".join(remarks(run))]
    return "\n".join(lines) + "\n"


def full_page(folder: Path | None = None) -> str:
    """Return RESULTS.md for the site, in folds, with the commit, the spread and all rows of every record."""
    runs = recorded(folder)
    lines = [*opening(runs, brief_problem), "", "## What we measured", "", FOLDS]
    for run in runs:
        title, inside = TITLES[run.suite], tables(run, usual_machine(runs))
        lines += ["", *fold(result(run), [f"({slug(title)})=", inside], title)]
    for title, words, text in background(folder):
        lines += ["", f"## {title}", "", *fold(words, text)]
    return "\n".join(lines) + "\n"


def fold(words: str, inside: Iterable[str], title: str = "") -> list[str]:
    """Return lines of Markdown as a fold. Until a reader opens it, only the title and a few words are visible."""
    seen = f"<b>{escape(title)}</b> <span>{escape(words)}</span>" if title else escape(words)
    return [f"<details><summary>{seen}</summary>", "", *inside, "", "</details>"]


def opening(runs: list[Record], naming: Callable[[Measurement], str]) -> list[str]:
    """Return the title, the outcome, and the table of where we are slower, with problems described by `naming`."""
    every = [view for run in runs for view in views(run)]
    slower = []
    for peer in sorted(peers_in(row for run in every for row in run.rows), key=lambda peer: peer not in RIVALS):
        if lines := behind(every, peer, naming):
            slower += [[f"**{peer}**", "", "", ""], *lines]
    lines = ["# Results", "", *outcome(runs)]
    return [*lines, "", "## Where `fa2_lab` is slower", "", SLOWER, "", *table(BEHIND, slower)]


def background(folder: Path | None) -> Iterable[tuple[str, str, list[str]]]:
    """Yield (title, result, lines) of the sections on GPUs, third-party tests, how to read the page, and timing."""
    speeds = gpus(folder)
    yield "GPU by GPU", fastest_by_gpu(folder), [GPUS, "", *speeds]
    yield "Third-party tests", third_party_failures(), [TESTS, "", *third_party_results()]
    title, _, text = LEAD.read_text(encoding="utf-8").removeprefix("## ").partition("\n\n")
    yield title, "What the names mean, and how we call each implementation", [text.rstrip("\n")]
    runs = recorded(folder)
    protocols = [f"**{name.capitalize()}.** {protocol}\n" for protocol, name in WAYS.items()]
    machine = " ".join([machine_sentence(usual_machine(runs)), *assembler_sentence(runs), CEILINGS])
    words = "Repetitions, pauses, the L2 cache, ceilings and versions"
    yield "How it was timed", words, [*protocols, machine, "", *ceilings(runs)]


def ceilings(runs: list[Record]) -> list[str]:
    """Return a table of the speeds of a large matmul and of a copy, with a line per run that also has other rows."""
    ceilings_of = {TITLES[run.suite]: run.ceilings for run in runs if run.ceilings and run.rows}
    names = dict.fromkeys(name for each in ceilings_of.values() for name in each)
    rows = [
        [title, *(short_number(each[x]) if x in each else "-" for x in names)] for title, each in ceilings_of.items()
    ]
    return table(["run", *(", ".join(name.split()) for name in names)], rows)


def outcome(runs: list[Record]) -> list[str]:
    """Return how often `fa2_lab` is faster, in a sentence, a table and the picture of all ratios with its caption."""
    message, how = ratio_plot.draw(**ratio_plot.data())[0].get_label().split(". ", 1)
    lead = f"**{message}.** We measured these settings on an {usual_machine(runs)['gpu']}. {COUNTS}"
    slow = f"`fa2_lab` is slower {SLOW}, as [a later table](#where-fa2_lab-is-slower) shows."
    lines = [*in_all_rows(), *compared(load("paper"), load("sweep"))]
    return [f"{lead} {slow}", "", *table(COMPARED, lines), "", f"![{message}.](figures/ratios.svg)", "", how]


def in_all_rows() -> list[list[str]]:
    """Return the lines of a table that count the problems in all rows of the picture of ratios."""
    rows = ratio_plot.data()["rows"]
    named = enumerate(ratio_plot.RIVALS)
    return [["All rows of the figure" * (n == 0), x, *counted(ratio_plot.all_ratios(rows, x))] for n, x in named]


def summary() -> list[str]:
    """Return the results in a few lines, for the first page of the site."""
    message = ratio_plot.draw(**ratio_plot.data())[0].get_label().split(". ", 1)[0]
    lead = f"{message}. We measured these settings on an {load('paper').machine['gpu']}."
    lines = [["All settings" * (n == 0), *cells] for n, (_, *cells) in enumerate(in_all_rows())]
    return [
        lead,
        "",
        *table(COMPARED, lines),
        "",
        "[The results](results.md) show every setting, and where `fa2_lab` is slower.",
    ]


def usual_machine(runs: list[Record]) -> dict:
    """Return the machine and the versions that most records have, without commit and Python."""
    kept = [json.dumps({k: v for k, v in run.machine.items() if k not in ("commit", "python")}) for run in runs]
    return json.loads(Counter(kept).most_common(1)[0][0]) if kept else {}


COUNTS = (
    "Each of them is a row of the figure below, which compares medians over the row's problems. The table counts "
    "single problems instead. Its first lines count the problems of all rows, where a problem that we timed in two "
    "ways counts twice, and its other lines count some of the suites on their own."
)
COMPARED = ["problems and timing", "compared with", "`attention()` is faster on", "median speedup"]
SLOW = "mainly for short calls and for the backward pass of a single long sequence"
FOLDS = "Each line opens a suite, with its medians, how it was timed, and all of its rows."
SLOWER = (
    "Each row below the name of an implementation shows on how many problems of one suite that implementation is "
    "faster than `fa2_lab`. The ratio is the speed of `fa2_lab` divided by the speed of the other "
    "implementation. For each implementation, the rows are sorted by their lowest ratio."
)
GPUS = (
    "The FA2 paper's benchmark problems have been measured on the following GPUs, by us or by others, using the "
    "*kernel only* timing. The column `fa2_lab` shows the median speed over these problems. The columns whose names "
    "begin with *over* show the median ratio of the speed of `fa2_lab` to the speed of another implementation."
)
RECORDS = "In each of the following sections, the first link leads to the suite's record."
CEILINGS = "For comparison, most runs also measure the speed of a large matmul (GEMM) and of a copy:"
TESTS = (
    "We run other projects' test suites against our implementation, because their authors look for mistakes that we "
    "may not have thought of. If a suite is large, we run only a sample of the tests that apply to us, and use fewer "
    "values for each parameter."
)


VERSIONS = dict(driver="driver", torch="torch", triton="Triton", ptxas="ptxas", cudnn="cuDNN")
PTXAS = "ptxas 13.4, which Triton 3.9 brings, instead of 12.9"  # the name of an idea in the record `ideas`


def machine_sentence(machine: dict) -> str:
    """Describe the machine of most records."""
    peers = [f"{name} {version}" for name, version in machine.get("peers", {}).items()]
    software = join_with_and([f"{name} {machine[key]}" for key, name in VERSIONS.items() if key in machine] + peers)
    machine = f"Most suites ran on a machine with an {machine['gpu']}, {software}."
    return f"{machine} The results page of the site lists the commit and the software versions for each suite."


def assembler_sentence(runs: list[Record]) -> Iterable[str]:
    """Describe which version of NVIDIA's assembler compiled the records, and what another version changes."""
    rows = [row for run in runs if run.suite == "ideas" for row in run.rows if row.problem.get("idea") == PTXAS]
    if rows:
        speeds = [row.ratio("with it", "without it") for row in rows]
        yield (
            "Some records with Triton 3.9 do not name the version of ptxas, NVIDIA's assembler. They were probably "
            "made with ptxas 12.9, although Triton 3.9 itself comes with ptxas 13.4 for Hopper. We compared the two "
            f"versions on {len(rows)} calls, and our kernels were {min(speeds):.2f} to {max(speeds):.2f} times as "
            "fast with ptxas 13.4 as with ptxas 12.9."
        )


def added_text(protocol: str, known: str) -> str | None:
    """Return the text that a protocol adds to a known one, or None if it does not begin with the known one.

    The numbers of repetitions may differ.
    """
    count = re.search(REPETITIONS, protocol)
    known = re.sub(REPETITIONS, count[0], known) if count else known
    return protocol.removeprefix(known).strip() if protocol.startswith(known) else None


def tables(run: Record, usual_machine: dict) -> str:
    """Return the section of a record for the site: its subject, medians, remarks, spread and all rows."""
    rungs = ["", *ladder.markdown(run)] if run.suite == "ladder" and not run.missing else []
    words = [*remarks(run), *filter(None, map(spread, views(run))), f"Measured at commit {code(run, usual_machine)}."]
    rows = fold("All rows", [numbers(run)])
    return "\n".join([what_is_measured(run), "", *medians(run), *rungs, "", " ".join(words), "", *rows])


def numbers(run: Record) -> str:
    """Return tables with all rows of a record, also of one from an interrupted run."""
    lines = []
    for view in views(run):
        for rows in rows_by_table(view.rows):
            lines += [*rows_table(rows, unit_of(rows[0]), way_of(view)), ""]
        if any(row.chip for row in view.rows):
            lines += [*rows_table(view.rows, CHIP, f"{way_of(view)}, SM clock and power".removeprefix(", ")), ""]
    return "\n".join(lines)


def rows_by_table(rows: list[Measurement]) -> Iterable[list[Measurement]]:
    """Return the rows in groups for one table each: with the same unit and the same implementations per direction."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        names.setdefault(row.direction, {}).update(dict.fromkeys(row.values))
    found: dict[tuple, list[Measurement]] = {}
    for row in rows:
        found.setdefault((unit_of(row), frozenset(names[row.direction])), []).append(row)
    return found.values()


def recorded(folder: Path | None = None) -> list[Record]:
    """Return the existing records in the order of the registry, without `smoke`, which is only a test of the bench."""
    names = [name for name in (*SUITES, *OTHERS) if name != "smoke" and path_of(name, folder).exists()]
    return [load(name, folder) for name in names]


# One record ---------------------------------------------------------------------------------------------------


def what_is_measured(run: Record) -> str:
    """Return sentences that describe what a record measures and its problems."""
    what = SUITES[run.suite].what if run.suite in SUITES else OTHERS[run.suite]
    verb = "times" if run.suite in (*GRIDS, "packed", "decode", "ring") else "measures"
    verb = "contains" if run.suite in OTHERS else verb
    rows = run.rows + run.sustained
    inputs = f" {shapes(rows)}" if rows else ""
    return f"{record_name(run)} {verb} {what}.{inputs}"


def record_name(run: Record) -> str:
    """Return the name of a record in sentences."""
    return "This record" if run.suite in OTHERS else f"`bench {run.suite}`"


def result(run: Record) -> str:
    """Return the outcome of a record in a few words."""
    if run.suite == "ladder" and not run.missing:
        return ladder.claim(run)
    if run.suite == "ideas":
        return f"{len({row.problem['idea'] for row in run.rows})} ideas, each measured with and without it"
    ahead = [words for view in views(run) if (words := wins(view))]
    if ahead:
        return f"Faster than {'; '.join(ahead)}"
    if found := {peer: each[0] for peer in RIVALS if (each := ratios(run.rows, "fa2_lab", peer))}:
        return join_with_and([f"{ratio_text(x)} times as fast as {peer}" for peer, x in found.items()])
    names, rows = next(iter(median_rows(run).items()), ((), []))
    if not rows:
        return join_with_and(
            [f"{value:.3g} {name.split()[1]} ({name.split()[0]})" for name, value in run.ceilings.items()]
        )
    numbers = dict(zip(names, rows[0][2:], strict=True))
    shown = {name: x for name, x in numbers.items() if name in ("fa2_lab", *RIVALS)}
    parts = [f"{name} {x}" for name, x in (shown if len(shown) > 1 else numbers).items()]
    return f"Median {rows[0][0]}: {', '.join(parts)}"


def wins(view: Record) -> str:
    """Return on how many problems we are faster than each of RIVALS, or "" if there is only one problem.

    If none of RIVALS was measured, the others take their place, as the portable kernels do if they alone ran. In the
    rows of a second protocol, the rivals are not named again, because the first protocol's rows come before.
    """
    us = "fa2_lab" if any("fa2_lab" in row.values for row in view.rows) else "fa2_lab portable"
    ratios_to = {peer: each for peer in peers_in(view.rows) if len(each := ratios(view.rows, us, peer)) > 1}
    named = [peer for peer in RIVALS if peer in ratios_to] or ratios_to
    counts = {peer: counted(ratios_to[peer])[0] for peer in named}
    if way := way_of(view):
        return f"{way}, on {join_with_and([*counts.values()])}"
    return join_with_and([f"{peer} on {count}" for peer, count in counts.items()])


def way_of(view: Record) -> str:
    """Return the name of the second protocol, such as "sustained", or "" for rows of the first one."""
    return view.suite.partition(", ")[2]


def title_of(view: Record) -> str:
    """Return a link to a record's heading, and the name of the second protocol if the rows have it."""
    name, comma, way = view.suite.partition(", ")
    return f"[{TITLES[name]}](#{slug(TITLES[name])}){comma}{way}"


def slug(title: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def medians(run: Record) -> list[str]:
    """Return the lines of a table per set of implementations, with medians over the problems that all of them ran."""
    parts = [table(["median", "problems", *names], rows) for names, rows in median_rows(run).items()]
    return [line for part in parts for line in [*part, ""]][:-1]


def median_rows(run: Record) -> dict[tuple[str, ...], list[list[str]]]:
    """Return {names of implementations: rows of their table}.

    An implementation that ran some problems of a direction, but less than a third of the suite, is left out.
    """
    lines: dict[tuple[str, ...], list[list[str]]] = {}
    ran = Counter(name for row in run.rows for name in row.values)
    for direction in dict.fromkeys(row.direction for row in run.rows if run.suite not in NO_MEDIANS):
        rows = [row for row in run.rows if row.direction == direction]
        times = Counter(name for row in rows for name in row.values)
        names = tuple(name for name, count in times.items() if count == len(rows) or 3 * ran[name] >= len(run.rows))
        shared = [row for row in rows if names and set(names) <= row.values.keys()]
        if shared:
            columns = {name: [row.rate(name) if row.flops else row.values[name][0] for row in shared] for name in names}
            over = f"{len(shared)} of {len(rows)}" if len(shared) < len(rows) else f"all {len(rows)}"
            cells = [short_number(median(numbers)) for numbers in columns.values()]
            lines.setdefault(names, []).append(
                [f"{DIRECTIONS.get(direction, direction)}, {unit_of(rows[0])}", over, *cells]
            )
    return lines


def remarks(run: Record) -> list[str]:
    """Return further sentences about a record: on ceilings, loss curves, its own protocol and missing numbers."""
    sentences = []
    if run.ceilings and not run.rows:
        parts = [f"{value:.3g} {name.split()[1]} ({name.split()[0]})" for name, value in run.ceilings.items()]
        sentences.append(f"The measured ceilings are {join_with_and(parts)}.")
    if any(row.direction == "loss" for row in run.rows):
        first, *others = run.curves.values()
        apart = max((abs(a - b) for curve in others for a, b in zip(curve, first, strict=True)), default=0.0)
        sentences.append(f"No loss curve ever differs from that of {next(iter(run.curves))} by more than {apart:.2g}.")
    for view in views(run):
        rests = [rest for known in WAYS if (rest := added_text(view.protocol, known)) is not None]
        sentences += rests or [view.protocol.removesuffix(".") + "."] if view.protocol else []
    if run.suite == "ampere":
        sentences.append(of_flash_2(run))
    if run.suite in OTHERS:
        what = "can make this record again" if run.suite == "ideas" else "writes a record with this name"
        sentences.append(f"No command {what}, because {run.made_by}.")
    if run.missing:
        sentences.append(f"The last run was interrupted before it reached {len(run.missing)} of its rows.")
    return [*filter(None, sentences), *missing_numbers(run.rows + run.sustained)]


def missing_numbers(rows: list[Measurement]) -> list[str]:
    """Return a sentence per implementation on whether some or all of its numbers are missing, and why."""
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
    """Return a recorded reason, or the first sentence of an error, as words that can follow "because"."""
    return f'it failed with "{why.split(". ")[0]}"' if re.match(r"\w+: ", why) else why


def views(run: Record) -> list[Record]:
    """Return a record for the rows of each protocol. The suite of the second one ends with the protocol's name."""
    sustained = dict(suite=f"{run.suite}, {second_way(run)}", protocol=run.sustained_protocol, rows=run.sustained)
    both = replace(run, sustained=[]), replace(run, sustained=[], **sustained)
    return [view for view in both if view.rows] or [both[0]]


def second_way(run: Record) -> str:
    """Return the name of the protocol that `--sustained` uses for this suite."""
    return "with host" if run.suite == "sweep" else "sustained"


def code(run: Record, usual_machine: dict) -> str:
    """Return the commit, or the fingerprint of the sources, and the directions that were measured at another commit."""
    parts, apart = [versions(run.machine, usual_machine)], {}
    for kind, rows in (("", run.rows), (f"{second_way(run)} ", run.sustained)):
        for row in rows:
            if row.machine:
                apart.setdefault(versions(run.machine | row.machine, usual_machine), {})[kind + row.direction] = None
    return "; ".join(parts + [f"{join_with_and([*directions])} at {machine}" for machine, directions in apart.items()])


def versions(machine: dict, usual_machine: dict) -> str:
    """Return a machine's commit, and its versions that differ from those of the usual machine."""
    both = [
        {k: v for k, v in m.items() if k not in ("commit", "peers", "python")} | m.get("peers", {})
        for m in (machine, usual_machine)
    ]
    others = [f"{name} {version}" for name, version in both[0].items() if both[1].get(name) != version]
    return ", ".join([machine["commit"], *others])


def spread(view: Record) -> str:
    """Return a sentence on how far the quartiles of the repetitions are from their median, typically and at most."""
    kept = [numbers for row in view.rows for numbers in row.values.values() if len(numbers) == 3]
    reach = sorted(max(high - middle, middle - low) / middle for middle, low, high in kept)
    if not reach:
        return ""
    typical, most = reach[len(reach) // 2], reach[-1]
    within = f"typically within {typical:.1%} of their median ({most:.1%} at worst)"
    return f"{f'For the *{way_of(view)}* timing, half' if way_of(view) else 'Half'} of the repetitions are {within}."


def unit_of(row: Measurement) -> str:
    return "TFLOP/s" if row.flops else row.unit


def short_number(x: float) -> str:
    """Return a number in a few characters."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def shapes(rows: list[Measurement]) -> str:
    """Return a sentence with the sizes of all problems, such as "The inputs are bf16 tensors with batch size 1, …"."""

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


# Tables -------------------------------------------------------------------------------------------------------


def rows_table(rows: list[Measurement], unit: str, way: str = "") -> list[str]:
    """Return a table with a line per row and a column per implementation. With unit=CHIP, it has SM clock and power.

    Properties that all rows share have no column, because the line above the table has them. If there are more
    implementations than rows, and more than MOST, the table has a line per implementation instead.
    """
    kept = [row.chip if unit == CHIP else row.values for row in rows]
    names = list(dict.fromkeys(name for numbers in kept for name in numbers))
    if unit == CHIP:
        cells = [[clock_and_power(*row.chip.get(name, ())) for name in names] for row in rows]
    else:
        cells = [[number_and_ratio(row, name) for name in names] for row in rows]
    titles = [ladder.NAMES.get(name, name) for name in names]
    shapes = [dict(zip((unit, *PROPERTIES), shape_of(row), strict=True)) for row in rows]
    shared = {k: v for k, v in shapes[0].items() if k != unit and len(rows) > 1 and all(x[k] == v for x in shapes)}
    shapes = [{k: v.replace(" for K and V", " K/V") for k, v in x.items() if k not in shared} for x in shapes]
    if len(names) > max(len(rows), MOST):
        lines = table([unit, *map(properties_text, shapes)], [list(line) for line in zip(titles, *cells, strict=True)])
    else:
        lines = table([*shapes[0], *titles], [[*x.values(), *line] for x, line in zip(shapes, cells, strict=True)])
    line = ", ".join(filter(None, [way, properties_text(shared)]))
    return [f"{line[0].upper()}{line[1:]}:", "", *lines] if line else lines


def properties_text(properties: dict[str, str]) -> str:
    """Return properties of a problem as words, such as "forward, N = 4,096, causal"."""
    return ", ".join(f"{name} = {x}" if name in PROPERTIES[:-1] else x for name, x in properties.items())


def clock_and_power(clock: float = 0.0, watts: float = 0.0, capped: float = 0.0) -> str:
    """Return the MHz and watts during one implementation's run, and whether the power limit held the clock down."""
    return f"{clock:,.0f}, {watts:,.0f}{', at the power limit' * bool(capped)}" if clock else "–"


def number_and_ratio(row: Measurement, name: str) -> str:
    """Return an implementation's number, and in parentheses the ratio of fa2_lab's speed to its speed."""
    if name not in row.values:
        return "–"
    number = f"{row.rate(name):.0f}" if row.flops else f"{row.values[name][0]:,.4g}"
    compared = "fa2_lab" in row.values and name != "fa2_lab" and row.unit not in NO_RATIO
    return f"{number} ({row.ratio('fa2_lab', name):.2f})" if compared else number


def ratio_text(ratio: float) -> str:
    """Return a ratio with two decimals, or with three if it would otherwise be shown as 1.00."""
    return f"{ratio:.3f}" if f"{ratio:.2f}" == "1.00" else f"{ratio:.2f}"


def third_party_results() -> list[str]:
    """Return a table with the outcomes of other projects' tests, and a fold that lists why tests were left out."""
    lines, reasons, made = [], [], set()
    for name, counts in judges.recorded().items():
        found = [f"{counts.get(kind, 0):,}" for kind in ("passed", "failed", "skipped by themselves")]
        out = [f"{reason} ({n:,})" for reason, n in counts["left out"].items()]
        reasons += [[JUDGES[name].title, "; ".join(out)]] if out else []
        on = f"{counts['gpu']} with torch {counts['torch']} and Triton {counts['triton']}"
        made.add(on)
        lines.append([JUDGES[name].title, *found, counts["ours"], on])
    columns = ["test suite", "passed", "failed", "skipped by the suite itself", "our commit", "on"]
    left_out = ["", *fold("The tests that were left out, and why", table(["test suite", "left out"], reasons))]
    if len(made) > 1:
        return [*table(columns, lines), *left_out]
    where = f"All of these tests ran on an {made.pop()}." if made else ""
    return [where, "", *table(columns[:-1], [x[:-1] for x in lines]), *left_out]


def third_party_failures() -> str:
    """Return a sentence on how many of other projects' tests ran, and how many of them failed."""
    suites = judges.recorded().values()
    passed, failed = (sum(counts.get(kind, 0) for counts in suites) for kind in ("passed", "failed"))
    return f"Of the {passed + failed:,} tests that we ran, {f'{failed:,}' if failed else 'none'} failed"


WANTED = ("A100", "RTX 4090", "L4", "MI300")  # GPUs that the kernels support, and that have no record yet
PEERS = ("torch flash", "cuDNN", "FlashAttention-3")
HOW = "\nThe following GPUs have not been measured yet: {}. \
[CONTRIBUTING.md](CONTRIBUTING.md#how-to-add) describes how to measure a GPU and send us the record."


def gpus(folder: Path | None = None) -> list[str]:
    """Return a table with a line per GPU and direction, from our records of the paper's grid and submitted ones."""
    files_of = {path_of(name, folder): "here" for name in ("paper", "h100")}
    files_of |= dict.fromkeys(sorted(((folder or FOLDER) / "submitted").glob("*.json")), "**submitted**")
    runs = [(loaded(path), by) for path, by in files_of.items() if path.exists()]
    columns = ["GPU", "direction", "fa2_lab, TFLOP/s", *(f"over {peer}" for peer in PEERS), "measured"]
    lines = []
    for run, by in runs:
        for direction in dict.fromkeys(row.direction for row in run.rows):
            rows = [row for row in run.rows if row.direction == direction and "fa2_lab" in row.values]
            rate = middle([row.rate("fa2_lab") for row in rows], places=0)
            over = [middle(ratios(rows, "fa2_lab", peer)) for peer in PEERS]
            about = f"{by}, {run.machine['commit']}, Triton {run.machine['triton']}"
            lines.append([run.machine["gpu"], direction, rate, *over, about])
    seen = " ".join(run.machine["gpu"] for run, _ in runs)
    wanted = [gpu for gpu in WANTED if not re.search(rf"\b{gpu}", seen)]
    return [*table(columns, lines), *([HOW.format(", ".join(wanted))] if wanted else [])]


def fastest_by_gpu(folder: Path | None = None) -> str:
    """Return the median speed of the forward pass on each GPU that we measured, in words."""
    runs = [load(name, folder) for name in ("paper", "h100") if path_of(name, folder).exists()]
    rates = {
        run.machine["gpu"]: [row.rate("fa2_lab") for row in run.rows if row.direction == "forward"] for run in runs
    }
    return "Median forward speed: " + join_with_and(
        [f"{middle(x, places=0)} TFLOP/s on an {gpu}" for gpu, x in rates.items()]
    )


def middle(found: list[float], places: int = 2) -> str:
    return f"{median(found):.{places}f}" if found else "–"


# Who is faster ------------------------------------------------------------------------------------------------


def peers_in(rows: Iterable[Measurement]) -> list[str]:
    """Return the other implementations that have a number in any of the rows."""
    return implementations.peers({name for row in rows for name in row.values})


def ratios(rows: Iterable[Measurement], us: str, peer: str) -> list[float]:
    """Return our speed divided by another implementation's, for all rows in which both have a time."""
    return [row.ratio(us, peer) for row in rows if row.unit in TIMES and {us, peer} <= row.values.keys()]


def slower_rows(rows: Iterable[Measurement], peer: str) -> list[tuple[float, Measurement]]:
    """Return the rows in which another implementation is faster than fa2_lab, the worst first."""
    both = [(ratio, row) for row in rows for ratio in ratios([row], "fa2_lab", peer)]
    return sorted((pair for pair in both if pair[0] < 1), key=lambda pair: pair[0])


def behind(runs: list[Record], peer: str, naming: Callable[[Measurement], str] = label) -> list[list[str]]:
    """Return a line per suite in which another implementation is faster on some rows.

    The line has the number of these rows, the lowest ratio and its problem. The suite with the lowest ratio is first.
    """
    lines = []
    for run in runs:
        if slower := slower_rows(run.rows, peer):
            worst, row = slower[0]
            count = f"{len(slower)} of {len(ratios(run.rows, 'fa2_lab', peer))}"
            lines.append((worst, [title_of(run), count, ratio_text(worst), naming(row)]))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def brief_problem(row: Measurement) -> str:
    """Return a short description of a row, which fits on one line of a table."""
    what, N, _, _, d, mask = shape_of(row)
    return f"{what}, N = {N}, d = {d}, {mask}"


# The README's parts -------------------------------------------------------------------------------------------


def sentence(*runs: Record) -> str:
    """Return the README's part on speed: per grid and timing, on how many problems we are faster, and how much."""
    commits = {run.machine["commit"] for run in runs}
    at = f", at commit {commits.pop()}" if len(commits) == 1 else ""
    lead = (
        f"We compare `attention()` with other implementations on an {runs[0].machine['gpu']}, forward and "
        f"backward{at}. The table shows on how many problems `attention()` is faster, and its median speedup."
    )
    text = [lead, "", *table(COMPARED, compared(*runs)), ""]
    text += [NOTES, ""]
    text += [*ahead(runs[0], "FlashAttention-4"), ahead_by_d(runs[-1], "FlashAttention-4"), ""]
    text += [host_sentence(runs[-1], "cuDNN")]
    last = f"[RESULTS.md](RESULTS.md) describes how each implementation is called and where ours is slower: {SLOW}."
    return "\n".join([*text, "", of_flash_2(load("ampere")), "", last])


def compared(*runs: Record) -> list[list[str]]:
    """Return the lines of a table, one per implementation and timing."""
    lines: list[list[str]] = []
    for run in runs:
        for way, view in zip(("kernel only", second_way(run)), views(run), strict=False):
            peers, before = peers_in(view.rows), lines
            name = f"{TITLES[run.suite]}, {way}"
            lines = [*before, *([name * (n == 0), peer, *faster(view, peer)] for n, peer in enumerate(peers))]
    return lines


def of_flash_2(run: Record) -> str:
    """Return sentences on the speed of the A100's code relative to FlashAttention-2's own kernels in PyTorch."""
    speeds = []
    for direction in ("forward", "backward"):
        over = ratios([row for row in run.rows if row.direction == direction], "fa2_lab portable", "torch flash")
        speeds.append(f"{median(over):.2f} in the {direction} pass ({min(over):.2f} to {max(over):.2f})")
    return (
        f"We have no A100. But an {run.machine['gpu']} also runs the A100's instructions, as it does for "
        "FlashAttention-2's own kernels in PyTorch (`torch flash`). If our portable kernels are compiled for an A100 "
        f"and run there, their median speed relative to these kernels is {' and '.join(speeds)}. FlashAttention-2's "
        "backward pass needs 5 matmuls per tile, whereas ours needs 7, because it computes S and dP once for dQ and "
        "once more for dK and dV."
    )


NOTES = (
    "*Kernel only* times the GPU alone, *sustained* times calls back to back for a second, and *with host* times 20 "
    "calls in a row. The last two include host time for every implementation. We tuned the block sizes of our kernels "
    "on the paper's grid and on random shapes other than those in the table. `torch flash` is FlashAttention-2, which "
    "was not written for Hopper. ThunderKittens, TLX and TileLang are attention kernels from three projects that help "
    "to write GPU kernels."
)


def faster(run: Record, peer: str) -> tuple[str, str]:
    """Return on how many problems `fa2_lab` is faster than `peer`, and its median speedup, as text."""
    gains = ratios(run.rows, "fa2_lab", peer)
    return counted(gains) if gains else ("–", "–")


def counted(gains: list[float]) -> tuple[str, str]:
    """Return how many of these speed ratios are above 1, and their median, as text."""
    return f"{sum(x > 1 for x in gains)} of {len(gains)}", f"{median(gains):.2f}×"


def ahead(run: Record, peer: str) -> list[str]:
    """Return a sentence that names each problem on which `peer`'s kernels are faster, and an empty line."""
    problems = []
    for ratio, row in slower_rows(run.rows, peer):
        what, N, _, _, d, mask = shape_of(row)
        problems.append(f"{ratio:.3f} ({what}, N = {N}, d = {d}, {mask})")
    words = f"On {len(problems)} problems of the paper's grid, {peer}'s kernels are faster than ours."
    return [f"{words} Our speed over theirs is {join_with_and(problems)}.", ""] if problems else []


def ahead_by_d(run: Record, peer: str) -> str:
    """Return a sentence: for each head dimension, on how many problems are `peer`'s kernels faster?"""
    rows = [row for row in run.rows if ratios([row], "fa2_lab", peer)]
    slower = Counter(row.problem["d"] for _, row in slower_rows(rows, peer))
    all_with = Counter(row.problem["d"] for row in rows)
    parts = join_with_and([f"{slower[d]} of {all_with[d]} with d = {d}" for d in sorted(all_with)])
    words = f"Of the random shapes, {peer}'s kernels are faster than ours on {slower.total()} of {len(rows)} problems"
    return f"{words}: {parts}."


def host_sentence(run: Record, peer: str) -> str:
    """Return a sentence: of the problems on which `peer` is faster when host time counts, on how many are our kernels
    alone faster?
    """
    alone = {(repr(row.problem), row.direction): row for row in run.rows}
    slower = [alone[repr(row.problem), row.direction] for _, row in slower_rows(run.sustained, peer)]
    faster = sum(row.ratio("fa2_lab", peer) > 1 for row in slower)
    if not slower:
        return f"When host time is included, {peer} is not faster on any of the random problems."
    why = (
        ", but the calls are so short that our slower host code decides the result" if faster > len(slower) / 2 else ""
    )
    words = f"When host time is included, {peer} is faster on {len(slower)} of the random problems. On {faster} of "
    return f"{words}those, our kernels themselves are faster{why}."


def verdict() -> str:
    """Return the README's part on other projects' tests: the outcomes, and the GPUs that they ran on."""
    suites = judges.recorded()
    machines = join_with_and(sorted({counts["gpu"].removeprefix("NVIDIA ") for counts in suites.values()}))
    failed = sum(counts.get("failed", 0) for counts in suites.values())
    lines = []
    for name, counts in suites.items():
        passed = counts.get("passed", 0)
        lines.append([JUDGES[name].title, f"{passed:,} of {passed + counts.get('failed', 0):,}"])
    lead = (
        f"We also run other projects' test suites against these calls, on an {machines}. For large suites, we run a "
        "sample of the applicable tests, with fewer parameter values."
    )
    outcome = f"In total, {failed:,} of these tests failed." if failed else "None of the tests that we ran failed."
    why = "RESULTS.md lists [the tests that we left out, and why](RESULTS.md#third-party-tests)."
    return "\n".join([f"{lead} {outcome}", "", *table(["tests of", "passed"], lines), "", why])


# Writing ------------------------------------------------------------------------------------------------------


def renewed(text: str, part: str, content: str) -> str:
    """Return the README's text with new content between a part's markers, on its own lines if it had them."""
    start, end = (marker.format(part) for marker in MARKERS)
    before, rest = text.split(start)
    _, after = rest.split(end)
    line = "\n" if rest.startswith("\n") else ""
    return f"{before}{start}{line}{content}{line}{end}{after}"


def write() -> None:
    """Write RESULTS.md and the README's generated parts from the recorded runs."""
    root = files.checkout("bench --results")
    for run in recorded():
        if (with_commit := named(run)) != run:
            save(with_commit)
    files.write(root / "RESULTS.md", results_page())
    readme = (root / "README.md").read_text(encoding="utf-8")
    readme = renewed(readme, "ladder", f"{ladder.claim(load('ladder'))}.")
    readme = renewed(readme, "judged", verdict())
    files.write(root / "README.md", renewed(readme, "speed", sentence(load("paper"), load("sweep"))))
