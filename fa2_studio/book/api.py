"""API.md as a page: where it names a call, its signature and docstring, read from the source. Nothing is imported."""

import ast
import re
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
    """Prose as prose; what stands in columns or is indented as it is."""
    parts = []
    for paragraph in docstring.split("\n\n"):
        if re.search(r"^ |\S {2,}\S", paragraph, re.MULTILINE):
            parts.append(f"```text\n{paragraph}\n```")
        else:
            parts.append(re.sub(r"([*_$<\[`])", r"\\\1", paragraph))
    return "\n\n".join(parts)
