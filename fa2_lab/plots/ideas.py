"""What each idea for the Hopper kernels was worth: bars around 1 of those that change most."""

from fa2_lab.plots import style
from fa2_lab.records import load


def worths() -> list[dict]:
    """Every idea on every problem it was measured on: speed with it over speed without it, in the same run."""
    rows = [row for row in load("ideas").rows if {"with it", "without it"} <= row.values.keys()]
    return [row.problem | dict(worth=row.values["without it"][0] / row.values["with it"][0]) for row in rows]


def data(part: str = "forward", most: int = 10) -> dict:
    """The ideas of one part that change most, the best first: from where to where their worth reaches.

    An idea that is in use on some problems and not on others counts twice.
    """
    groups: dict[tuple, list] = {}
    for row in worths():
        if row["part"] == part:
            groups.setdefault((row["idea"], row["kept"]), []).append(row)
    rows = []
    for (idea, kept), group in groups.items():
        reach = [row["worth"] for row in group]
        rows.append(dict(idea=idea, kept=kept, shape=shapes(group), low=min(reach), high=max(reach)))
    rows = sorted(rows, key=lambda row: max(row["high"], 1 / row["low"]), reverse=True)[:most]
    return dict(part=part, rows=sorted(rows, key=worth, reverse=True), setting=load("ideas").made())


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


TICKS = (0.5, 0.7, 1, 1.5, 2, 3)


@style.picture
def draw(part: str, rows: list[dict], setting: str) -> style.Drawn:
    """The ideas for one part. rows: idea, shape, low and high (speed with it over speed without), kept."""
    caption = (
        f"The {len(rows)} ideas that change most in the {part}: speed with it over speed without; open bars are not"
    )
    figure, ax = style.new_figure(0.4 + 0.44 * len(rows), f"{caption} kept. {setting}.")
    low, high = min(r["low"] for r in rows), max(r["high"] for r in rows)
    for lane, row in enumerate(rows):
        fill = style.OURS if row["kept"] else style.PAPER
        width = max(row["high"] / row["low"], 1.008) * row["low"] - row["low"]
        style.box(ax, row["low"], lane - 0.4, width, 0.32, "", fill)
        style.note(ax, row["low"], lane + 0.2, span(row), bbox=style.CLEAR)
    ax.axvline(1, color=style.QUIET, linewidth=0.8, zorder=0)
    ax.set(xscale="log")
    style.bare(ax, (0.95 * low, 1.25 * high), (-0.6, len(rows) - 0.4))
    ax.set_yticks(range(len(rows)), [f"{row['idea']}\n{row['shape']}" for row in rows])
    ticks = [tick for tick in TICKS if 0.95 * low <= tick <= 1.25 * high]
    style.log_ticks(ax.xaxis, ticks, [f"× {tick:g}" for tick in ticks])
    kept, dropped = ([r for r in rows if r["kept"] == is_kept] for is_kept in (True, False))
    best = max(rows, key=lambda r: r["high"])
    alt = (
        f"{len(rows)} ideas for the {part}, a bar each from the lowest to the highest factor. {len(kept)} were kept,"
        f" {len(dropped)} were not and are open. The largest gain: {best['idea']}, {span(best)}. Not kept:"
        f" {'; '.join(row['idea'] + ' ' + span(row) for row in dropped)}."
    )
    return figure, alt


def span(row: dict) -> str:
    """From where to where, as a text."""
    low, high = f"{row['low']:.2f}", f"{row['high']:.2f}"
    return f"× {low}" if low == high else f"× {low} to {high}"
