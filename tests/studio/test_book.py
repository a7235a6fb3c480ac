"""The book as a reader finds it: notebooks and their sources agree, ran, link, and keep answers folded."""

import itertools
import re
from functools import cache
from html import unescape

import jupytext
import nbformat
import pytest
from jupytext.config import load_jupytext_config
from PIL import Image

from fa2_studio.book import climb_loop, pictures
from fa2_studio.book.chapters import NOTEBOOKS, PARTS, TEXT, navigation, written
from fa2_studio.book.command import main
from fa2_studio.book.run import read_source

CHAPTERS = written()
for_each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.name)


@cache
def read_notebook(chapter):
    return nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4)


def tags(cell):
    return cell.metadata.get("tags", [])


def prose(chapter) -> str:
    return "\n".join(c.source for c in read_notebook(chapter).cells if c.cell_type == "markdown")


@for_each_chapter
def test_notebook_matches_its_source(chapter):
    notebook, text = read_notebook(chapter), jupytext.read(TEXT / f"{chapter.name}.py", fmt="py:percent")
    assert [(c.cell_type, c.source, tags(c)) for c in notebook.cells] == [
        (c.cell_type, c.source, tags(c)) for c in text.cells
    ], "run `python -m fa2_lab book --record`"
    assert [c.source for c in read_source(chapter).cells] == [c.source for c in notebook.cells]
    nbformat.validate(notebook)


@for_each_chapter
def test_notebook_cells_ran_in_order_without_error(chapter):
    code = [c for c in read_notebook(chapter).cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    for cell in code:
        failed = [o for o in cell.outputs if o.output_type == "error"]
        assert not failed or "raises-exception" in tags(cell), cell.source


@for_each_chapter
def test_chapter_states_prerequisites_and_has_questions(chapter):
    cells, text = read_notebook(chapter).cells, prose(chapter)
    assert cells[0].source == cells[-1].source == navigation(chapter.name, CHAPTERS)
    assert cells[1].source.startswith(f"# {chapter.number} · ")
    for part in ("*Time: ", "Hardware: ", "## Recap", "## Checks"):
        assert part in text, part
    assert "## Exercises" in text or "**Build.**" in text


@for_each_chapter
def test_chapter_markdown_renders(chapter):
    """A fold needs an empty line after its summary, a formula its second dollar sign."""
    for cell in read_notebook(chapter).cells:
        if cell.cell_type == "markdown":
            assert cell.source.count("<details>") == cell.source.count("</details>")
            for raw in re.findall(r"</summary>\n(?!\n)(.*?)(?:\n\n|</details>)", cell.source, flags=re.DOTALL):
                assert "`" not in raw and "**" not in raw, raw
            text = re.sub(r"```.*?```|`[^`]*`", "", cell.source, flags=re.DOTALL)
            assert all(paragraph.count("$") % 2 == 0 for paragraph in text.split("\n\n")), cell.source


@for_each_chapter
def test_chapter_lists_follow_an_empty_line(chapter):
    """If a formula is broken before its plus or minus, Markdown makes a list of the rest."""
    for source in (cell.source for cell in read_notebook(chapter).cells if cell.cell_type == "markdown"):
        lines = re.sub(r"```.*?```", "", source, flags=re.DOTALL).splitlines()
        for before, line in itertools.pairwise(lines):
            if re.match(r"([-+*]|1[.)]) ", line):
                assert re.match(r"$|\s|[-+*] |\d+[.)] ", before), f"{before}\n{line}"


@for_each_chapter
def test_chapter_links_resolve(chapter):
    outputs = [o for c in read_notebook(chapter).cells for o in c.get("outputs", [])]
    shown = [o.get("data", {}).get("text/markdown", "") for o in outputs]
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join([prose(chapter), *shown])):
        if not target.startswith("https://"):
            assert (NOTEBOOKS / target.split("#")[0]).exists(), target


@for_each_chapter
def test_chapter_images_have_alt_text(chapter):
    for cell in read_notebook(chapter).cells:
        assert "![](" not in cell.source
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            assert "image/png" not in data, "JupyterLab would show it without its text"
            for alt in re.findall(r'<img alt="([^"]*)"', data.get("text/html", "")):
                assert len(alt) >= 80
                assert data["text/plain"].endswith(unescape(alt)) or data["text/plain"].startswith("[live] ")


@for_each_chapter
def test_chapter_cells_display_every_requested_figure(chapter):
    """A cell displays its last line only, so a picture before other lines would be drawn and lost."""
    for cell in read_notebook(chapter).cells:
        requested = len(re.findall(r"^(?:show|live)\(", cell.source, re.MULTILINE)) if cell.cell_type == "code" else 0
        shown = sum(output.get("data", {}).get("text/html", "").count("<img") for output in cell.get("outputs", []))
        assert shown >= requested, cell.source


@for_each_chapter
def test_chapter_last_section_prints_verdicts_only(chapter):
    cells = read_notebook(chapter).cells
    start = next(i for i, c in enumerate(cells) if c.source.startswith("## Checks"))
    printed = [o for c in cells[start:] if c.cell_type == "code" for o in c.outputs]
    assert printed
    for output in printed:
        assert output.output_type == "stream" and all(line.startswith("ok  ") for line in output.text.splitlines())


@for_each_chapter
def test_chapter_setup_code_is_folded(chapter):
    for cell in read_notebook(chapter).cells:
        folds = {"source_hidden": True} if "hide-input" in tags(cell) else {}
        assert cell.metadata.get("jupyter", {}) == folds, cell.source


def quiz_cards(chapter) -> list[str]:
    return [c.source for c in read_notebook(chapter).cells if "**Predict.**" in c.source]


@for_each_chapter
def test_quiz_offers_its_right_answer(chapter):
    """The site compares what is ticked with the answer's bold words."""
    for card in quiz_cards(chapter):
        question, answer = card.split("<details><summary>Answer</summary>")
        choices = re.findall(r"^- ☐ (.+?)[.,:]?$", question, re.MULTILINE)
        right = re.search(r"\*\*(.+?)[.,:]?\*\*", answer)[1].split("; ")
        assert not choices or set(right) < set(choices), (choices, right)


def test_notebooks_are_not_paired_with_sources():
    """Were it paired with its source, what that does not hold would be lost: all folds."""
    assert load_jupytext_config(str(NOTEBOOKS / f"{CHAPTERS[0].name}.ipynb")) is None


def test_blank_copy_has_every_cell_and_no_answer(tmp_path, capsys):
    assert main(["02", "B", "--blank", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out == f"open {tmp_path / 'mine' / '02_online_softmax.ipynb'}\n"
    assert sorted(p.stem for p in (tmp_path / "mine").iterdir()) == ["02_online_softmax", "B_errata"]
    blank = nbformat.read(tmp_path / "mine" / "02_online_softmax.ipynb", as_version=4)
    (chapter,) = [c for c in CHAPTERS if c.name == "02_online_softmax"]
    assert [(c.id, c.source) for c in blank.cells] == [(c.id, c.source) for c in read_notebook(chapter).cells]
    assert not any(c.get("outputs") or c.get("execution_count") for c in blank.cells)


def test_chapters_have_one_part_a_notebook_and_a_source():
    names = [c.name for c in CHAPTERS]
    assert sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb")) == names == sorted(p.stem for p in TEXT.glob("*.py"))
    assert {c.number for c in CHAPTERS} == set(" ".join(PARTS.values()).split())


def test_animated_climb_and_data_of_interactive_figures_are_up_to_date():
    for name, content in pictures.generated_files().items():
        file = NOTEBOOKS.parent / "figures" / name
        assert file.read_text(encoding="utf-8") == content, "run `python -m fa2_studio.book.pictures`"
    preview = NOTEBOOKS.parent / "figures" / "card.png"
    with Image.open(preview) as png:
        assert png.size == (1200, 630)
        assert png.text["drawing"] == pictures.fingerprint(pictures.preview_card()), "with Chromium, run it"
    for gif in (preview.with_name("climb_loop.gif"), preview.with_name("hero.gif")):
        with Image.open(gif) as animation:
            assert animation.n_frames > 50 and gif.stat().st_size < 2_000_000


def test_animated_climb_names_largest_gains_and_all_losses():
    climb = climb_loop.climb_data()
    rungs, jumps = climb["rungs"], climb["jumps"]
    gain_of = {r.number: r.full / b.full for b, r in itertools.pairwise(rungs)}
    named = {jump.after.number for jump in jumps}
    assert min(jump.factor for jump in jumps) > max(gain_of[n] for n in gain_of.keys() - named - {"01", "02"})
    best, peer = max(r.full for r in rungs), climb["peer"][1]
    losses = [int(r.number) for b, r in itertools.pairwise(rungs) if b.full - r.full > 0.02 * peer]
    words = re.search(r"Arrows: changes ([\d, and]+) lose speed", climb_loop.climb_svg(**climb))[1]
    assert [int(k) for k in re.findall(r"\d+", words)] == losses and best == rungs[-1].full
