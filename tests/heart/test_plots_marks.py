"""What stands beside the marks of pictures, and where: ticks, labels, arrows and fills, against numbers by hand."""

import re
from collections import Counter
from itertools import accumulate, pairwise

import pytest
from matplotlib.colors import same_color
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation
from pictures import drawn, tagged, words

from fa2_lab.plots import (
    backward_graph,
    block_budget,
    flop_costs,
    gpu_map,
    ladder,
    style,
    three_softmaxes,
    visiting_order,
)


def rectangles(ax):
    return [patch for patch in ax.patches if isinstance(patch, Rectangle)]


def label(patch):
    return patch.label_text.get_text() if hasattr(patch, "label_text") else ""


def inside(point, box):
    """Whether a point lies in a box or on its edge."""
    (x, y), near = point, 1e-6
    across = box.get_x() - near <= x <= box.get_x() + box.get_width() + near
    return across and box.get_y() - near <= y <= box.get_y() + box.get_height() + near


def at(ax, text):
    """Where a text stands, which stands there once."""
    (found,) = (t for t in ax.texts if t.get_text() == text)
    return found.get_position()


# Ticks --------------------------------------------------------------------------------------------------------

LOGARITHMIC = ("time_and_memory", "quadratic_memory", "three_softmaxes", "causal_tiles", "hbm_traffic", "roofline",
               "speed", "programs", "ring_schedule", "ring_speed", "forward_ideas")  # fmt: skip
EXPONENTS = dict(zip(["", "k", "Ki", "M", "Mi", "G", "MiB", "GiB", "TiB"], [0, 1, 1, 2, 2, 3, 2, 3, 4], strict=True))


@pytest.mark.parametrize("name", LOGARITHMIC)
def test_ticks_of_a_logarithmic_axis_say_where_they_stand(name):
    """All labels of an axis are its numbers, or all of them in one other unit: KiB of two-byte elements."""
    figure, checked = drawn(name)[0], 0
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) if axis.get_scale() == "log"):
        ticks = {tick.label1.get_text(): tick.get_loc() for tick in axis.get_major_ticks()}
        said = {re.fullmatch(r"(?:× )?([\d,.e−]+) ?(\w*)", text): x for text, x in ticks.items() if text}
        unit = 512 if "KiB" in axis.get_label_text() else 1
        for match, x in said.items():
            number = float(match[1].replace(",", "").replace("−", "-"))
            meant = [unit * number * base ** EXPONENTS[match[2]] for base in (1000, 1024)]
            assert any(x == pytest.approx(value) for value in meant), (match[0], x)
        checked += len(said)
    assert checked >= 2


# The order of visits ------------------------------------------------------------------------------------------


def test_visits_are_numbered_down_the_columns_and_along_the_rows():
    figure, _, data = drawn("visiting_order")
    T_r, T_c = 3, 4
    assert (data["T_r"], data["T_c"]) == (T_r, T_c)
    for ax, time in zip(figure.axes, (lambda i, j: j * T_r + i, lambda i, j: i * T_c + j), strict=False):
        numbers = {(box.get_y(), box.get_x()): label(box) for box in rectangles(ax)}
        assert numbers == {(i, j): str(time(i, j) + 1) for i in range(T_r) for j in range(T_c)}
    assert [ax.get_title(loc="left") for ax in figure.axes[:2]] == [
        "FA1: columns outside, rows inside",
        "FA2: rows outside, columns inside",
    ]


def test_the_traffic_of_a_visit_stands_in_its_tensor_s_lane_with_the_elements_of_the_paper_s_loops():
    figure, alt, data = drawn("visiting_order")
    N, d, T_r, T_c = 12, 4, 3, 4
    row_state = N + 2 * T_c * N  # l or m of FA1: written once before the loops, then loaded and stored in each column
    moved = [dict(Q=T_c * N * d, K=N * d, V=N * d, O=N * d + 2 * T_c * N * d, l=row_state, m=row_state)]
    moved += [dict(Q=N * d, K=T_r * N * d, V=T_r * N * d, O=N * d, L=N)]
    for ax, sums, log in zip(figure.axes[2:], moved, data["events"].values(), strict=True):
        assert [tick.get_text() for tick in ax.get_yticklabels()] == list(map(style.ell, sums))
        said = sorted((t.get_position()[1], t.get_text()) for t in ax.texts if t.get_text() != "elements")
        assert said == [(lane, str(n)) for lane, n in enumerate(sums.values())]
        for time, (box, event) in enumerate(zip(rectangles(ax), log, strict=True)):
            hue = style.hue(event.tensor)
            assert (box.get_x(), box.get_y() + box.get_height() / 2) == (time, [*sums].index(event.tensor))
            assert same_color(box.get_facecolor(), hue if event.op == "load" else style.PAPER)
            assert same_color(box.get_edgecolor(), hue)
    assert "FA1 moves 936 elements" in alt and "FA2 moves 396." in alt and alt.startswith("Two grids of 3 by 4")


def test_fa1_alone_is_one_grid():
    data = drawn("visiting_order")[2]
    figure, alt = visiting_order.draw(**data | dict(events=dict(FA1=data["events"]["FA1"])))
    assert len(figure.axes) == 2 and "FA2" not in alt + figure.get_suptitle()
    assert alt.startswith("A grid of 3 by 4 tiles, the order of visits written in it: FA1") and "Beside it" in alt


# The ladder ---------------------------------------------------------------------------------------------------


def test_what_each_rung_saves_by_hand():
    _, _, data = drawn("ladder")
    N, d, B, T, SMs = 8192, 64, 128, 64, 132
    fa2 = N * d + 2 * T * N * d + N * d + N
    fa1 = 2 * N * d + T * N * (3 * d + 4) + N * (d + 2)
    warps = {scheme: sum(moved.values()) for scheme, moved in drawn("warp_split")[2]["moved"].items()}
    assert warps["split_q"] == 2 * 2 * B * d + 2 * B * d + 4 * 2 * 2 * B * d  # split-Q: all four warps read K and V
    factors = {
        "FlashAttention": (4 * N * N + 4 * N * d) / fa1,
        "FA2: loops swapped": fa1 / fa2,
        "Online softmax": N / (d + 2),
        "FA2: one statistic": 2,
        "Backward": N,
        "FA2: causal tiles": T * T / (T * (T + 1) / 2),
        "Parallelism": (1 - 32 / SMs) / (1 - 32 * T / (16 * SMs)),  # 2,048 blocks are 16 waves
        "Warps": warps["split_k"] / warps["split_q"],
    }
    found = {rung.name: rung.factor for rungs in data["groups"].values() for rung in rungs if rung.after}
    assert {name: found[name] for name in factors} == pytest.approx(factors)
    assert found.keys() - factors.keys() == {"FA2: divide once"}


def test_a_rung_says_its_amounts_its_factor_and_what_is_counted():
    figure, _, data = drawn("ladder")
    ax = figure.axes[0]
    heights = {t.get_text(): t.get_position()[1] for t in ax.texts if t.get_fontweight() == "bold"}
    for rung in (rung for rungs in data["groups"].values() for rung in rungs):
        y = heights[rung.name] - 0.31
        here = [t.get_text() for t in ax.texts if y <= t.get_position()[1] <= y + 1]
        amounts = [sum(part.values()) for part in (rung.before, rung.after) if part]
        wanted = {rung.name, rung.change, rung.unit.replace("l", "l"), rung.chapter, *map(ladder.amount, amounts)}
        assert {style.ell(text) for text in wanted} <= set(here), rung.name
        assert len([text for text in here if text.startswith("÷ ")]) == bool(rung.after)


def test_amounts_and_factors_are_written_short():
    said = {66: "66", 9_999: "9,999", 12_345: "12.3k", 268_435_456: "268M", 0.7576: "76%"}
    assert {n: ladder.amount(n) for n in said} == said
    assert [ladder.times(x) for x in (1.969, 9.94, 124.1, 8192)] == ["2.0", "9.9", "124", "8,192"]


# Bars of numbers from data sheets -----------------------------------------------------------------------------


def test_the_map_says_sizes_and_speeds_in_the_units_of_data_sheets():
    figure, _, _ = drawn("gpu_map")
    sizes, speeds = figure.axes
    assert [gpu_map._size(n) for n in (40 * 2**20, 2**30, 80 * 2**30)] == ["40 MiB", "1 GiB", "80 GiB"]
    assert {"registers 27 MiB", "shared memory 17 MiB", "L2 40 MiB", "registers 33 MiB", "L2 50 MiB"} <= {*words(sizes)}
    rates = {
        "A100 2 TB/s": "A100 HBM",
        "A100 0.3 TB/s": "A100 link to other GPUs",
        "A100 19 TB/s": "A100 shared memory",
    }
    rates |= {"H200 4.8 TB/s": "H200 HBM", "H200 0.45 TB/s": "H200 link to other GPUs", "H100 3.4 TB/s": "H100 HBM"}
    for text, name in rates.items():
        (bar,), (x, y) = tagged(speeds, f"{name} speed"), at(speeds, text)
        assert bar.get_x() == 0 and bar.get_width() < x and bar.get_y() < y < bar.get_y() + bar.get_height()
        assert same_color(bar.get_facecolor(), style.worker(["A100", "H100", "H200", "B200"].index(text.split()[0])))
    assert at(speeds, "the makers print no figure")[1] == at(speeds, "L2")[1]


def test_a_price_stands_at_its_bar_with_its_chip_in_the_colour_of_its_operation():
    figure, _, data = drawn("flop_costs")
    left = figure.axes[0]
    bars = iter(tagged(left, "price"))
    for kind, fill in flop_costs.FILLS.items():
        for chip, prices in data["prices"].items():
            bar = next(bars)
            beside = [t for t in left.texts if bar.get_y() < t.get_position()[1] < bar.get_y() + bar.get_height()]
            chip_name, number = sorted(beside, key=lambda t: t.get_position()[0])
            assert (chip_name.get_text(), number.get_text()) == (chip, f"{prices[kind]:g}")
            assert chip_name.get_position()[0] < bar.get_x() and number.get_position()[0] > prices[kind]
            assert same_color(bar.get_facecolor(), fill)


# Boxes and arrows ---------------------------------------------------------------------------------------------


def test_terms_lie_end_to_end_and_lines_lead_from_where_they_ended_to_where_they_end():
    figure, _, data = drawn("rescaling")
    for ax, terms in zip(figure.axes, (data["l"], data["o"]), strict=True):
        ends = [[0.0, *accumulate(row)] for row in terms]
        for n, (row, edges) in enumerate(zip(terms, ends, strict=True)):
            boxes = sorted(
                (box.get_x(), box.get_width()) for box in rectangles(ax) if box.get_gid().split()[1] == str(n)
            )
            spans = [(start, width) for start, width in zip(edges, row, strict=False) if width]
            assert boxes == [(pytest.approx(a), pytest.approx(b)) for a, b in spans]
        leads = [(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in ax.lines]
        down = [((a, b), (0.62, 1.0)) for a, b in zip(ends[0][1:], ends[1][1:], strict=True)]
        assert leads == [*down, *(((b, b), (1.62, 2.0)) for b in ends[1][1:])]


def test_an_arrow_of_a_merge_leads_from_what_it_joins_to_its_box():
    figure, _, data = drawn("merge_orders")
    leaves = len(data["leaves"])
    for ax, merges in zip(figure.axes[1:], data["orders"].values(), strict=True):
        *boxes, result = rectangles(ax)
        assert [label(box) for box in boxes[:leaves]] == [f"block {k + 1}" for k in range(leaves)]
        arrows = [t for t in ax.texts if isinstance(t, Annotation)]
        ways = [(child, leaves + n) for n, node in enumerate(merges) for child in (node.left, node.right)]
        for arrow, (start, end) in zip(arrows, [*ways, (-1, None)], strict=True):
            assert inside(arrow.xyann, boxes[start]) and arrow.arrow_patch is not None
            assert inside((arrow.xy[0] + 0.02, arrow.xy[1]), boxes[end] if end is not None else result)
        places = {(box.get_x(), box.get_y()) for box in boxes}
        assert len(places) == len(boxes), "no box lies on another"


def test_the_legend_of_intervals_has_the_look_of_the_tiles():
    figure, _, _ = drawn("intervals")
    looks = {}
    for tile in figure.findobj(lambda part: part.get_gid() in ("FULL", "DIAGONAL", "SKIP")):
        looks.setdefault(tile.get_gid(), set()).add((tile.get_facecolor(), tile.get_hatch()))
    for ax, kind in zip(figure.axes[6:], ("FULL", "DIAGONAL", "SKIP"), strict=True):
        (box,), (text,) = rectangles(ax), ax.texts
        assert looks[kind] == {(box.get_facecolor(), box.get_hatch())} and text.get_text().startswith(f"{kind}: ")
    assert len({look for found in looks.values() for look, _ in found}) == 3
    row, sink = tagged(figure, "row"), tagged(figure, "sink")
    assert all(same_color(bar.get_facecolor(), style.INK) for bar in row) and len(row) == 6
    assert [same_color(box.get_edgecolor(), style.hue("m")) for box in sink] == [True]


def test_the_frame_of_a_bulk_copy_lies_around_the_rows_it_names():
    figure, _, _ = drawn("bulk_copy")
    ax = figure.axes[0]
    rows = [tagged(ax, f"row {n}")[0] for n in range(10)]
    assert [label(box) for box in rows] == [f"row {n}" for n in range(10)]
    (frame,) = tagged(ax, "tile")
    assert frame.get_y() == pytest.approx(rows[8].get_y()) and not frame.get_fill()
    assert frame.get_height() == pytest.approx(4 * rows[0].get_height())
    outside = at(ax, "outside")
    assert outside[1] == pytest.approx(rows[9].get_y() + 2 * rows[9].get_height()) and inside(outside, frame)
    for n in range(4):
        line = [box for chunk in range(8) for gid in ("chunk", "zero") for box in tagged(ax, f"{gid} {n} {chunk}")]
        assert at(ax, f"line {n}")[1] == pytest.approx(line[0].get_y() + line[0].get_height() / 2)
        assert at(ax, f"line {n}")[0] > max(box.get_x() + box.get_width() for box in line)


def test_matrices_of_a_product_have_their_shapes_above():
    figure, _, _ = drawn("wgmma")
    shapes = [text for text in words(figure) if re.fullmatch(r"\w+  \d+ × \d+", text)]
    assert shapes == ["q  64 × 128", "kᵀ  128 × 128", "s  64 × 128", "p  64 × 128", "v  128 × 128", "o  64 × 128"]


def test_a_job_of_the_backward_says_what_it_is_in_the_lane_of_its_unit():
    figure, _, data = drawn("backward_step")
    ax = figure.axes[0]
    shown = {patch: patch.get_gid().split() for patch in rectangles(ax)}
    whole = [(patch, gid) for patch, gid in shown.items() if patch.get_width() > 200]
    for patch, (unit, what, number) in whole:
        assert label(patch) == ("+ " if unit == "copy" else "") + f"{what} {number}"
    for patch, (_, _, number) in shown.items():
        assert (patch.get_linewidth() > 2) == (int(number) == data["n"])
    heights = {}
    for patch, (unit, _, _) in shown.items():
        heights.setdefault(unit, set()).add(round(patch.get_y(), 6))
    assert all(len(rows) == 2 for rows in heights.values()) and len(set().union(*heights.values())) == 6
    lanes = sorted(t.get_position()[1] for t in ax.texts if t.get_text().endswith((", 0", ", 1")))
    assert lanes == pytest.approx(sorted(row + 0.4 for rows in heights.values() for row in rows))


def test_whoever_empties_a_ring_is_counted_in_words():
    figure, _, data = drawn("pipes")
    said = Counter(line for text in words(figure) for line in re.findall(r"empty: after \d+ releases?", text))
    wanted = Counter(data["barriers"][f"{ring} emptied"]["expected"] for ring in data["stages"])
    assert said == {f"empty: after {n} release" + "s" * (n > 1): times for n, times in wanted.items()}


def test_every_query_head_is_numbered_over_its_place_and_sums_are_told():
    figure, _, data = drawn("grouped_heads")
    told = {8: "one term each", 2: "each a sum of 4 terms", 1: "each a sum of 8 terms"}
    for column, layout in enumerate(data["layouts"].values()):
        width = 8 / layout["key_heads"]
        for ax, names in zip(figure.axes[column::3], (("K", "V"), ("dK", "dV")), strict=True):
            middles = {(label(box), round(box.get_x() + box.get_width() / 2, 6)) for box in rectangles(ax)}
            keys = {(name, (g + 0.5) * width) for g in range(layout["key_heads"]) for name in names}
            assert middles == keys | {(str(h), h + 0.5) for h in range(8)}
        assert figure.axes[3 + column].get_xlabel() == told[layout["key_heads"]]


def test_a_factor_is_written_where_a_maximum_is_new():
    figure, _, data = drawn("state_stream")
    ax, alpha = figure.axes[0], data["alpha"]
    for box in rectangles(ax):
        j, i = int(box.get_x()), int(box.get_y())
        new = f"× {alpha[j, i]:.2g}" if alpha[j, i] < 1 else "1"
        assert label(box) == ("start" if j == 0 else new)
        assert (box.get_linewidth() > 1) == (i == data["row"])
    columns = {tick.label1.get_text(): tick.get_loc() for tick in ax.xaxis.get_major_ticks()}
    assert columns == {str(j + 1): j + 0.5 for j in range(len(alpha))}


def test_numbers_of_a_row_are_written_short_and_their_sums_stand_beside_them():
    figure, _, data = drawn("three_softmaxes")
    said = {0.0: "0", 0.01: "0.01", 999.0: "999", 1000.0: "1,000", 65504.0: "65,504", 0.00012: "1e−4", 2e-12: "2e−12"}
    assert {x: three_softmaxes._number(x) for x in said} == said
    row, ax = data["row"], figure.axes[[ax.get_title(loc="left")[:7] for ax in figure.axes].index("One row")]
    N = len(row["s"])
    sums = {box.get_y(): label(box) for box in rectangles(ax) if box.get_x() == N + 0.3}
    wanted = [row["sums"]["unsafe"], row["sums"]["safe"], row["l"][-1]]
    assert sums == dict(zip((1.4, 3.8, 6.2), map(three_softmaxes._number, wanted), strict=True))
    blocks = [label(box) for box in rectangles(ax) if box.get_y() == 6.2 and box.get_x() < N]
    assert len(blocks) == len(row["m"]) and blocks[-1].endswith(f"ℓ = {three_softmaxes._number(row['l'][-1])}")


def test_a_stage_says_who_fills_it_and_a_place_whose_part_it_holds():
    for name in ("pipes", "backward_pipes"):
        figure, _, data = drawn(name)
        for ring in data["stages"]:
            boxes = tagged(figure, f"{ring} stage")
            left, right = boxes[0].get_x(), boxes[-1].get_x() + boxes[-1].get_width()
            (beneath,) = [t for t in figure.axes[0].texts if t.get_text().startswith("full: ")
                          and 0 < t.get_position()[1] - boxes[0].get_y() < 0.6]  # fmt: skip
            filled = "copied" if data["barriers"][f"{ring} filled"]["arrives"] == ["copy engine"] else "written"
            needed = data["barriers"][f"{ring} emptied"]["expected"]
            assert beneath.get_text() == f"full: {filled}; empty: after {needed} release" + "s" * (needed > 1)
            assert left < beneath.get_position()[0] < right and "mailbox" in (ring, *data["stages"])
            assert filled == ("written" if ring == "mailbox" else "copied")
    for who in ("consumer 0", "consumer 1"):
        assert [label(box) for box in tagged(figure, f"dQ place {who}")] == [f"dQ of {who[-1]}"]


def test_limits_of_a_block_size_are_marked_on_its_bars_and_sizes_stand_at_their_squares():
    data = drawn("block_budget")[2]
    figure, alt = block_budget.draw(**data | dict(compiled=None))
    limits = [255 / 255, *(size / data["limits"]["H100"] for size in data["limits"].values())]
    for ax, (_, table) in zip(figure.axes, data["cells"].items(), strict=True):
        marks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines]
        for y in range(4):
            for x in range(4):
                here = [(at - x, height - y) for at, height in marks if int(at) == x and int(height) == y]
                wanted = [(0.34 + 0.4 * limit, 0.07 if n == 0 else 0.35) for n, limit in enumerate(limits)]
                assert here == [(pytest.approx(a, abs=2e-3), pytest.approx(b)) for a, b in wanted]
        for axis in (ax.xaxis, ax.yaxis):
            ticks = {tick.label1.get_text(): tick.get_loc() for tick in axis.get_major_ticks()}
            assert ticks == {str(size): n + 0.5 for n, size in enumerate(data["sizes"])}
        verdicts = Counter(block_budget.verdict(cell, data["limits"]) for cell in table.values())
        assert all(re.search(rf"\b{n} {verdict}", alt) for verdict, n in verdicts.items())


def test_an_arrow_out_of_hbm_has_its_tensor_s_colour():
    figure, _, _ = drawn("backward_graph")
    ax = figure.axes[0]
    arrows = [t.arrow_patch for t in ax.texts if getattr(t, "arrow_patch", None) is not None]
    loaded = [style.colors.to_hex(arrow.get_edgecolor()).upper() for arrow in arrows]
    hues = Counter(style.hue(edge.split()[0]) for edge in backward_graph.EDGES.split(", ") if edge.split()[0] in NAMED)
    assert Counter(color for color in loaded if color != style.QUIET) == hues and loaded.count(style.QUIET) == 6
    columns = {text: at(ax, text)[0] for text in ("loaded from HBM", "stored")}
    assert all(
        abs(columns["loaded from HBM"] - (box.get_x() + box.get_width() / 2)) < 0.01 for box in tagged(ax, "loaded")
    )
    assert all(abs(columns["stored"] - (box.get_x() + box.get_width() / 2)) < 0.01 for box in tagged(ax, "result"))


NAMED = ("Q", "K", "L", "D", "dO", "V")  # what the backward loads

NAMES = {
    "three_softmaxes": {"safe": 3, "online": 3},
    "hbm_traffic": {"floor: 4 N d": 2, "standard": 2, "FA1": 2, "FA2": 2},
    "warp_split": {"Kᵀ": 2, "V": 2, "Q": 2},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_curve_and_matrix_is_named_in_every_panel(name):
    said = Counter(words(drawn(name)[0]))
    assert all(said[word] >= count for word, count in NAMES[name].items()), said
    assert name != "three_softmaxes" or sum(text.startswith("unsafe: not finite") for text in said.elements()) == 3


# The ring -----------------------------------------------------------------------------------------------------


def test_keys_come_from_the_left_neighbour_and_lie_where_they_are_seen():
    figure, _, data = drawn("ring_schedule")
    ax = figure.axes[0]
    squares = tagged(ax, "unseen")
    assert len(squares) == 16 and all(square.get_hatch() == style.MASK_HATCH for square in squares)
    arrows = {arrow.xy: arrow.xyann for arrow in ax.texts if isinstance(arrow, Annotation)}
    for n, square in enumerate(squares):
        (rank, step), (x, y) = divmod(n, 4), square.get_xy()
        cell = data["cells"][rank][step]
        (number,) = [t for t in ax.texts if t.get_text() == str(cell["source"]) and inside(t.get_position(), square)]
        (seen,) = [p for p in tagged(ax, f"keys of {cell['source']}") if p.get_path() and inside(low(p), square)]
        if cell["diagonal"]:
            assert {tuple(corner) for corner in seen.get_xy()} == {(x, y), (x, y + 1), (x + 1, y + 1)}
        else:
            (top, bottom), (left, right) = cell["rows"], cell["cols"]
            assert (seen.get_x() - x, seen.get_y() - y) == pytest.approx((left, top))
            assert (seen.get_width(), seen.get_height()) == pytest.approx((right - left, bottom - top))
            assert inside(number.get_position(), seen)
        if step:
            (tail,) = [tail for head, tail in arrows.items() if head[1] == y + 0.5 and 0 < x - head[0] < 0.2]
            before = squares[n - 5] if rank else None  # the rank above, one step earlier
            assert before is None or (inside((tail[0] - 0.1, tail[1]), before) and tail[1] == before.get_y() + 0.5)
    assert words(ax).count("from 3") == 3


def low(patch):
    """The upper left corner of what a patch covers; queries run down."""
    corners = patch.get_patch_transform().transform(patch.get_path().vertices)
    return corners.min(axis=0)


def test_a_rank_s_kernels_take_the_keys_in_the_order_in_which_they_come():
    figure, _, data = drawn("ring_schedule")
    orders = dict(forward=["1", "1", "0", "3", "2"], backward=["1", "0", "3", "2", "1"])
    for ax, (direction, order) in zip(figure.axes[1:3], orders.items(), strict=True):
        kernels = sorted(tagged(ax, "kernels"), key=Rectangle.get_x)
        assert [label(box) for box in kernels] == order
        assert all(same_color(box.get_facecolor(), style.worker(int(label(box)))) for box in kernels)
        lanes = {"keys of": "kernels", "K V →": "K V", "dK dV →": "dK dV", "measured": "measured"}
        if direction == "forward":
            del lanes["dK dV →"]
        ticks = {tick.label1.get_text(): tick.get_loc() for tick in ax.yaxis.get_major_ticks()}
        assert list(ticks) == list(lanes)
        for name, middle in ticks.items():
            assert all(box.get_y() + 0.4 == pytest.approx(middle) for box in tagged(ax, lanes[name]))
    assert all(a[2] <= b[2] for a, b in pairwise(s for s in data["lanes"]["backward"] if s[0] == "kernels"))
