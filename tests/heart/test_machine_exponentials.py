"""2ˣ by a cubic: close everywhere, and each of the three traps shows its own wrong bits."""

import numpy as np
import pytest

from fa2_lab.machine.exponentials import WAYS, bits, exp2, faults, some

NAN, INF = np.float32(np.nan), np.float32(-np.inf)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("way", WAYS)
def test_it_is_close_where_scores_are_ordinary(way):
    x = np.linspace(-125, 8, 100_001).astype(np.float32)
    assert np.max(np.abs(exp2(x, **WAYS[way]) / 2.0 ** x.astype(np.float64) - 1)) < 2e-4


def hexed(x, way):
    return hex(int(bits(exp2(np.float32([x]), **WAYS[way]))[0]) & 0xFFFFFFFF)


def test_what_is_right_keeps_nan_and_makes_nothing_of_minus_infinity_and_denormals():
    assert np.isnan(exp2(np.float32([NAN])))
    assert [hexed(x, "right") for x in (INF, -1e30, -126.5, -127)] == 4 * ["0x0"]
    assert hexed(-126, "right") == "0x800000"  # the smallest normal number


def test_each_trap_has_its_bits():
    assert hexed(NAN, "max drops NaN") == "0x0"  # as if the key were masked
    assert hexed(NAN, "n added to the exponent") == "0x7f7fffff"  # the largest number there is
    assert 0 < exp2(np.float32([INF]), **WAYS["rounded to nearest"])[0] < 1.2e-38
    assert np.isnan(exp2(np.float32([INF]), **WAYS["rounded to nearest"] | dict(lowest=-127)))


def test_only_every_eighth_column_takes_that_way():
    x = np.where(np.eye(16) > 0, NAN, np.float32(0))
    lost = ~np.isnan(np.diagonal(some(x, **WAYS["max drops NaN"])))
    assert list(np.flatnonzero(lost)) == [7, 15]


def test_rows_that_show_each_fault():
    rows = np.vstack([np.full(8, INF), np.where(np.eye(8) > 0, NAN, np.float32(-200))])
    assert [bool(faults(rows, way)) for way in WAYS] == [False, True, True, True]
    assert faults(rows[1:2], "max drops NaN") == []  # NaN in the first column is the exponential unit's
