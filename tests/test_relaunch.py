"""A launch written down: what Triton's innermost launcher is handed the second time, in the orders of its versions."""

from types import SimpleNamespace

import pytest

from fa2_lab.kernels import interpreter, relaunch

if not interpreter.installed():
    pytest.skip("needs Triton", allow_module_level=True)


class HookChain:
    """What a profiler adds its functions to."""

    def __init__(self):
        self.calls = []


HOOKS = HookChain()
BASE = ("function", False, False, "warps", None, HOOKS, None)  # as much as the driver wants before the arguments


class PyCUtensorMap:
    """What the copy engine is told of a tensor."""

    def __init__(self, address):
        self.address = address

    def __eq__(self, other):
        return self.address == other.address


class Tensor:
    def __init__(self, address):
        self.address = address

    def data_ptr(self):
        return self.address


class Descriptor:
    block_shape, shape, strides = [1, 64], [5, 6], [6, 1]

    def __init__(self, address):
        self.base = Tensor(address)


class Run:
    """CudaLauncher in small: takes descriptors apart, and calls a launcher that it keeps in a closure, or as it is."""

    def __init__(self, launcher, described: bool, listed: bool):
        def inner(*arguments):
            *base, own = arguments if listed else (*arguments[:11], arguments[11:])
            own = [y for x in own for y in self.taken_apart(x)]
            return launcher(*base, *([own] if listed else own))

        self.launch, self.listed = inner if described else launcher, listed

    @staticmethod
    def taken_apart(x):
        return [PyCUtensorMap(x.base.data_ptr()), *x.shape, *x.strides] if isinstance(x, Descriptor) else [x]

    def __call__(self, x, y, z, stream, *arguments):
        self.launch(x, y, z, stream, *BASE, *([arguments] if self.listed else arguments))


class Compiled:
    """CompiledKernel in small."""

    def __init__(self, launcher, names, described, listed, scratch=0):
        self._run = Run(launcher, described, listed)
        self.src = SimpleNamespace(fn=SimpleNamespace(arg_names=names))
        self.metadata = SimpleNamespace(global_scratch_size=scratch, profile_scratch_size=0, tensordesc_meta=[{}])

    @property
    def run(self):
        return self._run

    def __getitem__(self, grid):
        return lambda *arguments, stream: self.run(*grid, stream, *arguments)


class Launcher:
    """The innermost: keeps what it is handed."""

    def __init__(self):
        self.seen = []

    def __call__(self, *everything):
        self.seen.append(everything)


GROUPS = dict(pointers=(Tensor(16), None, Tensor(32)), numbers=((3, 4), 5), floats=(0.5,), constants=(True,))


@pytest.mark.parametrize("listed", (False, True))
@pytest.mark.parametrize("described", (0, 2))
def test_new_addresses_streams_and_floats_go_where_the_old_ones_were(described, listed, monkeypatch):
    monkeypatch.setattr(relaunch, "encoder", lambda *_: PyCUtensorMap)
    launcher, names = Launcher(), [*"abcdefghi"]
    descriptors = [Descriptor(64 * n) for n in range(described)]
    made = Compiled(launcher, names, bool(described), listed)
    made.metadata.tensordesc_meta *= described
    again = relaunch.relaunch(made, (7, 1, 1), 11, descriptors, **GROUPS)
    assert not launcher.seen
    again(12, [*(256 * n for n in range(described)), 160, 0, 320], (0.25,))
    HOOKS.calls.append("a profiler")
    again(12, [*(256 * n for n in range(described)), 160, 0, 320], (0.25,))
    HOOKS.calls.clear()
    got, hooked = launcher.seen
    maps = [y for n in range(described) for y in (PyCUtensorMap(256 * n), 5, 6, 6, 1)]
    own = [*maps, 160, 0, 320, (3, 4), 5, 0.25, True]
    own += [None] * (len(names) - 7 - described)
    assert list(got[:11]) == [7, 1, 1, 12, *BASE[:5], None, None]
    assert hooked[:11] == (7, 1, 1, 12, *BASE) and got[11:] == hooked[11:]
    assert (list(got[11]) if listed else list(got[11:])) == own
    assert not any(isinstance(x, Tensor | Descriptor) for x in again.all), "a tensor is kept alive"


def test_a_kernel_with_scratch_memory_is_left_to_triton():
    made = Compiled(Launcher(), [], False, False, scratch=64)
    assert relaunch.relaunch(made, (1, 1, 1), 0, **GROUPS) is None


def test_another_triton_inside_is_no_harm():
    made = Compiled(Launcher(), [], False, False)
    made.run.launch = None
    made._run = SimpleNamespace()
    assert relaunch.relaunch(made, (1, 1, 1), 0, **GROUPS) is None
