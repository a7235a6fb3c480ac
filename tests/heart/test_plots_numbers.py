"""What pictures tell a reader in numbers: their data beside the meter, the closed forms, NumPy and the records."""

import itertools
import json
from importlib import import_module

import numpy as np
import pytest

from fa2_lab.kernels import ladder
from fa2_lab.machine import chips, io_model, rates, reasons
from fa2_lab.plots import poster, ratios, ring_speed, roofline
from fa2_lab.records import load, path_of
from fa2_lab.reference import fa2
from fa2_lab.tiles import Tile, Tiling
from fa2_lab.tools.figures import SHEETS
from fa2_lab.trace import Trace


def figure_module(name):
    return import_module(f"fa2_lab.plots.{name}")


def figure_data(name):
    return figure_module(name).data()


def recorded_rows(suite):
    return json.loads(path_of(suite).read_text())["rows"]


# Softmax --------------------------------------------------------------------------------------------------------


def test_attention_map_figure_shows_an_induction_head():
    figure = figure_data("attention_map")
    words, P = figure["words"], figure["P"]
    assert np.allclose(P.sum(axis=1), 1, atol=0.06) and not np.triu(P, 1).any()
    for i, word in enumerate(words):
        if word in words[:i]:
            assert P[i, words.index(word) + 1] > 0.85, word


def test_state_stream_figure_equals_softmax_over_keys_so_far():
    figure = figure_data("state_stream")
    for j in range(len(figure["m"])):
        s = np.concatenate(figure["s"][: j + 1], axis=1)
        assert np.array_equal(figure["m"][j], s.max(axis=1))
        assert np.allclose(figure["l"][j], np.exp(s - s.max(axis=1)[:, None]).sum(axis=1), rtol=1e-13)
        assert np.array_equal(figure["alpha"][j] < 1, figure["m"][j] > (figure["m"][j - 1] if j else -np.inf))
    assert np.allclose(figure["o"][-1] / figure["l"][-1], figure["O"], rtol=1e-12)


def test_merge_orders_figure_gives_one_result_in_every_order():
    figure = figure_data("merge_orders")
    for name, merges in figure["orders"].items():
        used = sorted(n for *pair, _ in merges for n in pair)
        assert used == list(range(len(figure["leaves"]) + len(merges) - 1)), name
    ends = [[x.item() for x in merges[-1][2].finalize()] for merges in figure["orders"].values()]
    assert np.allclose(ends, ends[0], rtol=1e-12)
    m, l = (np.array([getattr(leaf, part).item() for leaf in figure["leaves"]]) for part in "ml")
    assert ends[0][1] == pytest.approx(np.log((np.exp(m) * l).sum()), rel=1e-12)


# Tiles and traffic ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FA1", "FA2"])
def test_visiting_order_figure_equals_the_trace(name):
    figure = figure_data("visiting_order")
    order = figure_module("visiting_order").visited_tiles(figure["events"][name])
    tiles = [(i, j) for i, j in itertools.product(range(3), range(4))]
    assert order == (tiles if name == "FA2" else sorted(tiles, key=lambda tile: tile[::-1]))
    traffic = io_model.traffic(name.lower(), "forward", Tiling(12, 12, 4, 3), 4)
    assert sum(e.elements for e in figure["events"][name]) == traffic.total


def test_window_tiles_figure_marks_exactly_the_needed_tiles():
    kinds, N, B = figure_module("window_tiles").kinds_of, 96, 8
    row, column = np.arange(N)[:, None], np.arange(N)[None, :]
    for left, first in ((23, 3), (24, 8), (7, 0), (0, 1)):
        sees = (column <= row) & ((row - column <= left) | (column < first))
        tiles = sees.reshape(N // B, B, N // B, B).swapaxes(1, 2)
        assert ((kinds(N, B, left, first) != Tile.SKIP) == tiles.any(axis=(2, 3))).all()
        assert tiles.all(axis=(2, 3))[kinds(N, B, left, first) == Tile.FULL].all()


# Backward, workers, machine -------------------------------------------------------------------------------------


def test_swizzle_figure_places_chunks_at_chunk_xor_row():
    figure, rows = figure_data("swizzle_xor"), np.arange(8)[:, None]
    assert np.array_equal(figure["places"]["Swizzled"], np.arange(8) ^ rows)
    assert set(figure["steps"]["One after the other"]) == {8} and set(figure["steps"]["Swizzled"]) == {1}
    assert set(figure_module("swizzle_xor").data(itemsize=4)["steps"]["One after the other"]) == {8}


def test_row_reduction_figure_ends_after_two_shuffles():
    figure = figure_data("row_reduction")
    assert set(figure["maxima"][-1]) == {figure["scores"].max()} != set(figure["maxima"][1])


# Hopper, decode, rings ------------------------------------------------------------------------------------------


def test_timeline_figure_orders_variants_by_tensor_core_use():
    neither, within, between, both = [panel["share"] for panel in figure_data("overlap_timeline")["panels"]]
    assert neither < within < between < both <= 1
    figure = figure_data("backward_step")
    order = [(what, number) for c, unit, what, number, begun, _ in sorted(figure["jobs"], key=lambda job: job[4])
            if (c, unit) == (0, "tensor") and figure["window"][0] <= begun][:5]  # fmt: skip
    assert order == [("S", 3), ("dQ", 2), ("dV", 3), ("dP", 3), ("dK", 3)]


@pytest.mark.parametrize("after", range(14, 24))
def test_strips_figure_equals_compiled_and_counted_numbers(after):
    figure = figure_module("rung_timeline").data(str(after))
    for panel in figure["panels"]:
        costs = figure_module("rung_timeline").rung_costs(str(panel["number"]))
        clocks = {"copy": {costs.copy, costs.rows}, "tensor": {costs.product}, "exp": {costs.softmax}}
        for unit, _, what, begun, ended in panel["jobs"]:
            least = min(clocks[unit])
            assert ended - begun >= least - 1e-6, (what, least)  # alone on its unit or sharing it, never faster
        copies = sorted(job[3:] for job in panel["jobs"] if job[0] == "copy")
        assert all(end <= begun + 1e-6 for (_, end), (begun, _) in itertools.pairwise(copies))
        counters = reasons.hardware_counters(load("ladder"), ladder.find(str(panel["number"])))
        assert panel["counted"] == pytest.approx(counters["tensor cores at work, %"])


def test_stages_figure_fills_before_reads_and_frees_before_refills():
    figure = figure_data("pipeline_stages")
    for stage in {span[0] for span in figure["spans"]}:
        spans = sorted(span[2:] for span in figure["spans"] if span[0] == stage)
        assert all(begun < full <= released for begun, full, released in spans)
        assert all(released <= begun for (_, _, released), (begun, _, _) in itertools.pairwise(spans))
    for place in ("mailbox slot 0", "mailbox slot 1"):
        full = sorted(span[2:] for span in figure_data("mailbox")["spans"] if span[0] == place)
        assert all(read <= sent for (_, read), (sent, _) in itertools.pairwise(full))


def test_ring_figure_equals_the_record():
    rows = [r for r in recorded_rows("ring") if r["problem"]["N_q"] == 131072 and "layout" not in r["problem"]]

    def ms(direction, name):
        return next(r["values"][name][0] for r in rows if r["direction"] == direction and name in r["values"])

    flops, link = ring_speed.reached(load("ring"))
    assert flops == pytest.approx(1e3 * 2 * 16 * 131072**2 * 128 / ms("forward", "1 GPU"))
    assert link == pytest.approx(1e3 * 3 * 32768 * 16 * 128 * 4 / ms("K V once round", "4 GPUs"))
    curves = figure_data("ring_speed")["curves"]
    assert curves[4][-1] == (131072, pytest.approx(ms("both", "1 GPU") / ms("both", "4 GPUs")))


# Measured -------------------------------------------------------------------------------------------------------


def test_speed_figures_equal_flops_over_recorded_time():
    rows = [r for r in recorded_rows("ladder") if r["direction"] == "forward" and not r["problem"]["causal"]]
    row = next(r for r in rows if (r["problem"]["N_q"], r["problem"]["d"], r["problem"]["batch"]) == (4096, 128, 4))
    rate_of = {name: row["flops"] / ms[0] / 1e9 for name, ms in row["values"].items()}
    climb = figure_data("climb")
    for rung in climb["rungs"]:
        assert rung.full == next(rate for name, rate in rate_of.items() if name.startswith(f"r{rung.number}_"))
    assert climb["peer"][:2] == (climb["peer"][0], rate_of[climb["peer"][0]])

    def rate(cost):
        return cost.flops / cost.limit(chips.H200)[1] / 1e12

    figure, cost = roofline.data("FA2"), rates.cost("FA2")
    assert figure["points"]["FA2"] == (cost.intensity("requested_bytes"), pytest.approx(rate(cost)), "L2")
    figure, cost = roofline.data("standard"), rates.cost("standard")
    assert figure["points"]["standard"] == (cost.intensity("dram_bytes"), pytest.approx(rate(cost)), "DRAM")
    assert figure["roofs"][0].bytes == chips.H200.hbm_bytes_per_second / 1e12
    points = figure_data("roofline")["points"]
    assert all(point[1] == rate_of[name] for name, point in points.items())


def test_ratios_figure_equals_the_record_and_counts_its_claim():
    figure = figure_data("ratios")["rows"]
    paper = [row["values"] for row in recorded_rows("paper")]
    grid = [f"The FA2 paper's grid, {direction}" for direction in ("forward", "backward")]
    drawn = [x for group, _, found in figure if group in grid for x in found["cuDNN"]]
    assert sorted(drawn) == pytest.approx(sorted(v["cuDNN"][0] / v["fa2_lab"][0] for v in paper if "cuDNN" in v))
    faster, total = (sum(low < x for x in ratios.all_ratios(figure, "cuDNN")) for low in (1, 0))
    slower = sum(x < 1 for *_, found in figure for x in found.get("cuDNN", ()))
    assert 0 < slower == total - faster
    for suite, direction, peer in (("long", "backward", "FlashAttention-4"), ("small", "forward", "cuDNN")):
        rows = [r["values"] for r in recorded_rows(suite) if r["direction"] == direction]
        slower_ratios = [row[peer][0] / row["fa2_lab"][0] for row in rows]
        assert np.median(slower_ratios) < 1 and slower_ratios in [
            pytest.approx(found.get(peer)) for *_, found in figure if peer in found
        ]


def test_time_and_memory_figure_equals_the_records():
    figure = figure_data("time_and_memory")
    paper = [r for r in recorded_rows("paper") if r["direction"] == "forward" and r["problem"]["d"] == 128]
    for r in paper:
        p = r["problem"]
        if not p["causal"] and p["batch"] * p["N_q"] == 16384:
            assert dict(figure["time"]["ours"])[p["N_q"]] == r["values"]["fa2_lab"][0]
    assert [N for N, _ in figure["time"]["standard"]] == sorted(N for N, _ in figure["time"]["standard"])


# Posters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", SHEETS.values())
def test_algorithm_sheet_operations_add_up_to_the_trace(tag):
    """At other sizes: each line's formula, times its turns, gives the meter's totals."""
    N, B_r, B_c, d = 60, 10, 15, 7
    Q, K, V, dO = np.random.default_rng(0).standard_normal((4, N, d))
    trace = Trace()
    if tag == "FA2.A1":
        fa2.forward(Q, K, V, B_r=B_r, B_c=B_c, trace=trace)
    else:
        fa2.backward(Q, K, V, *fa2.forward(Q, K, V, B_r=B_r, B_c=B_c), dO, B_r=B_r, B_c=B_c, trace=trace)
    turns = {0: 1, 1: N // (B_r if tag == "FA2.A1" else B_c), 2: N // B_r * (N // B_c)}
    size = dict(N=N, B_r=B_r, B_c=B_c, d=d)
    total = dict.fromkeys(poster.LANES, 0)
    for row in poster.data(tag)["rows"]:
        assert row.numpy and row.triton and len(set(row.triton)) == len(row.triton)
        for lane, formula in row.work.items():
            for term in formula.split(" + "):
                factors = [size[f] if f in size else int(f) for f in term.split()]
                total[lane] += int(np.prod(factors)) * turns[row.depth]
    assert (total["load"], total["store"]) == (trace.loads(), trace.stores())
    assert (total["matmul"], total["exp"]) == (trace.matmul_flops, trace.exponentials)
    assert trace.other_flops <= total["other"] <= 1.05 * trace.other_flops + 3 * N * N // B_c  # a sum of n counts as n
