"""paper.py: the algorithms are complete, and `where` finds what carries a tag."""

import ast
import re
from dataclasses import replace
from functools import cache

import numpy as np
import paper_words
import pytest
import tag_shapes

from fa2_lab import paper
from fa2_lab.paper import ALGORITHMS, LINES, tagged_lines, where
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.reference.dropout import Dropout
from fa2_lab.tiles import NO_MASK, Mask
from fa2_lab.trace import Trace

LINE_COUNTS = {"FA1.A2": 19, "FA1.A3": 6, "FA1.A4": 26, "FA2.A1": 17, "FA2.A2": 20}
LOOP_ENDS = {"FA1.A2": {17, 18}, "FA1.A4": {23, 25}, "FA2.A1": {11, 16}, "FA2.A2": {17, 19}}


@pytest.mark.parametrize("tag", LINE_COUNTS)
def test_every_printed_line_is_there_in_order(tag):
    assert [line.number for line in ALGORITHMS[tag].lines] == list(range(1, LINE_COUNTS[tag] + 1))
    assert {line.number for line in ALGORITHMS[tag].lines if not line.computes} == LOOP_ENDS.get(tag, set())


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_depth_follows_the_loops(algorithm):
    depth = 0
    for line in algorithm.lines:
        depth -= line.text == "end for"
        assert line.depth == depth, f"{algorithm.tag_of(line)} is at depth {line.depth}, its loops say {depth}"
        depth += line.text.startswith("for ")
    assert depth == 0


# What a tagged line assigns besides what its words name: helpers that NumPy needs, or that shorten a formula.
HELPERS = {
    "FA1.A2.L1": {"drop"},
    "FA1.A2.L2": {"B_r", "B_c"},
    "FA1.A2.L4": {"tiling"},
    "FA1.A2.L5": {"tiling"},
    "FA1.A2.L11": {"s_ij"},
    "FA1.A2.L13": {"alpha", "beta"},
    "FA1.A2.L14": {"p_ij"},
    "FA1.A2.L15": {"r", "o_i"},
    "FA1.A2.L16": {"l_i", "m_i"},
    "FA1.A4.L1": {"z"},
    "FA1.A4.L2": {"B_r", "B_c"},
    "FA1.A4.L3": {"tiling"},
    "FA1.A4.L4": {"tiling"},
    "FA1.A4.L12": {"s_ij"},
    "FA1.A4.L14": {"z_ij"},
    "FA2.A1.L1": {"tiling"},
    "FA2.A1.L2": {"tiling"},
    "FA2.A1.L9": {"m_ij", "l_ij", "alpha"},
    "FA2.A2.L1": {"tiling"},
    "FA2.A2.L2": {"tiling"},
    "FA2.A2.L13": {"dp_dropped"},
    "FA2.A2.L15": {"dq_i"},
}


@cache
def run_of(algorithm: str, masked: bool) -> paper_words.Run:
    """One run of an algorithm on ragged blocks; masked, a row and a tile's rows see nothing. FA1 drops as well."""
    draw = np.random.default_rng(0).standard_normal
    Q, K, V, dO = (draw((n, 3)) for n in (7, 10, 10, 7))
    allowed = np.random.default_rng(1).random((7, 10)) < 0.6
    allowed[2], allowed[0, :4] = False, False
    dropout = Dropout(0.3 if algorithm in ("FA1.A2", "FA1.A4") else 0.0, seed=5)
    options = dict(mask=Mask(allowed=allowed) if masked else NO_MASK, dropout=dropout)
    if algorithm == "FA1.A3":
        _, P = naive.forward(Q, K, V, **options)
        return paper_words.record(naive.backward, Trace(), Q, K, V, P, dO)
    options |= dict(M=46) if algorithm.startswith("FA1") else dict(B_r=3, B_c=4)
    stage = fa1 if algorithm.startswith("FA1") else fa2
    if algorithm in ("FA1.A2", "FA2.A1"):
        return paper_words.record(stage.forward, Trace(), Q, K, V, **options)
    O, *saved = stage.forward(Q, K, V, **options)
    return paper_words.record(stage.backward, Trace(), Q, K, V, O, *saved, dO, **options)


@pytest.mark.parametrize("tag", [tag for tag, (_, line) in LINES.items() if line.computes])
def test_a_line_in_our_words_is_what_its_tagged_code_computes(tag):
    """The words' formulas, computed from the variables before the tagged lines, give the variables after them."""
    algorithm, line = LINES[tag]
    for masked in (False, True)[: 1 if line.text.startswith("for each") else 2]:
        paper_words.check_line(tag, line.text, run_of(algorithm.tag, masked), HELPERS.get(tag, set()))


@pytest.mark.parametrize(
    ("tag", "right", "wrong"),
    [
        ("FA2.A1.L8", "τ q_i", "q_i"),
        ("FA2.A1.L9", "e^(m_i − m_new) l_i", "l_i"),
        ("FA2.A1.L9", "max(m_i, rowmax(s_ij))", "rowmax(s_ij)"),
        ("FA2.A1.L10", "e^(m_i − m_new)", "e^(m_new − m_i)"),
        ("FA2.A1.L5", "B_r × d", "B_c × d"),
        ("FA2.A2.L14", "p_ij ∘ (dp_ij", "p_ij (dp_ij"),
        ("FA2.A2.L6", "k_j and v_j", "k_j"),
        ("FA2.A2.L9", "q_i, do_i, L_i", "q_i, o_i, do_i, L_i"),
        ("FA1.A2.L15", " / l_new", ""),
        ("FA1.A2.L16", "m_i ← m_new", "m_i ← m̃"),
        ("FA1.A3.L4", "τ dS K", "dS K"),
        ("FA1.A4.L14", "1 / (1 − p)", "1 / p"),
        ("FA1.A4.L24", "dk_j and dv_j", "dk_j"),
        ("FA2.A1.L1", "T_c = ⌈N / B_c⌉", "T_c = ⌈N / B_r⌉"),
        ("FA2.A1.L17", "O and L", "O"),
        ("FA2.A1.L6", "column block j", "row block j"),
    ],
)
def test_words_that_say_something_else_are_noticed(tag, right, wrong):
    algorithm, line = LINES[tag]
    text = line.text.replace(right, wrong)
    assert text != line.text
    with pytest.raises((AssertionError, ValueError)):
        paper_words.check_line(tag, text, run_of(algorithm.tag, True), HELPERS.get(tag, set()))


KERNELS = sorted((paper.PACKAGE / "kernels").rglob("*.py"))
TWINS = sorted((paper.PACKAGE.parent / "notebooks" / "text").rglob("*.py"))
REPEATED = {"D_kernel"}  # of the backward: before the loop it loads what line 9 loads


def reference_tags(text: str, algorithm: str) -> set[str]:
    """The tags that the same line of code has in the NumPy file that stands for the algorithm."""
    source = (paper.PACKAGE.parent / ALGORITHMS[algorithm].numpy).read_text(encoding="utf-8")
    same = [tags for tags, _, line in tagged_lines(source) if line.split("  #")[0] == text.split("  #")[0]]
    return {tag for tags in same for tag in tags if tag.startswith(algorithm + ".")}


@pytest.mark.parametrize("path", KERNELS + TWINS, ids=lambda path: path.stem)
def test_a_tag_stands_on_a_line_of_its_own_shape(path):
    """In kernels and notebooks: moved to a neighbouring line, or swapped with it, a tag meets another expression."""
    for tags, number, text in tagged_lines(path.read_text(encoding="utf-8")):
        for algorithm in {tag.rpartition(".")[0] for tag in tags}:
            got = {tag for tag in tags if tag.startswith(algorithm + ".")}
            want = tag_shapes.tags_for(text, algorithm) | reference_tags(text, algorithm)
            assert got == want, (
                f"{path.name}:{number} carries {sorted(got)}, its code is that of {sorted(want)}: {text}"
            )


@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS.values() if a.triton], ids=lambda a: a.tag)
def test_no_tag_is_missing_in_the_triton_file_that_stands_for_an_algorithm(algorithm):
    file = paper.triton_file(algorithm)
    source = (paper.PACKAGE.parent / file).read_text(encoding="utf-8")
    tags = {number: found for found, number, _ in tagged_lines(source)}
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for number in range(function.lineno, function.end_lineno + 1):
            text = source.splitlines()[number - 1]
            missing = tag_shapes.tags_for(text, algorithm.tag) - set(tags.get(number, []))
            assert function.name in REPEATED or not missing, f"{file}:{number} should carry {sorted(missing)}: {text}"


def test_every_tag_has_a_shape_and_neighbours_have_others():
    sources = [path.read_text(encoding="utf-8") for path in KERNELS + TWINS]
    with_code = {tag for source in sources for tags, _, _ in tagged_lines(source) for tag in tags}
    assert with_code <= set(tag_shapes.SHAPES)
    for text, tags in {
        "k_j, v_j = K[cols], V[cols]": {"FA2.A1.L7"},
        "l_i = l_i + tl.sum(p_ij, 1)": set(),  # the old sum is not rescaled
        "l_i = alpha * l_i + tl.sum(p_ij, 1)": {"FA2.A1.L9"},
        "o_i = alpha[:, None] * o_i + tl.dot(p_ij, v_j)": {"FA2.A1.L10"},
        "o_i = o_i + tl.dot(p_ij, v_j)": set(),
        "m_new = tl.maximum(m_i, m_ij)": set(),
        "o_i = o_i * l_i[:, None]": set(),
        "tl.store(O + at, o_i)": {"FA2.A1.L14"},
        "tl.store(L + row, L_i)": {"FA2.A1.L15"},
    }.items():
        assert tag_shapes.tags_for(text, "FA2.A1") == tags, text


def test_algorithms_have_their_papers_titles_and_places():
    assert {a.tag: (a.title, a.source, a.numpy.split("/")[-1]) for a in ALGORITHMS.values()} == {
        "FA1.A2": ("FlashAttention, forward", "FA1, appendix B.3", "fa1.py"),
        "FA1.A3": ("standard attention, backward", "FA1, appendix B.4", "naive.py"),
        "FA1.A4": ("FlashAttention, backward", "FA1, appendix B.4", "fa1.py"),
        "FA2.A1": ("FlashAttention-2, forward", "FA2, section 3.1.1", "fa2.py"),
        "FA2.A2": ("FlashAttention-2, backward", "FA2, section 3.1.2", "fa2.py"),
    }


def subject(text: str) -> str:
    """What a line is about: the first name that it assigns, or its first word."""
    assigned = paper_words.assignments(text)
    return assigned[0][0].split("_")[0].lower() if assigned else text.split()[0]


@pytest.mark.parametrize("line", paper.IN_FA2)
def test_a_line_of_fa1_s_backward_has_its_counterpart_in_fa2_s(line):
    one, two = LINES[f"FA1.A4.L{line}"][1].text, LINES[f"FA2.A2.L{paper.IN_FA2[line]}"][1].text
    assert subject(one) == subject(two), f"{one!r} is not {two!r}"


def test_an_algorithm_prints_all_its_lines():
    text = str(ALGORITHMS["FA2.A1"])
    assert "\n 10          o_i ←" in text and len(text.splitlines()) == 2 + 17


def test_where_finds_the_numpy_line():
    found = where("fa2.a1.l4 ")
    assert found.tag == "FA2.A1.L4" and found.line.text.startswith("Load q_i")
    assert [place.file for place in found.numpy] == ["fa2_lab/reference/fa2.py"]
    assert found.numpy[0].text.startswith("q_i = Q[rows]")
    number = found.numpy[0].number
    source = (paper.PACKAGE / "reference" / "fa2.py").read_text(encoding="utf-8").splitlines()
    assert source[number - 1].strip() == found.numpy[0].text


def test_where_in_a_checkout_of_all_three(tmp_path, monkeypatch):
    files = {
        "fa2_lab/reference/a.py": "x = 1  # FA2.A1.L9 FA2.A1.L10  (B_r,)\n",
        "fa2_lab/reference/fa2.py": "s = 0  # FA2.A1.L9\n",
        "fa2_lab/kernels/decode/a.py": "d = 1  # FA2.A1.L9\n",
        "fa2_lab/kernels/hopper/b.py": "# FA2.A1.L9\n# and why\n\ny = 2\nz = 3  # FA2.A1.L9\n",
        "fa2_lab/kernels/portable/forward.py": "p = 4  # FA2.A1.L9\n",
        "notebooks/text/04.py": "# %%\nm = 1  # FA2.A1.L9\n",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    monkeypatch.setattr(paper, "PACKAGE", tmp_path / "fa2_lab")
    assert where("FA2.A1.L9").notebooks == ()  # not a checkout yet
    (tmp_path / "pyproject.toml").touch()
    found = where("FA2.A1.L9")
    assert [place.text[:5] for place in found.numpy] == ["s = 0", "x = 1"]  # the algorithm's own file is told first
    assert [(place.number, place.text[:5]) for place in found.triton] == [
        (1, "p = 4"),
        (1, "d = 1"),
        (4, "y = 2"),
        (5, "z = 3"),
    ]
    assert [place.text[:5] for place in found.first_numpy + found.first_triton] == ["s = 0", "p = 4"]
    assert str(found).splitlines()[3:] == [
        "NumPy    fa2_lab/reference/fa2.py:1  s = 0",
        "Triton   fa2_lab/kernels/portable/forward.py:1  p = 4",
        "picture  figures/state_stream.svg",
        "more     5 places: fa2-lab where FA2.A1.L9 --all; fa2-lab errata fa2-P-tilde; fa2-lab errata fa1-empty-rows",
    ]
    full = found.full()
    first, second = full.splitlines()[1:3]
    assert len(first) <= 98 < len(f"{first} {second.split()[0]}"), "the words fill 98 columns"
    assert [row[:9].strip() for row in full.splitlines() if ".py:" in row] == ["NumPy"] * 2 + ["Triton"] * 4 + [
        "notebook"
    ]
    assert all(f"{file}:" in full for file in files) and "notebook notebooks/text/04.py:2\n    m = 1" in full
    (tmp_path / "fa2_lab/kernels/ladder").mkdir()
    (tmp_path / "fa2_lab/kernels/ladder/r08_pipelined.py").write_text("r = 7  # FA2.A1.L9\n")
    assert [place.text[:5] for place in where("FA2.A1.L9").first_triton] == ["r = 7"]


@pytest.mark.parametrize("tag", LINES)
def test_a_short_answer_has_ten_lines_at_most_and_names_what_matters(tag):
    """The paper's line, the NumPy line, the Triton line or why there is none, the picture; in this order."""
    algorithm, line = LINES[tag]
    found = where(tag)
    shown = str(found).splitlines()
    assert len(shown) <= 10 and shown[0].startswith(f"{tag}: {algorithm.title} (") and line.text[:20] in shown[1]
    if not line.computes:
        assert shown[2:] == ["nothing to compute here"] and not found.numpy + found.triton
        return
    titles = [row.split(" ")[0] for row in shown if row[0] != " "][1:]
    assert titles[: 2 + bool(found.picture)] == ["NumPy", "Triton", "picture"][: 2 + bool(found.picture)]
    text = str(found)
    assert found.first_numpy and f"NumPy    {found.first_numpy[0].file}:{found.first_numpy[0].number}  " in text
    if found.first_triton:
        assert f"Triton   {found.first_triton[0].file}:{found.first_triton[0].number}  " in text
    else:
        assert f"Triton   none: {found.no_triton}" in text and found.no_triton != "no kernel carries this tag yet"
    assert bool(found.first_triton) != bool({tag, algorithm.tag} & set(paper.NO_TRITON)), "a reason for what is there"
    untold = len(found.numpy + found.triton + found.notebooks) - sum(".py:" in row for row in shown)
    assert (f"{untold} place" in text) == (untold > 0) and ("--all" in text) == (untold > 0)
    assert all(name in text and name in found.full() for name in line.errata)
    for place in found.numpy + found.triton + found.notebooks:
        assert str(place) in found.full()


def test_every_line_but_returns_has_one_picture_that_exists():
    drawn = [f"{a}.L{n}" for lines in paper.PICTURES.values() for a, ns in lines.items() for n in ns]
    computing = {tag for tag, (_, line) in LINES.items() if line.computes and not line.text.startswith("Return")}
    assert sorted(drawn) == sorted(computing)
    figures = paper.PACKAGE.parent / "figures"
    assert all((figures / f"{name}.svg").is_file() for name in paper.PICTURES)
    shows = {  # for each picture one line that it is about
        "visiting_order": "FA1.A2.L9",
        "workers": "FA2.A2.L5",
        "block_budget": "FA1.A2.L2",
        "causal_tiles": "FA1.A2.L11",
        "dropout_orders": "FA1.A4.L14",
        "state_stream": "FA2.A1.L10",
        "merge_orders": "FA1.A2.L13",
        "deferred_normalisation": "FA2.A1.L12",
        "backward_graph": "FA2.A2.L14",
    }
    assert {name: where(tag).picture for name, tag in shows.items()} == {name: name for name in paper.PICTURES}


def test_tags_in_strings_and_longer_numbers_do_not_count():
    source = 'print("FA2.A1.L1")\nx = 1  # FA2.A1.L12\n"""# no tag"""\ny = 2  # unlike FA2.A1.L3\n'
    assert list(tagged_lines(source)) == [(["FA2.A1.L12"], 2, "x = 1  # FA2.A1.L12")]


@pytest.mark.parametrize(
    "comment", ["FA2.A1.L4 FA2.A1.L5  (B_r, d)", "(B_r, d)  FA2.A1.L4 FA2.A1.L5", "FA2.A1.L4, FA2.A1.L5"]
)
def test_a_shape_may_stand_before_or_after_the_tags(comment):
    assert list(tagged_lines(f"q = 1  # {comment}")) == [(["FA2.A1.L4", "FA2.A1.L5"], 1, f"q = 1  # {comment}")]


def test_where_says_so_when_nothing_carries_the_tag():
    assert "nothing to compute" in str(where("FA2.A1.L11"))
    nowhere = str(replace(where("FA2.A1.L9"), numpy=(), triton=(), notebooks=()))
    assert "no line of code" in nowhere and "Triton   none: no kernel" in nowhere and "--all" not in nowhere


@pytest.mark.parametrize(
    "tag, hint",
    [
        ("FA2.A1.L99", "FA2.A1.L99 does not exist; FA2.A1 has lines 1 to 17"),
        ("FA2.A3.L9", "FA2.A1.L9"),
        ("", "an empty tag does not exist; the algorithms are FA1.A2, FA1.A3, FA1.A4, FA2.A1, FA2.A2"),
        ("?", "? does not exist; the algorithms are"),
    ],
)
def test_unknown_tags_are_refused_with_a_hint(tag, hint):
    with pytest.raises(ValueError, match=f"tag: .*{re.escape(hint)}"):
        where(tag)


def test_a_near_miss_is_told_the_nearest_tags():
    with pytest.raises(ValueError, match=r"did you mean (FA\d\.A\d\.L\d+, ){3}FA\d\.A\d\.L\d+\?$"):  # four
        where("FA2.A3.L9")


def test_a_tag_is_a_string():
    with pytest.raises(TypeError, match="tag: got 9"):
        where(9)
