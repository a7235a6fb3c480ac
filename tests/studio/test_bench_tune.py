"""The search for sizes and the hardware's counters without a GPU: what is tried, what is right, what ncu is asked."""

import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")
pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from fa2_lab.kernels import launch  # noqa: E402
from fa2_lab.machine import budget  # noqa: E402
from fa2_studio.bench import counters, peers, power, problem, protocol, results, tune  # noqa: E402
from fa2_studio.bench.problem import Problem  # noqa: E402

BEFORE = launch.Blocks(16, 16, 4, 1, registers=128, d_pad=64)

# Tuning -------------------------------------------------------------------------------------------------------


def room(monkeypatch, size):
    """A GPU whose programs may have so many bytes of shared memory."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(shared_memory_per_block_optin=size)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize("size, stages", [(10**6, {1, 2, 3}), (24 * 1024, {1, 2}), (0, set())])
def test_what_fits_is_tried_after_the_choice_so_far(size, stages, monkeypatch):
    """The forward of d = 64 in 16 bits: Q once, K and V in each stage; the budget's own registers."""
    room(monkeypatch, size)
    first, *others = tune.candidates("forward", BEFORE)
    assert first == BEFORE and len(set(others)) == len(others)
    found = {(b.B_r, b.B_c, b.warps, b.stages) for b in others}
    sizes = [(r, c, w, s) for r in (32, 64, 128) for c in (32, 64, 128) for w in (4, 8) for s in (1, 2, 3)]
    fits = {(r, c, w, s) for r, c, w, s in sizes if 2 * 64 * (r + 2 * s * c) <= size}
    assert found == {(r, c, w, s) for r, c, w, s in fits if budget.forward_registers(r, c, 64, w, 2) <= 300}
    assert {s for *_, s in found} == stages and all((b.registers, b.d_pad) == (None, 64) for b in others)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel, wanted", [("forward", [0]), ("rows", [1]), ("columns", [2, 3])])
def test_a_search_runs_the_kernel_that_it_names(kernel, wanted, causal):
    """One kernel with sizes of its own gives O, or dQ, or dK and dV."""
    where = Problem(1, 2, 2, 40, 40, 16, causal, "float32")
    tensors = where.tensors(grad=True, device="cuda" if torch.cuda.is_available() else "cpu")
    O = peers.PEERS["torch"](where)(*tensors[:3])
    truth = [O.detach(), *torch.autograd.grad(O, tensors[:3], tensors[3])]
    make = tune.caller(kernel, [x.detach() for x in tensors], causal)
    blocks = launch.blocks(kernel, tensors[0], causal)
    found = make(blocks)()
    assert len(found) == len(wanted)
    assert max(problem.distance(x, truth[n]) for x, n in zip(found, wanted, strict=True)) < 1e-2
    assert tune.works(make(blocks), found)


@pytest.mark.parametrize(
    "kernel, prepare", [("forward", "prepare"), ("rows", "prepare_rows"), ("columns", "prepare_columns")]
)
def test_a_candidate_s_own_sizes_are_run(kernel, prepare, monkeypatch):
    from fa2_lab.kernels.portable import backward, forward

    room = forward if kernel == "forward" else backward
    usual, seen = getattr(room, prepare), []

    def watching(*given, **named):
        seen.extend(x for x in (*given, *named.values()) if isinstance(x, launch.Blocks))
        return usual(*given, **named)

    monkeypatch.setattr(room, prepare, watching)
    tensors = Problem(1, 2, 2, 40, 40, 16, True, "float32").tensors(
        device="cuda" if torch.cuda.is_available() else "cpu"
    )
    blocks = launch.blocks(kernel, tensors[0], True)
    make = tune.caller(kernel, [*tensors, tensors[0]], True)
    seen.clear()
    make(blocks)
    assert seen == [blocks]


def test_the_fastest_right_candidate_is_found(monkeypatch):
    asked = {}
    names = ["so far", "fast", "wrong", "fails", "fastest", "does not run"]
    answers = dict.fromkeys(names, torch.ones(4)) | {"wrong": 1.03 * torch.ones(4)}

    def make(blocks):
        return lambda: (answers[blocks],) if blocks != "fails" else [][0]

    def measure(calls, repeats):
        asked.update(calls=list(calls), repeats=repeats)
        times = {"so far": 3.0, "fast": 2.0, "fastest": 1.0}
        return {name: protocol.Timing(times[name], 0, 9) if name in times else "out of memory" for name in calls}

    monkeypatch.setattr(launch, "blocks", lambda kernel, Q, causal: asked.update(at=(kernel, Q, causal)) or "so far")
    monkeypatch.setattr(tune, "caller", lambda kernel, tensors, causal: asked.update(of=(kernel, causal)) or make)
    monkeypatch.setattr(
        tune, "candidates", lambda kernel, before: names if (kernel, before) == ("rows", "so far") else []
    )
    monkeypatch.setattr(tune, "measure", measure)
    before, best, timings = tune.search("rows", ["Q"], True)
    assert (before, best, timings) == ("so far", "fastest", {"so far": 3.0, "fast": 2.0, "fastest": 1.0})
    assert asked == dict(
        at=("rows", "Q", True), of=("rows", True), calls=["so far", "fast", "fastest", "does not run"], repeats=7
    )


def test_a_candidate_may_differ_by_a_fiftieth_and_must_give_all():
    truth = (torch.ones(8), torch.ones(8))
    assert tune.works(lambda: (1.019 * truth[0], truth[1]), truth)
    assert not tune.works(lambda: (truth[0], 1.021 * truth[1]), truth)
    assert not tune.works(lambda: truth[:1], truth)
    assert not tune.works(lambda: (truth[0], torch.nan * truth[1]), truth)


@pytest.mark.parametrize("words", [["--d", "0"], ["--d", "64", "257"], ["--n", "0"]], ids=" ".join)
def test_sizes_that_no_kernel_takes_are_refused(words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"^tune: --d takes 1 to 256, --n at least 1$"):
        tune.main(words)
    monkeypatch.setattr(tune, "tune", lambda *given: given)
    assert tune.main(["--d", "1", "256", "--n", "1"]) == ([1, 256], 1, torch.bfloat16, list(tune.KERNELS))


@pytest.mark.parametrize("N, batch", [(1000, 16), (4096, 4), (30000, 1)])
def test_a_search_is_on_16_384_tokens_of_hidden_size_2_048(N, batch, monkeypatch, tmp_path):
    searched, usual = [], torch.randn

    def search(kernel, tensors, causal):
        searched.append((kernel, causal, {tuple(x.shape) for x in tensors}, len(tensors)))
        return BEFORE, BEFORE, {BEFORE: 1.0}

    def randn(*shape, device, dtype):
        assert device == "cuda" and dtype == torch.float16
        return usual(1, dtype=dtype).expand(shape)

    monkeypatch.setenv("FA2_LAB_TUNED", str(tmp_path / "tuned.json"))
    monkeypatch.setattr(torch, "randn", randn)
    monkeypatch.setattr(tune, "search", search)
    assert tune.tune([64, 256], N, torch.float16, ("forward", "rows")) == 0
    ways = [(d, causal, kernel) for d in (64, 256) for causal in (False, True) for kernel in ("forward", "rows")]
    assert searched == [(kernel, causal, {(batch, 2048 // d, N, d)}, 4) for d, causal, kernel in ways]


# Counters -----------------------------------------------------------------------------------------------------

WHERE = Problem(2, 3, 3, 64, 64, 16, True)


def watched(monkeypatch, **more):
    """What is asked of ncu, which tells of two calls with one kernel each."""
    asked = {}
    metric = counters.SUMS["L2 bytes"]
    lines = [f'"ID","Kernel Name","{metric}"', '"","","Kbyte"', '"0","spin_kernel","9"', '"1","a","5"']
    told = "\n".join([*lines, '"2","spin_kernel","9"', '"3","b","7"'])

    def run(command, **how):
        asked.update(how, command=command)
        return SimpleNamespace(**dict(returncode=0, stdout=told, stderr="") | more)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_ncu_watches_a_process_that_calls_those_contestants(monkeypatch):
    asked = watched(monkeypatch)
    found = counters.read("some.room", WHERE, ["first", "second"])
    assert found == {"first": {"L2 bytes": 5e3}, "second": {"L2 bytes": 7e3}}
    command = asked["command"]
    at = command.index(sys.executable)
    assert command[0] == "ncu" and command[at + 1 : at + 3] == ["-m", counters.__name__]
    assert command[at + 3 :] == ["some.room", "2", "3", "64", "16", "1", "first", "second"]
    options = dict(pairwise(command))
    assert options["--clock-control"] == "none" and options["--profile-from-start"] == "off"
    assert options["--page"] == "raw" and "--csv" in options
    assert options["--metrics"].split(",") == list(counters.METRICS.values())
    assert asked["capture_output"] is asked["text"] is True and asked["timeout"] == 300


def test_ncu_that_fails_or_takes_too_long_says_so(monkeypatch):
    watched(monkeypatch, returncode=1, stdout="==PROF==\n", stderr="ERR_NVGPUCTRPERM: ask an administrator\n")
    with pytest.raises(RuntimeError, match=r"^ncu: ERR_NVGPUCTRPERM: ask an administrator$"):
        counters.read("some.room", WHERE, ["first"])

    def slow(command, timeout, **how):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    with pytest.raises(RuntimeError, match=r"^ncu took longer than 5 s$"):
        counters.read("some.room", WHERE, ["first"], timeout=5)


def test_the_watched_process_marks_each_second_call(monkeypatch):
    log, asked = [], []

    def fails():
        log.append("fails")
        raise RuntimeError

    def everybody(problem, tensors):
        asked.append((problem, tensors))
        return [("a", lambda: log.append("a")), ("b", lambda: log.append("b")), ("fails", fails)]

    monkeypatch.setattr(counters, "import_module", lambda name: SimpleNamespace(everybody=everybody, name=name))
    monkeypatch.setattr(Problem, "tensors", lambda self: "q, k, v")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("marker"), raising=False)
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: log.append(name))
    counters.main(["some.room", "2", "3", "64", "16", "1", "b", "fails"])
    assert asked == [(WHERE, "q, k, v")]
    assert log == ["b", "fails", "start", "marker", "b", "marker", "stop"]


def test_nvidia_smi_is_asked_for_clock_and_power_of_this_gpu(monkeypatch):
    properties = SimpleNamespace(uuid="12-34")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    begun = ["nvidia-smi", "-i", "GPU-12-34", "--query-gpu=clocks.sm,power.draw.instant"]
    assert power.smi() == [*begun, "--format=csv,noheader,nounits", "-lms", "100"]


# The machine --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said, driver", [("580.1\n580.1", "580.1"), ("", "unknown")])
def test_a_machine_with_a_gpu_has_its_driver(said, driver, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(results, "_output", lambda command: asked.append(command) or said)
    monkeypatch.setattr(results, "commit", lambda: "abc1234")
    found = results.machine()
    assert (found["gpu"], found["driver"], found["commit"]) == ("NVIDIA H200", driver, "abc1234")
    assert asked == [["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]]
    assert found["python"] == ".".join(map(str, sys.version_info[:3])) and found["torch"] == torch.__version__
    assert found["cudnn"] == str(torch.backends.cudnn.version())


def test_a_label_tells_the_idea():
    row = results.Measurement(WHERE.as_dict() | dict(rung="page 16", idea="turns"), "decode", {})
    assert results.label(row) == "page 16, turns N 64 b 2 h 3 d 16 causal"
