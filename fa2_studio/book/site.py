"""Render the book as an offline site. Sphinx and myst-nb render the recorded notebooks without running them."""

import ast
import os
import re
import shutil
import tempfile
from functools import cache
from html import escape, unescape
from pathlib import Path

import nbformat
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from fa2_lab.plots import live
from fa2_lab.tools import files
from fa2_lab.tools.figures import PICTURES, build_posters
from fa2_studio.bench.results_page import site_page
from fa2_studio.book import api, colab, front, questions
from fa2_studio.book.chapters import NOTEBOOKS, PARTS, written
from fa2_studio.course.notebooks import student_version

LOOKS_FOLDER = Path(__file__).with_name("looks")  # the style sheets and scripts
FIGURES = front.FIGURES
PICTURE = re.compile(r'<img alt="([^"]*)" width="\d+" src="data:image/png;base64,[^"]*">')  # of plots/show.py
SHOW_CELL = re.compile(r"(show|live)\(.*\)", flags=re.DOTALL)  # a cell that only shows a figure
LIVE = re.compile(r'<div class="live-piece" data-piece="(\w+)"(?: data-ask="([^"]*)")?>')  # of plots/live.py
PAGES = ("API.md", "TROUBLESHOOTING.md")  # files of the repository that are also pages of the site
SETTINGS = {
    "project": "fa2_lab",
    "html_baseurl": os.environ.get("SITE", ""),  # the site's address, which pages.yml sets
    "html_title": "fa2_lab",
    "html_context": {"default_mode": "auto"},
    "smartquotes": False,
    "extensions": ["myst_nb", "fa2_studio.book.callouts"],
    "nb_execution_mode": "off",
    "nb_render_markdown_format": "myst",
    "myst_enable_extensions": ["dollarmath"],
    "myst_heading_anchors": 4,
    "html_math_renderer": "mathml",
    "html_theme": "sphinx_book_theme",
    "html_static_path": [str(LOOKS_FOLDER)],
    "html_css_files": ["site.css"],
    "html_js_files": ["site.js"],
    "html_favicon": str(FIGURES / "mark.svg"),
    "html_logo": str(FIGURES / "mark.svg"),
    "html_show_sphinx": False,
    "html_show_copyright": False,
    "html_copy_source": False,
    "html_permalinks_icon": "#",
    "html_theme_options": {
        "show_navbar_depth": 1,
        "show_toc_level": 2,
        "navbar_persistent": [],
        "use_download_button": False,
        "footer_content_items": [],
        "use_fullscreen_button": False,
        "pygments_light_style": "a11y-high-contrast-light",
        "pygments_dark_style": "a11y-high-contrast-dark",
    },
}


def render_site(folder: Path) -> Path:
    """Render the committed notebooks as pages in a folder, and return the first page."""
    files.check_writable(folder, "book --html")
    with tempfile.TemporaryDirectory() as scratch:
        source, pages = Path(scratch, "source"), Path(scratch, "html")
        write_sources(source)
        with patch_docutils(), docutils_namespace():
            app = Sphinx(
                source,
                confdir=None,
                outdir=pages,
                doctreedir=Path(scratch, "doctrees"),
                buildername="html",
                confoverrides=SETTINGS,
                status=None,
                warningiserror=True,
            )
            app.connect("html-page-context", add_link_preview)
            app.build()
        shutil.copytree(pages, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".buildinfo", "objects.inv"))
    shutil.copytree(FIGURES, folder / "figures", dirs_exist_ok=True, ignore=shutil.ignore_patterns("data", "*.md"))
    if SETTINGS["html_baseurl"]:
        build_posters(folder / "figures")  # built again, because they now show the site's address
    front.write_card_pictures(folder / "figures" / front.CARD_FOLDER)
    for piece in (folder / "figures" / "live").glob("*.html"):
        html = piece.read_text(encoding="utf-8")
        title, words, _ = live.page_texts(piece.stem)
        tags = preview_tags(title, "../../", f"{front.CARD_FOLDER}/{piece.stem}.png", words)
        files.write(piece, html.replace("</head>", f"{tags}</head>", 1))
    return folder / "index.html"


def add_link_preview(app: Sphinx, page: str, template: str, context: dict, doctree: object) -> None:
    """Add link-preview tags to a page that does not have them yet. A chapter has a picture of its own."""
    if "og:image" not in context.get("metatags", ""):
        title = re.sub("<[^>]*>", "", context.get("title", ""))
        chapter = next((c for c in written() if c.name == page), None)
        own = (f"{front.CARD_FOLDER}/{page}.png", chapter.question) if chapter else ()
        context["metatags"] = context.get("metatags", "") + preview_tags(title, "../" * page.count("/"), *own)


def preview_tags(title: str, up: str, picture: str = "card.png", words: str = front.SENTENCE) -> str:
    """Return the tags for a page's preview on other sites: its title, a picture in figures/, and a sentence.

    The picture's address is complete if the site's address is known, and otherwise a path that begins with `up`.
    """
    tags = {
        "property=og:title": title,
        "property=og:description": escape(words),
        "property=og:image": f"{SETTINGS['html_baseurl'] or up}figures/{picture}",
        "name=twitter:card": "summary_large_image",
    }
    return "".join('<meta {}="{}" content="{}">\n'.format(*kind.split("="), text) for kind, text in tags.items())


def write_sources(folder: Path) -> None:
    """Write all files that Sphinx reads: the prepared notebooks, the other pages, the pictures and the index."""
    (folder / "assignments").mkdir(parents=True)
    buttons = {c.name: colab.links(c) for c in written()}
    for name in [*buttons, *assignment_pages()]:
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        if name not in buttons:
            notebook = student_version(notebook)  # without solutions
        prepare_notebook(notebook, buttons.get(name, ""))
        replace_links(notebook, (NOTEBOOKS / name).parent)
        nbformat.write(notebook, folder / f"{name}.ipynb")
    for name in PAGES:
        text = api.api_page() if name == "API.md" else (files.ROOT / name).read_text(encoding="utf-8")
        (folder / name).write_text(link_for_site(text, files.ROOT), encoding="utf-8")
    for name, text in questions.question_pages().items():
        (folder / f"{name}.md").write_text(link_for_site(text, files.ROOT), encoding="utf-8")
    shutil.copytree(FIGURES, folder / "figures", ignore=shutil.ignore_patterns("data", "*.md"))
    (folder / "results.md").write_text(link_for_site(site_page(), files.ROOT), encoding="utf-8")
    (folder / "index.md").write_text(index_page(), encoding="utf-8")


def assignment_pages() -> list[str]:
    """Return the paths of the assignments' notebooks without their suffix, as used in links."""
    return [f"assignments/{path.stem}" for path in sorted((NOTEBOOKS / "assignments").glob("*.ipynb"))]


# One notebook ---------------------------------------------------------------------------------------------------


def prepare_notebook(notebook: nbformat.NotebookNode, button: str = "") -> None:
    """Prepare a notebook for the site.

    Remove navigation bars, fold imports and hidden code, and colour printed Python. Replace recorded pictures with the
    files in figures/, and interactive figures with frames. Link to them and to the parts of the chapter at its top.
    """
    notebook.cells = [c for c in notebook.cells if "navigation" not in c.metadata.get("tags", [])]
    notebook.cells[0].source = re.sub(
        "\n\n(?=After this notebook)", f"{links_down(notebook)}\n\n", notebook.cells[0].source, count=1
    )
    if button:
        notebook.cells[0].source += f"\n\n{button}"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            tags, look = list(cell.metadata.get("tags", [])), {}
            if SHOW_CELL.fullmatch(cell.source) and cell.outputs:
                tags = [*tags, "remove-input"]  # the line show(…) is of no interest to readers
            elif is_import_cell(cell):
                tags = sorted({*tags, "hide-input"})
                look = {"code_prompt_show": "Imports", "code_prompt_hide": "Imports"}
            elif "hide-input" in tags:
                look = {"code_prompt_show": "The code", "code_prompt_hide": "The code"}
            listing = any(re.match(r"@|def |class ", output.get("text", "")) for output in cell.outputs)
            look["text_lexer"] = "python" if listing else "text"
            for output in cell.outputs:
                shown = output.get("data", {}).get("text/html", "")
                if found := LIVE.search(shown):
                    output.data = {"text/html": front.figure_frame(found[1], unescape(found[2] or ""))}
                elif (found := PICTURE.search(shown)) and (name := figures_by_description().get(unescape(found[1]))):
                    output.data["text/html"] = shown.replace(found[0], front.picture_html(name, unescape(found[1])))
            cell.metadata.update(tags=tags, mystnb=look)


def links_down(notebook: nbformat.NotebookNode) -> str:
    """Return a paragraph with links to the notebook's interactive figures, and one with links to its parts, if any."""
    shown = "".join(o.get("data", {}).get("text/html", "") for c in notebook.cells for o in c.get("outputs", []))
    pieces = [f'<a href="#live-{name}">{live.page_texts(name)[0]}</a>' for name, _ in LIVE.findall(shown)]
    headings = re.findall(r"^## Part (.*)$", "\n".join(c.source for c in notebook.cells), re.MULTILINE)
    parts = [f"[{re.sub(r' [(].*', '', words)}](#{questions.heading_anchor(f'Part {words}')})" for words in headings]
    lists = (("Try it on this page", pieces), ("Parts of this page", parts))
    return "".join(f"\n\n{title}: {'; '.join(links)}." for title, links in lists if links)


@cache
def figures_by_description() -> dict[str, str]:
    """Return {description: name} for the pictures in figures/."""
    return {front.picture_description(name): name for name in PICTURES}


def is_import_cell(cell: nbformat.NotebookNode) -> bool:
    """Return True if a cell consists of imports and at most one other statement, and has no output."""
    body = ast.parse(re.sub(r"^[%!].*", "", cell.source, flags=re.MULTILINE)).body
    imports = [isinstance(node, (ast.Import, ast.ImportFrom)) for node in body]
    return sum(imports) >= max(1, len(body) - 1) and not cell.outputs


def replace_links(notebook: nbformat.NotebookNode, at: Path) -> None:
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = link_for_site(cell.source, at)
        for output in cell.get("outputs", []):
            if "text/markdown" in output.get("data", {}):
                output.data["text/markdown"] = link_for_site(output.data["text/markdown"], at)


def link_for_site(text: str, at: Path) -> str:
    """Adapt the links in a text to the site: they lead to pages, pictures or GitHub, or become plain text.

    The original links are relative to the folder `at`.
    """

    def link(found: re.Match) -> str:
        words, target, anchor = found.groups(default="")
        file = Path(os.path.normpath(at / target))
        if not file.exists():
            return found[0]
        up = "../" * (at == NOTEBOOKS / "assignments")
        place = file.relative_to(NOTEBOOKS if file.is_relative_to(NOTEBOOKS) else files.ROOT)
        if file.parent == FIGURES and file.suffix in (".svg", ".pdf"):
            return f'<a href="{up}{place.as_posix()}">{words}</a>'
        if (
            place.with_suffix("").as_posix() in {c.name for c in written()} | set(assignment_pages())
            or place.name in PAGES
        ):
            return f"[{words}]({up}{place.as_posix()}{anchor})"
        if place.name == "RESULTS.md":
            return f"[{words}]({up}results.md{anchor})"
        if file == questions.FILE:
            return f"[{words}]({up}{questions.pages_of_anchors().get(anchor[1:], questions.FIRST)}.md{anchor})"
        if colab.origin() is None:
            return words
        repository, commit = colab.origin()
        return f"[{words}](https://github.com/{repository}/blob/{commit}/{file.relative_to(files.ROOT).as_posix()})"

    drawn = rf"!\[([^\]]*)\]\((?:\.\./)?figures/(hero|{'|'.join(PICTURES)})\.svg\)"

    def as_picture(found: re.Match) -> str:
        return front.picture_html(found[2], " ".join(found[1].split()), "hero" if found[2] == "hero" else "")

    text = re.sub(drawn, as_picture, text)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)", link, text)


# The index ------------------------------------------------------------------------------------------------------


def index_page() -> str:
    """Return the first page with the table of contents."""
    parts = {title: [c.name for c in written() if c.number in numbers.split()] for title, numbers in PARTS.items()}
    toc = [toctree(title, names) for title, names in parts.items() if names]
    toc += [toctree("Questions", list(questions.question_pages()))]
    toc += [toctree("The course", assignment_pages()), toctree("Results", ["results"])]
    toc += [toctree("The package", [Path(name).stem for name in PAGES])]
    return front.front_page(assignment_pages(), toc, link_for_site(LICENCE, files.ROOT), SETTINGS["html_baseurl"])


LICENCE = "Code: [MIT](LICENSE). Text and pictures: [Creative Commons Attribution 4.0](LICENSE-TEXT)."


def toctree(caption: str, names: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```"])
