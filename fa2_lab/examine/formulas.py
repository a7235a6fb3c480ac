"""Express arrays as sums of the known quantities listed in catalogue.md."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from fa2_lab.examine.catalogue import FACTORS

CLOSE = 1e-2  # largest difference that rounding may cause between logarithms of weights
ROUND = (1, 2, 3, 4, 1 / 2, 1 / 3, 1 / 4)  # simple factors, which are tried before the quantities in FACTORS
Equation = tuple[np.ndarray, dict[str, np.ndarray], Any]


def formula(parts: list[Equation], runs: Sequence[Any], closest: float = CLOSE) -> str:
    """Return a formula for y, as text, that holds in every equation, or "" if none is found.

    The formula is a sum of a few known quantities, each times a constant factor. An equation is (y, the known
    quantities, where to compare them).
    """
    flat, used = [], []
    for (y, known, at), run in zip(parts, runs, strict=True):
        at = at & np.isfinite(y)
        if at.any():
            flat.append((y[at], {name: np.broadcast_to(z, y.shape)[at] for name, z in known.items()}))
            used.append(run)
    if not flat:
        return ""
    names = [name for name in flat[0][1] if all(name in x and np.isfinite(x[name]).all() for _, x in flat)]
    of_tiles = [(x, "log l") for x in names if x.startswith("m of ") and x.endswith(" alone")]
    pairs = [x for x in names if " alone" not in x and " without " not in x]
    three = ((*names[:2], x) for x in pairs[2:])
    for some in [*((x,) for x in names), *combinations(pairs, 2), *three, *of_tiles]:
        factors = []
        for y, known in flat:
            A = np.stack([known[name] for name in some], axis=1)
            few, close = slice(None, None, 1 + len(y) // 50), closest * min(1.0, 2 * np.median(np.abs(y)))
            c = np.linalg.lstsq(A[few], y[few], rcond=1e-9)[0]
            if len(y) < 2 * len(c) or np.abs(A[few] @ c - y[few]).max() > close or np.abs(A @ c - y).max() > close:
                break
            factors.append(c)
        else:
            words = [number(c, used) for c in zip(*factors, strict=True)]
            if (some, words) == (("1",), ["1"]):
                return ""
            if all(words):
                return added([(a, name) for a, name in zip(words, some, strict=True) if a != "0"])
    return ""


def centred(y: np.ndarray, known: dict[str, np.ndarray], at: Any) -> Equation:
    """Subtract each row's mean from an equation, and drop the known quantities that are constant in every row."""

    def less_mean(x: np.ndarray) -> np.ndarray:
        x = np.where(at, np.broadcast_to(x, y.shape), np.nan)
        return x - np.nanmean(x, axis=3, keepdims=True)

    at = at & (at.sum(axis=3, keepdims=True) > 1)
    return (
        less_mean(y),
        {name: less_mean(x) for name, x in known.items() if x.shape[3] > 1 and np.ptp(x, axis=3).any()},
        at,
    )


def added(terms: list[tuple[str, str]]) -> str:
    """Format a sum of terms, each given as (factor, quantity), as text."""
    said = "" if terms else "0"
    for a, name in sorted(terms, key=lambda x: x[0].startswith("−")):
        sign, a = ("−", a[1:]) if a.startswith("−") else ("+", a)
        word = name if a == "1" else a if name == "1" else f"{a} · {name}" if " " not in name else f"{a} · ({name})"
        said += f" {sign} {word}"
    return said.removeprefix(" + ").replace(" −", "−", 1) if said.startswith(" −") else said.removeprefix(" + ")


def number(values: Sequence[float], runs: Sequence[Any]) -> str:
    """Return, as text, the number or known quantity that equals these factors (one per run), or "" if there is none."""
    c = np.array(values)
    close = 3e-3 * np.abs(c) + 1e-3
    if (np.abs(c) < 3e-3).all():
        return "0"
    sign = "−" * int(c[0] < 0)
    for x in ROUND:
        if (np.abs(np.abs(c) - x) < close).all() and len(set(np.sign(c))) == 1:
            return sign + (f"1/{round(1 / x)}" if x < 1 else str(x))
    for x, (name, code) in [*product((1,), FACTORS), *product((2, 1 / 2), FACTORS[:4])]:
        known = x * np.array([eval(code[1:-1], dict(np=np) | run.known) for run in runs])
        if (np.abs(np.abs(c) - known) < 3e-3 * np.abs(c)).all() and len(set(np.sign(c))) == 1:
            return sign + (name if x == 1 else f"{x} · {name}" if x > 1 else f"1/{round(1 / x)} · {name}")
    return f"{c[0]:.3g}".replace("-", "−") if np.ptp(c) < 2 * close.min() else ""


def values(numbers: Sequence[float]) -> str:
    """Return the first three different values as text."""
    return " or ".join(list(dict.fromkeys(f"{x:.3g}" for x in numbers))[:3])


def describe_rule(got: list[np.ndarray], right: list[np.ndarray], near: list[float]) -> str:
    """Return a sentence if a simple rule, such as a lost sign, gives each element from the correct one, else ""."""
    most = [np.abs(x).max() for x in got]
    ways = {
        f"cut off at ±{values(most)}": [np.clip(x, -c, c) for x, c in zip(right, most, strict=True)],
        "without its sign": [np.abs(x) for x in right],
        "0 where it should be negative": [np.maximum(x, 0) for x in right],
        "0 where it should be positive": [np.minimum(x, 0) for x in right],
    }
    fits = {way: all(np.abs(x - y).max() <= c for x, y, c in zip(got, z, near, strict=True)) for way, z in ways.items()}
    return next((f"{{name}} is {way}" for way in ways if fits[way]), "")
