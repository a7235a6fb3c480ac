"""Pictures of who sees whom: causal tiles, intervals, grouped heads, the orders of dropout."""

import numpy as np
import pytest
from matplotlib.colors import same_color
from matplotlib.patches import PathPatch
from matplotlib.text import Annotation
from pictures import boxes, drawn, lines, titled

from fa2_lab.plots import (
    causal_tiles,
    dropout_orders,
    intervals,
    style,
)
from fa2_lab.reference.dropout import keep_mask
from fa2_lab.tiles import Tile

# Causal tiles -------------------------------------------------------------------------------------------------


def test_tiles_are_drawn_as_the_mask_cuts_them():
    figure, _, data = drawn("causal_tiles")
    for ax, (name, tiling) in zip(figure.axes, data["tilings"].items(), strict=False):
        assert ax.get_title(loc="left").startswith(name)
        visible = np.tril(np.ones((tiling.N_q, tiling.N_k), bool), tiling.N_k - tiling.N_q)
        for patch in boxes(ax):
            x, y, w, h = (round(v) for v in (*patch.get_xy(), patch.get_width(), patch.get_height()))
            seen = visible[y : y + h, x : x + w]
            kind = "FULL" if seen.all() else "DIAGONAL" if seen.any() else "SKIP"
            assert bool(patch.get_hatch()) == (kind == "SKIP")
            assert same_color(patch.get_facecolor()[:3], style.hue("S")) == (kind == "FULL")
        assert len(boxes(ax)) == tiling.T_r * tiling.T_c == tiling.counts().total()


def test_the_printed_counts_are_those_of_the_boxes():
    figure, _, data = drawn("causal_tiles")
    for ax, tiling in zip(figure.axes, data["tilings"].values(), strict=False):
        skipped = sum(bool(p.get_hatch()) for p in boxes(ax))
        full = len(boxes(ax, style.hue("S")))
        shown = {t.get_text() for t in ax.texts}
        assert {f"SKIP\n{skipped}", f"FULL\n{full}"} <= shown
        assert f"{tiling.T_r * tiling.T_c - skipped - full} DIAGONAL" in ax.get_xlabel()


def test_the_shares_are_the_exact_ratio():
    figure, _, data = drawn("causal_tiles")
    for size, (formula, counted) in data["shares"].items():
        exact = [(n // size + 1) / (2 * (n // size)) for n in data["N"]]
        assert formula == pytest.approx(exact) and counted == pytest.approx(exact)
    assert [causal_tiles.visited_share(t) for t in data["tilings"].values()] == [36 / 64, 20 / 32, 26 / 32]
    curves = [line.get_ydata() for line in lines(titled(figure, "Tiles computed")) if len(line.get_xdata()) > 2]
    assert len(curves) == 2 * len(data["shares"]) and all(np.all(np.diff(c) < 0) for c in curves)


def test_the_example_is_the_first_grid():
    figure, _, data = drawn("causal_tiles")
    tiling = next(iter(data["tilings"].values()))
    assert tiling.counts() == {Tile.SKIP: 28, Tile.DIAGONAL: 8, Tile.FULL: 28}
    assert any("36 of 64 tiles, 1.78 times" in t.get_text() for t in titled(figure, "Tiles computed").texts)


# Intervals ----------------------------------------------------------------------------------------------------


def test_each_mask_s_tiles_are_those_of_its_definition():
    """Tile by tile against the mask entry by entry; documents see only themselves."""
    figure, _, data = drawn("intervals")
    r, c = np.indices((data["N"], data["N"]))
    document = np.repeat(range(3), [tiling.N_q for _, tiling in list(data["masks"].values())[4]])
    causal = c <= r
    window = causal & (r - c <= 8)
    both, padded = (r - c <= 8) & (c - r <= 4), causal & (c < 20)
    definitions = [causal, window, both, padded, causal & (document[:, None] == document), window]
    for ax, seen, name in zip(figure.axes, definitions, data["masks"], strict=False):
        assert ax.get_title(loc="left").startswith(name)
        shown = seen
        tiles = [p for p in boxes(ax) if p.get_gid() in ("FULL", "DIAGONAL", "SKIP")]
        for patch in tiles:
            x, y, w, h = (round(v) for v in (*patch.get_xy(), patch.get_width(), patch.get_height()))
            tile = seen[y : y + h, x : x + w]
            assert patch.get_gid() == ("FULL" if tile.all() else "DIAGONAL" if tile.any() else "SKIP"), (name, x, y)
            assert bool(patch.get_hatch()) == (patch.get_gid() == "SKIP")
            seen = seen & ~((y <= r) & (r < y + h) & (x <= c) & (c < x + w))
        assert not seen.any(), f"{name}: a key that is seen lies in no tile"
        visited = sum(p.get_gid() != "SKIP" for p in tiles)
        assert f"\n{visited} " in ax.get_title(loc="left")
        (bar,) = (p for p in boxes(ax) if p.get_gid() == "row")
        keys = np.flatnonzero(shown[data["row"]])
        assert (bar.get_y(), bar.get_x(), bar.get_width()) == (data["row"], keys[0], len(keys)), name
        assert f"[{keys[0]}, {keys[-1] + 1})" in {t.get_text() for t in ax.texts}
    assert intervals.visited_tiles(data["masks"]["causal"]) == 36


# Grouped heads ------------------------------------------------------------------------------------------------


def test_running_shows_who_reads_and_who_adds():
    _, _, data = drawn("grouped_heads")
    assert [layout["key_heads"] for layout in data["layouts"].values()] == [8, 2, 1]
    for layout in data["layouts"].values():
        group = data["heads"] // layout["key_heads"]
        expected = [(h, h // group) for h in range(data["heads"])]
        assert layout["reads"] == expected and layout["adds"] == expected


def test_every_pair_is_a_line_above_and_an_arrow_below():
    figure, _, data = drawn("grouped_heads")
    columns = len(data["layouts"])
    for k, layout in enumerate(data["layouts"].values()):
        above, below = figure.axes[k], figure.axes[k + columns]
        ends = {(round(x0 - 0.5), x1) for (x0, _), (x1, _) in (line.get_xydata() for line in lines(above))}
        width = data["heads"] / layout["key_heads"]
        assert ends == {(h, (g + 0.5) * width) for h, g in layout["reads"]}
        assert len([t for t in below.texts if isinstance(t, Annotation)]) == len(layout["adds"])
        for ax in (above, below):
            assert len(boxes(ax)) == data["heads"] + 2 * layout["key_heads"]


def test_gradients_are_dashed_and_tensors_are_not():
    figure, _, _ = drawn("grouped_heads")
    for k, ax in enumerate(figure.axes):
        assert {b.get_linestyle() in ("-", "solid") for b in boxes(ax)} == {k < 3}


# Dropout ------------------------------------------------------------------------------------------------------


def test_the_keyed_mask_is_the_whole_mask_in_either_order():
    _, _, data = drawn("dropout_orders")
    whole = keep_mask(data["p"], 7, 0, 0, np.arange(16), np.arange(16))
    for mask in data["masks"]["keyed"].values():
        assert np.array_equal(mask, whole)


def test_the_sequential_masks_are_one_stream_of_numbers_laid_out_in_two_orders():
    _, _, data = drawn("dropout_orders")
    tiles = (np.random.default_rng(7).random(256) >= data["p"]).reshape(-1, data["B_r"], data["B_c"])
    T_r, T_c = 16 // data["B_r"], 16 // data["B_c"]
    by_rows = np.block([[tiles[i * T_c + j] for j in range(T_c)] for i in range(T_r)])
    by_columns = np.block([[tiles[j * T_r + i] for j in range(T_c)] for i in range(T_r)])
    assert np.array_equal(data["masks"]["sequential"]["FA2"], by_rows)
    assert np.array_equal(data["masks"]["sequential"]["FA1"], by_columns)
    assert (by_rows != by_columns).mean() > 0.2


def test_both_orders_visit_every_tile_once():
    tiling = dropout_orders.Tiling(12, 10, 4, 3)
    for name, tiles in dropout_orders.orders(tiling).items():
        assert sorted(tiles) == [(i, j) for i in range(3) for j in range(4)]
        assert tiles[1] == ((1, 0) if name == "FA1" else (0, 1))


def test_as_many_squares_as_entries_and_the_share_is_printed():
    figure, _, data = drawn("dropout_orders")
    for row, orders in enumerate(data["masks"].values()):
        differ = orders["FA1"] != orders["FA2"]
        for ax, filled in zip(figure.axes[3 * row :], (orders["FA1"], orders["FA2"], differ), strict=False):
            (squares,) = [p for p in ax.patches if isinstance(p, PathPatch)]
            corners = squares.get_path().vertices.reshape(-1, 5, 2)[:, 0].astype(int)
            assert sorted(map(tuple, corners[:, ::-1])) == sorted(map(tuple, np.argwhere(filled)))
        assert figure.axes[3 * row + 2].get_title(loc="left") == f"Same fate: {1 - differ.mean():.0%}"


def test_the_ragged_edge_shows_every_offset_once_and_masks_what_lies_behind_the_head():
    figure, alt, _ = drawn("ragged_edge")
    boxes = {p.get_gid(): p for p in figure.findobj(style.Rectangle) if p.get_gid()}
    N, d, B_r, i = 10, 4, 4, 2
    assert sum(gid.startswith("memory") for gid in boxes) == (i + 1) * B_r * d
    for r in range(B_r):
        for c in range(d):
            element = (i * B_r + r) * d + c
            asked, got = (boxes[f"{title} {r} {c}"] for title in ("offsets of its tile", "what the load returns"))
            assert asked.label_text.get_text() == str(element)
            there = element < N * d
            assert got.label_text.get_text() == (str(element) if there else "0")
            assert (got.get_hatch() is None) == there
            place = boxes[f"memory {element}"]
            assert (place.get_x(), place.get_y()) == (c, i * B_r + r)
    assert "rows 8 to 11" in alt and "32 to 47" in alt
