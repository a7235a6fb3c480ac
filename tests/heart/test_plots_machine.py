"""Pictures of the machine: what goes in is right by another computation, and what comes out shows all of it."""

import re
from collections import Counter

import numpy as np
import pytest
from pictures import drawn, tagged, words

from fa2_lab import records
from fa2_lab.machine import chips
from fa2_lab.machine.warps import BYTES
from fa2_lab.plots import (
    backward_graph,
    block_budget,
    hbm_traffic,
    style,
    warp_split,
    waves,
    workers,
)

# Workers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_owners_and_writers_by_hand(causal):
    _, _, data = drawn("workers")
    for i in range(4):
        for j in range(4):
            seen = j <= i or not causal
            assert data["owners"]["forward", causal][i, j] == (i if seen else -1)
            assert data["owners"]["backward", causal][i, j] == (j if seen else -1)
        assert list(data["dq_writers"][causal][i]) == list(range(i + 1 if causal else 4))


def test_every_tile_has_its_workers_colour_and_name():
    figure, _, data = drawn("workers")
    for ax, key in zip(figure.axes, [(w, c) for w in ("forward", "backward") for c in (False, True)], strict=True):
        owner = data["owners"][key]
        assert len(tagged(ax, "skipped")) == np.sum(owner < 0)
        for k in range(4):
            tiles = tagged(ax, f"tile of {k}")
            assert {(int(t.get_y()), int(t.get_x())) for t in tiles} == set(
                map(tuple, np.argwhere(owner == k).tolist())
            )
            assert {t.label_text.get_text() for t in tiles} == {str(k + 1)}
            assert {style.colors.to_hex(t.get_facecolor()).upper() for t in tiles} == {style.worker(k)}


def test_collisions_on_dq_are_drawn_as_writers_in_a_row():
    figure, alt, data = drawn("workers")
    for column, causal in enumerate((False, True)):
        forward, below = figure.axes[column], figure.axes[2 + column]
        for i, who in enumerate(data["dq_writers"][causal]):
            assert [b.label_text.get_text() for b in tagged(below, f"writes dQ{i}")] == [str(k + 1) for k in who]
            assert len(tagged(forward, f"writes O{i}")) == 1
        assert [len(tagged(below, tensor)) for tensor in ("dQ", "dK", "dV")] == [4, 4, 4]
    assert "1, 2, 3, 4 under a causal mask" in alt


def test_only_gradients_have_a_dashed_edge():
    figure, _, _ = drawn("workers")
    assert {b.get_linestyle() for b in tagged(figure, "O")} == {"-"}
    assert all(b.get_linestyle() != "-" for tensor in ("dQ", "dK", "dV") for b in tagged(figure, tensor))


# Waves ------------------------------------------------------------------------------------------------------


def test_schedules_by_hand():
    _, _, data = drawn("waves")
    fa1, fa2, by_row, heaviest = data["ran"].values()
    assert (len(fa1.placed), fa1.SMs_used, fa1.makespan) == (32, 32, 16 * 16)
    assert (len(fa2.placed), fa2.SMs_used, fa2.makespan) == (512, 132, 4 * 16)  # four waves of 132
    assert sum(p.end - p.start for p in by_row.placed) == sum(p.end - p.start for p in heaviest.placed) == 32 * 136
    assert heaviest.makespan == -(-32 * 136 // 132) + 1 < by_row.makespan


@pytest.mark.parametrize("panel", range(4))
def test_every_block_is_a_bar_where_it_ran(panel):
    figure, _, data = drawn("waves")
    schedule, ax = list(data["ran"].values())[panel], figure.axes[panel]
    places = []
    for bars in tagged(ax, "blocks"):
        for box in bars.get_path().vertices.reshape(-1, 5, 2):
            places.append((*box.min(axis=0), *box.max(axis=0)))
    assert sorted(places) == sorted((p.start, p.SM, p.end, p.SM + 1) for p in schedule.placed)
    greys = [style.colors.to_hex(bars.get_facecolor()).upper() for bars in tagged(ax, "blocks")]
    assert greys == list(style.WORKERS[1:3])
    (end,) = tagged(ax, "end")
    assert set(end.get_xdata()) == {schedule.makespan} and f"ends at {schedule.makespan:g}" in words(ax)
    assert f"{schedule.utilisation:.0%} busy" in ax.get_title(loc="left")


def test_all_schedules_have_one_time_scale():
    figure, _, data = drawn("waves")
    widths = {(*ax.get_xlim(), ax.get_position().x0, ax.get_position().width) for ax in figure.axes}
    assert len(widths) == 1 and next(iter(widths))[1] == max(s.makespan for s in data["ran"].values())


def test_neighbours_on_a_line_differ():
    figure, _, data = drawn("waves")
    schedule = list(data["ran"].values())[2]
    corners = [bars.get_path().vertices[::5] for bars in tagged(figure.axes[2], "blocks")]
    starts = [{(SM, start) for start, SM in places} for places in corners]
    for p, turn in zip(schedule.placed, waves.turns(schedule), strict=True):
        assert (p.SM, p.start) in starts[turn % 2]


def test_turns_count_the_blocks_of_one_sm():
    _, _, data = drawn("waves")
    for schedule in data["ran"].values():
        turn = waves.turns(schedule)
        for SM in range(schedule.SMs):
            mine = [(p.start, turn[n]) for n, p in enumerate(schedule.placed) if p.SM == SM]
            assert [t for _, t in sorted(mine)] == list(range(len(mine)))


# Warps ------------------------------------------------------------------------------------------------------


def test_bytes_of_a_tile_by_hand():
    _, _, data = drawn("warp_split")
    b, c, d, W = (data[name] for name in ("B_r", "B_c", "d", "W"))
    copied = {("write", "K"): 2 * c * d, ("write", "V"): 2 * c * d}
    reads = {("read", "Q"): 2 * b * d, ("read", "K"): W * 2 * c * d, ("read", "V"): W * 2 * c * d}
    assert data["moved"]["split_q"] == copied | reads
    split_k = data["moved"]["split_k"]
    assert split_k["write", "PV"] == split_k["read", "PV"] == W * b * d * 4
    assert split_k["read", "Q"] == W * 2 * b * d and split_k["read", "K"] == split_k["read", "V"] == 2 * c * d
    assert [sum(data["barriers"][s].values()) for s in ("split_k", "split_q")] == [3, 2]
    assert 2 * sum(data["moved"]["split_q"].values()) < sum(split_k.values())
    assert set(BYTES) >= {tensor for _, tensor in split_k}


def test_what_is_split_has_the_names_of_its_warps_and_what_all_see_is_whole():
    figure, _, data = drawn("warp_split")
    split_k, split_q = figure.axes[:2]
    cut = {split_k: "KVSO", split_q: "QSO"}
    for ax, tensors in cut.items():
        for tensor in "QKVSO":
            parts, whole = tagged(ax, f"{tensor} part"), tagged(ax, f"{tensor} whole")
            assert (len(parts), len(whole)) == ((data["W"], 0) if tensor in tensors else (0, 1)), tensor
            assert all(box.label_text.get_text() == "all\nwarps" for box in whole)
        chips = tagged(ax, "warp")
        assert Counter(b.label_text.get_text() for b in chips) == dict.fromkeys("1234", len(tensors))
        for chip in chips:  # each lies in a part, and in the middle of it but where parts lie on each other
            x, y = chip.get_x() + 0.25, chip.get_y() + 0.25
            assert any(p.get_x() < x < p.get_x() + p.get_width() and p.get_y() < y < p.get_y() + p.get_height()
                       for tensor in tensors for p in tagged(ax, f"{tensor} part"))  # fmt: skip


def test_keys_are_cut_where_keys_run_and_queries_where_queries_run():
    figure, _, data = drawn("warp_split")
    W = data["W"]
    shape = (
        {"K": (1, W / 2), "V": (W / 2, 1), "S": (1, W), "O": (W / 2, W)},
        {"Q": (W / 2, 1), "S": (W, 1), "O": (W / 2, 1)},
    )
    for ax, expected in zip(figure.axes[:2], shape, strict=True):  # the parts of O have full size under split-K only
        for tensor, size in expected.items():
            assert {(p.get_width(), p.get_height()) for p in tagged(ax, f"{tensor} part")} == {size}, tensor


def test_segments_add_up_to_the_bytes():
    figure, alt, data = drawn("warp_split")
    bars = figure.axes[-1]
    for tensor in ("Q", "K", "V", "max", "sum", "PV"):
        drawn_bytes = 1024 * sum(segment.get_width() for segment in tagged(bars, f"{tensor} bytes"))
        assert drawn_bytes == sum(n for moved in data["moved"].values() for (_, t), n in moved.items() if t == tensor)
    for scheme, moved in data["moved"].items():
        total = f"{warp_split.kib(sum(moved.values()))} KiB"
        assert f"{total}\n{sum(data['barriers'][scheme].values())} barriers" in words(bars) and total in alt


# Budget -----------------------------------------------------------------------------------------------------


def test_needs_and_verdicts_by_hand():
    _, _, data = drawn("block_budget")
    for d, table in data["cells"].items():
        assert set(table) == {(r, c) for r in data["sizes"] for c in data["sizes"]}
        for (B_r, B_c), cell in table.items():
            shared = 2 * (B_r * d + 2 * 2 * B_c * d)  # Q once, K and V twice, two bytes each
            assert cell["shared"] == shared
            could = {name for name, room in data["limits"].items() if shared <= room}
            assert set(cell["fits_on"]) <= could
            assert cell["registers"] > 255 or set(cell["fits_on"]) == could
    assert data["limits"] == {"RTX 4090": 99 * 1024, "A100": 163 * 1024, "H100": 227 * 1024}


def test_every_cell_shows_what_it_needs_and_where_it_fits():
    data = drawn("block_budget")[2]
    figure, alt = block_budget.draw(**data | dict(compiled=None))
    for ax, (d, table) in zip(figure.axes, data["cells"].items(), strict=True):
        assert f"d = {d}" in ax.get_title(loc="left")
        names = ("registers", "shared")
        bars = {name: {(int(b.get_y()), int(b.get_x())): b for b in tagged(ax, name)} for name in names}
        for (B_r, B_c), cell in table.items():
            at = data["sizes"].index(B_r), data["sizes"].index(B_c)
            for name, needs, most in (("registers", cell["registers"], 255), ("shared", cell["shared"] / 1024, 227)):
                assert bars[name][at].get_width() == pytest.approx(0.4 * min(needs / most, 1.25))
            words = {t.get_text() for t in ax.texts if (int(t.get_position()[1]), int(t.get_position()[0])) == at}
            verdict = block_budget.verdict(cell, data["limits"])
            assert words - {verdict} == {f"{cell['shared'] // 1024}", f"{cell['registers']}"}
            assert (verdict in words) == (verdict != "all chips")
            (box,) = [p for p in ax.patches if (p.get_y(), p.get_x()) == at and p.get_width() == 1]
            missing = len(data["limits"]) - len(cell["fits_on"])
            strength = 0.32 if missing == len(data["limits"]) else 0.14 * missing
            assert style.colors.same_color(box.get_facecolor(), style.tint(style.INK, strength))
    assert "no compilation is recorded yet" in alt


def test_verdicts_in_words():
    limits = {"A": 1, "B": 2, "C": 3}
    assert block_budget.verdict(dict(fits_on=("A", "B", "C"), limit=""), limits) == "all chips"
    assert block_budget.verdict(dict(fits_on=("C",), limit=""), limits) == "C"
    assert block_budget.verdict(dict(fits_on=(), limit="registers"), limits) == "spills"
    assert block_budget.verdict(dict(fits_on=(), limit="shared memory"), limits) == "too large"


def test_what_spilled_when_it_was_compiled_is_crossed():
    figure, alt = block_budget.draw(**drawn("block_budget")[2] | dict(compiled={128: {(256, 64): 1200, (32, 32): 0}}))
    (cross,) = tagged(figure, "spilled")
    assert cross.axes is figure.axes[1] and [int(cross.get_ydata()[0]), int(cross.get_xdata()[0])] == [3, 1]
    assert "compiled kernel spills" in alt


# Backward ---------------------------------------------------------------------------------------------------


def test_the_meter_counts_five_products_and_every_addition_to_dq():
    _, _, data = drawn("backward_graph")
    assert data["products"] == 5 == sum(map(len, data["passes"]["One pass"].values()))
    assert sum(map(len, data["passes"]["Two passes"].values())) == 7
    assert data["dq_additions"] == data["T"] ** 2


WHAT_IT_TAKES = {  # by the chain rule
    "S": "Q K", "P": "S L", "dP": "dO V", "dS": "P dP D", "dV": "P dO", "dK": "dS Q", "dQ": "dS K",
}  # fmt: skip


def test_an_arrow_leads_from_everything_that_a_formula_takes():
    figure, _, _ = drawn("backward_graph")
    boxes = {p.label_text.get_text(): p for p in figure.axes[0].patches if hasattr(p, "label_text")}
    named = {label.split(" = ")[0].split(":")[0].split()[-1]: box for label, box in boxes.items()}
    arrows = [text for text in figure.axes[0].texts if getattr(text, "arrow_patch", None) is not None]
    found = set()
    for arrow in arrows:
        (start,), (end,) = ([name for name, box in named.items() if on_edge(at, box)] for at in (arrow.xyann, arrow.xy))
        found.add((start, end))
    assert found == {(start, end) for end, takes in WHAT_IT_TAKES.items() for start in takes.split()}
    assert len(arrows) == len(found) == 15
    for label in boxes:
        name, _, formula = label.removeprefix(label[0] if label[0] in "①②③④⑤" else "").strip().partition(" = ")
        if name in WHAT_IT_TAKES:
            letters = re.findall(r"d?[A-Z]", formula.replace("ᵀ", ""))
            assert sorted(letters) == sorted(WHAT_IT_TAKES[name].split()), label
    products = [label for label in boxes if label[0] in "①②③④⑤"]
    assert sorted(p[0] for p in products) == list("①②③④⑤")


def on_edge(point, box):
    """Whether a point lies on the border of a box."""
    (x, y), (x0, y0) = point, box.get_xy()
    (x1, y1), inside = (x0 + box.get_width(), y0 + box.get_height()), 1e-9
    across = x0 - inside <= x <= x1 + inside and min(abs(y - y0), abs(y - y1)) < inside
    down = y0 - inside <= y <= y1 + inside and min(abs(x - x0), abs(x - x1)) < inside
    return across or down


def test_formulas_in_the_boxes_give_the_gradients():
    rng, tau, step = np.random.default_rng(1), 0.7, 1e-6
    Q, K, V, dO = rng.standard_normal((4, 6, 3))
    S = tau * Q @ K.T
    P = np.exp(S - np.log(np.exp(S).sum(axis=1, keepdims=True)))
    dS = P * (dO @ V.T - (dO * (P @ V)).sum(axis=1, keepdims=True))
    gradients = {"Q": tau * dS @ K, "K": tau * dS.T @ Q, "V": P.T @ dO}

    def loss(**moved):
        x = dict(Q=Q, K=K, V=V) | moved
        e = np.exp(tau * x["Q"] @ x["K"].T)
        return (dO * (e / e.sum(axis=1, keepdims=True) @ x["V"])).sum()

    for name, base in (("Q", Q), ("K", K), ("V", V)):
        direction = rng.standard_normal(base.shape)
        slope = (loss(**{name: base + step * direction}) - loss(**{name: base - step * direction})) / (2 * step)
        assert slope == pytest.approx((gradients[name] * direction).sum(), rel=1e-6)
    said = {label for *_, label, _ in backward_graph.NODES.values()}
    assert {"① S = τ Q Kᵀ", "③ dV = Pᵀ dO", "④ dK = τ dSᵀ Q", "⑤ dQ = τ dS K", "dS = P ∘ (dP − D)"} <= said


def test_boxes_arrows_and_what_is_white():
    figure, _, data = drawn("backward_graph")
    graph, ways = figure.axes
    kinds = Counter(kind for *_, kind in backward_graph.NODES.values())
    assert {kind: len(tagged(graph, kind)) for kind in kinds} == kinds
    paper = style.colors.to_rgba(style.PAPER)
    assert all(
        (box.get_facecolor() == paper) == (box.get_gid() == "again") for kind in kinds for box in tagged(graph, kind)
    )
    boxes = tagged(ways, "product")
    assert len(boxes) == 12
    white = [box.label_text.get_text() for box in boxes if box.get_facecolor() == paper]
    assert white == ["S", "S", "S", "dP"]
    assert data["T"] == 4 and any("all 4 workers (T_c = 4)" in text for text in words(ways))


# All --------------------------------------------------------------------------------------------------------


def test_what_nobody_has_measured_is_none_and_what_is_broken_is_not_hidden(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    assert hbm_traffic.counters(64) is None and block_budget.compiled_spills() is None
    rows = [dict(d=64, B_r=128, B_c=64, spills=3), dict(d=128, B_r=64, B_c=64, spills=0)]
    (tmp_path / "compiled.json").write_text(f'{{"forward": {str(rows).replace(chr(39), chr(34))}}}', encoding="utf-8")
    assert block_budget.compiled_spills() == {64: {(128, 64): 3}, 128: {(64, 64): 0}}
    (tmp_path / "bench_ladder.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError):
        hbm_traffic.counters(64)


def test_workers_function_takes_any_size():
    owners = {(way, c): np.array([[0, -1], [0, 1], [0, 1]]) for way in ("forward", "backward") for c in (False, True)}
    figure, alt = workers.draw(owners, {c: [[0], [0, 1], [0, 1]] for c in (False, True)})
    assert "grids of 3 by 2 tiles" in alt and len(tagged(figure, "dQ")) == 6


# gpu_map --------------------------------------------------------------------------------------------------------


def test_the_map_s_areas_and_bars_are_the_chips_numbers():
    figure, alt, data = drawn("gpu_map")
    boxes = {p.get_gid(): p for p in figure.findobj(style.Rectangle) if p.get_gid()}
    full = {"A100": "A100 SXM 80GB", "H100": "H100 SXM", "H200": "H200", "B200": "B200"}
    assert list(data["chips"]) == list(full)
    scale = boxes["H200 HBM"].get_width() ** 2 / chips.H200.hbm_bytes
    for name, chip in ((short, chips.named(long)) for short, long in full.items()):
        sizes = {"registers": 4 * 65536 * chip.SMs, "shared memory": chip.shared_per_sm * chip.SMs}
        sizes |= {"L2": chip.l2_bytes, "HBM": chip.hbm_bytes}
        for place, size in sizes.items():
            box = boxes[f"{name} {place}"]
            assert box.get_width() == box.get_height() == pytest.approx((scale * size) ** 0.5)
            if place != "HBM":
                assert boxes[f"{name} {place} large"].get_width() == pytest.approx(14 * box.get_width())
        clocks = chip.SMs * chip.clock_hz
        speeds = {"registers": 12 * chip.fp32_per_clock * clocks, "shared memory": 128 * clocks}
        speeds |= {"HBM": chip.hbm_per_second, "link to other GPUs": chip.link_per_second}
        assert {p: boxes[f"{name} {p} speed"].get_width() for p in speeds} == pytest.approx(speeds)
        assert f"{name} L2 speed" not in boxes  # nobody prints one
        assert f"HBM {chip.hbm_bytes / 2**30:.0f} GiB" in alt


# dq_over_time ---------------------------------------------------------------------------------------------------


def test_every_write_of_dq_is_drawn_when_its_last_product_ends():
    figure, alt, _ = drawn("dq_over_time")
    T, one_pass, two_passes = 4, *figure.axes
    right_edges = {}
    for name, ax in (("atomic", one_pass), ("own", two_passes)):
        for p in ax.findobj(style.Rectangle):
            if (p.get_gid() or "").startswith("write"):
                _, i, who = re.fullmatch(r"(write) (\d) by (.*)", p.get_gid()).groups()
                assert p.get_y() == pytest.approx(T + 0.42 + int(i)) and (name, int(i)) not in right_edges
                shown = f"× {T}" if name == "atomic" else i
                assert p.label_text.get_text() == shown
                right_edges[name, int(i)] = who.split(","), p.get_x() + p.get_width()
    for i in range(T):
        atomic, own = right_edges["atomic", i], right_edges["own", i]
        assert sorted(atomic[0]) == [f"column {j}" for j in range(T)]
        assert atomic[1] == pytest.approx(5 * (i + 1))  # all at once, after five products a tile
        assert own == ([f"row {i}"], pytest.approx(T * (4 + 3)))
    assert "16 writes of a block, up to 4 at once" in alt and "28 products long, 4 writes" in alt


def test_every_tile_takes_its_products_on_one_sm():
    figure, *_ = drawn("dq_over_time")
    for ax, widths in zip(figure.axes, ({"column": 5}, {"column": 4, "row": 3}), strict=True):
        boxes = [p for p in ax.findobj(style.Rectangle) if " rows " in (p.get_gid() or "")]
        assert len(boxes) == 16 * len(widths)
        for p in boxes:
            kind, n, _, i = p.get_gid().split()
            step = int(i) if kind == "column" else (p.get_x() - 16) / 3
            since = 16 if kind == "row" else 0
            assert p.get_x() == since + widths[kind] * step and p.get_width() == widths[kind]
            assert p.get_y() == pytest.approx(int(n) + 0.06)
            shown = f"dQ {i}" if kind == "row" else f"+ dQ {i}" if len(widths) == 1 else "dK, dV"
            assert p.label_text.get_text() == shown


# ladder ---------------------------------------------------------------------------------------------------------


def test_rungs_stand_under_what_they_make_smaller():
    figure, alt, data = drawn("ladder")
    heads = sorted(tagged(figure, "group"), key=lambda text: text.get_position()[1])
    assert [text.get_text() for text in heads] == list(data["groups"])
    height = {text.get_text(): text.get_position()[1] for text in figure.findobj(style.Text)}
    ends = [*(text.get_position()[1] for text in heads[1:]), height["On a GPU"]]
    for head, end, rungs in zip(heads, ends, data["groups"].values(), strict=True):
        assert all(head.get_position()[1] < height[rung.name] < end for rung in rungs)
        assert len({rung.unit for rung in rungs}) == 1 or head.get_text() == "Numbers kept"  # of a row, or of a head
    assert alt.count("÷") == sum(rung.after is not None for rungs in data["groups"].values() for rung in rungs) == 9


def test_bars_of_a_rung_have_its_factor():
    figure, _, data = drawn("ladder")
    rungs = [rung for rungs in data["groups"].values() for rung in rungs if rung.after]
    height = {text.get_text(): text.get_position()[1] - 0.31 for text in figure.findobj(style.Text)}
    lengths = {}
    for bar in tagged(figure, "amount"):
        for top, when in ((0.15, "before"), (0.52, "after")):
            name = next((r.name for r in rungs if abs(bar.get_y() - height[r.name] - top) < 1e-9), None)
            if name:
                lengths[name, when] = lengths.get((name, when), 0) + bar.get_width()
    for rung in rungs:
        assert lengths[rung.name, "before"] / lengths[rung.name, "after"] == pytest.approx(rung.factor)
    said = {rung.name: rung.factor for rung in rungs}
    assert (said["Online softmax"], said["Backward"]) == (8192 / 66, 8192)
