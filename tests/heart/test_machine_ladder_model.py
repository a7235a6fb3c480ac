"""The model of the ladder: queues and schedules that can be done by hand, and what it said before it was measured."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
from fa2_lab.kernels import ladder
from fa2_lab.machine import reasons
from fa2_lab.machine.ladder_model import (
    Rung,
    clocks_per_tile,
    l2_bytes_per_tile,
    makespan,
    predicted_clocks,
    tiles_per_program,
    unit_clocks,
)
from fa2_lab.records import load

FULL, CAUSAL = False, True
# Programs on an SM, instructions of a tile, exponentials among them: Triton 3.6 for sm_90, d = 128, without a mask.
COMPILED_NUMBERS = {3: (2, 688, 38), 7: (3, 413, 34)}


def rung(number):
    return Rung(number, *COMPILED_NUMBERS[number])


def test_ladder_model_units_equal_hand_computed_clocks():
    clocks = unit_clocks(rung(3))
    assert (clocks["tensor"], clocks["issue"], clocks["exp"]) == (4 * 64 * 64 * 128 / 4096, 688, 8 * 38)
    assert clocks["path"] == pytest.approx(32768 / 29.5) and l2_bytes_per_tile(rung(3)) == 32768
    assert l2_bytes_per_tile(rung(3)._replace(number=1)) == 16384 + 2 * 4 * 64 * (128 + 2)  # Q, and O, ℓ and m twice
    assert unit_clocks(rung(3)._replace(number=10)).keys() == {"tensor", "issue", "exp"}  # copied ahead


def test_ladder_model_queues_equal_hand_computed_waits():
    """Two programs of rung 03: each finds the other, where it stood when it was alone."""
    alone = 120 + 512 + 688 + 304 + 1110.78
    assert clocks_per_tile(rung(3), 1) == pytest.approx(alone, abs=0.1)
    by_hand = 120 + sum(x * (1 + x / alone) for x in (512, 688, 304, 1110.78))
    assert clocks_per_tile(rung(3), 2) == clocks_per_tile(rung(3)) == pytest.approx(by_hand, abs=0.1)
    three = rung(3)._replace(consumers=3, programs=1, number=17)  # warpgroups queue, of one program or of three
    assert clocks_per_tile(three) == clocks_per_tile(three._replace(consumers=1, programs=3))


def test_ladder_model_makespan_equals_hand_computed_values():
    assert makespan([2, 2, 2], [10, 15], SMs=1) == 30 + 20  # two side by side, then one alone
    assert makespan([1, 3], [10, 15], SMs=1) == 15 + 2 * 10
    assert makespan([1, 1, 4], [10], SMs=2) == 10 + 40
    assert makespan([4, 1, 1], [10], SMs=2) == 40  # the heavy one first
    assert makespan([4, 1, 1, 1], [10, 10], SMs=1) == 40


def test_ladder_model_lists_programs_in_launch_order():
    assert tiles_per_program(rung(3)._replace(number=2), 2, 256, FULL) == [16, 16]
    assert tiles_per_program(rung(3), 2, 256, CAUSAL) == 8 * [4]  # nothing is skipped yet
    assert tiles_per_program(rung(7), 2, 256, CAUSAL) == [1, 2, 3, 4, 1, 2, 3, 4]
    assert tiles_per_program(rung(7)._replace(number=12), 2, 200, CAUSAL) == [4, 4, 3, 3, 2, 2, 1, 1]
    wide = Rung(18, 1, 400, 66, keys=128, consumers=2)
    assert tiles_per_program(wide, 1, 512, CAUSAL) == [4, 3, 2, 1] and tiles_per_program(wide, 1, 512, FULL) == 4 * [4]


def test_rung_00_is_bound_by_hbm():
    assert predicted_clocks(Rung(0, 1, 1, 1), heads=64) == pytest.approx(
        64 * 4096 * (12 * 4096 + 8 * 128) * 1.83e9 / 4.8e12
    )


@pytest.mark.parametrize("number", ["07", "09", *range(11, 19)], ids=str)
def test_predicted_clocks_are_within_10_percent_of_the_counted_ones(number):
    name = ladder.find(f"{number}")
    said = predicted_clocks(reasons.model_input(name, FULL, 128), heads=64)
    assert said == pytest.approx(reasons.hardware_counters(load("ladder"), name)["SM cycles"], rel=0.1)
    assert predicted_clocks(rung(7), 64, causal=CAUSAL) < 0.6 * predicted_clocks(rung(7), 64)  # it skips tiles
    before = ladder.find("00")
    for d in (64, 128):
        assert reasons.predicted_speedup(before, name, FULL, d) == reasons.predicted_speedup(
            before, name, FULL, d, heads=8192 // d
        )


# The reasons ------------------------------------------------------------------------------------------------------


def test_reasons_md_explains_every_rung():
    assert list(reasons.REASONS) == [name[1:3] for name in ladder.RUNGS[1:]]
    assert [number for number, reason in reasons.REASONS.items() if not reason.modelled] == ["20", "21", "22", "23"]
    assert all(reason.limit and reason.removes and reason.why for reason in reasons.REASONS.values())


def test_ladder_counters_belong_to_the_shape_of_the_table():
    record, name = load("ladder"), "r09_free_loads"  # counted at d 64, too
    at_128 = next(
        x for x in record.rows if x.direction == "counters" and (x.problem["rung"], x.problem["d"]) == (name, 128)
    )
    assert reasons.hardware_counters(record, name) == {what: numbers[0] for what, numbers in at_128.values.items()}
    assert reasons.max_speedup(record, name, 64) != reasons.max_speedup(record, name, 128)
    assert all(1 < reasons.clock_and_power(record, rung)[0] < 2 for rung in ladder.RUNGS)  # GHz


def test_prediction_misses_if_off_by_more_than_10_percent():
    assert not reasons.RungGain(1.00, 1.09).misses and reasons.RungGain(1.00, 1.11).misses
    assert not reasons.RungGain(1.00, 0.91).misses and reasons.RungGain(1.00, 0.89).misses
    assert [reasons.RungGain(1.50, x, at_most=True).misses for x in (1.01, 1.60, 1.70)] == [False, False, True]
    assert not reasons.RungGain(None, 1.5).misses and reasons.RungGain(1.5, 1.2, at_most=True).prediction == "≤ 1.50"
