"""paper.py: the algorithms are complete, tags stand where their line is computed, and `where` finds them; glossary.py:
its symbols against a small attention, its words against the chapters it sends a reader to."""

import re
from dataclasses import replace

import numpy as np
import pytest

from fa2_lab import paper
from fa2_lab.errata import ERRATA
from fa2_lab.glossary import GLOSSARY, TERMS
from fa2_lab.machine import io_model
from fa2_lab.paper import ALGORITHMS, LINES, PACKAGE, tagged_lines, where
from fa2_lab.tiles import Tiling

LAST_LINES = {"FA1.A2": 19, "FA1.A3": 6, "FA1.A4": 26, "FA2.A1": 17, "FA2.A2": 20}
LOOP_ENDS = {"FA1.A2": {17, 18}, "FA1.A4": {23, 25}, "FA2.A1": {11, 16}, "FA2.A2": {17, 19}}
SOURCES = [path for folder in ("reference", "kernels") for path in sorted((PACKAGE / folder).rglob("*.py"))]


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_algorithm_lines_are_complete_and_indented_by_loops(algorithm):
    tag, depth = algorithm.tag, 0
    assert [line.number for line in algorithm.lines] == list(range(1, LAST_LINES[tag] + 1))
    assert {line.number for line in algorithm.lines if not line.computes} == LOOP_ENDS.get(tag, set())
    for line in algorithm.lines:
        depth -= line.text == "end for"
        assert line.depth == depth, algorithm.tag_of(line)
        depth += line.text.startswith("for ")
        assert set(line.errata) <= set(ERRATA)
    assert depth == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_numpy_stage_is_tagged_with_every_line_in_order(algorithm):
    """FA1's forward alone needs lines 12 and 13 by turns, and clears O after it has cut the tensors."""
    source = (PACKAGE.parent / algorithm.numpy).read_text(encoding="utf-8")
    tags = [tag for tags, _, _ in tagged_lines(source) for tag in tags if tag.startswith(f"{algorithm.tag}.")]
    computing = [algorithm.tag_of(line) for line in algorithm.lines if line.computes]
    numbers = [computing.index(tag) for tag in tags]
    assert sorted(set(numbers)) == list(range(len(computing)))
    assert numbers == sorted(numbers) or algorithm.tag == "FA1.A2"


def letters(text: str) -> set[str]:
    """Return the names of tensors and statistics in a text, such as q for q_i or Q, dk for dk_j, m for m_new."""
    plain = text.replace("m̃", "m").replace("l̃", "l").replace("p̃", "p")
    return {name.lower() for name in re.findall(r"\b(d?[A-Za-z])(?:_(?:ij|ji|i|j|new|r|c|dropped))?\b", plain)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_tags_are_on_code_with_the_names_of_their_line(path):
    """A loop's tag on a loop or a program's number; any other where a name of the line is."""
    for tags, number, text in tagged_lines(path.read_text(encoding="utf-8")):
        code = text.split("  #")[0]
        for tag in tags:
            words = LINES[tag][1].text
            if words.startswith("for "):
                assert re.match(r"for |.*(program_id|block_coord)\(", code), (path.name, number, text)
            elif not words.startswith(("Cut", "Set up", "Put")) and not re.search(r"\b(load|add|accum)\b", code):
                assert letters(words) & letters(code), (path.name, number, text)


def test_tags_are_read_from_comments_only():
    source = 'print("FA2.A1.L1")\nx = 1  # FA2.A1.L12\n"""# no tag"""\ny = 2  # unlike FA2.A1.L3\n'
    assert list(tagged_lines(source)) == [(["FA2.A1.L12"], 2, "x = 1  # FA2.A1.L12")]
    for comment in ("FA2.A1.L4 FA2.A1.L5  (B_r, d)", "(B_r, d)  FA2.A1.L4 FA2.A1.L5", "FA2.A1.L4, FA2.A1.L5"):
        assert list(tagged_lines(f"q = 1  # {comment}")) == [(["FA2.A1.L4", "FA2.A1.L5"], 1, f"q = 1  # {comment}")]
    assert list(tagged_lines("# FA2.A1.L9\n# and why\n\ny = 2\nz = 3\n")) == [(["FA2.A1.L9"], 4, "y = 2")]


@pytest.mark.parametrize("tag", LINES)
def test_where_finds_numpy_triton_and_figure_of_a_line(tag):
    algorithm, line = LINES[tag]
    found = where(f" {tag.lower()} ")
    assert (found.tag, found.line) == (tag, line)
    if not line.computes:
        assert not found.numpy + found.triton and "nothing to compute here" in str(found)
        return
    assert all(f"fa2-lab errata {name}" in str(found) for name in line.errata)
    assert [place.file for place in found.first_numpy] == [algorithm.numpy] * len(found.first_numpy) != []
    for place in found.numpy + found.triton + found.notebooks:
        source = (PACKAGE.parent / place.file).read_text(encoding="utf-8")
        assert source.splitlines()[place.number - 1].strip() == place.text and str(place) in found.full()
    reasons = {tag, algorithm.tag} & set(paper.NO_TRITON)
    assert bool(found.first_triton) != bool(reasons), "a reason for what is there, or none for what is not"
    assert not found.picture or (PACKAGE.parent / "figures" / f"{found.picture}.svg").is_file()
    for other in re.findall(r"there it is (FA2\S+)", found.no_triton):  # which computes the same
        codes = [place.text for place in (found.first_numpy[0], where(other).first_numpy[0])]
        assert len({re.split(r"\W|_", code)[0].lower() for code in codes}) == 1, codes


def test_where_lists_the_main_implementation_first():
    found = where("FA2.A1.L9")
    files = [place.file.split("/")[2] for place in found.triton if place not in found.first_triton]
    places = [key for n, key in enumerate(files) if key not in files[:n]]
    assert [place for place in places if place in paper.FOLDERS] == ["ladder", "portable", "decode", "hopper"]
    assert found.numpy[0].file == "fa2_lab/reference/fa2.py" and found.triton[0] == found.first_triton[0]
    nowhere = str(replace(found, numpy=(), triton=(), notebooks=()))
    assert "no line of code" in nowhere and "Triton   none: no kernel" in nowhere and "--all" not in nowhere


@pytest.mark.parametrize(("tag", "hint"), [
    ("FA2.A1.L99", "FA2.A1.L99 does not exist; FA2.A1 has lines 1 to 17"),
    ("FA2.A3.L9", "did you mean "),
    ("", "an empty tag does not exist; the algorithms are FA1.A2, FA1.A3, FA1.A4, FA2.A1, FA2.A2"),
])  # fmt: skip
def test_unknown_tags_are_refused_with_a_hint(tag, hint):
    with pytest.raises(ValueError, match=f"^tag: .*{re.escape(hint)}"):
        where(tag)
    with pytest.raises(TypeError, match="tag: got 9"):
        where(9)


# The glossary ---------------------------------------------------------------------------------------------------

OTHER_FORMS = dict(l="ell", recompute="recompu")
OTHER_FORMS |= {"bulk copy": "bulk copies", "register spill": "spill"}


def test_glossary_terms_have_translations_places_and_figures():
    notebooks, ladder = PACKAGE.parent / "notebooks" / "text", PACKAGE / "kernels" / "ladder"
    files = {path.name.split("_")[0]: path for path in notebooks.glob("*.py")}
    files |= {f"rung {path.name[1:3]}": path for path in ladder.glob("r*.py")}
    assert len(GLOSSARY) == len(TERMS), "a term is there twice"
    for term in TERMS:
        assert term.english and re.search(r"[\u4e00-\u9fff]", term.chinese), term.name
        assert not term.picture or (PACKAGE.parent / "figures" / f"{term.picture}.svg").is_file(), term.name
        if term.explained:
            text = " ".join(files[term.explained].read_text(encoding="utf-8").replace("\n# ", " ").split())
            word, case = OTHER_FORMS.get(term.name, term.name), re.IGNORECASE if len(term.name) > 3 else 0
            assert re.search(rf"(?<![a-zA-Z]){re.escape(word)}", text, case), term
    used = set(re.findall(r"\b(?:d?[QKVOPS]|[DLMN]|[BT]_[rc])\b", " ".join(line.text for _, line in LINES.values())))
    assert used <= set(GLOSSARY), "a letter of the papers' lines is not explained"


def test_paper_symbols_have_the_documented_shapes():
    draw = np.random.default_rng(3).standard_normal
    sizes = dict(N_q=7, N_k=10, d=3, B_r=2, B_c=4)
    Q, K, V, dO = (draw((n, 3)) for n in (7, 10, 10, 7))
    S = 3**-0.5 * Q @ K.T
    m, L = S.max(axis=1), np.log(np.exp(S).sum(axis=1))
    P, dP = np.exp(S - L[:, None]), dO @ V.T
    D = (P * dP).sum(axis=1)
    assert np.allclose(D, (dO * (P @ V)).sum(axis=1))  # as the glossary says of D
    tensors = dict(Q=Q, K=K, V=V, O=P @ V, S=S, P=P, dO=dO, dP=dP, dS=P * (dP - D[:, None]), m=m, l=L - m, L=L, D=D)
    tensors |= dict(dQ=Q, dK=K, dV=V, tau=0.5)
    for name, x in tensors.items():
        shape = GLOSSARY[name].shape
        names = [] if shape == "number" else re.findall(r"\w+", shape)
        assert np.shape(x) == tuple(sizes[n] for n in names), (name, shape)
    tensor_sizes = {name: x.size for name, x in tensors.items() if name != "tau"}
    assert io_model.tensor_sizes(Tiling(7, 10, 2, 4), d=3) == tensor_sizes
