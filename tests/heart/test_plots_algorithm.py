"""The pictures of the algorithm, one by one: the data that went in is right, and the artists that came out match it."""

from collections import Counter

import numpy as np
import pytest
from matplotlib.patches import StepPatch
from matplotlib.text import Annotation
from pictures import boxes, drawn, label, lines, titled

from fa2_lab.machine import chips, io, time
from fa2_lab.plots import (
    deferred_normalisation,
    merge_orders,
    quadratic_memory,
    state_stream,
    style,
    three_softmaxes,
)
from fa2_lab.reference import fa1, fa2, naive

# Memory -------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_real_arrays():
    heads, N, d = 2, 128, 16
    data = quadratic_memory.data(heads=heads, d=d)
    assert data["N"][0] == N
    S = np.empty((heads, N, N), np.float16)
    Q, L = np.empty((heads, N, d), np.float16), np.empty((heads, N), np.float32)
    assert data["sizes"]["S and P"][0] == 2 * S.nbytes
    assert data["sizes"]["Q, K, V, O"][0] == 4 * Q.nbytes
    assert data["sizes"]["L"][0] == L.nbytes


def test_memory_names_every_chip_once_and_the_last_N_that_fits():
    figure, _, data = drawn("quadratic_memory")
    named = ", ".join(name for name, _, _ in data["chips"])
    assert len(named.split(", ")) == len(chips.CHIPS)
    for name, size, last in data["chips"]:
        assert all(c.hbm_bytes == size for c in chips.CHIPS.values() if any(n in c.name for n in name.split(", ")))
        assert 32 * last**2 * 4 <= size < 32 * (last + 1) ** 2 * 4
    dots = [line.get_xydata()[0] for line in lines(titled(figure, "To scale")) if line.get_marker() == "o"]
    assert np.allclose(dots, [(last, size / 2**30) for _, size, last in data["chips"]])
    assert titled(figure, "To scale").get_ylabel() == "GiB"
    shown = {t.get_text() for t in figure.axes[0].texts}
    assert {f"N = {last:,}" for _, _, last in data["chips"]} <= shown


def test_memory_grows_fourfold_and_twofold():
    figure, _, data = drawn("quadratic_memory")
    slopes = [np.polyfit(*np.log2(line.get_xydata()).T, 1)[0] for line in titled(figure, "On log").lines]
    assert slopes == pytest.approx([2, 1, 1])
    assert len(slopes) == len(data["sizes"])


# Three softmaxes ----------------------------------------------------------------------------------------------


def test_bfloat16_rounds_as_torch_does():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(5000) * 10.0 ** rng.integers(-30, 38, 5000), [0, 1 + 2**-8, 1 + 3 * 2**-8]])
    x = np.concatenate([x, [np.inf, -np.inf, np.nan, 3.3895314e38, 3.4e38]]).astype(np.float32).astype(np.float64)
    expected = torch.tensor(x, dtype=torch.float32).to(torch.bfloat16).double().numpy()
    with np.errstate(over="ignore"):
        assert np.array_equal(three_softmaxes.bfloat16(x), expected, equal_nan=True)
    assert three_softmaxes.bfloat16(1.0).shape == () and three_softmaxes.bfloat16(np.ones((2, 3))).shape == (2, 3)


def test_the_row_is_what_numpy_computes_in_float16():
    _, _, data = drawn("three_softmaxes")
    row = data["row"]
    s = row["s"].astype(np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        assert np.array_equal(row["unsafe_e"], np.exp(s))
        assert np.array_equal(row["unsafe_p"], np.exp(s) / np.exp(s).sum(), equal_nan=True)
    assert np.array_equal(row["safe_p"], naive.safe_softmax(s))
    assert np.abs(row["online_p"] - naive.safe_softmax(row["s"])).max() < 2**-10
    assert row["l"][-1] == row["sums"]["safe"] and np.isinf(row["sums"]["unsafe"])
    assert np.array_equal(row["m"], np.maximum.accumulate(row["s"].reshape(-1, 2).max(axis=1)))


def test_the_boxes_show_every_number_and_black_is_what_is_not_finite():
    figure, _, data = drawn("three_softmaxes")
    row, ax = data["row"], titled(figure, "One row")
    numbers = [row[k] for k in ("s", "unsafe_e", "unsafe_p", "safe_e", "safe_p", "online_p")]
    broken = sum(int((~np.isfinite(x)).sum()) for x in numbers)
    assert len(boxes(ax)) == sum(len(x) for x in numbers) + 3 + len(row["m"])
    black = Counter(label(b) for b in boxes(ax, style.INK))
    assert black.total() == broken + 1 == 3 and set(black) == {"inf", "NaN"}


@pytest.mark.parametrize("dtype, largest, epsilon", [("float16", 65504, 2**-10), ("bfloat16", 3.4e38, 2**-7)])
def test_unsafe_ends_where_the_largest_exponential_leaves_the_type(dtype, largest, epsilon):
    _, _, data = drawn("three_softmaxes")
    scales, errors = data["scales"], data["errors"][dtype]
    largest_score = scales * np.random.default_rng(0).standard_normal((32, 512)).max()
    fits = np.isfinite(errors["unsafe"])
    assert not fits[largest_score > np.log(largest) + 0.1].any()
    assert fits[largest_score < np.log(largest) - np.log(512)].all()
    for name in ("safe", "online"):
        assert np.isfinite(errors[name]).all() and (errors[name] < 8 * epsilon).all()
        assert (errors[name] > epsilon / 64).all()


def test_the_error_of_float32_is_that_of_arithmetic_in_float32():
    _, _, data = drawn("three_softmaxes")
    normal = np.random.default_rng(0).standard_normal((32, 512))
    for k in (0, 20, 40):
        s = (data["scales"][k] * normal).astype(np.float32)
        e = np.exp((s - s.max(axis=1, keepdims=True)).astype(np.float64)).astype(np.float32)
        p = e / e.sum(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
        assert p.dtype == np.float32
        errors = [
            np.abs(row - np.exp(t - t.max()) / np.exp(t - t.max()).sum()).sum()
            for row, t in zip(p, s.astype(float), strict=True)
        ]
        assert data["errors"]["float32"]["safe"][k] == pytest.approx(max(errors), rel=6e-3)


def test_the_error_curves_are_drawn_whole_with_a_cross_at_the_end_of_the_unsafe_one():
    figure, _, data = drawn("three_softmaxes")
    for dtype, curves in data["errors"].items():
        *drawn_curves, cross = lines(titled(figure, dtype))
        for line, name in zip(drawn_curves, ("safe", "online", "unsafe"), strict=True):
            assert np.array_equal(line.get_ydata(), curves[name], equal_nan=True)
        last = np.isfinite(curves["unsafe"]).sum() - 1
        assert cross.get_xdata() == [data["scales"][last]] and np.isnan(curves["unsafe"][last + 1])


# Rescaling ----------------------------------------------------------------------------------------------------


def test_the_old_terms_shrink_alike_and_the_new_ones_are_added():
    figure, alt, data = drawn("rescaling")
    E, v = np.array([1.0, 3.0, 4.0, 8.0]), np.array([8.0, 0.0, 4.0, 2.0])
    stages = [E[:2] / 3, E[:2] / 8, E / 8]
    for name, factor in (("ℓ", np.ones(4)), ("o", v)):
        widths = {p.get_gid(): p.get_width() for p in boxes(titled(figure, f"{name},"))}
        terms = [terms * factor[: len(terms)] for terms in stages]
        wanted = {f"{name} {n} key {key}": x for n, row in enumerate(terms) for key, x in enumerate(row) if x}
        assert widths == pytest.approx(wanted)
        assert data["ends"][name] == pytest.approx([terms[0].sum(), terms[2].sum()])  # what the package has
        said = [text.get_text() for text in titled(figure, f"{name},").texts if "=" in text.get_text()]
        assert said == {"ℓ": ["ℓ = 4/3", "ℓ = 1/2", "ℓ = 2"], "o": ["o = 8/3", "o = 1", "o = 5"]}[name]
    assert "α = 3/8" in alt and "ℓ from 4/3 to 1/2 to 2; o from 8/3 to 1 to 5" in alt


# The stream of key blocks ---------------------------------------------------------------------------------------


def test_the_state_is_what_a_sum_over_all_keys_so_far_gives():
    _, _, data = drawn("state_stream")
    for j in range(len(data["s"])):
        seen = np.concatenate(data["s"][: j + 1], axis=1)
        m = seen.max(axis=1)
        assert np.array_equal(data["m"][j], m)
        assert np.allclose(data["l"][j], np.exp(seen - m[:, None]).sum(axis=1), rtol=1e-13)
        assert np.array_equal(data["alpha"][j] < 1, data["m"][j] > (data["m"][j - 1] if j else -np.inf))
    assert np.allclose(data["o"][-1] / data["l"][-1], data["O"], rtol=1e-12)


def test_every_rescaling_is_coloured_and_marked():
    _, _, data = drawn("state_stream")
    events = data["alpha"][1:] < 1
    assert events[:, data["row"]].sum() >= 3
    for row in range(events.shape[1]):
        figure, _ = state_stream.draw(**data | dict(row=row))
        grid, *below = figure.axes
        assert len(boxes(grid)) == data["alpha"].size
        assert len(boxes(grid, style.hue("m"))) == events.sum()
        for ax in below:
            marks = [line.get_xdata()[0] for line in lines(ax) if line.get_linestyle() == "--"]
            assert marks == list(np.flatnonzero(events[:, row]) + 1)


def test_l_and_o_first_shrink_and_then_grow():
    figure, _, data = drawn("state_stream")
    for name, letter in dict(l="ℓ", o="o").items():
        (steps,) = [p for p in titled(figure, f"{letter} =").patches if isinstance(p, StepPatch)]
        after, total = steps.get_data().values.reshape(-1, 2).T, data[name][:, data["row"]]
        assert np.array_equal(after[1], total)
        assert np.allclose(after[0][1:], data["alpha"][1:, data["row"]] * total[:-1]) and after[0][0] == 0


# Merge --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["loop", "tree", "split"])
def test_every_node_is_merged_once_and_the_result_is_the_direct_sum(order):
    _, _, data = drawn("merge_orders")
    leaves, merges = data["leaves"], data["orders"][order]
    used = sorted(k for node in merges for k in (node.left, node.right))
    assert used == list(range(len(leaves) + len(merges) - 1))
    weight = np.array([leaf.l * np.exp(leaf.m) for leaf in leaves])
    direct = sum(leaf.o * np.exp(leaf.m) for leaf in leaves) / weight.sum()
    assert merges[-1].o / merges[-1].l == pytest.approx(direct, rel=1e-12)
    assert data["L"][order] == pytest.approx(np.log(weight.sum()), rel=1e-12)
    assert merges[-1].m == max(leaf.m for leaf in leaves)


def test_a_merge_holds_the_sum_of_what_it_joins():
    _, _, data = drawn("merge_orders")
    for merges in data["orders"].values():
        nodes = [*data["leaves"], *merges]
        for node in merges:
            for part in ("l", "o"):
                joined = sum(getattr(nodes[k], part) * np.exp(nodes[k].m - node.m) for k in (node.left, node.right))
                assert getattr(node, part) == pytest.approx(joined, rel=1e-12)


def test_the_three_orders_have_their_shapes():
    pairs = merge_orders.merge_pairs(8)
    assert pairs["loop"] == [(0, 1), (8, 2), (9, 3), (10, 4), (11, 5), (12, 6), (13, 7)]
    assert pairs["tree"] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11), (12, 13)]
    assert pairs["split"] == [(0, 1), (8, 2), (9, 3), (4, 5), (11, 6), (12, 7), (10, 13)]


def test_every_merge_has_its_box_two_arrows_and_one_of_three_equal_results():
    figure, _, data = drawn("merge_orders")
    results = []
    for ax, name in zip(figure.axes[1:], ("Loop", "Tree", "Split"), strict=True):
        assert ax.get_title(loc="left").startswith(name)
        states, n = boxes(ax, style.tint(style.hue("l"))), len(data["leaves"])
        assert [label(b) for b in states] == [
            f"m {node.m:.3f}\nℓ {node.l:.3f}\no {node.o:.3f}".replace("-", "−") for node in data["orders"][name.lower()]
        ]
        assert len(boxes(ax)) == n + len(states) + 1
        arrows = [t for t in ax.texts if isinstance(t, Annotation)]
        assert len(arrows) == 2 * len(states) + 1
        results += [label(b) for b in boxes(ax, style.tint(style.hue("O")))]
    end = data["orders"]["loop"][-1]
    assert results == [f"o / ℓ = {end.o / end.l:.4f}\nL = {data['L']['loop']:.4f}".replace("-", "−")] * 3


# Deferred normalisation ---------------------------------------------------------------------------------------

B_r, B_c, d = 128, 64, 128
NAMED = {"q kᵀ": "matmul", "p v": "matmul", "× τ": "multiply", "scale o": "multiply", "scale p v": "multiply"}
NAMED |= {"max": "maximum", "τs − m": "add", "Σ": "add", "+": "add", "exp": "exp"}
INNER = ["q kᵀ", "× τ", "max", "τs − m", "exp", "Σ", "scale o", "p v"]
TILES = [(fa1, 1, [*INNER, "scale p v", "+"]), (fa2, 1, [*INNER, "+"]), (fa2, None, ["scale o"])]


@pytest.mark.parametrize("stage, j, names", TILES, ids=["FA1 tile", "FA2 tile", "FA2 end"])
def test_each_name_stands_at_the_operation_that_it_names(stage, j, names):
    log = deferred_normalisation.operations(stage, B_r, B_c, d, j)
    assert [name for name, _, _ in log if name] == names
    for name, _, ran in log:
        assert (ran.operations == B_r) == (name == "") and NAMED.get(name, ran.kind) == ran.kind


def test_a_tile_that_cannot_be_told_from_its_rows_is_refused():
    with pytest.raises(ValueError, match=r"^d: got 64; it takes another number than B_c"):
        deferred_normalisation.data(B_c=64, d=64)


def test_the_operations_of_a_tile_are_those_of_the_closed_form():
    for name, stage in (("fa1", fa1), ("fa2", fa2)):
        counted = Counter()
        for _, _, ran in deferred_normalisation.operations(stage, B_r, B_c, d, j=1):
            counted[ran.kind] += ran.operations
        assert counted == io.tile_operations(name, "forward", B_r, B_c, d)


def test_the_clocks_are_those_of_the_machine_model():
    _, _, data = drawn("deferred_normalisation")
    for name, steps in data["loops"].items():
        tile = time.tile_clocks(chips.A100, B_r, B_c, d, algorithm=name.lower())
        assert sum(s.clocks for s in steps) == pytest.approx(tile.tensor + tile.fp32 + tile.exp)


def test_what_is_called_gone_is_the_difference_between_the_two_loops():
    figure, _, data = drawn("deferred_normalisation")
    named = {way: [s for s in steps if s.name] for way, steps in data["loops"].items()}
    assert [s for s in named["FA1"] if s.name != "scale p v"] == named["FA2"]
    lost, small = (b for b in boxes(figure.axes[0]) if b.get_y() == 1 and b.get_linestyle() not in ("-", "solid"))
    assert label(lost).split() == ["scale", "p", "v"] and lost.get_width() == B_r * d / 64
    before, after = (time.tile_clocks(chips.A100, B_r, B_c, d, algorithm=name) for name in ("fa1", "fa2"))
    saved = before.fp32 + before.exp - after.fp32 - after.exp
    assert small.get_width() == pytest.approx(saved - lost.get_width())


def test_the_two_loops_are_as_long_as_their_clocks_and_end_together_with_the_outlines():
    figure, _, data = drawn("deferred_normalisation")
    rows = {0: data["loops"]["FA1"], 1: data["loops"]["FA2"], 2: data["end"]}
    for y, steps in rows.items():
        row = [b for b in boxes(figure.axes[0]) if b.get_y() == y]
        outlined = [b for b in row if b.get_linestyle() != "-" and b.get_linestyle() != "solid"]
        solid = [b for b in row if b not in outlined]
        assert [b.get_width() for b in solid] == [s.clocks for s in steps]
        assert len(outlined) == (2 if y == 1 else 0)
        if y < 2:
            longest = sum(s.clocks for s in rows[0])
            assert max(b.get_x() + b.get_width() for b in row) == pytest.approx(longest)
