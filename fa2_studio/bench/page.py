"""RESULTS.md: every recorded run in tables, and the README's sentence on speed; nothing in either is typed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median

from fa2_lab.records import Measurement, Record, load, path_of
from fa2_lab.tools import files, ladder
from fa2_studio.bench.registry import OTHERS, SUITES
from fa2_studio.bench.results import label, spread, unit_of, views

WRITTEN = "<!-- {}: written by `python -m fa2_lab bench --results` -->", "<!-- end of {} -->"  # the README's parts
OURS = ("fa2_lab", "fa2_lab portable")
PEERS = ("cuDNN", "FlashAttention-3", "FlashAttention-4", "torch flash", "FlexAttention", "FlexAttention on FA4")
PEERS += ("flash_attn",)
LEAD = """# Results

Written by `python -m fa2_lab bench --results` from the records in [figures/data](figures/data).
`python -m fa2_lab bench SUITE` measures a suite on your GPU.
`fa2_lab` is what `attention()` chooses on that GPU; `fa2_lab portable` are the plain Triton kernels for every GPU.

A ratio compares two contestants of one run. Above 1, `fa2_lab` is faster, or needs less where memory is measured.
In the tables of the suites it stands in brackets behind each other contestant's number."""
CHIP = "MHz, W"
FASTEST = PEERS[:3]  # told in a line where they are faster than we are
NO_RATIO = ("nats", "count")
NO_CONTEST = ("ideas", "memory", "train", "accuracy", "deterministic")
FEW = 12  # rows that are shown without a fold


def results_page(folder: Path | None = None) -> str:
    """The whole page: who is faster where, then every suite that has a record."""
    runs = recorded(folder)
    contests = [view for run in runs if run.suite not in NO_CONTEST for view in named_views(run)]
    contests = [with_sums(run) if run.suite == "paper" else run for run in contests if peers_in(run.rows)]
    lines = [LEAD, "", "## Who is faster, and where", "", *standings(contests)]
    lines += [line for peer in FASTEST for line in ("", behind(contests, peer))]
    return "\n".join([*lines, *(line for run in runs for line in section(run))]) + "\n"


def recorded(folder: Path | None) -> list[Record]:
    """The runs that have a record with rows, in the order of the registry; smoke compares nothing."""
    names = [name for name in (*SUITES, *OTHERS) if name != "smoke" and path_of(name, folder).exists()]
    return [run for name in names if (run := load(name, folder)).rows or run.sustained]


def section(run: Record) -> list[str]:
    """One suite: what it is, what it found, and for each protocol how it was measured, with its tables."""
    what = SUITES[run.suite].what if run.suite in SUITES else OTHERS[run.suite]
    rows = run.rows + run.sustained
    lines = ["", f"## {run.suite}", "", f"{what[0].upper()}{what[1:]}. {shapes(rows)}.", ""]
    lines += [f"In short: {TOLD[run.suite](run)}.", ""] if run.suite in TOLD else []
    lines += [*ladder.markdown(run), ""] if run.suite == ladder.SUITE else []
    lines += [*sweep_table(run), ""] if run.suite == "sweep" else []
    lines += [f"{len(run.missing)} rows were not measured.", ""] if run.missing else []
    for view in named_views(run):
        lines += [about(view), ""]
        for unit in dict.fromkeys(unit_of(row) for row in view.rows):
            lines += folded(view, [row for row in view.rows if unit_of(row) == unit], unit)
        if any(row.chip for row in view.rows):
            lines += folded(view, view.rows, CHIP)
    reasons = sorted({f"{name}: {why}" for row in rows for name, why in row.failed.items()})
    return lines + ([f"Without a number: {'; '.join(reasons)}."] if reasons else [])


def named_views(run: Record) -> list[Record]:
    """The results of each protocol; those without pauses say so in their name."""
    told = f"{run.suite}, sustained"
    return [view if view.protocol == run.protocol else replace(view, suite=told) for view in views(run)]


def about(run: Record) -> str:
    """Machine, versions, protocol, ceilings, spread."""
    form = "{gpu}, torch {torch}, triton {triton}, cuDNN {cudnn}, driver {driver}"
    peers = [f"{name} {version}" for name, version in run.machine.get("peers", {}).items()]
    made = ", ".join([form.format(**run.machine), *peers, code(run)])
    lines = [f"Measured on {made}; {run.protocol}."]
    if run.ceilings:
        parts = (f"{name.split()[0]} {value:.3g} {name.split()[1]}" for name, value in run.ceilings.items())
        lines.append(f"In the same run: {', '.join(parts)}.")
    if said := spread(run.rows):
        lines.append(f"Of the repetitions, {said}.")
    return " ".join(lines)


def folded(run: Record, rows: list[Measurement], unit: str) -> list[str]:
    """A table of rows with one unit, under a fold where it is long."""
    table = chip_table(rows) if unit == CHIP else rows_table(rows, unit)
    if len(rows) <= FEW:
        return [*table, ""]
    return [f"<details><summary>{run.suite}: {len(rows)} rows, {unit}</summary>", "", *table, "", "</details>", ""]


def rows_table(rows: list[Measurement], unit: str) -> list[str]:
    """One line for each row, one column for each contestant."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    heads = " | ".join(ladder.NAMES.get(name, name) for name in names)
    lines = [f"| {unit} | N | batch | heads | d | mask | {heads} |", "|" + " --- |" * (6 + len(names))]
    for row in rows:
        cells = [*where(row), *(cell(row, name) for name in names)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def chip_table(rows: list[Measurement]) -> list[str]:
    """SM clock and power beside each contestant."""
    names = list(dict.fromkeys(name for row in rows for name in row.chip))
    lines = [f"| {CHIP} | N | batch | heads | d | mask | {' | '.join(names)} |", "|" + " --- |" * (6 + len(names))]
    for row in rows:
        read = [", ".join(f"{x:,.0f}" for x in row.chip.get(name, ())) or "–" for name in names]
        lines.append(f"| {' | '.join([*where(row), *read])} |")
    return lines


def where(row: Measurement) -> list[str]:
    """What the row measures, and its problem."""
    p = row.problem
    N = f"{p['N_q']:,}" if p["N_q"] == p["N_k"] else f"{p['N_q']:,} × {p['N_k']:,}"
    heads = f"{p['heads']}" if p["heads"] == p["kv_heads"] else f"{p['heads']} on {p['kv_heads']}"
    what = p.get("rung", row.direction) + (f", {p['idea']}" if "idea" in p else "")
    return [what, N, f"{p['batch']}", heads, f"{p['d']}", p.get("mask") or ("causal" if p["causal"] else "full")]


def cell(row: Measurement, name: str) -> str:
    """A contestant's number, and in brackets how many times better that of fa2_lab is."""
    if name not in row.values:
        return "–"
    number = f"{row.rate(name):.0f}" if row.flops else f"{row.values[name][0]:,.4g}"
    compared = "fa2_lab" in row.values and name != "fa2_lab" and row.unit not in NO_RATIO
    return f"{number} ({row.ratio('fa2_lab', name):.2f})" if compared else number


def with_sums(results: Record) -> Record:
    """The same with a row for every forward and backward of one problem together, their medians added."""
    sums = []
    for row in results.rows:
        later = [r for r in results.rows if (row.direction, r.direction) == ("forward", "backward")]
        for other in (r for r in later if r.problem == row.problem):
            names = row.values.keys() & other.values.keys()
            sums.append(
                Measurement(row.problem, "both, added", {n: [row.values[n][0] + other.values[n][0]] for n in names})
            )
    return replace(results, rows=results.rows + sums)


def standings(runs: list[Record]) -> list[str]:
    """A table: suite, direction, which of us; for each peer on how many rows we are faster, and the range."""
    peers = peers_in([row for run in runs for row in run.rows])
    lines = ["| suite | GPU | direction | | " + " | ".join(f"over {peer}" for peer in peers) + " |"]
    lines += ["| --- | --- | --- | --- |" + " --- |" * len(peers)]
    for run in runs:
        for direction in dict.fromkeys(row.direction for row in run.rows):
            rows = [row for row in run.rows if row.direction == direction]
            for us in ours_in(rows) if peers_in(rows) else []:
                cells = " | ".join(standing(rows, us, peer) for peer in peers)
                lines.append(f"| {run.suite} | {gpu_of(run)} | {direction} | {us} | {cells} |")
    return lines


def gpu_of(run: Record) -> str:
    """H100, H200, …"""
    return run.machine["gpu"].removeprefix("NVIDIA ").split()[0]


def standing(rows: list[Measurement], us: str, peer: str) -> str:
    """One of us against one peer."""
    found = ratios(rows, us, peer)
    ahead = sum(x > 1 for x in found)
    return f"ahead on {ahead} of {len(found)}, {min(found):.2f} to {max(found):.2f}" if found else "–"


def code(results: Record) -> str:
    """The commit, or the fingerprint of the sources, which says so itself."""
    commit = results.machine["commit"]
    return commit if commit.startswith("sources ") else f"commit {commit}"


def ours_in(rows: Iterable[Measurement]) -> list[str]:
    return [us for us in OURS if any(us in row.values for row in rows)]


def peers_in(rows: Iterable[Measurement]) -> list[str]:
    return [peer for peer in PEERS if any(peer in row.values for row in rows)]


def ratios(rows: Iterable[Measurement], us: str, peer: str) -> list[float]:
    """Our speed over a peer's wherever both have a number."""
    return [row.ratio(us, peer) for row in rows if {us, peer} <= row.values.keys()]


def plainly(rows: list[Measurement], peer: str) -> str:
    """On how many rows we lead a peer, by direction and head dimension."""
    parts = []
    for direction, d in dict.fromkeys((row.direction, row.problem["d"]) for row in rows):
        found = ratios([r for r in rows if (r.direction, r.problem["d"]) == (direction, d)], "fa2_lab", peer)
        if found:
            parts.append(f"{sum(x > 1 for x in found)} of {len(found)} rows of {direction} at d = {d}")
    return f"Plainly: on this grid `fa2_lab` is faster than {peer} on {', '.join(parts)}."


def behind(runs: list[Record], peer: str) -> str:
    """On how many rows of each suite a peer is faster than fa2_lab, and where by most."""
    parts = []
    for run in runs:
        rows = [row for row in run.rows if {"fa2_lab", peer} <= row.values.keys()]
        slower = sorted((row.ratio("fa2_lab", peer), n) for n, row in enumerate(rows) if row.ratio("fa2_lab", peer) < 1)
        if slower:
            worst, n = slower[0]
            where = " ".join(label(rows[n]).split())
            parts.append(f"{run.suite} {len(slower)} of {len(rows)}, at worst {worst:.2f} ({where})")
    return f"Behind {peer}: {'; '.join(parts)}." if parts else f"It is behind {peer} nowhere."


# The README's sentence ----------------------------------------------------------------------------------------

SAID = {name: name for name in ("cuDNN", "FlashAttention-3", "FlashAttention-4")}
SAID |= {"torch flash": "torch's FlashAttention-2"}


def worse(run: Record, peer: str) -> list[float]:
    """Our speed over a peer's in each row, under the protocol where it is less."""
    found: dict[tuple, float] = {}
    for row in run.rows + run.sustained:
        if {"fa2_lab", peer} <= row.values.keys():
            key = repr(row.problem), row.direction
            found[key] = min(row.ratio("fa2_lab", peer), found.get(key, float("inf")))
    return list(found.values())


def sentence(run: Record) -> str:
    """On how many rows of the paper's grid we are ahead of whom, and by how much in the geometric mean."""
    parts = []
    for peer, said in SAID.items():
        if found := worse(run, peer):
            parts.append(f"{said} on {sum(x > 1 for x in found)} of {len(found)} rows (× {geometric_mean(found):.2f})")
    both = "a row that was timed both with pauses between calls and without counts by the worse ratio; "
    mean = f"{both if run.sustained else ''}in brackets the geometric mean of these ratios."
    told = [
        f"On an {gpu_of(run)}, `fa2_lab.attention` is faster than {listed(parts)} of the FlashAttention-2 "
        f"paper's grid, forward and backward; {mean}",
        *filter(None, (slower(run, peer) for peer in SAID)),
        "[RESULTS.md](RESULTS.md) has every row.",
    ]
    return " ".join(told)


def slower(run: Record, peer: str) -> str:
    """On how many rows we are behind a peer, by how much at worst, and within which shapes; nothing if on none."""
    measured = [row for row in run.rows + run.sustained if {"fa2_lab", peer} <= row.values.keys()]
    rows = [row for row in measured if row.ratio("fa2_lab", peer) < 1]
    if not rows:
        return ""
    found, where = worse(run, peer), f"{listed(sorted({row.direction for row in rows}))}, {shapes(rows)}"
    count = f"{sum(x < 1 for x in found)} of {len(found)} rows (at worst × {min(found):.2f})"
    return f"It is slower than {SAID[peer]} on {count}, all of them in {where}."


def listed(parts: list[str]) -> str:
    """a, b and c"""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


# What a suite found, in a sentence -------------------------------------------------------------------------------


def shapes(rows: list[Measurement]) -> str:
    """What the rows have in common and how far they reach: "bf16, batch 1, 2 heads, d 128, N 32,768 to 131,072"."""

    def span(key: str) -> str:
        found = sorted({row.problem[key] for row in rows})
        return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"

    dtypes = {row.problem["dtype"].replace("bfloat16", "bf16") for row in rows}
    square = all(row.problem["N_q"] == row.problem["N_k"] for row in rows)
    lengths = f"N {span('N_q')}" if square else f"N_q {span('N_q')}, N_k {span('N_k')}"
    heads = span("heads") if span("heads") == span("kv_heads") else f"{span('heads')} on {span('kv_heads')}"
    masks = {row.problem["causal"] for row in rows}
    mask = "causal or full" if len(masks) == 2 else "causal" if True in masks else "full"
    return f"{', '.join(sorted(dtypes))}, batch {span('batch')}, heads {heads}, d {span('d')}, {lengths}, {mask}"


def small_told(results: Record) -> str:
    """What a call costs the host: the median over the rows."""
    told = []
    for direction, what in (
        ("forward", "host time of a forward call"),
        ("both", "of forward with gradients and backward"),
    ):
        rows = [row for row in results.rows if row.direction == direction]
        every = {name: [row.values[name][0] for row in rows if name in row.values] for name in (*OURS, *PEERS)}
        if rows:
            told.append(f"{what}, " + ", ".join(f"{n} {median(x):.0f} µs" for n, x in every.items() if x))
    return "; ".join(told)


def memory_told(results: Record) -> str:
    """The peak at both ends, and who ran out."""
    rows = [row for row in results.rows if row.direction == "both" and "fa2_lab" in row.values]
    short, long = rows[0], rows[-1]
    factor = long.problem["N_q"] // short.problem["N_q"]
    grown = long.values["fa2_lab"][0] / short.values["fa2_lab"][0]
    out = sorted({name for row in rows for name, why in row.failed.items() if "out of memory" in why})
    peaks = ", ".join(f"{name} {x[0]:,.0f} MiB" for name, x in long.values.items())
    return (
        f"peak of forward and backward beyond the inputs at N = {long.problem['N_q']:,}: {peaks}; {factor} times the "
        f"length takes `fa2_lab` {grown:.1f} times the memory; out of memory on the way: {', '.join(out) or 'nobody'}"
    )


def train_told(results: Record) -> str:
    """Tokens per second, and how far the loss curves are apart."""
    time = next(row for row in results.rows if row.direction == "time")
    speeds = ", ".join(f"{name} {1e6 / x[0]:,.0f}" for name, x in time.values.items())
    curves = list(results.curves.values())
    apart = max(abs(a - b) for curve in curves for a, b in zip(curve, curves[0], strict=True))
    steps = f"a small GPT, {time.problem['layers']} layers, {time.problem['steps']} steps"
    return f"{steps}, tokens per second: {speeds}; its loss curves are never further apart than {apart:.4f}"


def ring_told(results: Record) -> str:
    """What the longest sequence gains from more GPUs."""
    longest = max(row.problem["N_q"] for row in results.rows)
    rows = [r for r in results.rows if r.flops and r.problem["N_q"] == longest and "layout" not in r.problem]
    parts = []
    for row in rows:
        gains = [f"{row.ratio(gpus, '1 GPU'):.2f} on {gpus}" for gpus in row.values if gpus != "1 GPU"]
        parts.append(f"{row.direction} {', '.join(gains)}")
    return f"speed over 1 GPU at N = {longest:,}: {'; '.join(parts)}"


def ideas_told(results: Record) -> str:
    """Of each part: how many ideas are in use somewhere, how many nowhere, and what the best of them is worth."""

    def worth(row: Measurement) -> float:
        return row.ratio("with it", "without it")

    measured, told = [row for row in results.rows if {"with it", "without it"} <= row.values.keys()], []
    for part in dict.fromkeys(row.problem["part"] for row in measured):
        rows = [row for row in measured if row.problem["part"] == part]
        used, everything = {r.problem["idea"] for r in rows if r.problem["kept"]}, {r.problem["idea"] for r in rows}
        best = max(rows, key=worth)
        gain = f"{worth(best):.2f} times the speed by “{best.problem['idea']}”"
        told.append(f"{part}: {len(used)} in use, {len(everything - used)} not; at most {gain}")
    return "; ".join(told)


def sweep_table(results: Record) -> list[str]:
    """How many of the shapes each peer is faster on, and where by most."""
    told = ["| direction | behind | shapes | share | the worst five |", "| --- | --- | --- | --- | --- |"]
    for direction in dict.fromkeys(row.direction for row in results.rows):
        for peer in peers_in(results.rows):
            rows = [r for r in results.rows if r.direction == direction and {"fa2_lab", peer} <= r.values.keys()]
            if not rows:
                continue
            slower = sorted((r.ratio("fa2_lab", peer), n) for n, r in enumerate(rows) if r.ratio("fa2_lab", peer) < 1)
            worst = ", ".join(f"{x:.2f} ({' '.join(label(rows[n]).split()[1:])})" for x, n in slower[:5])
            share = f"{len(slower)} of {len(rows)} | {len(slower) / len(rows):.1%}"
            told.append(f"| {direction} | {peer} | {share} | {worst or '–'} |")
    return told


def deterministic_told(results: Record) -> str:
    """What the same bits cost everybody in the backward."""
    rows, prices = [row for row in results.rows if row.direction == "backward"], []
    for name in (name for name in rows[0].values if f"{name} deterministic" in rows[0].values):
        ratios = [row.ratio(name, f"{name} deterministic") for row in rows]
        prices.append(f"{name} {min(ratios):.2f} to {max(ratios):.2f}")
    return f"backward, the time with the same bits over the fast one's: {', '.join(prices)}"


TOLD: dict[str, Callable[[Record], str]] = dict(
    deterministic=deterministic_told,
    small=small_told,
    memory=memory_told,
    ideas=ideas_told,
    train=train_told,
    ring=ring_told,
)


# Writing ------------------------------------------------------------------------------------------------------


def renewed(text: str, part: str, said: str) -> str:
    """The README's text with what stands between the two markers of a part renewed."""
    start, end = (marker.format(part) for marker in WRITTEN)
    before, rest = text.split(start)
    _, after = rest.split(end)
    return f"{before}{start}\n{said}\n{end}{after}"


def write() -> None:
    """Write RESULTS.md, and the README's table of rungs and sentence on speed, from the recorded runs."""
    root = files.checkout("bench --results")
    files.write(root / "RESULTS.md", results_page())
    readme = (root / "README.md").read_text(encoding="utf-8")
    readme = renewed(readme, "ladder", "\n".join(ladder.markdown(load("ladder"))))
    files.write(root / "README.md", renewed(readme, "speed", sentence(load("paper"))))
