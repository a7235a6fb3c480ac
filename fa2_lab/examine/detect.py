"""Find out how to call a function: the device, library, dtype, sizes and layout, and the forms of its arguments."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import NamedTuple

import numpy as np

from fa2_lab.examine.arguments import LENGTHS, NotExamined
from fa2_lab.examine.cases import AttentionCase, case
from fa2_lab.examine.catalogue import CATALOGUE
from fa2_lab.examine.layouts import LAYOUTS, WHOLE, axes
from fa2_lab.examine.match import GRADIENTS, RIGHT, Variant, candidates
from fa2_lab.examine.subject import LIBRARIES, Subject, dtypes

SIZES = ((1, 16), (16, 16), (64, 16), (64, 64), (128, 64), (128, 128))  # (divisor of all lengths, head dimension)
RIGHT_OUTPUT = 4  # the best grade of agreement()


class Call(NamedTuple):
    """A way to call a function, and the grade that agreement() gives to the output."""

    grade: int
    library: str
    dtype: str
    layout: str
    layout_of_O: str
    lengths_are_int: bool

    @property
    def is_right(self) -> bool:
        return self.grade == RIGHT_OUTPUT


def detect_call(subject: Subject, layout: str = "", library: str = "", dtype: str = "") -> None:
    """Choose the device, library, dtype, sizes and layout to call the function with, and the forms of its arguments.

    Prefer a combination that gives correct results. If there is none, choose one that at least runs. A layout, library
    or dtype that is passed as an argument is not changed. Raise NotExamined if no combination runs.
    """
    layouts = [layout] if layout else possible_layouts(subject)
    named = [library] if library else ["torch"] if subject.device else libraries(subject)
    kinds = [(x, y) for x in named for y in dtypes(x) if dtype in ("", y)]
    failure, takes_lengths = "", any(map(subject.takes, LENGTHS))
    devices = [subject.device] if subject.device else ["cpu", "cuda"]
    for subject.device, (subject.multiple, subject.d) in product(devices, SIZES):
        if subject.device != devices[0] and not ("torch" in LIBRARIES and import_module("torch").cuda.is_available()):
            break
        calls: list[Call] = []
        for subject.library, subject.dtype in kinds:
            if any((x.is_right and x.layout in WHOLE) or x.library == subject.library for x in calls):
                continue  # the first dtype that works is enough for each library
            for subject.layout, are_int in product(layouts, (False, True)):
                if are_int and not (subject.takes("key_lengths") or subject.takes("start")):
                    continue
                subject.arguments.lengths_are_int = are_int
                try:
                    grade = agreement(subject)
                    if grade == RIGHT_OUTPUT and takes_lengths and not runs(subject, with_lengths(subject)):
                        grade = 3
                except NotExamined as refusal:
                    failure = failure or f"as {subject.library} {subject.dtype} {LAYOUTS[subject.layout]}, {refusal}"
                    continue
                how = subject.library, subject.dtype, subject.layout, subject.layout_of_O, are_int
                calls.append(Call(grade, *how))
                if calls[-1].is_right and subject.layout in WHOLE:
                    break
        if calls:  # layouts with four dimensions take precedence, unless the function only takes lengths in others
            whole = [x for x in calls if x.layout in WHOLE and "n" in axes(x.layout)] or calls
            best = max(whole, key=lambda x: x.grade)
            if takes_lengths and not best.is_right:
                best = next((x for x in calls if x.is_right), best)
            _, subject.library, subject.dtype, subject.layout, subject.layout_of_O, are_int = best
            subject.arguments.lengths_are_int = are_int
            others = (x.layout for x in calls if x not in whole and x.is_right)
            subject.also = "" if best.is_right else next(others, "")
            detect_scale(subject, is_right=best.is_right)
            detect_lengths(subject)
            detect_masks(subject)
            return detect_window(subject)
    raise NotExamined(failure or f"{dtype} is no dtype that it can be called with")


def possible_layouts(subject: Subject) -> list[str]:
    """Return the layouts to try for a function, beginning with those that its arguments suggest."""
    if subject.takes("cu_seqlens"):
        return ["thd"]
    three = [*(["bnd"] if any(map(subject.takes, LENGTHS)) else []), "hnd", "nhd", "nd"]
    layouts = ["bhnd", "bnhd", "nbhd", *three, "bhd", "bhd,bhnd", "hd,hnd"]
    return ["flat"] * (subject.takes("heads") or subject.takes("kv_heads")) + layouts


def detect_scale(subject: Subject, is_right: bool) -> None:
    """Decide whether an argument called tau really is the softmax scale, and ignore it if not.

    It is not the scale if the output is correct although the argument's default is not 1/√d.
    """
    roles, defaults = subject.arguments.roles, subject.arguments.defaults
    for name in [name for name in roles if name.lower() == "tau"]:  # tau may also be a threshold
        if is_right and type(defaults[name]) in (int, float) and defaults[name] != subject.d**-0.5:
            del roles[name]
            subject.arguments.unused.append(name)


def runs(subject: Subject, problem: AttentionCase) -> bool:
    """Return whether the function can be called on a case, with whatever result."""
    with suppress(NotExamined):
        subject.ask(subject.fitted(problem), gradients=False)
        return True
    return False


def detect_lengths(subject: Subject) -> None:
    """Find out whether the function expects an array of lengths, or one length for all batch entries."""
    if (subject.takes("key_lengths") or subject.takes("start")) and not runs(subject, with_lengths(subject)):
        subject.arguments.lengths_are_int = True
        subject.arguments.lengths_are_int = runs(subject, with_lengths(subject))


def with_lengths(subject: Subject) -> AttentionCase:
    """Return a case with two batch entries whose keys have different lengths."""
    n = subject.multiple
    return case("lengths", 4 * n, 32 * n, subject.d, batch=2, heads=3, key_lengths=np.array([16, 32]) * n)


def detect_masks(subject: Subject) -> None:
    """Find out whether a mask is (batch, heads, N_q, N_k) or (batch, N_k), and what the values of the latter mean.

    A mask that the function rejects with four axes, but accepts with two, is a padding mask. True may then mark a
    padded key or a key that takes part. The meaning that gives the correct output is chosen.
    """
    n, arguments = 16 * subject.multiple, subject.arguments
    masks = [] if subject.takes("padding") else arguments.named("mask")
    whole = case("mask", n, d=subject.d, batch=2, mask=np.ones((2, 2, n, n), dtype=bool))
    problem = case("lengths", n, d=subject.d, batch=2, key_lengths=np.array([n // 2, n]))
    for is_float in (False, True) if masks else ():
        arguments.mask_is_float = is_float
        if runs(subject, whole):
            return
    arguments.roles |= dict.fromkeys(masks, "padding")
    if arguments.takes("padding"):
        arguments.mask_is_float = False
        arguments.mask_is_float = not runs(subject, problem)
        if not runs(subject, problem):
            arguments.roles |= dict.fromkeys(masks, "mask")
            arguments.mask_is_float = False
            return
    states = [RIGHT, *(Variant((name,)) for name, x in CATALOGUE.items() if name.startswith("lengths-") and x.edits)]
    for variant, keeps in product(states if arguments.takes("padding") else (), (False, True)):
        arguments.padding_keeps = keeps
        with suppress(NotExamined):
            if subject.ask(problem).fits(variant, ("O",)):
                return
    arguments.padding_keeps = bool(masks)


def detect_window(subject: Subject) -> None:
    """Find out whether the function expects a window as one number or as two, and whether one number means both sides.

    Each call has lengths that no other case has, because a function may cache masks.
    """
    arguments = subject.arguments
    windows = arguments.named("window")
    if windows and not any(isinstance(arguments.defaults[name], tuple) for name in windows):
        for is_int in (False, True)[arguments.window_is_always :]:
            arguments.window_is_int = is_int
            n = 5 + arguments.window_is_int
            if runs(subject, case("window", n * subject.multiple, d=subject.d, window=(4, 4))):
                break
    if arguments.window_is_int:
        problem = case("window", 11 * subject.multiple, d=subject.d, window=(4, 4))
        with suppress(NotExamined):
            answer = subject.ask(subject.fitted(problem), gradients=False)
            of_left = [Variant((*x, "window-right-ignored")) for x in ((), ("window-counts-itself",))]
            is_left = any(answer.fits(variant, ("O",)) for variant in of_left)
            arguments.window_is_left = is_left and not answer.fits(Variant(("always-causal",)), ("O",))


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
    subject.layout_of_O = ""
    n = 9 if subject.multiple == 1 else subject.multiple
    N_k = 2 * n + subject.multiple if subject.takes("start") else n  # so that some keys precede the queries' own
    problem = subject.fitted(case("probe", n, N_k, d=subject.d, batch=2, heads=3, gradients=subject.takes("dO")))
    part, always = "gradients" if subject.takes("dO") else "O", subject.arguments.always
    for passed in [set[str]()] + [{"slopes"}] * subject.takes("slopes"):  # it may have default slopes
        subject.arguments.always = always | passed
        first = subject.ask(problem)
        if any(first.fits(s, ("O", *GRADIENTS)) for s in (RIGHT, Variant(("always-causal",)))):
            return RIGHT_OUTPUT
    subject.arguments.always = always
    if any(first.fits(s, ("O", *GRADIENTS)) for s in candidates(RIGHT, part, (n,))):
        return 3
    other = problem.v.copy()
    other[0, 0] += 1
    moved = np.abs(subject.ask(replace(problem, v=other)).outputs["O"] - first.outputs["O"]).max(axis=(2, 3)) > 1e-6
    return 2 if moved.sum() == 1 else 1
