"""Write the data of the interactive figures: GPUs and compiled tiles for the playground, and rungs for the climb."""

import json
from dataclasses import fields

from fa2_lab.kernels import ladder
from fa2_lab.machine import chips, reasons
from fa2_lab.plots.climb import JUMPS
from fa2_lab.records import Record, load, read_json
from fa2_lab.tools import rung_diff
from fa2_studio.book.hopper import mark_changes


def data_script() -> str:
    """Return the text of figures/live/data.js."""
    text = json.dumps(playground_and_climb(), ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return f"window.LIVE = {text};\n"


def measured_script() -> str:
    """Return the text of figures/live/measured.js, with the setting and the measured milliseconds for computing dQ.

    The times are those of one pass and of two passes, each with and without a causal mask.
    """
    record = load("ladder")
    rows = {row.problem["causal"]: row for row in record.rows if row.direction == "backward"}
    ways = ("b00_atomics", "b01_two_passes")
    masks = dict(full=False, causal=True)
    times = {name: [round(rows[mask].values[way][0], 1) for way in ways] for name, mask in masks.items()}
    p = rows[False].problem
    made = f"{record.machine['gpu']}, {p['batch'] * p['heads']} heads, N = {p['N_q']:,}, d = {p['d']}"
    return f"window.MEASURED = {json.dumps(times | dict(made=made))};\n"


def playground_and_climb() -> dict:
    """Return the GPUs and the compiled tiles for the playground, and the rungs for the climb."""
    names = [field.name for field in fields(chips.Chip) if field.name not in ("compute_capability", "name")]
    gpus = {chip.name: {name: getattr(chip, name) for name in names} for chip in chips.CHIPS.values()}
    return dict(chips=gpus, compiled=compiled_tiles(), climb=climb_data())


def compiled_tiles() -> dict[str, dict[str, list[int]]]:
    """Return {GPU: {"d B_r B_c warps stages": [registers per thread, spill instructions]}} for the forward."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in read_json("compiled")["forward"]:
        key = " ".join(str(row[name]) for name in ("d", "B_r", "B_c", "warps", "stages"))
        for chip in chips.CHIPS.values():
            if row["target"] == "sm_{}{}".format(*chip.compute_capability):
                found.setdefault(chip.name, {})[key] = [row["registers"], row["spills"]]
    return found


SHAPES = {"full128": (False, 128), "causal128": (True, 128), "full64": (False, 64), "causal64": (True, 64)}
PEERS = {"FlashAttention-3": "FlashAttention-3", "cuDNN": "cuDNN", "triton_tutorial": "Triton tutorial"}


def climb_data() -> dict:
    """Return the data for each rung in the record.

    Each rung has its reason, its prediction, its speed, its counters next to those of the previous rung, and the change
    in its code.
    """
    record = load("ladder")
    rows = {shape: reasons.forward_row(record, causal, d) for shape, (causal, d) in SHAPES.items()}
    speeds = {shape: {name: row.rate(name) for name in row.values} for shape, row in rows.items()}
    counters = counters_of(record)
    timed = [name for name in ladder.RUNGS if all(name in speeds[shape] for shape in SHAPES)]
    rungs = []
    for before, name in zip([None, *timed], timed, strict=False):
        title, sentence = ladder.change(name)
        whole = diff_lines(before, name) if before else first_kernel(name)
        rungs.append(
            dict(n=name[1:3], file=f"{name}.py", name=title, says=sentence, rate=speeds_of_rung(speeds, name))
            | dict(
                waited=limit_sentence(counters.get(before)) if before else "", **explain_change(record, before, name)
            )
            | dict(counters=changed_counters(counters.get(before, {}), counters.get(name, {})))
            | dict(diff=diff_excerpt(whole), whole=whole, changes=JUMPS[name[1:3]][0] if name[1:3] in JUMPS else 0)
            | {words: sum(line[0] == mark for line in whole) for words, mark in (("plus", "+"), ("minus", "-"))}
        )
    peers = [dict(name=PEERS[p], rate=speeds_of_rung(speeds, p)) for p in PEERS if all(p in speeds[s] for s in SHAPES)]
    machine = record.machine
    versions = f"torch {machine['torch'].split('+')[0]}, Triton {machine['triton']}"
    made = f"{machine['gpu']}, bf16, forward, 16,384 tokens, N = {reasons.N:,}; {versions}"
    return dict(made=made, rungs=rungs, peers=peers)


def explain_change(record: Record, before: str | None, name: str) -> dict:
    """Return what limited the previous rung, what the change removes, why it should help, and what was predicted."""
    reason = reasons.reason(name)
    if before is None:
        return dict(cause="", limit="", removes="", why=reason.why, predicted={}, missed={}, compiled={})
    steps = {shape: reasons.rung_gain(record, before, name, causal, d) for shape, (causal, d) in SHAPES.items()}
    predicted = {shape: step.prediction for shape, step in steps.items() if step.predicted is not None}
    missed = {shape: reason.missed for shape, step in steps.items() if step.misses}
    words = {name: getattr(reason, name) for name in ("cause", "limit", "removes", "why")}
    compiled = {shape: compare_compiled(before, name, *of) for shape, of in SHAPES.items()}
    return words | dict(predicted=predicted, missed=missed, compiled=compiled)


def compare_compiled(before: str, name: str, causal: bool, d: int) -> str:
    """Return a sentence that compares two compiled rungs by programs per SM, registers and instructions per tile."""
    old, new = (reasons.compiled_rungs().get((rung, causal, d)) for rung in (before, name))
    if old is None or new is None:
        return ""
    words = dict(programs="programs per SM", registers="registers per thread", instructions="instructions per tile")
    return f"Compiled: {', '.join(f'{words[x]} {old[x]} → {new[x]}' for x in words)}."


def speeds_of_rung(speeds: dict, name: str) -> dict[str, float]:
    return {shape: round(values[name], 2) for shape, values in speeds.items()}


def counters_of(record: Record) -> dict[str, dict[str, float]]:
    """Return {rung: {counter: value}} for the measurements without a mask."""
    found = {}
    for name in ladder.RUNGS:
        values = reasons.hardware_counters(record, name)
        if "DRAM bytes read" in values:
            values["DRAM bytes"] = values["DRAM bytes read"] + values["DRAM bytes written"]
        found[name] = values
    return found


COUNTERS = {  # {name in the record: (name on the page, divisor, unit, decimals)}
    "DRAM bytes": ("HBM, read and written", 1e9, "GB", 1),
    "L2 bytes": ("through the L2 cache", 1e9, "GB", 1),
    "SM cycles": ("million clocks of an SM", 1e6, "", 2),
    reasons.TENSOR_BUSY: ("tensor cores at work", 1, "%", 0),
    "issue slots used, %": ("issue slots used", 1, "%", 0),
    "stall: long_scoreboard": ("wait for data", 1, "clocks", 1),
    "stall: barrier": ("wait at barriers", 1, "clocks", 1),
}


def changed_counters(before: dict[str, float], now: dict[str, float]) -> list[list]:
    """Return the two counters that changed most, followed by the share of time in which the tensor cores are busy.

    Each row is [name, value before, value now, unit, decimals].
    """
    always = reasons.TENSOR_BUSY

    def change(name: str) -> float:
        return abs(now[name] - before[name]) / max(abs(now[name]), abs(before[name]), 1e-9)

    both = sorted((name for name in COUNTERS if name in before and name in now and name != always), key=change)
    moved = [name for name in both[::-1][:2] if change(name) > 0.05]
    names = moved if before else [name for name in ("DRAM bytes", "stall: long_scoreboard") if name in now]
    rows = []
    for name in [*names, *([always] if always in now else [])]:
        words, unit, suffix, places = COUNTERS[name]
        old = round(before[name] / unit, places) if name in before else None
        rows.append([words, old, round(now[name] / unit, places), suffix, places])
    return rows


STALLS = {
    "long_scoreboard": "data from HBM or L2",
    "short_scoreboard": "shared memory and exponentials",
    "mio_throttle": "shared memory and exponentials",
    "math_pipe_throttle": "a busy arithmetic unit",
    "barrier": "other warps at a barrier",
    "gmma": "matmuls on the tensor cores",
    "wait": "the result of the instruction before",
    "membar": "its own stores",
    "sleeping": "nothing: they sleep",
}


def limit_sentence(values: dict[str, float] | None) -> str:
    """Return a sentence on a rung's limits: how busy its tensor cores were, and what its warps waited for most."""
    stalls = {name.removeprefix("stall: "): x for name, x in (values or {}).items() if name.startswith("stall: ")}
    if not stalls:
        return ""
    busy, worst = values[reasons.TENSOR_BUSY], max(stalls, key=stalls.get)
    waited = f"its warps waited most for {STALLS.get(worst, worst)}, {stalls[worst]:.1f} clocks per instruction"
    return f"The tensor cores worked {busy:.0f}% of the time; {waited}."


# A rung's change in code ----------------------------------------------------------------------------------------

MAX_DIFF_LINES = 14  # the most lines of a diff shown at the same time


def diff_lines(before: str, name: str) -> list[str]:
    """Return the lines that differ between two rungs, each preceded by +, − or a blank.

    "…" stands for longer stretches of equal lines. A line in which only the comment changed counts as equal.
    """
    shown = mark_changes(rung_diff.code(before), rung_diff.code(name), lambda line: line.split("  # ")[0].strip())
    lines = ["…" if line == "  …" else line[0] + line[2:] for line in shown]
    return lines[lines[0] == "…" :]


def first_kernel(name: str) -> list[str]:
    lines = rung_diff.code(name)
    start = next(k for k, line in enumerate(lines) if "tl.dot" in line)
    return [f"+{line}" for line in lines[start - 1 : start + MAX_DIFF_LINES - 1]]


def diff_excerpt(lines: list[str]) -> list[str]:
    """Return at most MAX_DIFF_LINES lines of a diff, beginning at the part with the most new code."""
    starts = [0, *(n + 1 for n, line in enumerate(lines) if line == "…")]
    best = max(starts, key=lambda n: sum(map(is_new_code, lines[n : n + MAX_DIFF_LINES])))
    shown = lines[best : best + MAX_DIFF_LINES]
    return shown[:-1] if shown[-1] == "…" else shown


def is_new_code(line: str) -> bool:
    """Return True if a line of a diff is new and is not an import, a comment or a decorator."""
    code = line[1:].strip()
    return line[0] == "+" and len(code) > 3 and not code.startswith(("#", '"""', "import", "from", "@"))
