"""The Hopper forward's softmax step by Python, its PTX included, as the four warps of 64 rows carry it out."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

from hopper_language import GLUON, Tile
from hopper_simulator import simulate_on_numpy

from fa2_lab.kernels.hopper.forward import softmax

LOWEST, V_TILE = np.float32(softmax.LOWEST.value), np.random.default_rng(0).standard_normal((64, 16))

# PTX by Python ------------------------------------------------------------------------------------------------

PTX = {
    "mov.f32": lambda a: a,
    "abs.f32": np.abs,
    "neg.f32": np.negative,
    "ex2.approx.f32": np.exp2,
    "mul.f32": np.multiply,
    "mul.rn.f32": np.multiply,
    "sub.rn.f32": np.subtract,
    "max.f32": np.fmax,  # of a number and NaN the number
    "fma.rn.f32": lambda a, b, c: (a.astype(float) * b + c).astype(np.float32),  # the product is exact, the sum nearly
    "and.b32": lambda a, b: (a.view(np.uint32) & b.view(np.uint32)).view(np.float32),
    "selp.f32": lambda a, b, p: np.where(p, a, b),
    "setp.gt.f32": np.greater,
    "setp.lt.f32": np.less,
    "setp.eq.f32": np.equal,
    "setp.gt.or.f32": lambda a, b, p: (a > b) | p,
    "setp.eq.and.f32": lambda a, b, p: (a == b) & p,
    "shfl.sync.bfly.b32": lambda x, lane, last, members: x[np.arange(32) ^ lane.astype(int)],
    "vote.sync.any.pred": lambda p, members: np.full(32, p.any()),
    "vote.sync.all.pred": lambda p, members: np.full(32, p.all()),
}


def ptx_constant(text: str):
    """Return the number that a constant in PTX stands for."""
    return np.uint32(int(text[2:], 16)).view(np.float32) if text[:2] in ("0f", "0x") else np.float32(text)


def run_ptx(text: str, registers: dict) -> dict:
    """Run PTX for the 32 threads of a warp, and return the registers, each of which holds 32 numbers."""
    for line in re.split(r"[;\n]\s*", text):
        if not line or line[0] in "{}." or line == "DONE:":
            continue
        negated, condition, name, operands = re.fullmatch(r"(?:@(!?)(\w+) )?(\S+) (.*)", line).groups()
        active = registers[condition] ^ bool(negated) if condition else np.full(32, True)
        if name == "bra.uni":
            assert operands == "DONE" and len(set(active)) == 1, "some threads jump and others do not"
            if active[0]:
                break
            continue
        assert name in PTX, f"{name} is not known here"
        assert ".sync" not in name or operands.endswith("31, -1" if "shfl" in name else "-1"), "threads are left out"
        to, *inputs = operands.split(", ")
        with np.errstate(over="ignore"):
            result = PTX[name](*(registers[x] if x in registers else np.full(32, ptx_constant(x)) for x in inputs))
        registers[to] = result if active.all() else np.where(active, result, registers[to])
    return registers


def inline_asm_elementwise(text, constraints, tiles, dtype, is_pure, pack):
    """Run inline PTX as Gluon does, on tiles of 64 rows.

    Thread 4 g + lane holds parts of rows g and g + 8 of a warp's 16 rows. From each 8 columns, it holds first 2 numbers
    of row g, then 2 numbers of row g + 8.
    """
    J, E = (tiles[0].shape[1], 2) if tiles[0].ndim == 4 else (1, 1)  # by lanes (64, J, 4, 2), or (64, 4)
    held = np.array([np.float32(x).reshape(4, 2, 8, J, 4, E).transpose(0, 3, 1, 5, 2, 4) for x in tiles])
    held = held.swapaxes(0, 1).reshape(4, -1, 32)  # (warps, numbers of a thread, threads)
    outputs = constraints.count("=")
    found = []
    for inputs in held:
        registers = {f"${outputs + i}": x for i, x in enumerate(inputs)}
        given = constraints.split(",")[outputs:]  # a digit ties an input to the output of this number
        registers |= {f"${tied}": x for tied, x in zip(given, inputs, strict=True) if tied.isdigit()}
        registers = run_ptx(getattr(text, "value", text), registers)
        found.append([registers[f"${i}"] for i in range(outputs)])
    found = np.array(found).reshape(4, -1, J, 2, E, 8, 4).transpose(1, 0, 3, 5, 2, 6, 4)
    found = [x.reshape(tiles[0].shape).view(Tile) for x in found]
    assert pack == 2 * J * E and len(found) == (len(dtype) if isinstance(dtype, tuple) else 1)
    return found if isinstance(dtype, tuple) else found[0]


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    simulate_on_numpy(monkeypatch)
    monkeypatch.setattr(softmax, "LOWEST", LOWEST)
    more = dict(max=np.max, inline_asm_elementwise=inline_asm_elementwise)
    more |= dict(full=lambda shape, x, dtype, layout: np.full(shape, np.float32(x)).view(Tile))
    monkeypatch.setattr(softmax, "gl", SimpleNamespace(**vars(GLUON) | more))


# Streams of tiles ---------------------------------------------------------------------------------------------


def run_softmax(tiles, scale_log2):
    """Run the softmax over tiles (64, 64) of scores. Return O, L in base 2, l, and a list of steps.

    Each step has p, and m, scale and alpha of the rows.
    """
    tiles, scale_log2 = np.float32(tiles).astype(float).view(Tile), np.float32(scale_log2)  # so p is rounded once
    m, scale, l = softmax.initial_state(tiles[0], scale_log2)
    o, steps = np.zeros((64, 16)).view(Tile), []
    for s in tiles:
        p, m, scale, l, alpha = softmax.softmax_step(s, m, scale, l, scale_log2)
        o = softmax.rescale_o(o, alpha) + p @ V_TILE
        assert all((x == x[:, :1]).all() for x in (m, scale, alpha)), "the four lanes of a row differ"
        steps.append(SimpleNamespace(p=np.array(p), m=m[:, 0], scale=scale[:, 0], alpha=alpha[:, 0]))
    l = np.array(l.sum(1))
    with np.errstate(divide="ignore", invalid="ignore"):
        return o / l[:, None], m[:, 0].astype(float) * (scale_log2 / scale[:, 0]) + np.log2(l), l, steps


def check_softmax(tiles, scale_log2, rows=slice(None)):
    """Assert that O and L agree with float64, and return the steps."""
    O, L, _, steps = run_softmax(tiles, scale_log2)
    s = np.concatenate(np.float32(tiles), 1)[rows].astype(float) * np.float32(scale_log2)
    p = np.exp2(s - s.max(1)[:, None])
    np.testing.assert_allclose(O[rows], p @ np.tile(V_TILE, (len(tiles), 1)) / p.sum(1)[:, None], atol=2e-6)
    np.testing.assert_allclose(L[rows], s.max(1) + np.log2(p.sum(1)), rtol=2e-7, atol=2e-6)
    return steps


def random_scores(size, tiles=6):
    return size * np.random.default_rng(0).standard_normal((tiles, 64, 64))


for_each_scale = pytest.mark.parametrize("scale_log2", (2.0**-20, 1.3 * 2.0**-20, 0.1275, 1.0, 1.999, 700.0, 2.0**10))
CHANGED = np.arange(64) % 3 == 0  # row g or row g + 8 of a thread, both or neither


@for_each_scale
@pytest.mark.parametrize("size", (0.0, 1.0, 4.0, 30.0, 2.0**25))
def test_softmax_step_is_right_for_ordinary_scores(size, scale_log2):
    for step in check_softmax(random_scores(size / scale_log2), scale_log2):
        assert step.p.max() <= 2**8.001 and (step.scale == np.float32(scale_log2)).all()


@for_each_scale
def test_warp_rescales_only_if_a_row_maximum_rises_by_more_than_8(scale_log2):
    """And then all its rows do, each to its own maximum, by as much as alpha says."""
    tiles, moved = random_scores(1.0 / scale_log2, tiles=20) * np.linspace(1, 6, 20)[:, None, None], []
    m = np.full(64, float(LOWEST))
    for s, step in zip(np.float32(tiles), check_softmax(tiles, scale_log2), strict=True):
        top = s.max(1).astype(float) * np.float32(scale_log2)
        moved.append((top - m > 8).reshape(4, 16).any(1).repeat(16))
        want = np.where(moved[-1], np.maximum(m, np.float32(top)), m)
        assert (step.m == want).all() and (step.alpha[want == m] == 1).all()
        np.testing.assert_allclose(step.alpha, np.exp2(m - want), rtol=1e-6)
        m = want
    assert 0.1 < np.mean(moved[1:]) < 0.9


@pytest.mark.parametrize("row, column", ((0, 0), (7, 3), (8, 63), (15, 4), (37, 6), (60, 1)))
@pytest.mark.parametrize("others", (0.0, 0.5))
def test_softmax_step_checks_every_row_and_lane_for_rescaling(row, column, others):
    """At 8 above nothing moves; a little more, and all 16 rows of one warp follow."""
    for above, moves in ((8.0, False), (8.001, True)):
        tiles = np.zeros((2, 64, 64))
        tiles[1], tiles[1, row, column] = others, above
        want = np.where(np.arange(64) // 16 == row // 16, others * moves, 0.0)
        want[row] = np.float32(above * moves)
        assert (check_softmax(tiles, 1.0)[1].m == want).all()


@for_each_scale
@pytest.mark.parametrize("sign, power", ((1, 28), (1, 40), (1, 99), (-1, 28), (-1, 31), (-1, 99)))
def test_softmax_step_is_right_for_huge_scores(sign, power, scale_log2):
    """The largest p is 1. Rows become huge, or ordinary, and no others change their scale; what came before is gone."""
    coarse, equal = 2.0 ** np.floor(np.log2(scale_log2)), np.full((3, 64, 64), sign * 2.0**power * 1.01 / scale_log2)
    huge = equal * (1 + random_scores(1.0, tiles=3) ** 2)
    for tiles in (equal, huge):
        assert all((step.scale == coarse).all() for step in check_softmax(tiles, scale_log2))
        assert (run_softmax(tiles, scale_log2)[3][0].p.max(1) == 1).all()
    assert (run_softmax(equal, scale_log2)[2] == 3 * 64).all()
    tiles, changed = random_scores(3 / scale_log2), slice(3, 6) if sign > 0 else slice(3)
    tiles[changed, CHANGED] = huge[:, CHANGED]
    steps = check_softmax(tiles, scale_log2)
    assert (steps[3].alpha[CHANGED] == 0).all() and (steps[3].alpha[~CHANGED] > 0).all()
    for step, scale in zip(steps, np.repeat((scale_log2, coarse)[::sign], 3), strict=True):
        assert (step.scale == np.float32(np.where(CHANGED, scale, scale_log2))).all()


@pytest.mark.parametrize("sign", (1, -1))
@pytest.mark.parametrize("power", range(18, 36))
def test_softmax_step_keeps_p_within_fp16_for_rounded_scores(power, sign):
    """Neighbours among float32's numbers, each the largest so far: m is rounded by as much as they may differ by."""
    for scale_log2 in (0.1275, *np.linspace(1, 1.999, 12)):
        first = np.float32(sign * 2.0**power / scale_log2 * np.linspace(1, 1.99, 64)[:, None]).view(np.int32)
        tiles = [(first + sign * n).view(np.float32).repeat(64, 1) for n in range(-2, 2)]
        for step in check_softmax(tiles, scale_log2):
            assert 2**-14 <= step.p.min() <= step.p.max() < 65504


@for_each_scale
def test_fully_masked_row_keeps_its_softmax_state(scale_log2):
    tiles = random_scores(3.0 / scale_log2) + np.repeat((0, 50 / scale_log2), 3)[:, None, None]
    tiles[:2, CHANGED] = tiles[3, CHANGED] = tiles[:, :16] = -np.inf
    for step in check_softmax(tiles, scale_log2, slice(16, None))[:2]:
        assert (step.m[CHANGED] == LOWEST).all() and (step.alpha[CHANGED] == 1).all() and (step.p[CHANGED] == 0).all()
    assert (run_softmax(tiles, scale_log2)[2][:16] == 0).all(), "store() knows a row that never sees a key by l = 0"
