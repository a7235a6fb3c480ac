"""Every picture, judged by its artists: readable, uncut, stable, and the file in figures/ is the one the code draws."""

import functools
import itertools
import os
import re
import subprocess
import sys
from functools import partial
from xml.etree import ElementTree

import numpy as np
import pictures
import pytest
from matplotlib import colors
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from slices import thinned

from fa2_lab.plots import style
from fa2_lab.tools import files
from fa2_lab.tools.figures import PICTURES, SHEETS, gallery_page, main

FOLDER = files.ROOT / "figures"
SVG = "{http://www.w3.org/2000/svg}"
WITH_COMMENTS = partial(ElementTree.TreeBuilder, insert_comments=True)
by_name = pytest.mark.parametrize("picture", PICTURES, ids=lambda p: p.name)


@functools.cache
def drawn(name):
    """(figure, alt, data, renderer) of a picture, drawn once for all tests."""
    figure, alt, data = pictures.drawn(name)
    return figure, alt, data, FigureCanvasAgg(figure).get_renderer()


@by_name
def test_the_file_is_current_and_says_what_it_shows(picture):
    figure, alt, data, _ = drawn(picture.name)
    svg = ElementTree.parse(FOLDER / picture.still, ElementTree.XMLParser(target=WITH_COMMENTS())).getroot()
    title, desc, fingerprint = (part.text for part in svg[:3])
    assert fingerprint.split(",")[0].strip() == picture.digest(data), f"run `python -m fa2_lab figures {picture.name}`"
    assert (title.split(), desc) == (figure.get_suptitle().split(), alt)


@by_name
def test_its_words_are_text_that_can_be_read_at_the_width_of_a_page(picture):
    svg = ElementTree.parse(FOLDER / picture.still).getroot()
    page = 700 / float(svg.get("viewBox").split()[2])  # pixels of a page, for a unit of the picture
    words = [text for text in svg.iter(f"{SVG}text") if "".join(text.itertext()).strip()]
    sizes = [float(re.search(r"([\d.]+)px", text.get("style"))[1]) for text in words]
    assert sizes and min(sizes) * page >= 9
    assert "sans-serif" in svg.get("font-family") and not any("family" in text.get("style") for text in words)
    assert (FOLDER / picture.still).stat().st_size < 200_000


@by_name
def test_no_mark_is_cut_off_by_its_axes(picture):
    figure, _, _, renderer = drawn(picture.name)
    for ax in figure.axes:
        lines = () if picture.name == "quadratic_memory" else ax.lines  # there a curve leaves through the top
        for mark in (*ax.patches, *ax.collections, *lines):
            extent = mark.get_window_extent(renderer)
            if mark.get_visible() and mark.get_clip_on() and np.isfinite(extent.extents).all():
                assert ax.bbox.padded(3).containsx(extent.x0) and ax.bbox.padded(3).containsx(extent.x1), mark
                assert ax.bbox.padded(3).containsy(extent.y0) and ax.bbox.padded(3).containsy(extent.y1), mark


@by_name
def test_text_is_not_cut_off(picture):
    figure, _, _, renderer = drawn(picture.name)
    assert figure.get_figwidth() <= style.WIDTH
    page = figure.bbox.padded(1)
    for text in style.texts(figure):
        extent = text.get_window_extent(renderer)
        assert page.contains(extent.x0, extent.y0) and page.contains(extent.x1, extent.y1), text.get_text()


@by_name
def test_no_text_lies_on_another(picture):
    figure, _, _, renderer = drawn(picture.name)
    boxes = [(t, t.get_window_extent(renderer).padded(-1)) for t in style.texts(figure)]
    for (a, box_a), (b, box_b) in itertools.combinations(boxes, 2):
        assert not box_a.overlaps(box_b), (a.get_text(), b.get_text())


@by_name
def test_labels_stay_in_their_boxes(picture):
    figure, _, _, renderer = drawn(picture.name)
    for patch in figure.findobj(lambda artist: hasattr(artist, "label_text")):
        inner, outer = patch.label_text.get_window_extent(renderer), patch.get_window_extent(renderer).padded(1)
        assert outer.contains(inner.x0, inner.y0) and outer.contains(inner.x1, inner.y1), patch.label_text.get_text()


def places(artist, ax):
    """Where in an axes something is drawn, in pixels: its points, or the two corners around it."""
    if isinstance(artist, Line2D):
        found = artist.get_transform().transform(artist.get_xydata())
        return found[np.isfinite(found).all(axis=1)]
    path = artist.get_transform().transform_path(artist.get_path())
    return path.get_extents().get_points() if len(path.vertices) else []


@by_name
def test_nothing_is_drawn_beyond_the_ends_of_its_axes(picture):
    """Or it would be cut off: a mark that is missing says something else."""
    figure, _, _, _ = drawn(picture.name)
    leaves = picture.name == "quadratic_memory"  # its parabola goes on where no GPU follows
    for ax in figure.axes:
        room = ax.bbox.padded(1.5)
        for mark in (*ax.patches, *(line for line in ax.lines if line.get_clip_on() and not leaves)):
            if mark.get_transform().contains_branch(ax.transData):
                assert all(room.contains(x, y) for x, y in places(mark, ax)), (ax.get_title(loc="left"), mark)


@by_name
def test_no_text_lies_across_the_edge_of_a_box(picture):
    """A text is in a box or beside it: then it is clear what it belongs to."""
    figure, _, _, renderer = drawn(picture.name)
    if picture.name in ("causal_tiles", "motion"):
        return  # there a name lies on all tiles of its kind, and numbers on their way pass each other
    boxes = [patch for patch in figure.findobj(Rectangle) if patch.axes and patch is not patch.axes.patch]
    outer = [(box, box.get_window_extent(renderer)) for box in boxes]
    for text in style.texts(figure):
        inner = text.get_window_extent(renderer).padded(-1)
        for box, extent in outer:
            wide = extent.width >= inner.width and extent.height >= inner.height
            if wide and extent.overlaps(inner) and getattr(box, "label_text", None) is not text:
                around = extent.padded(2)
                assert around.contains(*inner.min) and around.contains(*inner.max), text.get_text()


@by_name
def test_boxes_lie_in_each_other_or_side_by_side(picture):
    """A box that lies half on another would hide a part of it, and stand in two places. (A frame hides nothing.)"""
    figure, _, _, renderer = drawn(picture.name)
    over = ("row", "O part")  # a row of the intervals goes over tiles; partial sums of O lie on each other
    for ax in figure.axes if picture.name != "motion" else ():  # there they are on their way
        boxes = [box for box in ax.findobj(Rectangle) if box is not ax.patch and box.get_fill()]
        boxes = [box for box in boxes if box.get_gid() not in over]
        corners = np.array([box.get_window_extent(renderer).extents for box in boxes]).reshape(-1, 4)
        for k, mine in enumerate(corners):
            low, high = corners[:k, :2], corners[:k, 2:]
            meets = ((low < mine[2:] - 1) & (high > mine[:2] + 1)).all(axis=1)
            within = ((low <= mine[:2] + 1) & (high >= mine[2:] - 1)).all(axis=1)
            around = ((low >= mine[:2] - 1) & (high <= mine[2:] + 1)).all(axis=1)
            assert not (meets & (within == around)).any(), boxes[k].get_gid()


@by_name
def test_no_line_goes_through_a_text(picture):
    figure, _, _, renderer = drawn(picture.name)
    passes = dict(hbm_traffic=["L2"], programs=["taken by the package: 128"]).get(picture.name, [])  # at a curve's foot
    lines = [line for ax in figure.axes for line in ax.lines if line.get_linestyle() != "None"]
    for text in (t for t in style.texts(figure) if t.get_text() not in passes):
        extent = text.get_window_extent(renderer).padded(-1)
        for line in lines:
            path = line.get_transform().transform_path(line.get_path())
            assert not path.intersects_bbox(extent, filled=False), text.get_text()


@by_name
def test_nothing_has_the_colour_that_matplotlib_takes_where_none_is_named(picture):
    figure, _, _, _ = drawn(picture.name)
    filled = figure.findobj(lambda part: isinstance(part, Patch) and part.get_fill())
    lines = figure.findobj(Line2D)
    used = [part.get_facecolor() for part in filled] + [line.get_color() for line in lines]
    assert not any(colors.same_color(colors.to_rgb(colour), blue) for colour in used for blue in ("C0", "b"))


@by_name
def test_it_has_one_message_and_an_alternative_text(picture):
    figure, alt, _, _ = drawn(picture.name)
    assert figure.get_suptitle() and "\n\n" not in figure.get_suptitle()
    assert 80 <= len(alt) <= 900 and "\n" not in alt
    assert picture.sentence.endswith(".") and len(picture.sentence) <= 160


@pytest.mark.parametrize("picture", thinned(PICTURES, step=4), ids=lambda p: p.name)
def test_the_same_data_gives_the_same_bytes(picture):
    data = pictures.data_of(picture.name)  # its figure is not taken: in a file the places have another unit
    one, two = (style.svg(picture.file.draw(**data)[0]) for _ in range(2))
    assert one == two
    assert picture.digest(data) == picture.digest(picture.file.data())


def test_every_picture_is_a_file_with_data_and_draw_and_nothing_lies_between():
    drawing = {f.stem for f in (FOLDER.parent / "fa2_lab" / "plots").glob("*.py")}
    helpers = {"__init__", "explorer", "hero", "ideas", "live", "poster", "records", "show", "style"}
    assert {p.name for p in PICTURES} == drawing - helpers
    assert all(callable(p.file.data) and callable(p.file.draw) for p in PICTURES)
    chapters = FOLDER.parent / "notebooks" / "text"
    for picture in PICTURES:
        if picture.chapter == "README":
            text = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
        else:
            text = (chapters / f"{picture.chapter}.py").read_text(encoding="utf-8")
        assert f"{picture.name}.draw(" in text or f"figures/{picture.name}.svg)" in text, picture.name


def test_names_are_unique_and_the_folder_holds_nothing_else():
    names = [p.name for p in PICTURES]
    assert len(set(names)) == len(names)
    assert {f.name for f in FOLDER.iterdir()} == {f"{n}.svg" for n in names} | {p.still for p in PICTURES} | {
        "README.md",
        "data",
        "hero.svg",
        "hero_still.svg",
        "live",
        *(f"{sheet}.{kind}" for sheet in SHEETS for kind in ("svg", "pdf")),
    }
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == gallery_page()


def test_one_figure_can_be_drawn_alone_and_an_unknown_one_is_named(tmp_path, capsys):
    assert main(["visiting_order", "--folder", str(tmp_path)]) == 0
    assert "1 figures" in capsys.readouterr().out
    assert {f.name for f in tmp_path.iterdir()} == {"visiting_order.svg", "README.md"}
    with pytest.raises(ValueError, match=r"^figure: got sunset; it takes"):
        main(["sunset", "--folder", str(tmp_path)])


def test_a_picture_that_is_interrupted_leaves_the_earlier_one_whole(tmp_path, monkeypatch):
    (tmp_path / "workers.svg").write_text("earlier")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        patched.setattr(files, "check_writable", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            main(["workers", "--folder", str(tmp_path)])
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("workers.svg", "earlier")]


def test_two_runs_at_once_lose_nothing(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    main(["workers", "zigzag", "--folder", str(alone)])
    command = [sys.executable, "-m", "fa2_lab", "figures", "--folder", str(together)]
    runs = [subprocess.Popen([*command, *names], cwd=files.ROOT) for names in (["workers"], ["zigzag", "workers"])]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    for name in ("workers.svg", "zigzag.svg", "README.md"):
        assert (together / name).read_bytes() == (alone / name).read_bytes()
    assert len([*together.iterdir()]) == 3


def test_where_nothing_can_be_kept_nothing_is_drawn(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(style, "svg", None)
    with pytest.raises(ValueError, match=r"^figures: cannot write into .*file/figures .*; nothing was done"):
        main(["workers", "--folder", str(tmp_path / "file" / "figures")])
    monkeypatch.setattr(files, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"^figures without --folder needs a checkout of the repository"):
        main(["workers"])


def test_no_colour_is_written_outside_the_style():
    for file in (FOLDER.parent / "fa2_lab" / "plots").glob("*.py"):
        if file.name != "style.py":
            assert '"#' not in file.read_text(encoding="utf-8"), file


def test_text_reads_on_every_fill():
    fills = [*style.HUES.values(), *style.WORKERS, style.MASKED, style.PAPER]
    fills += [style.fill(tensor) for tensor in style.HUES]
    for fill in fills:
        assert style.contrast(style.ink_on(fill), fill) >= 4.5, fill
    assert style.contrast(style.QUIET, style.PAPER) >= 4.5
    assert style.contrast("#000000", "#FFFFFF") == pytest.approx(21)


# Machado, Oliveira, Fernandes 2009: linear RGB as seen with full protan-, deuteran- and tritanopia.
DEFICIENCIES = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def lab(color, matrix=None):
    """CIE Lab of a colour, as seen through a deficiency."""
    rgb = np.array(style.colors.to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(linear if matrix is None else np.array(matrix) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(np.maximum(to_xyz @ linear / np.array([0.9505, 1.0, 1.089]), 1e-4))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("deficiency", [None, *DEFICIENCIES])
def test_the_palette_survives_colour_blindness(deficiency):
    matrix = DEFICIENCIES.get(deficiency)
    hues = {style.BLUE, style.ORANGE, style.GREEN, style.PINK, style.VERMILION, style.SKY}
    for group in (sorted(hues), style.WORKERS, (style.fill("S"), style.fill("P")), (*style.WORKERS, style.MASKED)):
        for a, b in itertools.combinations(group, 2):
            assert np.linalg.norm(lab(a, matrix) - lab(b, matrix)) > 10, (deficiency, a, b)


def test_a_worker_has_no_tensor_s_colour():
    colours = [*style.HUES.values(), *map(style.fill, style.HUES)]
    for own, tensor in itertools.product(style.WORKERS, colours):
        assert np.linalg.norm(lab(own) - lab(tensor)) > 10, (own, tensor)
