"""Listings that a chapter calls complete are run as printed, on inputs that a reader would try next."""

import ast
import re
import symtable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from fa2_lab.reference import naive
from fa2_lab.tiles import Mask, Tiling
from fa2_lab.trace import UNWATCHED
from fa2_studio.book.build import Case, check, difference
from fa2_studio.book.chapters import NOTEBOOKS, TEXT, written
from fa2_studio.book.run import ANSWER, QUESTION, read_source
from fa2_studio.book.steps import fa1_step, tile_gradients

# N_q, N_k, causal: square; ragged; more keys; rows that see no key, with and without blocks that are skipped
LENGTHS = [(8, 8, False), (13, 11, True), (5, 17, True), (8, 4, True), (17, 3, True)]


def exec_listing(chapter: str, *functions: str) -> dict:
    """Return {name: value} after running a chapter's last listing of each function, from a cell or a fold."""
    source = re.sub("^# ", "", (TEXT / f"{chapter}.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
    names = {"np": np, "UNWATCHED": UNWATCHED, "fa1_step": fa1_step, "tile_gradients": tile_gradients}
    for function in functions:
        exec(re.findall(rf"^def {function}\(.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)[-1], names)
    return names


@pytest.mark.parametrize("N_q, N_k, causal", LENGTHS)
def test_printed_listings_of_chapters_04_and_05_match_attention(N_q, N_k, causal):
    draw = np.random.default_rng(N_q)
    Q, K, V, dO = (draw.standard_normal((n, 4)) for n in (N_q, N_k, N_k, N_q))
    tiling = Tiling(N_q, N_k, 4, 2, Mask(causal))
    with np.errstate(all="raise", under="ignore"):
        O, L = exec_listing("04_fa2_forward", "update", "forward")["forward"](Q, K, V, tiling)
        backward = exec_listing("05_backward", "fa2_backward")["fa2_backward"]
        found = backward(Q, K, V, O, L, dO, tiling)
    true_O, P = naive.forward(Q, K, V, mask=tiling.mask)
    visible = Tiling(N_q, N_k, N_q, N_k, tiling.mask).visible(0, 0)
    true_L = naive.logsumexp(np.where(visible, Q @ K.T / 2, -np.inf))
    assert np.allclose(O, true_O, atol=1e-12) and np.allclose(L, true_L, atol=1e-12)
    for ours, true in zip(found, naive.backward(Q, K, V, P, dO), strict=True):
        assert np.allclose(ours, true, atol=1e-12)


@pytest.mark.parametrize("N_q, N_k", [(8, 8), (13, 11), (5, 17)])
def test_printed_listing_of_chapter_03_matches_attention(N_q, N_k):
    draw = np.random.default_rng(N_q)
    Q, K, V = (draw.standard_normal((n, 4)) for n in (N_q, N_k, N_k))
    O, l, m = np.full((N_q, 4), np.nan), np.full(N_q, np.nan), np.full(N_q, np.nan)
    with np.errstate(all="raise", under="ignore"):
        exec_listing("03_fa1", "fa1_forward")["fa1_forward"](Q, K, V, O, l, m, B_r=4, B_c=2, tau=0.5)
    assert np.allclose(O, naive.forward(Q, K, V)[0], atol=1e-12)
    assert np.allclose(m + np.log(l), naive.logsumexp(Q @ K.T / 2), atol=1e-12)


# The functions that readers write ---------------------------------------------------------------------------------

# chapter, and a letter from its second build on: (a part of the solution, what readers might write there …)
WRONG_BUILDS = {
    "01": ("L[i] = m + np.log", "L[i] = np.log", "L[i] = m + np.sqrt"),
    "02": ("alpha * l + p.sum", "l + p.sum"),
    "03": ("(alpha * l)[:, None] * o", "alpha[:, None] * o"),
    "04": ("l_i = np.where(l_i == 0, 1, l_i)", "pass"),
    "05": ("tau * (ds.T @ q)", "ds.T @ q"),
    "06": ("free.index(min(free))", "len(ends) % SMs"),
    "07": ("np.where(np.isfinite(top), top, 0)", "top"),
    "08": ("X + at + 1, mask=real", "X + at + 4, mask=real", "X + at, mask=real"),
    "08b": ("row * row_stride", "row * columns", "column * row_stride"),
    "08c": ('float("-inf")', "0.0", "-100.0"),
    "08d": ("down < K", "down < N", "down >= 0"),
    "08e": ("(m_i + tl.log2(l_i)) * LN2", "m_i + tl.log2(l_i)"),
    "09": ("tl.maximum(j + N_q - N_k, 0)", "(j + N_q - N_k)", "tl.maximum(j + N_k - N_q, 0)"),
    "10": ("ends[n - stages] if n >= stages else 0", "0", "ends[n - 1] if n else 0", "(n // stages) * work"),
    "11": ("-(-registers // 8) * 8", "registers", "registers // 8 * 8"),
    "12b": ("yield K.acquire(n + 1)", "pass"),
    "13": ("yield added.done()", "pass"),
    "14": ("(top if np.isfinite(top) else 0)", "top", "0"),
    "15": (
        "k, v, dk = ([x[rank - 1] for rank in range(ranks)] for x in (k, v, dk))",
        "k, v = ([x[rank - 1] for rank in range(ranks)] for x in (k, v))",
        "pass",
    ),
    "16": ("at = N_k - N_q", "at = 0", "at = N_q - N_k"),
    "17": ("row - column <= LEFT", "row - column < LEFT", "column - row <= LEFT"),
    "17b": ("(j <= i) & (i < j", "(j <= i) & (i <= j", "(i < j"),
    "17c": ("distance >= 16", "distance > 16", "distance >= 17"),
    "B": ("[1, 2, 5, 3]), np.array([1, 2, 4, 7]", "[1, 3, 4, 8]), np.array([8, 0, 4, 2]"),
    "C": ("m, l = m_new, l * np.exp(m - m_new)", "m, l = m_new, l"),
    "A": ("r // 2 % 4", "r % 4", "0"),
}
DIAGNOSES = {  # what the examiner says of the first of them, where a whole pass is written
    "01": "m is missing in L, which is log l instead of m + log l. (Read chapter 04.)",
    "08e": "L is in base 2, so multiply it by ln 2. (Read chapter 08",
}
BUILDS = [  # a chapter, and which of its builds
    pytest.param(c, n, id=f"{c.number}{'abcde'[n]}")
    for c in written()
    for n in range((TEXT / f"{c.name}.py").read_text(encoding="utf-8").count("# **Build.**"))
]


def defined_and_read(source: str) -> tuple[set[str], set[str]]:
    """Return the names that a cell defines or changes, and those that it reads."""
    top = symtable.symtable(source, "cell", "exec")
    given = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    for statement in ast.parse(source).body:
        for node in ast.walk(statement) if not isinstance(statement, ast.FunctionDef | ast.ClassDef) else ():
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
                given.add(next(part.id for part in ast.walk(node) if isinstance(part, ast.Name)))
    read, tables = set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and (table is top or s.is_global())}
    return given, read


def needed_cells(cells: list, end: int, *code: str) -> list[str]:
    """Return the code cells before `end` that this code needs, directly or not. A chapter shows and compiles more."""
    needed, sources = set().union(*(defined_and_read(source)[1] for source in code)), []
    for cell in reversed(cells[:end]):
        if cell.cell_type == "code":
            given, read = defined_and_read(cell.source)
            if given & needed:
                needed |= read
                sources.insert(0, cell.source)
    return sources


class Reader:
    """A reader of a chapter, who runs some of its cells as they are, but without pictures."""

    def __init__(self, chapter, folder: Path):
        self.names, self.folder, self.cells = {"__name__": chapter.name}, folder, read_source(chapter).cells

    def run(self, *sources: str) -> str:
        """Run cells and return what the last one prints. Each is written to a file, from which Triton reads kernels."""
        for source in sources:
            tree = ast.parse(source)
            pictures = [s for s in tree.body if re.match(r"(show|live)\(", ast.unparse(s))]
            tree.body = [s for s in tree.body if s not in pictures]
            file = self.folder / f"cell_{len(list(self.folder.iterdir()))}.py"
            file.write_text(source, encoding="utf-8")
            with redirect_stdout(StringIO()) as printed:
                exec(compile(tree, str(file), "exec"), self.names)
        return printed.getvalue()


@pytest.mark.parametrize("chapter, build", BUILDS)
def test_build_exercise_is_empty_and_its_solution_passes(chapter, build, tmp_path, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS)
    reader = Reader(chapter, tmp_path)
    cells = reader.cells
    start = [k for k, cell in enumerate(cells) if "**Build.**" in cell.source][build]
    calls_check = r"^(check|check_\w+|judge_\w+)\("
    checked = next(k for k in range(start, len(cells)) if re.search(calls_check, cells[k].source, re.M))
    check = cells[checked].source
    solution = re.search(r"```python\n(.*?)```", cells[checked + 1].source, re.DOTALL)[1]
    assert reader.run(*needed_cells(cells, checked, check, solution), check).startswith("your turn")
    assert reader.run(solution, check).startswith("right")
    name = chapter.number + "abcde"[build] * (build > 0)
    if name in WRONG_BUILDS:
        right, *wrong = WRONG_BUILDS[name]
        assert right in solution
        for n, mistake in enumerate(wrong):
            verdict = reader.run(solution.replace(right, mistake), check)
            assert verdict.startswith("wrong") and (n > 0 or DIAGNOSES.get(name, "") in verdict)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "compiled"])
@pytest.mark.parametrize("chapter", written(), ids=lambda chapter: chapter.name)
def test_chapter_answers_show_what_their_code_prints(chapter, compiles, tmp_path, monkeypatch):
    """Answers that need a compiled kernel are exhaustive. How many numbers differ by rounding depends on the CPU."""
    monkeypatch.chdir(NOTEBOOKS)
    cells = Reader(chapter, tmp_path).cells
    for at, card in enumerate(cells):
        for _, code, shown in ANSWER.findall(card.source) if QUESTION in card.source else ():
            before = needed_cells(cells, at, code)
            if any(re.search(r"\bxray\w*\(", source) for source in before) is compiles:
                printed = Reader(chapter, tmp_path).run(*before, code).rstrip()
                printed = f"\n```text\n{printed}\n```\n" if printed else ""
                assert re.sub(r"\d+% of the numbers", "", shown) == re.sub(r"\d+% of the numbers", "", printed), code


@pytest.mark.parametrize(
    "result, says",
    [
        (..., "your turn: write answer in the cell above, and run this cell again"),
        ((np.ones(2), np.nan), "wrong: why?\n  result 2: got nan, expected -inf"),
        ((np.ones(2), np.inf), "wrong: why?\n  result 2: got inf, expected -inf"),
        ((np.array([1.0, 0.5]), -np.inf), "wrong: why?\n  result 1: got 0.5 at [1], expected 1"),
        ((np.ones((2, 1)), -np.inf), "wrong: why?\n  result 1: got shape (2, 1), expected (2,)"),
        (np.ones(2), "wrong: why?\n  got 1 result(s), expected 2"),
        (ValueError("two\nlines"), "wrong: why?\n  ValueError: two"),
        ((np.ones(2), -np.inf), "right: answer passes all 1 cases"),
    ],
)
def test_build_check_prints_the_expected_verdict(result, says, capsys):
    def answer(x):
        x[:] = 0  # a reader's function may write into what it is given
        if isinstance(result, Exception):
            raise result
        return result

    x = np.ones(3)
    check(answer, Case("why?", (x,), (np.ones(2), -np.inf)))
    assert capsys.readouterr().out == f"{says}\n"
    assert x.all()
    assert difference(np.array([np.inf, 3.0]), np.array([np.inf, 1.0]), 1e-9) == "got 3 at [1], expected 1"
