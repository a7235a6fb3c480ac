"""The suite `ring` without GPUs: its rows, who waits for whom, the slowest GPU's time, and what is refused."""

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")
pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from bench_clock import Clocks  # noqa: E402

from fa2_studio.bench import peers, protocol, ring  # noqa: E402
from fa2_studio.bench.problem import Problem  # noqa: E402

LONGEST = Problem(1, 16, 16, 131072, 131072, 128, True)


@pytest.fixture
def four(monkeypatch):
    """A process that is rank 2 of 4, and the calls that it made to the others."""
    made = []
    monkeypatch.setattr(ring.dist, "get_rank", lambda *group: 2)
    monkeypatch.setattr(ring.dist, "get_world_size", lambda *group: 4)
    monkeypatch.setattr(ring.dist, "barrier", lambda *group, **how: made.append("barrier"))
    return made


def test_rows_have_their_units_and_only_directions_have_flops():
    values = {"2 GPUs": [1.0]}
    for way in ("forward", "backward", "both"):
        row = ring.row(LONGEST, way, values)
        assert (row.unit, row.flops, row.direction, row.values) == ("ms", LONGEST.flops(way), way, values)
        assert "rung" not in row.problem
    memory, links = (ring.row(LONGEST, what, values) for what in ("peak memory", "K V once round"))
    assert (memory.unit, memory.flops, links.unit, links.flops) == ("MiB", 0, "ms", 0)
    other = ring.row(LONGEST, "both", values, layout="contiguous")
    assert (other.problem["layout"], other.problem["rung"]) == ("contiguous", "both, contiguous")
    assert [ring.gpus(n) for n in (1, 2, 4)] == ["1 GPU", "2 GPUs", "4 GPUs"]


@pytest.mark.parametrize("where, layouts", [(LONGEST, 4), (Problem(1, 16, 16, 8192, 8192, 128, True), 0)], ids=str)
def test_a_rank_takes_part_in_the_worlds_that_it_belongs_to(where, layouts, four, monkeypatch):
    asked = []

    def measured(problem, group, layout):
        asked.append((group, layout))
        times = {way: [float(group)] for way in ("forward", "backward", "both")}
        return times | {"peak memory": [9.0], "K V once round": [2.0]}

    monkeypatch.setattr(ring, "measured", measured)
    rows = ring.rows_of(where, {1: 10, 2: 20, 4: 40})
    assert asked == [(40, "zigzag"), (40, "contiguous")][: 1 + bool(layouts)], "rank 2 is in the world of four alone"
    assert four == ["barrier"] * 3, "every rank waits for those of a smaller world"
    plain = {row.direction: row.values for row in rows if "layout" not in row.problem}
    ways = {way: {"4 GPUs": [40.0]} for way in ("forward", "backward", "both")}
    assert plain == ways | {"peak memory": {"4 GPUs": [9.0]}, "K V once round": {"4 GPUs": [2.0]}}
    other = {row.direction: row.values for row in rows if row.problem.get("layout") == "contiguous"}
    assert other == (ways if layouts else {})


def test_a_run_measures_worlds_of_1_2_4_and_comes_back_on_rank_0(four, monkeypatch, capsys):
    made = []
    monkeypatch.setattr(ring, "start", lambda: 4)
    monkeypatch.setattr(ring, "machine", lambda: dict(gpu="made up"))
    monkeypatch.setattr(ring.dist, "new_group", lambda ranks: list(ranks))
    monkeypatch.setattr(ring.dist, "destroy_process_group", lambda: made.append("destroyed"))

    def rows_of(problem, groups):
        made.append((problem, groups))
        return [ring.row(problem, "both", {"1 GPU": [1.0]})]

    monkeypatch.setattr(ring, "rows_of", rows_of)
    with pytest.raises(SystemExit) as ended:
        ring.run()
    assert ended.value.code == 0 and made[-1] == "destroyed" and not capsys.readouterr().err
    monkeypatch.setattr(ring.dist, "get_rank", lambda: 0)
    made.clear()
    results = ring.run()
    groups = {1: [0], 2: [0, 1], 4: [0, 1, 2, 3]}
    assert made[:-1] == [(Problem(1, 16, 16, N, N, 128, True), groups) for N in ring.LENGTHS]
    assert (results.suite, results.protocol) == ("ring", ring.PROTOCOL)
    assert results.machine == dict(gpu="made up", gpus=4)
    assert [row.problem["N_q"] for row in results.rows] == list(ring.LENGTHS)
    told = capsys.readouterr()
    assert told.err.count("{'1 GPU': [1.0]}") == len(ring.LENGTHS) and not told.out


def test_it_says_how_it_is_started(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(
        ValueError, match=r"^ring: start it with `torchrun --nproc-per-node GPUS -m fa2_lab bench ring`"
    ):
        ring.start()


def test_each_process_joins_with_the_gpu_of_its_rank(monkeypatch):
    asked = {}
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: asked.update(device=device))
    monkeypatch.setattr(ring.dist, "init_process_group", lambda *backend, **how: asked.update(how, backend=backend))
    monkeypatch.setattr(ring.dist, "get_world_size", lambda: 4)
    assert ring.start() == 4 and asked["backend"] == ("nccl",)
    assert asked["device"] == asked["device_id"] == torch.device("cuda", 3)
    assert asked["timeout"].total_seconds() == 60


@pytest.mark.parametrize("part", range(4))
def test_a_wrong_answer_stops_the_run(part, four, monkeypatch):
    where = Problem(1, 2, 2, 40, 40, 16, True, "float32")
    whole = where.tensors(grad=True, device="cpu")
    O = peers.PEERS["torch"](where)(*whole[:3])
    parts = [O.detach(), *torch.autograd.grad(O, whole[:3], whole[3])]
    asked = []
    monkeypatch.setattr(ring, "unshard", lambda x, group, layout, timeout: asked.append((group, layout)) or x)
    ring.check(whole, parts, True, "a group", "zigzag")
    assert asked == [("a group", "zigzag")] * 4
    parts[part] = 1.5 * parts[part]
    with pytest.raises(RuntimeError, match=r"^ring: wrong on 4 GPUs: error 5\.0e-01$"):
        ring.check(whole, parts, True, "a group", "zigzag")
    with pytest.raises(RuntimeError):
        ring.check(whole, [torch.full_like(x, torch.nan) for x in parts], True, "a group", "zigzag")


@pytest.fixture
def clocks(monkeypatch):
    """A GPU that is a clock, whose tensors lie on the CPU; another GPU takes a tenth of a millisecond longer."""
    usual = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, device: usual(data))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Clocks().put_in_place(monkeypatch, torch, protocol.time)


def test_the_slowest_gpu_counts_and_the_first_call_does_not(clocks, four, monkeypatch):
    monkeypatch.setattr(ring.dist, "all_reduce", lambda x, how, group: x.add_(0.1 * (how == ring.dist.ReduceOp.MAX)))
    took = iter([50.0, 1, 2, 3, 4, 5, 6, 7])
    timing = ring.slowest(lambda: clocks.work(next(took) / 1e3), "a group")
    assert timing.median == pytest.approx(4.1) and (timing.low, timing.high) == pytest.approx((2.1, 6.1))
    assert four == ["barrier"] * 8 and ring.numbers(timing) == [timing.median, timing.low, timing.high]


def test_peak_memory_is_in_mebibytes(clocks, four, monkeypatch):
    asked = []
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr(ring.dist, "all_reduce", lambda x, how, group: x.mul_(2))
    assert ring.peak_mebibytes(lambda: asked.append("call"), "a group") == 6.0
    assert asked == ["empty_cache", "reset_peak_memory_stats", "call"]


def test_what_is_measured_in_a_world_is_checked_before(four, monkeypatch):
    """One rank that holds everything; a time is the number of tensors that a call gives."""
    where, checked = Problem(1, 2, 2, 40, 40, 16, True, "float32"), []
    usual, right = Problem.tensors, peers.PEERS["torch"](where)
    monkeypatch.setattr(Problem, "tensors", lambda self, grad: usual(self, grad=grad, device="cpu"))
    monkeypatch.setattr(ring, "shard", lambda x, group, layout: x.clone() if layout == "zigzag" else None)

    def attention(q, k, v, group, causal, layout, **how):
        assert (group, causal, layout) == ("a group", True, "zigzag")
        return right(q, k, v)

    def check(whole, parts, causal, group, layout):
        assert (causal, group, layout) == (True, "a group", "zigzag")
        truth = right(*whole[:3])
        wanted = (truth, *torch.autograd.grad(truth, whole[:3], whole[3]))
        checked.append(all(torch.allclose(x, y, atol=1e-5) for x, y in zip(parts, wanted, strict=True)))

    def tensors(found):
        return 1 if isinstance(found, torch.Tensor) else len(found)

    monkeypatch.setattr(ring, "ring_attention", attention)
    monkeypatch.setattr(ring, "check", check)
    monkeypatch.setattr(ring, "peak_mebibytes", lambda call, group: 7.0 * len(call()))
    monkeypatch.setattr(ring, "once_round", lambda problem, k, v, group: problem == where and (problem, k, v))
    monkeypatch.setattr(ring, "slowest", lambda call, group: protocol.Timing(tensors(call()), 0.0, 0.0))

    found = ring.measured(where, "a group", "zigzag")
    assert checked == [True]
    times = {name: numbers[0] for name, numbers in found.items()}
    assert times == {"forward": 1, "backward": 3, "both": 3, "peak memory": 21.0, "K V once round": 3}
    monkeypatch.setattr(ring.dist, "get_world_size", lambda group: 1)
    assert "K V once round" not in ring.measured(where, "a group", "zigzag")


def test_once_round_sends_every_head_of_k_and_v_over_the_ring(monkeypatch):
    where, sent, made = Problem(1, 4, 4, 64, 64, 8, True), [], {}
    k, v = torch.zeros(1, 4, 16, 8), torch.ones(1, 4, 16, 8)
    names = ("group", "rank", "lengths", "layout", "causal")

    def the_ring(*given, timeout, call, on_triton):
        made.update(zip(names, given[:5], strict=True), timeout=timeout, call=call, on_triton=on_triton)
        return "a ring"

    def turns(ring, q, also):
        assert ring == "a ring" and q is also is k
        return [(None, slice(0, 2)), (None, slice(2, 4))]

    def once_round(ring, *block):
        sent.append(block)
        return iter([(0, block)])

    monkeypatch.setattr(ring.dist, "get_rank", lambda group: 2)
    monkeypatch.setattr(ring.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(ring.rings, "Ring", the_ring)
    monkeypatch.setattr(ring.rings, "turns", turns)
    monkeypatch.setattr(ring.rings, "once_round", once_round)
    ring.once_round(where, k, v, "a group")
    assert [[x.shape for x in block] for block in sent] == [[(1, 2, 16, 8)] * 2] * 2, "K and V, two heads at a time"
    assert all((k == 0).all() and (v == 1).all() for k, v in sent)
    whole = dict(group="a group", rank=2, lengths=(16,) * 4, layout="zigzag", causal=True)
    assert made == whole | dict(timeout=60.0, call=0, on_triton=True)
