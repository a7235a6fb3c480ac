"""Assignment 5, break it, find it: a student's tests meet right kernels and kernels with a known mistake."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np

from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import AttentionCase
from fa2_lab.examine.catalogue import CATALOGUE

from .report import Report
from .softmax import caught_minus_alarms


def as_it_is(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return arrays


def in_float32(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(np.float32(x).astype(np.float64) for x in arrays)


@dataclass(frozen=True)
class Bug:
    """A mistake of the examiner's catalogue, or a change of what goes in or comes out; or another way to be right."""

    mistake: str = ""
    told: str = ""  # what it is and where it was met, if the catalogue does not say so
    rows: int = 8
    keys: int = 4
    bits: int = 11
    inputs: Callable = as_it_is  # of q, k, v and dO
    outputs: Callable = as_it_is  # of O and L
    gradients: Callable = as_it_is  # of dq, dk and dv

    def __str__(self) -> str:
        if self.told:
            return self.told
        known = CATALOGUE[self.mistake]
        return f"{known.description.removesuffix('.').replace('{bits}', str(self.bits))} ({known.reference})"


def kernel(bug: Bug) -> SimpleNamespace:
    """The kernel with a bug, as an object that has forward and backward.

    q, O, dO (heads, N_q, d); k, v (key heads, N_k, d); L (heads, N_q). Query head h reads key head h // group.
    Causal: row r sees column c if c ≤ r + N_k − N_q. A row that sees no key has O = 0 and L = −∞.
    """
    bug = deepcopy(bug)  # what it remembers of calls is its own

    def passed(names: str, q, k, v, dO, causal, scale) -> tuple[np.ndarray, ...]:
        given = [np.asarray(x, dtype=np.float64)[None] for x in bug.inputs(q, k, v, dO)]
        options = dict(causal=bool(causal)) | ({} if scale is None else dict(scale=scale))
        knobs = [bug.mistake] if bug.mistake else []
        asked = AttentionCase("", *given, options, tile=(bug.rows, bug.keys))
        found = attention(asked, knobs, bits=bug.bits, gradients="dQ" in names)
        return tuple(found[name][0] for name in names.split())

    def forward(q, k, v, causal=False, scale=None):
        """O and L."""
        return bug.outputs(*passed("O L", q, k, v, np.zeros(np.shape(q)), causal, scale))

    def backward(q, k, v, O, L, dO, causal=False, scale=None):
        """dq, dk and dv."""
        return bug.gradients(*passed("dQ dK dV", q, k, v, dO, causal, scale))

    return SimpleNamespace(forward=forward, backward=backward)


# Right, each in its own way: refusing one is a false alarm.
RIGHT = [
    Bug(told="the kernel"),
    Bug(told="the kernel with other tiles", rows=5, keys=7),
    Bug(told="the kernel with one key at a time", rows=16, keys=1),
    Bug("p-rounded", told="the kernel with weights rounded to float32", bits=24),
    Bug(told="the kernel with results rounded to float32", outputs=in_float32, gradients=in_float32),
]
FORWARD = [Bug("l-not-rescaled"), Bug("scale-ignored"), Bug("corner-top-left")]
BACKWARD = [Bug("dK-unscaled"), Bug("gradient-unmasked"), Bug("D-missing")]
HINT = "Which input would reveal this bug? Vary the lengths, masks, scales and heads, and try extreme scores."


def check_step(step: str, bugs: list[Bug], test, more: list[Bug] | tuple = ()) -> Report:
    """A student's test of a pass: bugs caught minus false alarms; `more` bugs come on top."""
    right, wrong = ({str(bug): bug for bug in some} for some in (RIGHT, [*bugs, *more]))
    return caught_minus_alarms(Report(step), test, wrong, right, HINT, kernel)


forward, backward = (partial(check_step, *x) for x in (("forward", FORWARD), ("backward", BACKWARD)))
