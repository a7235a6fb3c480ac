"""Functions that show the difference between two rungs of the ladder as a diff."""

import ast
from difflib import SequenceMatcher
from pathlib import Path

from fa2_lab.kernels import ladder

RED, GREEN, FAINT, PLAIN = "\033[31m", "\033[32m", "\033[2m", "\033[0m"
AROUND = 3  # lines of context around a change


def source(rung: str) -> str:
    """Return the contents of a rung's file."""
    return Path(ladder.FOLDER, f"{ladder.find(rung)}.py").read_text(encoding="utf-8")


def code(rung: str) -> list[str]:
    """Return the non-empty lines of a rung's file that follow the module docstring."""
    text = source(rung)
    docstring = ast.parse(text).body[0]
    return [line for line in text.splitlines()[docstring.end_lineno :] if line.strip()]


def steps(old: str, new: str) -> list[tuple[str, list[str], list[str]]]:
    """Compare two rungs, ignoring indentation, and return a list of tuples (difflib opcode, old lines, new lines)."""
    before, after = code(old), code(new)
    matcher = SequenceMatcher(a=[x.strip() for x in before], b=[x.strip() for x in after], autojunk=False)
    return [(what, before[a:b], after[c:d]) for what, a, b, c, d in matcher.get_opcodes()]


def diff(old: str, new: str, colours: bool = False) -> str:
    """Return the changes from rung `old` to rung `new`, formatted like the output of `diff -w`."""
    red, green, faint, plain = (RED, GREEN, FAINT, PLAIN) if colours else ("",) * 4
    lines: list[str] = []
    for what, gone, come in steps(old, new):
        if what == "equal":
            lines += [f"  {line}" for line in context(come, first=not lines)]
        else:
            lines += [f"{red}- {line}{plain}" for line in gone] + [f"{green}+ {line}{plain}" for line in come]
    while lines and lines[-1].startswith("  ") and trailing(lines) > AROUND:
        lines.pop()
    return "\n".join(f"{faint}{line}{plain}" if line == "  …" else line for line in lines)


def context(lines: list[str], first: bool) -> list[str]:
    """Return the lines to show from a run of unchanged lines: the first few and the last few.

    If `first` is True, the diff begins with this run, and only the last few lines are returned.
    """
    if first:
        return lines[-AROUND:]
    return lines if len(lines) <= 2 * AROUND + 1 else [*lines[:AROUND], "…", *lines[-AROUND:]]


def trailing(lines: list[str]) -> int:
    """Return the number of unchanged lines at the end of a diff."""
    return next((n for n, line in enumerate(reversed(lines)) if not line.startswith("  ")), len(lines))
