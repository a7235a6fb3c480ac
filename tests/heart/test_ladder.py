"""The ladder: every rung against float64, on a GPU where there is one, else in Triton's interpreter; and its rules.

A rung is one file that stands alone, and differs from the one before it by one change.
"""

import ast
import re
from importlib.metadata import version
from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
from fa2_lab.kernels import interpreter, ladder  # noqa: E402
from fa2_lab.tools import steps  # noqa: E402

if interpreter.misfit():
    pytest.skip(interpreter.misfit(), allow_module_level=True)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float32: 1e-6}  # of O; the rounding of O itself is in it
SMALL = [(128, 128, 64, True), (70, 100, 128, True), (100, 70, 64, True), (65, 129, 64, False)]  # N_q, N_k, d, causal
LARGE = [(1000, 1000, 64, True), (1000, 1300, 128, True), (1300, 1000, 128, True), (999, 1025, 64, False),
         (1025, 999, 128, False), (1, 2000, 64, True), (4096, 4096, 128, True)]  # fmt: skip
MOST_LINES = 25  # that may differ between neighbours


def gluon(rung: str) -> bool:
    return "gluon" in steps.source(rung)


def runnable(rungs=ladder.RUNGS) -> list:
    """All rungs, those that need another machine marked as skipped."""
    missing = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
    return [pytest.param(rung, marks=missing) if gluon(rung) else rung for rung in rungs]


def fenced(x):
    """x with NaN behind its last element, so that a read past the end is seen."""
    memory = torch.full((x.numel() + 128 * x.shape[-1],), torch.nan, dtype=x.dtype, device=DEVICE)
    memory[: x.numel()] = x.flatten()
    return memory[: x.numel()].view(x.shape)


def tensors(N_q, N_k, d, dtype=torch.float16, heads=2):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, n, d, generator=draw).to(dtype) for n in (N_q, N_k, N_k)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """torch.empty hands out NaN, so that what a kernel leaves unwritten is seen."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def with_nan(*args, make=make, **options):
            made = make(*args, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        monkeypatch.setattr(torch, name, with_nan)


def errors(rung, q, k, v, causal):
    """How far O and L are from float64."""
    seen = oracle.visible(q.shape[2], k.shape[2], causal)
    heads = zip(*(x.flatten(0, 1).double().numpy() for x in (q, k, v)), strict=True)
    want_O, want_L = map(np.stack, zip(*(oracle.dense(*qkv, seen) for qkv in heads), strict=True))
    O, L = ladder.load(rung).forward(*(fenced(x) for x in (q, k, v)), causal)
    assert (O.dtype, O.shape, L.dtype, L.shape) == (q.dtype, q.shape, torch.float32, q.shape[:3])
    found = [x.flatten(0, 1).double().cpu().numpy() for x in (O, L)]
    return oracle.error(found[0], want_O), oracle.error(found[1], want_L)


@pytest.mark.parametrize("rung", runnable())
@pytest.mark.parametrize(("N_q", "N_k", "d", "causal"), LARGE if GPU else SMALL)
def test_a_rung_is_right(rung, N_q, N_k, d, causal):
    wrong_O, wrong_L = errors(rung, *tensors(N_q, N_k, d), causal)
    assert wrong_O < TOLERANCE[torch.float16] and wrong_L < 1e-5


@pytest.mark.parametrize("rung", ladder.SIDE)
@pytest.mark.parametrize(("N", "d", "size"), [(128, 64, 1), (192, 128, 300)])
def test_a_side_rung_is_right(rung, N, d, size):
    q, k, v = tensors(N, N, d)
    wrong_O, wrong_L = errors(rung, size * q, k, v, False)
    assert wrong_O < TOLERANCE[torch.float16] and wrong_L < 1e-5
    with pytest.raises(ValueError, match=r"q, k, causal: got .* it takes"):
        ladder.load(rung).forward(q, k, v, True)


@pytest.mark.parametrize("rung", runnable(ladder.BACKWARD))
@pytest.mark.parametrize(("N_q", "N_k", "d", "causal"), LARGE if GPU else SMALL)
def test_a_backward_rung_is_right(rung, N_q, N_k, d, causal):
    q, k, v, dO = *tensors(N_q, N_k, d), torch.randn(1, 2, N_q, d, generator=torch.Generator().manual_seed(1)).half()
    seen = oracle.visible(N_q, N_k, causal)
    heads = zip(*(x[0].double().numpy() for x in (q, k, v, dO)), strict=True)
    O, L, *gradients = map(np.stack, zip(*(oracle.dense(*x[:3], seen, None, None, x[3]) for x in heads), strict=True))
    O, L = (torch.from_numpy(x)[None] for x in (O, L))
    given = [fenced(x) for x in (q, k, v, O.half(), L.float(), dO)]
    for x, got, want in zip((q, k, v), ladder.load(rung).backward(*given, causal), gradients, strict=True):
        assert (got.dtype, got.shape) == (x.dtype, x.shape)
        assert oracle.error(got[0].double().cpu().numpy(), want) < 2e-3


@pytest.mark.parametrize("rung", runnable())
def test_a_rung_takes_bf16(rung):
    wrong_O, wrong_L = errors(rung, *tensors(70, 100, 64, torch.bfloat16), True)
    assert wrong_O < TOLERANCE[torch.bfloat16] and wrong_L < 1e-5


@pytest.mark.skipif(GPU, reason="a GPU multiplies fp32 with fewer bits")
@pytest.mark.parametrize("rung", [rung for rung in ladder.RUNGS if not gluon(rung)])
def test_a_rung_is_exact_in_fp32(rung):
    wrong_O, wrong_L = errors(rung, *tensors(70, 100, 64, torch.float32), True)
    assert wrong_O < TOLERANCE[torch.float32] and wrong_L < 1e-6


@pytest.mark.parametrize("rung", runnable())
@pytest.mark.parametrize("way", ["large", "far below zero", "rising"])
def test_a_rung_takes_hard_scores(rung, way):
    q, k, v = tensors(70, 130, 64, heads=1)
    if way == "large":
        q = 300 * q
    elif way == "far below zero":  # all scores near −7,000: a maximum that starts at 0 would underflow
        q, k = q.abs() + 30, -k.abs() - 30
    else:  # the maximum grows from tile to tile, in each order of visiting
        k = k * torch.linspace(0.1, 20, 130)[None, None, :, None].half()
    for keys, values in ((k, v), (k.flip(2), v.flip(2))):
        wrong_O, wrong_L = errors(rung, q, keys.contiguous(), values.contiguous(), False)
        assert wrong_O < TOLERANCE[torch.float16] and wrong_L < 1e-5


@pytest.mark.parametrize("rung", runnable())
def test_a_rung_takes_views(rung):
    """(batch, N, heads, d) seen through a transpose, two batch entries, heads that differ."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 80, 2, 64, generator=draw).half().to(DEVICE).transpose(1, 2) for _ in range(3))
    O, L = ladder.load(rung).forward(q, k, v, True)
    for b in range(2):
        for h in range(2):
            one = (x[b, h].double().cpu().numpy() for x in (q, k, v))
            want_O, want_L = oracle.dense(*one, oracle.visible(80, 80, True))
            assert oracle.error(O[b, h].double().cpu(), want_O) < 1e-3
            assert oracle.error(L[b, h].double().cpu(), want_L) < 1e-5


# The rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", ladder.RUNGS + ladder.SIDE + ladder.BACKWARD)
def test_a_rung_stands_alone(rung):
    """It imports nothing of the package, and its first line is the sentence that names its change."""
    tree = ast.parse(steps.source(rung))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {"torch", "triton", "math", "collections", "functools"}
    number, name = rung[:3].removeprefix("r"), rung[4:].replace("_", " ")
    assert steps.sentence(rung).removeprefix("Side r").removeprefix("R").startswith(
        f"ung {number}, {name}: "
    ) and steps.sentence(rung).endswith(".")
    lines, most = len(steps.source(rung).splitlines()), 200 if gluon(rung) else 125 if rung in ladder.BACKWARD else 110
    says = re.search(rf"longer\s+than {most} lines because", ast.get_docstring(tree))
    assert lines <= (most if says is None else 325) and (says is None or lines > most)


@pytest.mark.beside("ladder_worker.py")
@pytest.mark.parametrize("rung", [rung for rung in ladder.RUNGS + ladder.BACKWARD if gluon(rung)])
def test_a_hopper_rung_compiles_without_spills_and_multiplies_on_tensor_cores(rows, rung):
    made = [row for row in rows if row["rung"] == rung]
    assert all(row["spills"] == 0 for row in made) and made[-1]["tensor"] > 0


@pytest.mark.beside("ladder_worker.py")
@pytest.mark.parametrize(("name", "kernels"), [("b00", 2), ("b01", 3), ("s00", 1), ("s01", 1)])
def test_what_stands_beside_the_ladder_compiles_without_spills(rows, name, kernels):
    compiled = [row for row in rows if row["rung"].startswith(name)]
    most = 9 if name == "s00" and version("triton").startswith("3.7.") else 0  # as its file says
    assert len(compiled) == kernels and all(row["spills"] <= most for row in compiled)
    assert sum(row["tensor"] for row in compiled) > 0


@pytest.mark.parametrize(("old", "new"), list(pairwise(ladder.RUNGS)))
def test_neighbours_differ_by_one_change(old, new):
    """A step of more lines says why in DIFF, and a small one has no DIFF."""
    reason = getattr(ladder.load(new), "DIFF", None)
    assert (steps.changed(old, new) > MOST_LINES) == (reason is not None)
    assert reason is None or len(reason.split()) > 3


def test_a_rung_is_found_by_its_number():
    assert {ladder.find(name) for name in ("7", "07", "r07", "R07 ", "r07_two_loops")} == {"r07_two_loops"}
    for wrong in ("99", "", "r", "two", "r07_three_loops"):
        with pytest.raises(ValueError, match=r"rung: got .* it takes r00_standard, "):
            ladder.find(wrong)


def test_a_diff_shows_what_moved_and_what_changed():
    shown = steps.diff("02", "03").splitlines()
    assert "-     for i in range(0, N_q, B_r):  # FA2.A1.L3" in shown  # the loop is gone
    assert any(line.startswith("+     i, head = tl.program_id(0) * B_r, tl.program_id(1)") for line in shown)
    assert sum(line.startswith(("+", "-")) for line in shown) <= 2 * steps.changed("02", "03")
    assert "\033[32m+" in steps.diff("02", "03", colours=True)
