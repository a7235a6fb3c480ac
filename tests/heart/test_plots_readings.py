"""Pictures of sums and of measurements, read back: each mark, name, tick and title against the data it shows."""

import json
import re
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import pytest
from matplotlib.colors import same_color
from picture_places import around, assert_level, named, nearest, numbers, points, redrawn, right, starting, ticks
from pictures import boxes, drawn, label, tagged

from fa2_lab import records
from fa2_lab.machine import chips
from fa2_lab.plots import ring_speed, style, time_and_memory

GiB = 2**30


def plain(text):
    return " ".join(text.split())


def same(a, b, near=1e-9):
    """Whether two curves have the same points."""
    return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=near)


def ends(axis):
    """{what a curve is called: its line}, by the text that stands behind its last point, at its height."""
    found = {}
    for line in [line for line in axis.lines if len(line.get_xdata()) > 1 and line.get_marker() != "None"]:
        x, y = axis.transData.transform(line.get_xydata()[-1])
        texts = [t for t in axis.texts if 0 < around(t).x0 - x < 40 and abs(sum(around(t).intervaly) / 2 - y) < 8]
        found |= {t.get_text(): line for t in texts}
    return found


# What a new maximum does --------------------------------------------------------------------------------------------

OTHER = dict(exponentials=(2, 5, 3, 10, 4), values=(6, 1, 4, 2, 3), B_c=3)
RESCALED = pytest.mark.parametrize("made", [{}, OTHER], ids=["its own numbers", "other numbers"])


@RESCALED
def test_a_term_of_the_rescaling_says_its_width_and_lies_in_the_bar_of_its_stage(made):
    figure, _, data = redrawn("rescaling", made)
    tops = []
    for ax, name, stages in zip(figure.axes, "ℓo", (data["l"], data["o"]), strict=True):
        assert ax.get_xscale() == "linear" and ax.get_xlim()[0] == 0, f"{name}: widths are not to scale from 0"
        widest, found = max(map(sum, stages)), set()
        for n, terms in enumerate(stages):
            for key, (start, width) in enumerate(zip(accumulate(terms, initial=0), terms, strict=False)):
                for box in tagged(ax, f"{name} {n} key {key}"):
                    found.add(box)
                    what = f"stage {n} of {name}, key {key}"
                    assert (box.get_x(), box.get_width()) == pytest.approx((start, width)), f"{what} lies elsewhere"
                    assert not label(box) or float(Fraction(label(box))) == pytest.approx(width), f"{what}: its number"
                    assert label(box) or width < widest / 10, f"{what} has room for its number"
                    tops.append((n, box.get_y(), box.get_height()))
        assert found == set(boxes(ax)) and len(found) == sum((terms > 0).sum() for terms in stages), "a box for each"
    rows = sorted(set(tops))
    assert [n for n, *_ in rows] == [0, 1, 2], "both panels have their stages at the same heights"
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    for y, below in pairwise(ax.transData.transform((0, y))[1] for _, y, _ in rows):
        assert below < y, "time goes down"


@RESCALED
def test_old_terms_of_the_rescaling_are_strong_and_new_ones_pale_in_their_sum_s_colour(made):
    figure, _, data = redrawn("rescaling", made)
    old = len(data["l"][0])
    for ax, name in zip(figure.axes, "lo", strict=True):
        looks = {}
        for box in boxes(ax):
            _, _, _, key = box.get_gid().split()
            looks.setdefault(int(key) < old, set()).add(style.colors.to_hex(box.get_facecolor()))
        assert [len(looks[side]) for side in (True, False)] == [1, 1], f"{name}: old and new have a colour each"
        (strong,), (pale,) = looks[True], looks[False]
        hue = np.array(style.colors.to_rgb(style.hue(name)))
        for shade in (strong, pale):  # some of the hue, the rest paper
            mixed = (1 - np.array(style.colors.to_rgb(shade))) / (1 - hue + 1e-9)
            assert np.ptp(mixed) < 0.05, f"{name}: {shade} is another tensor's"
        assert style.luminance(strong) < style.luminance(pale), f"{name}: old terms are the strong ones"
        assert ax.get_title(loc="left")[0] == style.ell(name), "the panel is called after its sum"
        assert (ax.get_title(loc="left").split()[-1] == "v") == (name == "o"), "only o is weighed with values"


@RESCALED
def test_a_bar_of_the_rescaling_ends_at_its_sum_and_the_package_s_and_is_named_with_its_keys_and_maximum(made):
    figure, alt, data = redrawn("rescaling", made)
    alpha = Fraction(data["m"][0] / data["m"][1]).limit_denominator(100)
    for ax, (name, (first, last)) in zip(figure.axes, data["ends"].items(), strict=True):
        sums = [first, float(alpha) * first, last]
        texts = sorted((t for t in ax.texts if t.get_text().startswith(f"{name} = ")), key=lambda t: -around(t).y0)
        assert len(texts) == 3, f"{name} has {len(texts)} sums"
        for n, (text, total) in enumerate(zip(texts, sums, strict=True)):
            bar = [box for box in boxes(ax) if box.get_gid().startswith(f"{name} {n} ")]
            assert float(Fraction(text.get_text().split("= ")[1])) == pytest.approx(total), f"{name}, stage {n}"
            assert 0 < around(text).x0 - around(*bar).x1 < 20, f"{text.get_text()} does not stand at the bar's end"
            assert_level(text, *bar)
        told = [str(Fraction(x).limit_denominator(100)) for x in sums]
        assert f"{name} from {' to '.join(told)}" in plain(alt)
    ax, (B_c, N) = figure.axes[0], (len(data["l"][0]), len(data["l"][2]))
    names = dict(zip(("keys", "×", "+"), ticks(ax.yaxis).items(), strict=True))
    for n, (sign, (said, y)) in enumerate(names.items()):
        (bar,) = {(b.get_y() + b.get_height() / 2) for b in boxes(ax) if b.get_gid().startswith(f"ℓ {n} ")}
        assert said.startswith(sign) and y == pytest.approx(bar), f"{said!r} stands at another stage"
    assert numbers(names["keys"][0]) == pytest.approx([*range(B_c), data["m"][0]]), "the keys, and e to the maximum"
    assert numbers(names["+"][0]) == pytest.approx([*range(B_c, N), data["m"][1]])
    assert names["×"][0] == f"× α = {alpha}" and f"α = {alpha}" in plain(alt)
    assert not ticks(figure.axes[1].yaxis)


@RESCALED
def test_a_dashed_line_of_the_rescaling_leads_from_the_end_of_an_old_term_to_its_end_in_the_next_bar(made):
    figure, _, data = redrawn("rescaling", made)
    for ax, name in zip(figure.axes, "ℓo", strict=True):
        leads = [sorted(points(line), key=lambda end: end[1]) for line in ax.lines]
        wanted = []
        for n in (0, 1):
            for key in [key for key in range(len(data["l"][0])) if tagged(ax, f"{name} {n} key {key}")]:
                (upper,), (lower,) = (tagged(ax, f"{name} {stage} key {key}") for stage in (n, n + 1))
                lead = [(right(upper), upper.get_y() + upper.get_height()), (right(lower), lower.get_y())]
                assert any(same(lead, found) for found in leads), f"no line from stage {n} of {name}, key {key}"
                wanted.append(lead)
        assert all(any(same(found, lead) for lead in wanted) for found in leads), f"{name}: a line leads elsewhere"


# The ring as measured -----------------------------------------------------------------------------------------------

RING = dict(
    curves={2: [(1024, 0.5), (4096, 1.25), (8192, 1.6)], 8: [(1024, 0.25), (4096, 4.5), (8192, 6.4)]},
    contiguous=(2, 8192, 1.1),
    memory={1: 6144.0, 2: 3584.0, 8: 1536.0},
)


@pytest.mark.parametrize("changes", [{}, RING], ids=["the record", "made up"])
def test_a_curve_of_the_ring_has_its_number_of_gpus_behind_it_and_its_linear_line(changes):
    figure, alt, data = redrawn("ring_speed", **changes)
    ax, curves = figure.axes[0], data["curves"]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "linear") and ax.get_ylim()[0] == 0
    called, looks = ends(ax), set()
    for n, curve in curves.items():
        line = called.pop(f"{n} GPUs\n{curve[-1][1]:.2f}", None)
        assert line and same(points(line), curve), f"{n} GPUs: another curve, or none, has this name"
        assert line.get_linestyle() == "-" and same_color(line.get_color(), style.INK)
        looks.add(line.get_marker())
        text = starting(ax, f"{n} times")
        (straight,) = [found for found in ax.lines if found.get_linestyle() == "--" and nearest(text, [
            other for other in ax.lines if other.get_linestyle() == "--"]) is found]  # fmt: skip
        assert points(straight) == [(curve[0][0], n), (curve[-1][0], n)], f"{n} times as fast is drawn elsewhere"
        assert 0 <= around(text).y0 - around(straight).y1 < 12, f"{text.get_text()!r} does not lie on its line"
        told = f"{n} GPUs " + ", ".join(f"{x:.2f} at {N // 1024}k" for N, x in curve)
        assert told in plain(alt), f"the alternative text lacks {told!r}"
    assert not called and len(looks) == len(curves), "each number of GPUs has a mark of its own"
    assert ticks(ax.xaxis) == {f"{N // 1024}k": N for curve in curves.values() for N, _ in curve}
    assert all(float(said) == y for said, y in ticks(ax.yaxis).items()) and len(ticks(ax.yaxis)) >= 3
    most, (longest, times) = max(curves), curves[max(curves)][-1]
    said = figure.get_suptitle().split(": ")[1]
    assert said == f"{most} GPUs at {times / most:.1%} of linear speed, {longest // 1024}k tokens"
    assert ax.get_title(loc="left") == "times as fast as one GPU" and ax.get_xlabel() == "tokens in all"
    assert figure.get_supxlabel() == data["setting"] and data["setting"] in alt


@pytest.mark.parametrize("changes", [{}, RING], ids=["the record", "made up"])
def test_the_contiguous_layout_is_one_cross_at_its_length_with_its_name_before_it(changes):
    figure, alt, data = redrawn("ring_speed", **changes)
    ax, (n, N, times) = figure.axes[0], data["contiguous"]
    (cross,) = [line for line in ax.lines if line.get_marker() == "x"]
    assert same(points(cross), [(N, times)]), "the cross stands elsewhere"
    text = named(ax, f"{n} GPUs, contiguous, {times:.2f}")
    (x, y), box = ax.transData.transform(cross.get_xydata()[0]), around(text)
    assert 0 < x - box.x1 < 25 and 0 < box.y0 - y < 15, "the name is not left of the cross, just above it"
    assert f"In contiguous layout {n} GPUs are {times:.2f} times as fast." in alt
    figure, alt, _ = redrawn("ring_speed", contiguous=None)
    assert "contiguous" not in plain(alt + " ".join(t.get_text() for t in style.texts(figure)))


@pytest.mark.parametrize("changes", [{}, RING], ids=["the record", "made up"])
def test_a_bar_of_the_ring_s_memory_is_as_high_as_its_gib_from_zero(changes):
    figure, alt, data = redrawn("ring_speed", **changes)
    ax, places = figure.axes[1], ticks(figure.axes[1].xaxis)
    assert ax.get_title(loc="left") == "peak GiB of each GPU" and ax.get_yscale() == "linear"
    assert list(places) == [f"{n} GPU" + "s" * (n > 1) for n in data["memory"]] and len(boxes(ax)) == len(places)
    for (said, x), mib in zip(places.items(), data["memory"].values(), strict=True):
        (bar,) = [box for box in boxes(ax) if box.get_x() < x < box.get_x() + box.get_width()]
        assert (bar.get_y(), bar.get_height()) == (0, mib / 1024), f"{said}: the bar of another"
        (text,) = [t for t in ax.texts if around(bar).x0 < sum(around(t).intervalx) / 2 < around(bar).x1]
        assert text.get_text() == f"{mib / 1024:.1f}" and 0 <= around(text).y0 - around(bar).y1 < 8, f"{said}: number"
        assert f"{mib:,.0f} on {numbers(said)[0]:.0f}" in alt.split("Peak MiB of a GPU: ")[1]
    assert ax.get_ylim()[0] == 0 and all(float(said) == y for said, y in ticks(ax.yaxis).items())


def test_the_ring_s_curves_bars_and_setting_are_those_of_the_record():
    record, data = records.load("ring"), drawn("ring_speed")[2]
    whole = [row for row in record.rows if "layout" not in row.problem]
    both = {row.problem["N_q"]: row.values for row in whole if row.direction == "both"}
    for n, curve in data["curves"].items():
        found = [(N, times["1 GPU"][0] / times[f"{n} GPUs"][0]) for N, times in sorted(both.items())]
        assert same(curve, found), f"{n} GPUs"
    peaks = {row.problem["N_q"]: row for row in whole if row.direction == "peak memory"}
    longest = peaks[max(peaks)]
    assert longest.unit == "MiB"
    assert data["memory"] == {int(name.split()[0]): mib for name, (mib,) in longest.values.items()}
    p = longest.problem
    facts = [f"{p['heads']} heads of {p['d']}", f"memory at {p['N_q']:,} tokens", record.machine["gpu"]]
    facts += ["forward and backward", "causal"] if p["causal"] else ["no mask"]
    assert all(fact in data["setting"] for fact in facts), data["setting"]
    assert ring_speed.name_of(1) in longest.values


# Time and memory ----------------------------------------------------------------------------------------------------

TIME = {
    "standard": [(512, 2.0), (2048, 9.0)],
    "FA1": [(512, 4.0), (2048, 30.0)],
    "FA2": [(512, 1.0), (1024, 1.9), (2048, 3.5)],
    "ours": [(512, 0.4), (1024, 0.7), (2048, 1.5)],
}
HELD = {
    "standard": [(1024, 300.0), (2048, 1200.0)],
    "FA2": [(1024, 2.0), (2048, 4.0), (4096, 8.0)],
    "ours": [(1024, 2.0), (2048, 4.0), (4096, 8.0)],
}


@pytest.mark.parametrize("changes", [{}, dict(time=TIME, memory=HELD)], ids=["the record", "made up"])
def test_a_curve_of_time_and_memory_is_named_at_its_end_and_looks_the_same_in_both_panels(changes):
    figure, alt, data = redrawn("time_and_memory", **changes)
    looks = {}
    for ax, panel, unit in zip(figure.axes, ("time", "memory"), ("milliseconds", "MiB"), strict=True):
        assert ax.get_xscale() == ax.get_yscale() == "log", f"{panel} is not on logarithmic axes"
        assert ax.get_title(loc="left").endswith(f", {unit}") and ax.get_title(loc="left").lower().startswith(panel)
        called = {name: line for said, line in ends(ax).items() for name in said.split(":")[0].split(", ")}
        assert set(called) == set(data[panel]), f"{panel}: names at the ends of curves"
        assert len(ax.lines) == len(data[panel])
        for line, (name, curve) in zip(ax.lines, data[panel].items(), strict=True):
            assert same(points(line), curve), f"{panel}: {name} is another's curve"
            look = (line.get_linestyle(), line.get_marker(), line.get_color(), line.get_markerfacecolor())
            assert looks.setdefault(name, look) == look, f"{name} looks otherwise in {panel}"
            assert same(points(called[name]), curve, near=0.01), f"{panel}: {name!r} stands at the end of another curve"
            (first, low), (last, high) = curve[0], curve[-1]
            told = f"{name} from {low:,.3g} at N = {first:,} to {high:,.6g} at {last:,}"
            assert told in alt.split("MiB beyond the inputs: ")[panel == "memory"], told
        longest = max(N for curve in data[panel].values() for N, _ in curve)
        places = ticks(ax.xaxis)
        assert all(numbers(said) == [x] for said, x in places.items()), f"{panel}: {places}"
        lengths = {N for curve in data[panel].values() for N, _ in curve}
        assert longest in places.values() and set(places.values()) <= lengths and len(places) >= 2
        assert all(numbers(said) == [pytest.approx(y)] for said, y in ticks(ax.yaxis).items())
        assert len(ticks(ax.yaxis)) >= 2 and ax.get_xlabel() == "N, tokens in a text"
    assert len(set(looks.values())) == len(looks) == 4, "two curves look alike"
    assert plain(figure.get_supxlabel()) == data["setting"] and data["setting"] in alt


@pytest.mark.parametrize("changes", [{}, dict(time=TIME, memory=HELD)], ids=["the record", "made up"])
def test_the_title_of_time_and_memory_compares_ours_with_standard_at_the_length_that_both_panels_end_at(changes):
    figure, _, data = redrawn("time_and_memory", **changes)
    N = data["time"]["standard"][-1][0]
    assert data["memory"]["standard"][-1][0] == N, "the title would speak of two lengths"
    faster, less = (dict(data[panel]["standard"])[N] / dict(data[panel]["ours"])[N] for panel in ("time", "memory"))
    said = f"At N = {N:,}: {faster:.1f} times as fast as standard attention, in 1/{less:.0f} of its memory"
    assert figure.get_suptitle() == said


def test_what_time_and_memory_say_in_words_is_in_the_records():
    figure, _, data = drawn("time_and_memory")
    memory, grid = (records.load(suite) for suite in ("memory", "paper"))
    named(figure.axes[1], "standard: the next\nis out of memory")
    last = data["memory"]["standard"][-1][0]
    (after,) = [row for row in memory.rows if row.direction == "forward"
                and (row.problem["N_q"], row.problem["d"]) == (2 * last, time_and_memory.d)]  # fmt: skip
    assert after.failed[time_and_memory.MEMORY["standard"]] == "out of memory" and after.unit == "MiB"
    for (N, theirs), (M, ours) in zip(data["memory"]["FA2"], data["memory"]["ours"], strict=True):
        assert N == M and ours == pytest.approx(theirs, rel=0.01), f"N = {N}: one name stands for two curves"
    p = after.problem
    facts = [f"forward, {p['heads']} heads, d = {p['d']}", f"Memory: one text, {'causal' * p['causal']}"]
    facts += [f"Time: {time_and_memory.TOKENS:,} tokens in texts of N", grid.made()]
    assert p["batch"] == 1 and all(fact in data["setting"] for fact in facts), data["setting"]
    assert json.dumps(memory.machine["gpu"]) == json.dumps(grid.machine["gpu"]), "one machine is named"


# Quadratic memory ---------------------------------------------------------------------------------------------------

HUES = {"S and P": style.hue("S"), "Q, K, V, O": style.INK, "L": style.hue("L")}
MODELS = pytest.mark.parametrize("made", [{}, dict(heads=8, d=64, width=4)], ids=["the book's", "another model"])


@MODELS
def test_curves_of_memory_are_their_tensors_bytes_in_their_colours_on_both_sides(made):
    figure, _, data = redrawn("quadratic_memory", made)
    scale, slopes = figure.axes
    assert {scale.get_xscale(), scale.get_yscale()} == {"linear"} and scale.get_ylim()[0] == scale.get_xlim()[0] == 0
    assert slopes.get_xscale() == slopes.get_yscale() == "log"
    heads, d, width, four = (int(n) for n in numbers(data["setting"])[1:])
    N = data["N"].astype(float)
    sizes = {"S and P": 2 * width * heads * N**2, "Q, K, V, O": 4 * width * heads * N * d, "L": four * heads * N}
    for ax, unit, names in ((scale, GiB, ("S and P", "Q, K, V, O")), (slopes, 1, tuple(sizes))):
        curves = [line for line in ax.lines if line.get_linestyle() == "-" and len(line.get_xdata()) > 2]
        assert len(curves) == len(names), f"{len(curves)} curves for {names}"
        for name in names:
            (line,) = [line for line in curves if same_color(line.get_color(), HUES[name])]
            shown = len(line.get_xdata())
            assert line.get_xdata() == pytest.approx(N[:shown]), f"{name}: lengths"
            assert line.get_ydata() * unit == pytest.approx(sizes[name][:shown]), f"{name}: bytes of another tensor"
            text = [t for t in ax.texts if re.split(r"[:\n]", t.get_text())[0] == name]
            assert len(text) == 1 and nearest(text[0], curves) is line, f"{name} stands at another curve"
            if ax is slopes:
                growth = round((sizes[name][8] / sizes[name][0]) ** (1 / np.log2(N[8] / N[0])))
                assert f"×{growth}" in text[0].get_text().split(), f"{name}: growth when N doubles"
                assert shown == len(N)
    assert plain(figure.get_supxlabel()) == data["setting"]
    assert all(numbers(said) == [x] for said, x in (ticks(scale.xaxis) | ticks(scale.yaxis)).items())
    assert len(ticks(scale.xaxis)) >= 3 and scale.get_ylabel() == "GiB"
    assert scale.get_title(loc="left").startswith("To scale") and slopes.get_title(loc="left") == "On logarithmic axes"
    powers = dict(zip(("", "Ki", "Mi", "MiB", "GiB", "TiB"), (0, 10, 20, 20, 30, 40), strict=True))
    for said, place in (ticks(slopes.xaxis) | ticks(slopes.yaxis)).items():
        number, _, unit = said.partition(" ")
        assert place == int(number) * 2 ** powers[unit], f"{said!r} stands at {place:,.0f}"
    assert len(ticks(slopes.xaxis)) >= 3 <= len(ticks(slopes.yaxis)), "axes without numbers"
    assert scale.get_xlabel() == slopes.get_xlabel() == "sequence length N"


@MODELS
def test_a_gpu_s_line_lies_at_its_memory_with_its_name_behind_it_and_a_dot_where_s_and_p_fill_it(made):
    figure, alt, data = redrawn("quadratic_memory", made)
    ax = figure.axes[0]
    dashed = [line for line in ax.lines if line.get_linestyle() == "--"]
    (curve,) = [line for line in ax.lines if same_color(line.get_color(), HUES["S and P"])]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert len(dashed) == len(dots) == len(data["chips"])
    for name, size, last in data["chips"]:
        (line,) = [line for line in dashed if set(line.get_ydata()) == {size / GiB}]
        text = named(ax, f"{size / GiB:.0f} GiB\n{name}")
        assert_level(text, line)
        assert 0 < around(text).x0 - around(line).x1 < 12, f"{name} does not stand behind its line"
        assert {chip.hbm_bytes for chip in chips.CHIPS.values() for part in name.split(", ") if part in chip.name} == {
            size
        }
        (dot,) = [dot for dot in dots if points(dot) == [(last, size / GiB)]]
        assert np.interp(last, *curve.get_xydata().T) == pytest.approx(size / GiB, rel=0.01), "the dot is off the curve"
        number = named(ax, f"N = {last:,}")
        assert nearest(number, dots) is dot and around(number).x1 < around(dot).x1, f"{number.get_text()}: another dot"
        assert 0 < around(number).y0 - around(line).y1 < 8, f"{number.get_text()} does not lie on its line"
        assert f"{name} ({size / GiB:.0f} GiB) from N = {last + 1:,}" in alt
    assert f"up to N = {data['N'][-1]:,}" in plain(alt)
