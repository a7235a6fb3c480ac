"""A notebook's cells, run as Python: in a student's own check, in the grader and in the box."""

from __future__ import annotations

import ast
import contextlib
import linecache
import re
import traceback

OWN = ("fa2_lab", "fa2_studio", "checks")


def run_source(source: str, name: str, space: dict) -> None:
    """Run a cell without its magics. Its lines are kept: errors show them, and Triton reads its kernels again."""
    file = f"<cell {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(without_magics(source), file, "exec"), space)


def without_magics(source: str) -> str:
    """A cell as Python; only one that is none may hold a notebook's magics."""
    with contextlib.suppress(SyntaxError, ValueError):
        ast.parse(source)
        return source
    return re.sub(r"^(\s*)[%!].*", r"\1pass", source, flags=re.MULTILINE)


def described(error: BaseException) -> tuple[str, str, str]:
    """An error as text: its name, what it says, and the student's line; a private name is its base's."""
    if type(error).__name__ == "InterpreterError" and error.__cause__:  # Triton's interpreter wraps what was raised
        error = error.__cause__
    try:
        text = str(error)[:1000]
        if isinstance(error, SyntaxError):  # its own words name a file that no student knows
            text = f"{error.msg}, in line {error.lineno}: {(error.text or '').strip()}"[:1000]
        if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in OWN:
            text = f"{error.name} is off limits in this assignment"
    except BaseException:
        text = ""
    name = next(cls.__name__ for cls in type(error).__mro__ if not cls.__name__.startswith("_"))
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if f.filename.startswith("<cell") or "ipykernel_" in f.filename]
    where = f"line {inside[-1].lineno} of the cell with {inside[-1].name}: {inside[-1].line}"[:300] if inside else ""
    return name[:60], text, where
