"""What a notebook may not use: finished attention. Found by reading its code, before anything runs."""

from __future__ import annotations

import ast

from fa2_lab.studio.course.notebooks import CHECK, is_solution

ROOMS = ("reference", "kernels", "attention", "errata", "distributed", "plots", "studio")
MODULES = {f"fa2_lab.{room}": "the package's own solutions" for room in ROOMS}
MODULES |= dict.fromkeys(("flash_attn", "xformers", "sageattention", "flashinfer"), "finished attention")
ATTENTION = {
    "scaled_dot_product_attention",
    "flex_attention",
    "MultiheadAttention",
    "memory_efficient_attention",
    "dot_product_attention",
    "flash_attn_func",
}
PER_ASSIGNMENT = {  # more, or fewer, for one assignment
    "2_forward": ({"fa2_lab.tiles": "what step 1 asks for", "fa2_lab.machine": "the counts"}, ()),
    "3_backward": ({"fa2_lab.tiles": "what the loops have to decide", "fa2_lab.machine": "the counts"}, ()),
    "5_break_it": ({}, ("fa2_lab.reference", "fa2_lab.errata", *ATTENTION)),
    "6_read_the_machine": (
        dict.fromkeys((f"fa2_lab.machine.{m}" for m in ("io", "grid", "budget", "time", "warps")), "the answers"),
        (),
    ),
}


def findings(notebook, assignment: str = "") -> list[str]:
    """One sentence for each thing in a student's cells that is off limits."""
    more, fewer = PER_ASSIGNMENT.get(assignment, ({}, ()))
    modules = {name: what for name, what in (MODULES | more).items() if name not in fewer}
    names = ATTENTION - set(fewer)
    found = []
    for cell in notebook.cells:
        locked = cell.metadata.get("nbgrader", {}) and not is_solution(cell)
        if cell.cell_type == "code" and not locked:
            found += in_code(cell.source, modules, names)
    return list(dict.fromkeys(found))


def in_code(source: str, modules: dict[str, str], names: set[str]) -> list[str]:
    """What is off limits in one cell; a cell that is no Python finds that out when it runs."""
    try:
        tree = ast.parse(plain_python(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = []
    for node in ast.walk(tree):
        for module in imported(node) + spelled(node):
            known = next((m for m in modules if module == m or module.startswith(m + ".")), None)
            if known:
                found.append(f"it imports {module}: {modules[known]}")
        name = named(node)
        if name in names:
            found.append(f"it uses {name}, which is finished attention")
        if isinstance(node, ast.Name) and node.id == CHECK:
            found.append(f"it uses the checking library, {CHECK}, in a cell of its own")
    return found


def imported(node) -> list[str]:
    """Modules that an import statement names, with `from a import b` as a.b as well."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def spelled(node) -> list[str]:
    """A module's name written as a string, as importlib takes it."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return [node.value] if is_text and "." in node.value and " " not in node.value else []


def named(node) -> str:
    """The name that a node reads, imports or spells."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.alias):
        return node.name.rsplit(".", 1)[-1]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return node.id if isinstance(node, ast.Name) else ""


def plain_python(source: str) -> str:
    """A cell without its magics and shell lines."""
    return "\n".join("" if line.lstrip().startswith(("%", "!", "?")) else line for line in source.splitlines())
