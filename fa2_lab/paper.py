"""The papers' algorithms as data, and `where`, which finds the lines of code that compute a line of a paper.

FA1 is "FlashAttention" (Dao, Fu, Ermon, Rudra, Ré 2022), and FA2 is "FlashAttention-2" (Dao 2023). The lines are in our
own words but keep the papers' line numbers. If a printed line contains a mistake, this file corrects it and names the
erratum. The comment `# FA2.A1.L9` marks the code that computes line 9 of FA2's Algorithm 1.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from textwrap import dedent, fill

TAG = re.compile(r"\bFA\d+\.A\d+\.L\d+\b")
# A tag begins a comment or follows the comment's text after two spaces, as in `# (B_r, d)  FA2.A1.L4`.
TAG_COMMENT = re.compile(r"#\s*(?:[^#]*\s{2})?(FA\d+\.A\d+\.L\d+(?:[ ,]+FA\d+\.A\d+\.L\d+)*)")
PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Line:
    """One numbered line of an algorithm.

    `depth` is the number of enclosing loops. `computes` is False for "end for".
    """

    number: int
    depth: int
    text: str
    errata: tuple[str, ...] = ()
    computes: bool = True


@dataclass(frozen=True)
class Algorithm:
    """An algorithm from one of the papers, with its lines and the files that implement it."""

    tag: str  # FA2.A1: paper FA2, Algorithm 1
    title: str
    source: str
    needs: str
    lines: tuple[Line, ...]
    numpy: str  # the NumPy file whose lines are shown first
    triton: tuple[str, ...] = ()  # Triton files, of which the first that exists is shown

    def tag_of(self, line: Line) -> str:
        return f"{self.tag}.L{line.number}"

    def __str__(self) -> str:
        rows = [f"{line.number:3}  {'    ' * line.depth}{line.text}" for line in self.lines]
        return "\n".join([f"{self.tag}  {self.title} ({self.source})", f"     needs: {self.needs}", *rows])


def steps(text: str) -> tuple[Line, ...]:
    """Parse an algorithm's text into lines. Indentation marks loops, and brackets name errata."""
    found = []
    for number, line in enumerate(dedent(text).strip().splitlines(), 1):
        words, _, errata = line.rstrip("]").partition("  [")
        depth = (len(words) - len(words.lstrip())) // 4
        names = tuple(errata.split(", ")) if errata else ()
        found.append(Line(number, depth, " ".join(words.split()), names, computes=words.strip() != "end for"))
    return tuple(found)


CUT_QKV = "Cut Q into T_r = ⌈N / B_r⌉ blocks of B_r rows; cut K and V into T_c = ⌈N / B_c⌉ blocks of B_c rows."
FITTING = "Choose B_c near M / 4d and B_r = min(B_c, d), a little smaller, so that the score tile fits in M too."

FA1_A2 = Algorithm(
    tag="FA1.A2",
    title="FlashAttention, forward",
    source="FA1, appendix B.3",
    needs="Q, K, V (N × d) in HBM; on-chip memory of M elements; scale τ; a mask; dropout probability p",
    lines=steps(f"""
        Set up the random generator and keep its state R in HBM.  [fa1-dropout-order]
        {FITTING}  [fa1-block-size]
        In HBM, start from O = 0 (N × d), l = 0 (N) and m = −∞ (N).
        {CUT_QKV}
        Cut O, l and m into T_r blocks of B_r rows as well.
        for each column block j = 1 … T_c:
            Load k_j and v_j.
            for each row block i = 1 … T_r:
                Load q_i, o_i, l_i and m_i: the row block's state comes back from HBM.
                Score the tile: s_ij = τ q_i k_jᵀ (B_r × B_c).
                Put −∞ wherever the mask hides an entry of s_ij.
                Softmax statistics of this tile alone: m̃ = rowmax(s_ij), p̃ = exp(s_ij − m̃), l̃ = \
                  rowsum(p̃).  [fa1-empty-rows]
                Join them to the row's: m_new = max(m_i, m̃); l_new = e^(m_i − m_new) l_i + e^(m̃ − m_new) l̃.
                Drop entries of p̃ with probability p and divide the kept ones by 1 − p.
                Store o_i ← (l_i e^(m_i − m_new) o_i + e^(m̃ − m_new) p̃ v_j) / l_new, row by row: a finished answer \
                  for the keys seen so far.
                Store l_i ← l_new and m_i ← m_new.
            end for
        end for
        Return O, l and m; the caller keeps R.
    """),
    numpy="fa2_lab/reference/fa1.py",
    triton=("fa2_lab/kernels/ladder/r01_fa1.py",),
)

FA1_A3 = Algorithm(
    tag="FA1.A3",
    title="standard attention, backward",
    source="FA1, appendix B.4",
    needs="Q, K, V, dO (N × d) and P (N × N) in HBM",
    lines=steps("""
        Load P and dO, compute dV = Pᵀ dO, store dV.
        Load dO and V, compute dP = dO Vᵀ (N × N), store dP.
        Load P and dP, compute dS = P ∘ (dP − rowsum(P ∘ dP)) (N × N), store dS.
        Load dS and K, compute dQ = τ dS K, store dQ; τ is the scale of S.
        Load dS and Q, compute dK = τ dSᵀ Q, store dK; τ is the scale of S.
        Return dQ, dK and dV.
    """),
    numpy="fa2_lab/reference/naive.py",
)

FA1_A4 = Algorithm(
    tag="FA1.A4",
    title="FlashAttention, backward",
    source="FA1, appendix B.4",
    needs="Q, K, V, O, dO (N × d) and l, m (N) in HBM; M, τ, the mask, p, and the generator's state R",
    lines=steps(f"""
        Put the random generator back into the state R that the forward pass kept.  [fa1-dropout-order]
        {FITTING}  [fa1-block-size]
        {CUT_QKV}
        Cut O, dO, l and m into T_r blocks of B_r rows as well.
        In HBM, start from dQ = 0 in T_r blocks, and dK = 0 and dV = 0 in T_c blocks.
        for each column block j = 1 … T_c:
            Load k_j and v_j.
            On chip, start dk_j = 0 and dv_j = 0 (B_c × d).
            for each row block i = 1 … T_r:
                Load q_i, o_i, do_i, dq_i, l_i and m_i.
                Score the tile again: s_ij = τ q_i k_jᵀ (B_r × B_c).
                Put −∞ wherever the mask hides an entry of s_ij.
                The probabilities again, now final: p_ij = exp(s_ij − m_i) / l_i.  [fa1-empty-rows]
                The dropout mask again: z_ij is 1 / (1 − p) where an entry was kept and 0 where it was dropped.
                p_dropped = p_ij ∘ z_ij.
                dv_j ← dv_j + p_droppedᵀ do_i (B_c × d).
                dp_dropped = do_i v_jᵀ (B_r × B_c).
                dp_ij = dp_dropped ∘ z_ij.
                D_i = rowsum(do_i ∘ o_i): one number for each row, the same for every j.
                ds_ij = p_ij ∘ (dp_ij − D_i).
                Store dq_i ← dq_i + τ ds_ij k_j.
                dk_j ← dk_j + τ ds_ijᵀ q_i (B_c × d).
            end for
            Store dk_j and dv_j: column block j is finished.
        end for
        Return dQ, dK and dV.
    """),
    numpy="fa2_lab/reference/fa1.py",
)

FA2_A1 = Algorithm(
    tag="FA2.A1",
    title="FlashAttention-2, forward",
    source="FA2, section 3.1.1",
    needs="Q, K, V (N × d) in HBM; block sizes B_r and B_c",
    lines=steps(f"""
        {CUT_QKV}
        Cut O (N × d) and L (N) into blocks 1 … T_r of B_r rows.  [fa2-block-index]
        for each row block i = 1 … T_r:
            Load q_i: it stays on chip while the keys stream past.
            On chip, start o_i = 0 (B_r × d), l_i = 0 and m_i = −∞ (B_r).
            for each column block j = 1 … T_c:
                Load k_j and v_j.
                Score the tile: s_ij = τ q_i k_jᵀ (B_r × B_c).  [fa2-scale]
                m_new = max(m_i, rowmax(s_ij)); p_ij = exp(s_ij − m_new); l_new = e^(m_i − m_new) l_i + \
                  rowsum(p_ij).  [fa2-P-tilde, fa1-empty-rows]
                o_i ← e^(m_i − m_new) o_i + p_ij v_j, not divided by anything; then l_i ← l_new and m_i ← \
                  m_new.  [fa2-tweak1, fa2-inverse]
            end for
            Divide once: o_i ← o_i / l_i, row by row.
            L_i = m_i + log l_i: the only statistic that the backward pass needs.
            Store o_i as block i of O.
            Store L_i as block i of L.
        end for
        Return O and L.
    """),
    numpy="fa2_lab/reference/fa2.py",
    triton=("fa2_lab/kernels/ladder/r11_diagonal_first.py", "fa2_lab/kernels/portable/forward.py"),
)

FA2_A2 = Algorithm(
    tag="FA2.A2",
    title="FlashAttention-2, backward",
    source="FA2, section 3.1.2",
    needs="Q, K, V, O, dO (N × d) and L (N) in HBM; block sizes B_r and B_c",
    lines=steps(f"""
        {CUT_QKV}
        Cut O, dO and L into T_r blocks of B_r rows as well.
        In HBM, start dQ = 0 in T_r blocks; cut dK and dV into T_c blocks.
        D = rowsum(dO ∘ O) (N), stored in HBM and cut into T_r blocks.  [fa2-D-shape]
        for each column block j = 1 … T_c:
            Load k_j and v_j.
            On chip, start dk_j = 0 and dv_j = 0 (B_c × d).
            for each row block i = 1 … T_r:
                Load q_i, do_i, L_i and D_i.  [fa2-loads]
                Score the tile again: s_ij = τ q_i k_jᵀ (B_r × B_c).  [fa2-scale]
                The final probabilities in one step: p_ij = exp(s_ij − L_i).  [fa2-S-index, fa1-L]
                dv_j ← dv_j + p_ijᵀ do_i (B_c × d).
                dp_ij = do_i v_jᵀ (B_r × B_c).
                ds_ij = p_ij ∘ (dp_ij − D_i).
                In HBM, dQ_i ← dQ_i + τ ds_ij k_j: atomically, or in another pass, where column blocks run in \
                  parallel.  [fa2-dQ-race, fa2-scale]
                dk_j ← dk_j + τ ds_ijᵀ q_i (B_c × d).  [fa2-scale]
            end for
            Store dk_j and dv_j: column block j is finished.
        end for
        Return dQ, dK and dV.
    """),
    numpy="fa2_lab/reference/fa2.py",
    triton=("fa2_lab/kernels/ladder/b00_atomics.py", "fa2_lab/kernels/portable/backward.py"),
)

ALGORITHMS: dict[str, Algorithm] = {a.tag: a for a in (FA1_A2, FA1_A3, FA1_A4, FA2_A1, FA2_A2)}
LINES: dict[str, tuple[Algorithm, Line]] = {a.tag_of(n): (a, n) for a in ALGORITHMS.values() for n in a.lines}


# Finding the lines of code that carry a tag ---------------------------------------------------------------

# The reason why an algorithm, or one of its lines, has no counterpart in Triton.
NO_TRITON = {
    "FA1.A3": "the backward kernels never need P in HBM, so none of them is standard attention's",
    "FA1.A2.L1": "the ladder's kernels have no dropout",
    "FA1.A2.L2": "the ladder's kernels take tiles of 64 × 64",
    "FA1.A2.L4": "a kernel cuts nothing: a block is an address and a mask",
    "FA1.A2.L5": "a kernel cuts nothing: a block is an address and a mask",
    "FA1.A2.L14": "the ladder's kernels have no dropout",
}
# No kernel runs FA1's backward pass, but most of its lines also occur in FA2's backward pass. For example, line 11 of
# FA1.A4 is line 10 of FA2.A2.
LINES_OF_FA1 = (3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 16, 17, 19, 20, 21, 22, 24, 26)
IN_FA2 = dict(zip(LINES_OF_FA1, (1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 4, 14, 15, 16, 18, 20), strict=True))
NO_TRITON |= {
    f"FA1.A4.L{n}": f"the kernels run FA2's backward pass; there it is FA2.A2.L{k}" for n, k in IN_FA2.items()
}
NO_TRITON |= {
    f"FA1.A4.L{n}": "FA2's backward pass, which the kernels run, has no such line" for n in (1, 2, 12, 14, 15, 18)
}

# {figure: {algorithm: numbers of the lines shown in the figure}}
PICTURES: dict[str, dict[str, tuple[int, ...]]] = {
    "visiting_order": {"FA1.A2": (3, 4, 5, 6, 7, 8, 9, 16), "FA2.A1": (1, 2, 4, 6, 7, 14, 15)},
    "worker_tiles": {"FA1.A4": (3, 4, 5, 6, 9, 24), "FA2.A1": (3,), "FA2.A2": (1, 2, 3, 5, 8, 15, 18)},
    "block_budget": {"FA1.A2": (2,), "FA1.A4": (2,)},
    "causal_tiles": {"FA1.A2": (11,), "FA1.A4": (12,)},
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

FOLDERS = ("reference", "ladder", "portable", "decode", "hopper")  # where() lists code in the order of these folders
MAX_LINES = 10  # the largest number of lines printed for a Whereabouts


@dataclass(frozen=True)
class Place:
    """One line of code, with its file, line number and text."""

    file: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}\n    {self.text}"


@dataclass(frozen=True)
class Whereabouts:
    """A line of a paper, and all lines of code that compute it, in the order in which to read them."""

    tag: str
    algorithm: Algorithm
    line: Line
    numpy: tuple[Place, ...]
    triton: tuple[Place, ...]
    notebooks: tuple[Place, ...]

    @property
    def picture(self) -> str | None:
        """The name of the figure that shows this line of the paper, or None if there is none."""
        return PICTURE_OF.get(self.tag)

    @property
    def first_numpy(self) -> tuple[Place, ...]:
        """The lines of the algorithm's main NumPy file that implement this line of the paper."""
        return tuple(place for place in self.numpy if place.file == self.algorithm.numpy)

    @property
    def first_triton(self) -> tuple[Place, ...]:
        """The lines of the algorithm's main Triton file that implement this line of the paper."""
        return tuple(place for place in self.triton if place.file == triton_file(self.algorithm))

    @property
    def no_triton(self) -> str:
        """The reason why the algorithm's main Triton file has no counterpart to this line, or "" if it has one."""
        reason = NO_TRITON.get(self.tag) or NO_TRITON.get(self.algorithm.tag, "no kernel carries this tag yet")
        return "" if self.first_triton else reason

    def words(self) -> list[str]:
        """Return the algorithm's title and the paper's line in our own words, as a list of lines of text."""
        text = fill(self.line.text, 98, initial_indent="  ", subsequent_indent="  ")
        return [f"{self.tag}: {self.algorithm.title} ({self.algorithm.source})", *text.splitlines()]

    def __str__(self) -> str:
        """Return at most ten lines of text: the paper's line, the code to read first, and the path of its figure."""
        if not self.line.computes:
            return "\n".join([*self.words(), "nothing to compute here"])
        ends = [f"picture  figures/{self.picture}.svg"] if self.picture else []
        room = MAX_LINES - len(self.words()) - len(ends) - 1  # lines left for code; the last counts the omitted ones
        numpy, triton = self.first_numpy[: (room + 1) // 2], self.first_triton[: room // 2]
        left = len(self.numpy + self.triton + self.notebooks) - len(numpy + triton)
        more = [f"{left} place{'s' * (left > 1)}: fa2-lab where {self.tag} --all"] if left else []
        more += [f"fa2-lab errata {name}" for name in self.line.errata]
        ends += [f"more     {'; '.join(more)}"] if more else []
        rows = [*titled("NumPy", numpy, "no line of code carries this tag yet")]
        return "\n".join([*self.words(), *rows, *titled("Triton", triton, f"none: {self.no_triton}"), *ends])

    def full(self) -> str:
        """Return the paper's line, its figure, and all lines of code that compute it, including those in notebooks."""
        parts = self.words() + [f"  A known slip here: fa2-lab errata {name}" for name in self.line.errata]
        for title, places in (("NumPy", self.numpy), ("Triton", self.triton), ("notebook", self.notebooks)):
            parts += [f"{title:9}{place}" for place in places]
        if not self.line.computes:
            parts.append("nothing to compute here")
        elif self.no_triton:
            parts.append(f"Triton   none: {self.no_triton}")
        return "\n".join([*parts, f"picture  figures/{self.picture}.svg"] if self.picture else parts)


def titled(title: str, places: tuple[Place, ...], none: str) -> list[str]:
    """Return `title` followed by these lines of code without comments, or by the text `none` if there are no lines."""
    rows = [f"{place.file}:{place.number}  {place.text.split('  #')[0]}" for place in places] or [none]
    return [f"{title:9}{rows[0]}", *(" " * 9 + row for row in rows[1:])]


def triton_file(algorithm: Algorithm) -> str | None:
    """Return an algorithm's main Triton file, or None if there is none or it is not installed."""
    return next((file for file in algorithm.triton if (PACKAGE.parent / file).is_file()), None)


def where(tag: str) -> Whereabouts:
    """Look up a line of a paper and return a Whereabouts with the lines of code that compute it.

    `print(where("FA2.A1.L9"))` shows the lines of code to read first. The method full() returns all of them.
    """
    if not isinstance(tag, str):
        raise TypeError(f"tag: got {tag!r}; it takes a string such as 'FA2.A1.L9'")
    tag = tag.strip().upper()
    if tag not in LINES:
        raise ValueError(unknown_tag(tag))
    algorithm, line = LINES[tag]
    project = PACKAGE.parent
    texts = project / "notebooks" / "text" if (project / "pyproject.toml").is_file() else None
    return Whereabouts(
        tag,
        algorithm,
        line,
        numpy=places(tag, PACKAGE / "reference", algorithm.numpy),
        triton=places(tag, PACKAGE / "kernels", triton_file(algorithm)),
        notebooks=places(tag, texts),
    )


def unknown_tag(tag: str) -> str:
    """Return the error message for a tag that matches no line of any paper."""
    name = tag.rpartition(".L")[0]
    if name in ALGORITHMS:
        return f"tag: {tag} does not exist; {name} has lines 1 to {len(ALGORITHMS[name].lines)}"
    close = get_close_matches(tag, LINES, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else f"the algorithms are {', '.join(ALGORITHMS)}"
    return f"tag: {tag or 'an empty tag'} does not exist; {hint}"


def places(tag: str, folder: Path | None, first: str | None = None) -> tuple[Place, ...]:
    """Return every line of code in `folder` that carries the tag, beginning with the lines in the file `first`."""
    if folder is None or not folder.is_dir():
        return ()
    found = [
        Place(path.relative_to(PACKAGE.parent).as_posix(), number, text)
        for path in folder.rglob("*.py")
        for tags, number, text in tagged_lines(path.read_text(encoding="utf-8"))
        if tag in tags
    ]
    return tuple(
        sorted(found, key=lambda place: (place.file != first, folder_of(place.file), place.file, place.number))
    )


def folder_of(file: str) -> int:
    """Return the sort key of a file: the index of its folder in FOLDERS. Files in other folders come last."""
    return next((n for n, name in enumerate(FOLDERS) if f"/{name}/" in file), len(FOLDERS))


@cache
def tagged_lines(source: str) -> list[tuple[list[str], int, str]]:
    """Return (tags, number, text) of each tagged line of code. A comment on its own line tags the next line of code."""
    found, waiting = [], []
    for number, text in enumerate(source.splitlines(), start=1):
        comment = TAG_COMMENT.search(text)
        tags = TAG.findall(comment[1]) if comment else []
        if text.lstrip().startswith("#") or not text.strip():
            waiting += tags
            continue
        if waiting + tags:
            found.append((waiting + tags, number, text.strip()))
        waiting = []
    return found
