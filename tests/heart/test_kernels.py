"""How the kernels are launched: block sizes, and the search for them with a clock that is made up."""

import math
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from kernel_truth import DEVICE  # before Triton

from fa2_lab.kernels import dispatch, launches, tables
from fa2_lab.kernels.common import softmax, tile
from fa2_lab.kernels.decode.kernel import DecodeConstants, KVCache, page_and_row


@pytest.mark.parametrize("backend, arch, table", [
    ("cuda", 80, "AMPERE"), ("cuda", 89, "ADA"), ("cuda", 90, "HOPPER"), ("cuda", 100, "BLACKWELL"),
    ("cuda", 120, "BLACKWELL"), ("hip", "gfx942", "CDNA"),
])  # fmt: skip
def test_each_gpu_architecture_uses_its_table(backend, arch, table, monkeypatch):
    target = SimpleNamespace(backend=backend, arch=arch)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(tables, "driver", driver)
    assert tables.chip_tables() is getattr(tables, table)
    if backend == "cuda":
        monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
        assert tables.chip_tables() is tables.AMPERE


@pytest.mark.parametrize("capability, hip, interpreted", [
    ((9, 0), None, False), ((8, 0), None, False), ((10, 0), None, False), ((12, 0), None, False),
    ((9, 0), "6.0", False), ((9, 0), None, True),
])  # fmt: skip
def test_hopper_kernels_are_offered_on_hopper_only(capability, hip, interpreted, monkeypatch):
    pytest.importorskip("fa2_lab.kernels.hopper.forward.launch", reason="this Triton's Gluon is too old")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(dispatch.interpreter, "is_enabled", lambda: interpreted)
    on_hopper = capability == (9, 0) and not hip and not interpreted
    for direction in ("forward", "backward"):
        assert (dispatch.import_hopper(direction, torch.device("cuda", 0)) is not None) is on_hopper
        assert dispatch.import_hopper(direction, torch.device("cpu")) is None
    assert dispatch.decode.has_pdl(torch.device("cuda", 0)) is (capability >= (9, 0) and not hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=114))
    assert [launches.sm_count.__wrapped__(torch.device(name)) for name in ("cuda", "meta")] == [114, 132]


def test_portable_launch_arguments_equal_hand_computed_ones():
    """A width that is a power of two, a program for each block, and dropout's rule."""
    assert [tables.padded_head_dim(d) for d in (1, 16, 17, 96, 129)] == [16, 16, 32, 128, 256]
    assert launches.program_count(torch.empty(2, 3, 130, 128, device="meta"), 64, None) == 2 * 3 * 3
    programs = launches.program_count(torch.empty(256, 3, 64, device="meta"), 64, 4)
    assert programs == 3 * (4 + 4 + 1)
    assert launches.dropout_rule(0.3) == (math.floor(0.3 * 2**32), 1 / 0.7) and launches.dropout_rule(0.0) == (0, 1.0)
    Q, K = (torch.empty(1, 8, N, 16, dtype=torch.float16, device="meta") for N in (2**21 + 64, 1))
    assert launches.size_arguments(Q, K, Q, K, None)["l2_group"] == 8  # times all blocks of a head it must fit 32 bits


# Where programs and heads lie ---------------------------------------------------------------------------------


@triton.jit
def pointers_kernel(X, heads, rows, pages, table, strides, paged):
    n = tl.program_id(0)
    page, _ = page_and_row(KVCache(None, None, table, 4), n * paged.B_c, 64, paged)
    tl.store(pages + n, page * strides[0])
    tl.store(heads + n, tile.head_ptr(X, strides, n, n).to(tl.int64))
    tl.store(rows + 4 * n + tl.arange(0, 4)[:, None], tile.row_pointers(X, 4 * n, strides[0], 4, 1).to(tl.int64))


def test_pointer_offsets_do_not_overflow_int32():
    X, offsets = torch.zeros(16, device=DEVICE), torch.zeros(3, 16, dtype=torch.int64, device=DEVICE)
    heads, rows, pages = offsets
    paged = DecodeConstants(*map(tl.constexpr, (16, 16, 16, 16, 16, True, False, False, False)))
    pointers_kernel[(4,)](X, *offsets, torch.arange(4, dtype=torch.int32, device=DEVICE), (2**30, 3 * 2**28), paged)
    assert pages[:4].tolist() == [n * 2**30 for n in range(4)]
    heads, rows = ((x - X.data_ptr()) // X.element_size() for x in (heads[:4], rows))
    assert heads.tolist() == [n * (2**30 + 3 * 2**28) for n in range(4)]
    assert rows.tolist() == [n * 2**30 for n in range(16)]


@triton.jit
def tanh_kernel(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, softmax.tanh(tl.load(x + at)))


def test_tanh_is_accurate_where_its_series_ends():
    x, y = torch.linspace(-1, 1, 4096, device=DEVICE), torch.empty(4096, device=DEVICE)
    tanh_kernel[(1,)](x, y, 4096)
    assert ((y - x.double().tanh()).abs() <= 1e-6 * x.double().tanh().abs()).all()


class CompiledStub:
    """A stand-in for a compiled kernel."""

    src = SimpleNamespace(fn=SimpleNamespace(arg_names=["Q", "K", "lengths", "N"]))


class KernelStub:
    """A stand-in for a kernel that keeps the arguments of all launches."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *tensors, **named: self.launches.append((grid, tensors, named)) or CompiledStub()


@pytest.mark.parametrize("described", (0, 1))
@pytest.mark.parametrize("declines", (False, True))
def test_relaunch_bypasses_triton_only_for_the_same_specialization(described, declines, monkeypatch):
    """From the second time on, by the addresses of that call; never with a pointer that is no multiple of 16, unless
    what is read in sixteens has a descriptor; and where Triton is another inside, it is asked each time."""
    kernel, relaunched, attempts = KernelStub(), [], []

    def relaunch(made, grid, stream, everything, described, pointers):
        attempts.append((grid, stream, everything[pointers + described :], described, pointers))
        return None if declines else lambda stream, at: relaunched.append((stream, at)) or True

    monkeypatch.setattr(launches.triton.compiler, "CompiledKernel", CompiledStub)
    monkeypatch.setattr(launches, "current_stream", lambda X: 7)
    monkeypatch.setattr(launches, "relaunch", relaunch)
    descriptor = SimpleNamespace(base="nobody's", block_shape=[64], layout=None)
    call = launches.Launch(kernel, 3, dict(num_warps=4), (descriptor,) * described, N=5)
    store = torch.zeros(3, 64, dtype=torch.float16)
    a, b, c = store
    for n, (Q, K) in enumerate([(a, b[4:]), (b, c), (c, a), (a[4:], c), (b, b)]):
        call(Q, K, None)
        passed_by = not declines and (n > 0 if described else n in (2, 4))
        if passed_by:
            assert relaunched.pop() == (7, [Q.data_ptr(), K.data_ptr(), 0])
        else:
            grid, (first, *others), named = kernel.launches.pop()
            assert (first.base is Q if described else first is Q) and others[0] is K and others[1] is None
            assert grid == (3, 1, 1) and named == dict(N=5, num_warps=4, enable_fp_fusion=True)
        assert not relaunched and not kernel.launches and descriptor.base == "nobody's"
    assert attempts == [((3, 1, 1), 7, (5,), described, 3 - described)]  # and nobody tries it again and again


def test_tune_prints_the_fastest_correct_config(monkeypatch, capsys):
    from fa2_studio.bench import tune

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype: real(1, 1, 40, shape[-1], dtype=dtype).to(DEVICE))
    configs = [tables.KernelConfig(B_r, B_c, 4, 1, d_pad=16) for B_r, B_c in ((16, 16), (32, 16), (7, 7))]
    monkeypatch.setattr(tune, "candidate_configs", lambda kernel, before: [before, *configs])

    def measure(calls, repeats):
        assert configs[2] not in calls  # 7 is no tile size: it failed before anything was timed
        for call in calls.values():
            call()
        return {blocks: tune.Timing(blocks.B_r + blocks.B_c, 0, 0) for blocks in calls}

    monkeypatch.setattr(tune, "measure_kernels", measure)
    assert tune.main(["--d", "16", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert printed.count(", 16: (16, 16, 4, 1)  # 32.000 ms; before (") == 6 and "entries of FP32" in printed


def test_tune_rejects_bad_arguments(monkeypatch):
    from fa2_studio.bench import tune

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="tune"):
        tune.main(["--d", "300"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU"):
        tune.main([])
