"""The bench without a GPU: how results are kept and shown, what is counted, and a training run in miniature."""

import importlib
import re
import sys
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")

import fa2_lab.attention  # noqa: E402, F401 — before Triton, so that its interpreter is on where there is no GPU
from fa2_lab.bench import ahead, command, counters, problem, protocol, readme, results, smoke, suites, train  # noqa: E402
from fa2_lab.bench.problem import Problem  # noqa: E402
from fa2_lab.bench.results import Results, Row  # noqa: E402

MACHINE = dict(
    gpu="NVIDIA H200", driver="580", python="3.12", torch="2.11", triton="3.6", cudnn="91900", commit="abc1234"
)


def contest(**changes):
    """A row of two contestants, the second twice as fast, and one that failed."""
    where = Problem(4, 16, 16, 4096, 4096, 128, False).as_dict() | changes
    values = {"torch flash": [2.0, 1.9, 2.1], "fa2_lab": [1.0, 0.9, 1.1]}
    return Row(where, "forward", values, {"flash_attn": "not installed"}, flops=4e11)


def suite(*rows, **more):
    return Results("paper", MACHINE, "by hand", {"GEMM TFLOP/s": 790.6}, [*rows], **more)


# Results ------------------------------------------------------------------------------------------------------


def test_results_come_back_as_they_were_saved(tmp_path):
    kept = suite(contest(), contest(causal=True), missing=["(2,)"], curves={"fa2_lab": [5.5, 5.25]})
    path = kept.save(tmp_path / "new")
    assert path.name == "bench_paper.json" and path.read_text(encoding="utf-8").endswith("}\n")
    assert results.load("paper", tmp_path / "new") == kept


def test_a_missing_record_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no bench_long.json: record it with `python -m fa2_lab bench long`"):
        results.load("long", tmp_path)


def test_rates_and_ratios():
    row = contest()
    assert row.rate("fa2_lab") == pytest.approx(400) and row.rate("torch flash") == pytest.approx(200)
    assert row.ratio("fa2_lab", "torch flash") == 2 and row.ratio("torch flash", "fa2_lab") == 0.5


def test_a_label_says_what_differs():
    assert results.label(contest()).split() == "forward N 4096 b 4 h 16 d 128 full".split()
    grouped = contest(kv_heads=2, N_q=1, causal=True, rung="tuned")
    assert results.label(grouped).split() == "tuned N 1×4096 b 4 h 16/2 d 128 causal".split()


def test_the_table_shows_ratios_first_and_every_reason():
    counts = Row(contest().problem | dict(rung="fa1"), "counters", {"L2 bytes": [1.5e9]}, unit="count")
    text = results.table(suite(contest(), counts, missing=["(9,)"]), baseline="torch flash")
    head = "NVIDIA H200, torch 2.11, triton 3.6, abc1234; by hand.\nceilings: GEMM TFLOP/s 791\nspread: the middle half"
    assert text.startswith(f"{head} lies within 10.0% of the median, at worst within 10.0%\n")
    assert re.search(r"^torch flash / contestant \(TFLOP/s\) +torch flash +fa2_lab +flash_attn$", text, re.MULTILINE)
    assert re.search(r"^forward .* full +1\.00 \(200\) +2\.00 \(400\) +-$", text, re.MULTILINE)
    assert re.search(r"^count +L2 bytes\nfa1 .* \(1\.5e\+09\)$", text, re.MULTILINE)
    assert text.endswith("flash_attn: not installed\nnot measured: (9,)")


# README -------------------------------------------------------------------------------------------------------


def both(causal=False, d=128, portable=4.0, **peers):
    """A row where fa2_lab takes 2 ms and the others what is said."""
    row = contest(causal=causal, d=d)
    row.values = {name: [ms] for name, ms in {"fa2_lab": 2.0, "fa2_lab portable": portable, **peers}.items() if ms}
    return row


def test_the_readme_names_the_machine_the_ceilings_and_the_spread():
    said = readme.about(suite(contest()))
    made = "NVIDIA H200, torch 2.11, triton 3.6, cuDNN 91900, driver 580, commit abc1234."
    assert "bf16, 16,384 tokens" in said and f"{made} In the same run: GEMM 791 TFLOP/s." in said
    assert said.endswith("the middle half lies within 10.0% of the median, at worst within 10.0%.")


def test_both_of_us_stand_beside_every_peer():
    rows = [both(cuDNN=3.0), both(causal=True, cuDNN=1.0, portable=None), both(d=64, FlexAttention=5.0)]
    ring = Results("ring", MACHINE, "by hand", rows=[Row(contest().problem, "forward", {"1 GPU": [1.0]})])
    assert readme.standings([suite(*rows), ring]) == [
        "| suite | direction | | over cuDNN | over FlexAttention |",
        "| --- | --- | --- | --- | --- |",
        "| paper | forward | fa2_lab | ahead on 1 of 2, 0.50 to 1.50 | ahead on 1 of 1, 2.50 to 2.50 |",
        "| paper | forward | fa2_lab portable | ahead on 0 of 1, 0.75 to 0.75 | ahead on 1 of 1, 1.25 to 1.25 |",
    ]
    assert readme.grid(suite(*rows))[4:-2] == [
        "| direction | d | mask | N | TFLOP/s | over cuDNN | over FlexAttention |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| forward | 128 | full | 4,096 | 200 / 100 | 1.50 / 0.75 | – |",
        "| forward | 128 | causal | 4,096 | 200 / – | 0.50 / – | – |",
        "| forward | 64 | full | 4,096 | 200 / 100 | – | 2.50 / 1.25 |",
    ]


def test_it_says_plainly_where_we_lead_and_where_not():
    lead, trail = both(cuDNN=3.0), both(d=64, cuDNN=1.0)
    start = "Plainly: on this grid `fa2_lab` is faster than cuDNN on "
    assert readme.plainly([lead, trail], "cuDNN") == (
        f"{start}1 of 1 rows of forward at d = 128, 0 of 1 rows of forward at d = 64."
    )
    trail.problem["d"] = 128
    assert readme.plainly([lead, trail], "cuDNN") == f"{start}1 of 2 rows of forward at d = 128."


def test_forward_and_backward_are_added():
    rows = [both(cuDNN=3.0), both(cuDNN=1.0), both(d=64, cuDNN=1.0)]
    rows[1].direction = "backward"
    *_, added = readme.with_sums(suite(*rows)).rows
    assert added.direction == "both, added" and added.problem == rows[0].problem
    assert added.values == {"fa2_lab": [4.0], "fa2_lab portable": [8.0], "cuDNN": [4.0]}
    assert len(readme.with_sums(suite(*rows)).rows) == 4


def test_it_says_plainly_where_we_are_behind_and_by_how_much():
    rows = [both(cuDNN=3.0), both(cuDNN=1.5), both(causal=True, cuDNN=1.0), both(d=64, FlexAttention=1.0)]
    said = "paper 2 of 3, at worst 0.50 (forward N 4096 b 4 h 16 d 128 causal)"
    assert readme.behind([suite(*rows), suite(both(cuDNN=3.0))], "cuDNN") == f"Behind cuDNN: {said}."
    assert readme.behind([suite(both(cuDNN=3.0))], "cuDNN") == "It is behind cuDNN nowhere."


def test_every_other_suite_is_told_with_its_shapes_and_its_machine():
    heads = Results("heads", MACHINE, "by hand", rows=[both(cuDNN=1.0), both(cuDNN=4.0, portable=None)])
    heads.rows[0].problem["kv_heads"] = 4
    shapes = "bf16, batch 4, heads 16 on 4 to 16, d 128, N 4,096, full, NVIDIA H200, "
    assert readme.told(heads) == f"{shapes}commit abc1234."
    heads.machine = MACHINE | dict(commit="sources 0123456789ab")
    heads.missing = ["the rest"]
    assert readme.told(heads) == f"{shapes}sources 0123456789ab; 1 rows not measured."
    alone = Results("other", MACHINE, "by hand", rows=[both()])
    assert readme.told(alone).endswith(" N 4096 b 4 h 16 d 128 full: fa2_lab 2 ms, fa2_lab portable 4 ms.")


def test_training_and_memory_are_told():
    where = contest().problem | dict(layers=6, steps=200)
    time = Row(where, "time", {"fa2_lab": [0.5], "cuDNN": [0.4]}, unit="µs per token")
    curves = {"fa2_lab": [5.0, 3.0], "cuDNN": [5.0, 3.0025], "torch math": [4.999, 3.0]}
    said = readme.told(Results("train", MACHINE, "by hand", rows=[time], curves=curves))
    assert "6 layers, 200 steps, tokens per second: fa2_lab 2,000,000, cuDNN 2,500,000" in said
    assert "never further apart than 0.0025" in said
    peaks = [Row(where | dict(N_q=N), "both", {"fa2_lab": [N / 64]}, {"math": "out of memory"}) for N in (1024, 4096)]
    said = readme.told(Results("memory", MACHINE, "by hand", rows=peaks))
    assert "at N = 4,096: fa2_lab 64 MiB; 4 times the length takes `fa2_lab` 4.0 times" in said
    assert said.endswith("out of memory on the way: math.")


def test_the_ring_is_told_by_what_more_gpus_gain():
    where = Problem(1, 16, 16, 2048, 2048, 128, True).as_dict()
    times = {"1 GPU": [8.0], "2 GPUs": [5.0], "4 GPUs": [2.5]}
    rows = [Row(where | dict(N_q=N), "forward", times, flops=1e12) for N in (1024, 2048)]
    rows += [Row(where | dict(layout="contiguous"), "forward", times, flops=1e12), Row(where, "peak memory", times)]
    said = readme.told(Results("ring", MACHINE, "by hand", rows=rows))
    assert said.endswith("speed over 1 GPU at N = 2,048: forward 1.60 on 2 GPUs, 3.20 on 4 GPUs.")


def test_the_readme_shows_the_recorded_runs():
    text = readme.README.read_text(encoding="utf-8")
    assert readme.renewed(text, readme.section()) == text, "run `python -m fa2_lab bench --readme`"


def test_one_changed_number_in_a_record_changes_the_readme(tmp_path):
    for file in results.FOLDER.glob("bench_*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert readme.section(tmp_path) == readme.section()
    for name in ("paper", "train", "memory", "small"):
        changed = results.load(name, tmp_path)
        for row in changed.rows:
            row.values["fa2_lab"] = [1.5 * x for x in row.values["fa2_lab"]]
        file, before = changed.save(tmp_path), (results.FOLDER / f"bench_{name}.json").read_bytes()
        assert readme.section(tmp_path) != readme.section(), name
        file.write_bytes(before)


def test_renewing_touches_only_what_stands_between_the_markers():
    text = f"before\n{readme.START}\nold\n{readme.END}\nafter\n"
    once = readme.renewed(text, "new\nlines")
    assert once == f"before\n{readme.START}\nnew\nlines\n{readme.END}\nafter\n"
    assert readme.renewed(once, "new\nlines") == once


def test_the_readme_has_one_place_for_results():
    text = readme.README.read_text(encoding="utf-8")
    assert text.count(readme.START) == text.count(readme.END) == 1


# Counters -----------------------------------------------------------------------------------------------------

NCU = """==PROF== Connected to process 42
==PROF== Disconnected
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_bytes.sum","sm__inst_executed_pipe_tensor.sum"
"","","Mbyte","Kbyte","byte","inst"
"0","spin_kernel(long)","9","9","9","9"
"1","scores_kernel","1.5","250","1,000","12"
"2","softmax_kernel","2.5","750","2,000","{tensor}"
"3","spin_kernel(long)","9","9","9","9"
"4","forward_kernel","3","0","5","6"
"""


def test_the_kernels_of_each_call_are_added_up_in_bytes():
    standard, fa2 = counters.summed(NCU.format(tensor="30"))
    assert standard == {"DRAM bytes read": 4e6, "DRAM bytes written": 1e6, "L2 bytes": 3e3, "tensor instructions": 42.0}
    assert fa2 == {"DRAM bytes read": 3e6, "DRAM bytes written": 0.0, "L2 bytes": 5.0, "tensor instructions": 6.0}


def test_a_counter_that_a_kernel_lacks_is_left_out():
    standard, fa2 = counters.summed(NCU.format(tensor=""))
    assert "tensor instructions" not in standard and fa2["tensor instructions"] == 6


def test_without_ncu_the_reason_is_given(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="ncu is not installed"):
        counters.read(Problem(1, 1, 1, 64, 64, 64, False), ["fa1"])


# Problems, suites, protocol -----------------------------------------------------------------------------------


def test_flops_are_counted_as_the_paper_counts_them():
    full = Problem(2, 3, 1, 5, 7, 11, False)
    assert full.flops("forward") == 4 * 2 * 3 * 5 * 7 * 11
    assert full.flops("backward") == 2.5 * full.flops("forward")
    assert full.flops("both") == full.flops("forward") + full.flops("backward")
    assert Problem(2, 3, 1, 5, 7, 11, True).flops("forward") == full.flops("forward") / 2


def test_the_square_problem_has_the_paper_s_sizes():
    for N in (512, 16384, 32768):
        p = Problem.square(N, 64, True)
        assert p.heads * p.d == 2048 and p.batch * N == max(16384, N) and p.heads == p.kv_heads


@pytest.mark.parametrize("causal", [False, True])
def test_a_right_answer_passes_and_a_wrong_one_does_not(causal):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 100, 16, generator=draw) for heads in (4, 2, 2))
    O = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    assert problem.error(O, q, k, v, causal) < 1e-5
    assert problem.error(O, q, k, v, not causal) > suites.TOLERANCE
    assert problem.error(1.05 * O, q, k, v, causal) > suites.TOLERANCE


@pytest.mark.parametrize("causal, N_q, N_k", [(False, 100, 100), (True, 100, 100), (True, 90, 130), (False, 70, 30)])
def test_gradients_by_definition_are_autograd_s(causal, N_q, N_k):
    p = Problem(2, 4, 2, N_q, N_k, 16, causal, "float64")
    q, k, v, dO = p.tensors(grad=True, device="cpu")
    gradients = torch.autograd.grad(suites.peers.PEERS["torch"](p)(q, k, v), (q, k, v), dO)
    truth = problem.gradients_by_definition(q, k, v, dO, causal)
    assert problem.gradient_error(gradients, truth) < 1e-12
    for n in range(3):
        wrong = [1.05 * g if m == n else g for m, g in enumerate(gradients)]
        assert problem.gradient_error(wrong, truth) > suites.TOLERANCE
        wrong[n] = torch.full_like(wrong[n], torch.nan)
        assert not problem.gradient_error(wrong, truth) <= suites.TOLERANCE


def test_the_gradients_of_a_long_sequence_go_in_chunks(monkeypatch):
    q, k, v, dO = Problem(1, 2, 1, 300, 300, 8, True, "float64").tensors(grad=True, device="cpu")
    whole = problem.gradients_by_definition(q, k, v, dO, True, few=20)
    monkeypatch.setattr(problem, "MOST", 0)  # chunks of 20 rows
    for part, all_at_once in zip(problem.gradients_by_definition(q, k, v, dO, True, few=20), whole, strict=True):
        assert torch.allclose(part, all_at_once, rtol=1e-12, atol=1e-14)


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    p = Problem(1, 2, 2, 64, 64, 16, False, "float32")
    tensors = p.tensors(grad=True, device="cpu")
    right = suites.peers.PEERS["torch"](p)

    class HalfOfdV(torch.autograd.Function):
        @staticmethod
        def forward(ctx, v):
            return v.clone()

        @staticmethod
        def backward(ctx, dV):
            return dV / 2

    monkeypatch.setitem(suites.peers.PEERS, "wrong", lambda p: lambda q, k, v: right(q, k, HalfOfdV.apply(v)))
    forward = dict(suites.ready(p, "forward", ("torch", "wrong"), tensors[:3]))
    assert not any(isinstance(call, str) for call in forward.values())
    backward = dict(suites.ready(p, "backward", ("torch", "wrong"), tensors))
    assert backward["wrong"] == "wrong: error 5.0e-01" and not isinstance(backward["torch"], str)


def test_flex_s_causal_mask_is_made_from_corners():
    from torch.nn.attention.flex_attention import create_block_mask

    for N_q, N_k in ((256, 256), (300, 500), (130, 700), (500, 300), (128, 1)):
        offset = N_k - N_q
        mine = suites.peers.flex_mask(N_q, N_k, device="cpu")
        theirs = create_block_mask(lambda b, h, i, j, o=offset: j <= i + o, None, None, N_q, N_k, device="cpu")
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), (name, N_q, N_k)


def test_the_hosts_time_is_that_of_calls_in_a_row_inside_what_is_held(monkeypatch):
    from contextlib import contextmanager

    clock, log, inside = [0.0], [], []

    @contextmanager
    def held():
        clock[0] += 100.0  # the choice of a backend does not count
        inside.append(True)
        yield
        inside.clear()

    def call(name, seconds):
        def run():
            log.append((name, bool(inside)))
            first = len(log) < 2 or log[-2][0] != name
            clock[0] += 50.0 if first else seconds  # what comes after another contestant is slow

        return run

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: clock[0])
    found = protocol.wall_microseconds(dict(a=call("a", 2e-6), b=call("b", 3e-6)), dict(b=held), turns=4)
    assert found == pytest.approx(dict(a=2.0, b=3.0), rel=1e-3)
    assert all(within == (name == "b") for name, within in log)
    assert len(log) == 2 * 4 * (protocol.BEFORE + protocol.IN_A_ROW)


def test_a_bare_peer_is_the_same_without_the_choice_of_its_backend():
    problem = Problem(1, 2, 2, 8, 8, 16, True)
    attention = suites.peers.PEERS["torch math"](problem)
    call, held = suites.peers.bare(attention)
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    with held():
        assert torch.equal(call(q, k, v), attention(q, k, v))
    plain = suites.peers.PEERS["torch"](problem)
    assert suites.peers.bare(plain)[0] is plain


def test_grids():
    paper = suites.paper_grid()
    assert len(paper) == len(set(paper)) == 2 * 2 * 6
    assert {p.d for p in paper} == {64, 128} and {p.batch * p.N_q for p in paper} == {16384}
    assert set(suites.paper_grid((1024, 4096, 16384))) < set(paper)
    assert {p.N_q for p in suites.long_grid() if p.causal} == {2**15, 2**16, 2**17, 2**18}
    assert {(p.heads, p.kv_heads) for p in suites.heads_grid()} == {(32, 32), (32, 8), (32, 1)}
    assert all(b.N_q == 2 * a.N_q for a, b in zip(suites.memory_grid(), suites.memory_grid()[1:], strict=False))
    assert all(p.N_q <= 512 for p in suites.small_grid())


def test_the_ladder_is_measured_in_both_shapes():
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    from fa2_lab.bench import ladder

    grid = ladder.grid()
    assert {(p.batch, p.heads) for p in grid} == set(ladder.SHAPES.values()) and len(grid) == 8
    names = [name for name, _ in ladder.contestants(Problem(1, 8, 8, 4096, 4096, 64, False), None)]
    assert names[:3] == ["standard", "fa1", "swapped"] and names[-2:] == ["split-K", "split-Q"]


def test_an_interrupted_run_keeps_what_it_has():
    def measure(problem, direction):
        if direction == "backward":
            raise KeyboardInterrupt
        return contest()

    where = Problem(1, 2, 2, 64, 64, 16, True)
    jobs = [partial(measure, where, direction) for direction in ("forward", "backward", "both")]
    kept = suites.collect(suite(), jobs)
    assert len(kept.rows) == 1
    assert [" ".join(m.split()) for m in kept.missing] == [
        f"{m} N 64 b 1 h 2 d 16 causal" for m in ("backward", "both")
    ]


@pytest.mark.parametrize(
    "failure, told",
    [(torch.OutOfMemoryError("CUDA out of memory"), "out of memory"), (KeyError("x"), "KeyError: 'x'")],
    ids=["memory", "anything"],
)
def test_what_fails_as_a_whole_is_a_row_and_the_run_goes_on(failure, told):
    def fails(problem, direction):
        raise failure

    where = Problem(1, 1, 1, 2**20, 2**20, 64, False)
    kept = suites.collect(suite(), [partial(fails, where, "backward"), partial(contest)])
    assert len(kept.rows) == 2 and not kept.missing
    assert kept.rows[0].failed == {"everybody": told} and kept.rows[0].direction == "backward"


def test_after_an_interrupted_suite_the_command_stops_and_keeps_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "check", lambda names: None)
    ran = []

    def measure(name, missing=()):
        ran.append(name)
        return Results(name, MACHINE, "by hand", rows=[contest()], missing=list(missing))

    monkeypatch.setattr(suites, "paper", lambda: measure("paper"))
    monkeypatch.setattr(suites, "long", lambda: measure("long", ["the rest"]))
    monkeypatch.setattr(suites, "heads", lambda: measure("heads"))
    assert command.main(["paper", "long", "heads", "--folder", str(tmp_path)]) == 130
    assert ran == ["paper", "long"]
    assert results.load("long", tmp_path).missing == ["the rest"]
    assert "not measured: the rest" in capsys.readouterr().out


def test_other_processes_compile_and_an_interrupt_is_not_theirs(monkeypatch):
    asked = []

    class Pool:
        def map(self, call, problems, names):
            asked.extend(zip(problems, names, strict=True))
            raise KeyboardInterrupt

        def shutdown(self, cancel_futures):
            asked.append(cancel_futures)

    monkeypatch.setattr(ahead, "pool", Pool)
    where = Problem(1, 2, 2, 64, 64, 16, True)
    with pytest.raises(KeyboardInterrupt):
        ahead.compile_ahead([where], ("fa2_lab", "FlexAttention"))
    assert asked == [(where, "fa2_lab"), (where, "FlexAttention"), True]
    ahead.call_once(where, "nobody")  # what fails there is no failure here


@pytest.mark.parametrize("name", command.SUITES)
def test_every_suite_has_somebody_who_measures_it(name):
    room, function = command.SUITES[name].measure.split(":")
    if room == "ladder":
        pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    assert callable(getattr(importlib.import_module(f"fa2_lab.bench.{room}"), function))


def test_a_timing_is_the_median_and_the_middle_half():
    timing = protocol.summary([1.0, 2.0, 3.0, 4.0, 100.0])
    assert timing.median == 3.0 and timing.low < 3.0 < timing.high


def test_a_call_that_fails_in_the_warm_up_gives_its_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert protocol.warm_up(lambda: None) == ""
    assert protocol.warm_up(lambda: [][0]).startswith("IndexError: ")


def test_without_a_gpu_the_command_says_where_recorded_results_are():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="recorded results are in figures/data"):
        command.main(["smoke", "quick"])


@pytest.mark.parametrize("names, got", [(["slow"], "slow"), (["smoke", "slow", "fast"], "slow, fast"), ([], "none")])
def test_a_suite_that_does_not_exist_is_refused_before_anything_runs(names, got):
    with pytest.raises(ValueError, match=rf"^suite: got {got}; it takes smoke, paper, "):
        command.main(names)


# Smoke ---------------------------------------------------------------------------------------------------------


def test_smoke_runs_without_a_gpu_and_says_what_its_times_are():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    p = Problem(1, 2, 1, 33, 40, 16, True, "float32")
    forward, backward = (smoke.check(p, direction) for direction in suites.DIRECTIONS)
    for row in (forward, backward):
        assert set(row.values) | set(row.failed) == set(smoke.NAMES) and {"fa2_lab", "torch"} <= set(row.values)
        assert all(ms > 0 for (ms,) in row.values.values()) and row.unit == "ms" and not row.flops
    assert "say nothing about a GPU" in smoke.PROTOCOL + smoke.INTERPRETED
    assert results.machine()["gpu"].startswith("no GPU")


def test_smoke_has_ragged_grouped_and_causal_problems():
    grid = smoke.grid()
    assert {p.causal for p in grid} == {False, True} and max(max(p.N_q, p.N_k) for p in grid) <= 200
    assert any(p.N_q != p.N_k and p.N_q % 32 and p.kv_heads < p.heads for p in grid)


def test_portable_calls_the_kernels_themselves(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")
    from fa2_lab.kernels import backward, forward

    called = []

    def watch(module, name):
        usual = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: called.append(name) or usual(*given))

    watch(forward, "forward")
    watch(backward, "backward")
    monkeypatch.setattr(sys.modules["fa2_lab.attention"], "attention", None)
    p = Problem(1, 2, 1, 40, 40, 16, True, "float32")
    tensors = p.tensors(grad=True, device="cuda" if torch.cuda.is_available() else "cpu")
    ((_, call),) = suites.ready(p, "both", ["fa2_lab portable"], tensors)
    assert not isinstance(call, str), call
    call()
    assert called == ["forward", "backward"] * 2


# Commits -------------------------------------------------------------------------------------------------------


def test_without_git_the_sources_have_a_fingerprint(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert re.fullmatch(r"sources [0-9a-f]{12}", results.commit())
    assert results.commit() == results.sources()


def test_sources_that_differ_from_the_commit_have_a_fingerprint_too(monkeypatch):
    monkeypatch.setattr(results, "_output", lambda command: "abc1234-dirty")
    assert results.commit() == results.sources()
    monkeypatch.setattr(results, "_output", lambda command: "abc1234")
    assert results.commit() == "abc1234"


# Training -----------------------------------------------------------------------------------------------------

TINY = train.Setting(layers=1, heads=2, d=8, context=32, batch=4, steps=40, rate=1e-2)


def test_the_loss_falls_and_the_run_repeats():
    first, second = (train.train("torch math", TINY, device="cpu") for _ in range(2))
    assert len(first.losses) == TINY.steps and first.losses == second.losses
    assert 5 < first.losses[0] < 7  # ln 256 = 5.5 for bytes without a clue
    assert sum(first.losses[-5:]) / 5 < first.losses[0] - 1.5
    assert first.tokens_per_second > 0


def test_the_model_does_not_look_ahead():
    torch.manual_seed(0)
    model = train.GPT(TINY, train.peers.PEERS["torch math"](TINY.problem()))
    x = torch.randint(256, (1, 32))
    y = x.clone()
    y[0, 20] = (y[0, 20] + 1) % 256
    a, b = model(x), model(y)
    assert torch.allclose(a[0, :20], b[0, :20], atol=1e-5) and not torch.allclose(a[0, 20], b[0, 20], atol=1e-3)


def test_the_text_is_the_package_itself():
    assert b"def own_text" in bytes(train.own_text().tolist())
