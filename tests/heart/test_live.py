"""The live pieces: what their functions compute is what the reference, the meter and the models compute."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fa2_lab.machine import budget, chips, grid, io_model
from fa2_lab.machine.rates import cost
from fa2_lab.plots import block_budget, dq_over_time, live
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import CAUSAL, NO_MASK, Tiling
from fa2_lab.tools import files
from fa2_lab.trace import Trace

FIGURES = files.ROOT / "figures" / "live"
ALGORITHMS = {"standard": naive, "fa1": fa1, "fa2": fa2}


def call_figures(calls):
    """Call functions of the interactive figures, given as [(function, arguments)], and return their results."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here, which runs the pieces' functions")
    text = json.dumps(as_json(calls))
    command = [node, str(Path(__file__).with_name("live.mjs")), str(FIGURES / "states.js")]
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def as_json(x):
    """Return x in a form that JSON can write: arrays as lists, and −∞ as a word."""
    if isinstance(x, np.ndarray):
        return as_json(x.tolist())
    if isinstance(x, dict):
        return {name: as_json(y) for name, y in x.items()}
    if isinstance(x, (list, tuple)):
        return [as_json(y) for y in x]
    return "-inf" if isinstance(x, float) and np.isneginf(x) else x


def as_array(x):
    def as_number(y):
        return [as_number(z) for z in y] if isinstance(y, list) else {"-inf": -np.inf, "nan": np.nan}.get(y, y)

    return np.array(as_number(x), dtype=float)


def assert_close(ours, theirs, what=""):
    np.testing.assert_allclose(as_array(ours), np.asarray(theirs, float), rtol=1e-12, atol=1e-12, err_msg=what)


def random_tiling(rng, max_length=14):
    """Return a random tiling and mask. Most lengths are not multiples of a block, and some rows see no key."""
    N_q, N_k = (int(rng.integers(1, max_length)) for _ in range(2))
    if rng.random() < 0.5:
        N_k = N_q
    return Tiling(N_q, N_k, *(int(rng.integers(1, 7)) for _ in range(2)), CAUSAL if rng.random() < 0.6 else NO_MASK)


def tiling_arguments(t):
    return dict(N_q=t.N_q, N_k=t.N_k, B_r=t.B_r, B_c=t.B_c, causal=t.mask.causal)


# Algorithm 1 ----------------------------------------------------------------------------------------------------


class TileTrace(Trace):
    """A trace that keeps, for the end of each tile, what the algorithm holds and how much it has moved."""

    def __init__(self):
        super().__init__()
        self.tiles = []

    def hold(self, q, k, v, o, l, m, s):
        super().hold(q, k, v, o, l, m, s)
        arrays = {name: np.array(x) for name, x in dict(o=o, l=l, m=m, s=s).items()}
        held = sum(np.size(x) for x in (q, k, v, o, l, m, s))
        self.tiles.append(arrays | dict(at=(self._at["i"], self._at["j"]), moved=self.hbm_elements, held=held))


def test_live_algorithm_1_equals_the_traced_reference():
    rng, cases, calls = np.random.default_rng(0), [], []
    for _ in range(100):
        tiling, d = random_tiling(rng), int(rng.integers(1, 5))
        Q, K, V = (2 * rng.standard_normal((n, d)) for n in (tiling.N_q, tiling.N_k, tiling.N_k))
        for order in ALGORITHMS:
            cases.append((order, tiling, Q, K, V))
            arguments = dict(q=Q, k=K, v=V, order=order, B_r=tiling.B_r, B_c=tiling.B_c, causal=tiling.mask.causal)
            calls.append(("algorithm1", arguments))
    assert any(t.mask.causal and t.N_k < t.N_q for _, t, *_ in cases)  # rows without keys
    for (order, tiling, Q, K, V), answer in zip(cases, call_figures(calls), strict=True):
        trace, blocks = TileTrace(), {} if order == "standard" else dict(B_r=tiling.B_r, B_c=tiling.B_c)
        results = ALGORITHMS[order].forward(Q, K, V, mask=tiling.mask, trace=trace, **blocks)
        compare_results(order, tiling, Q.shape[1], answer, results, trace)
        if order != "standard":
            compare_tiles(order, answer, trace)


def compare_results(order, tiling, d, answer, results, trace):
    end = answer["done"]
    assert_close(end["O"], results[0])
    assert as_array(end["difference"]) < 1e-12 and answer["bad"] == []
    for name, counted in (("loads", trace.loads), ("stores", trace.stores)):
        assert end[name] == {t: counted(t) for t in {e.tensor for e in trace.events} if counted(t)}, (order, tiling)
    closed_form = io_model.traffic(order, "forward", tiling, d).total
    assert end["moved"] == trace.hbm_elements == answer["closed"] == closed_form
    assert answer["moved"] == sorted(answer["moved"])
    if order == "fa2":
        assert_close(end["L"], results[1])
    if order == "fa1":
        assert_close(end["hbm_l"], results[1])
        assert_close(end["hbm_m"], results[2])


def compare_tiles(order, answer, trace):
    """Assert that a figure's o, ℓ, m, s, p and α of each tile, and its counters, agree with the reference's trace."""
    added = [step for step in answer["tiles"] if step["op"] == "add"]
    rescaled = [step for step in answer["tiles"] if step["op"] == "shrink"]
    stored = [step for step in answer["tiles"] if step["op"] == "store"]
    assert [(step["i"], step["j"]) for step in added] == [tile["at"] for tile in trace.tiles]
    before = {}
    for n, (step, rescale, tile) in enumerate(zip(added, rescaled, trace.tiles, strict=True)):
        for name in ("o", "l", "m", "s"):
            assert_close(step[name], tile[name], name)
        m, i = np.where(np.isneginf(tile["m"]), 0, tile["m"]), tile["at"][0]
        tile_max = tile["s"].max(axis=1)
        base = m if order == "fa2" else np.where(np.isneginf(tile_max), 0, tile_max)
        assert_close(step["p"], np.exp(tile["s"] - base[:, None]))
        assert_close(step["alpha"], np.exp(before.get(i, np.full(len(m), -np.inf)) - m))
        assert_close(rescale["o"], as_array(rescale["factor"])[:, None] * as_array(rescale["was"]["o"]))
        before[i] = tile["m"]
        assert step["held"] == tile["held"]
        assert (step if order == "fa2" else stored[n])["moved"] == tile["moved"]


def test_live_comparison_shows_all_steps_of_fa1_and_fa2():
    rng = np.random.default_rng(6)
    Q, K, V = rng.standard_normal((3, 8, 2))
    for B_r, B_c, causal in ((4, 2, True), (2, 4, False), (8, 8, True), (1, 2, True)):
        arguments = dict(q=Q, k=K, v=V, B_r=B_r, B_c=B_c, causal=causal)
        answer = call_figures([("beside", arguments)])[0]
        for column, ops in zip(zip(*answer["pairs"], strict=True), answer["ops"], strict=True):
            assert list(dict.fromkeys(column)) == list(range(len(ops)))  # in order, and none is left out
        ended = [[ops[t] == "add" for ops, t in zip(answer["ops"], pair, strict=True)] for pair in answer["pairs"]]
        tiles = [ops.count("add") for ops in answer["ops"]]
        assert sum(a and b for a, b in ended) >= min(tiles)


# A row in blocks ------------------------------------------------------------------------------------------------


def test_live_online_softmax_equals_the_reference_in_every_order():
    rng, cases = np.random.default_rng(1), []
    for n in range(200):
        N, d = int(rng.integers(1, 10)), int(rng.integers(1, 4))
        scores, values = 3 * rng.standard_normal(N), rng.standard_normal((N, d))
        scores[rng.random(N) < (0, 0.3, 1)[n % 3]] = -np.inf  # hidden keys, and rows without keys
        order = ("forward", "backward", "outside in")[int(rng.integers(3))]
        cases.append(dict(scores=scores, values=values, order=order, B=int(rng.integers(1, 5))))
    for case, steps in zip(cases, call_figures([("online", case) for case in cases]), strict=True):
        state = SoftmaxState.empty(1, case["values"].shape[1])
        read = []
        for step in steps[1:-1]:
            if step["op"] == "shrink":
                before = state
                state = state.update(case["scores"][None, step["block"]], case["values"][step["block"]])
                alpha = np.exp(before.m - np.where(np.isneginf(state.m), 0, state.m))
                assert_close([step["alpha"]], alpha)
                assert_close([step["l"]], alpha * before.l)
                read += step["block"]
            else:
                for name in ("m", "l", "o"):
                    assert_close([step[name]], getattr(state, name), name)
                assert sum(w for w in step["weights"] if w is not None) == pytest.approx(step["l"], abs=1e-12)
        assert sorted(read) == list(range(len(case["scores"])))
        o, L = state.finalize()
        assert_close([steps[-1]["o"]], o)
        assert_close([steps[-1]["L"]], L)


# Does it fit, who works when, and who meets ---------------------------------------------------------------------


def test_live_playground_equals_the_machine_models():
    rng, cases = np.random.default_rng(2), []
    for chip in chips.CHIPS.values():
        for _ in range(30):
            blocks = dict(B_r=int(rng.choice([16, 48, 64, 128, 256])), B_c=int(rng.choice([16, 32, 80, 128, 256])))
            d, heads = int(rng.choice([16, 64, 80, 128, 256])), int(rng.integers(1, 200))
            more = dict(stages=int(rng.integers(1, 4)), warps=int(rng.choice([4, 8])), causal=bool(rng.integers(2)))
            cases.append((chip, dict(N=int(rng.integers(1, 3000)), d=d, heads=heads, **blocks, **more)))
    calls = [("plan", dict(chip=chip_facts(chip), settings=settings)) for chip, settings in cases]
    for (chip, s), plan in zip(cases, call_figures(calls), strict=True):
        fit = budget.fit(chip, s["B_r"], s["B_c"], s["d"], s["stages"], s["warps"])
        assert (plan["ok"], plan["scarce"], plan["shared"]) == (fit.ok, fit.limit, fit.shared_bytes)
        assert (plan["registers"], plan["perSM"]) == (fit.registers, fit.blocks_per_sm)
        tiling = Tiling(s["N"], s["N"], s["B_r"], s["B_c"], CAUSAL if s["causal"] else NO_MASK)
        sizes = {name: s[name] for name in ("N", "d", "B_r", "B_c", "heads", "causal")}
        costs = {name.lower(): cost(name, chip=chip, **sizes) for name in ("standard", "FA1", "FA2")}
        moved = {name: dict(requested=c.requested_bytes, dram=c.dram_bytes) for name, c in costs.items()}
        assert plan["moved"] == moved
        assert moved[plan["winner"]]["requested"] == min(c.requested_bytes for c in costs.values())
        assert plan["programs"] == s["heads"] * tiling.T_r
        assert plan["flops"] == s["heads"] * 4 * io_model.scores_visited(tiling) * s["d"]
        if plan["slots"]:
            assert plan["waves"] == grid.waves(plan["programs"], plan["slots"])
            assert plan["busy"] == pytest.approx(grid.efficiency(plan["programs"], plan["slots"]))


def test_live_playground_spills_where_the_compiled_kernel_spills():
    text = (FIGURES / "data.js").read_text("utf-8")
    tiles, picture = json.loads(text[text.index("{") : text.rindex(";")])["compiled"], block_budget.data()
    assert {"H100 SXM", "H200"} <= set(tiles)
    names, problem = ("d", "B_r", "B_c", "warps", "stages"), dict(N=8192, heads=16, causal=False)
    sizes = [dict(zip(names, map(int, key.split()), strict=True)) for key in tiles["H200"]]
    calls = [
        ("plan", dict(chip=chip_facts(chips.H200), settings=problem | size, compiled=found))
        for size, found in zip(sizes, tiles["H200"].values(), strict=True)
    ]
    for size, plan in zip(sizes, call_figures(calls), strict=True):
        d, blocks = size["d"], (size["B_r"], size["B_c"])
        cell, compiled = picture["cells"][d][blocks], picture["compiled"][(d, *blocks)]
        verdict = block_budget.verdict(cell, picture["limits"], compiled)
        assert (plan["scarce"] == "registers") == (verdict == "spills"), size


def chip_facts(chip):
    return {name: value for name, value in vars(chip).items() if name != "compute_capability"}


def test_live_playground_rejects_sizes_out_of_range():
    valid = dict(N=8192, d=128, B_r=128, B_c=64, heads=32, causal=False)
    cases = dict(B_r=(0, "1 too small"), B_c=(1100, "76 too large"), N=(2.5, "got 2.5"), heads=(None, "got null"))
    settings = [valid | {name: x} for name, (x, _) in cases.items()]
    calls = [("refused", dict(chip=chip_facts(chips.H100), settings=x)) for x in settings]
    for (name, (_, words)), message in zip(cases.items(), call_figures(calls), strict=True):
        assert message.startswith(f"{name}: ") and words in message and "it takes a whole number from 1 to" in message


def test_live_schedule_equals_list_scheduling():
    rng, cases = np.random.default_rng(3), []
    for _ in range(200):
        options = dict(algorithm=str(rng.choice(["fa1", "fa2", "fa2"])))
        options |= dict(direction=str(rng.choice(["forward", "backward"])))
        options |= dict(order=str(rng.choice(grid.ORDERS))) if options["algorithm"] == "fa2" else {}
        heads, SMs, per_sm = (int(rng.integers(1, n)) for n in (9, 20, 4))
        cases.append((random_tiling(rng, 40), heads, SMs, per_sm, options))
    calls = [
        ("timetable", dict(heads=heads, tiling=tiling_arguments(tiling), SMs=SMs, perSM=per_sm, **options))
        for tiling, heads, SMs, per_sm, options in cases
    ]
    for (tiling, heads, SMs, per_sm, options), drawn in zip(cases, call_figures(calls), strict=True):
        blocks = grid.fa1_grid(heads, tiling)
        if options["algorithm"] == "fa2":
            blocks = grid.fa2_grid(heads, tiling, options["direction"], options["order"])
        schedule = grid.schedule(blocks, SMs, per_sm)
        placed = [(p["SM"], p["slot"], p["start"], p["end"]) for p in drawn["placed"]]
        assert placed == [(p.SM, p.slot, p.start, p.end) for p in schedule.placements]
        assert [(p["head"], p["index"]) for p in drawn["placed"]] == [(b.head, b.index) for b in blocks]
        numbers = schedule.makespan, schedule.waves, schedule.SMs_used
        assert (drawn["makespan"], drawn["waves"], drawn["used"]) == numbers
        assert drawn["busy"] == pytest.approx(schedule.utilisation)


def collisions(tiling):
    """Return for each step {row block: workers that add to it in this step}, if these are two or more."""
    rows = [list(tiling.visited_rows(j)) for j in range(tiling.T_c)]
    steps = []
    for t in range(max(map(len, rows))):
        at = {i: [j for j, visited in enumerate(rows) if visited[t : t + 1] == [i]] for i in range(tiling.T_r)}
        steps.append({i: workers for i, workers in at.items() if len(workers) > 1})
    return steps


def test_live_dq_collisions_equal_the_model():
    rng = np.random.default_rng(4)
    cases = [(random_tiling(rng, 40), passes) for passes in (1, 2) for _ in range(100)]
    calls = [("backward", dict(tiling=tiling_arguments(tiling), passes=passes)) for tiling, passes in cases]
    for (tiling, passes), steps in zip(cases, call_figures(calls), strict=True):
        writers, tiles = grid.dq_writers(tiling), int(io_model.tiles_per_row(tiling).sum())
        done, walked = steps[-1], [step for step in steps if step["op"] == "tile"]
        assert done["added"] == [len(w) for w in writers]
        assert done["products"] == (5 if passes == 1 else 7) * tiles  # two passes: S and dP twice
        meetings = [{int(i): w for i, w in step["meet"].items()} for step in walked]
        assert meetings == (collisions(tiling) if passes == 1 else [{}] * len(walked))
        assert done["collisions"] == sum(len(workers) - 1 for step in meetings for workers in step.values())
        for p in range(1, passes + 1):  # each pass visits each tile once
            seen = sorted((at["i"], at["j"]) for step in walked if step["pass"] == p for at in step["at"])
            assert seen == [(i, j) for i in range(tiling.T_r) for j in tiling.visited_cols(i)]


def test_live_dq_race_takes_the_figures_times():
    rng = np.random.default_rng(5)
    tilings = [Tiling(T, T, 1, 1, mask) for T in range(2, 8) for mask in (NO_MASK, CAUSAL)]
    given = [("race", dict(tiling=tiling_arguments(t), seed=int(rng.integers(1e6)))) for t in tilings for _ in range(5)]
    for n, (atomics, two) in enumerate(call_figures(given)):
        tiling = tilings[n // 5]
        writers, tiles = grid.dq_writers(tiling), [len(list(tiling.visited_rows(j))) for j in range(tiling.T_c)]
        assert (atomics["end"], two["end"]) == (5 * max(tiles), 4 * max(tiles) + 3 * tiling.T_c)
        for i, workers in enumerate(writers):  # each worker adds once, and in two passes one alone writes
            assert sorted(w for add in atomics["writes"] if add["i"] == i for w in add["workers"]) == workers
        assert [store["workers"] for store in two["writes"]] == [[i] for i in range(tiling.T_r)]
        np.testing.assert_allclose(atomics["sums"], two["sums"], atol=1e-5)
        if tiling.mask is NO_MASK:
            ways = dq_over_time.data(tiling.T_r)["variants"].values()
            for ours, way in zip((atomics, two), ways, strict=True):
                assert [(v["worker"], v["from"], v["to"]) for v in ours["visits"]] == [v[:3] for v in way["visits"]]
                assert {(w["i"], w["time"]): sorted(w["workers"]) for w in ours["writes"]} == way["writes"]
    again = call_figures([("race", dict(tiling=tiling_arguments(tilings[8]), seed=seed)) for seed in range(40)])
    assert len({str(ways[0]["sums"]) for ways in again}) > 5, "the order of the atomic adds decides the last bits"
    assert len({str(ways[1]["sums"]) for ways in again}) == 1


def test_live_dq_race_opens_with_two_different_atomic_sums():
    begin = int(re.search(r"const BEGIN = (\d+);", (FIGURES / "race.js").read_text(encoding="utf-8"))[1])
    for T in range(3, 7):  # a sum of two is the same in both orders
        tiling = tiling_arguments(Tiling(T, T, 1, 1, NO_MASK))
        runs = call_figures([("race", dict(tiling=tiling, seed=begin + run)) for run in (1, 2)])
        atomics, two = ([ways[n]["sums"] for ways in runs] for n in (0, 1))
        assert sum(f"{x:.7f}" != f"{y:.7f}" for x, y in zip(*atomics, strict=True)) > T / 2
        assert two[0] == two[1]


def test_live_attention_map_shows_the_induction_head():
    """A word that was seen before looks at what followed it then."""
    numbers = call_figures([("numbersOf", "the cat saw the dog".split())])[0]
    _, P = naive.forward(*(np.array(numbers[name]) for name in "qkv"), mask=CAUSAL)
    assert P[3].argmax() == 1 and P[3, 1] > 0.9


# The pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", live.STILLS)
def test_live_figure_is_self_contained_with_a_noscript_text(name):
    page = live.page(name)
    assert not re.search(r"""(src|href)="(?!data:|#)|https?://(?!www\.w3\.org/)""", page)
    assert "<noscript>" in page and all(live.page_texts(name)[:2])


@pytest.mark.parametrize("name", live.STILLS)
def test_live_figure_scripts_declare_each_name_once(name, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    together = tmp_path / "together.js"
    together.write_text("\n".join(re.findall(r"<script>(.*?)</script>", live.page(name), re.S)), encoding="utf-8")
    ran = subprocess.run([node, "--check", str(together)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def test_unknown_live_figure_is_refused():
    with pytest.raises(ValueError, match=r"^name: got 'sunset'; it takes one of algorithm1, "):
        live.live("sunset")
