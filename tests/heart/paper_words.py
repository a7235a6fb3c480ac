"""Reads an algorithm's lines as they are worded in paper.py, and holds them against a run of the tagged code.

The words are formulas with a small grammar: two names side by side are a product (of matrices, or of rows with their
factors), ∘ is entry by entry, ᵀ transposes, ← assigns, and capitals live in HBM. `record` runs the NumPy algorithm and
notes the variables, loads and stores before and after each line. `check_line` computes the words from the variables
before their tagged lines and compares with the variables after them.
"""

import ast
import inspect
import re
import sys
import textwrap
from dataclasses import dataclass

import numpy as np

from fa2_lab.paper import tagged_lines
from fa2_lab.trace import HbmTensor

NAME = r"\b(?:dp?_?dropped|p_dropped|d?[A-Za-z](?:_(?:ij|i|j|new|r|c))?)\b"
LIST = rf"({NAME}(?:(?:, | and ){NAME})*)"
SHAPE = re.compile(r" \((N|B_r|B_c)(?: × (d|N|B_c))?\)")
END = re.compile(rf"[,;:]|\.$|\. | blocks| in T_| and {NAME} (=|←)")  # what ends a formula
TILDES = {"m̃": "m_ij", "p̃": "p_ij", "l̃": "l_ij"}  # what the paper marks with a tilde belongs to one tile
HBM = set("Q K V O S P D L l m dQ dK dV dO dS dP dQ_i".split())
BLOCKS = {"T_r", "T_c", "B_r", "B_c"}


# The words -----------------------------------------------------------------------------------------------------


class Values:
    """An array under the grammar of the words. A row without a key subtracts 0 instead of −∞ and divides by 1."""

    def __init__(self, x):
        self.x = np.asarray(x, dtype=float)

    @property
    def T(self):
        return Values(self.x.T)

    def __mul__(self, other):
        if self.x.ndim == other.x.ndim == 2:
            return Values(self.x @ other.x)
        return Values(beside(self.x, other.x) * beside(other.x, self.x))

    def __matmul__(self, other):  # ∘
        assert self.x.shape == other.x.shape
        return Values(self.x * other.x)

    def __add__(self, other):
        return Values(beside(self.x, other.x) + beside(other.x, self.x))

    def __sub__(self, other):
        return Values(beside(self.x, other.x) - beside(np.where(np.isneginf(other.x), 0, other.x), self.x))

    def __truediv__(self, other):
        return Values(beside(self.x, other.x) / beside(np.where(other.x == 0, 1, other.x), self.x))

    def __neg__(self):
        return Values(-self.x)


def beside(x, other):
    """A vector beside a matrix has one number for each row."""
    return x[:, None] if x.ndim == 1 and other.ndim == 2 else x


FUNCTIONS = {
    "exp": lambda a: Values(np.exp(a.x)),
    "log": lambda a: Values(np.log(np.where(a.x == 0, 1, a.x))),
    "rowmax": lambda a: Values(a.x.max(axis=1)),
    "rowsum": lambda a: Values(a.x.sum(axis=1)),
    "max": lambda a, b: Values(np.maximum(a.x, b.x)),
    "min": lambda a, b: Values(np.minimum(a.x, b.x)),
    "ceil": lambda a: Values(np.ceil(a.x)),
    "number": Values,
}


def python_of(formula: str) -> str:
    """A formula of the words as an expression of Python."""
    for sign, name in {**TILDES, "−": "-", "∞": "inf", "ᵀ": ".T", "∘": "@", "τ": "tau", "e^(": "exp("}.items():
        formula = formula.replace(sign, name)
    formula = re.sub(r"⌈(.*?)⌉", r"ceil(\1)", formula)
    formula = re.sub(r"\blog (\w+)", r"log(\1)", formula)
    formula = re.sub(r"\b(\d+)([A-Za-z])", r"(\1 \2)", formula)
    formula = re.sub(r"(?<=[\w)])\s+(?=[A-Za-z(])", " * ", formula)
    return re.sub(r"(?<![\w.])(\d+)", r"number(\1)", formula)


def value_of(formula: str, names: dict) -> np.ndarray:
    """The value of a formula."""
    python = python_of(formula)
    found = {node.id for node in ast.walk(ast.parse(python, mode="eval")) if isinstance(node, ast.Name)}
    env = {name: Values(np.inf if name == "inf" else block_of(name, names)) for name in found - set(FUNCTIONS)}
    with np.errstate(all="ignore"):
        return eval(python, {"__builtins__": {}}, FUNCTIONS | env).x


def block_of(name: str, names: dict):
    """A variable of the code, or where it has none the block of a tensor in HBM, such as dQ_i."""
    if name in names:
        return names[name]
    tensor, _, letter = name.partition("_")
    return names[tensor][names["rows" if letter == "i" else "cols"]]


def assignments(text: str) -> list[tuple[str, str, list[str]]]:
    """(name, formula, shape) of everything that a line assigns, in its order."""
    for tilde, name in TILDES.items():
        text = text.replace(tilde, name)
    found = []
    for at in re.finditer(rf"({NAME}) (?:=|←) ", text):
        depth, end = 0, at.end()
        while end < len(text) and (depth or not (END.match(text, end) or SHAPE.match(text, end))):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        shape = SHAPE.match(text, end)
        found.append((at[1], text[at.end() : end].rstrip(". "), [n for n in shape.groups() if n] if shape else []))
    return found


def listed(text: str, verb: str) -> set[str]:
    """The names that stand behind a verb, as in "Load q_i, l_i and m_i"; what follows with ← is an assignment."""
    lists = re.findall(rf"(?i:\b{verb}) {LIST}(?! ←)", text)
    return {name for names in lists for name in re.findall(NAME, names)}


def tensor_of(name: str) -> str:
    """The tensor in HBM that a block belongs to: q_i is of Q, dk_j of dK, l_i of l, L_i of L."""
    letter = re.sub(r"_[ij]$", "", name)
    return letter if letter in HBM else letter[:-1] + letter[-1].upper()


# The run -------------------------------------------------------------------------------------------------------


@dataclass
class Moment:
    """The variables at one moment of a run, and how many loads and stores there have been."""

    number: int  # the line that runs next
    names: dict
    events: int


@dataclass
class Run:
    """One run of an algorithm: its code, its tagged lines, and every moment between two lines."""

    source: list[str]
    tagged: dict[str, list[int]]
    moments: list[Moment]
    events: list

    def passes(self, tag: str) -> list[tuple[dict, dict, list]]:
        """(variables before, variables after, loads and stores) for every time that a tag's lines ran."""
        found = []
        for begins, ends in zip(self.moments, self.moments[1:], strict=False):
            if begins.number == self.tagged[tag][0]:
                found.append((begins.names, {}, []))
            if begins.number in self.tagged[tag]:
                before, _, events = found[-1]
                before = before | {name: x for name, x in begins.names.items() if name not in self.targets(tag)}
                found[-1] = before, ends.names, events + self.events[begins.events : ends.events]
        return found

    def statements(self, tag: str) -> list[ast.stmt]:
        """The tagged statements; of a loop its first line."""
        texts = [self.source[n].strip().split("  #")[0] for n in self.tagged[tag]]
        return [ast.parse(text + " pass" if text.endswith(":") else text).body[0] for text in texts]

    def targets(self, tag: str) -> set[str]:
        """What the tagged statements assign: variables, and tensors in HBM."""
        found = set()
        for statement in self.statements(tag):
            for target in getattr(statement, "targets", [getattr(statement, "target", None)]):
                for node in filter(None, getattr(target, "elts", [target])):
                    found.add(node.value.id if isinstance(node, ast.Subscript) else node.id)
        return found


def record(function, trace, *tensors, **options) -> Run:
    """Run an algorithm under a meter and write down what its variables are between any two of its lines."""
    lines, first = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    tagged: dict[str, list[int]] = {}
    for tags, number, _ in tagged_lines(source):
        for tag in tags:
            tagged.setdefault(tag, []).append(number - 1)
    moments: list[Moment] = []

    def note(frame, event, _):
        if event in ("line", "return"):
            number = frame.f_lineno - first if event == "line" else -1
            moments.append(Moment(number, {k: kept(v) for k, v in frame.f_locals.items()}, len(trace.events)))
        return note

    earlier = sys.gettrace()
    sys.settrace(lambda frame, event, _: note if frame.f_code is function.__code__ else None)
    try:
        function(*tensors, trace=trace, **options)
    finally:
        sys.settrace(earlier)
    return Run(source.splitlines(), tagged, moments, list(trace.events))


def kept(value):
    """A copy of an array, also of one in HBM; anything else as it is."""
    return np.array(value.array if isinstance(value, HbmTensor) else value) if hasattr(value, "__array__") else value


# The check -----------------------------------------------------------------------------------------------------


def check_line(tag: str, text: str, run: Run, helpers: set[str]) -> None:
    """One line's words against what its tagged code does, in every pass of the loops around it.

    `helpers` are variables that the code assigns there and the words do not name.
    """
    assert tag in run.tagged, f"{tag}: no line of the code carries it"
    passes = run.passes(tag)
    assert passes, f"{tag}: its code never ran"
    if text.startswith("for each"):
        return check_loop(tag, text, run, passes)
    if text.startswith("Return"):
        names = {node.id for node in ast.walk(run.statements(tag)[0]) if isinstance(node, ast.Name)} - {"np"}
        assert names == listed(text, "return"), f"{tag} says {text!r}, its code returns {sorted(names)}"
        return None

    formulas = [(tensor_of(n) if text.startswith("Store") else n, f, shape) for n, f, shape in assignments(text)]
    named = {name for name, _, _ in formulas} - BLOCKS | listed(text, "load")
    read = {name for _, formula, _ in formulas for name in re.findall(NAME, formula)}
    loads = {tensor_of(name) for name in listed(text, "load") | read & HBM}
    stores = {tensor_of(name) for name in listed(text, "store") | named & HBM - listed(text, "load")}
    want, got = named - HBM | stores | helpers, run.targets(tag)
    assert got == want, f"{tag} stands on lines that assign {sorted(got)}; it should be on those of {sorted(want)}"
    for before, after, events in passes:
        moved = [{e.tensor for e in events if e.op == op} for op in ("load", "store")]
        assert moved == [loads, stores], f"{tag} says {text!r}, its code loads {moved[0]} and stores {moved[1]}"
        for name in listed(text, "store") - HBM:
            block = after[tensor_of(name)][after["rows" if name.endswith("i") else "cols"]]
            assert close(block, before[name]), f"{tag}: {name} is not what is stored"
        check_formulas(tag, formulas, text.startswith("Store"), before, after)
        check_prose(tag, text, before, after)
    return None


def check_loop(tag: str, text: str, run: Run, passes) -> None:
    """ "for each row block i = 1 … T_r": the loop's variable, and that it runs through all blocks."""
    kind, letter, bound = re.match(r"for each (row|column) block (\w) = 1 … (\w+):", text).groups()
    assert (kind, letter, bound) in (("row", "i", "T_r"), ("column", "j", "T_c")), text
    assert run.targets(tag) == {letter}, f"{tag} is a loop over {letter}, its code assigns {run.targets(tag)}"
    assert f'("{letter}", ' in run.source[run.tagged[tag][0]], f"{tag}: the meter calls this loop something else"
    seen = {after[letter] for _, after, _ in passes}
    assert seen == set(range(getattr(passes[0][0]["tiling"], bound))), f"{tag}: {letter} runs through {seen} alone"


def check_formulas(tag: str, formulas, stored: bool, before: dict, after: dict) -> None:
    """Every formula, computed from the variables before, gives the variable after; and of the shape that is said."""
    known, d = dict(before), after["Q"].shape[1]
    if "tiling" in after:
        known |= {name: getattr(after["tiling"], name) for name in BLOCKS}
    else:
        known |= {name: after[name] for name in BLOCKS & set(after)} | dict(d=d)
    for name, formula, shape in formulas:
        N = dict(N=after["tiling"].N_q if name == "T_r" else after["tiling"].N_k) if name in ("T_r", "T_c") else {}
        block = after["rows" if tag in ROWS_STORED else "cols"] if stored else ...
        got = known[name] if name in BLOCKS else after[name][block] if name in after else block_of(name, after)
        want = value_of(formula, known | N)
        assert close(got, want), f"{tag} says {name} = {formula}, and its code computes something else"
        known[name] = got
        sizes = {"d": {d}, "N": {len(after["Q"]), len(after["K"])}}
        for letter, axis in (("B_r", "rows"), ("B_c", "cols")):
            sizes[letter] = {after[axis].stop - after[axis].start} if axis in after else set()
        fits = len(shape) in (0, np.ndim(got)) and all(
            n in sizes[x] for x, n in zip(shape, np.shape(got), strict=False)
        )
        assert fits, f"{tag} says {name} is {' × '.join(shape)}, it is {np.shape(got)}"


ROWS_STORED = {"FA1.A2.L15", "FA1.A2.L16", "FA1.A4.L21"}


def check_prose(tag: str, text: str, before: dict, after: dict) -> None:
    """What is said in words alone: cutting, masking, dropping, block sizes."""
    for part in re.findall(rf"(?i:\bcut) {LIST}[^;.]*", text):
        cut = re.search(
            rf"(?i:\bcut) {re.escape(part)}[^;.]*?(?:into|blocks) .*?(T_[rc])(?:[^;.]*? of (B_[rc]) rows)?", text
        )
        rows = after["tiling"].N_q if cut[1] == "T_r" else after["tiling"].N_k
        for name in re.findall(NAME, part):
            assert name not in after or len(after[name]) == rows, (
                f"{tag}: {name} has {len(after[name])} rows, not {rows}"
            )
        assert cut[2] in (None, "B_" + cut[1][-1]), f"{tag}: {cut[1]} blocks have {cut[2]} rows"
    if "the mask hides" in text:
        seen = after["tiling"].visible(after["i"], after["j"])
        assert close(after["s_ij"], np.where(seen, before["s_ij"], -np.inf)), f"{tag}: that is not what the mask hides"
    if "probability p" in text:
        divisor = value_of(re.search(r"divide the kept ones by (.*)\.", text)[1], dict(p=before["dropout"].p))
        kept_there = after["p_ij"] != 0
        assert close(after["p_ij"], kept_there * before["p_ij"] / divisor), f"{tag}: not dropped, or not divided so"
    if "z_ij is" in text:
        factor = value_of(re.search(r"z_ij is (.*?) where", text)[1], dict(p=before["dropout"].p))
        assert set(np.unique(after["z_ij"])) <= {0.0, float(factor)}, f"{tag}: z_ij has other values"
    if "B_c near" in text:
        exact = value_of(re.search(r"B_c near (.*?) and", text)[1], dict(M=after["M"], d=after["Q"].shape[1]))
        assert exact <= after["B_c"] < exact + 1, f"{tag}: B_c is {after['B_c']}, and M / 4d is {exact}"


def close(a, b) -> bool:
    a, b = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    return np.allclose(a, b, rtol=1e-12, atol=1e-12)
