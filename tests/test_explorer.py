"""The explorer: what one moment shows, and that every control redraws it."""

import itertools
import subprocess
import sys
from collections import Counter

import pictures  # noqa: F401  measures texts as they are drawn
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fa2_lab.machine import io
from fa2_lab.plots import moment, style
from fa2_lab.plots.explorer import MISSING, SLIDERS, explore
from fa2_lab.tiles import Tile

SETTINGS = [
    dict(),
    dict(t=0),
    dict(order="FA1", causal=False),
    dict(order="FA1", N_q=8, N_k=12, B_r=4, B_c=4, t=40),
    dict(order="FA1", N_q=24, N_k=24, B_r=2, B_c=2),
    dict(order="FA1", N_q=24, N_k=4, B_r=5, B_c=12, t=1),
    dict(order="FA2", N_q=4, N_k=24, B_r=3, B_c=5, t=10**6),
    dict(order="FA1", N_q=48, N_k=48, B_r=6, B_c=3, t=10**6),
    dict(order="FA2", N_q=48, N_k=48, B_r=2, B_c=24, causal=False, t=10**6),
]
moments = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def tagged(figure, gid):
    return [a for a in figure.findobj(lambda artist: artist.get_gid() == gid)]


def done_tiles(data):
    """The tiles that the meter names up to this moment, found in another way than the picture does."""
    return {(e.i, e.j) for e in data["events"][: data["t"]] if None not in (e.i, e.j)}


@moments
def test_what_is_done_is_filled_and_the_rest_is_not(settings):
    data = moment.data(**settings)
    figure, alt = moment.draw(**data)
    tiling, done = data["tiling"], done_tiles(data)
    corner = {(patch.get_y(), patch.get_x()): patch for patch in tagged(figure, "done")}
    assert set(corner) == {(tiling.rows(i).start, tiling.cols(j).start) for i, j in done}
    assert len(corner) + len(tagged(figure, "to come")) == tiling.T_r * tiling.T_c
    kinds = Counter(tiling.kind(i, j) for i, j in done)
    full = [p for p in corner.values() if style.colors.same_color(p.get_facecolor(), style.hue("S"))]
    assert len(full) == kinds[Tile.FULL]
    assert f"{len(done)} of " in alt


@moments
def test_the_current_event_is_framed_and_its_block_drawn_in_the_tensor_s_colour(settings):
    data = moment.data(**settings)
    figure, alt = moment.draw(**data)
    if data["t"] == 0:
        assert not tagged(figure, "now") and "Nothing has moved yet" in alt
        return
    event, tiling = data["events"][: data["t"]][-1], data["tiling"]
    (frame,), (block,) = tagged(figure, "now"), tagged(figure, f"{event.op} {event.tensor}")
    height = tiling.N_q if event.i is None else len(range(tiling.N_q)[tiling.rows(event.i)])
    width = tiling.N_k if event.j is None else len(range(tiling.N_k)[tiling.cols(event.j)])
    assert (frame.get_width(), frame.get_height()) == (width, height)
    of_a_matrix = event.tensor in "QKVO"
    across = block.get_width() if event.tensor in "KV" else block.get_height()
    assert across * (data["d"] if of_a_matrix else 1) == event.elements
    assert style.colors.same_color(block.get_edgecolor(), style.hue(event.tensor))
    assert f"Now: {event.op} {event.tensor}," in alt


@pytest.mark.parametrize("order", ["FA1", "FA2"])
def test_every_tensor_shows_the_block_that_moves(order):
    """Checked at the first load and the first store of each tensor in a block other than the first."""
    data = moment.data(order=order)
    tiling, first = data["tiling"], {}
    for t, event in enumerate(data["events"]):
        if event.i or event.j:
            first.setdefault((event.op, event.tensor), t)
    assert len(first) == {"FA1": 9, "FA2": 5}[order]
    for (op, tensor), t in first.items():
        figure, _ = moment.draw(**data | dict(t=t + 1))
        (block,), event = tagged(figure, f"{op} {tensor}"), data["events"][t]
        if tensor in "KV":
            assert block.get_x() == tiling.cols(event.j).start and block.get_height() == data["d"]
        else:
            assert block.get_y() == tiling.rows(event.i).start and block.get_height() == tiling.B_r


@moments
def test_the_time_axis_holds_every_event_once_and_past_ones_in_colour(settings):
    data = moment.data(**settings)
    figure, _ = moment.draw(**data)
    spans = {True: Counter(), False: Counter()}
    for tensor, op, past in itertools.product("QKVOLlm", ("load", "store"), (True, False)):
        for bars in tagged(figure, f"{op} {tensor} {'past' if past else 'to come'}"):
            spans[past][op, tensor] += len(bars.get_paths())
    events, t = data["events"], data["t"]
    assert spans[True] == Counter((e.op, e.tensor) for e in events[:t])
    assert spans[False] == Counter((e.op, e.tensor) for e in events[t:])


def test_at_the_end_everything_has_moved():
    for order, causal in itertools.product(("FA1", "FA2"), (False, True)):
        data = moment.data(order=order, causal=causal, t=10**6)
        form = io.traffic(order.lower(), "forward", data["tiling"], data["d"])
        assert sum(e.elements for e in data["events"]) == form.total
        title = moment.draw(**data)[0].get_suptitle()
        assert title.endswith(f"{form.total:,} of {form.total:,} elements")


def test_fa1_visits_what_the_mask_hides_and_fa2_does_not():
    said = {order: words(moment.data(order=order, t=10**6)) for order in ("FA1", "FA2")}
    assert "SKIP: 3 of 3" in said["FA1"] and "SKIP: 3, never visited" in said["FA2"]


def words(data):
    return [t.get_text() for t in style.texts(moment.draw(**data)[0])]


@moments
def test_it_is_readable_uncut_and_free_of_overlaps(settings):
    figure, _ = moment.draw(**moment.data(**settings))
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = [(t, t.get_window_extent(renderer).padded(-1)) for t in style.texts(figure)]
    for text, box in boxes:
        assert text.get_fontsize() >= 7
        assert figure.bbox.contains(box.x0, box.y0) and figure.bbox.contains(box.x1, box.y1), text.get_text()
    for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
        assert not box_a.overlaps(box_b), (a.get_text(), b.get_text())
    for patch in figure.findobj(lambda artist: hasattr(artist, "label_text")):
        inner, outer = patch.label_text.get_window_extent(renderer), patch.get_window_extent(renderer)
        assert outer.contains(inner.x0, inner.y0) and outer.contains(inner.x1, inner.y1), patch.label_text.get_text()


# The widget ---------------------------------------------------------------------------------------------------


@pytest.fixture
def widget():
    pytest.importorskip("ipywidgets")
    return explore()


def shown(widget):
    return widget.picture.value


def test_it_begins_halfway_and_time_moves_it(widget):
    controls = widget.controls
    assert controls["t"].max == 27 and controls["t"].value == 13
    assert "FA2, causal: 13 of 27 loads and stores" in shown(widget)
    controls["t"].value = 0
    assert "Nothing has moved yet" in shown(widget)
    controls["t"].value = 27
    assert "27 of 27 loads and stores, 324 of 324 elements" in shown(widget)
    assert shown(widget).startswith('<img width="730" alt="') and "data:image/png;base64," in shown(widget)


@pytest.mark.parametrize(
    "name, value", [*[(n, high) for n, (_, high) in SLIDERS.items()], ("causal", False), ("order", "FA1")]
)
def test_every_control_redraws_and_gives_time_its_new_length(widget, name, value):
    before = shown(widget)
    widget.controls[name].value = value
    events = len(moment.data(**{name: value})["events"])
    assert shown(widget) != before and widget.controls["t"].max == events
    assert abs(widget.controls["t"].value / events - 13 / 27) < 0.5 / events + 1e-9
    assert f"{widget.controls['t'].value} of {events} loads and stores" in shown(widget)


def test_the_player_and_the_slider_are_one(widget):
    player = widget.children[3].children[0]
    assert (player.value, player.max) == (13, 27)
    player.value = 20
    assert widget.controls["t"].value == 20 and "20 of 27" in shown(widget)
    widget.controls["order"].value = "FA1"
    assert player.max == widget.controls["t"].max > 27 and player.value == widget.controls["t"].value


def test_settings_are_where_the_controls_begin():
    pytest.importorskip("ipywidgets")
    widget = explore(order="FA1", N_q=40, causal=False, t=3)
    values = {name: control.value for name, control in widget.controls.items()}
    assert values == dict(order="FA1", N_q=40, N_k=12, B_r=4, B_c=3, causal=False, t=3)


def test_without_ipywidgets_one_sentence_and_one_moment():
    source = "import sys; sys.modules['ipywidgets'] = None\nfrom fa2_lab.plots.explorer import explore\n"
    source += "print(explore()._repr_mimebundle_()[0]['text/plain'])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"{MISSING}\n[figure] FA2, causal: 13 of 27 loads and stores"), done.stderr
