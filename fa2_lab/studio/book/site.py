"""The book as a linked offline site: plain HTML with the figures inside, no script and no request.

The notebooks write formulas in Unicode, so that they read the same in a text twin, a notebook and a page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter

from fa2_lab.studio import files
from fa2_lab.studio.book.chapters import Chapter

PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{css}</style></head>
<body><main>
{body}
</main></body>
</html>
"""
CSS = """
body { font: 17px/1.6 Georgia, 'DejaVu Serif', serif; color: #222; background: #fff; margin: 0 }
main { max-width: 960px; margin: 0 auto; padding: 1.5em 1em 4em } p, li { max-width: 48em }
h1, h2 { line-height: 1.25 } h2 { margin-top: 2em }
a { color: #0072B2 } img { max-width: 100%; height: auto }
pre, code { font: 13px/1.45 'DejaVu Sans Mono', Menlo, Consolas, monospace }
.highlight pre { background: #f6f6f4; padding: .7em .9em; white-space: pre-wrap; margin: .6em 0 }
.output pre { border-left: 3px solid #ccc; padding: .1em .9em; white-space: pre-wrap; margin: .4em 0 }
table { border-collapse: collapse } td, th { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: left }
details { background: #f3f7fb; padding: .4em .9em; margin: .7em 0 1em } summary { cursor: pointer }
.anchor-link { display: none }
"""


def render(folder: Path, chapters: list[Chapter]) -> Path:
    """Turn the executed notebooks of a folder into pages beside them; returns the first page."""
    for chapter in chapters:
        notebook = nbformat.read(folder / f"{chapter.name}.ipynb", as_version=4)
        files.write(folder / f"{chapter.name}.html", page(chapter, notebook))
    items = "\n".join(
        f'<li><a href="{c.name}.html">{c.number} · {escape(c.title)}</a>: {escape(c.question)}</li>' for c in chapters
    )
    contents = f"<h1>FlashAttention-2, line by line</h1>\n<ul>\n{items}\n</ul>"
    return files.write(folder / "index.html", PAGE.format(title="fa2_lab", css=CSS, body=contents))


def page(chapter: Chapter, notebook: nbformat.NotebookNode) -> str:
    """One notebook as a page."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = cell.source.replace(".ipynb)", ".html)")
        for output in cell.get("outputs", []):
            if "text/markdown" in output.get("data", {}):
                output.data["text/markdown"] = output.data["text/markdown"].replace(".ipynb)", ".html)")
    body, _ = HTMLExporter(
        template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True
    ).from_notebook_node(notebook)
    css = CSS + HtmlFormatter(style="friendly").get_style_defs(".highlight")
    return PAGE.format(title=escape(f"{chapter.number} · {chapter.title}"), css=css, body=body)
