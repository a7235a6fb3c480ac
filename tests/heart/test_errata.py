"""errata/: every check refuses the printed version and accepts the right one, by numbers."""

import re

import numpy as np
import pytest

from fa2_lab.errata import ERRATA, SOURCES, Erratum, cases, measure
from fa2_lab.paper import LINES

for_each_erratum = pytest.mark.parametrize("erratum", ERRATA.values(), ids=ERRATA)


@for_each_erratum
def test_erratum_check_tells_wrong_from_right(erratum):
    verdict = measure(erratum)
    assert verdict.told_apart and erratum.check(erratum.right())
    assert not verdict.wrong_error <= 1e3 * erratum.tolerance, "too close to tell a slip from noise"
    np.testing.assert_array_equal(verdict, measure(erratum))
    assert erratum.source.startswith(tuple(SOURCES)) and all((erratum.claim, erratum.why, erratum.instead))
    for paper, algorithm, line in re.findall(r"(FA[12]) paper, [^;F]*Algorithms? (\d).*?, line (\d+)", erratum.source):
        assert erratum.id in LINES[f"{paper}.A{algorithm}.L{line}"][1].errata


def perturbed(result, part: int, step: float):
    """Return a result with one number changed by more than any tolerance and less than any erratum changes it."""
    if isinstance(result, tuple):
        sizes = [np.size(x) for x in result]
        k = next(k for k in range(len(sizes)) if part < sum(sizes[: k + 1]))
        return tuple(perturbed(x, part - sum(sizes[:k]), step) if n == k else x for n, x in enumerate(result))
    if isinstance(result, str):
        return result + "!"
    array = np.array(result)
    if array.dtype == bool:
        array.flat[part] ^= True
    else:
        array.flat[part] += 1 if array.dtype.kind == "i" else step * np.abs(array).max()
    return array if array.ndim else array.item()


@for_each_erratum
def test_erratum_check_fails_if_any_number_changes(erratum):
    """dQ, dK and S where they are claimed, and not dQ alone."""
    right = erratum.right()
    count = sum(map(np.size, right)) if isinstance(right, tuple) else np.size(right)
    step = 2e-3 if erratum.id == "article-exp-cost" else 1e-6  # its truth comes from a datasheet of three digits
    for part in range(count):
        assert not erratum.check(perturbed(right, part, step)), f"number {part} of {count} may be off"


def test_erratum_needs_a_more_accurate_right_version():
    for wrong, right in ((1.0, 1.0), (1.0, np.nan), (2.0, 3.0)):
        given = dict(wrong=lambda x=wrong: x, right=lambda x=right: x, error=lambda x: abs(x - 1.0))
        assert not measure(Erratum("x", "FA2 paper", "c", "w", "i", **given)).told_apart
    with pytest.raises(TypeError, match="erratum: got 'fa2-scale'"):
        measure("fa2-scale")


def test_erratum_distance_equals_hand_computed_values():
    assert cases.distance([1.0, 4.0], [2.0, 4.0]) == 0.25 and cases.distance([2.0], [-2.0]) == 2.0
    assert cases.distance(np.ones(3), np.ones(4)) == np.inf
    assert cases.distance([-np.inf, 1.0], [-np.inf, 2.0]) == 0.5
    assert cases.distance([1.0, 2.0], [-np.inf, 2.0]) == cases.distance([-np.inf, 2.0], [1.0, 2.0]) == np.inf
    assert ERRATA["fa1-block-size"].right() == (44, 22)  # 4Bd + B² + 2B and 8Bd + 2B² + 2B are at most 24,576
    assert f" {ERRATA['article-228'].right()} KiB" in f" {ERRATA['article-228'].instead}"
