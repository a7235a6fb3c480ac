"""Packed sequences by Hopper's kernels against float64: run by Python on any machine, and compiled on a Hopper GPU."""

import random
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from case_selection import covering_rows
from compile_worker import kinds_of
from hopper_gpu import check_kernels, run_kernels
from kernel_truth import DEVICE, RESULTS, check_accuracy, largest_error, needs_hopper, packed_truth  # before Triton

pytest.importorskip("triton")

from hopper_simulator import ordered_additions, run_backward, run_forward, simulate_on_numpy
from test_hopper_simulated import add_in_random_order

from fa2_lab.api.packed import attention_packed, has_dominant_sequence
from fa2_lab.kernels import dispatch, interpreter
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.hopper.backward import launch as backward
from fa2_lab.kernels.hopper.forward import launch as forward

if interpreter.version_conflict():
    pytest.skip(interpreter.version_conflict(), allow_module_level=True)

# Lengths of queries and of keys: no rows, one, a whole block, one more; more queries than keys and the other way round.
SEQUENCE_LENGTHS = [
    ([0, 1, 40, 64, 0, 129], [0, 1, 40, 64, 0, 129]),
    ([5, 130, 0, 2, 65], [150, 7, 9, 0, 128]),
    ([1] * 9 + [200], [1] * 9 + [300]),
    ([300], [260]),
]


def cu_seqlens(lengths) -> list[int]:
    """Return the starts of sequences of these lengths, and the end of the last one."""
    return np.cumsum([0, *lengths]).tolist()


# By Python ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_pdl(monkeypatch):
    """Remove instructions for early starts from the interpreter, in which each kernel ends before the next begins."""
    for name in ("gdc_wait", "gdc_launch_dependents") if interpreter.is_enabled() else ():
        monkeypatch.setattr(f"fa2_lab.kernels.hopper.backward.accumulators.{name}", lambda: None)


def simulated_results(Q, K, V, dO, dL, starts, causal, d, B_c, consumers, parts):
    """Return O, L, dQ, dK and dV. Python runs the main kernels, and the kernels before and after are launched."""
    window, sequences, options = (None, 0 if causal else None), len(starts[0]) - 1, Options(causal, Q.shape[2] ** -0.5)
    with pytest.MonkeyPatch.context() as patch, np.errstate(invalid="ignore", divide="ignore"):
        simulate_on_numpy(patch)
        O, L = run_forward(Q, K, V, window, None, B_c, consumers, starts)
    on_device = [torch.from_numpy(x).float().to(DEVICE) for x in (Q, K, V, dO, O)]
    q, k, v, do, o = on_device
    config, divided = backward.configs.choose(d, Q.shape[0] // sequences, causal, ragged=True), parts > 1
    start, *sums, _ = backward.shapes(q, k, config, sequences)
    start = torch.full(start, torch.nan, device=DEVICE)
    sums = torch.full((sums[0][0] + 2 * sums[1][0] * divided, 32), torch.nan, device=DEVICE)
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in starts)
    tensors = Tensors(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    before = backward.prepare_preprocess(do, o, tensors, options, config, tuple(sums.shape))
    before(o, do, *(torch.from_numpy(x).float().to(DEVICE) for x in (L, dL)), start, sums, cu_seqlens_q, None)
    assert not sums.any()
    starting = start.cpu().double().numpy().reshape(-1, 2, config.B_r)
    with pytest.MonkeyPatch.context() as patch, np.errstate(invalid="ignore", divide="ignore"):
        simulate_on_numpy(patch)
        dK, dV, all_sums = run_backward(Q, K, V, dO, starting, window, config, None, parts, starts)
    dQ, *columns = (torch.full_like(x, torch.nan) for x in (q, k, v))
    sums = torch.from_numpy(np.concatenate(all_sums[: 1 + 2 * divided])).float().to(DEVICE)
    after = backward.prepare_postprocess(tensors, options, config, divided)
    after(sums, dQ, *(columns if divided else (None, None)), cu_seqlens_q, cu_seqlens_k)
    if divided:
        dK, dV = columns
    return [torch.as_tensor(x).cpu().double() for x in (O, L.T, dQ, dK, dV)]


def check_in_simulator(
    n_q, n_k, causal, d=64, B_c=64, consumers=2, heads=(4, 2), parts=1, nan_sequence=None, extra_rows=0
):
    """Check packed sequences by Python against float64.

    The `behind` rows after the last sequence belong to none, and hold NaN. Sequence `planted` also holds NaN, which
    must not reach any other sequence.
    """
    draw, starts = np.random.default_rng(len(n_q) + sum(n_q)), (cu_seqlens(n_q), cu_seqlens(n_k))
    width = 8 if d == 64 else 128  # half of dQ is the second consumer's
    Q, dO = draw.standard_normal((2, starts[0][-1] + extra_rows, heads[0], width))
    dL = draw.standard_normal((heads[0], len(Q)))
    K, V = draw.standard_normal((2, starts[1][-1] + extra_rows, heads[1], width))
    cu = map(torch.tensor, starts)
    given = [torch.from_numpy(x.copy()) for x in (Q, K, V, dO)]
    O, L, *gradients = packed_truth(*given, *cu, dL=torch.from_numpy(dL), causal=causal)
    nan_rows = [slice(starts[0][-1], None)], [slice(starts[1][-1], None)]
    if nan_sequence is not None:
        cut = slice(nan_sequence, nan_sequence + 2)
        nan_rows = [[*at, slice(*cu[cut])] for at, cu in zip(nan_rows, starts, strict=True)]
    for x, cuts in zip((Q, dO, K, V), (nan_rows[0], nan_rows[0], nan_rows[1], nan_rows[1]), strict=True):
        for at in cuts:
            x[at] = torch.nan
    got = simulated_results(Q, K, V, dO, dL, starts, causal, d, B_c, consumers, parts)
    for name, x, y, side in zip(RESULTS, got, (O, L.T, *gradients), [0, 0, 0, 1, 1], strict=True):
        if nan_sequence is not None:
            x[nan_rows[side][1]] = y[nan_rows[side][1]]
        assert largest_error(x, y) < 2e-5, (name, n_q, n_k, causal, d, parts)


@pytest.mark.parametrize("n, lengths", [*enumerate(SEQUENCE_LENGTHS)])
def test_packed_hopper_kernels_match_float64_in_the_simulator(n, lengths):
    for causal in (False, True):
        B_c, consumers = ((64, 2), (128, 1), (64, 3), (128, 2))[n]
        heads, parts = ((4, 2), (2, 2), (2, 1))[n % 3], (1, 3)[(n + causal) % 2]
        d = (64, 128)[(n // 2 + causal) % 2]
        check_in_simulator(*lengths, causal, d, B_c, consumers, heads, parts, extra_rows=70 * (n % 2))


@pytest.mark.parametrize("nan_sequence", (1, 4))
def test_packed_hopper_kernels_isolate_sequences_in_the_simulator(nan_sequence):
    for causal in (False, True):
        lengths = [3, 70, 1, 0, 64], [5, 129, 9, 30, 64]
        check_in_simulator(*lengths, causal, (128, 64)[causal], heads=(1, 1), nan_sequence=nan_sequence)


def test_packed_postprocess_writes_only_its_own_sequence(monkeypatch):
    """Only the first row block is: the rows of the next sequence are left as they were."""
    q, dQ, cu = torch.empty(50, 1, 8), torch.full((50, 1, 8), torch.nan), torch.tensor([0, 20, 50], dtype=torch.int32)
    chosen = backward.configs.choose(64, 25, masked=False, ragged=True)
    record = Tensors(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
    after = backward.prepare_postprocess(record, Options(False, 1.0), chosen, divided=False)
    after.grid = (2, 1, 1)  # the parts of two consumers
    sums, dQ, cu = (x.to(DEVICE) for x in (torch.full(backward.shapes(q, q, chosen, 2)[1], torch.nan), dQ, cu))
    if interpreter.is_enabled():  # there the sums are there once the kernel has waited for them
        monkeypatch.setattr("fa2_lab.kernels.hopper.backward.accumulators.gdc_wait", sums.zero_)
    else:
        sums.zero_()
    after(sums, dQ, None, None, cu, cu)
    assert (dQ[:20] == 0).all() and dQ[20:].isnan().all()


@pytest.mark.exhaustive
def test_packed_hopper_kernels_match_float64_for_random_lengths_in_the_simulator():
    for seed in range(20):
        draw = random.Random(seed)
        n_q, n_k = ([draw.choice((0, 1, draw.randrange(300))) for _ in range(4)] for _ in range(2))
        check_in_simulator([*n_q, 1], [*n_k, 1], seed % 2 > 0, (64, 128)[seed // 2 % 2], parts=1 + seed // 4 % 2)


@pytest.mark.parametrize("n_q, n_k", SEQUENCE_LENGTHS)
def test_packed_dq_semaphores_keep_one_order_without_deadlock(n_q, n_k, monkeypatch):
    simulate_on_numpy(monkeypatch)
    rng = random.Random(sum(n_q))
    for causal, (group, parts) in product((False, True), ((1, 1), (2, 3))):
        window, starts = (None, 0 if causal else None), (cu_seqlens(n_q), cu_seqlens(n_k))
        kind = dict(window=window, group=group, parts=parts, starts=starts)
        items = list(ordered_additions(sum(n_q), sum(n_k), **kind, l2_group=1 + causal))
        orders = [add_in_random_order(items, programs, rng) for programs in (1, 3, 200)]
        assert all(order == orders[0] for order in orders), kind
        assert sum(map(len, items)) == sum(map(len, orders[0].values())) > 0, kind


DECREASING = [[0, 700, 300, 1000], [0, 1000, 0, 1000], [0, 7, -(2**31), 1000], [5, 300, 2**31 - 1, 900]]
CLAMPABLE = [[0, 300, 700, 1000], [7, 0, 300, 2**31 - 1], [-9, -3, 1000, 1001], [0, 0, 10, 20]]


def clamped(starts, n) -> list[int]:
    """Return starts as kernels read them: the first is 0, and the others are limited to 0 to n."""
    return [0, *(min(max(x, 0), n) for x in starts[1:])]


def test_decreasing_cu_seqlens_cause_no_deadlock(monkeypatch):
    """Starts that run backwards have the counters begin past every turn; the next test sees that they do."""
    simulate_on_numpy(monkeypatch)
    rng, decreasing = random.Random(0), 0
    for n in range(600):
        sequences, rows, keys = rng.randrange(1, 6), rng.randrange(1, 700), rng.randrange(1, 700)
        sides = [[0, *(rng.randrange(-99, size + 99) for _ in range(sequences))] for size in (rows, keys)]
        sides = [sorted(side) if rng.random() < 0.3 else side for side in sides]
        kind = dict(window=(None, 0 if n % 2 else None), parts=1 + n % 3 // 2, B_r=(64, 128)[n % 5 % 2])
        items = list(ordered_additions(rows, keys, **kind, starts=sides))
        inside = [clamped(side, size) for side, size in zip(sides, (rows, keys), strict=True)]
        decreases = any(side != sorted(side) for side in inside)
        add_in_random_order(items, rng.choice((1, 3, 200)), rng, start=2**30 if decreases else 0)
        blocks = rows // kind["B_r"] + keys // 128 + 2 * (sequences + 1)  # of each of two heads
        assert all(0 <= place < 2 * blocks for item in items for place, _ in item), sides
        decreasing += decreases
    assert 150 < decreasing < 570


@pytest.mark.parametrize("starts", (*DECREASING, *CLAMPABLE), ids=str)
def test_decreasing_cu_seqlens_set_gradients_to_nan(starts):
    """Of rows or of keys, and only where all add in turn: then no gradient of rows looks like a number."""
    bad, n, options = starts in DECREASING, 1000, Options(True, 0.1)
    q = torch.zeros(n, 1, 16, device=DEVICE)
    L = torch.zeros(1, n, device=DEVICE)
    cu, good = (torch.tensor(x, device=DEVICE, dtype=torch.int32) for x in (starts, [0, 300, 700, n]))
    chosen = backward.configs.choose(64, n // 3, True, ragged=True, deterministic=True)
    start, (lines, _), _, (counters, _) = backward.shapes(q, q, chosen, 3)
    for pair, expected in (((cu, good), bad), ((good, cu), bad), ((good, good), False), ((cu, None), False)):
        sums = torch.full((lines + counters, 32), 7.0, device=DEVICE)
        record = Tensors(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
        before = backward.prepare_preprocess(q, q, record, options, chosen, tuple(sums.shape))
        before(q, q, L, None, torch.empty(start, device=DEVICE), sums, *pair)
        assert sums.isnan().all() if expected else not sums.any(), pair
        turns = sums[lines:].view(torch.int32)
        assert turns.min() > 2**30 if expected else not turns.any()


# The choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", (64, 128))
def test_max_seqlen_hint_changes_only_the_config(d):
    """Sixty of 100 rows and one of 16,384: the sizes of a long one, and all else as without the hint."""
    q = torch.empty(22384, 2048 // d, d, dtype=torch.float16, device="meta")
    cu = torch.empty(62, device="meta")
    record = Tensors(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
    short, long = (
        forward.prepare_launch(record, Options(True, 0.1, dominant_sequence=hint)).arguments for hint in (False, True)
    )
    assert (short["CONFIG"].B_c, long["CONFIG"].rows) == (64, 192)
    assert {name for name in long if long[name] != short[name]} == {"CONFIG", "l2_group"}


def test_cache_ignores_the_lengths_of_packed_sequences():
    """A hint that is too small or too large is a hint all the same."""
    q, many, few = torch.empty(22384, 1, 1), torch.empty(62), torch.empty(3)
    assert [has_dominant_sequence(n, q, many) for n in (0, 100, 2500, 2560, 16000, 10**20)] == [False] * 3 + [True] * 3
    assert (
        not has_dominant_sequence(22384, q, torch.empty(2))
        and not has_dominant_sequence(11192, q, few)
        and has_dominant_sequence(11193, q, few)
    )


# On a GPU -----------------------------------------------------------------------------------------------------


def packed_inputs(n_q, n_k, heads, d, dtype, extra_rows=0):
    """Return q, k, v and dO with NaN in the memory around their rows and between their heads, and both cu_seqlens."""
    generator = torch.Generator(DEVICE).manual_seed(sum(n_q))

    def amid_nan(rows, heads):
        surrounded = torch.full((rows + 8, heads + 2, d), torch.nan, device=DEVICE, dtype=dtype)
        surrounded[4:-4, 1:-1] = torch.randn(rows, heads, d, device=DEVICE, generator=generator)
        return surrounded[4:-4, 1:-1]

    starts = [torch.tensor(cu_seqlens(n), dtype=torch.int32, device=DEVICE) for n in (n_q, n_k)]
    rows = [(n, heads[which]) for n, which in ((sum(n_q), 0), (sum(n_k), 1), (sum(n_k), 1), (sum(n_q), 0))]
    return *(amid_nan(n + extra_rows, H) for n, H in rows), *starts


def check_packed(n_q, n_k, causal, d, dtype, heads=(6, 2), extra_rows=0, deterministic=False, with_dL=False):
    q, k, v, dO, *cu = packed_inputs(n_q, n_k, heads, d, dtype, extra_rows)
    for x, starts in zip((q, k, v, dO), (cu[0], cu[1], cu[1], cu[0]), strict=True):
        x[int(starts[-1]) :] = torch.nan
    dL = torch.randn(heads[0], len(q), device=DEVICE) if with_dL else None
    check_kernels(q, k, v, dO, Options(causal, d**-0.5), cu=cu, dL=dL, deterministic=deterministic)


GPU_LENGTHS = [*SEQUENCE_LENGTHS, ([1000, 17, 0, 333, 2049, 64, *[3] * 300], [900, 17, 5, 333, 2100, 1, *[3] * 300])]


@needs_hopper
@pytest.mark.parametrize("d", (32, 64, 96, 128, 256))
def test_packed_hopper_kernels_match_float64(d):
    for (n_q, n_k), causal, dtype, extra_rows in covering_rows(
        GPU_LENGTHS, (False, True), (torch.bfloat16, torch.float16), (0, 70)
    ):
        check_packed(n_q, n_k, causal, d, dtype, extra_rows=extra_rows, with_dL=causal)
        check_packed(n_q, n_k, not causal, d, dtype)


@needs_hopper
@pytest.mark.parametrize("d", (64, 128))
def test_packed_hopper_forward_matches_float64_for_each_config(d, monkeypatch):
    for plan, causal in product(dict.fromkeys(sizes for sizes, *_ in kinds_of(d)), (False, True)):
        monkeypatch.setattr(forward.configs, "choose", lambda *_, plan=plan: plan)
        check_packed(*GPU_LENGTHS[-1], causal, d, torch.bfloat16)


@needs_hopper
@pytest.mark.parametrize("d", (64, 128))
def test_packed_hopper_backward_matches_float64_with_splits_and_determinism(d, monkeypatch):
    for lengths, parts, causal, deterministic in covering_rows(
        GPU_LENGTHS, (1, 3, 100), (True, False), (True, True, False)
    ):
        monkeypatch.setattr(backward.configs, "choose_parts", lambda *_, parts=parts: parts)
        check_packed(*lengths, causal, d, torch.bfloat16, deterministic=deterministic)


@needs_hopper
@pytest.mark.parametrize("nan_sequence", (0, 1, 4))
@pytest.mark.parametrize("d", (64, 128))
def test_packed_hopper_kernels_isolate_sequences(d, nan_sequence):
    """NaN in one of them stays there, in what is read and in what is written."""
    lengths = [3, 70, 1, 0, 200, 65]
    for causal in (False, True):
        q, k, v, dO, cu, _ = packed_inputs(lengths, lengths, (4, 2), d, torch.bfloat16)
        want, theirs = (packed_truth(q, k, v, dO, cu, cu, causal=causal, dtype=t) for t in (torch.float64, q.dtype))
        rows = slice(*cu[nan_sequence : nan_sequence + 2].tolist())
        for x in (q, k, v, dO):
            x[rows] = torch.nan
        got = run_kernels(q, k, v, dO, Options(causal, d**-0.5), cu=(cu, cu))
        for name, x, y, z in zip(RESULTS, got, want, theirs, strict=True):
            x, y, z = (x.T, y.T, z.T) if name == "L" else (x, y, z)
            assert x[rows].isnan().all(), name
            x[rows] = y[rows].to(x.dtype)
            assert largest_error(x, y) <= 3 * largest_error(z, y) + 1e-5, (name, causal)


@needs_hopper
@pytest.mark.parametrize("wild", ([0, 7, 4], [0, 2**31 - 1, 7], [0, -(2**31), 7], [7, 0, 0]), ids=str)
def test_wrong_cu_seqlens_cause_no_out_of_bounds_writes(wild):
    """Outputs lie amid other tensors, which must stay as they were."""
    q, k, v, dO, good, _ = packed_inputs([4, 3], [4, 3], (2, 2), 64, torch.bfloat16)
    cu = torch.tensor(wild, dtype=torch.int32, device=DEVICE)
    beside = [torch.zeros(2**16, device="cuda") for _ in range(64)]
    del beside[::2]
    for pair in ((cu, good), (good, cu), (cu, cu)):
        run_kernels(q, k, v, dO, Options(True, 0.125), cu=pair)
    torch.cuda.synchronize()
    assert not any(x.any() for x in beside)


CALL_WITH_DECREASING = """
import torch
from fa2_lab.api.packed import attention_packed
q, k, v, dO = torch.randn(4, 1000, 16, {d}, device="cuda", dtype=torch.bfloat16).unbind()
x = [t.clone().requires_grad_() for t in (q, k, v)]
for wild in {wild}:
    cu, good = (torch.tensor(t, device="cuda", dtype=torch.int32) for t in (wild, [0, 300, 700, 1000]))
    for pair in ((cu, good), (good, cu), (cu, cu)):
        for causal in (False, True):
            for backend in ("auto", "portable"):
                for in_turn in (False, True):
                    torch.use_deterministic_algorithms(in_turn)
                    dQ, *_ = torch.autograd.grad(attention_packed(*x, *pair, causal=causal, backend=backend), x, dO)
                    assert not in_turn or backend == "portable" or dQ.isnan().any()
torch.cuda.synchronize()
print("all came back")
"""


@needs_hopper
@pytest.mark.parametrize("d", (64, 128))
def test_decreasing_cu_seqlens_do_not_hang(d):
    """In a process of its own, which is stopped if it hangs."""
    script = CALL_WITH_DECREASING.format(d=d, wild=DECREASING)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == "all came back\n", done.stderr


@needs_hopper
@pytest.mark.parametrize("d", (64, 128))
def test_attention_packed_runs_the_hopper_kernels(d, monkeypatch):
    """attention_packed() has Hopper's own kernels do it; other starts need no new launch."""
    for name in ("portable", "portable_backward"):
        monkeypatch.setattr(dispatch, name, None)
    monkeypatch.setattr(forward, "is_fastest", lambda *_: True)
    for n_q, n_k in (([1000, 1, 500], [900, 3, 700]), ([0, 1500, 1], [1, 1500, 102]), ([501, 500, 500], [0, 1, 1602])):
        q, k, v, dO, cu_seqlens_q, cu_seqlens_k = packed_inputs(n_q, n_k, (4, 4), d, torch.bfloat16)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        want, theirs = (
            packed_truth(q, k, v, dO, cu_seqlens_q, cu_seqlens_k, causal=True, dtype=t)
            for t in (torch.float64, q.dtype)
        )
        for longest in (None, max(n_q), 1, 10**9):  # where it is wrong, too
            O, L = attention_packed(
                q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True, max_seqlen_q=longest, return_lse=True
            )
            got = O, L, *torch.autograd.grad(O, (q, k, v), dO)
            check_accuracy(got, want, theirs, f"{n_q} {n_k} {longest}")
