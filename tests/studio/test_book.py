"""The book as a reader and a machine find it: twins, outputs, lengths, links, alternative texts."""

import re
from html import unescape

import jupytext
import nbformat
import pytest
from jupytext.config import load_jupytext_config

from fa2_studio.book.chapters import NOTEBOOKS, PARTS, TEXT, navigation, written
from fa2_studio.book.command import main
from fa2_studio.book.run import read_twin

CHAPTERS = written()
each = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.name)
CODE_LINES, PROSE_WORDS = 25, 140


def load(chapter):
    return nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4)


def tags(cell):
    return cell.metadata.get("tags", [])


@each
def test_notebook_and_text_twin_are_the_same(chapter):
    notebook, twin = load(chapter), jupytext.read(TEXT / f"{chapter.name}.py", fmt="py:percent")
    assert [(c.cell_type, c.source, tags(c)) for c in notebook.cells] == [
        (c.cell_type, c.source, tags(c)) for c in twin.cells
    ], "run `python -m fa2_lab book --record`"
    assert [c.source for c in read_twin(chapter).cells] == [c.source for c in notebook.cells]
    nbformat.validate(notebook)


@each
def test_every_code_cell_was_run_in_order_without_error(chapter):
    code = [c for c in load(chapter).cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    for cell in code:
        failed = [o for o in cell.outputs if o.output_type == "error"]
        assert not failed or "raises-exception" in tags(cell), cell.source


@each
def test_navigation_and_rhythm(chapter):
    cells = load(chapter).cells
    bar = navigation(chapter.name, CHAPTERS)
    assert cells[0].source == cells[-1].source == bar
    text = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    assert cells[1].source.startswith(f"# {chapter.number} · ")
    for part in ("After this notebook you can", "*Time: ", "Hardware: ", "## Recap", "## Exercises", "## Checks"):
        assert part in text, part
    assert text.index("## Recap") < text.index("## Exercises") < text.index("## Checks")
    assert text.count("**Predict.**") >= 4 and text.count("**Takeaway.**") >= 4
    assert text.count("<details>") == text.count("</details>") >= 3


@each
def test_cells_are_short(chapter):
    for cell in load(chapter).cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= CODE_LINES, cell.source
        elif "exercise" not in cell.source.lower():
            prose = re.sub(r"<details>.*?</details>|```.*?```|^\|.*?$", "", cell.source, flags=re.DOTALL | re.MULTILINE)
            assert len(prose.split()) <= PROSE_WORDS or cell.source.startswith("# "), cell.source


@each
def test_folds_render_their_markdown(chapter):
    """Without an empty line after the summary a fold's first paragraph is raw HTML, and shows its backticks."""
    for cell in load(chapter).cells:
        for raw in re.findall(r"</summary>\n(?!\n)(.*?)(?:\n\n|</details>)", cell.source, flags=re.DOTALL):
            assert "`" not in raw and "**" not in raw, raw


@each
def test_links_lead_somewhere(chapter):
    for cell in load(chapter).cells:
        texts = [o.get("data", {}).get("text/markdown", "") for o in cell.get("outputs", [])]
        texts += [cell.source] if cell.cell_type == "markdown" else []
        for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(texts)):
            if not target.startswith("https://"):
                assert (NOTEBOOKS / target.split("#")[0]).exists(), target


@each
def test_every_image_has_an_alternative_text(chapter):
    for cell in load(chapter).cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            assert "image/png" not in data, "JupyterLab would show it without its text"
            for alt in re.findall(r'<img alt="([^"]*)"', data.get("text/html", "")):
                assert len(alt) >= 80 and data["text/plain"] == "[figure] " + unescape(alt)
        assert "![](" not in cell.source


@each
def test_the_last_section_checks_and_prints_verdicts_only(chapter):
    cells = load(chapter).cells
    start = next(i for i, c in enumerate(cells) if c.source.startswith("## Checks"))
    printed = [o for c in cells[start:] if c.cell_type == "code" for o in c.outputs]
    assert printed
    for output in printed:
        assert output.output_type == "stream" and all(line.startswith("ok  ") for line in output.text.splitlines())


@each
def test_answers_wait(chapter):
    """The output of what follows a question directly is folded, and code that is marked so; nothing else is."""
    asked = False
    for cell in load(chapter).cells:
        if cell.cell_type == "markdown":
            asked = "**Predict.**" in cell.source
        else:
            folds = cell.metadata.get("jupyter", {})
            assert folds.get("outputs_hidden", False) == asked, cell.source
            assert folds.get("source_hidden", False) == ("hide-input" in tags(cell)), cell.source


def test_jupyterlab_opens_the_notebook_as_it_is():
    """Were it paired with its twin, what the twin does not hold would be lost: all folds."""
    assert load_jupytext_config(str(NOTEBOOKS / f"{CHAPTERS[0].name}.ipynb")) is None


def test_the_blank_copy_has_every_cell_and_no_answer(tmp_path, capsys):
    assert main(["02", "B", "--blank", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out == f"open {tmp_path / 'mine' / '02_online_softmax.ipynb'}\n"
    assert sorted(p.stem for p in (tmp_path / "mine").iterdir()) == ["02_online_softmax", "B_errata"]
    blank = nbformat.read(tmp_path / "mine" / "02_online_softmax.ipynb", as_version=4)
    (chapter,) = [c for c in CHAPTERS if c.name == "02_online_softmax"]
    assert [(c.id, c.source) for c in blank.cells] == [(c.id, c.source) for c in load(chapter).cells]
    assert not any(c.get("outputs") or c.get("execution_count") for c in blank.cells)


@each
def test_formulas_are_closed(chapter):
    """LaTeX stands between dollar signs: an odd one would swallow the rest of a paragraph."""
    for cell in load(chapter).cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"```.*?```|`[^`]*`", "", cell.source, flags=re.DOTALL)
            for paragraph in text.split("\n\n"):
                assert paragraph.count("$") % 2 == 0, paragraph


def test_the_last_chapter_of_each_part_asks_ten_questions_about_it():
    asking = {}
    for chapter in CHAPTERS:
        text = "\n".join(c.source for c in load(chapter).cells if c.cell_type == "markdown")
        for part, questions in re.findall(r"^## Ten questions on part (\w+)\n(.*?)(?=^## )", text, re.DOTALL | re.M):
            asking[part] = chapter.number
            folds = re.findall(r"<summary>(\d+)\. [^\n]*\?[^\n]*</summary>\n\n\S", questions)
            assert folds == [str(n) for n in range(1, 11)], chapter.name
    here = [c.number for c in CHAPTERS]
    last = {part.split(" · ")[0]: [n for n in of.split() if n in here][-1] for part, of in PARTS.items()}
    assert asking == {part: number for part, number in last.items() if part != "Appendices"}


def test_no_notebook_lacks_its_twin_and_no_twin_its_notebook():
    names = [c.name for c in CHAPTERS]
    assert sorted(p.stem for p in NOTEBOOKS.glob("*.ipynb")) == names == sorted(p.stem for p in TEXT.glob("*.py"))
