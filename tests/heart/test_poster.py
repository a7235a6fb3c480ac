"""The posters: what stands on them is what `where` and the meter say, and the sheets fit A3."""

import re
from functools import cache

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from pictures import words

from fa2_lab.paper import ALGORITHMS, where
from fa2_lab.plots import poster, style
from fa2_lab.reference import fa2
from fa2_lab.tools import files
from fa2_lab.tools.figures import POSTER, SHEETS
from fa2_lab.trace import Trace

sheets = pytest.mark.parametrize("name", SHEETS)
squeezed = "".join


@cache
def drawn(name):
    data = poster.data(SHEETS[name])
    return *poster.draw(**data), data


@sheets
def test_the_files_are_current_and_print_on_a3(name):
    data = drawn(name)[2]
    digest = POSTER.digest(data)
    svg, pdf = ((files.ROOT / "figures" / f"{name}.{kind}").read_bytes() for kind in ("svg", "pdf"))
    assert digest.encode() in svg and digest.encode() in pdf, "run `python -m fa2_lab figures poster`"
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+) ?\]", pdf)
    assert [float(side) * 25.4 / 72 for side in box.groups()] == pytest.approx([420, 297], abs=0.1)


@sheets
def test_every_line_stands_there_with_its_code(name):
    figure, _, data = drawn(name)
    said = squeezed(squeezed(words(figure)).split())
    algorithm = ALGORITHMS[SHEETS[name]]
    for line in algorithm.lines:
        if line.computes:
            found = where(algorithm.tag_of(line))
            assert squeezed(line.text.split()) in said
            assert found.first_numpy and found.first_triton
            for place in found.first_numpy + found.first_triton:
                assert squeezed(place.text.split("  #")[0].split()) in said
    assert [row.number for row in data["rows"]] == [line.number for line in algorithm.lines if line.computes]


@sheets
def test_nothing_is_cut_and_no_text_lies_on_another(name):
    figure, _, _ = drawn(name)
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [t.get_window_extent(renderer).padded(-1) for t in style.texts(figure)]
    page = figure.bbox.padded(-10)
    assert all(page.contains(b.x0, b.y0) and page.contains(b.x1, b.y1) for b in boxes)
    edges = np.array([b.extents for b in boxes])
    for k, (x0, y0, x1, y1) in enumerate(edges):
        apart = (edges[:, 0] >= x1) | (edges[:, 2] <= x0) | (edges[:, 1] >= y1) | (edges[:, 3] <= y0)
        assert apart.sum() == len(edges) - 1, [style.texts(figure)[n].get_text() for n in np.flatnonzero(~apart)] + [k]


@sheets
def test_the_work_on_the_sheet_adds_up_to_the_meter(name):
    """At other sizes: each line's formula, times its turns, gives the meter's totals."""
    N, B_r, B_c, d = 60, 10, 15, 7
    T_r, T_c = N // B_r, N // B_c
    Q, K, V, dO = np.random.default_rng(0).standard_normal((4, N, d))
    meter = Trace()
    if SHEETS[name] == "FA2.A1":
        fa2.forward(Q, K, V, B_r=B_r, B_c=B_c, trace=meter)
    else:
        fa2.backward(Q, K, V, *fa2.forward(Q, K, V, B_r=B_r, B_c=B_c), dO, B_r=B_r, B_c=B_c, trace=meter)
    turns = {0: 1, 1: T_r if SHEETS[name] == "FA2.A1" else T_c, 2: T_r * T_c}
    size = dict(N=N, B_r=B_r, B_c=B_c, d=d)
    total = dict.fromkeys(poster.LANES, 0)
    for row in drawn(name)[2]["rows"]:
        for lane, formula in row.work.items():
            for term in formula.split(" + "):
                factors = [size[f] if f in size else int(f) for f in term.split()]
                total[lane] += int(np.prod(factors)) * turns[row.depth]
    assert (total["load"], total["store"]) == (meter.loads(), meter.stores())
    assert (total["matmul"], total["exp"]) == (meter.matmul_flops, meter.exponentials)
    assert meter.other_flops <= total["other"] <= 1.05 * meter.other_flops + 3 * N * T_c  # a sum of n counts as n


def test_the_boxes_say_what_the_rows_say():
    figure, _, data = drawn("poster_forward")
    labels = {p.get_gid(): p.label_text.get_text() for p in figure.findobj(lambda a: hasattr(a, "label_text"))}
    for row in data["rows"]:
        for lane, formula in row.work.items():
            assert "".join(labels.pop(f"{lane} {row.number}").split()) == formula.replace(" ", "")
    assert not labels
