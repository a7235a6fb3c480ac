"""Find out how to call a function: on which device, with which library, dtype, sizes, layout and kind of window."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import product

import numpy as np

from fa2_lab.examine.cases import case
from fa2_lab.examine.catalogue import CATALOGUE
from fa2_lab.examine.match import GRADIENTS, RIGHT, Variant, candidates
from fa2_lab.examine.subject import LAYOUTS, LIBRARIES, WHOLE, NotExamined, Subject, dtypes

SIZES = ((1, 16), (16, 16), (64, 16), (64, 64), (128, 64), (128, 128))  # (divisor of all lengths, head dimension)


def detect_call(subject: Subject, layout: str = "", library: str = "", dtype: str = "") -> None:
    """Choose the device, library, dtype, sizes and layout to call the function with.

    Prefer a combination that gives correct results. If there is none, choose one that at least runs. A layout, library
    or dtype that is passed as an argument is not changed. Raise NotExamined if no combination runs.
    """
    layouts = ["flat"] if subject.takes("heads") else ["bhnd", "bnhd", "hnd", "nd"]
    layouts += ["bhd"] * subject.takes("key_lengths")
    layouts = [layout] if layout else ["thd"] if subject.takes("cu_seqlens") else layouts
    named = [library] if library else ["torch"] if subject.device else libraries(subject)
    kinds = [(x, y) for x in named for y in dtypes(x) if dtype in ("", y)]
    failure = ""
    devices = [subject.device] if subject.device else ["cpu", "cuda"]
    for subject.device, (subject.multiple, subject.d) in product(devices, SIZES):
        if subject.device != devices[0] and not ("torch" in LIBRARIES and import_module("torch").cuda.is_available()):
            break
        tried: list[tuple] = []
        for subject.library, subject.dtype in kinds:
            if any((x[0] == 4 and x[-1] in WHOLE) or x[1] == subject.library for x in tried):
                continue  # the first dtype that works is enough for each library
            for subject.layout in layouts:
                try:
                    tried.append((agreement(subject), subject.library, subject.dtype, subject.layout))
                except NotExamined as refusal:
                    failure = failure or f"as {subject.library} {subject.dtype} {LAYOUTS[subject.layout]}, {refusal}"
                    continue
                if tried[-1][0] == 4 and subject.layout in WHOLE:
                    break
        if tried:  # layouts with four dimensions take precedence
            whole = [x for x in tried if x[-1] in WHOLE] or tried
            best, subject.library, subject.dtype, subject.layout = max(whole, key=lambda x: x[0])
            subject.also = next((x[-1] for x in tried if x not in whole and x[0] == 4 > best), "")
            detect_scale(subject, is_right=best == 4)
            detect_padding(subject)
            return detect_window(subject)
    raise NotExamined(failure or f"{dtype} is no dtype that it can be called with")


def detect_scale(subject: Subject, is_right: bool) -> None:
    """Decide whether an argument called tau really is the softmax scale, and ignore it if not.

    It is not the scale if the output is correct although the argument's default is not 1/√d.
    """
    for name in [name for name in subject.roles if name.lower() == "tau"]:  # tau may also be a threshold
        if is_right and type(subject.defaults[name]) in (int, float) and subject.defaults[name] != subject.d**-0.5:
            del subject.roles[name]
            subject.unused.append(name)


def detect_padding(subject: Subject) -> None:
    """Find out whether True in a padding mask marks a padded key or a key that takes part.

    If the function rejects a mask (batch, heads, N_q, N_k), the mask is a padding mask, provided that the output is
    then correct.
    """
    n = 16 * subject.multiple
    masks = [name for name, role in subject.roles.items() if role == "mask" and not subject.takes("padding")]
    with suppress(NotExamined):
        subject.ask(case("mask", n, d=subject.d, batch=2, mask=np.ones((2, 2, n, n), dtype=bool)))
        masks = []
    subject.roles |= dict.fromkeys(masks, "padding")
    problem = case("lengths", n, d=subject.d, batch=2, key_lengths=np.array([n // 2, n]))
    states = [RIGHT, *(Variant((name,)) for name, x in CATALOGUE.items() if name.startswith("lengths-") and x.edits)]
    for variant, keeps in product(states if subject.takes("padding") else (), (False, True)):
        subject.padding_keeps = keeps
        with suppress(NotExamined):
            if subject.ask(problem).fits(variant, ("O",)):
                return
    subject.roles |= dict.fromkeys(masks, "mask")
    subject.padding_keeps = False


def detect_window(subject: Subject) -> None:
    """Find out whether the function expects a window as one number or as two numbers."""
    if not any(role == "window" and isinstance(subject.defaults[name], tuple) for name, role in subject.roles.items()):
        for subject.window_is_int in (False, True):
            with suppress(NotExamined):  # use lengths that no other case has, because a function may cache masks
                subject.ask(case("window", (5 + subject.window_is_int) * subject.multiple, d=subject.d, window=(4, 4)))
                return


def libraries(subject: Subject) -> list[str]:
    """Return the array libraries to try, beginning with those that the function's own code uses."""
    used = [subject.space.get(x) for x in (subject.code.co_names if subject.code else ())]
    roots = [x.__name__.split(".")[0] for x in [*used, *subject.space.values()] if inspect.ismodule(x)]
    return list(dict.fromkeys([x for x in roots if x in LIBRARIES] + LIBRARIES))


def agreement(subject: Subject) -> int:
    """Call the function on a random case, and grade the output from 1 to 4.

    4 means that the output is right, or right for a causal mask. 3 means that a known mistake explains the output.
    2 means that heads are independent. 1 means only that the function runs.
    """
    n = 9 if subject.multiple == 1 else subject.multiple
    problem = subject.fitted(case("probe", n, d=subject.d, batch=2, heads=3, gradients=subject.takes("dO")))
    first, part = subject.ask(problem), "gradients" if subject.takes("dO") else "O"
    if any(first.fits(s, ("O", *GRADIENTS)) for s in (RIGHT, Variant(("always-causal",)))):
        return 4
    if any(first.fits(s, ("O", *GRADIENTS)) for s in candidates(RIGHT, part, (n,))):
        return 3
    other = problem.v.copy()
    other[0, 0] += 1
    moved = np.abs(subject.ask(replace(problem, v=other)).outputs["O"] - first.outputs["O"]).max(axis=(2, 3)) > 1e-6
    return 2 if moved.sum() == 1 else 1
