"""The ladder: every rung against float64, on a GPU or in Triton's interpreter; that it makes its change; its rules."""

import ast
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from threading import Barrier
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import torch
from kernel_truth import DEVICE, GPU, nan_in_empty  # noqa: F401 (before Triton; nan_in_empty is a fixture)

triton = pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
import triton.language as tl  # noqa: E402

from fa2_lab.kernels import interpreter, ladder  # noqa: E402
from fa2_lab.kernels.common import tile  # noqa: E402
from fa2_lab.tools import command, rung_check, rung_diff  # noqa: E402

if interpreter.version_conflict():
    pytest.skip(interpreter.version_conflict(), allow_module_level=True)

ON_HOPPER = GPU and torch.cuda.get_device_capability() == (9, 0)
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float32: 1e-6}  # of O; the rounding of O itself is in it
SMALL = [(128, 128, 64, True), (65, 66, 128, True), (100, 37, 64, True), (65, 129, 64, False), (100, 37, 64, False)]
LARGE = [(1000, 1000, 64, True), (1000, 1300, 128, True), (1300, 1000, 128, True), (999, 1025, 64, False),
         (1025, 999, 128, False), (1, 2000, 64, True), (100, 37, 64, True), (4096, 4096, 128, True)]  # fmt: skip


def uses_gluon(rung: str) -> bool:
    return "gluon" in rung_diff.source(rung)


def rung_params(rungs=ladder.RUNGS) -> list:
    """Return all rungs as parameters. Those that need a Hopper GPU are marked as skipped if there is none."""
    missing = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
    return [pytest.param(rung, marks=missing) if uses_gluon(rung) else rung for rung in rungs]


def with_nan_behind(x):
    """Return x with NaN in memory behind its last element, so that a read past the end shows."""
    memory = torch.full((x.numel() + 128 * x.shape[-1],), torch.nan, dtype=x.dtype, device=DEVICE)
    memory[: x.numel()] = x.flatten()
    return memory[: x.numel()].view(x.shape)


def random_qkv(N_q, N_k, d, dtype=torch.float16, heads=2):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, n, d, generator=generator).to(dtype) for n in (N_q, N_k, N_k)]


def check_rung(rung, q, k, v, causal):
    """Assert that O and L of a rung are as near to float64 as the dtype allows."""
    seen = oracle.visible(q.shape[2], k.shape[2], causal)
    heads = zip(*(x.flatten(0, 1).double().cpu().numpy() for x in (q, k, v)), strict=True)
    want = map(np.stack, zip(*(oracle.one_head(*qkv, seen) for qkv in heads), strict=True))
    O, L = ladder.load(rung).forward(q, k, v, causal)
    assert (O.dtype, O.shape, L.dtype, L.shape) == (q.dtype, q.shape, torch.float32, q.shape[:3])
    limits = TOLERANCE[q.dtype], 1e-6 if q.dtype == torch.float32 else 1e-5
    for name, got, truth, limit in zip("OL", (O, L), want, limits, strict=True):
        error = oracle.relative_error(got.flatten(0, 1).double().cpu().numpy(), truth)
        assert error < limit, f"{name} of {rung}: {error:.1e}"


@pytest.mark.parametrize("rung", rung_params(ladder.RUNGS + ladder.VARIANTS))
def test_rung_matches_float64(rung):
    for *sizes, causal in LARGE if GPU else SMALL:
        check_rung(rung, *map(with_nan_behind, random_qkv(*sizes)), causal)
    check_rung(rung, *map(with_nan_behind, random_qkv(70, 100, 64, torch.bfloat16)), True)
    if not GPU:  # which multiplies fp32 with fewer bits
        check_rung(rung, *map(with_nan_behind, random_qkv(70, 100, 64, torch.float32)), True)


@pytest.mark.parametrize("rung", rung_params(ladder.RUNGS + ladder.VARIANTS))
def test_rung_is_right_for_extreme_scores_and_strided_inputs(rung):
    q, k, v = (x.to(DEVICE) for x in random_qkv(70, 130, 64, heads=1))
    rising = k * torch.linspace(0.1, 20, 130, device=DEVICE)[None, None, :, None].half()
    extremes = [(300 * q, k), (q.abs() + 30, -k.abs() - 30), (q, rising)]  # all near −7,000; a maximum that grows
    for queries, keys in extremes:
        check_rung(rung, queries, keys, v, False)
        check_rung(rung, queries, keys.flip(2).contiguous(), v.flip(2).contiguous(), False)
    draw = torch.Generator().manual_seed(1)  # (batch, N, heads, d) seen through a transpose, and heads that differ
    transposed = (torch.randn(2, 80, 2, 64, generator=draw).half().to(DEVICE).transpose(1, 2) for _ in range(3))
    check_rung(rung, *transposed, True)


@pytest.mark.parametrize("rung", rung_params(ladder.VARIANTS))
@pytest.mark.parametrize("key", range(8))  # of 8 neighbours one exponential is not the hardware's
def test_software_exponential_propagates_nan(rung, key):
    q, k, v = (x.to(DEVICE) for x in random_qkv(64, 128, 64))
    k[:, :, key] = torch.nan
    assert ladder.load(rung).forward(q, k, v, False)[0].isnan().all()


@pytest.mark.parametrize("rung", ladder.SIDE)
@pytest.mark.parametrize(("N", "d", "size"), [(128, 64, 1), (192, 128, 300)])
def test_side_rung_matches_float64(rung, N, d, size):
    q, k, v = random_qkv(N, N, d)
    check_rung(rung, *map(with_nan_behind, (size * q, k, v)), False)
    with pytest.raises(ValueError, match=r"q, k, causal: got .* it takes"):
        ladder.load(rung).forward(q, k, v, True)


def with_low_scores(q, k):
    """Return q and k changed so that scores are about −40, and e^(−L) exceeds the range of 16-bit numbers."""
    q[..., 0], k[..., 0] = 100, -4
    return q, k


@pytest.mark.parametrize("change", [lambda *x: x, with_low_scores], ids=["", "low"])
@pytest.mark.parametrize("rung", rung_params(ladder.BACKWARD))
@pytest.mark.parametrize(("N_q", "N_k", "d", "causal"), LARGE if GPU else SMALL)
def test_backward_rung_matches_float64(rung, N_q, N_k, d, causal, change):
    q, k, v, dO = *random_qkv(N_q, N_k, d), torch.randn(1, 2, N_q, d, generator=torch.Generator().manual_seed(1)).half()
    q, k = change(q, k)
    seen = oracle.visible(N_q, N_k, causal)
    heads = zip(*(x[0].double().numpy() for x in (q, k, v, dO)), strict=True)
    results = (oracle.one_head(*x[:3], seen, None, None, x[3]) for x in heads)
    O, L, *gradients = map(np.stack, zip(*results, strict=True))
    O, L = (torch.from_numpy(x)[None] for x in (O, L))
    given = [with_nan_behind(x) for x in (q, k, v, O.half(), L.float(), dO)]
    for x, got, want in zip((q, k, v), ladder.load(rung).backward(*given, causal), gradients, strict=True):
        assert (got.dtype, got.shape) == (x.dtype, x.shape)
        assert oracle.relative_error(got[0].double().cpu().numpy(), want) < 2e-3


def run_bulk_backward(Q, K, V, dO, L, D, causal):
    """Return dQ, dK and dV of one head, computed by the consumers of rung b02 as two Python threads.

    Each thread has 64 of 128 keys.
    """
    from hopper_language import GLUON, Tile, mma_wait, numpy_mma, unjitted
    from hopper_simulator import initial_scores_and_dP

    def blocks(X, rows):  # what the copy engine brings: rows past the end are zero
        padded = np.zeros((-(-len(X) // rows) * rows, d))
        padded[: len(X)] = X
        return padded.reshape(-1, 1, rows, d).view(Tile)

    def store(x, X, head, row, tile):
        X[row : row + 64] = x[: len(X[row : row + 64])]

    def add(X, at, tile):
        dQ[at[1] : at[1] + 64, at[2] : at[2] + 64] += tile[0]

    (N_q, d), N_k, barrier = Q.shape, len(K), Barrier(2)
    B_r = 8192 // d
    initial = initial_scores_and_dP(L[None, None], D[None, None], d, B_r).reshape(-1, 1, 1, 2 * B_r)
    Q, dO, K, V = blocks(Q, B_r), blocks(dO, B_r), blocks(K, 128), blocks(V, 128).reshape(-1, 1, 64, d)
    dQ, dK, dV = np.zeros((len(Q) * B_r, d)), np.full((N_k, d), np.nan), np.full((N_k, d), np.nan)
    module = ladder.copied("b02")
    vars(module).update(
        unjitted(module),
        gl=GLUON,
        hopper=SimpleNamespace(warpgroup_mma=numpy_mma, warpgroup_mma_wait=mma_wait, fence_async_shared=lambda: None),
        mbarrier=SimpleNamespace(
            arrive=lambda barrier, count: None, wait=lambda barrier, phase: barrier.wait(timeout=20)
        ),
        tma=SimpleNamespace(store_wait=lambda n: None, async_atomic_add=add),
        wait=lambda ring, n: ring.tiles[n, 0],
        load_acc_init=lambda initial, which: np.tile(initial[0, which * B_r : (which + 1) * B_r], (64, 1)).view(Tile),
        release=lambda ring, n: None,
        as_operand=lambda x, like: x,
        acc_layout=lambda columns: None,
        store=store,
        **{name: getattr(module, name).value for name in ("B_c", "FAR_ROW", "NEG_INF")},
    )
    for j in range(0, N_k, 128):
        first = max(j + N_q - N_k, 0) // B_r if causal else 0
        tiles = Q[first:], K[j // 128 :], V[j // 64 :], dO[first:], initial[first:]
        rings = tuple(SimpleNamespace(tiles=x.view(Tile)) for x in tiles)
        shared = np.zeros((2, 128, B_r)).view(Tile), barrier, np.zeros((2, 1, 64, 64)).view(Tile)
        arguments = dQ, dK, dV, rings, shared, (0, j, first, len(Q)), (N_q, N_k, d**-0.5, d**-0.5 / np.log(2)), causal
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda c, arguments=arguments: module.consumer(c, *arguments), range(2)))
    return d**-0.5 * dQ[:N_q], dK, dV


@pytest.mark.parametrize(("N_q", "N_k", "d", "causal"), [(65, 200, 128, True), (200, 129, 64, False)])
def test_bulk_backward_ignores_rows_past_the_end_of_K(N_q, N_k, d, causal):
    """Also where all scores are about −1,000, and e^(−L) is infinite: that times a key of zeros is not a number."""
    draw = np.random.default_rng(0)
    Q, K, v, dO = (draw.standard_normal((n, d)) for n in (N_q, N_k, N_k, N_q))
    for q, k in ((Q, K), (abs(Q) + 10, -abs(K) - 10)):
        O, L, *want = oracle.one_head(q, k, v, oracle.visible(N_q, N_k, causal), None, None, dO)
        for got, gradient in zip(run_bulk_backward(q, k, v, dO, L, (dO * O).sum(1), causal), want, strict=True):
            assert oracle.relative_error(got, gradient) < 1e-9


def test_software_exponential_has_the_documented_error():
    from test_hopper_softmax import PTX, run_ptx

    def add_rounded_down(a, b):  # the sum, rounded to the next number below
        near = (a.astype(float) + b).astype(np.float32)
        return np.where(near > a.astype(float) + b, np.nextafter(near, np.float32(-np.inf)), near)

    as_int = lambda x: x.view(np.int32)  # noqa: E731
    PTX |= {
        "max.NaN.f32": np.maximum,
        "add.rm.f32": add_rounded_down,
        "mov.b32": lambda a: a,
        "mad.lo.s32": lambda a, b, c: (as_int(a) * as_int(b) + as_int(c)).view(np.float32),
    }
    text = ladder.copied("x23").cubic("y", "x")
    x = np.random.default_rng(0).uniform(-126, 128, (1000, 32)).astype(np.float32)
    y = np.array([run_ptx(text, dict(x=row))["y"] for row in x])
    assert abs(y / np.exp2(x.astype(float)) - 1).max() < 9e-5
    special = np.resize(np.float32([-np.inf, -1000, 0, np.nan]), 32)
    np.testing.assert_array_equal(run_ptx(text, dict(x=special))["y"][:4], [0, 0, 1, np.nan])


# Each rung makes its change -----------------------------------------------------------------------------------

COUNTED_OPERATIONS = "dot exp exp2 fdiv select load masked_load masked_store atomic_rmw".split()
# Of two heads of 256 rows under the causal mask, in 32 tiles of 64 × 64: 20 that a row sees, 8 of them on the diagonal.
OPERATION_COUNTS = {
    "r00_standard": dict(dot=64, programs=32 + 512 + 8),  # a tile of S, a row of P, a row block of O
    "r01_fa1": dict(dot=64, programs=2, masked_store=3 * 32, exp=3 * 32),  # O, l and m at every tile
    "r02_rows_outside": dict(programs=2, masked_store=2 * 8),
    "r03_row_blocks": dict(programs=8, masked_store=2 * 8, fdiv=32),
    "r04_one_maximum": dict(programs=8, fdiv=32, exp=2 * 32),
    "r05_deferred": dict(programs=8, fdiv=8, exp=2 * 32, exp2=0),
    "r06_base_2": dict(fdiv=8, exp=0, exp2=2 * 32, dot=64),
    "r07_skipping": dict(exp2=2 * 20, dot=2 * 20, load=0, masked_load=8 + 2 * 20, select=20 + 16),
    "r08_two_loops": dict(dot=2 * 20, load=0, masked_load=8 + 2 * 20, select=8 + 16),
    "r09_free_loads": dict(dot=2 * 20, load=2 * 12, select=8 + 16),
    "r10_pipelined": dict(dot=2 * 20, load=2 * 12, select=8 + 16),
    "r11_diagonal_first": dict(dot=2 * 20, load=2 * 12, select=8 + 16),
    "r12_heavy_first": dict(dot=2 * 20, load=2 * 12, select=8 + 16),
    "r13_groups": dict(dot=2 * 20, load=2 * 12, select=8 + 16),
    "r14_bulk_copies": dict(dot=2 * 20, load=0, select=8 + 16),
    "b00_atomics": dict(atomic_rmw=20, dot=5 * 20),
    "b01_two_passes": dict(atomic_rmw=0, dot=4 * 20 + 3 * 20),
}


@pytest.mark.skipif(GPU, reason="counts what the interpreter does")
@pytest.mark.parametrize("rung", OPERATION_COUNTS)
def test_rung_changes_the_operations_that_its_first_line_names(rung, monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    counts, dots = Counter(), []
    for name, method in {"programs": "set_grid_idx", **{name: f"create_{name}" for name in COUNTED_OPERATIONS}}.items():
        real = getattr(InterpreterBuilder, method)

        def counting(self, *given, name=name, real=real, **named):
            counts[name] += 1
            if name == "programs":
                dots.append(0)
            elif name == "dot":
                dots[-1] += 1
            return real(self, *given, **named)

        monkeypatch.setattr(InterpreterBuilder, method, counting)
    q, k, v = random_qkv(256, 256, 64)
    module = ladder.load(rung)
    if rung in ladder.BACKWARD:
        module.backward(q, k, v, torch.zeros_like(q), torch.zeros(q.shape[:3]), q, True)
    else:
        module.forward(q, k, v, True)
    assert {name: counts[name] for name in OPERATION_COUNTS[rung]} == OPERATION_COUNTS[rung]
    assert rung != "r12_heavy_first" or dots[:4] == [8, 6, 4, 2]  # of the first head


def launch_arguments(rung, monkeypatch, **sizes) -> tuple[tuple, tuple, dict]:
    """Return (grid, arguments, options) of a rung's launch, without launching the kernel."""
    calls, module = [], ladder.load(rung)
    spy = type("Spy", (), {"__getitem__": lambda _, grid: lambda *given, **named: calls.append((grid, given, named))})
    monkeypatch.setattr(module, "forward_kernel", spy())
    module.forward(*random_qkv(**sizes), True)
    return calls[0]


def test_rung_launch_options_match_their_description(monkeypatch):
    sizes = dict(N_q=100, N_k=300, d=64, heads=3)
    stages = [launch_arguments(rung, monkeypatch, **sizes)[2]["num_stages"] for rung in ladder.RUNGS[9:11]]
    assert stages == [1, 3]
    assert [launch_arguments(rung, monkeypatch, **sizes)[0] for rung in ("11", "12")] == [(2, 3), (3, 2)]
    for rung in ("13", "14"):  # heads side by side whose K and V fill 16 MiB
        for N_k, l2_group in ((300, 2**24 // (2 * 300 * 64 * 2)), (2**16, 1), (2**17, 1)):
            grid, given, _ = launch_arguments(rung, monkeypatch, **sizes | dict(N_k=N_k))
            assert grid == (6,) and given[7:9] == (3, l2_group)


block_coord = tile.block_coord


@triton.jit
def block_of_program(T, heads, l2_group):
    return block_coord(tl.program_id(0), T, heads, l2_group)


@triton.jit
def block_coords_kernel(found, T, heads, l2_group, block_coord: tl.constexpr):
    i, head = block_coord(T, heads, l2_group)
    tl.store(found + 2 * tl.program_id(0), i)
    tl.store(found + 2 * tl.program_id(0) + 1, head)


@pytest.mark.parametrize("rung, blocks", [("13", (2, 1, 0)), ("14", (2, 1, 0)), ("", (0, 1, 2))])
def test_rung_launch_order_is_longest_first_and_complete(rung, blocks):
    """Seven heads of three blocks, four heads side by side: 0 to 3 block by block, then the three that are left."""
    found = torch.full((21, 2), -1, dtype=torch.int32, device=DEVICE)
    block_coords_kernel[(21,)](found, 3, 7, 4, ladder.load(rung).block_coord if rung else block_of_program)
    want = [[i, head] for heads in (range(4), range(4, 7)) for i in blocks for head in heads]
    assert found.tolist() == want


def allowed_spills(rung: str) -> int:
    """Return the number of registers that a rung may spill, which its file also gives."""
    return {"s00 3.7": 9, "b02 3.9": 11}.get(f"{rung[:3]} {version('triton')[:3]}", 0)


@pytest.mark.beside("ladder_worker.py")
@pytest.mark.parametrize(
    "rung", [rung for rung in ladder.RUNGS + ladder.BACKWARD + ladder.VARIANTS if uses_gluon(rung)]
)
def test_hopper_rung_compiles_without_spills_and_uses_tensor_cores(worker_rows, rung):
    kernels = [row for row in worker_rows if row["rung"] == rung]
    assert all(row["spills"] <= allowed_spills(rung) for row in kernels) and kernels[-1]["tensor"] > 0


@pytest.mark.beside("ladder_worker.py")
@pytest.mark.parametrize(("name", "kernels"), [("b00", 2), ("b01", 3), ("s00", 1), ("s01", 1)])
def test_side_kernels_compile_without_spills(worker_rows, name, kernels):
    compiled = [row for row in worker_rows if row["rung"].startswith(name)]
    assert len(compiled) == kernels and all(row["spills"] <= allowed_spills(name) for row in compiled)
    assert sum(row["tensor"] for row in compiled) > 0


# The rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", ladder.RUNGS + ladder.SIDE + ladder.BACKWARD)
def test_rung_imports_no_other_rung_and_names_its_change(rung):
    tree = ast.parse(rung_diff.source(rung))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {"torch", "triton", "math", "collections", "functools"}
    name, sentence = ladder.change(rung)
    assert name.lower() == rung[4:].replace("_", " ") and sentence.endswith(".")


def test_running_a_rung_file_reports_wrong_results(monkeypatch, capsys):
    real, case = ladder.load("08").forward, (100, 37, 64, True)  # whose first rows see no key
    changes = {"": lambda O, L: (O, L), "O": lambda O, L: (1.01 * O, L), "L": lambda O, L: (O, L + 0.1)}
    for wrong, change in (changes | {"empty rows": lambda O, L: (O, L.nan_to_num())}).items():
        forward = lambda *tensors, change=change: change(*real(*tensors))  # noqa: E731
        monkeypatch.setattr(ladder, "load", lambda name, forward=forward: SimpleNamespace(forward=forward))
        rung_check.print_errors("r08", [case], DEVICE)
        assert ("WRONG" in capsys.readouterr().out) is bool(wrong), wrong
    kernels = [SimpleNamespace(numbers=dict(registers=n, spills=0, shared=40 * 1024, warps=4)) for n in (32, 128)]
    monkeypatch.setattr(rung_check, "xray", lambda *asked, **sizes: kernels)
    monkeypatch.setattr(rung_check, "print_errors", lambda *asked: None)
    monkeypatch.setattr(rung_check, "print_times", lambda *asked: None)
    assert command.main(["ladder", "08", "--run"]) == 0
    assert capsys.readouterr().out.split()[-4:] == ["128", "0", "40,960", "4"]  # of the kernel that takes most


def test_find_accepts_the_number_of_a_rung():
    assert {ladder.find(name) for name in ("8", "08", "r08", "R08 ", "r08_two_loops")} == {"r08_two_loops"}
    assert {ladder.find(name) for name in ("0", "r0", "00")} == {"r00_standard"}
    for wrong in ("99", "", "r", "two", "r08_three_loops"):
        with pytest.raises(ValueError, match=r"rung: got .* it takes r00_standard, "):
            ladder.find(wrong)


def test_rung_diff_shows_moved_and_changed_lines():
    shown = rung_diff.diff("02", "03").splitlines()
    assert "-     for i in range(0, N_q, B_r):  # FA2.A1.L3" in shown  # the loop is gone
    assert shown[1].startswith("  def forward_kernel(")  # what stands right before the first change
    assert any(line.startswith("+     i, head = tl.program_id(0) * B_r, tl.program_id(1)") for line in shown)
    assert "\033[32m+" in rung_diff.diff("02", "03", colours=True) and shown[-1].startswith("      return O, L")
