"""Choose a few cases from a product of many, in the same way every time."""

from itertools import product

import pytest
from kernel_truth import GPU


def covering_rows(*lists) -> list[tuple]:
    """Return as many rows as the longest list has values, such that each value of each list is in at least one row."""
    rows = range(max(map(len, lists)))  # each time list n starts again, it is shifted by n more, so pairs vary
    return [tuple(x[(row + n * (row // len(x))) % len(x)] for n, x in enumerate(lists)) for row in rows]


def assign_rows(values, rows: list[tuple]) -> list[tuple]:
    """Return (value, *row) for all values, where rows are used in turn."""
    return [(value, *rows[n % len(rows)]) for n, value in enumerate(values)]


def covering_or_exhaustive(*lists) -> list:
    """Return the product as parameters of a test. Only the rows of `covering_rows` are part of the default run."""
    usual = covering_rows(*lists)
    rest = [pytest.param(*row, marks=pytest.mark.exhaustive) for row in product(*lists) if row not in usual]
    return [*usual, *rest]


def exhaustive_on_gpu(test):
    """Mark a test as exhaustive if a GPU has to compile a kernel for each case. The interpreter compiles none."""
    return pytest.mark.exhaustive(test) if GPU else test


def compiled_by(kind: str, *targets: str):
    """Return a decorator that gives a test the rows of compile_worker.py: of few jobs, or of all if exhaustive."""
    few, every = (pytest.mark.beside("compile_worker.py", kind, jobs, *targets) for jobs in ("few", "all"))
    every = pytest.param("all", marks=[every, pytest.mark.exhaustive, pytest.mark.xdist_group(kind)])
    return pytest.mark.parametrize("jobs", [pytest.param("few", marks=few), every])
