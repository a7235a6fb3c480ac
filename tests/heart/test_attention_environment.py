"""fa2_lab.attention without Triton, under torch.compile and vmap, in streams and CUDA graphs, and on large tensors."""

import gc
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from attention_cases import check_attention, kernels, nan_in_empty  # noqa: F401 (two are fixtures)
from kernel_truth import DEVICE, RESULTS, largest_error, random_inputs, run_with_gradients

from fa2_lab.api import checks
from fa2_lab.api.attention import attention
from fa2_lab.kernels import launches, triton_versions

# Where it runs ------------------------------------------------------------------------------------------------


COMPATIBLE = [("3.6.0", "2.3.5"), ("3.7.1", "2.5.2"), ("3.10.0", "2.5.2")]
INCOMPATIBLE = [("3.6.0", "2.4.0"), ("3.5.1", "2.3.5")]


@pytest.mark.parametrize("triton, numpy", COMPATIBLE + INCOMPATIBLE)
def test_incompatible_triton_and_numpy_versions_are_reported(triton, numpy, monkeypatch):
    sentence = triton_versions.version_conflict(triton, numpy)
    assert (sentence == "") == ((triton, numpy) in COMPATIBLE)
    assert (triton_versions.version_conflict(triton, numpy, interpreted=False) == "") == (triton != "3.5.1")
    monkeypatch.setattr(checks.interpreter, "version_conflict", lambda: sentence)
    monkeypatch.setattr(checks.interpreter, "is_enabled", lambda: True)
    with pytest.raises(RuntimeError, match="install") if sentence else nullcontext() as refused:  # nor is it silent
        checks.runs_on_triton("auto", "cpu")
    assert not sentence or triton in str(refused.value)


RUN_IN_FORKS = """import io, json, os, sys, torch, traceback
for code in json.loads(sys.argv[1]):
    said, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 2)
        try:
            exec(code, {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    text = os.fdopen(said).read()
    print(json.dumps([os.waitstatus_to_exitcode(os.wait()[1]), text]))
"""


def run_python(*codes: str) -> list[tuple[int, str]]:
    """Run each code in a process without a GPU that has already imported torch, and return (exit status, stderr)."""
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"} | dict(CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, "-c", RUN_IN_FORKS, json.dumps(codes)]
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=True)
    return [tuple(json.loads(line)) for line in result.stdout.splitlines()]


DENSE_CODE = (
    "import torch, fa2_lab; q = torch.ones(1, 1, 2, 16); [fa2_lab.attention(q, q, q, backend={!r}) for _ in 'ab']"
)
AUTO_CODE, TRITON_CODE = DENSE_CODE.format("auto"), DENSE_CODE.format("triton")


def test_backend_with_triton_installed_missing_or_imported_first():
    hide, first = "import sys; sys.modules['triton'] = None; ", "import triton; "
    codes = (TRITON_CODE, first + TRITON_CODE, first + AUTO_CODE)
    codes += (hide + AUTO_CODE, hide + TRITON_CODE, hide + DENSE_CODE.format("portable"))
    fine, early, early_auto, without_auto, without, without_portable = run_python(*codes)
    if not triton_versions.version_conflict(metadata.version("triton"), metadata.version("numpy")):
        assert fine[0] == 0, fine
        assert fine[1].count("interpreter") == 1 and len(fine[1].strip().splitlines()) == 1
    assert early[0] == 1 and "import fa2_lab.kernels before triton" in early[1]
    assert early_auto == (0, "")
    assert without_auto[0] == 0
    for status, stderr in (without, without_portable):
        assert status == 1 and "Triton is not installed" in stderr


PRETEND_DRIVER = """import pathlib
real = pathlib.Path.exists
pathlib.Path.exists = lambda path, **options: str(path) == "/dev/nvidiactl" or real(path, **options)
"""
PACKED_CODE = """import torch, fa2_lab
q, starts = torch.ones(2, 1, 16), torch.tensor([0, 2], dtype=torch.int32)
fa2_lab.attention_packed(q, q, q, starts, starts, backend="triton")
"""
PAGED_CODE = """import torch, fa2_lab
q, pages, one = torch.ones(1, 1, 1, 16), torch.ones(1, 1, 1, 16), torch.ones(1, dtype=torch.int32)
fa2_lab.attention_paged(q, pages, pages, 0 * one[None], one, backend="triton")
"""
RUNG_CODE = """import torch
from fa2_lab.kernels import ladder
q = torch.ones(1, 1, 2, 64, dtype=torch.float16)
ladder.load("11").forward(q, q, q, causal=True)
"""


def test_first_call_is_interpreted_if_there_is_a_driver_without_a_gpu():
    if triton_versions.version_conflict(metadata.version("triton"), metadata.version("numpy")):
        pytest.skip("these versions of Triton and NumPy cannot interpret")
    calls = dict(attention=TRITON_CODE, packed=PACKED_CODE, paged=PAGED_CODE, rung=RUNG_CODE)
    outcomes = dict(zip(calls, run_python(*(PRETEND_DRIVER + code for code in calls.values())), strict=True))
    assert {name: stderr for name, (status, stderr) in outcomes.items() if status} == {}


@pytest.mark.skipif(DEVICE == "cuda", reason="nothing is interpreted on a GPU")
def test_patched_interpreter_matches_tritons_bit_for_bit(monkeypatch):
    from triton import language
    from triton.runtime import interpreter as inside

    def count_patches() -> int:
        """Return how often a call patches triton.language, and assert that it is unchanged after the call."""
        seen, before, look = [], dict(vars(language)), inside._patch_builtin
        with monkeypatch.context() as watched:
            watched.setattr(inside, "_patch_builtin", lambda *given: seen.append(given) or look(*given))
            results.append(
                run_with_gradients(attention, *random_inputs(1, 2, 1, 20, 30, 16), causal=True, dropout_p=0.2, seed=3)
            )
        assert vars(language) == before
        return len(seen)

    results = []
    fast = count_patches()
    for name in ("_patch_lang", "_get_np_dtype"):
        monkeypatch.setattr(inside, name, getattr(inside, name).__wrapped__)
    monkeypatch.setattr(inside.interpreter_builder, "options", inside.InterpreterOptions())
    assert count_patches() > 10 * fast > 0
    assert all(map(torch.equal, *results))


def test_interpreter_with_other_internals_is_not_patched(monkeypatch):
    from triton.runtime import interpreter as inside

    monkeypatch.delattr(inside, "_patch_lang")
    triton_versions.speed_up_interpreter.__wrapped__()
    assert not hasattr(inside, "_patch_lang")


@pytest.mark.parametrize("current", (0, 1))
def test_launch_selects_the_gpu_of_its_tensors(current, monkeypatch):
    """Triton launches on the current GPU, whatever the tensors say."""
    entered = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current)
    with launches.on_device_of(SimpleNamespace(is_cuda=True, device="cuda:1", get_device=lambda: 1)):
        assert entered == ([] if current == 1 else ["cuda:1"])


# On a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def deterministic(kernels):  # noqa: F811
    """Ask PyTorch for deterministic algorithms if a GPU's own kernels run, whose gradients else differ in rounding."""
    torch.use_deterministic_algorithms(kernels == "chosen")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("shape, causal, dtype", [
    *[((4, 4, 2, 500, 460, d), causal, torch.bfloat16) for d in (48, 64, 96, 128) for causal in (False, True)],
    ((60, 4, 4, 128, 128, 128), False, torch.float16),  # many blocks at once
], ids=str)  # fmt: skip
def test_attention_is_bitwise_reproducible(shape, causal, dtype, deterministic):
    q, k, v, dO = random_inputs(*shape, dtype)
    first = run_with_gradients(attention, q, k, v, dO, causal=causal)
    for _ in range(150):
        assert all(map(torch.equal, run_with_gradients(attention, q, k, v, dO, causal=causal), first))


@pytest.mark.gpu
def test_batch_may_exceed_the_grid_limit_of_65535():
    q, k, v, dO = random_inputs(70000, 1, 1, 3, 5, 16, torch.float16)
    check_attention(q, k, v, dO, causal=True)


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("pitch", ("batches", "rows"))
def test_strides_may_exceed_int32(pitch):
    q, k, v = (torch.randn(1, 1, 64, 128, device=DEVICE, dtype=torch.float16) for _ in range(3))
    want = run_with_gradients(attention, *(x.clone().requires_grad_() for x in (q, k, v)), torch.ones_like(q))
    if pitch == "batches":  # the last of many: (1, 1, 64, 128) that starts behind 2^31 elements
        memory = torch.empty(3, 2**31 // (64 * 128) + 2, 64, 128, device=DEVICE, dtype=torch.float16)
        views = [part.as_strided((2, 1, 64, 128), (part.numel() - 64 * 128, 1, 128, 1)) for part in memory]
    else:  # rows 2^26 elements apart
        memory = torch.empty(64, 2**26, device=DEVICE, dtype=torch.float16)
        views = [memory[None, None, :, slot * 128 : slot * 128 + 128] for slot in range(3)]
    for view, x in zip(views, (q, k, v), strict=True):
        view.copy_(x.expand_as(view))
    views = [x.detach().requires_grad_() for x in views]
    got = run_with_gradients(attention, *views, torch.ones_like(views[0]))
    assert all(torch.equal(a[-1:], b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
@pytest.mark.exhaustive
def test_tensors_may_have_more_than_2_to_the_31_elements():
    x = torch.randn(2**15 + 2, 4, 128, 128, device=DEVICE, dtype=torch.float16)
    O = attention(x, x, x, causal=True)
    alone = attention(x[-1:], x[-1:], x[-1:], causal=True)  # perhaps by another kernel, which rounds in another order
    assert (O[-1:] - alone).abs().max() < 0.01


@pytest.mark.gpu
def test_cuda_graph_replay_draws_a_new_dropout_seed():
    q, k, v, dO = random_inputs(2, 4, 2, 100, 120, 64, torch.float16)

    def step():
        O = attention(q, k, v, causal=True, dropout_p=0.1)
        return O, *torch.autograd.grad(O, (q, k, v), dO)

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    first = [x.clone() for x in out]
    graph.replay()
    assert not any(map(torch.equal, out, first)) and (out[0] - attention(q, k, v, causal=True)).abs().max() < 5


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("N_q, N_k, d", ((100, 100, 64), (1, 300, 64), (700, 700, 128)))
def test_attention_runs_on_a_gpu_that_is_not_current(N_q, N_k, d):
    here = random_inputs(1, 2, 2, N_q, N_k, d, torch.bfloat16)
    there = [x.detach().to("cuda:1").requires_grad_() for x in here]
    want = run_with_gradients(attention, *here)
    for _ in range(3):  # Triton launches the first, and is passed by later
        for name, a, b in zip(RESULTS, run_with_gradients(attention, *there), want, strict=True):
            assert a.device == there[0].device
            assert largest_error(a.cpu(), b.cpu()) <= (0 if name in "OL" else 1e-2), name
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_attention_allocates_only_O_L_and_D(kernels):  # noqa: F811
    """On Hopper, dQ's sums in fp32 besides."""
    options = dict(device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (torch.randn(1, 16, 65536, 128, **options) for _ in range(3))
    dO = torch.randn_like(q)
    small = random_inputs(1, 16, 16, 128, 128, 128, torch.bfloat16)
    run_with_gradients(attention, *small)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    O = attention(q, k, v, causal=True)
    bytes_O, bytes_L = 2 * q.numel(), 4 * q.numel() // 128
    assert torch.cuda.max_memory_allocated() - before <= 1.01 * (bytes_O + bytes_L)
    torch.autograd.grad(O, (q, k, v), dO)
    sums = 2 * bytes_O + bytes_L if kernels == "chosen" else 0
    assert torch.cuda.max_memory_allocated() - before <= 1.01 * (bytes_O + 2 * bytes_L + 3 * bytes_O + sums)
