"""Pictures of the Hopper kernels: the model's waits, times and schedules reach them, and so do the ideas' factors."""

import json

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from pictures import drawn, tagged

from fa2_lab.plots import backward_ideas, forward_ideas, ideas, style
from fa2_lab.plots.records import RECORDED


def words(figure):
    return [t.get_text() for t in style.texts(figure)]


# Who waits for whom -------------------------------------------------------------------------------------------


def test_barriers_by_hand():
    _, _, data = drawn("pipes")
    both, engine = ["consumer 0", "consumer 1"], ["copy engine"]
    want = {f"{t} filled": dict(waits=both, arrives=engine, expected=1) for t in "QKV"}
    want |= {f"{t} emptied": dict(waits=["producer"], arrives=both, expected=2) for t in "KV"}
    want["Q emptied"] = dict(waits=["producer"], arrives=both, expected=1)  # each consumer has two stages
    want["mailbox filled"] = dict(waits=both, arrives=["producer"], expected=1)
    want["mailbox emptied"] = dict(waits=["producer"], arrives=both, expected=2)
    want["ping-pong"] = dict(waits=both, arrives=both, expected=1)
    assert data["barriers"] == want
    assert data["stages"] == {"mailbox": 2, "Q": 4, "K": 2, "V": 2}


def test_every_ring_has_its_stages_and_three_arrows():
    figure, alt, data = drawn("pipes")
    for ring, number in data["stages"].items():
        assert len(tagged(figure, f"{ring} stage")) == number
        for verb in ("fill", "take", "release"):
            assert len(tagged(figure, f"{ring} {verb}")) == 1
    assert len(tagged(figure, "consumer")) == 2 and len(tagged(figure, "ping-pong")) == 2
    assert words(figure).count("emptied: 2 arrivals, all consumers") == 3
    assert "Q: 4 stages, empty again after 1 release;" in alt


def test_the_backward_meets_at_rings_orders_and_dS():
    figure, alt, data = drawn("backward_pipes")
    both, engine = ["consumer 0", "consumer 1"], ["copy engine"]
    want = {f"{ring} filled": dict(waits=both, arrives=engine, expected=1) for ring in ("K", "V", "rows")}
    want |= {f"{ring} emptied": dict(waits=["producer"], arrives=both, expected=2) for ring in data["stages"]}
    want["mailbox filled"] = dict(waits=both, arrives=["producer"], expected=1)
    want["dS filled"] = dict(waits=both, arrives=both, expected=2)
    assert data["barriers"] == want and data["places"] == 2
    assert data["stages"] == {"mailbox": 2, "K": 2, "V": 1, "rows": 2}
    for ring, number in data["stages"].items():
        assert len(tagged(figure, f"{ring} stage")) == number
        assert all(len(tagged(figure, f"{ring} {verb}")) == 1 for verb in ("fill", "take", "release"))
    assert len(tagged(figure, "dS")) == len(tagged(figure, "dQ place")) == 2 and len(tagged(figure, "dQ add")) == 1
    assert words(figure).count("emptied: 2 arrivals, all consumers") == 4
    assert "K: 2 stages; V: 1 stage;" in alt and "one of 2 places" in alt


# Time ---------------------------------------------------------------------------------------------------------


def test_shares_by_hand():
    """d = 64, two warpgroups, 16 tiles: a tile takes 1,024 clocks of products and 1,024 of exponentials."""
    _, _, data = drawn("timeline")
    neither, within, between, both = (panel["share"] for panel in data["panels"])
    busy = 16 * 1024
    assert neither == pytest.approx(busy / (16 * 2048))
    assert within == pytest.approx(busy / (512 + 1024 + 15 * (512 + 1024) + 512))
    assert between > 0.95 and both > between


def test_boxes_are_as_long_as_their_jobs():
    figure, _, data = drawn("timeline")
    for ax, panel in zip(figure.axes, data["panels"], strict=True):
        for kind in ("S", "PV", "P"):
            jobs = [(begun, ended) for _, _, label, begun, ended in panel["jobs"] if label.split()[0] == kind]
            shown = sorted((a, min(b, data["window"])) for a, b in jobs if a < data["window"])
            boxes = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in tagged(ax, kind)]
            np.testing.assert_allclose(sorted(boxes), shown)
            assert boxes


# Dealt or drawn -----------------------------------------------------------------------------------------------


def test_tickets_draws_every_row_block():
    figure, alt, data = drawn("tickets")
    for ax, ran in zip(figure.axes, data["ran"].values(), strict=True):
        (bars,) = [c for c in ax.collections if isinstance(c, PolyCollection)]
        assert len(bars.get_paths()) == len(ran.placed) == 16 * 128
        assert sum(p.end - p.start for p in ran.placed) == 16 * 128 * 129 / 2
        assert f"ends at {ran.makespan:,.0f} tiles" in alt
    dealt, side_by_side, tickets = (ran.makespan for ran in data["ran"].values())
    assert dealt > 1.5 * tickets and side_by_side > 1.1 * tickets


# Ideas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_bars_are_the_factors_and_failures_are_hatched(part):
    figure, alt, data = drawn(f"{part}_ideas")
    for is_kept, gid in ((True, "kept"), (False, "not kept")):
        rows = [row for row in data["rows"] if row["kept"] == is_kept]
        bars = tagged(figure, gid)
        assert rows and [bar.get_x() for bar in bars] == [row["low"] for row in rows]
        ends = [bar.get_x() + bar.get_width() for bar in bars]
        assert ends == pytest.approx([max(min(row["high"], ideas.CUT), row["low"] + 0.004) for row in rows])
        assert all(bool(bar.get_hatch()) != is_kept for bar in bars)
    assert len(tagged(figure, "cut")) == sum(row["high"] > ideas.CUT for row in data["rows"])
    assert data["setting"] in alt and part in figure.get_suptitle()


@pytest.fixture
def by_hand(monkeypatch):
    """A record of two ideas: one is in use without a mask and not with one, the other failed."""

    def row(idea, kept, with_it, causal, N, kv_heads=2):
        where = dict(part="backward", idea=idea, kept=kept, d=64, causal=causal, N_q=N, heads=2, kv_heads=kv_heads)
        return dict(problem=where, values={"with it": [with_it, 0, 9], "without it": [3.0, 0, 9], "cuDNN": [1.0]})

    rows = [row("turns", True, 2.0, False, 1024), row("turns", True, 2.5, False, 4096)]
    rows += [row("turns", False, 4.0, True, 4096, kv_heads=1), row("spilled", False, 1.0, True, 4096)]
    del rows[-1]["values"]["with it"]
    machine = dict(gpu="H", torch="2", triton="3")
    monkeypatch.setattr(ideas, "measured", lambda suite: dict(rows=rows, machine=machine))


def test_worth_is_time_without_over_time_with_from_the_record(by_hand):
    bars = backward_ideas.data()["rows"]
    assert forward_ideas.data()["rows"] == []
    assert bars == [
        dict(idea="turns", kept=True, shape="d 64, full, N 1,024, 4,096", low=1.2, high=1.5),
        dict(idea="turns", kept=False, shape="d 64, causal, N 4,096, 2 heads on 1", low=0.75, high=0.75),
    ]


def test_the_table_has_a_line_for_each_idea_and_italics_where_it_is_not_in_use(by_hand):
    head, _, *lines = ideas.ideas_table("backward").split("\n")
    assert head == "| idea | d 64 full | d 64 causal | d 128 full | d 128 causal |"
    row = "| turns | 1,024: 1.50<br>4,096: 1.20 | *4,096, 2 heads on 1: 0.75* |  |  |"
    assert lines == [row.replace(": ", ":\N{NO-BREAK SPACE}")]
    assert ideas.ideas_table("forward", "host").count("\n") == 1
    assert len(ideas.data("backward", most=1)["rows"]) == 1


def test_the_table_of_decode_has_a_column_for_each_cache(monkeypatch):
    tried = [("teams", True, 8, 4.0), ("teams", True, 1, 2.0), ("8 warps", False, 16, 2.5)]
    where = dict(part="decode", d=128, causal=False, N_q=1, N_k=4096, heads=32, kv_heads=8)
    rows = [
        dict(problem=where | dict(idea=idea, kept=kept, batch=batch), values={"with it": [2.0], "without it": [ms]})
        for idea, kept, batch, ms in tried
    ]
    monkeypatch.setattr(ideas, "measured", lambda suite: dict(rows=rows))
    head, _, *lines = ideas.ideas_table("decode").split("\n")
    assert head == "| idea | 1 × 4,096 keys, d 128 | 8 × 4,096 keys, d 128 | 16 × 4,096 keys, d 128 |"
    assert lines == ["| teams | 1.00 | 2.00 |  |", "| 8 warps |  |  | *1.25* |"]


def test_the_recorded_table_has_every_measured_idea():
    parts = {row["part"] for row in ideas.worths()}
    assert parts == {"forward", "backward", "host", "decode"}
    found = [line.split(" | ")[0] for part in parts for line in ideas.ideas_table(part).split("\n")[2:]]
    assert len(found) == len({(row["part"], row["idea"]) for row in ideas.worths()}) >= 40


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_the_picture_has_the_ten_that_change_most_the_best_first(part):
    rows = ideas.data(part)["rows"]
    worths = [ideas.worth(row) for row in rows]
    assert len(rows) == 10 and worths == sorted(worths, reverse=True)
    most = sorted((max(row["worth"], 1 / row["worth"]) for row in ideas.worths() if row["part"] == part), reverse=True)
    assert max(worths[0], 1 / worths[-1]) == most[0] and min(max(x, 1 / x) for x in worths) < most[9]


def test_what_cannot_be_repeated_says_so_itself():
    said = json.loads((RECORDED / "earlier_ideas.json").read_text(encoding="utf-8"))
    assert "no command repeats them" in said["about"] and 5 <= len(said["rows"]) <= 12
    assert all(set(row) == {"part", "idea", "shape", "bought"} for row in said["rows"])
    assert sum(ideas.earlier_table(part).count("\n") - 1 for part in ("forward", "backward")) == len(said["rows"])
    again = {row["idea"] for row in ideas.worths()} & {row["idea"] for row in said["rows"]}
    assert not again, "these are measured"


def test_spans_are_written_short():
    assert ideas.span(dict(low=1.0, high=1.07)) == "× 1.00 to 1.07"
    assert ideas.span(dict(low=0.972, high=0.968)) == "× 0.97"
