"""The ladder, hardware counters, the search for sizes and the ring, as far as they go without a GPU."""

from itertools import product
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")
pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from bench_clock import Clocks  # noqa: E402

from fa2_lab import records  # noqa: E402
from fa2_lab.kernels import tables  # noqa: E402
from fa2_lab.kernels.ladder import BACKWARD, RUNGS, VARIANTS, load  # noqa: E402
from fa2_studio import compiled  # noqa: E402
from fa2_studio.bench import counters, experiments, ladder, problem, protocol, ring, tune  # noqa: E402
from fa2_studio.bench.peers import dense  # noqa: E402
from fa2_studio.bench.problem import Problem, default_device  # noqa: E402

DEVICE = default_device()
PROBLEM = Problem(1, 2, 2, 40, 40, 16, causal=True, dtype="float32")


def constant_timings(calls):
    """Return the same timing for every call."""
    return {name: protocol.Timing(1.0, 0.5, 2.0) for name in calls}


# The ladder ---------------------------------------------------------------------------------------------------


def test_wrong_or_failing_rung_is_reported_and_not_timed(monkeypatch):
    def fails():
        raise RuntimeError("no such chip")

    results = dict(right=0.0, wrong=1.0, NaN=float("nan"))
    calls = {name: lambda answer=answer: lambda: answer for name, answer in results.items()} | dict(fails=fails)
    row = ladder.time_checked(PROBLEM, "backward", calls, lambda answer: answer, constant_timings)
    assert row.values == {"right": [1.0, 0.5, 2.0]} and row.flops == PROBLEM.flops("backward")
    assert set(row.failed) == {"wrong", "NaN", "fails"} and "no such chip" in row.failed["fails"]


def test_experiments_run_together_with_their_baseline():
    for names in experiments.problems_to_time().values():
        for name in set(names) & set(experiments.EXPERIMENTS):
            assert experiments.name_of_baseline(name) in names[: names.index(name)], name


def test_experiment_changes_the_launch_only():
    launches = []
    altered = experiments.AlteredKernel(KernelStub(launches), dict(at_once=3, num_stages=2))
    altered[(7,)]("q", 5, 16, num_stages=1, num_warps=4)
    assert launches == [((7,), ("q", 5, 3), dict(num_stages=2, num_warps=4))]
    changed = experiments.forward_of("22 that always raises m")
    assert changed.__globals__["LAG"].value == -1e30 and load("r22").LAG.value == 8.0


class KernelStub:
    """A stand-in for a kernel that keeps the arguments of its launches."""

    arg_names = ("Q", "heads", "at_once")

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *arguments, **named: self.launches.append((grid, arguments, named))


def test_compiled_rungs_record_is_of_the_current_files():
    record = records.read_json("rungs")
    assert record["made_by"]["source"] == compiled.digest_of_rungs(), f"stale: {records.COMPILE} ladder"
    rows = {(row["rung"], row["d"], row["causal"]): row for row in record["rungs"]}
    backward = {(rung, 128, False) for rung in BACKWARD}
    assert rows.keys() == {*product(RUNGS + VARIANTS, (64, 128), (False, True)), *backward}
    spilling = [key for key, row in rows.items() if row["spills"] and key not in backward]
    assert spilling == [("r20_overlap", 64, False)], "its file says so"


def test_compiled_forward_record_lists_all_compiled_configs():
    jobs, record = compiled.jobs_of_size_figure(), records.read_json("compiled")
    assert [{name: row[name] for name in job} for row, job in zip(record["forward"], jobs, strict=True)] == jobs


# Counters -----------------------------------------------------------------------------------------------------

EXP_COUNTER, TENSOR_COUNTER = "exp and other special instructions", "tensor cores at work, %"
NCU_OUTPUT = """==PROF== Connected to process 42
"ID","Kernel Name","dram__bytes_read.sum","smsp__inst_executed_pipe_xu.sum","sm__cycles_elapsed.max","{share}"
"","","Mbyte","inst","cycle","%"
"0","spin_kernel(long)","9","9","9","9"
"1","scores_kernel","1.5","1,200","300","50"
"2","softmax_kernel","2.5","{special}","100","10"
"3","spin_kernel(long)","9","9","9","9"
"4","forward_kernel","3","6","10","90"
"""


def ncu_output(special: str) -> str:
    return NCU_OUTPUT.format(special=special, share=counters.SHARES[TENSOR_COUNTER])


def test_ncu_counters_are_summed_and_shares_weighted_by_cycles():
    standard, fa2 = counters.totals_per_call(ncu_output(special="30"))
    assert standard == {"DRAM bytes read": 4e6, EXP_COUNTER: 1230.0, counters.CYCLES: 400.0, TENSOR_COUNTER: 40.0}
    assert fa2 == {"DRAM bytes read": 3e6, EXP_COUNTER: 6.0, counters.CYCLES: 10.0, TENSOR_COUNTER: 90.0}
    standard, fa2 = counters.totals_per_call(ncu_output(special=""))
    assert EXP_COUNTER not in standard and fa2[EXP_COUNTER] == 6, "a counter that a kernel lacks is left out"


# Tuning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel, wanted", [("forward", [0]), ("dq", [1]), ("dkdv", [2, 3])])
def test_tune_searches_the_named_kernel(kernel, wanted, monkeypatch):
    """One kernel with sizes of its own gives O, or dQ, or dK and dV."""
    tensors = PROBLEM.tensors(grad=True, device=DEVICE)
    O = dense.plain(PROBLEM)(*tensors[:3])
    truth = [O.detach(), *torch.autograd.grad(O, tensors[:3], tensors[3])]
    make = tune.kernel_caller(kernel, [x.detach() for x in tensors], causal=True)
    blocks = tables.choose_config(kernel, tensors[0], causal=True)
    found = make(blocks)()
    assert max(problem.relative_error(x, truth[n]) for x, n in zip(found, wanted, strict=True)) < 1e-2
    assert tune.is_right(make(blocks), found)
    assert not tune.is_right(make(blocks), [1.03 * x for x in found]), "the search takes what computes the same alone"
    chip = SimpleNamespace(shared_memory_per_block_optin=227 * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert len(tune.candidate_configs(kernel, blocks)) > 20


# The ring -----------------------------------------------------------------------------------------------------


@pytest.fixture
def four_gpus(monkeypatch):
    """Make this process rank 2 of 4, and return the list of its calls to the other ranks."""
    made = []
    monkeypatch.setattr(ring.dist, "get_rank", lambda *group: 2)
    monkeypatch.setattr(ring.dist, "get_world_size", lambda *group: 4)
    monkeypatch.setattr(ring.dist, "barrier", lambda *group, **how: made.append("barrier"))
    return made


@pytest.mark.parametrize("part", range(4))
def test_bench_ring_stops_on_a_wrong_result(part, four_gpus, monkeypatch):
    whole = PROBLEM.tensors(grad=True, device="cpu")
    O = dense.plain(PROBLEM)(*whole[:3])
    parts = [O.detach(), *torch.autograd.grad(O, whole[:3], whole[3])]
    monkeypatch.setattr(ring, "unshard", lambda x, group, layout, timeout: x)
    ring.check_results(whole, parts, causal=True, group="a group", layout="zigzag")
    for wrong in (1.5 * parts[part], torch.nan * parts[part]):
        parts[part] = wrong
        with pytest.raises(RuntimeError, match=r"^ring: wrong on 4 GPUs: error (5\.0e-01|nan)$"):
            ring.check_results(whole, parts, causal=True, group="a group", layout="zigzag")


def test_bench_ring_takes_the_slowest_gpu_and_skips_warm_up(four_gpus, monkeypatch):
    """Another GPU takes a tenth of a millisecond longer."""
    usual = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, device: usual(data))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    clocks = Clocks().put_in_place(monkeypatch, torch, protocol.time)
    monkeypatch.setattr(ring.dist, "all_reduce", lambda x, how, group: x.add_(0.1 * (how == ring.dist.ReduceOp.MAX)))
    took = iter([50.0, 1, 2, 3, 4, 5, 6, 7])
    timing = ring.time_slowest_rank(lambda: clocks.work(next(took) / 1e3), "a group")
    assert timing.median == pytest.approx(4.1) and four_gpus == ["barrier"] * 8
