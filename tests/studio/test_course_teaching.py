"""The numbers of TEACHING.md, from the models of the package, and its table of costs, from the grader."""

import re

import numpy as np
import pytest

pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'fa2-lab[course]'")
from course_class import interpreted
from course_costs import PAGE, TABLE, table_lines
from course_wrong import SLIPS

from fa2_lab.machine import budget, grid, io_model
from fa2_lab.machine.chips import CHIPS, GiB, KiB, MiB
from fa2_lab.reference.naive import logsumexp, safe_softmax
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import Mask, Tile, Tiling, cdiv
from fa2_studio.course import notebooks

A100 = CHIPS["A100 SXM 80GB"]
PLAIN, CAUSAL = (Tiling(1024, 1024, 128, 128, Mask(causal=causal)) for causal in (False, True))
NARROW = Tiling(1024, 1024, 128, 64, Mask(causal=True))
ROW = np.log([[1.0, 2.0, 5.0]])
PRODUCTS = 32 * io_model.operations("fa2", "forward", Tiling(4096, 4096, 128, 128, Mask()), 128)["matmul"]
BLOCKS = 32 * cdiv(4096, 128)


def scores_of(N: int) -> int:
    return io_model.standard_forward(Tiling(N, N, 128, 128, Mask()), 64).stores["S"]


def moved(form, tiling: Tiling, *tensors: str) -> int:
    return sum(form(tiling, 64).loads[name] for name in tensors)


def matmul(direction: str) -> int:
    return io_model.operations("fa2", direction, PLAIN, 64)["matmul"]


def one_by_one(*scores: float) -> float:
    """Return ℓ of a row after an update with each score alone."""
    state = SoftmaxState.empty(rows=1, d=1)
    for score in scores:
        state = state.update(np.array([[score]]), np.ones((1, 1)))
    return float(state.l[0])


def merged() -> float:
    """Return the output of two merged states."""
    left = SoftmaxState(np.zeros(1), np.array([2.0]), np.array([[6.0]]))
    right = SoftmaxState(np.log([4.0]), np.ones(1), np.ones((1, 1)))
    return float(left.merge(right).finalize()[0][0, 0])


NUMBERS = {
    1: scores_of(4096) * 2 / MiB,
    2: 16 * scores_of(16384) * 4 / GiB,
    3: safe_softmax(ROW).max(),
    4: logsumexp(ROW)[0],
    5: one_by_one(1, 3, 2),
    6: merged(),
    7: np.log(float(np.finfo(np.float16).max)),
    8: io_model.standard_forward(PLAIN, 64).total,
    9: moved(io_model.fa1_forward, PLAIN, "Q"),
    10: moved(io_model.fa2_forward, PLAIN, "K", "V"),
    11: io_model.fa2_forward(PLAIN, 64).total,
    12: io_model.tiles_per_row(CAUSAL).sum(),
    13: sum(NARROW.kind(i, j) is Tile.DIAGONAL for i, j in np.ndindex(NARROW.T_r, NARROW.T_c)),
    14: Mask(causal=True).interval(row=0, N_q=2, N_k=6)[1],
    15: io_model.tiles_per_row(Tiling(4096, 4096, 64, 64, Mask(causal=True, window=(255, 0))))[40],
    16: PRODUCTS / 1e9,
    17: 1e3 * PRODUCTS / A100.tensor_flops_per_second,
    18: io_model.operations("fa2", "forward", Tiling(1024, 1024, 128, 64, Mask()), 64)["exp"],
    19: A100.tensor_flops_per_clock / A100.exp_per_clock,
    20: A100.tensor_flops_per_clock / A100.exp_per_clock / (matmul("forward") / 1024**2),
    21: grid.waves(BLOCKS, A100.SMs),
    22: grid.efficiency(BLOCKS, A100.SMs),
    23: grid.efficiency(64, A100.SMs),
    24: cdiv(A100.SMs, 8),
    25: budget.forward_shared_bytes(128, 64, 128) / KiB,
    26: budget.forward_shared_bytes(128, 128, 128) / KiB,
    27: budget.forward_registers(128, 64, 128, warps=4),
    28: 2 * 8 * 8192 * 128 * 2 / MiB,
    29: matmul("backward") / matmul("forward"),
    30: moved(io_model.fa2_backward, PLAIN, "dQ"),
    31: len(grid.dq_writers(CAUSAL)[-1]),
    32: A100.tensor_flops_per_second / A100.hbm_bytes_per_second,
}


def answers() -> dict[int, str]:
    """Return {number: line} for the exam questions of TEACHING.md."""
    text = PAGE.read_text(encoding="utf-8").partition("## Forty exam questions")[2]
    return {int(n): line for n, line in re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE)}


def test_teaching_page_has_forty_questions_with_answers():
    found = answers()
    assert sorted(found) == list(range(1, 41)) and all("? — " in x or ". — " in x for x in found.values())
    assert {n for n, line in found.items() if "**" in line} == set(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_exam_numbers_equal_the_machine_models(number):
    """To as many places as it is printed with."""
    printed = re.search(r"\*\*([\d.,]+)\*\*", answers()[number])[1].replace(",", "")
    places = len(printed.partition(".")[2])
    assert f"{float(NUMBERS[number]):.{places}f}" == printed


def test_table_of_mistake_costs_equals_the_grader():
    text = PAGE.read_text(encoding="utf-8")
    for number, _, _, hint in SLIPS:
        assert re.search(rf"^\| {number}: .*\| {re.escape(hint.rstrip('.'))} \| [\d.]+ \|$", text, re.MULTILINE), hint
    interpreted("4")
    assert all(line in text for line in table_lines([SLIPS[0], next(slip for slip in SLIPS if slip[0] == "4")]))


def test_mistake_costs_its_step_and_at_most_a_quarter_of_the_rest():
    for line in TABLE.search(PAGE.read_text(encoding="utf-8"))[0].splitlines():
        number, lost, points = re.match(r"\| (\d): (\w+).* \| ([\d.]+) \|$", line).groups()
        most = notebooks.points_by_step(notebooks.source_notebook(notebooks.find_assignment(number)))
        first = list(most).index(f"test_{lost}")
        step, *later = list(most.values())[first:]
        assert float(points) <= step + sum(later) / 4, line
