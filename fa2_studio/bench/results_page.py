"""Write RESULTS.md and the site's page with all results. Every number comes from a record."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from fa2_lab.plots import ratios as ratio_plot
from fa2_lab.plots.roofline import join_with_and
from fa2_lab.records import FOLDER, Measurement, Record, load, path_of, read_record
from fa2_lab.tools import files
from fa2_studio.bench.readme import SLOW_CASES, SPEEDUP_COLUMNS, readme_parts, replace_part, speedup_rows
from fa2_studio.bench.record_page import (
    PROTOCOL_NAMES,
    details_fold,
    format_number,
    heading_link,
    headline,
    median_tables,
    record_name,
    record_section,
    remark_sentences,
    split_by_protocol,
    subject_sentences,
)
from fa2_studio.bench.recording import markdown_table, problem_columns, problem_text, save_record, with_commit_name
from fa2_studio.bench.registry import RECORD_GROUPS, RECORD_TITLES, RECORDS_WITHOUT_COMMAND, SUITES
from fa2_studio.bench.speed_ratios import (
    format_median,
    format_ratio,
    peers_in_rows,
    rows_where_faster,
    speed_ratios,
    wins_and_median,
)
from fa2_studio.book.questions import heading_anchor
from fa2_studio.judges import command as judges
from fa2_studio.judges.suites import SUITES as JUDGES

Naming = Callable[[Measurement], str]  # returns the description of a row's problem

# This file explains how to read the page and how each implementation is called.
NAMES_TEXT = Path(__file__).with_name("results.md")
SLOWER_COLUMNS = ("measured", "problems", "lowest ratio", "problem with that ratio")
FOLDS_TEXT = "Each line opens a suite, with its medians, how it was timed, and all of its rows."
SLOWER_TEXT = (
    "Each row below the name of an implementation shows on how many problems of one suite that implementation is "
    "faster than `fa2_lab`. The ratio is the speed of `fa2_lab` divided by the speed of the other "
    "implementation. For each implementation, the rows are sorted by their lowest ratio."
)
RECORDS_TEXT = "In each of the following sections, the first link leads to the suite's record."


def results_md(folder: Path | None = None) -> str:
    """Return the text of RESULTS.md: a comparison of the implementations, and a summary of every record."""
    runs = load_records(folder)
    lines = summary_lines(runs, problem_text)
    for title, _, text in background_sections(folder):
        lines += ["", f"## {title}", "", *text]
    lines += ["", "## What we measured", "", RECORDS_TEXT]
    for run in runs:
        name = record_name(run)
        about = subject_sentences(run).replace(name, f"[{name}](figures/data/{path_of(run.suite).name})", 1)
        lines += ["", f"### {RECORD_TITLES[run.suite]}", "", about, "", *median_tables(run)]
        lines += ["", " ".join(remark_sentences(run))]
    return "\n".join(lines) + "\n"


def site_page(folder: Path | None = None) -> str:
    """Return the site's version of RESULTS.md, whose folds add the commit, the spread and all rows of every record."""
    runs = load_records(folder)
    lines = [*summary_lines(runs, brief_problem), "", "## What we measured", "", FOLDS_TEXT]
    for group, records in grouped(runs):
        lines += ["", f"### {group}"]
        for run in records:
            title, inside = RECORD_TITLES[run.suite], record_section(run, most_common_machine(runs))
            lines += ["", *details_fold(headline(run), [f"({heading_anchor(title)})=", inside], title)]
    for title, words, text in background_sections(folder):
        lines += ["", f"## {title}", "", *details_fold(words, text)]
    return "\n".join(lines) + "\n"


def grouped(runs: list[Record]) -> Iterable[tuple[str, list[Record]]]:
    """Yield the headings of RECORD_GROUPS with their records."""
    named = {name for names in RECORD_GROUPS.values() for name in names}
    for heading, names in RECORD_GROUPS.items():
        yield heading, [run for run in runs if (run.suite in names if names else run.suite not in named)]


def write_pages() -> None:
    """Write RESULTS.md and the README's generated parts from the recorded runs."""
    root = files.checkout("bench --results")
    for run in load_records():
        if (with_commit := with_commit_name(run)) != run:
            save_record(with_commit)
    files.write(root / "RESULTS.md", results_md())
    readme = (root / "README.md").read_text(encoding="utf-8")
    for part, content in readme_parts().items():
        readme = replace_part(readme, part, content)
    files.write(root / "README.md", readme)


def load_records(folder: Path | None = None) -> list[Record]:
    """Return the existing records in the order of the registry, except `smoke`, which only tests the bench itself."""
    names = [name for name in (*SUITES, *RECORDS_WITHOUT_COMMAND) if name != "smoke" and path_of(name, folder).exists()]
    return [load(name, folder) for name in names]


# The top of the page ------------------------------------------------------------------------------------------


COUNTS_TEXT = (
    "The figure compares medians over the problems of a row, whereas this table counts single problems. Its first "
    "lines count the problems of all rows, where a problem that we timed in two ways counts twice, and its other "
    "lines count some of the suites on their own."
)
COUNTS_TITLE = "On how many problems is fa2_lab faster?"


def summary_lines(runs: list[Record], naming: Naming) -> list[str]:
    """Return the title, the outcome, and the table of problems on which we are slower, described by `naming`."""
    every = [view for run in runs for view in split_by_protocol(run)]
    slower = []
    for peer in sorted(
        peers_in_rows(row for run in every for row in run.rows), key=lambda peer: peer not in ratio_plot.FAST_PEERS
    ):
        if lines := slower_table_rows(every, peer, naming):
            slower += [[f"**{peer}**", "", "", ""], *lines]
    lines = ["# Results", "", *outcome_lines(runs)]
    return [*lines, "", "## Where `fa2_lab` is slower", "", SLOWER_TEXT, "", *markdown_table(SLOWER_COLUMNS, slower)]


def outcome_lines(runs: list[Record]) -> list[str]:
    """Return a summary of how often `fa2_lab` is faster: a sentence, the picture of all ratios, and a table."""
    data = ratio_plot.data()
    message, how = ratio_plot.draw(**data)[0].get_label().split(". ", 1)
    lowest: dict[str, float] = {}
    for group, _, ratios in data["rows"]:
        lowest[group] = min(lowest.get(group, 1.0), *ratio_plot.medians(ratios).values())
    losses = [f"{ratio:.2f} in “{group}”" for group, ratio in lowest.items() if ratio < 1]
    worst = f"Where `fa2_lab` loses, its lowest median ratio is {join_with_and(losses)}. " if losses else ""
    slow = f"On single problems, it is slower {SLOW_CASES}, as [a later table](#where-fa2_lab-is-slower) shows."
    lines = [*figure_speedup_rows(), *speedup_rows(load("paper"), load("sweep"))]
    table = details_fold(COUNTS_TITLE, [COUNTS_TEXT, "", *markdown_table(SPEEDUP_COLUMNS, lines)])
    return [worst + slow, "", f"![{message}.](figures/ratios.svg)", "", how, "", *table]


def figure_speedup_rows() -> list[list[str]]:
    """Return the table lines that count the problems behind all rows of the picture of ratios."""
    rows = ratio_plot.data()["rows"]
    ratios = {peer: ratio_plot.all_ratios(rows, peer) for peer in ratio_plot.FAST_PEERS}
    return [["All rows of the figure" * (n == 0), x, *wins_and_median(ratios[x])] for n, x in enumerate(ratios)]


def front_page_summary() -> list[str]:
    """Return a brief summary of the results for the site's first page."""
    message = ratio_plot.draw(**ratio_plot.data())[0].get_label().split(". ", 1)[0]
    lead = f"{message}. We measured these settings on an {load('paper').machine['gpu']}."
    return [
        lead,
        "",
        *markdown_table(SPEEDUP_COLUMNS[1:], [cells for _, *cells in figure_speedup_rows()]),
        "",
        "[The results](results.md) show every setting, and where `fa2_lab` is slower.",
    ]


def slower_table_rows(runs: list[Record], peer: str, naming: Naming = problem_text) -> list[list[str]]:
    """Return one line for each suite in which another implementation is faster on some rows.

    A line contains the number of these rows, the lowest ratio and its problem. The suite with the lowest ratio comes
    first.
    """
    lines = []
    for run in runs:
        if slower := rows_where_faster(run.rows, peer):
            worst, row = slower[0]
            count = f"{len(slower)} of {len(speed_ratios(run.rows, 'fa2_lab', peer))}"
            lines.append((worst, [heading_link(run), count, format_ratio(worst), naming(row)]))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def brief_problem(row: Measurement) -> str:
    """Return a description of a row that is short enough for one line of a table."""
    what, N, _, _, d, mask = problem_columns(row)
    return f"{what}, N = {N}, d = {d}, {mask}"


# The end of the page ------------------------------------------------------------------------------------------


GPUS_TEXT = (
    "The FA2 paper's benchmark problems have been measured on the following GPUs, by us or by others, using the "
    "*kernel only* timing. The column `fa2_lab` shows the median speed over these problems. The columns whose names "
    "begin with *over* show the median ratio of the speed of `fa2_lab` to the speed of another implementation."
)
TESTS_TEXT = (
    "We run other projects' test suites against our implementation, because their authors look for mistakes that we "
    "may not have thought of. If a suite is large, we run only a sample of the tests that apply to us, and use fewer "
    "values for each parameter."
)
CEILINGS_TEXT = "For comparison, most runs also measure the speed of a large matmul (GEMM) and of a copy:"


def background_sections(folder: Path | None) -> Iterable[tuple[str, str, list[str]]]:
    """Yield (title, result, lines) for the sections on GPUs, third-party tests, implementation names, and timing."""
    speeds = gpu_table(folder)
    yield "GPU by GPU", speed_by_gpu_sentence(folder), [GPUS_TEXT, "", *speeds]
    yield "Third-party tests", third_party_sentence(), [TESTS_TEXT, "", *third_party_table()]
    title, _, text = NAMES_TEXT.read_text(encoding="utf-8").removeprefix("## ").partition("\n\n")
    yield title, "What the names mean, and how we call each implementation", [text.rstrip("\n")]
    runs = load_records(folder)
    protocols = [f"**{name.capitalize()}.** {protocol}\n" for protocol, name in PROTOCOL_NAMES.items()]
    machine = " ".join([machine_sentence(most_common_machine(runs)), *ptxas_sentences(runs), CEILINGS_TEXT])
    words = "Repetitions, pauses, the L2 cache, ceilings and versions"
    yield "How it was timed", words, [*protocols, machine, "", *ceilings_table(runs)]


def ceilings_table(runs: list[Record]) -> list[str]:
    """Return a table of matmul and copy speeds, with one line for each run that contains other rows as well."""
    ceilings_of = {RECORD_TITLES[run.suite]: run.ceilings for run in runs if run.ceilings and run.rows}
    names = dict.fromkeys(name for each in ceilings_of.values() for name in each)
    rows = [
        [title, *(format_number(each[x]) if x in each else "-" for x in names)] for title, each in ceilings_of.items()
    ]
    return markdown_table(["run", *(", ".join(name.split()) for name in names)], rows)


# The machines -------------------------------------------------------------------------------------------------


VERSIONS = dict(driver="driver", torch="torch", triton="Triton", ptxas="ptxas", cudnn="cuDNN")
PTXAS = "ptxas 13.4, which Triton 3.9 brings, instead of 12.9"  # the name of an idea in the record `ideas`


def most_common_machine(runs: list[Record]) -> dict:
    """Return the machine and the software versions shared by most records, without the commit and Python's version."""
    kept = [json.dumps({k: v for k, v in run.machine.items() if k not in ("commit", "python")}) for run in runs]
    return json.loads(Counter(kept).most_common(1)[0][0]) if kept else {}


def machine_sentence(machine: dict) -> str:
    """Return a sentence that describes the machine and the software versions shared by most records."""
    peers = [f"{name} {version}" for name, version in machine.get("peers", {}).items()]
    software = join_with_and([f"{name} {machine[key]}" for key, name in VERSIONS.items() if key in machine] + peers)
    machine = f"Most suites ran on a machine with an {machine['gpu']}, {software}."
    return f"{machine} The results page of the site lists the commit and the software versions for each suite."


def ptxas_sentences(runs: list[Record]) -> Iterable[str]:
    """Yield a sentence on which version of NVIDIA's assembler made the records, and how another version compares."""
    rows = [row for run in runs if run.suite == "ideas" for row in run.rows if row.problem.get("idea") == PTXAS]
    if rows:
        speeds = [row.ratio("with it", "without it") for row in rows]
        yield (
            "Some records with Triton 3.9 do not name the version of ptxas, NVIDIA's assembler. They were probably "
            "made with ptxas 12.9, although Triton 3.9 itself comes with ptxas 13.4 for Hopper. We compared the two "
            f"versions on {len(rows)} calls, and our kernels were {min(speeds):.2f} to {max(speeds):.2f} times as "
            "fast with ptxas 13.4 as with ptxas 12.9."
        )


WANTED_GPUS = ("A100", "RTX 4090", "L4", "MI300")  # GPUs supported by the kernels but not measured yet
GPU_TABLE_PEERS = ("torch flash", "cuDNN", "FlashAttention-3")
WANTED_TEXT = "\nThe following GPUs have not been measured yet: {}. \
[CONTRIBUTING.md](CONTRIBUTING.md#how-to-add) describes how to measure a GPU and send us the record."


def gpu_table(folder: Path | None = None) -> list[str]:
    """Return a table with one line per GPU and direction, from our own and submitted records of the paper's grid."""
    files_of = {path_of(name, folder): "here" for name in ("paper", "h100")}
    files_of |= dict.fromkeys(sorted(((folder or FOLDER) / "submitted").glob("*.json")), "**submitted**")
    runs = [(read_record(path), by) for path, by in files_of.items() if path.exists()]
    columns = ["GPU", "direction", "fa2_lab, TFLOP/s", *(f"over {peer}" for peer in GPU_TABLE_PEERS), "measured"]
    lines = []
    for run, by in runs:
        for direction in dict.fromkeys(row.direction for row in run.rows):
            rows = [row for row in run.rows if row.direction == direction and "fa2_lab" in row.values]
            rate = format_median([row.rate("fa2_lab") for row in rows], places=0)
            over = [format_median(speed_ratios(rows, "fa2_lab", peer)) for peer in GPU_TABLE_PEERS]
            about = f"{by}, {run.machine['commit']}, Triton {run.machine['triton']}"
            lines.append([run.machine["gpu"], direction, rate, *over, about])
    seen = " ".join(run.machine["gpu"] for run, _ in runs)
    wanted = [gpu for gpu in WANTED_GPUS if not re.search(rf"\b{gpu}", seen)]
    return [*markdown_table(columns, lines), *([WANTED_TEXT.format(", ".join(wanted))] if wanted else [])]


def speed_by_gpu_sentence(folder: Path | None = None) -> str:
    """Return a text that states the median forward speed on each GPU that we have measured."""
    runs = [load(name, folder) for name in ("paper", "h100") if path_of(name, folder).exists()]
    rates = {
        run.machine["gpu"]: [row.rate("fa2_lab") for row in run.rows if row.direction == "forward"] for run in runs
    }
    return "Median forward speed: " + join_with_and(
        [f"{format_median(x, places=0)} TFLOP/s on an {gpu}" for gpu, x in rates.items()]
    )


# Other projects' tests ----------------------------------------------------------------------------------------


def third_party_table() -> list[str]:
    """Return a table of the outcomes of other projects' tests, and a fold with the reasons why tests were left out."""
    lines, reasons, made = [], [], set()
    for name, counts in judges.load_outcomes().items():
        found = [f"{counts.get(kind, 0):,}" for kind in ("passed", "failed", "skipped by themselves")]
        out = [f"{reason} ({n:,})" for reason, n in counts["left out"].items()]
        reasons += [[JUDGES[name].title, "; ".join(out)]] if out else []
        on = f"{counts['gpu']} with torch {counts['torch']} and Triton {counts['triton']}"
        made.add(on)
        lines.append([JUDGES[name].title, *found, counts["ours"], on])
    columns = ["test suite", "passed", "failed", "skipped by the suite itself", "our commit", "on"]
    fold = details_fold("The tests that were left out, and why", markdown_table(["test suite", "left out"], reasons))
    if len(made) > 1:
        return [*markdown_table(columns, lines), "", *fold]
    where = f"All of these tests ran on an {made.pop()}." if made else ""
    return [where, "", *markdown_table(columns[:-1], [x[:-1] for x in lines]), "", *fold]


def third_party_sentence() -> str:
    """Return a sentence that states how many tests of other projects ran and how many of them failed."""
    suites = judges.load_outcomes().values()
    passed, failed = (sum(counts.get(kind, 0) for counts in suites) for kind in ("passed", "failed"))
    return f"Of the {passed + failed:,} tests that we ran, {f'{failed:,}' if failed else 'none'} failed"
