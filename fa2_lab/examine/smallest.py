"""The smallest input that shows a finding, as a program that can be run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fa2_lab.examine.cases import SCALE_UP, Question
from fa2_lab.examine.match import GRADIENTS, Answer, Finding, Variant, conventions
from fa2_lab.examine.subject import NotExamined, Subject

ORDERS = {"bhnd": (0, 1, 2, 3), "bnhd": (0, 2, 1, 3), "hnd": (1, 2, 3), "nd": (2, 3), "thd": (2, 1, 3)}


def program(subject: Subject, finding: Finding, module: str) -> str:
    """Lines that call the function on the smallest of our cases that shows the finding; empty if none shows it."""
    before = Variant(finding.state.names[: -1 if finding.name in finding.state.names else None], *finding.state[1:])
    for case in smaller(finding.case, subject) if finding.case else ():
        try:
            answer = subject.ask(case)
        except NotExamined:
            continue
        for name in ("O", "L", *GRADIENTS):
            if name in answer.outputs and answer.wrong(before, name).any():
                return written(subject, answer, name, module, before)
    return ""


def smaller(like: Question, subject: Subject) -> Iterator[Question]:
    """Cases of the same kind, from one row on; one head and one batch entry first."""
    (batch, heads, N_q, d), (h_k, N_k) = like.q.shape, like.k.shape[1:3]
    few = [(1, 1, 1)] if heads == h_k and not {"mask", "sinks", "key_lengths"} & set(like.options) else []
    many = [] if subject.layout in ("nd", "hnd", "thd") and batch > 1 else [(batch, heads, h_k)]
    for n in [*range(1, 9), *range(10, N_q + 8, 2)]:
        n = n * subject.multiple
        m = n + N_k - N_q if like.group in ("corner", "empty", "window") else -(-n * N_k // N_q)
        if n > N_q or m < 1:
            continue
        for b, h, g in few + [x for x in many if subject.layout != "nd"]:
            draw, order = np.random.default_rng(0).standard_normal, ORDERS[subject.layout]
            q, k, v, dO = (native(draw, (b, x, y, d), order) for x, y in ((h, n), (g, m), (g, m), (h, n)))
            size, shift = like.made
            q = q * size
            if shift:
                q[..., -1], k[..., -1] = SCALE_UP, shift / SCALE_UP
            yield Question(like.group, q, k, v, dO, options(like, n, m), like.gradients, like.dL, like.made)


def native(draw: Any, shape: tuple[int, ...], order: tuple[int, ...]) -> np.ndarray:
    """Numbers drawn in the order of the function's layout, as (batch, heads, N, d)."""
    x = draw([shape[axis] for axis in order])
    x = x.reshape([1] * (4 - x.ndim) + list(x.shape))
    return x.swapaxes(1, 2) if order in ((0, 2, 1, 3), (2, 1, 3)) else x


def options(like: Question, n: int, m: int) -> dict[str, Any]:
    """The options of a case for n queries and m keys."""
    cut = {"mask": lambda x: x[..., :n, :m], "key_lengths": lambda x: np.minimum(x, m)}
    cut["cu_seqlens"] = lambda x: np.array([0, n // 2, n])
    return {name: cut.get(name, lambda x: x)(x) for name, x in like.options.items()}


def written(subject: Subject, answer: Answer, name: str, module: str, before: Variant) -> str:
    """The program for one case, with what comes out and what should."""
    case, order, d = answer.case, ORDERS[subject.layout], answer.case.q.shape[3]
    shapes = [tuple(x.shape[a] for a in order) for x in (case.q, case.k, case.v, case.dO)]
    size, shift = case.made
    torch, grad = subject.library == "torch", name in GRADIENTS
    lines = ["import numpy as np", *(["import torch"] if torch else []), f"from {module} import {subject.name}", ""]
    lines += ["draw = np.random.default_rng(0).standard_normal"]
    lines += [f"q, k, v{', dO' * grad} = {', '.join(f'draw({x})' for x in shapes[: 3 + grad])}"]
    lines += [f"q = {size:g} * q"] if size != 1 else []
    lines += [f"q[..., -1], k[..., -1] = {SCALE_UP:g}, {shift / SCALE_UP:g}"] if shift else []
    names = "q, k, v, dO" if grad else "q, k, v"
    if torch:
        lines += [f"{names} = (torch.tensor(x, dtype=torch.{subject.dtype}) for x in ({names}))"]
        lines += ["for x in (q, k, v):", "    x.requires_grad_()"] if grad else []
    elif subject.dtype != "float64":
        lines += [f"q, k, v = (x.astype(np.{subject.dtype}) for x in (q, k, v))"]
    lines += [f"out = {subject.name}({', '.join(arguments(subject, case))})"]
    several = "L" in answer.outputs
    wrong = np.argwhere(answer.wrong(before, name))[0]
    at = tuple(int(wrong[a]) for a in order if a < 3) if name != "L" else tuple(map(int, wrong))
    if grad:
        lines += [f"(out{'[0]' * several} * dO).sum().backward()"]
    what = f"{name[1:].lower()}.grad" if grad else f"out{'[0]' * several}" if name == "O" else "out[1]"
    got, right = (x[tuple(wrong[:3])] for x in (answer.outputs[name], answer.variant(conventions(before), name)))
    cut = "" if name == "L" else ", :3"
    shown = [np.array2string(np.atleast_1d(x)[:3], precision=4, suppress_small=True) for x in (got, right)]
    index = ", ".join(map(str, at))
    if name == "L" and subject.layout != "bhnd":
        return "\n".join([*lines, f"print(out[1])  # at head {wrong[1]}, row {wrong[2]} {shown[0]}; right: {shown[1]}"])
    return "\n".join([*lines, f"print({what}[{index}{cut}])  # {shown[0]}; right: {shown[1]}" if d else ""])


def arguments(subject: Subject, case: Question) -> list[str]:
    """The arguments of the call, as text."""
    words = [
        f"{name}={role}" if role not in list(subject.roles)[:3] else role
        for name, role in subject.roles.items()
        if role in "qkv"
    ]
    if list(subject.roles.values())[:3] == ["q", "k", "v"]:
        words = ["q", "k", "v"]
    for name, role in subject.roles.items():
        if role == "cu_seqlens":
            starts = case.options.get(role, [0, case.k.shape[2] if "k" in name[-3:] else case.q.shape[2]])
            words.append(f"{name}=torch.tensor({list(map(int, starts))}, dtype=torch.int32)")
        elif role == "longest":
            words.append(f"{name}={max(case.q.shape[2], case.k.shape[2])}")
        elif role == "lse" or (role == "grouped" and case.q.shape[1] != case.k.shape[1]):
            words.append(f"{name}=True")
        elif role in case.options:
            x = case.options[role]
            x = x[0] if role == "window" and subject.window_is_int else x
            if isinstance(x, np.ndarray):
                make = "torch.tensor" if subject.library == "torch" else "np.array"
                x = f"{make}({np.round(x, 4).tolist()})"
            words.append(f"{name}={x}")
    return words + [f"{name}={value!r}" for name, value in subject.given.items()]
