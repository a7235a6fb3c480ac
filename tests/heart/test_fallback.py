"""A kernel that the installed Triton cannot compile: the portable kernels replace it, with a single warning."""

import ast
import gc
import sys
import types
import warnings
import weakref

import pytest
import torch
import triton
from biases import BIASES
from kernel_truth import DEVICE, check_accuracy, dense_truth, largest_error, random_inputs, run_with_gradients
from triton.compiler.errors import CompilationError
from triton.runtime import errors as runtime_errors

from fa2_lab import attention, attention_paged
from fa2_lab.kernels import dispatch, launches
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.decode import plan

OPTIONS = Options(causal=True, scale=0.25)
COMPILE_ERRORS = [
    CompilationError("def kernel():", ast.parse("x").body[0], "no such name: async_load"),
    runtime_errors.PTXASError("`ptxas` failed with error code 255\nRepro command: …"),
    runtime_errors.OutOfResources(300_000, 232_448, "shared memory"),
]


def raiser_in(module: str, error: Exception):
    """Return a function that raises the error and whose module has this name."""
    namespace = dict(__name__=module, error=error)
    exec("def compile(*given, **named):\n    raise error", namespace)
    return namespace["compile"]


BARE_COMPILE_ERRORS = [  # what older compilers and unknown options end in
    raiser_in("triton.compiler.compiler", RuntimeError("error encountered during parsing")),
    raiser_in("triton.compiler.code_generator", AttributeError("module 'tma' has no attribute 'async_load'")),
    raiser_in("triton.runtime.jit", KeyError("Keyword argument sched4reg was specified but unrecognised")),
]
OTHER_ERRORS = [
    raiser_in("triton.backends.nvidia.driver", RuntimeError("Triton Error [CUDA]: an illegal memory access")),
    raiser_in("triton.compiler.compiler", RuntimeError("Triton Error [CUDA]: out of memory")),
    raiser_in("triton.compiler.compiler", torch.AcceleratorError("CUDA error: unspecified launch failure")),
    raiser_in("torch", torch.OutOfMemoryError("CUDA out of memory")),
    raiser_in("fa2_lab.kernels.hopper.forward.launch", AttributeError("a mistake of ours")),
    raiser_in("triton.runtime.interpreter", runtime_errors.InterpreterError("ValueError('a mistake in a kernel')")),
]


@pytest.fixture(autouse=True)
def no_warning_yet(monkeypatch):
    monkeypatch.setattr(dispatch, "WARNED", set())


def raising(error):
    """Return a function that raises `error`, or if `error` is a function, calls it so that it raises."""

    def fail(*given, **named):
        if isinstance(error, Exception):
            raise error
        error()

    return fail


@pytest.fixture
def failing_hopper(monkeypatch):
    """Return a function that installs Hopper modules whose launches all raise, and the counts of what is called."""
    counts = dict(prepared=0, launched=0, portable=0)

    def install(error):
        def prepare(*kind):
            counts["prepared"] += 1

            def launch(*tensors):
                counts["launched"] += 1
                raising(error)()

            return launch

        hopper = types.SimpleNamespace(prepare=prepare, is_fastest=lambda *given: True)
        monkeypatch.setattr(dispatch, "hopper_module", lambda direction, device: hopper)
        for module in (dispatch.portable, dispatch.portable_backward):
            real = module.prepare

            def counted(*kind, real=real, **named):
                counts["portable"] += 1
                return real(*kind, **named)

            monkeypatch.setattr(module, "prepare", counted)
        return counts

    return install


@pytest.mark.parametrize("error", [*COMPILE_ERRORS, *BARE_COMPILE_ERRORS])
def test_hopper_compile_error_falls_back_to_portable_with_one_warning(error, failing_hopper):
    counts, inputs = failing_hopper(error), random_inputs(1, 2, 1, 20, 24, 16)
    with pytest.warns(RuntimeWarning) as warned:
        got = run_with_gradients(attention, *inputs, causal=True)
    check_accuracy(got, dense_truth(*inputs, causal=True), dense_truth(*inputs, causal=True, dtype=torch.float32))
    # NumPy deprecates what Triton 3.6 does
    sentences = [str(w.message) for w in warned if w.category is RuntimeWarning]
    assert len(sentences) == 2  # the forward's and the backward's
    for name, sentence in zip(("Hopper's forward", "Hopper's backward"), sentences, strict=True):
        assert f"Triton {triton.__version__} cannot compile {name}" in sentence
        assert "portable" in sentence and "fa2_lab doctor" in sentence and "\n" not in sentence
    assert counts == dict(prepared=2, launched=2, portable=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        again = run_with_gradients(attention, *inputs, causal=True)
        assert all(map(torch.equal, got, again)) and counts == dict(prepared=2, launched=2, portable=2)
        run_with_gradients(attention, *inputs)  # another kind is tried, for it may compile, and nothing is said twice
    assert counts == dict(prepared=4, launched=4, portable=4)


@pytest.mark.parametrize("error", OTHER_ERRORS)
def test_other_errors_of_hopper_kernels_are_raised(error, failing_hopper):
    counts, (q, k, v, _) = failing_hopper(error), random_inputs(1, 1, 1, 20, 20, 16)
    for _ in range(2):
        with pytest.raises((RuntimeError, AttributeError, runtime_errors.InterpreterError)) as raised:
            attention(q, k, v)
        assert "cannot compile" not in str(raised.value)
    assert counts == dict(prepared=1, launched=2, portable=0) and not dispatch.WARNED


def test_declined_call_falls_back_for_this_call_only():
    """As tensors that are not aligned: the portable kernel for them is prepared once, for this kind."""
    prepared, declined = [], []

    def hopper_call(x):
        return None if x in declined else ("own", x)

    other = lambda *given: prepared.append(given) or (lambda x: ("other", x))  # noqa: E731
    call = dispatch.with_fallback("a kernel", hopper_call, other)
    assert call(1) == ("own", 1) and not prepared
    declined.append(2)
    assert [call(x) for x in (2, 3, 2)] == [("other", 2), ("own", 3), ("other", 2)] and prepared == [(2,)]


class Uncompiled:
    """A stand-in for a kernel that Triton cannot compile."""

    def __getitem__(self, grid):
        return raising(COMPILE_ERRORS[1])


@pytest.mark.parametrize("name", ("forward_kernel", "bwd_dq"))
def test_portable_compile_error_is_raised_clearly(name, monkeypatch):
    module = dispatch.portable if name == "forward_kernel" else dispatch.portable_backward
    monkeypatch.setattr(module, name, Uncompiled())
    with pytest.raises(RuntimeError, match=r"cannot compile the portable (for|back)ward \(PTXASError: `ptxas` failed"):
        run_with_gradients(attention, *random_inputs(1, 2, 1, 20, 24, 16))
    with pytest.raises(RuntimeError, match="ward with the bias alibi"):
        run_with_gradients(attention, *random_inputs(1, 2, 1, 20, 24, 16), bias=BIASES["alibi"][0])


def test_decode_compile_error_falls_back_except_for_pages(monkeypatch):
    q, k, v, dO = random_inputs(1, 2, 1, 1, 24, 16)
    failing = fail_for(launches.Launch.__call__, "split_kv_kernel", "stream_k_kernel")
    monkeypatch.setattr(launches.Launch, "__call__", failing)
    with pytest.warns(RuntimeWarning, match="cannot compile decode"):
        O = attention(q, k, v)
    assert largest_error(O, dense_truth(q, k, v, dO)[0]) < 1e-5
    pages, table = torch.zeros(2, 4, 1, 16, device=DEVICE), torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([5], device=DEVICE)
    with pytest.raises(RuntimeError, match="cannot compile decode over pages"):
        attention_paged(q.detach(), pages, pages, table, lengths)
    assert attention_paged(q.detach(), pages, pages, table, lengths, backend="reference").shape == q.shape


def fail_for(real, *names):
    """Return a Launch.__call__ that raises a compile error for kernels of these names, and else calls `real`."""

    def call(self, *pointers):
        if getattr(self.kernel, "__name__", None) in names or self.kernel in [getattr(plan, name) for name in names]:
            raise COMPILE_ERRORS[0]
        real(self, *pointers)

    return call


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_hopper_import_error_warns_once(direction, monkeypatch):
    pytest.importorskip("fa2_lab.kernels.hopper.forward.launch", reason="this Triton's Gluon is too old")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch.interpreter, "is_enabled", lambda: False)
    monkeypatch.setitem(sys.modules, f"fa2_lab.kernels.hopper.{direction}", None)
    monkeypatch.delitem(sys.modules, f"fa2_lab.kernels.hopper.{direction}.launch", raising=False)
    with pytest.warns(RuntimeWarning, match=f"cannot compile Hopper's {direction}"):
        assert dispatch.import_hopper(direction, torch.device("cuda", 0)) is None
    other = dict(forward="backward", backward="forward")[direction]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.import_hopper(direction, torch.device("cuda", 0)) is None
        assert dispatch.import_hopper(other, torch.device("cuda", 0)) is not None


def test_fallback_call_keeps_no_tensor_alive(failing_hopper):
    """Neither does what was prepared, nor what takes its place."""
    failing_hopper(lambda *given: None)
    q, k, v = (torch.randn(1, 1, 20, 16, device=DEVICE) for _ in "qkv")
    call = dispatch.prepare_contiguous_forward(Tensors(q, k, v), OPTIONS)
    alive = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    gc.collect()
    assert call and not any(x() is not None for x in alive)
