"""Every picture: readable at 784 pixels and on a phone, nothing cut or covered, and words for those who cannot see.

The file in figures/ shows what the code draws: the same words, colours and shapes, wherever matplotlib puts them.
"""

import functools
import itertools
import os
import pickle
import re
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from fa2_lab.plots import poster, show, style
from fa2_lab.plots.live import STILLS
from fa2_lab.tools import figures, files

FIGURES = files.ROOT / "figures"
SVG = "{http://www.w3.org/2000/svg}"
CHAPTER_PICTURES = [*figures.PICTURES, *(f"{figures.PHONE}/{name}" for name in figures.PICTURES)]
for_each_picture = pytest.mark.parametrize("name", [*CHAPTER_PICTURES, *figures.SHEETS])
for_chapter_pictures = pytest.mark.parametrize("name", CHAPTER_PICTURES)
matplotlib.rcParams["text.hinting"] = style.RC["text.hinting"]  # texts are measured as they were laid out


def draw(name):
    """Return (figure, alternative text) of a picture, of its edition for a phone, or of a poster."""
    if name in figures.SHEETS:
        return poster.draw(**poster.data(figures.SHEETS[name]))
    folder, _, name = name.rpartition("/")
    return show.draw(name, narrow=folder == figures.PHONE)


@functools.cache
def drawn_picture(name):
    """Return a picture's figure, its alternative text, and a renderer that measures it. Each is drawn only once."""
    figure, alt = draw(name)
    return figure, alt, FigureCanvasAgg(figure).get_renderer()


@functools.cache
def as_svg(name):
    """Return a picture as SVG. A copy is saved, because saving changes a figure, and copying is faster than drawing."""
    figure, alt, _ = drawn_picture(name)
    return (style.svg if name in figures.SHEETS else figures.with_source)(pickle.loads(pickle.dumps(figure)), alt)


def visible_texts(figure):
    """Return all visible texts of a figure. Labels of ticks beyond the ends of an axis exist, but are not visible."""
    hidden = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            near = 1e-9 * (high - low)
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            outside = [tick for tick in ticks if not low - near <= tick.get_loc() <= high + near]
            hidden |= {label for tick in outside for label in (tick.label1, tick.label2)}
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and t not in hidden]
    return [t for t in texts if not t.get_text().isspace()]


# The file -------------------------------------------------------------------------------------------------------

POSITION_ATTRIBUTES = ("x", "y", "width", "height", "d", "transform", "viewBox")  # places
POSITION_ATTRIBUTES += ("id", "clip-path", "{http://www.w3.org/1999/xlink}href")  # names that matplotlib makes up


def elements(svg):
    """Return (kind, words, looks) of each element of an SVG."""
    found = []
    for e in ElementTree.fromstring(svg).iter():
        looks = {k: re.sub(r"url\(#\w+\)", "url", v) for k, v in e.attrib.items() if k not in POSITION_ATTRIBUTES}
        found.append((e.tag.rpartition("}")[2], " ".join((e.text or "").split()), looks))
    return found


@for_each_picture
def test_figure_file_is_up_to_date_with_caption_and_alt_text(name):
    committed = (FIGURES / f"{name}.svg").read_bytes()
    pairs = itertools.zip_longest(elements(committed), elements(as_svg(name)))
    first = next((pair for pair in pairs if pair[0] != pair[1]), None)
    assert not first, f"run `python -m fa2_lab figures {name.removeprefix('narrow/')}`: {first}"
    root = ElementTree.fromstring(committed)
    caption, alt = root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")
    assert caption.endswith(".") and 60 <= len(alt) <= 1000
    assert (caption, alt) == (drawn_picture(name)[0].get_label(), drawn_picture(name)[1])


# What a reader sees ---------------------------------------------------------------------------------------------


@for_each_picture
def test_figure_text_is_legible_without_overlaps(name):
    figure, _, renderer = drawn_picture(name)
    page, least = figure.bbox.padded(1), 11 if name in figures.SHEETS else 9.75  # points; 9.75 are 13 pixels
    boxes = []
    for text in visible_texts(figure):
        assert text.get_fontsize() >= least, text.get_text()
        box = text.get_window_extent(renderer)
        assert page.contains(box.x0, box.y0) and page.contains(box.x1, box.y1), text.get_text()
        boxes.append((text.get_text(), box.padded(-1)))
    for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
        assert not box_a.overlaps(box_b), (a, b)


@for_each_picture
def test_figure_labels_fit_their_boxes_with_enough_contrast(name):
    for patch in drawn_picture(name)[0].findobj(lambda artist: hasattr(artist, "label_text")):
        text, renderer = patch.label_text, drawn_picture(name)[2]
        inner, outer = text.get_window_extent(renderer), patch.get_window_extent(renderer).padded(1)
        assert outer.contains(inner.x0, inner.y0) and outer.contains(inner.x1, inner.y1), text.get_text()
        background, foreground = (matplotlib.colors.to_hex(c) for c in (patch.get_facecolor(), text.get_color()))
        partner = {light.lower(): dark for light, dark in style.DARK.items()}
        dark = (partner.get(background, background), partner.get(foreground, foreground))
        for pair in ((background, foreground), dark):
            assert style.contrast(*pair) >= 4.5, (text.get_text(), pair)


@for_chapter_pictures
def test_figure_marks_are_not_clipped(name):
    """A mark that is missing would say something else."""
    figure, _, renderer = drawn_picture(name)
    for ax in figure.axes:
        area = ax.bbox.padded(3)
        for mark in (*ax.patches, *ax.collections, *ax.lines):
            box = mark.get_window_extent(renderer)
            if mark.get_visible() and mark.get_clip_on() and np.isfinite(box.extents).all():
                assert area.contains(box.x0, box.y0) and area.contains(box.x1, box.y1), mark


@for_each_picture
def test_figure_colours_are_in_the_palette_and_adapt_to_dark_mode(name):
    svg = as_svg(name).decode()
    body, rules = svg[svg.index("<defs") :], svg[: svg.index("<defs")]
    palette = {c.lower() for c in (*style.HUES.values(), *style.DARK, style.BLACK, style.WHITE)}
    used = set(re.findall(r"(?:fill|stroke)(?:: |=\")(#[0-9a-f]{6})", body))
    assert used <= palette, used - palette
    greys = {c for c in used if c in {light.lower() for light in style.DARK}}
    assert all(grey in rules for grey in greys) and "prefers-color-scheme: dark" in rules


def test_tensor_colours_are_distinct_for_colour_blind_readers():
    """Deuteranopia by Machado, Oliveira and Fernandes (2009), distances by CIELAB: 15 is plain to see."""
    seen = np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]])
    xyz = np.array([[0.4339, 0.3762, 0.1847], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8729]])  # white: 1, 1, 1
    lab = np.array([[0, 116, 0], [500, -500, 0], [0, 200, -200]])
    rgb = np.array([matplotlib.colors.to_rgb(style.hue(tensor)) for tensor in "QKVSPOm"])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    colours = np.cbrt(np.clip(linear @ seen.T, 0, 1) @ xyz.T) @ lab.T
    for a, b in itertools.combinations(range(7), 2):
        assert np.linalg.norm(colours[a] - colours[b]) >= 15, ("QKVSPOm"[a], "QKVSPOm"[b])


# The folder and the command -------------------------------------------------------------------------------------


def test_gallery_lists_every_figure_and_its_chapter():
    assert (FIGURES / "README.md").read_text(encoding="utf-8") == figures.gallery_page(FIGURES)
    wide, narrow = ((FIGURES / folder / "hero.svg").read_text(encoding="utf-8") for folder in ("", figures.PHONE))
    assert narrow == figures.stacked(wide)
    for name, chapter in figures.PICTURES.items():
        text = (files.ROOT / f"notebooks/text/{chapter}.py").read_text(encoding="utf-8")
        still = [f'live("{live}")' for live, shown in STILLS.items() if shown == name]
        assert any(shows in text for shows in (f'show("{name}")', f"figures/{name}.svg)", *still)), name


def test_figures_command_draws_one_and_rejects_unknown_names(tmp_path, capsys, monkeypatch):
    assert figures.main(["visiting_order", "--folder", str(tmp_path)]) == 0
    assert "1 figures" in capsys.readouterr().out
    assert {f.name for f in tmp_path.rglob("*.*")} == {"visiting_order.svg", "README.md"}
    wide, narrow = (tmp_path / folder / "visiting_order.svg" for folder in ("", figures.PHONE))
    assert wide.read_text() != narrow.read_text()
    monkeypatch.setenv("SITE", "https://example.org/book/")
    assert figures.main(["poster", "--folder", str(tmp_path)]) == 0 and "2 figures" in capsys.readouterr().out
    assert (tmp_path / "poster_backward.pdf").exists()
    assert "example.org/book<" in (tmp_path / "poster_forward.svg").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r"^figure: got sunset; it takes"):
        figures.main(["sunset", "--folder", str(tmp_path)])
    assert figures.chosen(["poster"]) == []  # no picture of a chapter


def test_interrupted_figures_command_keeps_the_earlier_file(tmp_path, monkeypatch):
    (tmp_path / "rescaling.svg").write_text("earlier")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    monkeypatch.setattr(files, "check_writable", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        figures.main(["rescaling", "--folder", str(tmp_path)])
    assert [(f.name, f.read_text()) for f in tmp_path.rglob("*.*")] == [("rescaling.svg", "earlier")]
