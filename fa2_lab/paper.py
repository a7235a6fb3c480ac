"""The papers' algorithms as data, the words they use, and `where`: from a line of a paper to the lines of code.

FA1 is "FlashAttention" (Dao, Fu, Ermon, Rudra, Ré 2022), FA2 is "FlashAttention-2" (Dao 2023). The lines are in
our own words and keep the papers' numbers. Where the printed line has a slip, the line here says it right and
names the erratum. In the code, the comment `# FA2.A1.L9` marks what computes line 9 of FA2's Algorithm 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill

TAG = re.compile(r"\bFA\d+\.A\d+\.L\d+\b")
# Tags begin a comment, or follow its text after two spaces, as in `# (B_r, d)  FA2.A1.L4`.
TAG_COMMENT = re.compile(r"#\s*(?:[^#]*\s{2})?(FA\d+\.A\d+\.L\d+(?:[ ,]+FA\d+\.A\d+\.L\d+)*)")
PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Line:
    """One numbered line of an algorithm. `depth` counts the loops around it; "end for" computes nothing."""

    number: int
    depth: int
    text: str
    errata: tuple[str, ...] = ()
    computes: bool = True


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of one paper, line by line."""

    tag: str  # FA2.A1: paper FA2, Algorithm 1
    title: str
    source: str
    needs: str
    lines: tuple[Line, ...]
    numpy: str  # the file whose lines are shown first
    triton: tuple[str, ...] = ()  # the same in Triton: the first of these that is there

    def tag_of(self, line: Line) -> str:
        return f"{self.tag}.L{line.number}"

    def __str__(self) -> str:
        rows = [f"{line.number:3}  {'    ' * line.depth}{line.text}" for line in self.lines]
        return "\n".join([f"{self.tag}  {self.title} ({self.source})", f"     needs: {self.needs}", *rows])


def end(number: int, depth: int) -> Line:
    """The line that closes a loop."""
    return Line(number, depth, "end for", computes=False)


CUT_QKV = "Cut Q into T_r = ⌈N / B_r⌉ blocks of B_r rows; cut K and V into T_c = ⌈N / B_c⌉ blocks of B_c rows."
FITTING = "Choose B_c near M / 4d and B_r = min(B_c, d), a little smaller, so that the score tile fits in M too."

FA1_A2 = Algorithm(
    tag="FA1.A2",
    title="FlashAttention, forward",
    source="FA1, appendix B.3",
    needs="Q, K, V (N × d) in HBM; on-chip memory of M elements; scale τ; a mask; dropout probability p",
    lines=(
        Line(1, 0, "Set up the random generator and keep its state R in HBM.", ("fa1-dropout-order",)),
        Line(2, 0, FITTING, ("fa1-block-size",)),
        Line(3, 0, "In HBM, start from O = 0 (N × d), l = 0 (N) and m = −∞ (N)."),
        Line(4, 0, CUT_QKV),
        Line(5, 0, "Cut O, l and m into T_r blocks of B_r rows as well."),
        Line(6, 0, "for each column block j = 1 … T_c:"),
        Line(7, 1, "Load k_j and v_j."),
        Line(8, 1, "for each row block i = 1 … T_r:"),
        Line(9, 2, "Load q_i, o_i, l_i and m_i: the row block's state comes back from HBM."),
        Line(10, 2, "Score the tile: s_ij = τ q_i k_jᵀ (B_r × B_c)."),
        Line(11, 2, "Put −∞ wherever the mask hides an entry of s_ij."),
        Line(
            12,
            2,
            "Softmax statistics of this tile alone: m̃ = rowmax(s_ij), p̃ = exp(s_ij − m̃), l̃ = rowsum(p̃).",
            ("fa1-empty-rows",),
        ),
        Line(13, 2, "Join them to the row's: m_new = max(m_i, m̃); l_new = e^(m_i − m_new) l_i + e^(m̃ − m_new) l̃."),
        Line(14, 2, "Drop entries of p̃ with probability p and divide the kept ones by 1 − p."),
        Line(
            15,
            2,
            "Store o_i ← (l_i e^(m_i − m_new) o_i + e^(m̃ − m_new) p̃ v_j) / l_new, row by row: a finished answer "
            "for the keys seen so far.",
        ),
        Line(16, 2, "Store l_i ← l_new and m_i ← m_new."),
        end(17, 1),
        end(18, 0),
        Line(19, 0, "Return O, l and m; the caller keeps R."),
    ),
    numpy="fa2_lab/reference/fa1.py",
    triton=("fa2_lab/kernels/ladder/r01_fa1.py",),
)

FA1_A3 = Algorithm(
    tag="FA1.A3",
    title="standard attention, backward",
    source="FA1, appendix B.4",
    needs="Q, K, V, dO (N × d) and P (N × N) in HBM",
    lines=(
        Line(1, 0, "Load P and dO, compute dV = Pᵀ dO, store dV."),
        Line(2, 0, "Load dO and V, compute dP = dO Vᵀ (N × N), store dP."),
        Line(3, 0, "Load P and dP, compute dS = P ∘ (dP − rowsum(P ∘ dP)) (N × N), store dS."),
        Line(4, 0, "Load dS and K, compute dQ = τ dS K, store dQ; τ is the scale of S."),
        Line(5, 0, "Load dS and Q, compute dK = τ dSᵀ Q, store dK; τ is the scale of S."),
        Line(6, 0, "Return dQ, dK and dV."),
    ),
    numpy="fa2_lab/reference/naive.py",
)

FA1_A4 = Algorithm(
    tag="FA1.A4",
    title="FlashAttention, backward",
    source="FA1, appendix B.4",
    needs="Q, K, V, O, dO (N × d) and l, m (N) in HBM; M, τ, the mask, p, and the generator's state R",
    lines=(
        Line(
            1, 0, "Put the random generator back into the state R that the forward pass kept.", ("fa1-dropout-order",)
        ),
        Line(2, 0, FITTING, ("fa1-block-size",)),
        Line(3, 0, CUT_QKV),
        Line(4, 0, "Cut O, dO, l and m into T_r blocks of B_r rows as well."),
        Line(5, 0, "In HBM, start from dQ = 0 in T_r blocks, and dK = 0 and dV = 0 in T_c blocks."),
        Line(6, 0, "for each column block j = 1 … T_c:"),
        Line(7, 1, "Load k_j and v_j."),
        Line(8, 1, "On chip, start dk_j = 0 and dv_j = 0 (B_c × d)."),
        Line(9, 1, "for each row block i = 1 … T_r:"),
        Line(10, 2, "Load q_i, o_i, do_i, dq_i, l_i and m_i."),
        Line(11, 2, "Score the tile again: s_ij = τ q_i k_jᵀ (B_r × B_c)."),
        Line(12, 2, "Put −∞ wherever the mask hides an entry of s_ij."),
        Line(13, 2, "The probabilities again, now final: p_ij = exp(s_ij − m_i) / l_i.", ("fa1-empty-rows",)),
        Line(14, 2, "The dropout mask again: z_ij is 1 / (1 − p) where an entry was kept and 0 where it was dropped."),
        Line(15, 2, "p_dropped = p_ij ∘ z_ij."),
        Line(16, 2, "dv_j ← dv_j + p_droppedᵀ do_i (B_c × d)."),
        Line(17, 2, "dp_dropped = do_i v_jᵀ (B_r × B_c)."),
        Line(18, 2, "dp_ij = dp_dropped ∘ z_ij."),
        Line(19, 2, "D_i = rowsum(do_i ∘ o_i): one number for each row, the same for every j."),
        Line(20, 2, "ds_ij = p_ij ∘ (dp_ij − D_i)."),
        Line(21, 2, "Store dq_i ← dq_i + τ ds_ij k_j."),
        Line(22, 2, "dk_j ← dk_j + τ ds_ijᵀ q_i (B_c × d)."),
        end(23, 1),
        Line(24, 1, "Store dk_j and dv_j: column block j is finished."),
        end(25, 0),
        Line(26, 0, "Return dQ, dK and dV."),
    ),
    numpy="fa2_lab/reference/fa1.py",
)

FA2_A1 = Algorithm(
    tag="FA2.A1",
    title="FlashAttention-2, forward",
    source="FA2, section 3.1.1",
    needs="Q, K, V (N × d) in HBM; block sizes B_r and B_c",
    lines=(
        Line(1, 0, CUT_QKV),
        Line(2, 0, "Cut O (N × d) and L (N) into blocks 1 … T_r of B_r rows.", ("fa2-block-index",)),
        Line(3, 0, "for each row block i = 1 … T_r:"),
        Line(4, 1, "Load q_i: it stays on chip while the keys stream past."),
        Line(5, 1, "On chip, start o_i = 0 (B_r × d), l_i = 0 and m_i = −∞ (B_r)."),
        Line(6, 1, "for each column block j = 1 … T_c:"),
        Line(7, 2, "Load k_j and v_j."),
        Line(8, 2, "Score the tile: s_ij = τ q_i k_jᵀ (B_r × B_c).", ("fa2-scale",)),
        Line(
            9,
            2,
            "m_new = max(m_i, rowmax(s_ij)); p_ij = exp(s_ij − m_new); l_new = e^(m_i − m_new) l_i + rowsum(p_ij).",
            ("fa2-P-tilde", "fa1-empty-rows"),
        ),
        Line(
            10,
            2,
            "o_i ← e^(m_i − m_new) o_i + p_ij v_j, not divided by anything; then l_i ← l_new and m_i ← m_new.",
            ("fa2-tweak1",),
        ),
        end(11, 1),
        Line(12, 1, "Divide once: o_i ← o_i / l_i, row by row."),
        Line(13, 1, "L_i = m_i + log l_i: the only statistic that the backward pass needs."),
        Line(14, 1, "Store o_i as block i of O."),
        Line(15, 1, "Store L_i as block i of L."),
        end(16, 0),
        Line(17, 0, "Return O and L."),
    ),
    numpy="fa2_lab/reference/fa2.py",
    triton=("fa2_lab/kernels/ladder/r07_two_loops.py", "fa2_lab/kernels/portable/forward.py"),
)

FA2_A2 = Algorithm(
    tag="FA2.A2",
    title="FlashAttention-2, backward",
    source="FA2, section 3.1.2",
    needs="Q, K, V, O, dO (N × d) and L (N) in HBM; block sizes B_r and B_c",
    lines=(
        Line(1, 0, CUT_QKV),
        Line(2, 0, "Cut O, dO and L into T_r blocks of B_r rows as well."),
        Line(3, 0, "In HBM, start dQ = 0 in T_r blocks; cut dK and dV into T_c blocks."),
        Line(4, 0, "D = rowsum(dO ∘ O) (N), stored in HBM and cut into T_r blocks.", ("fa2-D-shape",)),
        Line(5, 0, "for each column block j = 1 … T_c:"),
        Line(6, 1, "Load k_j and v_j."),
        Line(7, 1, "On chip, start dk_j = 0 and dv_j = 0 (B_c × d)."),
        Line(8, 1, "for each row block i = 1 … T_r:"),
        Line(9, 2, "Load q_i, do_i, L_i and D_i.", ("fa2-loads",)),
        Line(10, 2, "Score the tile again: s_ij = τ q_i k_jᵀ (B_r × B_c).", ("fa2-scale",)),
        Line(11, 2, "The final probabilities in one step: p_ij = exp(s_ij − L_i).", ("fa2-S-index", "fa1-L")),
        Line(12, 2, "dv_j ← dv_j + p_ijᵀ do_i (B_c × d)."),
        Line(13, 2, "dp_ij = do_i v_jᵀ (B_r × B_c)."),
        Line(14, 2, "ds_ij = p_ij ∘ (dp_ij − D_i)."),
        Line(
            15,
            2,
            "In HBM, dQ_i ← dQ_i + τ ds_ij k_j: atomically, or in another pass, where column blocks run in parallel.",
            ("fa2-dQ-race", "fa2-scale"),
        ),
        Line(16, 2, "dk_j ← dk_j + τ ds_ijᵀ q_i (B_c × d).", ("fa2-scale",)),
        end(17, 1),
        Line(18, 1, "Store dk_j and dv_j: column block j is finished."),
        end(19, 0),
        Line(20, 0, "Return dQ, dK and dV."),
    ),
    numpy="fa2_lab/reference/fa2.py",
    triton=("fa2_lab/kernels/portable/backward.py",),
)

ALGORITHMS: dict[str, Algorithm] = {a.tag: a for a in (FA1_A2, FA1_A3, FA1_A4, FA2_A1, FA2_A2)}
LINES: dict[str, tuple[Algorithm, Line]] = {a.tag_of(n): (a, n) for a in ALGORITHMS.values() for n in a.lines}


# From a tag to the places that carry it -------------------------------------------------------------------

# Why a line has no counterpart in Triton, for a whole algorithm or for one line of it.
NO_TRITON = {
    "FA1.A3": "the backward kernels never need P in HBM, so none of them is standard attention's",
    "FA1.A2.L1": "the ladder's kernels have no dropout",
    "FA1.A2.L2": "the ladder's kernels take tiles of 64 × 64",
    "FA1.A2.L4": "a kernel cuts nothing: a block is an address and a mask",
    "FA1.A2.L5": "a kernel cuts nothing: a block is an address and a mask",
    "FA1.A2.L14": "the ladder's kernels have no dropout",
}
# FA1's backward pass has no kernel, but its lines are in FA2's: line 11 is FA2.A2's line 10, and so on.
LINES_OF_FA1 = (3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 16, 17, 19, 20, 21, 22, 24, 26)
IN_FA2 = dict(zip(LINES_OF_FA1, (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 14, 15, 16, 18, 20), strict=True))
NO_TRITON |= {
    f"FA1.A4.L{n}": f"the kernels run FA2's backward pass; there it is FA2.A2.L{k}" for n, k in IN_FA2.items()
}
NO_TRITON |= {
    f"FA1.A4.L{n}": "FA2's backward pass, which the kernels run, has no such line" for n in (1, 2, 12, 14, 15, 18)
}

# Which picture shows a line: the figure's name, and for each algorithm the lines.
PICTURES = {
    "visiting_order": {"FA1.A2": (3, 4, 5, 6, 7, 8, 9, 16), "FA2.A1": (1, 2, 4, 6, 7, 14, 15)},
    "workers": {"FA1.A4": (3, 4, 5, 6, 9, 24), "FA2.A1": (3,), "FA2.A2": (1, 2, 3, 5, 8, 15, 18)},
    "block_budget": {"FA1.A2": (2,), "FA1.A4": (2,)},
    "causal_tiles": {"FA1.A2": (11,), "FA1.A4": (12,)},
    "dropout_orders": {"FA1.A2": (1, 14), "FA1.A4": (1, 14, 15, 18)},
    "state_stream": {"FA2.A1": (5, 9, 10)},
    "merge_orders": {"FA1.A2": (12, 13), "FA2.A1": (13,)},
    "deferred_normalisation": {"FA1.A2": (10, 15), "FA2.A1": (8, 12)},
    "backward_graph": {
        "FA1.A3": (1, 2, 3, 4, 5),
        "FA1.A4": (7, 8, 10, 11, 13, 16, 17, 19, 20, 21, 22),
        "FA2.A2": (4, 6, 7, 9, 10, 11, 12, 13, 14, 16),
    },
}
PICTURE_OF = {f"{a}.L{n}": name for name, lines in PICTURES.items() for a, ns in lines.items() for n in ns}

ROOMS = ("reference", "ladder", "portable", "decode", "hopper")  # the order in which places are told
SHOWN = 10  # lines at most that a short answer has


@dataclass(frozen=True)
class Place:
    """One line of code: its file, its number, its text."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}\n    {self.text}"


@dataclass(frozen=True)
class Whereabouts:
    """A paper's line and every place where the project computes it. The places to read first come first."""

    tag: str
    algorithm: Algorithm
    line: Line
    numpy: tuple[Place, ...]
    triton: tuple[Place, ...]
    notebooks: tuple[Place, ...]

    @property
    def picture(self) -> str | None:
        """The name of the figure that shows the line."""
        return PICTURE_OF.get(self.tag)

    @property
    def first_numpy(self) -> tuple[Place, ...]:
        """The lines of the one NumPy file that stands for the algorithm."""
        return tuple(place for place in self.numpy if place.file == self.algorithm.numpy)

    @property
    def first_triton(self) -> tuple[Place, ...]:
        """The lines of the one Triton file that stands for the algorithm."""
        return tuple(place for place in self.triton if place.file == triton_file(self.algorithm))

    @property
    def no_triton(self) -> str:
        """Why the file that stands for the algorithm in Triton has no such line; empty where it has one."""
        reason = NO_TRITON.get(self.tag) or NO_TRITON.get(self.algorithm.tag, "no kernel carries this tag yet")
        return "" if self.first_triton else reason

    def words(self) -> list[str]:
        """The algorithm's name and its line in our words."""
        text = fill(self.line.text, 98, initial_indent="  ", subsequent_indent="  ")
        return [f"{self.tag}: {self.algorithm.title} ({self.algorithm.source})", *text.splitlines()]

    def __str__(self) -> str:
        """The line, the code to read first, the picture; ten lines at most."""
        if not self.line.computes:
            return "\n".join([*self.words(), "nothing to compute here"])
        ends = [f"picture  figures/{self.picture}.svg"] if self.picture else []
        room = SHOWN - len(self.words()) - len(ends) - 1  # for code; the last line says what else there is
        numpy, triton = self.first_numpy[: (room + 1) // 2], self.first_triton[: room // 2]
        untold = len(self.numpy + self.triton + self.notebooks) - len(numpy + triton)
        more = [f"{untold} place{'s' * (untold > 1)}: fa2-lab where {self.tag} --all"] if untold else []
        more += [f"fa2-lab errata {name}" for name in self.line.errata]
        ends += [f"more     {'; '.join(more)}"] if more else []
        rows = [*titled("NumPy", numpy, "no line of code carries this tag yet")]
        return "\n".join([*self.words(), *rows, *titled("Triton", triton, f"none: {self.no_triton}"), *ends])

    def full(self) -> str:
        """The same with every place, the notebooks' included."""
        parts = self.words() + [f"  A known slip here: fa2-lab errata {name}" for name in self.line.errata]
        for title, places in (("NumPy", self.numpy), ("Triton", self.triton), ("notebook", self.notebooks)):
            parts += [f"{title:9}{place}" for place in places]
        if not self.line.computes:
            parts.append("nothing to compute here")
        elif self.no_triton:
            parts.append(f"Triton   none: {self.no_triton}")
        return "\n".join([*parts, f"picture  figures/{self.picture}.svg"] if self.picture else parts)


def titled(title: str, places: tuple[Place, ...], none: str) -> list[str]:
    """Places one under the other, without their comments, with a title before the first."""
    rows = [f"{place.file}:{place.number}  {place.text.split('  #')[0]}" for place in places] or [none]
    return [f"{title:9}{rows[0]}", *(" " * 9 + row for row in rows[1:])]


def triton_file(algorithm: Algorithm) -> str | None:
    """The Triton file that stands for an algorithm."""
    return next((file for file in algorithm.triton if (PACKAGE.parent / file).is_file()), None)


def where(tag: str) -> Whereabouts:
    """Where a paper's line is computed, as in `print(where("FA2.A1.L9"))`; `.full()` has every place."""
    if not isinstance(tag, str):
        raise TypeError(f"tag: got {tag!r}; it takes a string such as 'FA2.A1.L9'")
    tag = tag.strip().upper()
    if tag not in LINES:
        raise ValueError(unknown_tag(tag))
    algorithm, line = LINES[tag]
    project = PACKAGE.parent
    twins = project / "notebooks" / "text" if (project / "pyproject.toml").is_file() else None
    return Whereabouts(
        tag,
        algorithm,
        line,
        numpy=places(tag, PACKAGE / "reference", algorithm.numpy),
        triton=places(tag, PACKAGE / "kernels", triton_file(algorithm)),
        notebooks=places(tag, twins),
    )


def unknown_tag(tag: str) -> str:
    """What to say about a tag that no line has."""
    name = tag.rpartition(".L")[0]
    if name in ALGORITHMS:
        return f"tag: {tag} does not exist; {name} has lines 1 to {len(ALGORITHMS[name].lines)}"
    close = get_close_matches(tag, LINES, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else f"the algorithms are {', '.join(ALGORITHMS)}"
    return f"tag: {tag or 'an empty tag'} does not exist; {hint}"


def places(tag: str, folder: Path | None, first: str | None = None) -> tuple[Place, ...]:
    """Every line in a folder's Python files that carries the tag: those of the file `first`, then room by room."""
    if folder is None or not folder.is_dir():
        return ()
    found = [
        Place(path.relative_to(PACKAGE.parent).as_posix(), number, text)
        for path in folder.rglob("*.py")
        for tags, number, text in tagged_lines(path.read_text(encoding="utf-8"))
        if tag in tags
    ]
    return tuple(sorted(found, key=lambda place: (place.file != first, room(place.file), place.file, place.number)))


def room(file: str) -> int:
    """The place of a file's room in the order of the rooms; files of no room come last."""
    return next((n for n, name in enumerate(ROOMS) if f"/{name}/" in file), len(ROOMS))


def tagged_lines(source: str) -> Iterator[tuple[list[str], int, str]]:
    """(tags, number, text) of each tagged line; a comment of its own tags the next line of code."""
    waiting: list[str] = []
    for number, text in enumerate(source.splitlines(), start=1):
        comment = TAG_COMMENT.search(text)
        tags = TAG.findall(comment[1]) if comment else []
        if text.lstrip().startswith("#") or not text.strip():
            waiting += tags
            continue
        if waiting + tags:
            yield waiting + tags, number, text.strip()
        waiting = []


# The words -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """A symbol or a word: what it means in English and Chinese, where it is explained, its shape, where it lives."""

    name: str
    english: str
    chinese: str
    explained: str  # a chapter, as "02", or a rung of the ladder, as "rung 16"; empty: not in the book
    shape: str = ""
    lives: str = ""


def symbol(name: str, explained: str, shape: str, lives: str, english: str, chinese: str) -> Term:
    return Term(name, english, chinese, explained, shape, lives)


TERMS = (
    # Symbols
    symbol("Q", "00", "(N_q, d)", "HBM; a block q_i on chip", "queries: what each row is looking for", "查询"),
    symbol("K", "00", "(N_k, d)", "HBM; a block k_j on chip", "keys: what each position offers to be found by", "键"),
    symbol("V", "00", "(N_k, d)", "HBM; a block v_j on chip", "values: what each position hands over", "值"),
    symbol("S", "00", "(N_q, N_k)", "one tile s_ij on chip, never whole", "scores, τ Q Kᵀ", "注意力分数"),
    symbol(
        "P",
        "00",
        "(N_q, N_k)",
        "one tile p_ij on chip, never whole",
        "probabilities, softmax of S by rows",
        "注意力权重",
    ),
    symbol("O", "00", "(N_q, d)", "HBM; accumulator o_i on chip", "output, P V", "输出"),
    symbol(
        "dO", "01", "(N_q, d)", "HBM", "gradient of the loss with respect to O; it comes from outside", "输出的梯度"
    ),
    symbol("dQ", "01", "(N_q, d)", "HBM", "gradient of the loss with respect to Q", "查询的梯度"),
    symbol(
        "dK", "01", "(N_k, d)", "HBM; accumulator dk_j on chip", "gradient of the loss with respect to K", "键的梯度"
    ),
    symbol(
        "dV", "01", "(N_k, d)", "HBM; accumulator dv_j on chip", "gradient of the loss with respect to V", "值的梯度"
    ),
    symbol(
        "dS", "01", "(N_q, N_k)", "one tile ds_ij on chip", "gradient with respect to S: P ∘ (dP − D)", "分数的梯度"
    ),
    symbol("dP", "01", "(N_q, N_k)", "one tile dp_ij on chip", "gradient with respect to P: dO Vᵀ", "权重的梯度"),
    symbol(
        "D",
        "01",
        "(N_q,)",
        "HBM",
        "rowsum(dO ∘ O) = rowsum(P ∘ dP): what softmax takes off every dP of a row",
        "行内积",
    ),
    symbol("L", "01", "(N_q,)", "HBM", "natural logarithm of rowsum(exp(S)); P = exp(S − L)", "对数求和指数"),
    symbol("m", "02", "(N_q,)", "registers (FA1: HBM too)", "largest score of a row so far", "行最大值"),
    symbol("l", "02", "(N_q,)", "registers (FA1: HBM too)", "rowsum(exp(S − m)) so far; the papers' ℓ", "指数和"),
    symbol("tau", "01", "number", "argument", "scale of the scores, usually 1 / √d; the papers' τ", "缩放系数"),
    symbol("alpha", "02", "(B_r,)", "registers", "exp(m_old − m_new): what old sums are multiplied by", "缩放因子"),
    symbol("B_r", "03", "number", "compile time", "rows of a tile; BLOCK_M in other kernels", "行块大小"),
    symbol("B_c", "03", "number", "compile time", "columns of a tile; BLOCK_N in other kernels", "列块大小"),
    symbol("T_r", "03", "number", "", "row blocks: ⌈N_q / B_r⌉", "行块数"),
    symbol("T_c", "03", "number", "", "column blocks: ⌈N_k / B_c⌉", "列块数"),
    symbol("M", "03", "number", "", "elements that fit in on-chip memory", "片上存储容量"),
    symbol("N", "00", "number", "", "sequence length; N_q queries and N_k keys where they differ", "序列长度"),
    symbol("d", "00", "number", "", "head dimension: the length of a query, a key, a value", "头维度"),
    # The map of a GPU
    Term("HBM", "high-bandwidth memory: the GPU's main memory, large and far away", "高带宽显存", "00"),
    Term(
        "DRAM",
        "the kind of memory that HBM is made of; what crosses to it can be counted by the GPU",
        "动态随机存储器",
        "00",
    ),
    Term("L2", "a cache between HBM and all SMs: it keeps what came from HBM lately", "二级缓存", "00"),
    Term("SRAM", "fast memory on the chip; in these papers the shared memory", "片上静态存储", "00"),
    Term(
        "shared memory",
        "the part of an SM's SRAM that a thread block's warps read and write together",
        "共享内存",
        "00",
    ),
    Term("register", "storage of one thread, the fastest there is", "寄存器", "00"),
    Term("register spill", "values that no longer fit in registers go to slow memory and back", "寄存器溢出", "A"),
    Term("on chip", "in the registers or the shared memory of an SM, or on the way between them", "片上", "00"),
    Term("SM", "streaming multiprocessor: one of the chip's processors; runs thread blocks", "流式多处理器", "00"),
    Term("tensor core", "the unit of an SM that multiplies small matrices", "张量核心", "00"),
    Term("FP32 unit", "a unit of an SM that adds and multiplies single numbers of 32 bits", "单精度运算单元", "00"),
    Term(
        "special function unit",
        "a unit of an SM that takes exponentials, logarithms and reciprocals",
        "特殊函数单元",
        "00",
    ),
    Term("kernel", "a function that runs on the GPU, many thread blocks at once", "核函数", "00"),
    Term("grid", "all thread blocks of one launch", "网格", "06"),
    Term("thread block", "threads that run on one SM and share its memory; one worker of figure 2", "线程块", "00"),
    Term(
        "program", "Triton's word for a thread block: one run of the kernel, with a number of its own", "程序实例", "08"
    ),
    Term("warp", "32 threads that issue instructions together; a thread block has several", "线程束", "00"),
    Term("warpgroup", "four warps in a row that start matrix products together, from Hopper on", "线程束组", "12"),
    Term("thread", "one lane of a warp", "线程", "00"),
    Term("lane", "the number of a thread in its warp, 0 to 31", "线程束通道", "A"),
    Term("wave", "as many thread blocks as the chip runs at once; the last one is often not full", "波次", "06"),
    Term("wave quantization", "time lost because the last wave is not full", "波次量化", "06"),
    Term("barrier", "a point where a block's warps wait for each other", "同步屏障", "07"),
    Term("atomic add", "read, add and write as one step that no other thread can interrupt", "原子加", "05"),
    Term("race", "two workers read the same old value; one of their updates is lost", "数据竞争", "05"),
    Term(
        "bank conflict",
        "threads of a warp that want different words of one bank of shared memory, one after the other",
        "存储体冲突",
        "A",
    ),
    Term(
        "swizzle", "to store each row of a tile in another order, so that columns meet different banks", "地址交错", "A"
    ),
    # Quantities
    Term("FLOP", "one floating-point operation", "浮点运算", "00"),
    Term("matmul", "matrix product; a FLOP is one addition or one multiplication in it", "矩阵乘法", "00"),
    Term("extra memory", "what an algorithm must hold beyond its inputs and outputs", "额外显存", "00"),
    Term("request", "an element that the chip asks for, wherever it is found; what the meter counts", "访存请求", "00"),
    Term("arithmetic intensity", "FLOPs done for each byte that moves", "计算强度", "01"),
    Term("IO complexity", "elements moved between HBM and the chip, as a function of N, d and M", "访存复杂度", "03"),
    # The workshop
    Term("launch option", "what a launch asks of the compiler: warps, stages, registers", "启动选项", "11"),
    Term("PTX", "NVIDIA's portable assembly language, which Triton writes", "并行线程执行汇编", "11"),
    Term("SASS", "the machine code that an NVIDIA GPU executes", "机器汇编", "11"),
    Term("occupancy", "the share of an SM's places for warps that are taken", "占用率", "11"),
    Term("roofline", "what memory and arithmetic units allow at most, by FLOPs per byte", "屋顶线模型", "11"),
    Term("stall", "a warp cannot issue its next instruction; the hardware counts for which reason", "停顿", "11"),
    Term("deadlock", "a closed chain of workers, each of which waits for the next", "死锁", "11"),
    Term("autotuner", "a program that times many launches and keeps the fastest", "自动调优器", "11"),
    Term("throttling", "the GPU lowers its clock because it draws much power or is hot", "降频", "11"),
    # The method
    Term("head", "one of several attentions computed side by side", "注意力头", "00"),
    Term("softmax", "exponentials of a row, divided by their sum", "归一化指数函数", "00"),
    Term("standard attention", "S, P and O one after the other, with S and P in HBM", "标准注意力", "00"),
    Term(
        "safe softmax", "softmax with the row's maximum subtracted, so that exp cannot overflow", "安全 softmax", "01"
    ),
    Term(
        "online softmax", "softmax of a row that arrives in pieces, by keeping m, l and rescaling", "在线 softmax", "02"
    ),
    Term("rescale", "multiply what was summed under an old maximum by alpha", "重新缩放", "02"),
    Term("logsumexp", "log of a sum of exponentials, computed as m + log l", "对数求和指数", "01"),
    Term("merge", "join two softmax states of disjoint keys: blocks, warps, splits or GPUs", "合并", "02"),
    Term("tile", "the B_r × B_c patch of S where row block i meets column block j", "分块", "00"),
    Term("row block", "B_r queries, with their rows of O", "行块", "03"),
    Term("column block", "B_c keys, with their values", "列块", "03"),
    Term("recompute", "make S and P again in the backward pass instead of storing them", "重计算", "05"),
    Term("causal mask", "a query sees no later key; aligned to the bottom right corner of S", "因果掩码", "04"),
    Term("padding", "keys added to make lengths equal; nobody may see them", "填充", ""),
    Term("dropout", "each probability is set to 0 with probability p, the others divided by 1 − p", "随机失活", "03"),
    Term("multi-query attention", "all query heads share one head of keys and values", "多查询注意力", "05"),
    Term(
        "grouped-query attention",
        "each group of query heads shares one head of keys and values",
        "分组查询注意力",
        "05",
    ),
    Term("KV cache", "keys and values kept from earlier tokens", "键值缓存", "05"),
    Term("decode", "making one token at a time: one query row, many keys", "逐词解码", "14"),
    Term("split-K", "the keys are divided among workers, which must merge their answers", "按键切分", "07"),
    Term("split-Q", "the queries are divided among workers, which need nothing from each other", "按查询切分", "07"),
    # The ladder
    Term("base 2", "2ˣ instead of eˣ: scale and log₂e are one factor, and the hardware has 2ˣ", "以二为底", "rung 05"),
    Term("pipelining", "the next tiles are being copied while this one is computed", "软件流水", "rung 08"),
    Term("stage", "one of the places of a ring or of a pipeline; it has room for one tile", "流水级", "12"),
    Term("sweep", "to measure many sizes of tiles, warps and stages, and keep the fastest", "参数扫描", "rung 09"),
    Term(
        "bulk copy",
        "a copy of a whole tile that one thread starts and the copy engine carries out",
        "批量拷贝",
        "rung 11",
    ),
    Term("TMA", "tensor memory accelerator: Hopper's copy engine", "张量内存加速器", "12"),
    Term("descriptor", "where a tensor lies and how, written down once for the copy engine", "张量描述符", "12"),
    Term("wgmma", "Hopper's instruction for the matrix product of a warpgroup", "线程束组矩阵乘", "12"),
    Term("ring", "stages in shared memory that are filled and emptied in turn", "环形缓冲区", "12"),
    Term("producer", "the warp that copies tiles ahead", "生产者", "12"),
    Term("consumer", "a warpgroup that computes with the tiles that the producer copied", "消费者", "12"),
    Term("overlap", "two units work at the same time", "计算重叠", "rung 15"),
    Term(
        "ping-pong",
        "two consumers take turns: one computes products while the other is at its softmax",
        "乒乓调度",
        "12",
    ),
    Term("persistent", "of a program: it stays on its SM and takes one row block after the other", "常驻", "rung 16"),
    Term("tile scheduler", "what tells a persistent program which row block comes next", "分块调度器", "rung 16"),
    Term("mailbox", "a place in shared memory where one warp leaves numbers for others", "信箱", "12"),
    Term("lagging", "of m: it follows the row's maximum only when a score lies far above it", "滞后最大值", "rung 19"),
    Term("split-KV", "the keys of one row block are divided among programs, which merge at the end", "键值切分", "14"),
    Term("stream-K", "split-KV in equal shares: all tiles laid end to end and cut into equal pieces", "等份切分", "14"),
    Term(
        "ring attention",
        "keys and values travel around a ring of GPUs, and each GPU keeps its queries",
        "环形注意力",
        "15",
    ),
)

GLOSSARY: dict[str, Term] = {term.name: term for term in TERMS}
