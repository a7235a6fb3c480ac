"""Hopper's forward without a GPU: compiled code, the calls that it accepts, and the sizes that are chosen."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from case_selection import compiled_by
from compile_worker import kinds_of

pytest.importorskip("triton")

from fa2_lab.kernels import dispatch
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.hopper.backward import kernel as backward
from fa2_lab.kernels.hopper.backward import launch as backward_launch
from fa2_lab.kernels.hopper.forward import configs, launch
from fa2_lab.kernels.hopper.forward import kernel as forward
from fa2_lab.kernels.hopper.shared.descriptors import copyable, descriptor
from fa2_lab.kernels.tables import USE_LOW_REG
from fa2_lab.plots import pipelines

# Compiling without a GPU --------------------------------------------------------------------------------------


@compiled_by("forward")
def test_hopper_forward_compiles_without_spills(worker_rows, jobs):
    assert len(worker_rows) > (50 if jobs == "all" else 10)
    assert len({(row["causal"], row["keys"], row["N"]) for row in worker_rows}) == 8, "a kind of call is left out"
    for row in worker_rows:
        assert row["ldl"] + row["stl"] + row["stack"] == 0, row
        assert row["shared"] <= 227 * 1024, row
        assert row["hgmma"] > 0 and row["hmma"] == 0 and not row["waits"], row
        assert not row["stores_without_wait"] and not row["idle_barriers"] and not row["races"], row
        assert row["copies_before_next_tile"] == 1 + row["consumers"] + 2, "drawn earlier, blocks are as good as dealt"


# What they take -----------------------------------------------------------------------------------------------


def contiguous_strides(*shape):
    return torch.empty(shape, device="meta").stride()


def test_tma_accepts_only_aligned_strides():
    assert copyable((2, 4, 100, 64), contiguous_strides(2, 4, 100, 64))
    assert copyable((2, 4, 100, 64), torch.empty(2, 100, 4, 64, device="meta").transpose(1, 2).stride())
    assert copyable((1, 4, 100, 64), (3, 6400, 64, 1)), "a dimension of 1 has no step"
    assert copyable((2, 4, 100, 64), (0, 6400, 64, 1)), "one batch entry, expanded"
    assert not copyable((2, 4, 100, 64), (25600, 6400, 1, 100)), "last dimension not contiguous"
    assert not copyable((2, 4, 100, 64), (27200, 6800, 68, 1)), "rows not in steps of 16 bytes"
    assert not copyable((2, 4, 0, 64), contiguous_strides(2, 4, 0, 64)), "nothing to copy"
    odd = torch.empty_strided((1, 4, 100, 64), (3, 6400, 64, 1), dtype=torch.float16, device="meta")
    assert descriptor(odd, 64, 64).strides == [64, 6400, 64, 1], "its step would be no whole 16 bytes"


ACCEPTED = [{}, dict(d=96), dict(d=256), dict(d=32), dict(d=72), dict(d=80)]
ACCEPTED += [dict(lengths_strides=(1,)), dict(K_strides=(0, 0, 64, 1))]
REFUSED = [dict(d=24), dict(d=68), dict(dtype=torch.float32), dict(V_dtype=torch.bfloat16)]
REFUSED += [dict(N_v=69), dict(Q_strides=(6400, 3200, 1, 50)), dict(lengths_strides=(2,))]


@pytest.mark.parametrize("change, accepted", [*((x, True) for x in ACCEPTED), *((x, False) for x in REFUSED)], ids=str)
def test_hopper_forward_accepts_or_refuses_each_kind_of_tensor(change, accepted):
    d, dtype = change.get("d", 64), change.get("dtype", torch.float16)

    def tensor(name, *shape, dtype=dtype):
        strides = change.get(f"{name}_strides", contiguous_strides(*shape))
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    Q, K = tensor("Q", 2, 2, 50, d), tensor("K", 2, 1, 70, d)
    V = tensor("V", 2, 1, change.get("N_v", 70), d, dtype=change.get("V_dtype", dtype))
    lengths = tensor("lengths", 2, dtype=torch.int32) if "lengths_strides" in change else None
    assert (launch.prepare(Tensors(Q, K, V, lengths), Options(True, 0.1)) is not None) is accepted


@pytest.mark.parametrize("odd", ("Q", "K", "V", None))
def test_hopper_forward_checks_the_alignment_of_every_tensor(odd, monkeypatch):
    monkeypatch.setattr(launch, "prepare_launch", lambda *_: lambda *_: None)
    monkeypatch.setattr(launch.host, "scheduler_counter", lambda X, in_custom_op: None)
    tensors = [torch.empty(5000, dtype=torch.float16)[8 - 4 * (name == odd) :][:4096] for name in "QKV"]
    tensors = Tensors(*(x.view(1, 2, 32, 64) for x in tensors))
    found = launch.prepare(tensors, Options(True, 0.1))(tensors)
    assert (found is None) is (odd is not None)


OPTIONS_OF = dict(dropout=dict(dropout_p=0.1), left=dict(left=3), right=dict(right=3), softcap=dict(softcap=2.0))
OPTIONS_OF |= dict(portable=dict(exclude_hopper=True))


# The tensors and options with which each function answers True. `exclude_hopper` does not concern decode. The others of
# the last line never come alone: dropout_p comes with a seed, cu_seqlens_k with cu_seqlens_q, and a call with a block
# table, or one of the reference, is not asked about.
SUPPORTED = {"q", "k", "v", "key_lengths", "causal", "scale", "left", "right", "dominant_sequence", "in_custom_op"}
SUPPORTED |= {"num_splits", "dropout_p", "cu_seqlens_k", "block_table", "reference"}
SUPPORTED_BY = dict(hopper_supports=SUPPORTED | {"cu_seqlens_q"})
SUPPORTED_BY |= dict(decode_supports=SUPPORTED | {"sinks", "softcap", "exclude_hopper"})


@pytest.mark.parametrize("supports", SUPPORTED_BY)
@pytest.mark.parametrize("name", Tensors._fields + Options._fields)
def test_the_other_kernels_support_or_refuse_each_tensor_and_option(name, supports):
    """If a new field fails here, some kernels would ignore it. Name it in needs_portable(), or compute with it."""
    q = torch.empty(1, 1, 80, 64)
    tensors, options = Tensors(q, q, q), Options(False, 0.5)
    if name in Tensors._fields:
        tensors = tensors._replace(**{name: q})
    else:
        options = options._replace(**{name: 1})
    assert getattr(dispatch, supports)(tensors, options) is (name in SUPPORTED_BY[supports])


def test_dispatch_asks_before_it_chooses_decode(monkeypatch):
    """A call that decode does not support goes to the portable kernels, even if decode would be the fastest."""
    monkeypatch.setattr(dispatch.decode, "is_fastest", lambda *_: True)
    for name in ("decode", "portable"):
        monkeypatch.setattr(getattr(dispatch, name), "prepare", lambda *_, name=name: lambda tensors: name)
    q = torch.empty(1, 1, 80, 64)
    asked = Tensors(q, q, q), Tensors(q, q, q, seed=q), Tensors(q, q, q, cu_seqlens_q=q)
    assert [dispatch.forward(tensors, Options(False, 0.5)) for tensors in asked] == ["decode", "portable", "portable"]


@pytest.mark.parametrize("packed", (False, True), ids=("", "packed"))
@pytest.mark.parametrize("direction", ("forward", "backward"))
@pytest.mark.parametrize("on_hopper, prepares, aligned, is_large, case, chosen", [
    *[(True, True, True, True, case, "hopper") for case in ("plain", "left", "right", "same bits")],
    *[(True, True, True, True, case, "portable") for case in ("dropout", "softcap", "sinks", "portable")],
    (True, True, True, False, "plain", "portable"),
    (True, True, False, True, "plain", "portable"),
    (True, False, True, True, "plain", "portable"),
    (False, True, True, True, "plain", "portable"),
])  # fmt: skip
def test_dispatch_chooses_the_expected_kernels(
    on_hopper, prepares, aligned, is_large, case, chosen, direction, packed, monkeypatch
):
    """The kernels that are chosen are prepared for what is asked, and the record comes to them whole."""
    dO, q, k, v, O = (torch.empty((80, 1, 64) if packed else (1, 1, 80, 64)) for _ in range(5))
    L, dL = torch.empty(1, 80), torch.empty(1, 80)
    lengths, cu_seqlens = torch.ones(1), (None, None)
    if packed:
        lengths, cu_seqlens = None, [torch.tensor([0, n, 80]) for n in (30, 50)]
    seed, sinks = (torch.ones(1) if case == name else None for name in ("dropout", "sinks"))
    options = Options(case != "right", 0.5)._replace(**OPTIONS_OF.get(case, {}))
    record = Tensors(q, k, v, lengths, seed, sinks, *cu_seqlens)
    beside = () if direction == "forward" else (dO, O)

    def module_of(name):
        def prepare(*given):
            more = (case == "same bits",) if name == "hopper" and beside else ()
            assert all(a is b for a, b in zip(given, (*beside, record, options, *more), strict=True))
            accepts = name == "portable" or prepares
            return (lambda *given: (name, given) if name == "portable" or aligned else None) if accepts else None

        return SimpleNamespace(prepare=prepare, is_fastest=lambda q, k: is_large)

    monkeypatch.setattr(dispatch, "hopper_module", lambda direction, device: module_of("hopper") if on_hopper else None)
    for name in ("portable", "portable_backward"):
        monkeypatch.setattr(dispatch, name, module_of("portable"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: case == "same bits")
    given = () if direction == "forward" else (dO, dL, O, L)
    name, found = getattr(dispatch, direction)(*given, record, options)
    assert name == chosen and all(a is b for a, b in zip(found, (*given, record), strict=True))


def test_hopper_kernels_serve_large_calls_only():
    large, tiny = torch.empty(4, 16, 4096, 64, device="meta"), torch.empty(1, 1, 64, 64, device="meta")
    for module in (launch, backward_launch):
        assert module.is_fastest(large, large) and not module.is_fastest(tiny, tiny)


def test_hopper_sizes_fit_registers_and_shared_memory():
    """Registers and shared memory as the chip has them, counted from the configs."""
    assert set(configs.CAUSAL_CASES) == {*configs.DEFAULT, 192}
    assert set(configs.UNMASKED_TIMES) == {*configs.DEFAULT, 32} == set(map(configs.tma_d_pad, configs.DIMENSIONS))
    long_rows = [size for size, causal, _ in kinds_of(64) if causal and size.ping_pong and size.stages == 4]
    assert all(size.low_reg_schedule is USE_LOW_REG for size in long_rows)
    for size in {size for d in configs.UNMASKED_TIMES for size, *_ in kinds_of(d)}:
        assert 128 * (size.registers * size.consumers + 32) <= 65536
        assert sum(size.shared.values()) < 227 * 1024 - 1024


def test_hopper_size_model_equals_the_allocated_buffers():
    """What new_pipeline and allocate_shared_memory are given, for every set of sizes."""
    for size in {size for d in configs.UNMASKED_TIMES for size, *_ in kinds_of(d)}:
        known = dict(CONSUMERS=size.consumers, CONFIG=size)
        rows_of = {ring: n * (64 if ring == "Q" else size.B_c) for ring, (n, _) in pipelines_of(forward, known).items()}
        rows_of |= dict(O=64 * size.consumers) if size.separate_O_buffer else {}
        assert size.shared == {tensor: 2 * rows * size.d_pad for tensor, rows in rows_of.items()}


def pipelines_of(kernel, known):
    """Return {ring: (stages, number of releases that empty a stage)} for a kernel's calls of new_pipeline."""
    calls = [node for node in ast.walk(ast.parse(Path(kernel.__file__).read_text())) if isinstance(node, ast.Call)]
    rings = {}
    for call in calls:
        if ast.unparse(call.func) == "new_pipeline":
            ring, stages, releases = (ast.unparse(x) for x in call.args)
            rings[ring] = eval(stages, known), 0 if call.keywords else eval(releases, known)
    return rings


@pytest.mark.parametrize("direction, kernel, rings", [("forward", forward, "QKV"), ("backward", backward, "KV")])
def test_pipeline_figure_shows_the_kernels_stages(direction, kernel, rings):
    """Stages, and how many releases empty one: what new_pipeline is given in the set that the picture names."""
    found = pipelines_of(kernel, dict(CONSUMERS=2, CONFIG=configs.TWO_CONSUMERS))
    drawn = pipelines.data(direction)["rings"]
    assert found == {ring: drawn[ring] for ring in rings}
    assert {drawn[ring] for ring in drawn.keys() - found.keys()} == {(2, 2)}  # mailbox and rows: by n & 1, by consumers
