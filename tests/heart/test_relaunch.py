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


class Tensor:
    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


class Descriptor:
    block_shape, shape, strides, padding, round_f32_to_tf32 = [1, 64], [5, 6], [6, 1], "zero", False

    def __init__(self, address):
        self.base = Tensor(address)


class Driver:
    """A stand-in for the launcher in C and the GPU's driver. It keeps the arguments of launches."""

    def __init__(self):
        self.seen = []

    def launch(self, *everything):
        self.seen.append([list(x) if isinstance(x, (list, tuple)) else x for x in everything])

    def fill_tma_descriptor_tiled(self, *told):
        return told

    fill_tma_descriptor = fill_tma_descriptor_tiled  # its name before 3.7


class InOneRow:
    """A small CudaLauncher as in Triton 3.6, which passes the kernel's arguments one by one at the end."""

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, False, True, None, None, *arguments)


class InAList:
    """A small CudaLauncher as in Triton 3.7 and later, which passes the kernel's arguments in one tuple."""

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        self.launch(
            x, y, z, stream, function, False, True, packed, metadata, enter, leave, None, None, "i", b"", arguments
        )


def installed(launch, described: int, count: int):
    """Return the installed Triton's CudaLauncher, with `launch` in place of its launcher in C."""
    run = object.__new__(nvidia.CudaLauncher)
    signature = {n: "tensordesc<fp16[1, 64]>" if n < described else "i32" for n in range(count)}
    run.launch = nvidia.wrap_handle_tensordesc(launch, signature, [META] * described)
    run.num_ctas, run.gsan_enabled = 1, False
    run.global_scratch_size = run.global_scratch_align = run.profile_scratch_size = run.profile_scratch_align = 0
    run.launch_cooperative_grid, run.launch_pdl, run.arg_annotations, run.kernel_signature = False, True, "i", b""
    return run


class Compiled:
    """A small stand-in for Triton's CompiledKernel."""

    function, packed_metadata = 99, (4, 1, 2048)

    def __init__(self, run, names, described=0, scratch=0):
        self.run, self.src = run, SimpleNamespace(fn=SimpleNamespace(arg_names=names))
        self.metadata = SimpleNamespace(
            global_scratch_size=scratch, profile_scratch_size=0, tensordesc_meta=[META] * described
        )

    def __copy__(self):
        raise AssertionError("from Triton 3.8 on, what is copied and dropped takes the kernel off the GPU")


@pytest.fixture
def gpu(monkeypatch):
    absent, found = offline.Absent(None), Driver()
    absent.utils = found
    monkeypatch.setattr(driver, "_active", absent)
    return found


class Sizes(NamedTuple):
    B_r: int
    strides: tuple


POINTERS, REST = (Tensor(16), None, Tensor(32)), ((3, 4), 5, 0.5, Sizes(64, Sizes(1, (2, 3))))  # tuples, as often


@pytest.mark.parametrize("kind, described", [("installed", 0), ("installed", 2), (InOneRow, 0), (InAList, 0)])
def test_relaunch_passes_the_same_arguments_as_triton(kind, described, gpu):
    """At other addresses and in other sizes; a profiler that listens is told by Triton's own call."""

    class Longer(Descriptor):
        shape, strides = [7, 6], [12, 1]

    arguments = *(Descriptor(64 * n) for n in range(described)), *POINTERS, *REST
    run = installed(gpu.launch, described, len(arguments)) if kind == "installed" else kind(gpu.launch)
    made = Compiled(run, [*"abcdefghi"][: len(arguments)], described)
    again = relaunch.relaunch(made, (7, 1, 1), 11, arguments, described, len(POINTERS))
    assert not gpu.seen, "nothing is launched in order to write it down"

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    moved = [*(256 * n for n in range(described)), 160, 0, 320]
    other = (5, 6), 7, 1.5, Sizes(32, Sizes(3, (4, 5)))
    longer = [Longer(256 * n) for n in range(described)]
    for launch, grid, descriptors, rest in (
        (again, (7, 1, 1), [Descriptor(256 * n) for n in range(described)], REST),
        (again.with_arguments((9, 2, 1), longer, other), (9, 2, 1), longer, other),
    ):
        gpu.seen.clear()
        assert launch(12, moved)
        there = *descriptors, 160, 0, 320, *rest
        run(*grid, 12, made.function, made.packed_metadata, None, *hooks, *there)
        mine, theirs = gpu.seen
        assert mine == [None if any(x is hook for hook in hooks) else x for x in theirs]
    gpu.seen.clear()
    for hook in hooks:
        hook.add(print)
        try:
            assert not again(12, moved) and not gpu.seen
        finally:
            hook.remove(print)
    assert again(12, moved) and gpu.seen[0][:3] == [7, 1, 1], "the first is as it was"


@pytest.mark.beside("launch_worker.py")
def test_relaunch_cache_key_equals_tritons_specialization(rows):
    """Those that the compiler tells apart never share what was compiled, and those that it does not always do."""
    filed = {(kernel, number, given) for kernel, number, given in rows}
    assert len(filed) == len({number for _, number, _ in filed}) == len({(kernel, given) for kernel, _, given in filed})
    assert len(rows) > 5 * len(filed) > 500 and {"forward_kernel", "stream_k_kernel", "backward_kernel"} <= {
        kernel for kernel, *_ in rows
    }


def test_tma_descriptors_of_each_layer_are_encoded_once(gpu):
    """Each has tensors of its own, one after the other; the copy engine is told of each once."""
    told, fill = [], gpu.fill_tma_descriptor_tiled
    gpu.fill_tma_descriptor_tiled = gpu.fill_tma_descriptor = lambda *x: told.append(x) or fill(*x)
    made = Compiled(installed(gpu.launch, 1, 8), [*"abcdefgh"], 1)
    again = relaunch.relaunch(made, (7, 1, 1), 11, (Descriptor(64), *POINTERS, *REST), 1, len(POINTERS))
    told.clear()
    for _ in range(3):
        for layer in range(200):
            assert again(11, [1024 * layer, 160, 0, 320])
    assert len(told) == 200


def test_relaunch_keeps_no_tensor_alive(gpu):
    arguments = Descriptor(64), *POINTERS, *REST
    made = Compiled(installed(gpu.launch, 1, len(arguments)), [*"abcdefgh"], 1)
    again = relaunch.relaunch(made, (7, 1, 1), 11, arguments, 1, len(POINTERS))
    kept = [y for x in vars(again).values() for y in (x if isinstance(x, (list, tuple)) else [x])]
    assert again.compiled is made and not any(isinstance(x, (Tensor, Descriptor)) for x in kept)
    assert type(again.rest[-1]) is type(again.rest[-1][1]) is tuple, "a named one takes the driver three times as long"


OTHER_ORDERS = dict(  # of launchers of a Triton that nobody has seen yet
    moved=lambda x, y, z, *arguments: (*arguments, x, y, z),
    stream_first=lambda x, y, z, stream, *arguments: (stream, x, y, z, *arguments),
    wrapped=lambda x, y, z, stream, *arguments: (x, y, z, stream, *[[x] for x in arguments]),
    one_more=lambda *arguments: (*arguments[:9], [*arguments[9:], 0]),
)


@pytest.mark.parametrize("order", OTHER_ORDERS)
@pytest.mark.parametrize("name", ("launch", "start"))
def test_relaunch_declines_unknown_triton_internals(order, name, gpu):
    grids = []

    class Other:
        def __call__(self, x, y, z, *arguments):
            grids.append((x, y, z))
            getattr(self, name)(*OTHER_ORDERS[order](x, y, z, *arguments))

    run = Other()
    setattr(run, name, gpu.launch)
    made = Compiled(run, [*"abcdefg"])
    assert relaunch.relaunch(made, (7, 1, 1), 11, (*POINTERS, *REST), 0, len(POINTERS)) is None
    assert grids == [(0, 1, 1)], "nothing may run twice, whoever launches it"


@pytest.mark.parametrize("change", ("one more", "one less", "told more"))
def test_relaunch_declines_unknown_descriptor_metadata(change, gpu, monkeypatch):
    """They are compared before they are used: the driver would read what is missing from its stack."""
    usual, changed = nvidia.make_tensordesc_arg, {"one more": lambda x: [*x, 0], "one less": lambda x: [*x[:-1]]}
    if change in changed:
        monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda *x, **y: changed[change](usual(*x, **y)))
    else:
        told = lambda a, b, c, d, e, f, g, h, one_more: a  # noqa: E731
        monkeypatch.setattr(gpu, "fill_tma_descriptor_tiled", told)
        monkeypatch.setattr(gpu, "fill_tma_descriptor", told)
        monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda x, meta, **_: [told(*range(9)), *x.shape, *x.strides])
    made = Compiled(installed(gpu.launch, 1, 8), [*"abcdefgh"], 1)
    given = Descriptor(64), *POINTERS, *REST
    assert relaunch.relaunch(made, (7, 1, 1), 11, given, 1, len(POINTERS)) is None


def test_relaunch_declines_descriptors_unpacked_by_triton(gpu):
    made = Compiled(InAList(gpu.launch), [*"abcdefgh"], described=1)  # here it is the driver that must do it
    assert relaunch.relaunch(made, (7, 1, 1), 11, (Descriptor(64), *POINTERS, *REST), 1, len(POINTERS)) is None


def test_relaunch_declines_kernels_with_scratch_memory(gpu):
    made = Compiled(InAList(gpu.launch), [*"abcdefg"], scratch=64)
    assert relaunch.relaunch(made, (7, 1, 1), 11, (*POINTERS, *REST), 0, len(POINTERS)) is None
