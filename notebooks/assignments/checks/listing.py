"""What a student's forward launches, written out as a program of its own: the one text that is run, compiled and timed.

The student's process tells what was launched (`probes_ladder.recorded`). Here it becomes text, and only what it may be:
kernels in Triton's language, numbers, and calls of torch that allocate, view or copy. Nothing else of the student's is
in it, so it is run where none of their code has run.
"""

from __future__ import annotations

import ast
import math
import re

from .probes import NotAllowed
from .report import Failed

TORCH = set(  # by their names in aten: no arithmetic
    "empty empty_like new_empty empty_strided new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones "
    "full full_like new_full fill_ zero_ copy_ clone _to_copy view _unsafe_view _reshape_alias as_strided expand "
    "permute transpose t slice select squeeze unsqueeze detach alias unbind split".split()
)
PLAIN = {"range", "min", "max", "float", "int", "bool", "abs", "len", "tl", "triton"}  # names that every kernel may use
OWN = {"torch", "unwritten", "TensorDescriptor"}  # names of the program itself
SEALED = {"handle", "data", "value", "fn"}  # attributes that lead out of Triton's language
LAWFUL = (  # all that a kernel is written in
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.While, ast.If, ast.Expr, ast.Pass, ast.Return, ast.Assert,
    ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.Call, ast.keyword,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.JoinedStr, ast.FormattedValue, ast.arguments,
    ast.arg, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
NUMBERS = "bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8"
TYPES = {  # what an argument may be beside tensors, numbers and texts
    "tl": f"{NUMBERS} int1 float8e5 float8e4nv".split(),
    "torch": f"{NUMBERS} bool strided contiguous_format preserve_format float8_e5m2 float8_e4m3fn".split(),
}
HEADER = """import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


def unwritten(x):
    return x.fill_(float("nan")) if triton.knobs.runtime.interpret and x.is_floating_point() else x

"""


def kernel(name: str, source: str, known: set[str]) -> str:
    """A kernel's or a helper's text, a statement a line, or NotAllowed with what does not belong into one."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAllowed(f"the text of {name} cannot be read ({type(error).__name__})") from None
    function = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(function, ast.FunctionDef) or function.name != name or not name.isidentifier():
        raise NotAllowed(f"{name} is no function of its own under @triton.jit")
    if [ast.unparse(d) for d in function.decorator_list] != ["triton.jit"]:
        raise NotAllowed(f"{name} stands under other decorators than @triton.jit")
    lawful(function, known)
    return ast.unparse(tree) + "\n"


def lawful(function: ast.FunctionDef, known: set[str]) -> None:
    """Refuse what is no Triton: other functions, imports, names from outside, ways into the interpreter."""
    parts = [function.args, *function.body, *filter(None, [function.returns]), *getattr(function, "type_params", [])]
    nodes = [node for part in parts for node in ast.walk(part)]
    own = {n.arg for n in nodes if isinstance(n, ast.arg)}
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    inner = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    for node in nodes:
        what = ""
        if not isinstance(node, LAWFUL) or leads_out(node, id(node) in inner):
            what = repr(ast.unparse(node).splitlines()[0])
        elif isinstance(node, ast.Name) and node.id not in own | known | PLAIN:
            what = f"the name {node.id!r}"
        if what or own & PLAIN:
            raise NotAllowed(
                f"{function.name} uses {what or sorted(own & PLAIN)}: a kernel knows tl, its arguments, numbers, and "
                "other functions under @triton.jit"
            )


def leads_out(node: ast.AST, is_inner: bool) -> bool:
    """Whether a name or an attribute leads out of Triton's language. Its modules tl and tl.math are open, for what is
    called and for types; they are no values. `is_inner`: an attribute of the node is asked for, not the node."""
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
    from . import guard, probes_ladder

    return "".join(program(guard.beside(probes_ladder.texts, function))[0])


def program(sheet: dict) -> tuple[list[str], set[str]]:
    """The texts of a program with a sheet's numbers and kernels, and all their names."""
    constants = {name: value for name, value in sheet["constants"].items() if str(name).isidentifier()}
    known = set(sheet["kernels"]) | set(constants)
    if taken := sorted(known & (PLAIN | OWN)):
        raise NotAllowed(f"a kernel or a number is called {taken}")
    parts = [HEADER] + [f"{name} = tl.constexpr({written(value, 0)})\n" for name, value in constants.items()]
    return parts + ["\n" + kernel(name, source, known) for name, source in sheet["kernels"].items()], known


def listing(sheet: dict) -> str:
    """The program: its kernels, once for each launch, and a forward(q, k, v, causal) that repeats the call."""
    parts, known = program(sheet)
    lines, count = ["q, k, v = (x[:{}, :{}] for x in (q, k, v))".format(*map(int, sheet["heads"]))], 3
    lines += ["t0, t1, t2 = q, k, v"]
    for number, step in enumerate(sheet["steps"]):
        if step[0] == "launch":
            _, name, grid, args, kwargs = step
            if name not in sheet["kernels"]:
                raise NotAllowed(f"{str(name)[:40]} is no kernel whose text can be read")
            again = f"{name}_{number}"  # a kernel of its own: each launch is compiled for its own arguments
            source = kernel(name, sheet["kernels"][name], known)
            parts.append("\n" + source.replace(f"def {name}(", f"def {again}(", 1))
            words = [written(x, count) for x in args] + [f"{k}={written(v, count)}" for k, v in named(kwargs)]
            lines.append(f"{again}[{written(grid, count)}]({', '.join(words)})")
        else:
            line, count = call(step, count)
            lines.append(line)
    if not any(step[0] == "launch" for step in sheet["steps"]):
        raise NotAllowed("a Triton kernel is asked for, and none was launched")
    O, L = sheet["results"]
    lines.append(f"return {written(O, count)}, {written(L, count)}")
    return "".join(parts) + "\n\ndef forward(q, k, v, causal):\n    " + "\n    ".join(lines) + "\n"


def call(step: list, count: int) -> tuple[str, int]:
    """One call of torch as a line, and how many tensors there are after it."""
    _, name, args, kwargs, made = step
    space, short, overload = ([*str(name).split("."), "", ""])[:3]
    if space != "aten" or short not in TORCH or not overload.isidentifier():
        raise NotAllowed(f"{str(name)[:60]} was called: outside of a kernel torch may allocate, view and copy, no more")
    words = [written(x, count) for x in args] + [f"{k}={written(v, count)}" for k, v in named(kwargs)]
    text = f"torch.ops.aten.{short}.{overload}({', '.join(words)})"
    text = f"unwritten({text})" if "empty" in short else text
    targets = [f"t{int(n)}" for n in made]
    return f"{', '.join(targets) or '_'} = {text}", max([count, *(int(n) + 1 for n in made)])


def named(kwargs: dict):
    """Keyword arguments, each with a name that is one."""
    for name, value in kwargs.items():
        if not str(name).isidentifier():
            raise NotAllowed(f"an argument is called {str(name)[:40]!r}")
        yield name, value


def written(value, count: int) -> str:
    """A recorded value as text. A mark is a tuple: (kind, what)."""
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(written(x, count) for x in value)}]"
    kind, what = value if isinstance(value, tuple) and len(value) == 2 else ("", "")
    if kind == "tensor" and isinstance(what, int) and 0 <= what < count:
        return f"t{what}"
    if kind == "tuple":
        return f"({''.join(written(x, count) + ', ' for x in what)})"
    if kind == "device":
        return "q.device"
    if what in TYPES.get(kind, ()):
        return f"{kind}.{what}"
    if kind == "descriptor":
        base, *rest = (written(x, count) for x in what)
        return f"TensorDescriptor({base}, {', '.join(rest)})"
    raise Failed(
        "tensors, numbers and types as a launch's arguments", f"{kind or type(value).__name__} {str(what)[:60]}"
    )
