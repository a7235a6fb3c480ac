"""For chapters 12a, 12b and 13, show listings of the Hopper kernels and, rung by rung, the ladder's record."""

import ast
from collections.abc import Callable
from difflib import SequenceMatcher
from itertools import groupby
from textwrap import wrap

import numpy as np
from IPython.display import Markdown, display

from fa2_lab.kernels import ladder
from fa2_lab.machine import reasons
from fa2_lab.paper import PACKAGE
from fa2_lab.tools import ladder as ladder_tool
from fa2_lab.tools import rung_diff

NODES = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
PEER = "FlashAttention-3"
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
WIDTH = 92  # number of letters that a notebook on GitHub shows per line without scrolling
COMPILED = {"programs": "programs on an SM"}


# Listings -----------------------------------------------------------------------------------------------------------


def definition_lines(file: str, name: str) -> list[str]:
    """Return the lines of a function, class, method or constant in a file of kernels/, with any comment above it."""
    lines = (PACKAGE / "kernels" / file).read_text(encoding="utf-8").splitlines()
    nodes = ast.parse("\n".join(lines)).body
    for part in name.split("."):
        found = [node for node in nodes if isinstance(node, NODES | ast.AugAssign) and part in names_of(node)]
        if not found:
            raise ValueError(f"name: got {name!r}; {file} has none of that name")
        begun, node = found[0], found[-1]
        nodes = getattr(node, "body", [])
    first = min([begun.lineno, *(x.lineno for x in getattr(begun, "decorator_list", []))]) - 1
    while lines[first - 1].startswith("# "):
        first -= 1
    shown = [line[begun.col_offset :] for line in lines[first : node.end_lineno]]
    return [line for line in shown if line.strip() not in ("@gluon.jit", "@triton.jit")]


def names_of(node: ast.AST) -> set[str]:
    """Return the names bound by a definition or an assignment."""
    if hasattr(node, "name"):
        return {node.name}
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}


def show_listing(file: str, *names: str, begin: str = "", end: str = "", off: str = "") -> None:
    """Show definitions from a file in kernels/.

    The listing starts at the first line that begins with `begin`, and stops at the first line that begins with `end`.
    Branches under `if {off}` are hidden.
    """
    listing = "\n\n".join("\n".join(definition_lines(file, name)) for name in names).split("\n")
    if off:
        listing = without_branches(listing, off)
    if begin:
        listing = listing[line_index(listing, begin) :]
        listing = [line.removeprefix(" " * (len(listing[0]) - len(listing[0].lstrip()))) for line in listing]
    if end:
        listing = listing[: line_index(listing, end) + 1]
    show_code("\n".join(listing))


def without_branches(listing: list[str], condition: str) -> list[str]:
    """Remove the branches under `if condition`, and move the lines of their `else` branches four columns left."""
    # `hidden` and `moved` hold the indentation of the `if` whose branch is hidden or whose `else` branch is moved.
    shown, hidden, moved = [], None, None
    for line in listing:
        depth = len(line) - len(line.lstrip())
        if hidden is not None and depth > hidden:
            continue
        otherwise = hidden == depth and line.strip() == "else:"
        hidden, moved = None, depth if otherwise else moved if moved is not None and depth > moved else None
        if line.strip().startswith(f"if {condition}"):
            hidden = depth
        elif not otherwise:
            shown.append(line if moved is None else line[4:])
    return shown


def line_index(listing: list[str], words: str) -> int:
    """Return the index of the first line that begins with these words."""
    return next(n for n, line in enumerate(listing) if line.strip().startswith(words))


def show_code(text: str, language: str = "python") -> None:
    lines = fit_lines(text, edge=2 * (language == "diff"))
    display(Markdown("\n".join([f"```{language}", *lines, "```"])))


def fit_lines(text: str, edge: int = 0) -> list[str]:
    """Break a listing's lines so that, as far as possible, none is longer than WIDTH.

    If a line is broken, its first `edge` letters are repeated. If a line of a comment or of a docstring's paragraph is
    too long, the whole comment or paragraph is wrapped again, so that no line ends after a few words.
    """
    quoted, known = "", []  # what a line begins in: "docstring", another multi-line "string", or neither ("")
    for line in text.split("\n"):
        code = line[edge:]
        now = quoted or ("docstring" if code.lstrip().startswith('"""') else "")
        if code.count('"""') % 2:
            quoted = "" if quoted else now or "string"
        known.append((now, line))
    lines = []
    numbered = ((n, now, line) for n, (now, line) in enumerate(known))
    for (now, *_), run in groupby(numbered, key=lambda x: paragraph_key(x[0], x[1], x[2], edge)):
        same = [line for *_, line in run]
        if max(len(line[edge:]) for line in same) > WIDTH:
            first, *others = same
            sign = "" if now == "docstring" else "# "
            same = [" ".join([first, *(line[edge:].strip().removeprefix(sign) for line in others)])]
        for line in same:
            parts = [line[edge:]] if now == "string" else break_line(line[edge:], now == "docstring")
            lines += [line[:edge] + part for part in parts]
    return lines


def paragraph_key(n: int, now: str, line: str, edge: int) -> tuple:
    """Return a key that line n shares with neighbouring lines only if they belong to the same comment or paragraph."""
    code = line[edge:].strip()
    indent = line[: len(line) - len(line[edge:].lstrip())]
    flows = code not in ("", '"""') if now == "docstring" else not now and code.startswith("# ")
    return (now, indent) if flows and not code.startswith(("- ", "# - ")) else (now, n)


def break_line(line: str, words: bool = False) -> list[str]:
    """Break a line of code into lines of at most WIDTH letters.

    Text (`words`) is broken between words, and code after the last comma that is nested in the fewest brackets. A
    comment stays at the end of the last line if it fits there, and is placed above the code otherwise.
    """
    code, sign, comment = line.partition("  # ")
    indent = " " * (len(line) - len(line.lstrip()))
    if len(line) <= WIDTH:
        return [line]
    if sign and code.strip():
        *first, last = break_line(code)
        if first and len(f"{last}{sign}{comment}") <= WIDTH:
            return [*first, f"{last}{sign}{comment}"]
        return [*break_line(f"{indent}# {comment}"), *first, last]
    if words or line.lstrip().startswith("# "):
        more = indent if words else f"{indent}# "
        return wrap(line, WIDTH, subsequent_indent=more, break_long_words=False, break_on_hyphens=False)
    commas = [k for k in range(WIDTH) if line.startswith(", ", k) and line[:k].count('"') % 2 == 0]
    depth = {k: sum(way * line.count(x, 0, k) for x, way in BRACKETS.items()) for k in commas}
    inside = [k for k in commas if depth[k] > 0]
    if not inside:
        return [line]
    cut = min(inside, key=lambda k: (depth[k], -k))
    return [line[: cut + 1], *break_line(f"{indent}    {line[cut + 2 :]}")]


def show_change(old: str, new: str, *names: str) -> None:
    """Show as a diff how rung `new` changes these functions of rung `old`."""
    old_file, new_file = (f"ladder/{ladder.find(rung)}.py" for rung in (old, new))
    known = {name for node in ast.parse(rung_diff.source(old)).body for name in names_of(node)}
    parts = [
        mark_changes(definition_lines(old_file, x) if x in known else [], definition_lines(new_file, x)) for x in names
    ]
    show_code("\n".join("\n".join(part) for part in parts), "diff")


def mark_changes(before: list[str], after: list[str], seen: Callable[[str], str] = str.strip) -> list[str]:
    """Return the differing lines, marked by − or +, with "…" in place of longer stretches of equal lines.

    `seen` returns the part of a line to compare. By default, only the indentation is ignored.
    """
    before, after = ([line for line in lines if line.strip()] for lines in (before, after))
    matcher = SequenceMatcher(a=[*map(seen, before)], b=[*map(seen, after)], autojunk=False)
    shown: list[str] = []
    for what, a, b, c, d in matcher.get_opcodes():
        if what == "equal":
            shown += ["  …"] if d - c > 1 else [f"  {line}" for line in after[c:d]]
        else:
            shown += [f"- {line}" for line in before[a:b]] + [f"+ {line}" for line in after[c:d]]
    return shown


# The record ---------------------------------------------------------------------------------------------------------


class Climb:
    """The ladder's record for 16,384 tokens in sequences of N = 4,096. Its counters are for d = 128 without a mask."""

    def __init__(self) -> None:
        self.record = ladder_tool.load(ladder_tool.SUITE)
        shapes = [(d, causal) for d in (128, 64) for causal in (False, True)]
        self.shapes = {(d, causal): reasons.forward_row(self.record, causal, d) for d, causal in shapes}

    def factor(self, new: str, d: int = 128, causal: bool = False, old: str = "") -> float:
        """Return a rung's speed divided by the speed of rung `old` or, by default, of the previous rung."""
        new = full_name(new)
        return self.shapes[d, causal].ratio(new, full_name(old) if old else ladder_tool.before(new))

    def value(self, name: str, what: str) -> float:
        """Return a rung's counter or a property of its compiled kernel. The clock is SM cycles divided by time."""
        name = full_name(name)
        if what == "clock, GHz":
            milliseconds = np.median(self.shapes[128, False].values[name])
            return self.value(name, "SM cycles") / milliseconds / 1e6
        if what in ("programs", "registers"):
            return reasons.compiled_rungs()[name, False, 128][what]
        return reasons.hardware_counters(self.record, name)[what]

    def table(self, *names: str) -> None:
        """Print each rung's TFLOP/s, also as a percentage of FlashAttention-3's speed in the same run."""
        titles = [f"d = {d}{', causal' if causal else ''}" for d, causal in self.shapes]
        print(f"{'':22}" + "".join(f"{title:>16}" for title in titles))
        for name in map(full_name, names):
            cells = [f"{row.rate(name):.0f} {row.ratio(name, PEER):5.0%}" for row in self.shapes.values()]
            print(f"{name:22}" + "".join(f"{cell:>16}" for cell in cells))

    def step(self, number: str, *counters: str) -> None:
        """Print a rung next to the previous one, with the reason for the change, the speeds and the given counters."""
        new = full_name(number)
        why = reasons.reason(new)
        print(f"limit before: {why.limit}\ntaken away:   {why.removes}")
        self.table(ladder_tool.before(new), new)
        print(f"{'factor':22}" + "".join(f"{self.factor(new, *shape):>16.2f}" for shape in self.shapes))
        for name in counters:
            a, b = self.value(ladder_tool.before(new), name), self.value(new, name)
            short = (lambda x: f"{x:.3f}") if name == "clock, GHz" else ladder_tool.short
            print(f"{COMPILED.get(name, name)}: {short(a)} → {short(b)}  (× {b / a:.2f})")

    def compare(self, rung: str, what: str) -> float:
        """Return a rung's counter divided by the same counter of the previous rung."""
        new = full_name(rung)
        return self.value(new, what) / self.value(ladder_tool.before(new), what)


def full_name(name: str) -> str:
    """Return a rung's full name if `name` is its number, and any other name unchanged."""
    return ladder.find(name) if name[:1].isdigit() else name
