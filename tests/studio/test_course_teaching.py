"""The numbers of TEACHING.md, from the models of the package, and its table of costs, from the grader."""

import re

import numpy as np
import pytest

pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'fa2-lab[course]'")
from course_class import needs_interpreter
from course_costs import COST_TABLE, TEACHING_PAGE, table_lines
from course_wrong import MISTAKES

from fa2_lab.machine import budget, grid, io_model
from fa2_lab.machine.chips import CHIPS, GiB, KiB, MiB
from fa2_lab.reference.naive import logsumexp, safe_softmax
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import Mask, Tile, Tiling, cdiv
from fa2_studio.course import notebooks

A100 = CHIPS["A100 SXM 80GB"]
NON_CAUSAL, CAUSAL = (Tiling(1024, 1024, 128, 128, Mask(causal=causal)) for causal in (False, True))
NARROW_TILES = Tiling(1024, 1024, 128, 64, Mask(causal=True))
SCORES = np.log([[1.0, 2.0, 5.0]])
MATMUL_FLOPS = 32 * io_model.operations("fa2", "forward", Tiling(4096, 4096, 128, 128, Mask()), 128)["matmul"]
THREAD_BLOCKS = 32 * cdiv(4096, 128)


def score_count(N: int) -> int:
    return io_model.standard_forward(Tiling(N, N, 128, 128, Mask()), 64).stores["S"]


def elements_loaded(form, tiling: Tiling, *tensors: str) -> int:
    return sum(form(tiling, 64).loads[name] for name in tensors)


def matmul_flops(direction: str) -> int:
    return io_model.operations("fa2", direction, NON_CAUSAL, 64)["matmul"]


def online_l(*scores: float) -> float:
    """Return ℓ of a row after an update with each score alone."""
    state = SoftmaxState.empty(rows=1, d=1)
    for score in scores:
        state = state.update(np.array([[score]]), np.ones((1, 1)))
    return float(state.l[0])


def merged_output() -> float:
    """Return the output of two merged states."""
    left = SoftmaxState(np.zeros(1), np.array([2.0]), np.array([[6.0]]))
    right = SoftmaxState(np.log([4.0]), np.ones(1), np.ones((1, 1)))
    return float(left.merge(right).finalize()[0][0, 0])


ANSWERS = {
    1: score_count(4096) * 2 / MiB,
    2: 16 * score_count(16384) * 4 / GiB,
    3: safe_softmax(SCORES).max(),
    4: logsumexp(SCORES)[0],
    5: online_l(1, 3, 2),
    6: merged_output(),
    7: np.log(float(np.finfo(np.float16).max)),
    8: io_model.standard_forward(NON_CAUSAL, 64).total,
    9: elements_loaded(io_model.fa1_forward, NON_CAUSAL, "Q"),
    10: elements_loaded(io_model.fa2_forward, NON_CAUSAL, "K", "V"),
    11: io_model.fa2_forward(NON_CAUSAL, 64).total,
    12: io_model.tiles_per_row(CAUSAL).sum(),
    13: sum(NARROW_TILES.kind(i, j) is Tile.DIAGONAL for i, j in np.ndindex(NARROW_TILES.T_r, NARROW_TILES.T_c)),
    14: Mask(causal=True).interval(row=0, N_q=2, N_k=6)[1],
    15: io_model.tiles_per_row(Tiling(4096, 4096, 64, 64, Mask(causal=True, window=(255, 0))))[40],
    16: MATMUL_FLOPS / 1e9,
    17: 1e3 * MATMUL_FLOPS / A100.tensor_flops_per_second,
    18: io_model.operations("fa2", "forward", Tiling(1024, 1024, 128, 64, Mask()), 64)["exp"],
    19: A100.tensor_flops_per_clock / A100.exp_per_clock,
    20: A100.tensor_flops_per_clock / A100.exp_per_clock / (matmul_flops("forward") / 1024**2),
    21: grid.waves(THREAD_BLOCKS, A100.SMs),
    22: grid.efficiency(THREAD_BLOCKS, A100.SMs),
    23: grid.efficiency(64, A100.SMs),
    24: cdiv(A100.SMs, 8),
    25: budget.forward_shared_bytes(128, 64, 128) / KiB,
    26: budget.forward_shared_bytes(128, 128, 128) / KiB,
    27: budget.forward_registers(128, 64, 128, warps=4),
    28: 2 * 8 * 8192 * 128 * 2 / MiB,
    29: matmul_flops("backward") / matmul_flops("forward"),
    30: elements_loaded(io_model.fa2_backward, NON_CAUSAL, "dQ"),
    31: len(grid.dq_writers(CAUSAL)[-1]),
    32: A100.tensor_flops_per_second / A100.hbm_bytes_per_second,
}


def printed_answers() -> dict[int, str]:
    """Return {number: line} for the exam questions of TEACHING.md."""
    text = TEACHING_PAGE.read_text(encoding="utf-8").partition("## Forty exam questions")[2]
    return {int(n): line for n, line in re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE)}


def test_teaching_page_has_forty_questions_with_answers():
    found = printed_answers()
    assert sorted(found) == list(range(1, 41)) and all("? — " in x or ". — " in x for x in found.values())
    assert {n for n, line in found.items() if "**" in line} == set(ANSWERS)


@pytest.mark.parametrize("number", ANSWERS)
def test_exam_numbers_equal_the_machine_models(number):
    """To as many places as it is printed with."""
    printed = re.search(r"\*\*([\d.,]+)\*\*", printed_answers()[number])[1].replace(",", "")
    places = len(printed.partition(".")[2])
    assert f"{float(ANSWERS[number]):.{places}f}" == printed


def test_table_of_mistake_costs_equals_the_grader():
    text = TEACHING_PAGE.read_text(encoding="utf-8")
    for number, _, _, hint in MISTAKES:
        assert re.search(rf"^\| {number}: .*\| {re.escape(hint.rstrip('.'))} \| [\d.]+ \|$", text, re.MULTILINE), hint
    needs_interpreter("4")
    assert all(line in text for line in table_lines([MISTAKES[0], next(slip for slip in MISTAKES if slip[0] == "4")]))


def test_mistake_costs_its_step_and_at_most_a_quarter_of_the_rest():
    for line in COST_TABLE.search(TEACHING_PAGE.read_text(encoding="utf-8"))[0].splitlines():
        number, lost, points = re.match(r"\| (\d): (\w+).* \| ([\d.]+) \|$", line).groups()
        most = notebooks.points_by_step(notebooks.source_notebook(notebooks.find_assignment(number)))
        first = list(most).index(f"test_{lost}")
        step, *later = list(most.values())[first:]
        assert float(points) <= step + sum(later) / 4, line
