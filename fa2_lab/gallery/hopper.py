"""Pictures of the Hopper kernels: from the model that runs anywhere, and of what was measured on the way."""

from __future__ import annotations

import numpy as np

from fa2_lab.gallery.machine import recorded
from fa2_lab.gallery.measured import made, measured
from fa2_lab.gallery.picture import Picture
from fa2_lab.machine import chips, grid, hopper, hopper_backward
from fa2_lab.machine.asynchrony import IN_ORDER, SHARED, Barrier
from fa2_lab.plots.ideas import ideas
from fa2_lab.plots.pipes import backward_pipes, pipes
from fa2_lab.plots.tickets import tickets
from fa2_lab.plots.timeline import timeline
from fa2_lab.reference import naive
from fa2_lab.tiles import CAUSAL, Tiling


def small(consumers: int, T: int, **options) -> hopper.Run:
    """The model on `T` tiles of 4 keys, 4 rows to a consumer; only the clocks are those of a real tile."""
    N_q, N_k = 4 * consumers, 4 * T
    rng = np.random.default_rng(0)
    Q, (K, V) = rng.standard_normal((N_q, 4)), rng.standard_normal((2, N_k, 4))
    return hopper.forward(Q, K, V, Tiling(N_q, N_k, 4, 4), consumers, **options)


# Who waits for whom -------------------------------------------------------------------------------------------


def pipes_data(consumers: int = 2, slots: int = 2) -> dict:
    """Every barrier of a run: who waits there, who arrives, and how many arrivals end a phase."""
    run = small(consumers, 8, slots=slots, turns=True)
    p = run.pipes
    alone = [*p.tickets.filled, *p.tickets.emptied, *p.turns.begun]
    return dict(slots={"ticket": 2, "Q": p.q.slots, "K": slots, "V": slots}, barriers=met(run, alone, (p.q, p.k, p.v)))


def backward_pipes_data() -> dict:
    """The same for the backward: four row blocks, four column blocks of 8 keys."""
    rng = np.random.default_rng(0)
    Q, dO, K, V = *rng.standard_normal((2, 16, 4)), *rng.standard_normal((2, 32, 4))
    O, L = naive.forward_linear_memory(Q, K, V)
    run = hopper_backward.backward(Q, K, V, O, L, dO, Tiling(16, 32, 4, 8))
    p = run.pipes
    barriers = met(run, [*p.orders.filled, *p.orders.emptied, p.ds.filled], (p.k, p.v, p.rows))
    slots = {"order": 2, "K": p.k.slots, "V": p.v.slots, "rows": p.rows.slots}
    return dict(slots=slots, barriers=barriers, places=len(p.ds.places))


def met(run, alone: list[Barrier], rings: tuple[hopper.Ring, ...]) -> dict[str, dict]:
    """Of every barrier, by its name: who waited there, who arrived, and how many arrivals end a phase."""
    all_barriers = alone + [bar for ring in rings for bar in (*ring.filled, *ring.emptied)]
    barriers = {bar.what: dict(waits=set(), arrives=set(), expected=bar.expected) for bar in all_barriers}
    for bar in all_barriers:
        barriers[bar.what]["arrives"] |= set(bar.came) - {"the start"}
    for waited in run.block.waits:
        if waited.what in barriers:
            barriers[waited.what]["waits"].add(waited.actor)
    return {
        what: dict(waits=sorted(bar["waits"]), arrives=sorted(bar["arrives"]), expected=bar["expected"])
        for what, bar in barriers.items()
    }


# Time ---------------------------------------------------------------------------------------------------------

FOUR_WAYS = {
    "Neither": (hopper.in_sequence, SHARED),
    "Within: P V of the tile before runs under the exponentials": (hopper.look_ahead, SHARED),
    "Between: one warpgroup multiplies while the other exponentiates": (hopper.in_sequence, IN_ORDER),
    "Both": (hopper.look_ahead, IN_ORDER),
}


def timeline_data(d: int = 64, T: int = 16, window: float = 5400) -> dict:
    """Two warpgroups on T tiles of 64 × 128 each, with and without the two overlaps."""
    price = hopper.costs(chips.H200, 64, 128, d)
    panels = []
    for name, (visit, tensor) in FOUR_WAYS.items():
        block = small(2, T, visit=visit, tensor=tensor, costs=price).block
        jobs = [(j.unit, owner(j), j.label, j.begun, j.ended) for j in block.jobs if j.label[0] != "Q"]
        panels.append(dict(name=name, share=block.busy("tensor", since=price.copy), jobs=sorted(jobs, key=str)))
    return dict(window=window, panels=panels, setting=f"schematic: H200, d = {d}, two tiles of 64 × 128 at a time")


def owner(job) -> int | None:
    """The number of the consumer whose job it is; copies are nobody's."""
    return int(job.actor.split()[1]) if job.actor.startswith("consumer") else None


# Tickets ------------------------------------------------------------------------------------------------------


def tickets_data(N: int = 16384, d: int = 128, heads: int = 16, at_once: int = 4, B_r: int = 128) -> dict:
    """Causal row blocks on 132 SMs: dealt in two orders, and drawn in the second. `at_once` heads run side by side."""
    tiles = grid.worker_tiles(Tiling(N, N, B_r, 128, CAUSAL), "forward")[::-1].tolist()  # of one head, heavy first
    head_by_head = tiles * heads
    side_by_side = [n for n in tiles for _ in range(at_once)] * (heads // at_once)
    blocks = [grid.Block(0, n, cost) for n, cost in enumerate(side_by_side)]
    SMs = chips.H200.SMs
    ran = {
        "Dealt, head by head": hopper.dealt(head_by_head, SMs),
        f"Dealt, {at_once} heads at once": hopper.dealt(side_by_side, SMs),
        "Drawn as tickets": grid.schedule(blocks, SMs),
    }
    return dict(ran=ran, setting=f"{heads} heads, N = {N:,}, d = {d}, causal, {SMs} SMs, row blocks of {B_r}")


# Ideas --------------------------------------------------------------------------------------------------------


def worths() -> list[dict]:
    """Every idea on every problem it was measured on: speed with it over speed without it, in the same run."""
    rows = [row for row in measured("ideas")["rows"] if {"with it", "without it"} <= row["values"].keys()]
    return [row["problem"] | dict(worth=row["values"]["without it"][0] / row["values"]["with it"][0]) for row in rows]


def ideas_data(part: str, most: int = 10) -> dict:
    """The ideas of one part that change most, the best first: from where to where their worth reaches.

    An idea that is in use on some problems and not on others counts twice. ideas_table() has all of them.
    """
    groups = {}
    for row in worths():
        if row["part"] == part:
            groups.setdefault((row["idea"], row["kept"]), []).append(row)
    rows = []
    for (idea, kept), group in groups.items():
        reach = [row["worth"] for row in group]
        rows.append(dict(idea=idea, kept=kept, shape=shapes(group), low=min(reach), high=max(reach)))
    rows = sorted(rows, key=lambda row: max(row["high"], 1 / row["low"]), reverse=True)[:most]
    return dict(part=part, rows=sorted(rows, key=worth, reverse=True), setting=made(measured("ideas")))


def worth(row: dict) -> float:
    """The end of an idea's reach that lies further from 1."""
    return max(row["low"], row["high"], key=lambda x: max(x, 1 / x))


def shapes(problems: list[dict]) -> str:
    """What problems have in common and where they differ: "d 64 and 128, causal, N 1,024 to 16,384"."""

    def all_of(key: str, join: str) -> str:
        return join.join(f"{x:,}" for x in sorted({p[key] for p in problems}))

    masks = " or ".join("causal" if causal else "full" for causal in sorted({p["causal"] for p in problems}))
    grouped = all(p["heads"] != p["kv_heads"] for p in problems)
    heads = f", {all_of('heads', ' or ')} heads on {all_of('kv_heads', ' or ')}" if grouped else ""
    return f"d {all_of('d', ' and ')}, {masks}, N {all_of('N_q', ', ')}{heads}"


KINDS = [f"d {d} {'causal' if causal else 'full'}" for d in (64, 128) for causal in (False, True)]


def ideas_table(*parts: str) -> str:
    """In Markdown: each idea, and what it is worth at which N; in italics where the kernels of today do without it."""
    rows = [row for row in worths() if row["part"] in parts]
    caches = sorted({(row["d"], row["batch"], row["N_k"], kind(row)) for row in rows if row["part"] == "decode"})
    kinds = [name for *_, name in caches] or KINDS
    lines = ["| idea | " + " | ".join(kinds) + " |", "| --- " * (1 + len(kinds)) + "|"]
    for idea in dict.fromkeys(row["idea"] for row in rows):
        group = [row for row in rows if row["idea"] == idea]
        cells = [[row for row in group if kind(row) == name] for name in kinds]
        lines.append(f"| {idea} | " + " | ".join("<br>".join(map(entry, cell)) for cell in cells) + " |")
    return "\n".join(lines)


def kind(row: dict) -> str:
    """The column of a row: the head dimension and the mask, or for decode the cache."""
    if row["part"] == "decode":
        return f"{row['batch']} × {row['N_k']:,} keys, d {row['d']}"
    return f"d {row['d']} {'causal' if row['causal'] else 'full'}"


def entry(row: dict) -> str:
    """One number of the table; but for decode with its N, and its heads where they are grouped."""
    heads = f", {row['heads']} heads on {row['kv_heads']}" if row["heads"] != row["kv_heads"] else ""
    where = "" if row["part"] == "decode" else f"{row['N_q']:,}{heads}:\N{NO-BREAK SPACE}"
    text = f"{where}{row['worth']:.2f}"
    return text if row["kept"] else f"*{text}*"


def earlier_table(part: str) -> str:
    """In Markdown: what was tried on earlier versions of the kernels, which no command repeats."""
    columns = ("idea", "shape", "bought")
    rows = [row for row in recorded("earlier_ideas")["rows"] if row["part"] == part]
    lines = ["| idea | where | what it bought |", "| --- " * len(columns) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row[name] for name in columns) + " |" for row in rows])


def folded(summary: str, text: str) -> str:
    """Markdown that opens when it is asked for."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


def forward_ideas_data() -> dict:
    return ideas_data("forward")


def backward_ideas_data() -> dict:
    return ideas_data("backward")


PICTURES = [
    Picture(
        "pipes",
        "Who waits for whom in the Hopper forward: a producer warp, rings of buffers, consumer warpgroups, turns.",
        "12_hopper_forward",
        pipes,
        pipes_data,
    ),
    Picture(
        "timeline",
        "Copies, tensor cores and exponentials over time: what overlaps within a warpgroup and between two.",
        "12_hopper_forward",
        timeline,
        timeline_data,
    ),
    Picture(
        "tickets",
        "Causal row blocks dealt to SMs in advance leave some of them idle; drawn as tickets they do not.",
        "12_hopper_forward",
        tickets,
        tickets_data,
    ),
    Picture(
        "forward_ideas",
        "The ideas that change most in the Hopper forward on an H200, what did not help included.",
        "12_hopper_forward",
        ideas,
        forward_ideas_data,
    ),
    Picture(
        "backward_pipes",
        "Who waits for whom in the Hopper backward: two consumers meet at dS, and the copy engine adds dQ.",
        "13_hopper_backward",
        backward_pipes,
        backward_pipes_data,
    ),
    Picture(
        "backward_ideas",
        "The ideas that change most in the Hopper backward on an H200, what did not help included.",
        "13_hopper_backward",
        ideas,
        backward_ideas_data,
    ),
]
