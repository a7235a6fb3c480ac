"""API.md as a page: where it names a call, its signature and docstring, read from the source. Nothing is imported."""

import ast
import re
import textwrap
from pathlib import Path

from fa2_lab.paper import PACKAGE

PAGE = PACKAGE.parent / "API.md"
NAMED = re.compile(r"<!-- docstring: (\S+\.py) ?(\S*) -->")  # without a name: the module's


def page() -> str:
    """The page in MyST's Markdown."""
    return NAMED.sub(lambda found: described(*found.groups()), PAGE.read_text(encoding="utf-8"))


def described(file: str, name: str) -> str:
    """One function, method or class of a file, or what the file says of itself."""
    tree: ast.Module | ast.ClassDef | ast.FunctionDef = ast.parse((PACKAGE.parent / file).read_text(encoding="utf-8"))
    if not name:
        return shown(ast.get_docstring(tree))
    for part in name.split("."):
        tree = next(node for node in tree.body if getattr(node, "name", "") == part)
    signature = "" if isinstance(tree, ast.ClassDef) else f"({ast.unparse(tree.args)})"
    signature = re.sub(r"^\(self(, )?", "(", signature)
    kind = "class" if isinstance(tree, ast.ClassDef) else "function"
    name = f"{Path(file).stem}.{name}" if "/reference/" in file else name  # fa2.forward and heads.forward
    return f"````{{py:{kind}}} {name}{signature}\n{shown(ast.get_docstring(tree))}\n````"


def shown(docstring: str) -> str:
    """Prose as prose; two columns as a table; what else is indented as it is."""
    return "\n\n".join(table(part) or as_it_is(part) for part in docstring.split("\n\n"))


def as_it_is(paragraph: str) -> str:
    if re.search(r"^ |\S {2,}\S", paragraph, re.MULTILINE):
        return f"```text\n{paragraph}\n```"
    return plain(paragraph)


def table(paragraph: str) -> str:
    """Names and what they are, or "" if a line is neither; one that is indented goes on with the line before."""
    rows: list[list[str]] = [] if paragraph.startswith(" ") else [["", ""]]  # indented: the first line is the heads
    for line in textwrap.dedent(paragraph).splitlines():
        cells = re.fullmatch(r"(\S.*?) {2,}(\S.*)", line)
        if cells:
            rows.append(list(cells.groups()))
        elif line.startswith(" ") and rows and rows[-1][0]:
            rows[-1][1] += f" {line.strip()}"
        else:
            return ""
    lines = [" | ".join(["", *map(plain, row), ""]).strip() for row in rows]
    return "\n".join([lines[0], "| --- | --- |", *lines[1:]])


def plain(words: str) -> str:
    """What stands in backticks is code; no other letter is markup."""
    return re.sub(r"`[^`]+`|[*_$<\[|`]", lambda found: found[0] if found[0][1:] else f"\\{found[0]}", words)
