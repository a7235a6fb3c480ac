"""Recorded runs as Markdown: RESULTS.md, every table, and the README's generated parts; nothing in them is typed."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

from fa2_lab.records import Measurement, Record, load, path_of
from fa2_lab.tools import files, ladder
from fa2_studio.bench import contestants, submitted
from fa2_studio.bench.registry import OTHERS, SUITES
from fa2_studio.bench.results import label, named, save, shape_of, table
from fa2_studio.judges import command as judges
from fa2_studio.judges.suites import SUITES as JUDGES

MARKERS = "<!-- {}: written by `python -m fa2_lab bench --results` -->", "<!-- end of {} -->"  # the README's parts
LEAD = Path(__file__).with_name("results.md")  # how to read the page, and how everybody is called
CHIP = "MHz, W"
BEHIND = ("faster", "suite", "on rows", "at worst", "where")
REPETITIONS = r"median of \d+ repetitions"
NO_RATIO = ("nats", "count", "µs on the host")
TIMES = ("ms", "µs", "µs per token")
NO_MEDIANS = ("ladder", "ideas")  # whose rows are of many kinds


def results_page(folder: Path | None = None) -> str:
    """RESULTS.md: who is faster where, then a summary of every record."""
    lines, told = front(folder), {}
    for run in recorded(folder):
        link = f"[All numbers](figures/data/{path_of(run.suite).name})."
        lines += [*heading(run), " ".join([*medians(run), *how(run, told), link])]
    return "\n".join(lines) + "\n"


def full_page(folder: Path | None = None) -> str:
    """The same, with every row of every record."""
    return "\n".join([*front(folder), *map(tables, recorded(folder))]) + "\n"


def front(folder: Path | None) -> list[str]:
    """How to read the page; who is faster where; what others measured, and what their tests said."""
    runs = [view for run in recorded(folder) for view in views(run)]
    slower = [line for peer in peers_in(row for run in runs for row in run.rows) for line in behind(runs, peer)]
    lines = [LEAD.read_text(encoding="utf-8"), *standings(runs), "", "## Where it is behind", ""]
    lines += [*table(BEHIND, slower), "", "## GPU by GPU", ""]
    lines += ["The paper's grid, rested, here and where somebody else has measured it.", "", *submitted.gpus(folder)]
    return [*lines, "", "## Judged by others", "", *judged()]


def tables(run: Record) -> str:
    """One record: what it is, what came out, and all of its rows."""
    return "\n".join([*heading(run), numbers(run)])


def numbers(run: Record) -> str:
    """How a record was measured, and all of its rows, also of a run that was interrupted."""
    lines = [*how(run), ""]
    for view in views(run):
        for unit in dict.fromkeys(unit_of(row) for row in view.rows):
            lines += [f"{view.suite}:", "", *rows_table([row for row in view.rows if unit_of(row) == unit], unit), ""]
        if any(row.chip for row in view.rows):
            lines += [f"{view.suite}, SM clock and power:", "", *rows_table(view.rows, CHIP), ""]
    return "\n".join(lines)


def recorded(folder: Path | None = None) -> list[Record]:
    """The records that are there, in the order of the registry; smoke compares nothing."""
    names = [name for name in (*SUITES, *OTHERS) if name != "smoke" and path_of(name, folder).exists()]
    return [load(name, folder) for name in names]


# One record ---------------------------------------------------------------------------------------------------


def heading(run: Record) -> list[str]:
    """What a record is, of which shapes, and the ladder's table."""
    what = SUITES[run.suite].what if run.suite in SUITES else OTHERS[run.suite]
    rows = run.rows + run.sustained
    sentences = [f"{what[0].upper()}{what[1:]}", *([shapes(rows)] if rows else [])]
    rungs = ["", *ladder.markdown(run), ""] if run.suite == "ladder" and not run.missing else []
    return ["", f"## {run.suite}", "", ". ".join(sentences) + ".", *rungs]


def medians(run: Record) -> list[str]:
    """For each direction medians over the rows on which everybody has a number, and how far loss curves are apart."""
    sentences = []
    for direction in dict.fromkeys(row.direction for row in run.rows if run.suite not in NO_MEDIANS):
        rows = [row for row in run.rows if row.direction == direction]
        names = dict.fromkeys(name for row in rows for name in row.values)
        shared = [row for row in rows if names and names.keys() <= row.values.keys()]
        if shared:
            which = f" over the {len(shared)} of {len(rows)} rows that all have" * (len(shared) < len(rows))
            found = {name: [row.rate(name) if row.flops else row.values[name][0] for row in shared] for name in names}
            parts = ", ".join(f"{name} {short(median(numbers))}" for name, numbers in found.items())
            sentences.append(f"Median {direction}{which}, {unit_of(rows[0])}: {parts}.")
    if any(row.direction == "loss" for row in run.rows):
        first, *others = run.curves.values()
        apart = max((abs(a - b) for curve in others for a, b in zip(curve, first, strict=True)), default=0.0)
        sentences.append(f"The loss curves are never further apart than {apart:.2g}.")
    return sentences


def how(run: Record, told: dict[str, str] | None = None) -> list[str]:
    """What made a record, its protocols, if not told under a suite, and ceilings; who has no number, and why."""
    told = {} if told is None else told
    form = "{gpu}, torch {torch}, triton {triton}, cuDNN {cudnn}, driver {driver}"
    peers = [f"{name} {version}" for name, version in run.machine.get("peers", {}).items()]
    lines = [f"Measured on {', '.join([form.format(**run.machine), *peers, code(run)])}."]
    for view in views(run):
        reach = spread(view.rows)
        within = f" Of the repetitions, the middle half lies within {reach}." if reach else ""
        first = told.setdefault(re.sub(REPETITIONS, "", view.protocol), view.suite)
        same = ", ".join([f"Timed as {first}", *re.findall(REPETITIONS, view.protocol)])
        lines.append(f"{same if first != view.suite else view.protocol[:1].upper() + view.protocol[1:]}.{within}")
    if run.ceilings:
        parts = (f"{name.split()[0]} {value:.3g} {name.split()[1]}" for name, value in run.ceilings.items())
        lines.append(f"In the same run: {', '.join(parts)}.")
    lines += [f"No command writes this record: {run.made_by}."] if run.suite in OTHERS else []
    lines += [f"{len(run.missing)} rows were not reached by the last run."] if run.missing else []
    reasons = sorted({f"{name}: {why}" for row in run.rows + run.sustained for name, why in row.failed.items()})
    return lines + ([f"Without a number: {'; '.join(reasons)}."] if reasons else [])


def views(run: Record) -> list[Record]:
    """The rows of each protocol that has any, as records of their own; those of the second say which in their name."""
    sustained = dict(suite=f"{run.suite}, {second_way(run)}", protocol=run.sustained_protocol, rows=run.sustained)
    both = replace(run, sustained=[]), replace(run, sustained=[], **sustained)
    return [view for view in both if view.rows] or [both[0]]


def second_way(run: Record) -> str:
    """How `--sustained` times a suite."""
    return "as called" if run.suite == "sweep" else "sustained"


def code(run: Record) -> str:
    """The commit, or the fingerprint of the sources, which says so itself; and what was measured with another."""
    commit = run.machine["commit"]
    apart: dict[str, dict[str, None]] = {}
    for kind, rows in (("", run.rows), (f"{second_way(run)} ", run.sustained)):
        for row in rows:
            if row.machine:
                apart.setdefault(versions(dict(commit=commit) | row.machine), {})[kind + row.direction] = None
    parts = [commit if commit.startswith("sources ") else f"commit {commit}"]
    return "; ".join(parts + [f"{listed([*directions])} at {machine}" for machine, directions in apart.items()])


def versions(machine: dict) -> str:
    """A commit, and what else of a machine was another."""
    others = {name: value for name, value in machine.items() if name not in ("commit", "peers")}
    others |= machine.get("peers", {})
    return ", ".join([machine["commit"], *(f"{name} {value}" for name, value in others.items())])


def spread(rows: list[Measurement]) -> str:
    """How far the middle half of the repetitions reaches from the median, or nothing where no spread was kept."""
    kept = [numbers for row in rows for numbers in row.values.values() if len(numbers) == 3]
    reach = sorted(max(high - middle, middle - low) / middle for middle, low, high in kept)
    return f"{reach[len(reach) // 2]:.1%} of the median, at worst within {reach[-1]:.1%}" if reach else ""


def unit_of(row: Measurement) -> str:
    return "TFLOP/s" if row.flops else row.unit


def short(x: float) -> str:
    """A number in a few characters."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def shapes(rows: list[Measurement]) -> str:
    """What the rows have in common and how far they reach: "bf16, batch 1, heads 2, d 128, N 32,768 to 131,072"."""

    def span(key: str) -> str:
        numbers = sorted({row.problem[key] for row in rows})
        return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"

    dtypes = {row.problem["dtype"].replace("bfloat16", "bf16") for row in rows}
    square = all(row.problem["N_q"] == row.problem["N_k"] for row in rows)
    lengths = f"N {span('N_q')}" if square else f"N_q {span('N_q')}, N_k {span('N_k')}"
    heads = span("heads") if span("heads") == span("kv_heads") else f"{span('heads')} on {span('kv_heads')}"
    masks = sorted({row.problem["causal"] for row in rows}, reverse=True)
    mask = " or ".join("causal" if causal else "full" for causal in masks)
    return f"{', '.join(sorted(dtypes))}, batch {span('batch')}, heads {heads}, d {span('d')}, {lengths}, {mask}"


# Tables -------------------------------------------------------------------------------------------------------


def rows_table(rows: list[Measurement], unit: str) -> list[str]:
    """One line for each row, one column for each contestant: its number, or clock and power of the SM meanwhile."""
    kept = [row.chip if unit == CHIP else row.values for row in rows]
    names = list(dict.fromkeys(name for numbers in kept for name in numbers))
    columns = [unit, "N", "batch", "heads", "d", "mask", *(ladder.NAMES.get(name, name) for name in names)]
    if unit == CHIP:
        cells = [[clock_and_power(*row.chip.get(name, ())) for name in names] for row in rows]
    else:
        cells = [[cell(row, name) for name in names] for row in rows]
    return table(columns, [shape_of(row) + more for row, more in zip(rows, cells, strict=True)])


def clock_and_power(clock: float = 0.0, watts: float = 0.0, capped: float = 0.0) -> str:
    """MHz and watts of one contestant, and whether the power limit held the clock down."""
    return f"{clock:,.0f}, {watts:,.0f}{', at the power limit' * bool(capped)}" if clock else "–"


def cell(row: Measurement, name: str) -> str:
    """A contestant's number, and in brackets how many times better that of fa2_lab is."""
    if name not in row.values:
        return "–"
    number = f"{row.rate(name):.0f}" if row.flops else f"{row.values[name][0]:,.4g}"
    compared = "fa2_lab" in row.values and name != "fa2_lab" and row.unit not in NO_RATIO
    return f"{number} ({row.ratio('fa2_lab', name):.2f})" if compared else number


def standings(runs: list[Record]) -> list[str]:
    """Suite, direction; for each peer on how many rows we are faster, and how far the ratios reach.

    Who takes part most often comes first: the last columns of a page may be out of sight.
    """
    everything = [row for run in runs for row in run.rows]
    peers = [peer for peer in peers_in(everything) if peer != "torch math"]
    peers.sort(key=lambda peer: -sum(peer in row.values for row in everything))

    def standing(found: list[float]) -> str:
        if not found:
            return "–"
        ahead = f"{sum(x > 1 for x in found)} of {len(found)}"
        return f"{ahead}<br>{near(min(found))} to {near(max(found))}".replace(" ", "&nbsp;")  # two lines, and no more

    lines = []
    for run in runs:
        for direction in dict.fromkeys(row.direction for row in run.rows):
            rows = [row for row in run.rows if row.direction == direction]
            for of in ("", " portable") if run.suite == "paper" else ("",):
                cells = [standing(ratios(rows, f"fa2_lab{of}", peer)) for peer in peers]
                if set(cells) != {"–"}:
                    lines.append([run.suite + of, direction, *cells])
    return table(["suite", "direction", *(f"than {peer}" for peer in peers)], lines)


def near(ratio: float) -> str:
    """A ratio in two digits, in three where two would not say on which side of 1 it is."""
    return f"{ratio:.3f}" if f"{ratio:.2f}" == "1.00" else f"{ratio:.2f}"


def judged() -> list[str]:
    """What other projects' own tests found, and why some of them were left out."""
    lines = []
    for name, counts in judges.recorded().items():
        found = [f"{counts.get(kind, 0):,}" for kind in ("passed", "failed", "skipped by themselves")]
        out = "; ".join(f"{n:,} {reason}" for reason, n in counts["left out"].items()) or "0"
        on = f"{counts['gpu']}, torch {counts['torch']}, triton {counts['triton']}, {counts['ours']}"
        lines.append([JUDGES[name].title, *found, out, on])
    return table(["their tests", "passed", "failed", "skipped by themselves", "left out", "on"], lines)


# Who is faster ------------------------------------------------------------------------------------------------


def peers_in(rows: Iterable[Measurement]) -> list[str]:
    """The peers that have a number in any of the rows."""
    return contestants.peers({name for row in rows for name in row.values})


def ratios(rows: Iterable[Measurement], us: str, peer: str) -> list[float]:
    """Our speed over a peer's wherever both have a time."""
    return [row.ratio(us, peer) for row in rows if row.unit in TIMES and {us, peer} <= row.values.keys()]


def losses(rows: Iterable[Measurement], peer: str) -> list[tuple[float, Measurement]]:
    """Where a peer is faster than fa2_lab, the worst first."""
    both = [(ratio, row) for row in rows for ratio in ratios([row], "fa2_lab", peer)]
    return sorted((pair for pair in both if pair[0] < 1), key=lambda pair: pair[0])


def behind(runs: list[Record], peer: str) -> list[list[str]]:
    """The suites in which a peer is faster than fa2_lab on a row: on how many, and where by most."""
    lines = []
    for run in runs:
        if slower := losses(run.rows, peer):
            worst, row = slower[0]
            count = f"{len(slower)} of {len(ratios(run.rows, 'fa2_lab', peer))}"
            lines.append([peer, run.suite, count, near(worst), label(row)])
    return lines


# The README's sentences ---------------------------------------------------------------------------------------


def sentence(*runs: Record) -> str:
    """For each grid and way of timing, on how many rows we are ahead of whom, and by how much in the median."""
    where = f"On an {runs[0].machine['gpu']}, forward and backward: the rows on which `attention()` is faster, and in"
    ways = "brackets the median ratio. Rested: the kernels alone. Sustained: a second of calls back to back. As called:"
    host = "20 in a row. The last two include the host's time, a peer's, too. Sizes were fitted to the paper's grid and"
    old = "to other random shapes; torch flash is FlashAttention-2, which was not written for Hopper."
    lines = [f"{where} {ways} {host} {old}", ""]
    for run in runs:
        what = re.split("[:,]", SUITES[run.suite].what)[0]
        for view, way in zip(views(run), ("rested", second_way(run)), strict=False):
            found = {peer: ratios(view.rows, "fa2_lab", peer) for peer in peers_in(view.rows)}
            parts = [
                f"{peer} on {sum(x > 1 for x in each)} of {len(each)} (× {median(each):.2f})"
                for peer, each in found.items()
            ]
            first = ", fa2_lab timed first in each row" * ("order of the columns" in view.protocol)
            lines.append(f"- {what[0].upper()}{what[1:]}, {way}, {code(view)}{first}: {listed(parts)}.")
    lines[-1] += by_the_host(runs[-1], "cuDNN")
    behind = "where it is behind: most of all in short calls, and in the backward of one long sequence"
    return "\n".join([*lines, "", f"[RESULTS.md](RESULTS.md) says how others are called, and {behind}."])


def by_the_host(run: Record, peer: str) -> str:
    """On how many of the rows on which a peer is ahead as called our kernels alone are faster, so the host decides."""
    alone = {(repr(row.problem), row.direction): row for row in run.rows}
    slower = [alone[repr(row.problem), row.direction] for _, row in losses(run.sustained, peer)]
    faster = sum(row.ratio("fa2_lab", peer) > 1 for row in slower)
    words = f" Of the {len(slower)} rows on which {peer} is ahead as called, our kernels alone are faster on {faster}"
    return f"{words}: short calls, on which our host code takes longer than {peer}'s." if slower else ""


def listed(parts: list[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def verdict() -> str:
    """What other projects' tests found, and on which machines."""
    found = judges.recorded()
    machines = " and ".join(sorted({counts["gpu"].removeprefix("NVIDIA ") for counts in found.values()}))
    passed = (
        f"{JUDGES[name].title}, {counts.get('passed', 0):,} of {counts.get('passed', 0) + counts.get('failed', 0):,}"
        for name, counts in found.items()
    )
    sample = "of large suites a sample of what applies, with shorter lists of parameters"
    what = f"Other projects' own tests, {sample}, pass on these calls ({machines})"
    return f"{what}: {'; '.join(passed)}. [What was left out, and why](RESULTS.md#judged-by-others)."


# Writing ------------------------------------------------------------------------------------------------------


def renewed(text: str, part: str, content: str) -> str:
    """The README's text with what stands between the two markers of a part renewed."""
    start, end = (marker.format(part) for marker in MARKERS)
    before, rest = text.split(start)
    _, after = rest.split(end)
    return f"{before}{start}\n{content}\n{end}{after}"


def write() -> None:
    """Write RESULTS.md, and the README's sentences on the ladder and on speed, from the recorded runs."""
    root = files.checkout("bench --results")
    for run in recorded():
        if (with_commit := named(run)) != run:
            save(with_commit)
    files.write(root / "RESULTS.md", results_page())
    readme = (root / "README.md").read_text(encoding="utf-8")
    readme = renewed(readme, "ladder", ladder.claim(load("ladder")) + ".")
    readme = renewed(readme, "judged", verdict())
    files.write(root / "README.md", renewed(readme, "speed", sentence(load("paper"), load("sweep"))))
