"""`fa2-lab examine`: test an attention function and diagnose its mistake.

fa2-lab examine mine.py:attention           report the mistake, the size of its error, a small input that shows it, and
                                            what to read
fa2-lab examine mine.py:attention --quick   skip long sequences and stop calling the function after ten seconds
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import sys
from ast import literal_eval
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fa2_lab.examine import UNASKED, UNCHECKED, Report, diagnose
from fa2_lab.examine.arguments import NotExamined
from fa2_lab.examine.cases import AttentionCase
from fa2_lab.examine.guards import Endless
from fa2_lab.examine.layouts import LAYOUTS
from fa2_lab.examine.match import Finding
from fa2_lab.examine.program import program
from fa2_lab.examine.subject import Subject

NOTHING = "It makes none of the known mistakes"
REMARKS = ", but look at the remarks above"
MEANT = " But what is listed after `reads` is a mistake as well if you did not mean it."
VERDICTS = """The exit code is 0 for a right function, 1 for a wrong one, and 2 for one that cannot be examined.
Conventions and remarks count as right, for example the corner of the mask, a scale of 0 that is taken as not given, and
NaN, 0 or a mean of values in rows that see no key. If such a row is NaN, the gradients of K and V may be NaN as well,
because those of torch's softmax are. If it is not NaN, they may not. If the function takes lengths of the keys, the
report tells whether its causal mask ends at the last key of each length or of the buffer.
The function runs in a child process. If it ends this process, the command reports the problem that it was called on."""


def main(argv: list[str]) -> int:
    """Examine the function that the command line names and print the report.

    Return 0 if the function is correct, and 1 if it is not. Raise a ValueError if the function cannot be examined.
    """
    parser = argparse.ArgumentParser(
        prog="fa2-lab examine", description="Find out which known mistake an attention function makes.", epilog=VERDICTS
    )
    parser.add_argument("function", help="FILE:FUNCTION, as in mine.py:attention, or MODULE:FUNCTION")
    parser.add_argument(
        "--quick", action="store_true", help="skip long sequences, and call the function for ten seconds at most"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    layout = "the layout of q, k and v, if the examiner cannot find it out"
    library = "the library whose arrays the function takes"
    dtype = "a dtype such as float16 (default: the first one that the function takes)"
    device = "a device such as cuda (default: torch's CPU)"
    parser.add_argument("--layout", choices=list(LAYOUTS), default="", help=layout)
    parser.add_argument("--library", choices=["numpy", "torch", "jax"], default="", help=library)
    parser.add_argument("--dtype", default="", help=dtype)
    parser.add_argument("--device", default="", help=device)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="an argument to pass in every call"
    )
    a = parser.parse_args(argv)
    torch = sys.modules.get("torch")
    # CUDA and JAX do not work in a forked child if the parent process has already used them
    is_gpu_used = "jax" in sys.modules or (torch is not None and torch.cuda.is_initialized())
    processes = multiprocessing.get_context("spawn" if is_gpu_used else None)
    ours, theirs = processes.Pipe(duplex=False)
    # Run the user's function in a child process because it may terminate the process in which it runs.
    child = processes.Process(target=report_to, args=(theirs, a))  # type: ignore[attr-defined]
    child.start()
    theirs.close()
    said, asked = "", "nothing yet"
    while not said:
        try:
            asked, said, code = ours.recv()
        except EOFError:
            child.join()
            ended = f"its process ended with exit code {child.exitcode}"
            raise ValueError(f"examine: {a.function} cannot be examined: {ended} when it was asked {asked}") from None
    child.join()
    if code == 2:
        raise ValueError(said)
    print(said)
    return code


def report_to(parent: Connection, a: argparse.Namespace) -> None:
    """Examine the function that the arguments `a` name and send messages to the process at the other end of `parent`.

    A message (case, "", 0) precedes each call of the function. The last message is ("", report text, exit code).
    """
    try:
        parent.send(("", *examined(a, lambda case: parent.send((f"{case.group} ({case})", "", 0)))))
    except ValueError as refusal:
        parent.send(("", str(refusal), 2))


def examined(a: argparse.Namespace, before_call: Callable[[AttentionCase], object]) -> tuple[str, int]:
    """Return a text report on a function and an exit code, which is 0 if the function is correct and 1 if it is not.

    before_call() is called with each case before the function runs on it.
    """
    module, function = load(a.function)
    given = dict(assignment(text) for text in a.set)
    try:
        subject = Subject(function, given, a.device)
        subject.before_call = before_call
        report = diagnose(subject, a.layout, a.library, a.dtype, quick=a.quick)
    except (NotExamined, Endless) as refusal:
        raise ValueError(f"examine: {a.function} cannot be examined: {refusal}") from refusal
    report.subject.name = a.function.rpartition(":")[2]  # the function's name in the user's file
    return as_json(report) if a.json else page(report, a.function, module), int(not report.is_right)


def assignment(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE and return (NAME, VALUE). A VALUE that is not a Python literal is returned as a string."""
    name, _, value = text.partition("=")
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def load(text: str) -> tuple[str, Callable]:
    """Import the function given as FILE:FUNCTION or MODULE:FUNCTION, and return its module's name and the function."""
    where, _, name = text.rpartition(":")
    if not where or not name:
        raise ValueError(f"examine: got {text!r}; it takes FILE:FUNCTION, as in mine.py:attention")
    if importlib.util.find_spec("triton") is not None:
        import fa2_lab.kernels  # noqa: F401 — switches on Triton's interpreter if there is no GPU
    try:
        if where.endswith(".py"):
            path = Path(where)
            if not path.is_file():
                raise ValueError(f"examine: there is no file {where}")
            sys.path.insert(0, str(path.resolve().parent))
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec and spec.loader
            module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except ValueError as refusal:
        if str(refusal).startswith("examine:"):
            raise
        raise ValueError(f"examine: {where} does not import: ValueError: {refusal}") from refusal
    except (Exception, SystemExit) as failure:
        raise ValueError(f"examine: {where} does not import: {type(failure).__name__}: {failure}") from failure
    function = getattr(module, name, None)
    if function is None:
        functions = [
            x for x, y in vars(module).items() if callable(y) and getattr(y, "__module__", "") == module.__name__
        ]
        raise ValueError(f"examine: {where} has no {name!r}; it has {', '.join(functions) or 'no function'}")
    if type(function).__name__ in ("JITFunction", "InterpretedFunction"):
        raise ValueError(f"examine: {name} is a Triton kernel; give the Python function that launches it")
    if not callable(function):
        raise ValueError(f"examine: {name} is not a function")
    return module.__name__, function


def page(report: Report, function: str, module: str) -> str:
    """Return the report as text for the terminal."""
    lines = [f"{function}: {report.asked} problems in {report.seconds:.0f} s"]
    reads = [str(x).removesuffix(".") for x in report.findings if x.mistake.part == "conventions"]
    lines += [f"reads   {'; '.join([report.how, *reads])}", f"gives   {', '.join(report.parts)}"]
    also = report.subject.also
    lines += (
        [f"        It would be right as {LAYOUTS[also]}; if you mean that layout, pass --layout {also}."]
        if also
        else []
    )
    lacks = [name for name, why in report.refused.items() if not why]
    lines += [f"        not tested, because the function does not take them: {', '.join(lacks)}"] if lacks else []
    unused = report.subject.arguments.unused
    lines += (
        [f"        left at their defaults, because their meaning is not known: {', '.join(unused)}"] if unused else []
    )
    lines += [f"refuses {name}: {why}" for name, why in report.refused.items() if why]
    for finding in report.findings:
        if finding.mistake.part != "conventions":
            lines += ["", *paragraph(report, finding, module)]
    if report.is_right and {UNASKED, UNCHECKED} & report.refused.keys():
        lines += ["", "Nothing is wrong in what was tested, but there was no time to test everything."]
    elif report.is_right:
        has_remarks = any(x.mistake.part == "remarks" for x in report.findings)
        lines += ["", NOTHING + REMARKS * has_remarks + "." + MEANT * bool(reads)]
    return "\n".join(lines)


def paragraph(report: Report, finding: Finding, module: str) -> list[str]:
    """Return the lines about one finding: what is wrong, where, by how much, what to read, and how to reproduce it."""
    lines = [f"{'WRONG ' if finding.is_wrong else 'remark'}  {finding}  [{finding.name}]"]
    if finding.others:
        lines.append(f"        The same numbers would come from {' or from '.join(finding.others)}.")
    much = "" if finding.much != finding.much else f", by up to {finding.much:.3g}"
    lines.append(f"where   {finding.where}{much}")
    if finding.case is not None:
        lines.append(f"in      {finding.case}")
    lines.append(f"read    {finding.mistake.reference}")
    if (finding.is_wrong and finding.mistake.part != "memory") or finding.name in ("unknown", "all-nan"):
        text = program(report.subject, finding, module)
        lines += ["", *(f"    {line}".rstrip() for line in text.splitlines())] if text else []
    return lines


def as_json(report: Report) -> str:
    """Return the report as JSON, for use by other programs."""

    def of(x: Finding) -> dict[str, Any]:
        fields = dict(
            name=x.name, wrong=x.is_wrong, says=str(x), where=x.where, much=None if x.much != x.much else x.much
        )
        return fields | dict(case=str(x.case) if x.case else None, others=list(x.others), read=x.mistake.reference)

    kept = {name: getattr(report, name) for name in ("name", "how", "asked", "parts", "refused", "seconds")}
    return json.dumps(kept | dict(right=report.is_right, findings=[of(x) for x in report.findings]), indent=1)
