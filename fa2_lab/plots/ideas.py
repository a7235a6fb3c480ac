"""What each idea for the Hopper kernels was worth, in an earlier version of them."""

from fa2_lab.records import load


def worths() -> list[dict]:
    """Every idea on every problem it was measured on: speed with it over speed without it, in the same run."""
    rows = [row for row in load("ideas").rows if {"with it", "without it"} <= row.values.keys()]
    return [row.problem | dict(worth=row.values["without it"][0] / row.values["with it"][0]) for row in rows]
