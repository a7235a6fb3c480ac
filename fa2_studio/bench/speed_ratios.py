"""Compare the speeds in recorded rows: which implementation is faster, on how many problems, and by how much."""

from collections.abc import Iterable
from statistics import median

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import implementations

TIME_UNITS = ("ms", "µs", "µs per token")


def peers_in_rows(rows: Iterable[Measurement]) -> list[str]:
    """Return the names of the other implementations for which any of the rows has a number."""
    return implementations.peers_among({name for row in rows for name in row.values})


def speed_ratios(rows: Iterable[Measurement], us: str, peer: str) -> list[float]:
    """Return the ratio of our speed to another implementation's for each row in which both were timed."""
    return [row.ratio(us, peer) for row in rows if row.unit in TIME_UNITS and {us, peer} <= row.values.keys()]


def rows_where_faster(rows: Iterable[Measurement], peer: str) -> list[tuple[float, Measurement]]:
    """Return the rows in which another implementation is faster than fa2_lab, beginning with the lowest ratio."""
    both = [(ratio, row) for row in rows for ratio in speed_ratios([row], "fa2_lab", peer)]
    return sorted((pair for pair in both if pair[0] < 1), key=lambda pair: pair[0])


def wins_and_speedup(run: Record, peer: str) -> tuple[str, str]:
    """Return two texts: the number of problems on which `fa2_lab` is faster than `peer`, and its median speedup."""
    gains = speed_ratios(run.rows, "fa2_lab", peer)
    return wins_and_median(gains) if gains else ("–", "–")


def wins_and_median(gains: list[float]) -> tuple[str, str]:
    """Return two texts: the number of these speed ratios that exceed 1, and their median."""
    return f"{sum(x > 1 for x in gains)} of {len(gains)}", f"{median(gains):.2f}×"


def format_ratio(ratio: float) -> str:
    """Format a ratio with two decimals, or with three if it would otherwise round to 1.00."""
    return f"{ratio:.3f}" if f"{ratio:.2f}" == "1.00" else f"{ratio:.2f}"


def format_median(found: list[float], places: int = 2) -> str:
    return f"{median(found):.{places}f}" if found else "–"
