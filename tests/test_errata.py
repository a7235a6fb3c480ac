"""errata/: every check refuses the printed version and accepts the right one, by numbers."""

import time
from operator import ge, gt

import numpy as np
import pytest

from fa2_lab import errata
from fa2_lab.errata import ERRATA, Erratum, article, cases, judge
from fa2_lab.paper import LINES
from fa2_lab.reference import fa2
from fa2_lab.tiles import CAUSAL

SOURCES = ("FA2 paper", "FA1 paper", "lecture notes on FA2", "article on FA2", "bilingual notes on FA2")


@pytest.mark.parametrize("erratum", ERRATA.values(), ids=ERRATA)
def test_check_refuses_the_wrong_version_and_accepts_the_right_one(erratum):
    with np.errstate(all="ignore"):
        assert erratum.check(erratum.wrong()) is False
    assert erratum.check(erratum.right()) is True
    verdict = judge(erratum)
    assert verdict.told_apart
    assert not verdict.wrong_error <= 1e3 * erratum.tolerance, "wrong and right are too close to tell a slip from noise"


@pytest.mark.parametrize("erratum", ERRATA.values(), ids=ERRATA)
def test_every_erratum_is_told_in_full_and_runs_the_same_twice(erratum):
    assert erratum.source.startswith(SOURCES)
    assert all(len(text) > 8 for text in (erratum.claim, erratum.why, erratum.instead))
    np.testing.assert_array_equal(judge(erratum), judge(erratum))


def test_the_set_is_whole_and_quick():
    counts = {source: sum(e.source.startswith(source) for e in ERRATA.values()) for source in SOURCES}
    assert counts == dict(zip(SOURCES, (13, 8, 5, 11, 3), strict=True))
    assert len(ERRATA) == 40, "two errata share an id"
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
    assert cases.distance(np.ones(3), np.ones(4)) == np.inf


def test_numbers_that_the_texts_mention():
    assert article.full_scalings("fa1", 64) == 128 and article.full_scalings("fa2", 64) == 65
    assert article.metered(article.fa1, 128) == article.fa1_traffic(128)
    assert article.metered(article.fa2, 128) == article.fa2_traffic(128)
    assert 1.5 < article.SAME_IO.right() < 1.7 and article.TRAFFIC.right() > 3.7
    visited = [sum(not over(j * 2, (i + 1) * 2) for i in range(4) for j in range(4)) for over in (gt, ge)]
    assert visited == [13, 10]
    masks = errata.fa1_paper.DROPOUT_ORDER.wrong()
    assert 0.3 < (masks[0] != masks[1]).mean() < 0.7
