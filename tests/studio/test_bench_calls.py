"""What the bench calls, and with what: peers, the ladder's contestants, decode's curve, and what compiles ahead."""

import hashlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")
pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from fa2_lab.records import Measurement, load  # noqa: E402
from fa2_studio.bench import (  # noqa: E402
    ahead,
    decode,
    ladder,
    masks,
    peers,
    problem,
    protocol,
    results,
    suites,
)
from fa2_studio.bench.problem import Problem  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WHERE = Problem(1, 4, 2, 40, 40, 16, True, "float32")


@pytest.fixture
def here(monkeypatch):
    """Tensors lie where a test can compute."""
    usual = Problem.tensors
    monkeypatch.setattr(Problem, "tensors", lambda self, seed=0, grad=False, device="": usual(self, seed, grad, DEVICE))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["torch", "torch math", "fa2_lab reference", "fa2_lab portable", "fa2_lab"])
def test_a_peer_takes_grouped_heads_and_the_mask_with_and_without_gradients(name, causal):
    where = Problem(1, 4, 2, 40, 40, 16, causal, "float32")
    q, k, v = where.tensors(device=DEVICE)
    attention = peers.sdpa(peers.SDPBackend.MATH)(where) if name == "torch math" else peers.PEERS[name](where)
    assert problem.error(attention(q, k, v), q, k, v, causal) < 1e-2
    if name != "fa2_lab reference":
        assert problem.error(attention(q.requires_grad_(), k, v), q, k, v, causal) < 1e-2
    bare, held = peers.bare(attention)
    with held():
        assert problem.error(bare(q.detach(), k, v), q, k, v, causal) < 1e-2
    assert (bare is attention) == (name != "torch math")


# The ladder ---------------------------------------------------------------------------------------------------


@pytest.fixture
def judged(here, monkeypatch):
    """{contestant: (its call, its error)} of the row that the ladder makes; rungs are torch's own operations."""
    found = {}

    def timed(problem, direction, contestants, error_of):
        found.update({name: (call, error_of(call())) for name, call in contestants})
        return Measurement(problem.as_dict(), direction, {})

    def rung(wrong):
        def forward(q, k, v, causal):
            assert causal
            return peers.PEERS["torch"](WHERE)(q, k, v) * wrong, None

        def backward(q, k, v, O, L, dO, causal):
            assert causal and (O, L) == ("O", "L") and not q.requires_grad
            free = [x.clone().requires_grad_() for x in (q, k, v)]
            dQ, dK, dV = torch.autograd.grad(peers.PEERS["torch"](WHERE)(*free), free, dO)
            return dQ, dK, wrong * dV

        return SimpleNamespace(forward=forward, backward=backward)

    def attention(q, k, v, causal, return_lse):
        assert causal and return_lse and (q.shape[1], k.shape[1], v.shape[1]) == (4, 2, 2)
        return "O", "L"

    last = (ladder.ladder.RUNGS[-1], ladder.ladder.BACKWARD[-1])
    monkeypatch.setattr(ladder.ladder, "load", lambda name: rung(1.5 if name in last else 1.0))
    monkeypatch.setattr(ladder, "attention", attention)
    for name in ("fa2_lab", "fa2_lab portable", "cuDNN"):
        monkeypatch.setitem(peers.PEERS, name, peers.PEERS["torch"])

    def gone(problem):
        raise peers.Missing("not installed")

    monkeypatch.setitem(peers.PEERS, "FlashAttention-3", gone)
    monkeypatch.setattr(ladder, "timed", timed)
    return found


def test_every_rung_and_peer_of_a_climb_is_judged_under_its_mask(judged):
    row = ladder.climb(WHERE)
    assert (row.direction, row.problem) == ("forward", WHERE.as_dict())
    assert list(judged) == [*ladder.ladder.RUNGS, "fa2_lab", "cuDNN"], "who is not installed is left out"
    errors = {name: error for name, (_, error) in judged.items()}
    assert errors.pop(ladder.ladder.RUNGS[-1]) == pytest.approx(0.5, rel=1e-3) and max(errors.values()) < 1e-5


def test_every_rung_and_peer_of_the_way_down_is_judged_by_its_gradients(judged):
    row = ladder.down(WHERE)
    assert (row.direction, row.problem) == ("backward", WHERE.as_dict())
    assert list(judged) == [*ladder.ladder.BACKWARD, "fa2_lab portable", "fa2_lab"]
    errors = {name: error for name, (_, error) in judged.items()}
    assert errors.pop(ladder.ladder.BACKWARD[-1]) == pytest.approx(0.5, rel=1e-3) and max(errors.values()) < 1e-5
    assert len(judged["fa2_lab"][0]()) == 3, "it can be called again"


def test_what_compiles_ahead_is_a_call_of_the_rung(here, monkeypatch):
    asked = []

    def load(name):
        def called(*given):
            asked.append((name, [getattr(x, "shape", x) for x in given], any(x.requires_grad for x in given[:3])))

        return SimpleNamespace(forward=called, backward=called)

    monkeypatch.setattr(ladder.ladder, "load", load)
    up, down = ladder.ladder.RUNGS[0], ladder.ladder.BACKWARD[0]
    ladder.call_once(up, WHERE)
    ladder.call_once(down, WHERE)
    q, k = (1, 4, 40, 16), (1, 2, 40, 16)
    assert asked == [(up, [q, k, k, True], False), (down, [q, k, k, q, (1, 4, 40), q, True], False)]


@pytest.mark.parametrize("read, reason", [({"s": {"L2 bytes": 5.0}}, ""), ({}, "ncu is not installed")])
def test_counters_of_a_rung_are_counts_or_a_reason(read, reason, monkeypatch):
    monkeypatch.setattr(ladder, "counted", lambda problem: (read, reason))
    row = ladder.count(WHERE, "s")
    assert (row.direction, row.unit, row.problem["rung"]) == ("counters", "count", "s")
    assert row.values == ({} if reason else {"L2 bytes": [5.0]}) and row.failed == ({"ncu": reason} if reason else {})
    assert ladder.count(WHERE, "nobody").values == {}


def test_what_was_compiled_has_these_counts(monkeypatch):
    import fa2_lab.tools.xray as room

    small = dict(registers=32, spills=0, shared=0, tensor=1, exponential=2, warps=8)
    large = dict(registers=129, spills=3, shared=1024, tensor=4, exponential=5, warps=4)
    monkeypatch.setattr(room, "xray", lambda *_, **__: [SimpleNamespace(numbers=n) for n in (small, large)])
    row = ladder.compiled("s", WHERE)
    assert row.values == {name: [n] for name, n in large.items()} | {"programs on an SM": [3]}
    assert (row.direction, row.unit) == ("compiled", "count")


# Grids and records ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suite", ["paper", "heads", "memory", "small"])
def test_the_record_is_of_the_grid_s_problems(suite):
    grid = suites.CONTESTS[suite].grid if suite in suites.CONTESTS else getattr(suites, f"{suite}_grid")
    measured = [row.problem for row in load(suite).rows]
    assert all(p.as_dict() in measured for p in grid()) and all(Problem(**p) in grid() for p in measured)


def test_the_fingerprint_is_that_of_every_file_of_the_package():
    package = results.PACKAGE
    files = sorted(path for path in package.rglob("*") if path.suffix == ".py")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    assert len(files) > 100 and results.sources() == f"sources {digest[:12]}"


def test_flex_gets_a_mask_of_both_lengths_where_it_is_causal(monkeypatch):
    asked = []
    monkeypatch.setattr(peers, "compiled_flex", lambda: lambda q, k, v, **options: asked.append((q, k, v, options)))
    monkeypatch.setattr(peers, "flex_mask", lambda *lengths: ("mask", *lengths))
    for causal, mask in ((True, ("mask", 30, 50)), (False, None)):
        peers.PEERS["FlexAttention"](Problem(1, 4, 2, 30, 50, 16, causal))("q", "k", "v")
        assert asked[-1] == ("q", "k", "v", dict(block_mask=mask, enable_gqa=True))


# Ahead and decode ---------------------------------------------------------------------------------------------


def test_a_contestant_compiles_forward_with_and_without_gradients_and_backward(here, monkeypatch):
    asked = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            asked.append(("forward", ctx.needs_input_grad == (True, True, True)))
            assert [x.shape[1] for x in (q, k, v)] == [4, 2, 2]
            return q.clone()

        @staticmethod
        def backward(ctx, dO):
            asked.append(("backward", tuple(dO.shape)))
            return dO, torch.zeros(1, 2, 40, 16, device=dO.device), torch.zeros(1, 2, 40, 16, device=dO.device)

    def asking(problem):
        assert problem == WHERE
        return lambda q, k, v: asked.append(torch.is_grad_enabled()) or Asking.apply(q, k, v)

    monkeypatch.setitem(peers.PEERS, "asking", asking)
    ahead.call_once(WHERE, "asking")
    assert [x for x in asked if isinstance(x, bool)] == [False, True] and asked[-1] == ("backward", (1, 4, 40, 16))
    asked.clear()
    monkeypatch.setitem(masks.CONTESTANTS, "asking", lambda problem, mask, sinks: asking(problem))
    masks.call_once(WHERE, "window 128", "asking")
    assert asked[0] is True and asked[-1] == ("backward", (1, 4, 40, 16))


def test_other_processes_get_every_job_whole_and_bear_its_failure(monkeypatch):
    done = []

    class Pool:
        def map(self, call, *columns):
            return map(call, *columns)

    def call(a, b):
        done.append((a, b))
        raise ValueError

    monkeypatch.setattr(ahead, "pool", Pool)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    ahead.elsewhere(call, [(1, 2), (3, 4)])
    assert done == [(1, 2), (3, 4)]
    monkeypatch.setattr(ahead, "pool", lambda: None)
    ahead.elsewhere(call, [(5, 6)])
    assert len(done) == 2, "where there are no other processes nothing is compiled ahead"


def test_the_curve_of_decode_is_over_programs_with_the_usual_number_among_them(here, monkeypatch):
    from fa2_lab.kernels.decode import plan

    asked = {}

    def prepare(q, k, v, options):
        assert (options.causal, options.scale, q.shape[2]) == (False, 64**-0.5, 1) and k.shape == v.shape
        return SimpleNamespace(read=SimpleNamespace(grid=(3, 44)))

    def measure(calls, flushing):
        asked.update(flushing=flushing, given={n: call() for n, call in calls.items()})
        return {n: protocol.Timing(n / 1e3, 0.0, 9.0) for n in calls}

    monkeypatch.setattr(plan, "prepare", prepare)
    monkeypatch.setattr(plan, "decode", lambda q, k, v, options, programs: (programs, tuple(v.shape), options.causal))
    monkeypatch.setattr(decode, "measure", measure)
    found = decode.by_programs(Problem(1, 4, 2, 1, 128, 64, False, "float32"))
    counts = [8, 16, 32, 64, 128, 132, 256, 512, 1024, 2048]
    assert found == dict(programs=counts, microseconds=pytest.approx(counts), usual=[132])
    assert asked["flushing"] is decode.reading
    assert asked["given"] == {n: (None if n == 132 else n, (1, 2, 128, 64), False) for n in counts}
