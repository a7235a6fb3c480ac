"""A student's kernel written out as a program of its own: the one text that is run, and compiled.

The student's process hands over the texts of kernels (`probes_triton.texts`). They enter the program if they are in
Triton's language and nothing else. So it is run where none of the student's code has run.
"""

from __future__ import annotations

import ast
import builtins
import re

from .probes import NotAllowed

PLAIN = {"range", "min", "max", "float", "int", "bool", "abs", "len", "tl", "triton"}  # names that every kernel may use
OWN = {"torch", "forward"}  # names of the program itself
SEALED = {"handle", "data", "value", "fn"}  # attributes that lead out of Triton's language
SAYING = {"print", "tl.static_print", "tl.device_print", "tl.static_assert", "tl.device_assert"}
LAWFUL = (  # no f-string and no `is`: what they give differs between Triton's interpreter and its compiler
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Expr, ast.Pass, ast.Return,
    ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Call, ast.keyword,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.arguments, ast.arg, ast.expr_context, ast.operator,
    ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n"


def kernel(name: str, source: str, known: set[str]) -> str:
    """A kernel's or a helper's text, a statement a line, or NotAllowed with what does not belong into one."""
    try:
        text = ast.unparse(Silent().visit(ast.parse(source))) + "\n"
        tree = ast.parse(text)  # what is read here is what will run
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAllowed(f"the text of {name} cannot be read ({type(error).__name__})") from None
    function = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(function, ast.FunctionDef) or function.name != name or not name.isidentifier():
        raise NotAllowed(f"{name} is not a single function under @triton.jit")
    if [ast.unparse(d).removesuffix("()") for d in function.decorator_list] != ["triton.jit"]:
        raise NotAllowed(f"{name} has other decorators than @triton.jit")
    lawful(function, known)
    return text


class Silent(ast.NodeTransformer):
    """Leaves out the statements of a kernel that only say something, which costs nothing: prints, assertions, texts."""

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        return ast.Pass() if isinstance(node.value, ast.JoinedStr) else node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        said = node.value
        is_said = isinstance(said, (ast.Constant, ast.JoinedStr))
        is_said |= isinstance(said, ast.Call) and ast.unparse(said.func) in SAYING
        return ast.Pass() if is_said else node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        return ast.Pass()


def lawful(function: ast.FunctionDef, known: set[str]) -> None:
    """Refuse what is no Triton: other functions, imports, names from outside, ways into the interpreter."""
    first_line = [function.args, *filter(None, [function.returns]), *getattr(function, "type_params", [])]
    head, body = ([n for part in parts for n in ast.walk(part)] for parts in (first_line, function.body))
    nodes, early = [*head, *body], set(map(id, head))  # early: read before the function's own names are there
    own = {n.arg for n in nodes if isinstance(n, ast.arg)}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    inner = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    for node in nodes:
        what = ""
        if not isinstance(node, LAWFUL) or leads_out(node, id(node) in inner):
            what = repr(ast.unparse(node).splitlines()[0])
        elif isinstance(node, ast.Name) and node.id not in known | PLAIN | (set() if id(node) in early else own):
            what = f"the name {node.id!r}"
        if what or own & PLAIN:
            raise NotAllowed(
                f"{function.name} uses {what or sorted(own & PLAIN)}, but a kernel can only use what tl has in this "
                "version of Triton, its arguments, numbers, and other functions under @triton.jit"
            )


def leads_out(node: ast.AST, is_inner: bool) -> bool:
    """Whether a name or an attribute leads out of Triton's language. Its modules tl and tl.math are open, for what is
    called and for types; they are no values. `is_inner`: an attribute of the node is asked for, not the node."""
    if isinstance(node, ast.Compare):
        return any(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops)
    if isinstance(node, ast.Name):
        return node.id in ("tl", "triton") and not is_inner
    if not isinstance(node, ast.Attribute):
        return False
    place = ast.unparse(node.value)
    if node.attr.startswith("_") or node.attr in SEALED or isinstance(node.ctx, ast.Store):
        return True
    if place == "triton" or not re.fullmatch(r"tl(\.\w+)*", place):
        return place == "triton" and node.attr != "cdiv"
    if f"{place}.{node.attr}" == "tl.math":
        return not is_inner
    from triton import language

    found = getattr({"tl": language, "tl.math": language.math}.get(place), node.attr, None)
    is_own = callable(found) and str(getattr(found, "__module__", "")).startswith("triton")
    return not is_own and not isinstance(found, language.dtype)


def of_kernel(function) -> str:
    """A student's kernel, and what it calls, as a program of its own; NotAllowed where it is no Triton."""
    from . import guard, probes_triton

    return program(**guard.beside(probes_triton.texts, function))


def program(kernels: dict[str, str], constants: dict) -> str:
    """The text of a program with these kernels and numbers."""
    known = set(kernels) | set(constants)
    ours = PLAIN | OWN | set(dir(builtins))  # a default value of a kernel may not call what another is named after
    if taken := sorted(name for name in known if name in ours or not name.isidentifier()):
        raise NotAllowed(f"a kernel or a number is called {taken}, which is not allowed")
    numbers = [f"{name} = tl.constexpr({written(value)})\n" for name, value in constants.items()]
    return "".join([HEADER, *numbers, *(f"\n\n{kernel(name, source, known)}" for name, source in kernels.items())])


def written(value) -> str:
    """A number or a text as it stands in a program."""
    if isinstance(value, float):
        return f"float({str(value)!r})"
    if isinstance(value, (bool, int, str)):
        return repr(value)
    raise NotAllowed(f"a kernel can read numbers and strings, but not {type(value).__name__}")
