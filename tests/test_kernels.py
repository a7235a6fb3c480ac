"""How the kernels are launched: block sizes, what tuning keeps, and the search itself with a clock that is made up."""

import json
import math
import re

import pytest
import torch
from kernel_truth import DEVICE, GPU, tensors

from fa2_lab.kernels import known, launch
from fa2_lab.kernels.portable import backward, forward
from fa2_lab.machine import budget
from fa2_lab.studio import offline

FAMILIES = dict(hopper=227, ampere=99, blackwell=99, cdna=64, fp32=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_entry_fits_by_the_model(family):
    table = getattr(launch, family.upper())
    for kernel, entries in table.items():
        assert set(entries) == {16, 32, 64, 128, 256}
        shared_of, _ = budget.KERNELS[kernel]
        for d, entry in entries.items():
            for B_r, B_c, warps, stages, *_ in entry if isinstance(entry[0], tuple) else (entry,):
                assert warps in (4, 8)
                if family not in ("fp32", "cdna"):  # there operands stay in registers
                    held = stages if family in ("hopper", "blackwell") else max(1, stages - 1)
                    assert shared_of(B_r, B_c, d, held) <= FAMILIES[family] * 1024 * 1.2, (kernel, d)


@pytest.mark.parametrize("backend, arch, table", [
    ("cuda", 80, "AMPERE"), ("cuda", 89, "AMPERE"), ("cuda", 90, "HOPPER"), ("cuda", 100, "BLACKWELL"),
    ("cuda", 120, "BLACKWELL"), ("hip", "gfx942", "CDNA"),
])  # fmt: skip
def test_each_chip_has_its_family(backend, arch, table, monkeypatch):
    class Driver:
        active = offline.Absent(type("target", (), dict(backend=backend, arch=arch)))

    monkeypatch.setattr(launch, "driver", Driver)
    launch.family.cache_clear()
    assert launch.family() is getattr(launch, table)
    launch.family.cache_clear()


@pytest.mark.parametrize("d, pad", [(1, 16), (16, 16), (17, 32), (96, 128), (128, 128), (129, 256), (256, 256)])
def test_d_is_padded_to_a_power_of_two(d, pad):
    assert launch.padded(d) == pad


def test_finds_come_first_and_stay(tmp_path, monkeypatch):
    file = tmp_path / "deep" / "tuned.json"
    monkeypatch.setenv("FA2_LAB_TUNED", str(file))
    monkeypatch.setattr(launch.interpreter, "switched_on", lambda: False)
    Q = torch.empty(1, 1, 8, 48, dtype=torch.float16, device=DEVICE)
    entries = launch.HOPPER
    monkeypatch.setattr(launch, "family", lambda: entries)
    before = launch.blocks("forward", Q, True)
    assert (before.B_r, before.B_c, before.registers, before.d_pad) == (64, 64, 128, 64)
    launch.keep({launch.name("forward", Q, True): [16, 32, 2, 1, None]})
    known.remember("a kind of call", "what serves it")
    launch.keep({"another": [1, 2, 3, 4, 5]})
    assert not known.KNOWN
    after = launch.blocks("forward", Q, True)
    assert (after.B_r, after.B_c, after.warps, after.stages, after.registers) == (16, 32, 2, 1, None)
    assert launch.blocks("forward", Q, False) != after
    assert set(json.loads(file.read_text())) == {launch.name("forward", Q, True), "another"}
    launch.finds.cache_clear()


def test_default_file_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("FA2_LAB_TUNED", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert launch.TUNED_FILE() == tmp_path / "fa2_lab" / "tuned.json"


def test_plans_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(launch, "MOST_PLANS", 4)
    monkeypatch.setattr(launch, "PLANS", {})
    for N in range(1, 9):
        q, k, v, _ = (x.detach() for x in tensors(1, 1, 1, N, 3, 16))
        forward.forward(q, k, v, None, None, False, 1.0, 0.0)
        assert len(launch.PLANS) <= 4


@pytest.mark.skipif(GPU, reason="stands in for a GPU")
def test_a_plan_serves_again_only_where_triton_would_not_compile_anew(monkeypatch):
    """The compiled kernel is reached directly; Triton is asked where pointers, dtypes, strides or masks differ."""
    asked, again = [], []

    class Made:
        """A compiled kernel."""

    class Kernel:
        def __getitem__(self, grid):
            def call(*arguments, **options):
                asked.append(arguments)
                return Made()

            return call

    def relaunch(made, grid, stream, described, pointers, numbers, floats, constants):
        def call(stream, at, floats):
            again.append((stream, *at, *numbers, *floats, *constants))

        return call

    monkeypatch.setattr(launch.triton.compiler, "CompiledKernel", Made)
    monkeypatch.setattr(launch, "relaunch", relaunch)
    monkeypatch.setattr(launch, "current_stream", lambda X: 7)
    monkeypatch.setattr(forward, "forward_kernel", Kernel())
    monkeypatch.setattr(launch, "PLANS", {})
    store = torch.zeros(3, 4096)
    q, k, v = (x[: 8 * 16].view(1, 1, 8, 16) for x in store)

    def counts(*arguments):
        asked.clear(), again.clear()
        forward.forward(*arguments)
        return len(asked), len(again)

    plain = None, None, False, 1.0, 0.0
    assert counts(q, k, v, *plain) == (1, 0)
    first = asked[0]
    assert counts(q, k, v, *plain) == (0, 1)
    assert again[0][:4] == (7, q.data_ptr(), k.data_ptr(), v.data_ptr()) and again[0][6:8] == (0, 0)
    assert again[0][8:] == first[7:]
    assert counts(store[0, 1:129].view(1, 1, 8, 16), k, v, *plain) == (1, 0)  # not a multiple of 16 bytes
    assert counts(q, k, v, None, None, True, 1.0, 0.0) == (1, 0)
    assert counts(q, k, v, torch.tensor([3]), *plain[1:]) == (1, 0)
    assert counts(q, k, v, torch.tensor([3], dtype=torch.int32), *plain[1:]) == (1, 0)
    wide = store[0, : 8 * 32].view(1, 1, 8, 32)[..., :16]
    assert counts(wide, k, v, *plain) == (1, 0)
    for _ in range(2):  # with dropout, every time
        assert counts(q, k, v, None, torch.tensor([1]), False, 1.0, 0.5) == (1, 0)
    assert counts(q, k, v, None, None, False, 0.25, 0.0) == (0, 1)  # the scale is no reason to compile


@pytest.mark.parametrize("odd", ("O", "dO", "L", "dL", None))
def test_every_pointer_is_looked_at_before_a_kernel_serves_again(odd, monkeypatch):
    asked, again = [], []
    made = type("Made", (), {})()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: asked.append(arguments) or made

    monkeypatch.setattr(launch.triton.compiler, "CompiledKernel", type(made))
    monkeypatch.setattr(launch, "relaunch", lambda *_: lambda *arguments: again.append(arguments))
    monkeypatch.setattr(launch, "current_stream", lambda X: 0)
    monkeypatch.setattr(backward, "D_kernel", Kernel())
    monkeypatch.setattr(launch, "PLANS", {})
    shapes = dict(O=(1, 2, 8, 16), dO=(1, 2, 8, 16), L=(1, 2, 8), dL=(1, 2, 8))
    store = {name: torch.zeros(512) for name in shapes}

    def tensors(odd):
        starts = {name: int(name == odd) for name in shapes}
        return [store[n][starts[n] :][: math.prod(shapes[n])].view(shapes[n]) for n in shapes]

    for name in (None, odd):
        O, dO, L, dL = tensors(name)
        backward.row_products(dO, dL, O, O[:, :1], O, L, False)
    assert (len(asked), len(again)) == ((1, 1) if odd is None else (2, 0))


def test_kernels_are_short_and_without_block_pointers():
    lines = 0
    for room in (forward, backward):
        source = open(room.__file__, encoding="utf-8").read()
        lines += len(source.splitlines())
        assert "make_block_ptr" not in source and not re.search(r"\d - STAGE", source)
    assert lines <= 450


def test_the_search_keeps_the_fastest_right_one(monkeypatch, tmp_path, capsys):
    from fa2_lab.studio.bench import tune

    monkeypatch.setenv("FA2_LAB_TUNED", str(tmp_path / "tuned.json"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype: real(1, 1, 40, shape[-1], dtype=dtype).to(DEVICE))
    made = [
        launch.Blocks(16, 16, 4, 1, d_pad=16),
        launch.Blocks(32, 16, 4, 1, d_pad=16),
        launch.Blocks(7, 7, 4, 1, d_pad=16),
    ]
    monkeypatch.setattr(tune, "candidates", lambda kernel, before: [before, *made])

    def measure(calls, repeats):
        assert made[2] not in calls  # 7 is no tile size: it failed before anything was timed
        for call in calls.values():
            call()
        return {blocks: tune.Timing(blocks.B_r + blocks.B_c, 0, 0) for blocks in calls}

    monkeypatch.setattr(tune, "measure", measure)
    assert tune.main(["--d", "16", "--dtype", "float32"]) == 0
    told = capsys.readouterr().out
    kept = json.loads((tmp_path / "tuned.json").read_text())
    assert len(kept) == 6 and all(find == [16, 16, 4, 1, None] for find in kept.values())
    assert told.count("16×16") == 6 and str(tmp_path) in told
    launch.finds.cache_clear()


def test_tune_needs_a_gpu_and_sense(monkeypatch):
    from fa2_lab.studio.bench import tune

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="tune"):
        tune.main(["--d", "300"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU"):
        tune.main([])
