"""paper.py: the algorithms are complete, `where` finds what carries a tag, and the glossary speaks both languages."""

import re
from dataclasses import replace

import pytest

from fa2_lab import paper
from fa2_lab.paper import ALGORITHMS, GLOSSARY, LINES, tagged_lines, where

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


def test_an_algorithm_prints_all_its_lines():
    text = str(ALGORITHMS["FA2.A1"])
    assert "\n 10          o_i ←" in text and len(text.splitlines()) == 2 + 17


def test_where_finds_the_numpy_line():
    found = where("fa2.a1.l4 ")
    assert found.tag == "FA2.A1.L4" and found.line.text.startswith("Load q_i")
    assert [place.file for place in found.numpy] == ["fa2_lab/reference/fa2.py"]
    assert found.numpy[0].text.startswith("q_i = Q[rows]")
    number = found.numpy[0].number
    assert f"fa2_lab/reference/fa2.py:{number}" in str(found)
    source = (paper.PACKAGE / "reference" / "fa2.py").read_text(encoding="utf-8").splitlines()
    assert source[number - 1].strip() == found.numpy[0].text


def test_where_in_a_checkout_of_all_three(tmp_path, monkeypatch):
    for folder in ("fa2_lab/reference", "fa2_lab/kernels/hopper", "notebooks/text"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "fa2_lab/reference/a.py").write_text("x = 1  # FA2.A1.L9 FA2.A1.L10  (B_r,)\n")
    (tmp_path / "fa2_lab/kernels/hopper/b.py").write_text("# FA2.A1.L9\n# and why\n\ny = 2\nz = 3  # FA2.A1.L9\n")
    (tmp_path / "notebooks/text/04.py").write_text("# %%\nm = 1  # FA2.A1.L9\n", encoding="utf-8")
    monkeypatch.setattr(paper, "PACKAGE", tmp_path / "fa2_lab")
    assert where("FA2.A1.L9").notebooks == ()  # not a checkout yet
    (tmp_path / "pyproject.toml").touch()
    found = where("FA2.A1.L9")
    assert [(p.file, p.number) for p in found.numpy] == [("fa2_lab/reference/a.py", 1)]
    assert [(p.number, p.text) for p in found.triton] == [(4, "y = 2"), (5, "z = 3  # FA2.A1.L9")]
    assert [p.file for p in found.notebooks] == ["notebooks/text/04.py"]
    assert all(word in str(found) for word in ("NumPy", "Triton", "notebook", "fa2_lab/kernels/hopper/b.py:4"))
    assert where("FA2.A1.L10").numpy == found.numpy


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
    assert "no line of code" in str(replace(where("FA2.A1.L9"), numpy=(), triton=(), notebooks=()))


@pytest.mark.parametrize(
    "tag, hint",
    [("FA2.A1.L99", "lines 1 to 17"), ("FA2.A3.L9", "FA2.A1.L9"), ("", "algorithms are"), ("?", "algorithms are")],
)
def test_unknown_tags_are_refused_with_a_hint(tag, hint):
    with pytest.raises(ValueError, match=f"tag: .*{re.escape(hint)}"):
        where(tag)


def test_a_tag_is_a_string():
    with pytest.raises(TypeError, match="tag: got 9"):
        where(9)


def test_glossary_has_every_symbol_and_both_languages():
    symbols = "Q K V O S P dO dQ dK dV D L m l tau B_r B_c T_r T_c M N d".split()
    words = ["HBM", "SRAM", "shared memory", "warp", "thread block", "SM", "tile", "rescale", "logsumexp"]
    assert {*symbols, *words, "split-K", "split-Q"} <= set(GLOSSARY)
    assert len(GLOSSARY) == len(paper.TERMS), "a term is there twice"
    for term in GLOSSARY.values():
        assert term.english and re.search(r"[\u4e00-\u9fff]", term.chinese), term.name
    assert all(GLOSSARY[name].shape for name in symbols)
    assert GLOSSARY["warp"].chinese == "线程束" and GLOSSARY["SM"].chinese == "流式多处理器"


def test_glossary_knows_the_letters_that_the_lines_use():
    letters = set(re.findall(r"\b(?:d?[QKVOPS]|[DLMN]|[BT]_[rc])\b", " ".join(line.text for _, line in LINES.values())))
    assert {"Q", "dQ", "B_r", "T_c", "D", "L"} <= letters and letters <= set(GLOSSARY)
