"""Ideas for the kernels: every edit still fits and makes a kernel of its own, and what is measured is its worth."""

import ast
from collections import Counter
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the bench needs torch")
pytest.importorskip("triton", reason="Triton is not installed here (it exists for Linux only)")

from fa2_lab.kernels import interpreter, launch  # noqa: E402
from fa2_lab.kernels.decode import kernel as decode  # noqa: E402
from fa2_lab.kernels.hopper.backward import host as host_backward  # noqa: E402
from fa2_lab.kernels.hopper.forward import host  # noqa: E402
from fa2_lab.studio.bench import protocol, results, worth  # noqa: E402
from fa2_lab.studio.bench.ideas import IDEAS, at, kept  # noqa: E402
from fa2_lab.studio.bench.problem import Problem  # noqa: E402
from fa2_lab.studio.bench.variants import Edit, Kernels, as_they_are, edited, sources, variant  # noqa: E402

FILES = sources()
PLANS = dict(forward=host.Plan, backward=host_backward.Plan, decode=launch.Blocks)


def said(idea) -> str:
    return f"{idea.part}, {idea.name}, {'kept' if idea.kept else 'dropped'}"


# The list -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idea", IDEAS, ids=said)
def test_every_edit_finds_its_text_and_leaves_python(idea):
    changed = edited(FILES, idea.edits)
    assert {name for name in FILES if changed[name] != FILES[name]} == {edit.file for edit in idea.edits}
    for text in changed.values():
        ast.parse(text)
    assert idea.edits or idea.plan, "nothing changes"


def one_query(p: Problem):
    return torch.empty(p.batch, p.heads, 1, p.d, dtype=getattr(torch, p.dtype), device="meta")


@pytest.fixture
def on_hopper(monkeypatch):
    """Decode's sizes for a GPU of 132 SMs, also where it would be interpreted."""
    monkeypatch.setattr(interpreter, "switched_on", lambda: False)
    monkeypatch.setattr(launch, "family", lambda: launch.HOPPER)


@pytest.mark.parametrize("idea", [idea for idea in IDEAS if idea.plan], ids=said)
def test_plans_are_as_an_idea_takes_them_to_be(idea, on_hopper):
    assert set(idea.plan) <= {field.name for field in fields(PLANS[idea.part])}
    for p in idea.problems:
        if idea.part == "backward":
            today = host_backward.plan(p.d, p.N_q, p.causal, False)
        elif idea.part == "decode":
            today, _ = decode.sizes(one_query(p), p.heads // p.kv_heads, False, p.batch * p.kv_heads, p.N_k)
        else:
            today = host.plan(p.d, p.N_q, p.batch * p.heads, 132, p.causal, False)
        for name, (is_now, becomes) in idea.plan.items():
            assert getattr(today, name) == is_now != becomes, (name, p)


def test_no_idea_is_measured_twice_and_most_are_the_kernels_own():
    named = Counter((idea.part, idea.name, problem) for idea in IDEAS for problem in idea.problems)
    assert set(named.values()) == {1}
    assert {idea.part for idea in IDEAS} == {"forward", "backward", "decode", "host"}
    for part in ("forward", "backward"):
        assert all(sum(idea.part == part and idea.kept == is_kept for idea in IDEAS) >= 7 for is_kept in (True, False))
    assert all(p.dtype == "bfloat16" and p.d in (64, 128) for idea in IDEAS for p in idea.problems)


# Edited copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edit, times",
    [(Edit("work", "no such text", ""), 0), (Edit("work", "self.", ""), "many"), (Edit("toil", "self", ""), 0)],
)
def test_an_edit_that_does_not_fit_once_is_refused(edit, times):
    times = FILES["work"].count(edit.old) if times == "many" else times
    with pytest.raises(ValueError, match=rf"^edits: got .* stands {times} times in {edit.file}\.py; it takes what"):
        edited(FILES, [edit])


def test_edits_follow_one_another_and_the_files_stay_as_they_are():
    edits = Edit("a", "one", "two"), Edit("a", "two", "three")
    assert edited({"a": "one", "b": "one"}, edits) == {"a": "three", "b": "one"}
    assert sources() == FILES and {"forward", "backward", "host", "softmax"} <= FILES.keys()


COPIED = "fa2_lab.kernels.hopper", "fa2_lab.kernels.decode.kernel", "fa2_lab.machine.splits"


def test_a_variant_is_a_package_of_its_own():
    changes = Edit("host", "return max(1, (32 if one >= launch.MiB else 16)", "return max(1, 7")
    idea = kept("forward", "x", at(64, True, 1024), changes, slots=(8, 2))
    theirs, ours = variant(idea), as_they_are()
    assert theirs is variant(idea) and len({room.__name__ for room in (*theirs, *ours)}) == 2 * len(Kernels._fields)
    for room in theirs:
        found = [getattr(x, "__module__", None) or getattr(x, "__name__", "") for x in vars(room).values()]
        assert not [x for x in found if str(x).startswith(COPIED)], "it must not call the kernels as they are"
    kind = (64, 1024, 32, 132, True, False)
    theirs_is, ours_is = (vars(kernels.host.plan(*kind)) for kernels in (theirs, ours))
    assert theirs_is == ours_is | dict(slots=2) != ours_is
    shape = (1, 16, 16384, 128)
    assert (theirs.host.heads_at_once(shape, True), ours.host.heads_at_once(shape, True)) == (1, 4)


def test_a_plan_for_the_backward_changes_the_backward_alone():
    theirs = variant(kept("backward", "x", at(64, True, 1024), dv_late=(True, False)))
    kind = (64, 1024, True, False)
    theirs_is, ours_is = (vars(plans.plan(*kind)) for plans in (theirs.host_backward, host_backward))
    assert theirs_is == ours_is | dict(dv_late=False) != ours_is
    assert vars(theirs.host.PLANS[64]) == vars(host.PLANS[64])


def test_a_variant_of_decode_has_plans_of_its_own(on_hopper):
    p = Problem(16, 32, 8, 1, 8192, 128, False)
    q, k = one_query(p), torch.empty(16, 8, 8192, 128, dtype=torch.bfloat16, device="meta")
    whole = Edit("splits", "grid.efficiency(heads, slots) >= WELL_FILLED", "False")
    ideas = [kept("decode", "x", (p,), whole), kept("decode", "x", (p,), stages=(4, 2))]
    today, split, shallow, again = (
        room.recipe(q, k, k, None, None, False, None)
        for room in (decode, *(variant(idea).decode for idea in ideas), decode)
    )
    assert again is today and today.merge is shallow.merge is None and split.merge
    assert (today.split.blocks.stages, shallow.split.blocks.stages) == (4, 2)
    assert today.split.grid == shallow.split.grid != split.split.grid


@pytest.mark.compiles("ideas_worker.py")
def test_edited_kernels_compile(rows):
    assert {row["part"] for row in rows} == {"forward", "backward", "decode"}
    for row in rows:
        few, many = ("hgmma", "hmma") if row["part"] == "decode" else ("hmma", "hgmma")  # 16 rows are few
        assert row[many] > 0 == row[few]


def test_without_a_hopper_gpu_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr(host, "multiprocessors", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"^ideas: got NVIDIA A100; it takes a Hopper GPU"):
        worth.run()


# What is measured ---------------------------------------------------------------------------------------------

SMALL = Problem(1, 2, 2, 64, 64, 16, True, "float32")
PUT_IN, TAKEN_OUT, WRONG, FAILS = (
    kept("forward", "in use", (SMALL,)),
    replace(kept("forward", "not in use", (SMALL,)), kept=False),
    kept("forward", "wrong", (SMALL,)),
    kept("forward", "fails", (SMALL,)),
)


@pytest.fixture
def by_hand(monkeypatch):
    """Kernels that are plain torch, one of which is wrong, and a clock by hand: today takes 2 ms, all others 3."""

    def forward(q, k, v, lengths, causal, scale):
        O = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return O, torch.ones(q.shape[:3])

    def made(idea):
        if idea is FAILS:
            raise ValueError("edits: it fits no more")
        return named(lambda *inputs: tuple(1.1 * x for x in forward(*inputs)) if idea is WRONG else forward(*inputs))

    def named(call):
        room = SimpleNamespace(forward=call, prepare=lambda *kind: lambda *x: call(*x, *kind[4:]))
        return Kernels(room, None, None, None, room)

    def measure(calls, *how):
        return {name: protocol.Timing(*(3 * [2.0 if name == worth.TODAY else 3.0])) for name in calls}

    monkeypatch.setattr(Problem, "tensors", lambda self: tuple(torch.randn(3, 1, 2, 64, 16)))
    monkeypatch.setattr(worth, "as_they_are", lambda: named(forward))
    monkeypatch.setattr(worth, "variant", made)
    monkeypatch.setattr(worth, "measure", measure)
    monkeypatch.setattr(worth, "IDEAS", [PUT_IN, TAKEN_OUT, WRONG, FAILS])
    monkeypatch.setattr(worth, "cudnn", lambda *given: None)
    worth.compared.cache_clear()
    yield forward
    worth.compared.cache_clear()


def test_worth_is_time_without_over_time_with(by_hand):
    rows = [worth.row(SMALL, "forward", idea) for idea in (PUT_IN, TAKEN_OUT)]
    assert [row.ratio("with it", "without it") for row in rows] == [1.5, 2 / 3]
    assert all(set(row.values) == {"with it", "without it", "cuDNN"} and not row.failed for row in rows)
    assert [row.problem["kept"] for row in rows] == [True, False] and rows[0].flops == SMALL.flops("forward")
    assert results.label(rows[0]) == "forward, in use N 64 b 1 h 2 d 16 causal"


def test_what_is_wrong_or_fails_is_not_timed(by_hand):
    wrong, fails = (worth.row(SMALL, "forward", idea) for idea in (WRONG, FAILS))
    assert wrong.failed == {"without it": "wrong: error 1.0e-01"} and "without it" not in wrong.values
    assert fails.failed == {"without it": "ValueError: edits: it fits no more"} and fails.values["with it"][0] == 2.0


def test_nothing_is_measured_against_kernels_that_are_wrong(by_hand, monkeypatch):
    double = Kernels(SimpleNamespace(forward=lambda *x: (2 * by_hand(*x)[0], None)), *4 * [None])
    monkeypatch.setattr(worth, "as_they_are", lambda: double)
    with pytest.raises(ArithmeticError, match="kernels of today are wrong: error "):
        worth.row(SMALL, "forward", PUT_IN)


def test_an_idea_of_the_host_is_measured_in_microseconds(by_hand, monkeypatch):
    idea = kept("host", "launches", (SMALL,))
    monkeypatch.setattr(worth, "IDEAS", [idea])
    monkeypatch.setattr(worth, "wall_microseconds", lambda calls: {name: 9.0 for name in calls})
    row = worth.row(SMALL, "forward", idea)
    assert row.unit == "µs" and not row.flops and row.values["without it"] == [9.0]


def test_an_idea_of_decode_is_measured_in_microseconds_by_prepared_calls(by_hand, monkeypatch):
    idea, asked = kept("decode", "teams", (SMALL,)), []
    usual = worth.measure
    monkeypatch.setattr(worth, "IDEAS", [idea])
    monkeypatch.setattr(worth, "measure", lambda calls, *how: asked.append(how) or usual(calls))
    row = worth.row(SMALL, "forward", idea)
    assert row.unit == "µs" and not row.flops and not row.failed and asked == [(worth.MORE, protocol.reading)]
    assert row.values["with it"] == 3 * [2000.0] and row.values["without it"] == 3 * [3000.0]
