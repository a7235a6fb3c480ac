"""Write the README's generated parts: the ladder, third-party tests, and our speed compared with that of others."""

from collections import Counter

from fa2_lab.plots.roofline import join_with_and
from fa2_lab.records import Record, load
from fa2_lab.tools import ladder
from fa2_studio.bench.record_page import ampere_sentences, details_fold, second_protocol_name, split_by_protocol
from fa2_studio.bench.recording import markdown_table, problem_columns
from fa2_studio.bench.registry import RECORD_TITLES
from fa2_studio.bench.speed_ratios import peers_in_rows, rows_where_faster, speed_ratios, wins_and_speedup
from fa2_studio.judges import command as judges
from fa2_studio.judges.suites import SUITES as JUDGES

MARKERS = "<!-- {}: written by `python -m fa2_lab bench --results` -->", "<!-- end of {} -->"  # of README's parts
SLOW_CASES = (
    "mainly for short calls, for the backward pass of a single long sequence and, compared with FlashAttention-4, "
    "for the backward pass with d = 96"
)
NOTES_TEXT = (
    "*Kernel only* times the GPU alone, *sustained* times calls back to back for a second, and *with host* times 20 "
    "calls in a row. The last two include host time for every implementation. We tuned the block sizes of our kernels "
    "on the paper's grid and on random shapes other than those in the table. `torch flash` is FlashAttention-2, which "
    "was not written for Hopper. ThunderKittens, TLX and TileLang are attention kernels from three projects that help "
    "to write GPU kernels."
)


def readme_parts() -> dict[str, str]:
    """Return {name: text} for the generated parts of the README."""
    speed = speed_part(load("paper"), load("sweep"), load("ampere"))
    return dict(ladder=f"{ladder.claim(load('ladder'))}.", judged=third_party_part(), speed=speed)


def replace_part(text: str, part: str, content: str) -> str:
    """Return the README's text with `content` between a part's markers, on separate lines if the old content was."""
    start, end = (marker.format(part) for marker in MARKERS)
    before, rest = text.split(start)
    _, after = rest.split(end)
    line = "\n" if rest.startswith("\n") else ""
    return f"{before}{start}{line}{content}{line}{end}{after}"


SPEEDUP_TITLE = "On how many problems is attention() faster, and what is its median speedup?"
SPEEDUP_COLUMNS = ["problems and timing", "compared with", "`attention()` is faster on", "median speedup"]


def speed_part(paper: Record, sweep: Record, ampere: Record) -> str:
    """Return the README's part on speed: how often and by how much we are faster in two suites, and the exceptions."""
    commits = {run.machine["commit"] for run in (paper, sweep)}
    at = f", at commit {commits.pop()}" if len(commits) == 1 else ""
    lead = (
        f"We compare `attention()` with other implementations on an {paper.machine['gpu']}, forward and "
        f"backward{at}. In the figure above, the suites in which it loses a setting come first."
    )
    table = [*markdown_table(SPEEDUP_COLUMNS, speedup_rows(paper, sweep)), "", NOTES_TEXT]
    text = [lead, "", *details_fold(SPEEDUP_TITLE, table), ""]
    text += [*peer_wins_sentence(paper, "FlashAttention-4"), peer_wins_by_d_sentence(sweep, "FlashAttention-4"), ""]
    text.append(host_time_sentence(sweep, "cuDNN"))
    details = "describes how each implementation is called and where ours is slower"
    last = f"[RESULTS.md](RESULTS.md) {details}: {SLOW_CASES}."
    return "\n".join([*text, "", ampere_sentences(ampere), "", last])


def speedup_rows(*runs: Record) -> list[list[str]]:
    """Return the lines of the speedup table, one per implementation and timing."""
    lines: list[list[str]] = []
    for run in runs:
        for way, view in zip(("kernel only", second_protocol_name(run)), split_by_protocol(run), strict=False):
            peers, before = peers_in_rows(view.rows), lines
            name = f"{RECORD_TITLES[run.suite]}, {way}"
            lines = [*before, *([name * (n == 0), peer, *wins_and_speedup(view, peer)] for n, peer in enumerate(peers))]
    return lines


def peer_wins_sentence(run: Record, peer: str) -> list[str]:
    """Return a sentence that names each problem on which `peer`'s kernels are faster, and an empty line.

    If there is no such problem, the list is empty.
    """
    problems = []
    for ratio, row in rows_where_faster(run.rows, peer):
        what, N, _, _, d, mask = problem_columns(row)
        problems.append(f"{ratio:.3f} ({what}, N = {N}, d = {d}, {mask})")
    words = f"On {len(problems)} problems of the paper's grid, {peer}'s kernels are faster than ours."
    return [f"{words} Our speed over theirs is {join_with_and(problems)}.", ""] if problems else []


def peer_wins_by_d_sentence(run: Record, peer: str) -> str:
    """Return a sentence that states for each head dimension on how many problems `peer`'s kernels are faster."""
    rows = [row for row in run.rows if speed_ratios([row], "fa2_lab", peer)]
    slower = Counter(row.problem["d"] for _, row in rows_where_faster(rows, peer))
    all_with = Counter(row.problem["d"] for row in rows)
    parts = join_with_and([f"{slower[d]} of {all_with[d]} with d = {d}" for d in sorted(all_with)])
    words = (
        f"We measured {peer} on {len(rows)} of the {len(run.rows)} random problems. Its kernels are faster than ours on"
    )
    return f"{words} {slower.total()} of them: {parts}."


def host_time_sentence(run: Record, peer: str) -> str:
    """Return a sentence on the problems on which `peer` is faster when host time counts.

    It states on how many of these problems our kernels alone are faster.
    """
    alone = {(repr(row.problem), row.direction): row for row in run.rows}
    slower = [alone[repr(row.problem), row.direction] for _, row in rows_where_faster(run.sustained, peer)]
    faster = sum(row.ratio("fa2_lab", peer) > 1 for row in slower)
    if not slower:
        return f"When host time is included, {peer} is not faster on any of the random problems."
    why = (
        ", but the calls are so short that our slower host code decides the result" if faster > len(slower) / 2 else ""
    )
    words = f"When host time is included, {peer} is faster on {len(slower)} of the random problems. On {faster} of "
    return f"{words}those, our kernels themselves are faster{why}."


def third_party_part() -> str:
    """Return the README's part on third-party tests: their outcomes, and the GPUs on which they ran."""
    suites = judges.load_outcomes()
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
    return "\n".join([f"{lead} {outcome}", "", *markdown_table(["tests of", "passed"], lines), "", why])
