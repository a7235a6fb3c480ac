"""The model of additions in turn: what its order is good for."""

from fa2_lab.machine.turns import handed_out, time
from fa2_lab.tiles import CAUSAL, NO_MASK, Tiling


def test_without_waiting_time_is_the_work():
    tiling = Tiling(1024, 1024, 64, 128)
    assert time(handed_out(tiling, 4, 4), SMs=1, in_turn=False, ends=0) == 4 * 8 * 16
    assert time(handed_out(tiling, 4, 4), SMs=32, in_turn=False, ends=0) == 16


def test_one_program_waits_for_nobody_but_a_slow_handover():
    tiling = Tiling(512, 512, 64, 128)
    alone = [time(handed_out(tiling, 1, 1), SMs=1, in_turn=x, ends=0) for x in (False, True)]
    assert alone == [32, 32]


def test_two_follow_each_other():
    """Two column blocks and eight row blocks: the second one is a handover behind all the way."""
    tiling = Tiling(512, 256, 64, 128)
    assert time(handed_out(tiling, 1, 1), SMs=2, in_turn=True, handover=1.5, ends=0) == 8 + 1.5


def test_the_last_column_block_first_waits_least_under_the_causal_mask():
    def price(mask, last_column_first):
        tiling = Tiling(4096, 4096, 64, 128, mask)
        free = time(handed_out(tiling, 16, 4, last_column_first=False), SMs=33, in_turn=False)
        return time(handed_out(tiling, 16, 4, last_column_first), SMs=33, in_turn=True) / free

    assert price(CAUSAL, last_column_first=True) < 1.08 < 1.15 < price(CAUSAL, last_column_first=False)
    assert abs(price(NO_MASK, last_column_first=True) - price(NO_MASK, last_column_first=False)) < 1e-9
