"""Rings against one device in float64. Ranks are processes that communicate with gloo, or threads of one process."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import product

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="rings need torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import ring_processes as processes  # noqa: E402
import ring_threads as threads  # noqa: E402
from kernel_truth import DEVICE, GPU, check_accuracy, dense_truth, largest_error, random_inputs  # noqa: E402

from fa2_lab.distributed import ring, ring_attention, shard, unshard  # noqa: E402
from fa2_lab.distributed.group import GLOO_GROUPS, HEADER_BYTES, encode_header  # noqa: E402
from fa2_lab.distributed.state import State  # noqa: E402
from fa2_lab.machine import ring as model  # noqa: E402
from fa2_lab.reference import shards  # noqa: E402
from fa2_lab.reference.online_softmax import SoftmaxState  # noqa: E402

FP32_TOLERANCE = 2e-6  # fp32, computed in float64 and rounded at every merge


@pytest.fixture(autouse=True)
def nan_in_new_memory(monkeypatch):
    """Make PyTorch fill new memory with NaN, so that unwritten results are noticed."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def ring_inputs(heads, kv_heads, N, d, dtype=torch.float32, size=1.0, device="cpu"):
    """Return q, k, v, dO and dL, by default on the CPU, where ranks use gloo and compute with PyTorch."""
    q, k, v, dO = (x.detach() for x in random_inputs(2, heads, kv_heads, N, N, d, dtype, size=size, device=device))
    return q, k, v, dO, torch.randn(2, heads, N, generator=torch.Generator().manual_seed(3)).to(device)


def true_results(inputs, dtype=torch.float64, **options):
    """Return O, L and the gradients for the whole sequence on one device."""
    *qkv, dL = inputs
    return dense_truth(*qkv, dL=dL, dtype=dtype, **options)


def max_error(results, truth) -> float:
    return max(largest_error(got, want) for got, want in zip(results, truth, strict=True))


# Processes: everything at once, in one start ------------------------------------------------------------------------

CASES = {}
for size, causal, layout in product((1, 2, 3, 4), (False, True), shards.LAYOUTS):
    for N in (13, 3):
        name = f"{size} ranks, {'causal' if causal else 'full'}, {layout}, {N} rows"
        CASES[name] = size, ring_inputs(4, 2, N, 8), dict(causal=causal, layout=layout)
CASES["negative scale"] = 3, ring_inputs(2, 1, 11, 8), dict(causal=True, layout="zigzag", scale=-0.7)
CASES["scale 0"] = 2, ring_inputs(2, 1, 11, 8), dict(causal=True, layout="zigzag", scale=0.0)
CASES["huge scores"] = 4, ring_inputs(2, 1, 23, 8, size=40.0), dict(causal=True, layout="zigzag")
if not GPU:
    CASES["kernels"] = 3, ring_inputs(2, 1, 19, 16), dict(causal=True, layout="zigzag", backend="triton")


@pytest.fixture(scope="module")
def results():
    return processes.run_ranks(processes.run_cases, 4, CASES)


@pytest.mark.parametrize("name", CASES)
def test_ring_results_equal_those_of_one_device(name, results):
    size, inputs, options = CASES[name]
    truth = true_results(inputs, causal=options["causal"], scale=options.get("scale"))
    floor = 1e-3 if name == "huge scores" else FP32_TOLERANCE  # there L, in fp32, is coarse
    for rank in range(size):
        found = results[rank][name]
        assert isinstance(found, dict), found
        pairs = zip(found["results"], truth, strict=True)
        errors = [largest_error(got, want) / max(1.0, want.abs().max().item()) for got, want in pairs]
        assert max(errors) < floor, (rank, errors)


@pytest.mark.parametrize("name", [name for name in CASES if "13 rows" in name])
def test_ring_sends_the_bytes_that_the_model_predicts(name, results):
    size, _, _ = CASES[name]
    lengths = shards.even_lengths(13, size)
    for rank in range(size):
        options = dict(kv_heads=2 * 2, d=8, itemsize=4)  # two sequences in the batch
        forward, backward = (model.bytes_sent(lengths, rank, x, **options) for x in ("forward", "backward"))
        total = {what: forward.get(what, 0) + n for what, n in backward.items()}
        assert results[rank][name]["sent"] == total


def test_ring_works_in_a_device_mesh():
    inputs = ring_inputs(2, 2, 9, 8)
    truth = true_results(inputs, causal=True)
    for by_line, by_row, refused, uneven in processes.run_ranks(processes.run_on_meshes, 4, inputs):
        for found in (by_line, by_row):
            assert max_error(found, truth) < FP32_TOLERANCE
        assert "mesh: got a DeviceMesh of 2 dimensions; it takes one" in refused
        assert uneven.tolist() == 3 * [2 * [0] + 3 * [1] + 4 * [2] + 5 * [3]]


# Processes: what goes wrong -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes():
    return processes.run_ranks(processes.run_disagreements, 3)


@pytest.mark.parametrize("fault", processes.FAULTS)
def test_every_rank_raises_if_one_call_is_wrong(fault, outcomes):
    _, message = processes.FAULTS[fault]
    for rank in range(3):
        kind, text, seconds = outcomes[rank][fault]
        assert kind == ("ValueError" if fault == "refused" and rank == 1 else "Disagreement"), (kind, text)
        assert message in text and seconds < 5


# What a rank does, in order: between the start of a transfer and its arrival a kernel runs, under which it hides.
FORWARD_ACTIONS = ["kernel", "wait", *["start K V", "kernel", "arrive"] * 2, "kernel"]
BACKWARD_ACTIONS = ["wait", "start K V", "kernel", "arrive", "start K V", "kernel", "start dK dV", "arrive"]
BACKWARD_ACTIONS += ["kernel", "arrive", "start dK dV", "kernel", "arrive"]


def test_ring_overlaps_compute_and_sends_nothing_unneeded(outcomes):
    for rank in range(3):
        did = outcomes[rank]["actions"]
        assert did["afterwards"] == FORWARD_ACTIONS and did["and back"] == FORWARD_ACTIONS + BACKWARD_ACTIONS
        for fault in processes.FAULTS:
            refuses = fault == "refused" and rank == 1
            assert did[fault] == (["wait"] if refuses else ["kernel", "wait"]), (rank, fault)


def test_ring_recovers_after_a_kernel_raises(outcomes):
    for rank in range(3):
        assert outcomes[rank]["kernel"][0] == "ZeroDivisionError"
        assert outcomes[rank]["afterwards"][:2] == ("nothing", f"(1, 4, {5 + rank}, 8)")


def test_ranks_in_different_calls_are_reported(outcomes):
    calls = r"call: rank 0, 2: '.* call (\d)'; rank 1: '.* call (?!\1)\d'"
    for rank in range(3):
        kind, text, _ = outcomes[rank]["unshard"]
        assert kind == "Disagreement" and "other_dimensions: rank 0, 2: [1, 2, 4]; rank 1: [1, 2, 5]" in text
        assert "layout: rank 0, 2: 'zigzag'; rank 1: 'contiguous'" in outcomes[rank]["joined otherwise"][1]
        assert "dtype: rank 0, 2: 'torch.float32'; rank 1: 'torch.float64'" in outcomes[rank]["as doubles"][1]
        kind, text, _ = outcomes[rank]["backward"]
        assert kind == "Disagreement" and re.search(calls, text)


@pytest.mark.parametrize("fault, error, says", [
    ("bad dim", "ValueError", "dim: got 3"),
    ("no tensor", "TypeError", "x: got NoneType"),
    ("bad layout", "ValueError", "layout: got 'ring'"),
])  # fmt: skip
def test_every_rank_raises_if_unshard_refuses_an_argument(fault, error, says, outcomes):
    for rank in range(3):
        kind, text, seconds = outcomes[rank][fault]
        assert kind == (error if rank == 1 else "Disagreement") and says in text and seconds < 5


def test_refusal_of_any_length_fits_the_header():
    header = encode_header(dict(refused="q: got " + 9999 * "é"))
    assert len(header) == HEADER_BYTES and json.loads(header.numpy().tobytes())["refused"].startswith("q: got éé")


EVENTS = ["dies_before", "dies_before_first", "dies_between", "dies_within", "skips_backward", "another_group"]


@pytest.fixture(scope="module")
def survivors():
    """Return {event: the errors on the remaining ranks}. All events run at the same time, since ranks mostly wait."""
    events = [*EVENTS, "skips_calls"]
    with ThreadPoolExecutor(len(events)) as pool:
        tasks = {name: pool.submit(processes.run_ranks, getattr(processes, name), 3) for name in events}
        return {name: task.result() for name, task in tasks.items()}


@pytest.mark.parametrize("event", EVENTS)
def test_surviving_ranks_get_an_error_within_15_seconds(event, survivors):
    for kind, text, seconds in survivors[event][: 3 if event == "another_group" else 2]:
        assert kind.endswith("Error") and seconds < 15, (kind, text, seconds)
        assert "did not hear from all others" in text or event == "dies_within"


def test_ring_refuses_a_group_that_has_lost_a_rank(survivors):
    for (first, text, waited), (again, then, seconds) in survivors["skips_calls"][:2]:
        assert first == again == "RuntimeError" and "within 3 s" in text and waited < 15 and seconds < 1
        assert "earlier call" in then and "did not hear" not in then


# Threads: any lengths, kernels, turns of heads ------------------------------------------------------------------------

SHARD_LENGTHS = [[5, 8], [4, 0, 7], [1, 1, 1], [0, 9], [3, 6, 2, 2], [2, 2, 2, 2, 3]]


def run_in_threads(inputs, lengths, layout, causal, on_triton=False):
    return threads.run_ring(*inputs, lengths, layout, causal, inputs[0].shape[3] ** -0.5, on_triton)


@pytest.mark.parametrize("layout", shards.LAYOUTS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", SHARD_LENGTHS, ids=str)
def test_ring_matches_float64_for_any_shard_lengths(lengths, causal, layout):
    inputs = ring_inputs(6, 3, sum(lengths), 8)
    found, truth = run_in_threads(inputs, lengths, layout, causal), true_results(inputs, causal=causal)
    assert max_error(found, truth) < FP32_TOLERANCE


def test_ring_splits_large_messages_by_heads(monkeypatch):
    lengths, inputs = [5, 6, 2], ring_inputs(6, 3, 13, 8)
    monkeypatch.setattr(ring, "MESSAGE_BYTES", 2 * 2 * 6 * 8 * 4 * 2)  # two heads of the longest shard
    threaded_ring = threads.make_ring(0, {}, lengths, "zigzag", True, 1.0, False)
    assert ring.head_chunks(threaded_ring, *inputs[:2]) == [(slice(0, 2), slice(0, 1)), (slice(2, 6), slice(1, 3))]
    found, truth = run_in_threads(inputs, lengths, "zigzag", True), true_results(inputs, causal=True)
    assert max_error(found, truth) < FP32_TOLERANCE


@pytest.mark.parametrize("backend, excluded", [("portable", True), ("triton", False)])
def test_ring_passes_backend_to_every_kernel_call(backend, excluded, monkeypatch):
    class Agreement:  # of two ranks, with as many rows each
        def __init__(self, group, header, timeout):
            self.agree = lambda: [header, header]

    def pass_on(self, block, what, source):
        return ring.Transfer([torch.zeros_like(x) for x in block], block, [])

    exclusions = []
    for direction in ("forward", "backward"):
        kernels = getattr(ring.operators, direction)

        def recorded(*given, kernels=kernels):
            exclusions.append(given[-1].exclude_hopper)
            return kernels(*given)

        monkeypatch.setattr(ring.operators, direction, recorded)
    monkeypatch.setattr(ring, "Exchange", Agreement)
    monkeypatch.setattr(ring, "process_group", lambda mesh: mesh)
    monkeypatch.setattr(ring.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(ring.dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(ring.RingCall, "pass_on", pass_on)
    q, k, v, *_ = (x.requires_grad_() for x in ring_inputs(1, 1, 6, 16, device=DEVICE))
    ring_attention(q, k, v, backend=backend).sum().backward()
    # The two halves of the own block and the other rank's block, forward and backward
    assert exclusions == 6 * [excluded]


def check_in_threads(inputs, lengths, on_triton):
    """Assert that results of several ranks, whose parts are rounded before the merge, keep to the accuracy rule."""
    found = run_in_threads(inputs, lengths, "zigzag", True, on_triton)
    check_accuracy(found, true_results(inputs, causal=True), true_results(inputs, causal=True, dtype=inputs[0].dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_ring_in_half_precision_is_as_accurate_as_one_device(dtype):
    check_in_threads(ring_inputs(2, 1, 61, 16, dtype), [16, 15, 15, 15], on_triton=False)


@pytest.mark.gpu
def test_ring_kernels_on_four_ranks_are_as_accurate_as_one_device():
    """The kernels of four ranks that share a GPU; ring_gpu.py asks several GPUs."""
    check_in_threads(ring_inputs(2, 1, 600, 64, torch.bfloat16, device="cuda"), [160, 130, 150, 160], on_triton=True)


def test_ring_accepts_a_gradient_of_O_or_of_L_alone():
    *qkv, dO, dL = ring_inputs(4, 2, 13, 8)
    for name, gradients, zero_filled in (("L", (None, dL), (0 * dO, dL)), ("O", (dO, None), (dO, 0 * dL))):
        found, truth = (
            run_in_threads((*qkv, *gradients), [5, 6, 2], "zigzag", True),
            true_results((*qkv, *zero_filled), causal=True),
        )
        assert max_error(found, truth) < FP32_TOLERANCE, f"a loss of {name} alone"


def test_ring_sends_and_accumulates_gradients_in_fp32(monkeypatch):
    sent, summed = set(), set()

    def pass_on(self, block, what, source, real=threads.ThreadedRing.pass_on):
        sent.update((what, x.dtype) for x in block)
        return real(self, block, what, source)

    def add(seen, part, *sums, real=ring.add_gradients):
        summed.update(x.dtype for x in sums)
        return real(seen, part, *sums)

    monkeypatch.setattr(threads.ThreadedRing, "pass_on", pass_on)
    monkeypatch.setattr(ring, "add_gradients", add)
    run_in_threads(ring_inputs(2, 1, 12, 8, torch.bfloat16), [4, 4, 4], "zigzag", True)
    assert sent == {("K V", torch.bfloat16), ("dK dV", torch.float32)}
    assert summed == {torch.float32}


# The state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_triton, device", [(False, "cpu"), (True, DEVICE)], ids=["torch", "triton"])
def test_ring_state_equals_the_numpy_reference(on_triton, device):
    draw = np.random.default_rng(0)
    q = torch.empty(2, 3, 41, 20, device=device)
    state, want = State(q, on_triton), [[SoftmaxState.empty(41, 20) for _ in range(3)] for _ in range(2)]
    parts = []
    for rows in (slice(0, 20), slice(20, 40), slice(20, 41), slice(0, 41), slice(40, 40), slice(18, 41)):
        n = rows.stop - rows.start
        O, L = draw.standard_normal((2, 3, n, 20)), 30 * draw.standard_normal((2, 3, n))
        O[:, :, :1], L[:, :, :1] = 0, -np.inf  # a row that saw no key of this block
        O_, L_ = (torch.tensor(x, dtype=torch.float32, device=device) for x in (O, L))
        parts.append((rows, O_.mT.contiguous().mT, L_.mT.contiguous().mT))
        for b, h in np.ndindex(2, 3):
            part = SoftmaxState.empty(41, 20)
            part.m[rows], part.l[rows], part.o[rows] = L[b, h], np.isfinite(L[b, h]), O[b, h]
            want[b][h] = want[b][h].merge(part)
    O, L = (torch.full(shape, torch.nan, device=device) for shape in ((2, 5, 41, 20), (2, 5, 41)))
    for part in parts[:-1]:
        state.merge(*part)
    rows, O_, L_ = parts[-1]
    O_ = torch.nn.functional.pad(O_, (0, 0, 20, 0), value=torch.nan)[:, :, 20:]  # what lies before is not read
    deepcopy(state).finalize((rows, O_, L_), torch.empty_like(q), torch.empty_like(L[:, 1:4]))  # heads lie closer there
    state.finalize((rows, O_, L_), O[:, 1:4], L[:, 1:4])
    for b, h in np.ndindex(2, 3):
        o, l = want[b][h].finalize()
        assert largest_error(O[b, h + 1].cpu(), torch.tensor(o)) < 1e-5
        assert largest_error(L[b, h + 1].cpu(), torch.tensor(l)) < 1e-4
    assert O[:, [0, 4]].isnan().all() and L[:, [0, 4]].isnan().all(), "wrote beyond its heads"


def test_ring_states_of_two_lengths_merge_the_same_part():
    O, L = torch.randn(1, 3, 8, 16, device=DEVICE), torch.randn(1, 3, 8, device=DEVICE)
    for N in (11, 20):
        state = State(torch.empty(1, 3, N, 16, device=DEVICE), on_triton=True)
        state.merge(slice(0, 8), O, L)
        assert torch.equal(state.o[:, :, :8], O) and torch.equal(state.m[:, :, :8], L)
        assert state.m[:, :, 8:].isneginf().all()


# The call -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path):
    """Make a process group of only this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    GLOO_GROUPS.clear()


def test_ring_of_one_rank_equals_attention(one_rank):
    inputs = ring_inputs(2, 1, 7, 8)
    found = processes.run_ring(inputs, None, layout="zigzag", causal=True, scale=-0.3)
    truth = true_results(inputs, causal=True, scale=-0.3)
    assert max_error(found, truth) < FP32_TOLERANCE
    x = torch.arange(7)
    assert torch.equal(unshard(shard(x, dim=0), dim=0), x)
    with pytest.raises(ValueError, match=r"^dim: got 1; it takes a whole number from -1 to 0"):
        unshard(x, dim=1)


FOUR_ROWS = torch.zeros(1, 2, 4, 8)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(layout="spiral"), ValueError, "layout: got 'spiral'; it takes one of zigzag, contiguous"),
        (dict(timeout=0), ValueError, "timeout: got 0; it takes seconds"),
        (dict(timeout=1e6), ValueError, "timeout: got 1000000.0; it takes seconds"),
        (dict(timeout="1"), TypeError, "timeout: got '1'; it takes seconds"),
        (dict(mesh=3), TypeError, "mesh: got 3; it takes a 1-D DeviceMesh, a ProcessGroup"),
        (dict(causal=1), TypeError, "causal: got 1; it takes True or False"),
        (dict(scale="1"), TypeError, "scale: got '1'"),
        (dict(k=FOUR_ROWS, v=FOUR_ROWS), ValueError, "a shard has as many keys as queries, 5"),
        (dict(backend="cuda"), ValueError, "backend: got 'cuda'"),
        (dict(q=None), TypeError, "q: got NoneType; it takes a torch.Tensor"),
    ],
)
def test_ring_rejects_bad_input_by_name(one_rank, changes, error, message):
    usual = {name: torch.zeros(1, 2, 5, 8) for name in "qkv"}
    with pytest.raises(error, match=message.replace("(", r"\(").replace(")", r"\)")):
        ring_attention(**usual | changes)
    if changes.keys() <= {"layout", "timeout", "mesh"}:
        with pytest.raises(error, match=message.replace("(", r"\(").replace(")", r"\)")):
            unshard(usual["q"], **changes)


def test_ring_rejects_a_scale_beyond_fp32(one_rank):
    q, k, v = torch.zeros(3, 1, 2, 5, 8, device=DEVICE)
    with pytest.raises(ValueError, match="scale: got -1e\\+39; it takes at most 1e30"):
        ring_attention(q, k, v, scale=-1e39)


def test_ring_without_a_process_group_says_how_to_start():
    with pytest.raises(RuntimeError, match="start with torchrun and call init_process_group"):
        ring_attention(*torch.zeros(3, 1, 1, 2, 8))
