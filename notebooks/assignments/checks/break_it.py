"""Assignment 5, break it, find it: a student's tests meet right kernels and kernels with a planted bug."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from . import patient
from .report import Report
from .softmax import caught_minus_alarms

PATIENT = Path(patient.__file__)


@dataclass(frozen=True)
class Change:
    """A change of the kernel's text: a planted bug, or another way to be right."""

    name: str
    right: str
    wrong: str
    told: str = ""  # where such a bug was met


def kernel(*changes: Change) -> SimpleNamespace:
    """The kernel with some changes, as an object that has forward and backward."""
    text = PATIENT.read_text(encoding="utf-8")
    for change in changes:
        if text.count(change.right) < 1:
            raise LookupError(f"{change.name}: the kernel has no {change.right!r} any more")
        text = text.replace(change.right, change.wrong)
    space = {"__name__": "kernel"}
    exec(compile(text, "<kernel>", "exec"), space)
    return SimpleNamespace(forward=space["forward"], backward=space["backward"])


# Right, each in its own way: refusing one is a false alarm.
RIGHT = [
    Change("the kernel with other tiles", "B_R, B_C = 8, 4", "B_R, B_C = 5, 7"),
    Change("the kernel, column blocks from right to left", "range(0, end, B_C)", "range(0, end, B_C)[::-1]"),
    Change("the kernel, sums of values rounded to float32", "p @ v_j\n", "np.float32(p @ v_j)\n"),
    Change("the kernel, dS rounded to float32", "ds = p * (dO[h, rows]", "ds = np.float32(p) * (dO[h, rows]"),
]
FORWARD = [
    Change("l is not rescaled", "l = alpha * l + p", "l = l + p", "chapter 02, break and fix"),
    Change("a given scale is ignored", "if scale is None else scale", "", "tutorials, 'what is sm_scale?'"),
    Change("the causal corner is top left", "row[:, None] + N_k - N_q", "row[:, None]", "FlashAttention before 2.1"),
]
BACKWARD = [
    Change("dK lacks the scale", "tau * (ds.T @ q[h, rows])", "(ds.T @ q[h, rows])", "erratum fa2-scale"),
    Change("the backward ignores causal", "visible = seen(row, j, q.shape[1], k.shape[1], causal)",
           "visible = seen(row, j, q.shape[1], k.shape[1], False)", "Triton issues 4541 and 5660"),
    Change("D is left out", " - D[h, rows][:, None]", "", "softmax's own gradient"),
]  # fmt: skip
HINT = "What kind of input would show it? Lengths, masks, scales, heads, extreme scores: try one of each."


def forward(test, more: list[Change] | tuple = ()) -> Report:
    """A student's test of the forward; `more` bugs come on top."""
    return judge("forward", test, [*FORWARD, *more])


def backward(test, more: list[Change] | tuple = ()) -> Report:
    """A student's test of the backward; `more` bugs come on top."""
    return judge("backward", test, [*BACKWARD, *more])


def judge(step: str, test, bugs: list[Change]) -> Report:
    """Bugs caught minus false alarms."""
    right = {"the unchanged kernel": ()} | {change.name: (change,) for change in RIGHT}
    wrong = {f"{bug.name}{f' ({bug.told})' if bug.told else ''}": (bug,) for bug in bugs}
    return caught_minus_alarms(Report(step), test, wrong, right, HINT, lambda changes: kernel(*changes))
