"""A few cases out of a product of many, chosen in the same way every time."""

from itertools import product

import pytest
from kernel_truth import GPU


def once(*lists) -> list[tuple]:
    """As many rows as the longest list has values: each value of each list stands in one of them at least."""
    rows = range(max(map(len, lists)))  # a short list begins again one later, the next one two later: they do not march
    return [tuple(x[(row + n * (row // len(x))) % len(x)] for n, x in enumerate(lists)) for row in rows]


def dealt(values, rows: list[tuple]) -> list[tuple]:
    """All values, dealt to the rows in turn: (value, *row)."""
    return [(value, *rows[n % len(rows)]) for n, value in enumerate(values)]


def shared_out(*lists) -> list:
    """The whole product as parameters of a test, of which only those of `once` belong to the default run."""
    usual = once(*lists)
    rest = [pytest.param(*row, marks=pytest.mark.exhaustive) for row in product(*lists) if row not in usual]
    return [*usual, *rest]


def many_kernels(test):
    """Exhaustive where a GPU compiles a kernel for every case; the interpreter compiles none, and takes them all."""
    return pytest.mark.exhaustive(test) if GPU else test


def compiled_by(kind: str, *targets: str):
    """Has a test look at what the worker compiles of a kind: a few jobs in every run, all of them if asked for."""
    few, every = (pytest.mark.beside("compile_worker.py", kind, jobs, *targets) for jobs in ("few", "all"))
    every = pytest.param("all", marks=[every, pytest.mark.exhaustive, pytest.mark.xdist_group(kind)])
    return pytest.mark.parametrize("jobs", [pytest.param("few", marks=few), every])
