"""The explorer: what a moment shows of FA1 and FA2, the sliders through time, and the page without a kernel."""

import itertools
import json
import re
import subprocess
import sys
from html import escape
from xml.etree import ElementTree

import pytest

from fa2_lab.machine import io
from fa2_lab.plots import explorer, style
from fa2_lab.plots.explorer import MISSING, SLIDERS, Box, Text, explore
from fa2_lab.tiles import Tile

SETTINGS = [
    dict(),
    dict(t=0),
    dict(causal=True),
    dict(N_q=8, N_k=12, B_r=4, B_c=4, t=200),
    dict(N_q=24, N_k=24, B_r=2, B_c=2),
    dict(N_q=24, N_k=4, B_r=5, B_c=12, t=100, causal=True),
    dict(N_q=4, N_k=24, B_r=3, B_c=5, t=10**6),
    dict(N_q=24, N_k=24, B_r=12, B_c=2, t=900),
]
moments = pytest.mark.parametrize("settings", SETTINGS, ids=str)


def boxes(data, what):
    """The boxes of one kind, FA1's and FA2's."""
    found = [s for s in explorer.shapes(**data) if isinstance(s, Box) and s.what == what]
    middle = explorer.WIDTH / 2
    return [b for b in found if b.x < middle], [b for b in found if b.x > middle]


def words(data):
    return [s.words for s in explorer.shapes(**data) if isinstance(s, Text)]


@moments
def test_both_run_on_one_clock_and_the_one_that_moves_less_is_done_earlier(settings):
    data = explorer.data(**settings)
    moved = {name: sum(e.elements for e in explorer.until(log, data["t"])) for name, log in data["events"].items()}
    for name, log in data["events"].items():
        next_one = [e.elements for e in log[len(explorer.until(log, data["t"])) :][:1]]
        assert moved[name] <= data["t"] and all(moved[name] + n > data["t"] for n in next_one)
        total = io.traffic(name.lower(), "forward", data["tiling"], explorer.D).total
        assert f"{moved[name]:,} of {total:,} moved" in words(data)
    end = explorer.data(**settings | dict(t=explorer.times(data["events"])[-1]))
    assert words(end).count("done") == 2 and words(end).count("on the chip now: 0 numbers") == 2


BY_HAND = {  # from the algorithms' lines: (name, events complete) of 2 × 2 tiles -> what must be on the chip
    ("FA1", 3): {},  # O, l and m were set, in HBM
    ("FA1", 4): dict(K=0),
    ("FA1", 9): dict(K=0, V=0, Q=0, O=0, l=0, m=0, S=0),
    ("FA1", 10): dict(K=0, V=0, Q=0, O=0, l=0, m=0, S=0),  # O leaves
    ("FA1", 12): dict(K=0, V=0, Q=0, m=0),  # m leaves
    ("FA1", 13): dict(K=0, V=0, Q=1),
    ("FA1", 20): dict(K=1, V=0),
    ("FA2", 1): dict(Q=0, O=0, l=0, m=0),
    ("FA2", 3): dict(Q=0, O=0, l=0, m=0, K=0, V=0, S=0),
    ("FA2", 4): dict(Q=0, O=0, l=0, m=0, K=1, V=0),
    ("FA2", 6): dict(Q=0, O=0, l=0, m=0, K=1, V=1, S=0),
    ("FA2", 7): dict(Q=0, K=1, V=1, L=0),
    ("FA2", 8): dict(Q=1, O=1, l=1, m=1),  # another thread block
}


@pytest.mark.parametrize("name, complete", BY_HAND)
def test_what_is_on_the_chip(name, complete):
    log = explorer.data(N_q=8, N_k=8)["events"][name]
    t = sum(e.elements for e in log[:complete])
    assert explorer.on_chip(name, log, t) == BY_HAND[name, complete]


def test_fa2_never_has_its_sums_anywhere_else_than_on_the_chip():
    events = explorer.data()["events"]
    for t in explorer.times(events)[:-1]:
        chip = explorer.on_chip("FA2", events["FA2"], t)
        assert not chip or {"O", "l", "m"} <= chip.keys() or "L" in chip, t


@moments
def test_the_chip_is_the_largest_thing_and_shows_each_block_with_its_number(settings):
    data = explorer.data(**settings)
    shapes = [s for s in explorer.shapes(**data) if isinstance(s, Box)]
    assert max(shapes, key=lambda box: box.w * box.h).what == "chip"
    for side, (name, log) in enumerate(data["events"].items()):
        chip = explorer.on_chip(name, log, data["t"])
        for tensor in "QKVSOlmL":
            assert len(boxes(data, f"chip {tensor}")[side]) == (tensor in chip), (name, tensor)
        (frame,) = boxes(data, "chip")[side]
        for box in itertools.chain(*(boxes(data, f"chip {tensor}")[side] for tensor in chip)):
            assert frame.x < box.x and box.x + box.w < frame.x + frame.w
            assert frame.y < box.y and box.y + box.h < frame.y + frame.h


@pytest.mark.parametrize("name, complete", [case for case in BY_HAND if BY_HAND[case]])
def test_a_block_bears_its_letter_and_number_and_what_moves_is_strong(name, complete):
    data = explorer.data(N_q=8, N_k=8)
    log, side = data["events"][name], list(explorer.STAGES).index(name)
    data["t"] = sum(e.elements for e in log[:complete])
    moving, chip = log[complete - 1], BY_HAND[name, complete]
    texts = [(shape.x, shape.y, shape.words) for shape in explorer.shapes(**data) if isinstance(shape, Text)]
    for tensor, k in chip.items():
        (box,) = boxes(data, f"chip {tensor}")[side]
        number = f"{chip['Q']}{chip['K']}" if tensor == "S" else f"{k}"
        letter = "L" if tensor == "L" else tensor.lower()
        middle = (pytest.approx(box.x + box.w / 2), pytest.approx(box.y + box.h / 2))
        said = [words for x, y, words in texts if (x, y) == middle]
        assert said == [letter + number.translate(explorer.SUBSCRIPTS)]
        assert (box.line > 2) == (tensor == moving.tensor), tensor
        assert (box.fill == style.PAPER) == (tensor == moving.tensor and moving.op == "store"), tensor
    blocks = ", ".join(f"{style.ell(tensor)} {k}" for tensor, k in chip.items() if tensor != "S")
    assert f"on the chip: {blocks}." in explorer.describe(**data)


@moments
def test_each_tensor_that_moves_has_a_bar_as_long_as_what_has_moved(settings):
    data = explorer.data(**settings)
    for side, log in enumerate(data["events"].values()):
        for tensor in {e.tensor for e in log}:
            (whole,), (part,) = (boxes(data, f"{what} {tensor}")[side] for what in ("all", "moved"))
            done = [e.elements for e in explorer.until(log, data["t"]) if e.tensor == tensor]
            assert part.w / whole.w == pytest.approx(sum(done) / sum(e.elements for e in log if e.tensor == tensor))
            assert (part.x, part.y) == (whole.x, whole.y) and f"{sum(done):,}" in words(data)
    (fa1, _), (_, fa2) = boxes(data, "FA1 total"), boxes(data, "FA2 total")
    longest = max(sum(e.elements for e in log) for log in data["events"].values())
    for (bar,), log in zip((fa1, fa2), data["events"].values(), strict=True):
        assert bar.w == pytest.approx(explorer.COLUMN * sum(e.elements for e in log) / longest)


def test_before_anything_moves_it_says_so():
    data = explorer.data(t=0)
    assert words(data).count("nothing has moved yet") == 2
    assert explorer.describe(**data).count("nothing has moved yet; on the chip: nothing.") == 2


def test_what_moves_is_named_with_its_blocks():
    log = explorer.data(N_q=8, N_k=8)["events"]["FA2"]
    assert explorer.now(log[:3], log) == "now: load V, row block 0 and column block 0"
    assert explorer.now(log[:1], log) == "now: load Q, row block 0"


@moments
def test_tiles_are_numbered_from_0_in_the_order_of_their_visits(settings):
    data = explorer.data(**settings)
    tiling = data["tiling"]
    for side, log in enumerate(data["events"].values()):
        visited = {(e.i, e.j) for e in explorer.until(log, data["t"]) if None not in (e.i, e.j)}
        assert len(boxes(data, "done")[side]) == len(visited)
        assert len(boxes(data, "to come")[side]) == tiling.T_r * tiling.T_c - len(visited)
    data = explorer.data(t=10**6)
    numbers = [w for w in words(data) if w.isdigit() and int(w) < 9]
    assert [numbers.count(str(n)) for n in range(9)] == [2] * 9


def test_fa1_visits_what_the_mask_hides_and_fa2_does_not():
    data = explorer.data(causal=True, t=10**6)
    hidden = sum(data["tiling"].kind(i, j) is Tile.SKIP for i in range(3) for j in range(3))
    fa1, fa2 = boxes(data, "done")
    assert (len(fa1), len(fa2)) == (9, 9 - hidden) and hidden == 3


@pytest.mark.parametrize("name", explorer.STAGES)
def test_the_block_that_moves_is_marked_in_its_matrix(name):
    data = explorer.data()
    side, log, tiling, t = list(explorer.STAGES).index(name), data["events"][name], data["tiling"], 0
    for event in log[:-1]:
        t += event.elements
        now = data | dict(t=t)
        if event.tensor in "QKVO":
            (block,), (strip,) = boxes(now, f"{event.op} {event.tensor}")[side], boxes(now, f"HBM {event.tensor}")[side]
            along = (block.w / strip.w) if event.tensor in "KV" else (block.h / strip.h)
            whole = tiling.N_k if event.tensor in "KV" else tiling.N_q
            assert along * whole * explorer.D == pytest.approx(event.elements)
            assert (block.fill == style.PAPER) == (event.op == "store")
        assert re.search(rf"{name}: [^.]* now: {event.op} {style.ell(event.tensor)},", explorer.describe(**now))


@moments
def test_the_svg_shows_what_the_figure_shows(settings):
    data = explorer.data(**settings)
    root = ElementTree.fromstring("".join(explorer.svg_parts(**data)))
    space = "{http://www.w3.org/2000/svg}"
    assert [t.text for t in root.iter(f"{space}text")] == [*map(style.ell, words(data))]
    assert len(list(root.iter(f"{space}rect"))) == sum(isinstance(s, Box) for s in explorer.shapes(**data))
    assert root.find(f"{space}desc").text == explorer.describe(**data) and root.find(f"{space}title").text


def test_the_page_has_every_moment_inside_and_asks_for_nothing():
    html = explorer.page()
    parts, frames = json.loads(re.search(r'application/json">(.*?)</script>', html, re.DOTALL)[1].replace("<\\/", "</"))
    data = explorer.data()
    moments = explorer.times(data["events"])
    assert [[parts[n] for n in frame] for frame in frames] == [explorer.svg_parts(**data | dict(t=t)) for t in moments]
    at = int(re.search(r'value="(\d+)"', html)[1])
    assert moments[at] == data["t"] and "".join(parts[n] for n in frames[at]) in html
    assert not re.search(r"src=|href=|fetch|import", html) and len(html) < 300_000


# The widget ---------------------------------------------------------------------------------------------------


@pytest.fixture
def widget():
    pytest.importorskip("ipywidgets")
    return explore()


def shown(widget):
    return widget.picture.value


def test_it_begins_where_the_printed_picture_is_and_the_step_moves_both(widget):
    data = explorer.data()
    assert shown(widget) == "".join(explorer.svg_parts(**data))
    widget.step.value = 0
    assert shown(widget).count("nothing has moved yet") >= 2
    widget.step.value = widget.step.max
    assert "744 of 744" in shown(widget) and "396 of 396" in shown(widget)


@pytest.mark.parametrize("name, value", [*[(n, high) for n, (_, high) in SLIDERS.items()], ("causal", True)])
def test_every_control_redraws_and_gives_the_step_its_new_length(widget, name, value):
    before = shown(widget)
    widget.controls[name].value = value
    moments = explorer.times(explorer.data(**{name: value})["events"])
    assert shown(widget) != before and widget.step.max == len(moments) - 1
    assert f"After {moments[widget.step.value]:,} numbers" in shown(widget)
    assert abs(moments[widget.step.value] / moments[-1] - 212 / 744) < 0.1


def test_the_player_and_the_slider_are_one(widget):
    player = widget.box.children[0].children[0]
    assert (player.value, player.max) == (widget.step.value, widget.step.max)
    player.value = 20
    assert widget.step.value == 20
    widget.controls["N_q"].value = 24
    assert player.max == widget.step.max and player.value == widget.step.value


def test_settings_are_where_the_controls_begin():
    pytest.importorskip("ipywidgets")
    widget = explore(N_q=40, causal=True, t=3)
    values = {name: control.value for name, control in widget.controls.items()}
    assert values == dict(N_q=40, N_k=12, B_r=4, B_c=4, causal=True) and "After 0 numbers" in shown(widget)


def test_a_notebook_keeps_a_picture_where_no_kernel_runs(widget):
    data, _ = widget._repr_mimebundle_()
    alt = explorer.describe(**explorer.data())
    assert f'<img alt="{escape(alt)}" ' in data["text/html"] and data["text/plain"] == f"[figure] {alt}"
    assert "application/vnd.jupyter.widget-view+json" in data


def test_without_ipywidgets_one_sentence_and_one_moment():
    source = "import sys; sys.modules['ipywidgets'] = None\nfrom fa2_lab.plots.explorer import explore\n"
    source += "print(explore()._repr_mimebundle_()[0]['text/plain'])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"{MISSING}\n[figure] FA1 and FA2 on 3 by 3 tiles at time 212"), done.stderr
