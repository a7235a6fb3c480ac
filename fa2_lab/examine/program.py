"""Find the smallest input that reproduces a finding, and write a program that runs the function on this input."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fa2_lab.examine.arguments import NotExamined
from fa2_lab.examine.cases import SCALE_UP, AttentionCase, case
from fa2_lab.examine.layouts import MERGED, axes
from fa2_lab.examine.match import GRADIENTS, Answer, Finding, Variant, conventions
from fa2_lab.examine.subject import Subject

TURNED = {"bhnd": "", "bnhd": ".swapaxes(1, 2)", "nbhd": ".transpose(2, 0, 1, 3)", "thd": "[0].swapaxes(0, 1)"}
TURNED |= {
    "hnd": "[0]",
    "nhd": TURNED["thd"],
    "bnd": "[:, 0]",
    "nd": "[0, 0]",
    "flat": ".swapaxes(1, 2).reshape(len(x), x.shape[2], -1)",
}
PER_HEAD = {"mask", "kept", "sinks", "slopes", "key_lengths"}  # options with one value per head or per batch entry


def program(subject: Subject, finding: Finding, module: str) -> str:
    """Return a program that calls the function on the smallest case that reproduces the finding, or "" if none does.

    The program imports the function from `module`.
    """
    before = Variant(
        finding.variant.names[: -1 if finding.name in finding.variant.names else None], *finding.variant[1:]
    )
    can_be_written = "n" in axes(subject.layout) and not subject.takes("pages")
    for smaller in smaller_cases(finding.case, subject) if finding.case and can_be_written else ():
        try:
            answer = subject.ask(smaller)
        except NotExamined:
            continue
        for name in answer.outputs:
            is_mixed = name in GRADIENTS and not subject.takes("dO") and subject.layout_of_O != subject.layout
            if answer.wrong(before, name).any() and not is_mixed:
                return write_program(subject, answer, name, module, before)
    return ""


def smaller_cases(like: AttentionCase, subject: Subject) -> Iterator[AttentionCase]:
    """Yield smaller cases of the same kind as `like`, starting from one row.

    For each number of rows, a case with one head and one batch entry comes first, if this is possible.
    """
    (batch, heads, N_q, d), (h_k, N_k, d_v), (size, shift) = like.q.shape, like.v.shape[1:], like.made
    counts = [(1, 1, 1)] if heads == h_k and not PER_HEAD & set(like.options) else []
    is_taken = subject.layout in ("bhnd", "bnhd") or batch == 1 < len(subject.layout) - 2
    counts += [(batch, heads, h_k)] if is_taken else []
    for n in [x * subject.multiple for x in (*range(1, 9), *range(10, N_q + 1, 2))]:
        m = n + N_k - N_q if like.group in ("corner", "empty", "window") else -(-n * N_k // N_q)
        options = dict(like.options)
        options |= {name: options[name][..., :n, :m] for name in ("mask", "kept") if name in options}
        if "key_lengths" in options:
            options["key_lengths"] = np.minimum(options["key_lengths"], m)
        for name, last in (("cu_seqlens", n), ("cu_seqlens_k", m)):
            if name in options:
                options[name] = np.array([0, last // 2, last])
        options |= dict(size=size, shift=shift, gradients=like.gradients, dL=like.dL is not None)
        options |= dict(d_v=d_v)
        for count in counts if n <= N_q and m > 0 else []:
            yield case(like.group, n, m, d, *count, **options)


def write_program(subject: Subject, answer: Answer, name: str, module: str, before: Variant) -> str:
    """Return a program that runs the function on one case and prints a few elements of the output `name`.

    A comment in the program lists the actual and the expected values. `before` is the variant known before this
    finding; the elements shown differ from its output.
    """
    case, (size, shift), layout = answer.case, answer.case.made, subject.layout
    torch, grad, given = subject.library == "torch", name in GRADIENTS, subject.takes("dO")
    lines = ["import numpy as np", *(["import torch"] if torch else []), f"from {module} import {subject.name}", ""]
    names = ["q", "k", "v", *(["dO"] if grad else []), *(["dL"] if grad and case.dL is not None else [])]
    N_q, N_k, d = *case.q.shape[2:3], *case.k.shape[2:]
    lines += [f"draw = np.random.default_rng([0, {N_q}, {N_k}, {d}]).standard_normal"]
    lines += [f"{', '.join(names)} = {', '.join(f'draw({getattr(case, x).shape})' for x in names)}"]
    lines += [f"q = {size:g} * q"] if size != 1 else []
    lines += [f"q[..., -1], k[..., -1] = {SCALE_UP:g}, {shift / SCALE_UP:g}"] if shift else []
    if given and (subject.takes("O") or subject.takes("L")):
        lines[1:1] = ["from fa2_lab.reference import heads"]
        lines += [f"O, L = heads.forward({', '.join(['q, k, v', *(f'{x}={y!r}' for x, y in case.options.items())])})"]
        names += ["O"]
        lines += [f"L = L[{', '.join('0' * (4 - len(layout)))}]"] if subject.takes("L") and len(layout) < 4 else []
    to = f"torch.tensor({{}}, dtype=torch.{subject.dtype})" if torch else f"{{}}.astype(np.{subject.dtype})"
    to = "{}" if subject.dtype == "float64" else to
    arrays = ", ".join(x for x in names if x != "dL")
    turned = to.format(f"x{TURNED[layout]}")
    lines += [f"{arrays} = ({turned} for x in ({arrays}))"] if turned != "x" else []
    lines += [f"dL = {to.format('dL')}"] if "dL" in names else []
    if grad and not given:
        lines += [f"{x}.requires_grad_()" for x in "qkv"]
    lines[1:1] = ["from types import SimpleNamespace as namespace"] if subject.takes("module") else []
    called = f"{subject.name}({', '.join(arguments_as_source(subject, case))})"
    lines += [f"out = list({called}.values())" if subject.gives_dict else f"out = {called}"]
    first = "[0]" if subject.gives_several else ""
    of_L = " + (out[1] * dL).sum()" if "dL" in names else ""
    lines += [f"((out{first} * dO).sum(){of_L}).backward()"] if grad and not given else []
    what = "out[1]" if name == "L" else f"out{first}"
    if grad:
        what = f"out[{GRADIENTS.index(name) - 3}]" if given else f"{name[1:].lower()}.grad"
    at = np.argwhere(answer.wrong(before, name))[0][:3]
    got, right = (x[tuple(at)] for x in (answer.outputs[name], answer.variant(conventions(before), name)))
    shown = [np.array2string(np.atleast_1d(x)[:3], precision=4, suppress_small=True) for x in (got, right)]
    layout = subject.layout_of_O if name == "O" else layout
    index = [str(at["bhn".index(axis)]) for axis in axes(layout) if axis != "d"]
    if layout in MERGED:  # the last axis holds the features of all heads
        index[-1] = f"{at[1] * answer.outputs[name].shape[3]}:"
    place = f"[{', '.join(index)}{'][' if layout in MERGED else ', '}:3]"
    if name == "L":
        place = f"[{', '.join(map(str, at))}]" if layout == "bhnd" else ""
        shown[0] = shown[0] if place else f"at head {at[1]}, row {at[2]}: {shown[0]}"
    return "\n".join([*lines, f"print({what}{place})  # {shown[0]}; right: {shown[1]}"])


def arguments_as_source(subject: Subject, case: AttentionCase) -> list[str]:
    """Return the arguments of a call as Python source, one string per argument."""
    make = "torch.tensor" if subject.library == "torch" else "np.array"
    axis = -4 if subject.layout in ("bhnd", "hnd") else -3
    stacked = f"{make.split('.')[0]}.stack([q, k, v], {axis})"
    given = ("q", "k", "v", "dO", *("OL" if subject.takes("dO") else ""))
    text = {x: x for x in given} | {"qkv": stacked, "kv": stacked.replace("q, ", "")}
    roles = [(name, role) for name, role in subject.arguments.roles.items() if role in text]
    in_order = "".join(role for _, role in roles).startswith("qkv")
    words = [text[role] if in_order and role in "qkv" else f"{name}={text[role]}" for name, role in roles]
    for name, x in subject.arguments.values(case, subject.layout).items():
        if isinstance(x, np.ndarray):
            kind = f", dtype={make.split('.')[0]}.int32" if x.dtype.kind == "i" else ""
            shown = np.round(x, 4) if x.dtype.kind == "f" else x
            words.append(f"{name}={make}({shown.tolist()}{kind})")
        elif subject.arguments.roles[name] in case.options or x not in (False, subject.arguments.defaults[name]):
            words.append(f"{name}={x}")
    return words + [f"{name}={value!r}" for name, value in subject.given.items()]
