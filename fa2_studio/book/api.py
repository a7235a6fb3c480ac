"""Render API.md as a page, replacing each marker that names a call with the call's signature and docstring.

Signatures and docstrings are read from the source, without importing anything.
"""

import ast
import re
import textwrap
from pathlib import Path

from fa2_lab.paper import PACKAGE

API_PAGE = PACKAGE.parent / "API.md"
NAMED = re.compile(r"<!-- docstring: (\S+\.py) ?(\S*) -->")  # a marker without a name stands for the module's docstring


def api_page() -> str:
    """Return API.md in MyST Markdown, with all docstrings inserted."""
    return NAMED.sub(lambda found: signature_and_docstring(*found.groups()), API_PAGE.read_text(encoding="utf-8"))


def signature_and_docstring(file: str, name: str) -> str:
    """Return the signature and docstring of a function, method or class.

    Without a name, return the module's docstring.
    """
    tree: ast.Module | ast.ClassDef | ast.FunctionDef = ast.parse((PACKAGE.parent / file).read_text(encoding="utf-8"))
    if not name:
        return docstring_to_markdown(ast.get_docstring(tree))
    for part in name.split("."):
        tree = next(node for node in tree.body if getattr(node, "name", "") == part)
    signature = "" if isinstance(tree, ast.ClassDef) else f"({ast.unparse(tree.args)})"
    signature = re.sub(r"^\(self(, )?", "(", signature)
    kind = "class" if isinstance(tree, ast.ClassDef) else "function"
    # The prefix distinguishes fa2.forward from heads.forward.
    name = f"{Path(file).stem}.{name}" if "/reference/" in file else name
    return f"````{{py:{kind}}} {name}{signature}\n{docstring_to_markdown(ast.get_docstring(tree))}\n````"


def docstring_to_markdown(docstring: str) -> str:
    """Convert a docstring to Markdown. Two columns become a table, and other indented text becomes a code block."""
    return "\n\n".join(two_columns_to_table(part) or keep_or_escape(part) for part in docstring.split("\n\n"))


def keep_or_escape(paragraph: str) -> str:
    if re.search(r"^ |\S {2,}\S", paragraph, re.MULTILINE):
        return f"```text\n{paragraph}\n```"
    return escape_markup(paragraph)


def two_columns_to_table(paragraph: str) -> str:
    """Convert a two-column paragraph to a table, or return "" for any other paragraph.

    An indented line continues the row above it.
    """
    # The first line of an indented paragraph contains the headings.
    rows: list[list[str]] = [] if paragraph.startswith(" ") else [["", ""]]
    for line in textwrap.dedent(paragraph).splitlines():
        cells = re.fullmatch(r"(\S.*?) {2,}(\S.*)", line)
        if cells:
            rows.append(list(cells.groups()))
        elif line.startswith(" ") and rows and rows[-1][0]:
            rows[-1][1] += f" {line.strip()}"
        else:
            return ""
    lines = [" | ".join(["", *map(escape_markup, row), ""]).strip() for row in rows]
    return "\n".join([lines[0], "| --- | --- |", *lines[1:]])


def escape_markup(words: str) -> str:
    """Escape every markup character in a text, except within code in backticks."""
    return re.sub(r"`[^`]+`|[*_$<\[|`]", lambda found: found[0] if found[0][1:] else f"\\{found[0]}", words)
