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
from kernel_truth import DEVICE, check_accuracy, dense, largest_error, run_with_gradients, tensors
from triton.compiler.errors import CompilationError
from triton.runtime import errors as runtime_errors

from fa2_lab import attention, attention_paged
from fa2_lab.kernels import dispatch, launches
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.decode import plan

OPTIONS = Options(causal=True, scale=0.25)
OF_TRITON = [
    CompilationError("def kernel():", ast.parse("x").body[0], "no such name: async_load"),
    runtime_errors.PTXASError("`ptxas` failed with error code 255\nRepro command: …"),
    runtime_errors.OutOfResources(300_000, 232_448, "shared memory"),
]


def raised_in(module: str, error: Exception):
    """Return a function that raises the error and whose module has this name."""
    space = dict(__name__=module, error=error)
    exec("def compile(*given, **named):\n    raise error", space)
    return space["compile"]


BARE = [  # what older compilers and unknown options end in
    raised_in("triton.compiler.compiler", RuntimeError("error encountered during parsing")),
    raised_in("triton.compiler.code_generator", AttributeError("module 'tma' has no attribute 'async_load'")),
    raised_in("triton.runtime.jit", KeyError("Keyword argument sched4reg was specified but unrecognised")),
]
SOMEBODY_ELSE_S = [
    raised_in("triton.backends.nvidia.driver", RuntimeError("Triton Error [CUDA]: an illegal memory access")),
    raised_in("triton.compiler.compiler", RuntimeError("Triton Error [CUDA]: out of memory")),
    raised_in("triton.compiler.compiler", torch.AcceleratorError("CUDA error: unspecified launch failure")),
    raised_in("torch", torch.OutOfMemoryError("CUDA out of memory")),
    raised_in("fa2_lab.kernels.hopper.forward.launch", AttributeError("a mistake of ours")),
    raised_in("triton.runtime.interpreter", runtime_errors.InterpreterError("ValueError('a mistake in a kernel')")),
]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(dispatch, "WARNED", set())


def raising(error):
    """Return a function that raises `error`, or if `error` is a function, calls it so that it raises."""

    def fail(*given, **named):
        if isinstance(error, Exception):
            raise error
        error()

    return fail


@pytest.fixture
def hopper(monkeypatch):
    """Return a function that installs Hopper modules whose launches all raise, and the counts of what is called."""
    counts = dict(prepared=0, launched=0, portable=0)

    def put(error):
        def prepare(*kind):
            counts["prepared"] += 1

            def own(*tensors):
                counts["launched"] += 1
                raising(error)()

            return own

        module = types.SimpleNamespace(prepare=prepare, is_fastest=lambda *given: True)
        monkeypatch.setattr(dispatch, "hopper_module", lambda direction, device: module)
        for room in (dispatch.portable, dispatch.portable_backward):
            real = room.prepare

            def counted(*kind, real=real, **named):
                counts["portable"] += 1
                return real(*kind, **named)

            monkeypatch.setattr(room, "prepare", counted)
        return counts

    return put


@pytest.mark.parametrize("error", [*OF_TRITON, *BARE])
def test_hopper_compile_error_falls_back_to_portable_with_one_warning(error, hopper):
    counts, inputs = hopper(error), tensors(1, 2, 1, 20, 24, 16)
    with pytest.warns(RuntimeWarning) as said:
        got = run_with_gradients(attention, *inputs, causal=True)
    check_accuracy(got, dense(*inputs, causal=True), dense(*inputs, causal=True, dtype=torch.float32))
    sentences = [str(w.message) for w in said if w.category is RuntimeWarning]  # NumPy deprecates what Triton 3.6 does
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


@pytest.mark.parametrize("error", SOMEBODY_ELSE_S)
def test_other_errors_of_hopper_kernels_are_raised(error, hopper):
    counts, (q, k, v, _) = hopper(error), tensors(1, 1, 1, 20, 20, 16)
    for _ in range(2):
        with pytest.raises((RuntimeError, AttributeError, runtime_errors.InterpreterError)) as found:
            attention(q, k, v)
        assert "cannot compile" not in str(found.value)
    assert counts == dict(prepared=1, launched=2, portable=0) and not dispatch.WARNED


def test_declined_call_falls_back_for_this_call_only():
    """As tensors that are not aligned: the portable kernel for them is prepared once, for this kind."""
    made, declined = [], []

    def own(x):
        return None if x in declined else ("own", x)

    call = dispatch.with_fallback("a kernel", own, lambda *given: made.append(given) or (lambda x: ("other", x)))
    assert call(1) == ("own", 1) and not made
    declined.append(2)
    assert [call(x) for x in (2, 3, 2)] == [("other", 2), ("own", 3), ("other", 2)] and made == [(2,)]


class Uncompiled:
    """A stand-in for a kernel that Triton cannot compile."""

    def __getitem__(self, grid):
        return raising(OF_TRITON[1])


@pytest.mark.parametrize("name", ("forward_kernel", "bwd_dq"))
def test_portable_compile_error_is_raised_clearly(name, monkeypatch):
    room = dispatch.portable if name == "forward_kernel" else dispatch.portable_backward
    monkeypatch.setattr(room, name, Uncompiled())
    with pytest.raises(RuntimeError, match=r"cannot compile the portable (for|back)ward \(PTXASError: `ptxas` failed"):
        run_with_gradients(attention, *tensors(1, 2, 1, 20, 24, 16))
    with pytest.raises(RuntimeError, match="ward with the bias alibi"):
        run_with_gradients(attention, *tensors(1, 2, 1, 20, 24, 16), bias=BIASES["alibi"][0])


def test_decode_compile_error_falls_back_except_for_pages(monkeypatch):
    q, k, v, dO = tensors(1, 2, 1, 1, 24, 16)
    monkeypatch.setattr(
        launches.Launch, "__call__", fail_for(launches.Launch.__call__, "split_kv_kernel", "stream_k_kernel")
    )
    with pytest.warns(RuntimeWarning, match="cannot compile decode"):
        O = attention(q, k, v)
    assert largest_error(O, dense(q, k, v, dO)[0]) < 1e-5
    pages, table = torch.zeros(2, 4, 1, 16, device=DEVICE), torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([5], device=DEVICE)
    with pytest.raises(RuntimeError, match="cannot compile decode over pages"):
        attention_paged(q.detach(), pages, pages, table, lengths)
    assert attention_paged(q.detach(), pages, pages, table, lengths, backend="reference").shape == q.shape


def fail_for(real, *names):
    """Return a Launch.__call__ that raises a compile error for kernels of these names, and else calls `real`."""

    def call(self, *pointers):
        if getattr(self.kernel, "__name__", None) in names or self.kernel in [getattr(plan, name) for name in names]:
            raise OF_TRITON[0]
        real(self, *pointers)

    return call


@pytest.mark.parametrize("missing", ("forward", "backward"))
def test_hopper_import_error_warns_once(missing, monkeypatch):
    pytest.importorskip("fa2_lab.kernels.hopper.forward.launch", reason="this Triton's Gluon is too old")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch.interpreter, "is_enabled", lambda: False)
    monkeypatch.setitem(sys.modules, f"fa2_lab.kernels.hopper.{missing}", None)
    monkeypatch.delitem(sys.modules, f"fa2_lab.kernels.hopper.{missing}.launch", raising=False)
    with pytest.warns(RuntimeWarning, match=f"cannot compile Hopper's {missing}"):
        assert dispatch.import_hopper(missing, torch.device("cuda", 0)) is None
    other = dict(forward="backward", backward="forward")[missing]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.import_hopper(missing, torch.device("cuda", 0)) is None
        assert dispatch.import_hopper(other, torch.device("cuda", 0)) is not None


def test_fallback_call_keeps_no_tensor_alive(hopper):
    """Neither does what was prepared, nor what takes its place."""
    hopper(lambda *given: None)
    q, k, v = (torch.randn(1, 1, 20, 16, device=DEVICE) for _ in "qkv")
    call = dispatch.prepare_contiguous_forward(Tensors(q, k, v), OPTIONS)
    alive = [weakref.ref(x) for x in (q, k, v)]
    del q, k, v
    gc.collect()
    assert call and not any(x() is not None for x in alive)
