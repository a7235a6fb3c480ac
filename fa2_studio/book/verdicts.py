"""In the last section of each notebook, print a line for each claim that holds, and stop at one that does not."""

import ast
from inspect import getsource

import numpy as np


def close(got, want, tolerance: float = 1e-12) -> bool:
    """Return True if two results agree.

    They agree if the norm of the difference of their finite values is at most `tolerance` times the norm of `want`, and
    if their infinities are equal. NaN agrees with nothing.
    """
    got, want = np.asarray(got, dtype=np.float64), np.asarray(want, dtype=np.float64)
    finite = np.isfinite(want)
    if got.shape != want.shape or not np.isfinite(got[finite]).all() or (got != want)[~finite].any():
        return False
    got, want = got[finite], want[finite]
    return bool(np.linalg.norm(got - want) <= tolerance * (np.linalg.norm(want) or 1.0))


def verdict(claim: str, holds: bool) -> None:
    """Print the claim if it holds. Otherwise raise AssertionError, which stops the notebook."""
    if not holds:
        raise AssertionError(f"does not hold: {claim}")
    print(f"ok  {claim}")


def same_code(function, original) -> bool:
    """Return True if two kernels have the same statements. Docstrings, comments and whitespace are ignored."""

    def statements(kernel) -> list[str]:
        body = ast.parse(getsource(kernel.fn)).body[0].body
        docstrings = [x for x in body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
        return [ast.unparse(x) for x in body if x not in docstrings]

    return statements(function) == statements(original)
