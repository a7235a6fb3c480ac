"""Repeated launches: the driver gets the same arguments as from Triton's own launcher, for each version of Triton."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest

from fa2_lab.kernels import interpreter

if not interpreter.triton_is_installed():
    pytest.skip("needs Triton", allow_module_level=True)

from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from fa2_lab.kernels import relaunch
from fa2_lab.tools import offline

META = dict(swizzle=3, elem_size=2, elem_type=6, block_size=[1, 64], fp4_padded=False)


class FakeTensor:
    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


class FakeDescriptor:
    block_shape, shape, strides, padding, round_f32_to_tf32 = [1, 64], [5, 6], [6, 1], "zero", False

    def __init__(self, address):
        self.base = FakeTensor(address)


class FakeDriver:
    """A stand-in for the launcher in C and the GPU's driver. It keeps the arguments of launches."""

    def __init__(self):
        self.seen = []

    def launch(self, *arguments):
        self.seen.append([list(x) if isinstance(x, (list, tuple)) else x for x in arguments])

    def fill_tma_descriptor_tiled(self, *arguments):
        return arguments

    fill_tma_descriptor = fill_tma_descriptor_tiled  # its name before 3.7


class FlatLauncher:
    """A small CudaLauncher as in Triton 3.6, which passes the kernel's arguments one by one at the end."""

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, False, True, None, None, *arguments)


class TupleLauncher:
    """A small CudaLauncher as in Triton 3.7 and later, which passes the kernel's arguments in one tuple."""

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        self.launch(
            x, y, z, stream, function, False, True, packed, metadata, enter, leave, None, None, "i", b"", arguments
        )


def own_launcher(launch, described: int, count: int):
    """Return the installed Triton's CudaLauncher, with `launch` in place of its launcher in C."""
    launcher = object.__new__(nvidia.CudaLauncher)
    signature = {n: "tensordesc<fp16[1, 64]>" if n < described else "i32" for n in range(count)}
    launcher.launch = nvidia.wrap_handle_tensordesc(launch, signature, [META] * described)
    launcher.num_ctas, launcher.gsan_enabled = 1, False
    launcher.global_scratch_size = launcher.global_scratch_align = 0
    launcher.profile_scratch_size = launcher.profile_scratch_align = 0
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
    launcher.arg_annotations, launcher.kernel_signature = "i", b""
    return launcher


class FakeKernel:
    """A small stand-in for Triton's CompiledKernel."""

    function, packed_metadata = 99, (4, 1, 2048)

    def __init__(self, run, names, described=0, scratch=0):
        self.run, self.src = run, SimpleNamespace(fn=SimpleNamespace(arg_names=names))
        self.metadata = SimpleNamespace(global_scratch_size=scratch, profile_scratch_size=0)
        self.metadata.tensordesc_meta = [META] * described

    def __copy__(self):
        raise AssertionError("from Triton 3.8 on, what is copied and dropped takes the kernel off the GPU")


@pytest.fixture
def fake_gpu(monkeypatch):
    absent, fake = offline.Absent(None), FakeDriver()
    absent.utils = fake
    monkeypatch.setattr(driver, "_active", absent)
    return fake


class NestedTuple(NamedTuple):
    B_r: int
    strides: tuple


POINTERS = (FakeTensor(16), None, FakeTensor(32))
SCALARS = ((3, 4), 5, 0.5, NestedTuple(64, NestedTuple(1, (2, 3))))  # tuples, as often


def make_relaunch(kernel, arguments, described=0):
    """Return relaunch() of a launch with 7 programs on stream 11."""
    return relaunch.relaunch(kernel, (7, 1, 1), 11, arguments, described, len(POINTERS))


@pytest.mark.parametrize("kind, described", [("installed", 0), ("installed", 2), (FlatLauncher, 0), (TupleLauncher, 0)])
def test_relaunch_passes_the_same_arguments_as_triton(kind, described, fake_gpu):
    """At other addresses and in other sizes; a profiler that listens is told by Triton's own call."""

    class Longer(FakeDescriptor):
        shape, strides = [7, 6], [12, 1]

    arguments = *(FakeDescriptor(64 * n) for n in range(described)), *POINTERS, *SCALARS
    own = kind == "installed"
    run = own_launcher(fake_gpu.launch, described, len(arguments)) if own else kind(fake_gpu.launch)
    compiled = FakeKernel(run, [*"abcdefghi"][: len(arguments)], described)
    relauncher = make_relaunch(compiled, arguments, described)
    assert not fake_gpu.seen, "nothing is launched in order to write it down"

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    addresses = [*(256 * n for n in range(described)), 160, 0, 320]
    other_arguments = (5, 6), 7, 1.5, NestedTuple(32, NestedTuple(3, (4, 5)))
    longer = [Longer(256 * n) for n in range(described)]
    for launch, grid, descriptors, rest in (
        (relauncher, (7, 1, 1), [FakeDescriptor(256 * n) for n in range(described)], SCALARS),
        (relauncher.with_arguments((9, 2, 1), longer, other_arguments), (9, 2, 1), longer, other_arguments),
    ):
        fake_gpu.seen.clear()
        assert launch(12, addresses)
        new_arguments = *descriptors, 160, 0, 320, *rest
        run(*grid, 12, compiled.function, compiled.packed_metadata, None, *hooks, *new_arguments)
        ours, theirs = fake_gpu.seen
        assert ours == [None if any(x is hook for hook in hooks) else x for x in theirs]
    fake_gpu.seen.clear()
    for hook in hooks:
        hook.add(print)
        try:
            assert not relauncher(12, addresses) and not fake_gpu.seen
        finally:
            hook.remove(print)
    assert relauncher(12, addresses) and fake_gpu.seen[0][:3] == [7, 1, 1], "the first is as it was"


@pytest.mark.beside("launch_worker.py")
def test_relaunch_cache_key_equals_tritons_specialization(worker_rows):
    """Those that the compiler tells apart never share what was compiled, and those that it does not always do."""
    compilations = {tuple(row) for row in worker_rows}
    numbers, compiled = ({row[1] for row in compilations}, {(row[0], row[2]) for row in compilations})
    assert len(compilations) == len(numbers) == len(compiled) and len(worker_rows) > 5 * len(compilations) > 500
    assert {"forward_kernel", "stream_k_kernel", "backward_kernel"} <= {kernel for kernel, *_ in worker_rows}


def test_tma_descriptors_of_each_layer_are_encoded_once(fake_gpu):
    """Each has tensors of its own, one after the other; the copy engine is told of each once."""
    encoded, fill = [], fake_gpu.fill_tma_descriptor_tiled
    fake_gpu.fill_tma_descriptor_tiled = fake_gpu.fill_tma_descriptor = lambda *x: encoded.append(x) or fill(*x)
    compiled = FakeKernel(own_launcher(fake_gpu.launch, 1, 8), [*"abcdefgh"], 1)
    relauncher = make_relaunch(compiled, (FakeDescriptor(64), *POINTERS, *SCALARS), 1)
    encoded.clear()
    for _ in range(3):
        for layer in range(200):
            assert relauncher(11, [1024 * layer, 160, 0, 320])
    assert len(encoded) == 200


def test_relaunch_keeps_no_tensor_alive(fake_gpu):
    arguments = FakeDescriptor(64), *POINTERS, *SCALARS
    compiled = FakeKernel(own_launcher(fake_gpu.launch, 1, len(arguments)), [*"abcdefgh"], 1)
    relauncher = make_relaunch(compiled, arguments, 1)
    values = [y for x in vars(relauncher).values() for y in (x if isinstance(x, (list, tuple)) else [x])]
    assert relauncher.compiled is compiled and not any(isinstance(x, (FakeTensor, FakeDescriptor)) for x in values)
    last = relauncher.rest[-1]
    assert type(last) is type(last[1]) is tuple, "a named one takes the driver three times as long"


UNKNOWN_LAUNCHERS = dict(  # of launchers of a Triton that nobody has seen yet
    moved=lambda x, y, z, *arguments: (*arguments, x, y, z),
    stream_first=lambda x, y, z, stream, *arguments: (stream, x, y, z, *arguments),
    wrapped=lambda x, y, z, stream, *arguments: (x, y, z, stream, *[[x] for x in arguments]),
    one_more=lambda *arguments: (*arguments[:9], [*arguments[9:], 0]),
)


@pytest.mark.parametrize("order", UNKNOWN_LAUNCHERS)
@pytest.mark.parametrize("name", ("launch", "start"))
def test_relaunch_declines_unknown_triton_internals(order, name, fake_gpu):
    grids = []

    class Other:
        def __call__(self, x, y, z, *arguments):
            grids.append((x, y, z))
            getattr(self, name)(*UNKNOWN_LAUNCHERS[order](x, y, z, *arguments))

    run = Other()
    setattr(run, name, fake_gpu.launch)
    compiled = FakeKernel(run, [*"abcdefg"])
    assert make_relaunch(compiled, (*POINTERS, *SCALARS)) is None
    assert grids == [(0, 1, 1)], "nothing may run twice, whoever launches it"


@pytest.mark.parametrize("change", ("one more", "one less", "told more"))
def test_relaunch_declines_unknown_descriptor_metadata(change, fake_gpu, monkeypatch):
    """They are compared before they are used: the driver would read what is missing from its stack."""
    usual, changed = nvidia.make_tensordesc_arg, {"one more": lambda x: [*x, 0], "one less": lambda x: [*x[:-1]]}
    if change in changed:
        monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda *x, **y: changed[change](usual(*x, **y)))
    else:
        fill = lambda a, b, c, d, e, f, g, h, one_more: a  # noqa: E731
        monkeypatch.setattr(fake_gpu, "fill_tma_descriptor_tiled", fill)
        monkeypatch.setattr(fake_gpu, "fill_tma_descriptor", fill)
        monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda x, meta, **_: [fill(*range(9)), *x.shape, *x.strides])
    compiled = FakeKernel(own_launcher(fake_gpu.launch, 1, 8), [*"abcdefgh"], 1)
    arguments = FakeDescriptor(64), *POINTERS, *SCALARS
    assert make_relaunch(compiled, arguments, 1) is None


def test_relaunch_declines_descriptors_unpacked_by_triton(fake_gpu):
    compiled = FakeKernel(TupleLauncher(fake_gpu.launch), [*"abcdefgh"], described=1)  # the driver must do it
    assert make_relaunch(compiled, (FakeDescriptor(64), *POINTERS, *SCALARS), 1) is None


def test_relaunch_declines_kernels_with_scratch_memory(fake_gpu):
    compiled = FakeKernel(TupleLauncher(fake_gpu.launch), [*"abcdefg"], scratch=64)
    assert make_relaunch(compiled, (*POINTERS, *SCALARS)) is None
