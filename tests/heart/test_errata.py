"""errata/: every check refuses the printed version and accepts the right one, by numbers."""

import re
import time
from operator import ge, gt

import errata_again
import numpy as np
import oracle
import pytest

from fa2_lab import errata
from fa2_lab.errata import ERRATA, SOURCES, Erratum, article, cases, judge
from fa2_lab.paper import LINES
from fa2_lab.reference import fa2
from fa2_lab.tiles import CAUSAL

PLACES = {  # how a source is cited: by section or heading, then by algorithm and line where there are such
    "FA2 paper": r"sections? [23]\.\d(\.\d)?( and 3\.\d\.\d)?(, causal masking)?"
    r"(, Algorithms? [12]( and 2)?(, line \d+)?)?( \(arXiv\))?",
    "FA1 paper": r"appendi(x|ces) B\.\d( and B\.\d)?(, Algorithms? \d( and \d)?, line \d+|, Theorem 5)?",
    "lecture notes on FA2": "standard attention|online softmax|algorithm|causal masking|execution model",
    "article on FA2": "introduction|recap of FlashAttention-1|why an IO-optimal kernel can still be slow|change [1-4]"
    "|putting the four together",
    "bilingual notes on FA2": r"abstract|Algorithm 1 \(forward\), (line|lines) 1\d( to 1\d)?, in both languages",
}
LINES_OF = {  # in which lines of the algorithms an erratum sits
    "fa1-dropout-order": {"FA1.A2.L1", "FA1.A4.L1"},
    "fa1-block-size": {"FA1.A2.L2", "FA1.A4.L2"},
    "fa1-empty-rows": {"FA1.A2.L12", "FA1.A4.L13", "FA2.A1.L9"},
    "fa1-L": {"FA2.A2.L11"},
    "fa2-block-index": {"FA2.A1.L2"},
    "fa2-scale": {"FA2.A1.L8", "FA2.A2.L10", "FA2.A2.L15", "FA2.A2.L16"},
    "fa2-P-tilde": {"FA2.A1.L9"},
    "fa2-tweak1": {"FA2.A1.L10"},
    "fa2-inverse": {"FA2.A1.L10"},
    "fa2-D-shape": {"FA2.A2.L4"},
    "fa2-loads": {"FA2.A2.L9"},
    "fa2-S-index": {"FA2.A2.L11"},
    "fa2-dQ-race": {"FA2.A2.L15"},
}


@pytest.mark.parametrize("erratum", ERRATA.values(), ids=ERRATA)
def test_check_refuses_the_wrong_version_and_accepts_the_right_one(erratum):
    with np.errstate(all="ignore"):
        assert erratum.check(erratum.wrong()) is False
    assert erratum.check(erratum.right()) is True
    verdict = judge(erratum)
    assert verdict.told_apart
    assert not verdict.wrong_error <= 1e3 * erratum.tolerance, "wrong and right are too close to tell a slip from noise"


def same(a, b) -> bool:
    """Equal parts, shapes and numbers; NaN where the other has NaN."""
    if isinstance(a, tuple) or isinstance(b, tuple):
        return isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, str):
        return a == b
    return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", ERRATA)
def test_the_words_and_two_computations_say_the_same(name):
    """What is printed: the claim's words, what the erratum computes for them, and what they come to a second time."""
    erratum, again = ERRATA[name], errata_again.AGAIN[name]
    assert again.claim in erratum.claim and again.instead in erratum.instead, "other words than were computed"
    with np.errstate(all="ignore"):
        assert same(erratum.wrong(), again.wrong), f"wrong is not what {again.claim!r} says"
    assert same(erratum.right(), again.right), f"right is not what {again.instead!r} says"


@pytest.mark.parametrize("name", errata_again.NUMBERS)
def test_numbers_in_the_reasons_are_counted(name):
    words, said, counted = errata_again.NUMBERS[name]
    erratum = ERRATA[name]
    assert words in f"{erratum.claim} {erratum.why} {erratum.instead}"
    assert errata_again.numbers(words) == said == counted


def nudged(result, part: int, step: float = 1e-6):
    """The result with one of its numbers a little off, by more than any tolerance and less than any slip."""
    if isinstance(result, tuple):
        sizes = [np.size(x) for x in result]
        k = next(k for k in range(len(sizes)) if part < sum(sizes[: k + 1]))
        return tuple(nudged(x, part - sum(sizes[:k]), step) if n == k else x for n, x in enumerate(result))
    if isinstance(result, str):
        return result + "!"
    array = np.array(result)
    if array.dtype == bool:
        array.flat[part] ^= True
    else:
        array.flat[part] += 1 if array.dtype.kind == "i" else step * np.abs(array).max()
    return array if array.ndim else array.item()


@pytest.mark.parametrize("erratum", ERRATA.values(), ids=ERRATA)
def test_a_check_judges_every_number_that_the_right_version_has(erratum):
    """dQ, dK and S where they are claimed, and not dQ alone."""
    right = erratum.right()
    count = sum(map(np.size, right)) if isinstance(right, tuple) else np.size(right)
    step = 2e-3 if erratum.id == "article-exp-cost" else 1e-6  # its truth comes from a datasheet of three digits
    for part in range(count):
        assert not erratum.check(nudged(right, part, step)), f"number {part} of {count} may be off"
    with np.errstate(all="ignore"):
        wrong = erratum.wrong()
    for k in range(len(right) if isinstance(right, tuple) else 0):  # each part is wrong in print
        mixed = tuple(w if n == k else r for n, (w, r) in enumerate(zip(wrong, right, strict=True)))
        assert not erratum.check(mixed) or same(wrong[k], right[k]), f"part {k} as printed is accepted"


@pytest.mark.parametrize("erratum", ERRATA.values(), ids=ERRATA)
def test_a_source_is_cited_by_section(erratum):
    for cited in re.split(r"; |, beside ", erratum.source):
        name = next(name for name in SOURCES if cited.startswith(name))
        assert re.fullmatch(PLACES[name], cited.removeprefix(f"{name}, ")), cited


def test_the_lines_that_name_an_erratum_are_those_it_is_about():
    sits = {}
    for tag, (_, line) in LINES.items():
        for name in line.errata:
            sits.setdefault(name, set()).add(tag)
    assert sits == LINES_OF
    for name, erratum in ERRATA.items():  # a source that gives a line is named by that line
        for cited in re.split(r"; |, beside ", erratum.source):
            for paper, algorithms, line in re.findall(r"^(FA\d) .*?Algorithms? ([\d and]+), line (\d+)", cited):
                for algorithm in re.findall(r"\d", algorithms):
                    assert f"{paper}.A{algorithm}.L{line}" in LINES_OF[name], name


@pytest.mark.parametrize("erratum", ERRATA.values(), ids=ERRATA)
def test_every_erratum_is_told_in_full_and_runs_the_same_twice(erratum):
    assert erratum.source.startswith(tuple(SOURCES))
    assert all(len(text) > 8 for text in (erratum.claim, erratum.why, erratum.instead))
    np.testing.assert_array_equal(judge(erratum), judge(erratum))


def test_the_set_is_whole_and_quick():
    counts = {source: sum(e.source.startswith(source) for e in ERRATA.values()) for source in SOURCES}
    assert counts == dict(zip(SOURCES, (8, 17, 2, 12, 2), strict=True))
    assert list(ERRATA) == list(errata_again.AGAIN), "an erratum is not computed a second time"
    assert len(ERRATA) == 41, "two errata share an id"
    start = time.process_time()
    for erratum in ERRATA.values():
        judge(erratum)
    assert time.process_time() - start < 5


def test_lines_of_the_papers_name_errata_that_exist():
    named = {name for _, line in LINES.values() for name in line.errata}
    assert named and named <= set(ERRATA)


def test_a_version_that_is_no_better_is_not_told_apart():
    same = Erratum("x", "FA2 paper", "c", "w", "i", lambda: 1.0, lambda: 1.0, lambda x: abs(x - 1.0))
    assert not judge(same).told_apart
    swapped = Erratum("x", "FA2 paper", "c", "w", "i", lambda: 1.0, lambda: np.nan, lambda x: abs(x - 1.0))
    assert not judge(swapped).told_apart
    both_off = Erratum("x", "FA2 paper", "c", "w", "i", lambda: 2.0, lambda: 3.0, lambda x: abs(x - 1.0))
    assert not judge(both_off).told_apart
    with pytest.raises(TypeError, match="erratum: got 'fa2-scale'"):
        judge("fa2-scale")


def test_the_truth_itself_is_true():
    """The cases' dense answers against Algorithms 1 and 2 as the reference runs them."""
    case = cases.Case(N=8, d=4, causal=True)
    O, L = fa2.forward(case.Q, case.K, case.V, B_r=4, B_c=2, tau=case.tau, mask=CAUSAL)
    dQ, dK, _ = fa2.backward(case.Q, case.K, case.V, O, L, case.dO, B_r=4, B_c=2, tau=case.tau, mask=CAUSAL)
    assert cases.distance(case.O, O) < 1e-14
    assert cases.distance(case.dQ, dQ) < 1e-8 and cases.distance(case.dK, dK) < 1e-8
    Z, seen = None, np.tri(8, dtype=bool)
    want = oracle.dense(case.Q, case.K, case.V, seen, case.tau, Z, case.dO)
    for name, got in (("O", case.O), ("dQ", case.dQ), ("dK", case.dK)):
        assert cases.distance(got, want[("O", "L", "dQ", "dK", "dV").index(name)]) < 1e-8, name
    assert cases.distance([1.0, 4.0], [2.0, 4.0]) == 0.25 and cases.distance([2.0], [-2.0]) == 2.0
    assert cases.distance(np.ones(3), np.ones(4)) == np.inf


def test_the_two_blocks_hold_the_statistics_after_each_half():
    blocks, want = cases.TwoBlocks(errata_again.CASE, errata_again.CUT), errata_again.two_blocks()
    rows = dict(m1=want["m1"], m2=want["m2"], l1=want["l1"], l2=want["l2"])  # a number for each row, as a column
    blocks_of = dict(S1=want["S1"], S2=want["S2"], V1=want["V1"], V2=want["V2"], e2=want["P"], O1=want["O1"])
    blocks_of |= dict(e1=np.exp(want["S1"] - want["m1"][:, None]), O=errata_again.by_torch(errata_again.CASE)["O"])
    for name, truth in (blocks_of | {name: column[:, None] for name, column in rows.items()}).items():
        assert same(getattr(blocks, name), truth), name


def test_the_step_whose_loads_are_counted_gives_the_gradients():
    found, case = errata_again.by_torch(errata_again.CASE), errata_again.CASE
    L = np.log(np.exp(found["S"]).sum(axis=1, keepdims=True))
    D = (case.dO * found["O"]).sum(axis=1, keepdims=True)
    step = errata.fa2_paper.inner_step(Q=case.Q, O=found["O"], dO=case.dO, dQ=np.zeros((8, 4)), L=L, D=D)
    assert all(map(same, step, (found["dV"], found["dQ"], found["dK"])))


def test_numbers_that_the_texts_mention():
    assert article.full_scalings("fa1", 64) == 128 and article.full_scalings("fa2", 64) == 65
    assert article.metered(article.fa1, 128) == article.fa1_traffic(128)
    assert article.metered(article.fa2, 128) == article.fa2_traffic(128)
    assert 1.5 < article.SAME_IO.right() < 1.7 and article.TRAFFIC.right() > 3.7
    visited = [sum(not over(j * 2, (i + 1) * 2) for i in range(4) for j in range(4)) for over in (gt, ge)]
    assert visited == [13, 10]
    masks = errata.fa1_paper.DROPOUT_ORDER.wrong()
    assert 0.3 < (masks[0] != masks[1]).mean() < 0.7
