"""The house rules: imports run down and form no circle, tags are complete, packaging is what the README says."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from fa2_lab.paper import ALGORITHMS, LINES, NO_TRITON, TAG, tagged_lines

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "fa2_lab"

# A folder imports from lower floors, never from its own floor or above. The heart ends with __init__.
FLOORS = {
    "tiles": 1,
    "trace": 1,
    "paper": 1,
    "glossary": 1,
    "records": 1,
    "reference": 2,
    "kernels": 3,
    "api": 4,
    "distributed": 5,
    "__init__": 6,
    "machine": 7,
    "errata": 7,
    "plots": 8,
    "tools": 9,
    "__main__": 10,
}
SAME_PART = {"transformers": "api"}
NEVER = {("kernels", "reference")}  # downward, and still not wanted: a kernel stands on its own


# Arrows -------------------------------------------------------------------------------------------------------


def part_of(module: str) -> str:
    """fa2_lab.reference.fa2 → reference; fa2_lab itself → __init__."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    return SAME_PART.get(name, name)


def imported_modules(source: str, module: str, modules: frozenset[str] = frozenset()) -> set[str]:
    """Every module of the package that a source imports, at its top or inside a function.

    `from fa2_lab.kernels import launch` imports fa2_lab.kernels.launch if that is one of the modules, and a name that
    fa2_lab.kernels defines if it is not. From the package itself only modules are taken.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
            inside = {f"{base}.{alias.name}" for alias in node.names}
            found |= inside if base == "fa2_lab" else {name if name in modules else base for name in inside}
    return {name for name in found if name.split(".")[0] in ("fa2_lab", "fa2_studio")}


def wrong_arrows(source: str, module: str) -> list[str]:
    """What is wrong with the imports of one file."""
    here, wrong = part_of(module), []
    if here not in FLOORS:
        return [f"{here}: no floor in tests/heart/test_house.py"]
    for name in sorted(imported_modules(source, module)):
        there = "fa2_studio" if name.startswith("fa2_studio") else part_of(name)
        if there == here:
            continue
        if FLOORS.get(there, 99) >= FLOORS[here] or (here, there) in NEVER:
            wrong.append(f"{here} imports {there}")
    return wrong


@cache
def package_modules(folder: Path = PACKAGE) -> dict[str, str]:
    """{module: source} of a whole package."""
    names = {path: ".".join(path.relative_to(PROJECT).with_suffix("").parts) for path in folder.rglob("*.py")}
    return {name.removesuffix(".__init__"): path.read_text(encoding="utf-8") for path, name in names.items()}


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The sets of files that can all be reached from one another."""

    def reached(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            new = imports.get(left.pop(), set()) - seen
            seen |= new
            left += new
        return seen

    reach = {name: reached(name) for name in imports}
    found = [
        frozenset(other for other in reach[name] if name in reach[other]) for name in imports if name in reach[name]
    ]
    return [set(circle) for circle in dict.fromkeys(found)]


def test_arrows_run_down():
    wrong = {module: wrong_arrows(source, module) for module, source in package_modules().items()}
    assert not {module: arrows for module, arrows in wrong.items() if arrows}
    assert {"tiles", "reference", "errata", "__main__"} <= {part_of(module) for module in wrong}


def test_the_heart_ends_where_the_studio_begins():
    heart = {"tiles", "trace", "paper", "reference", "kernels", "api", "distributed", "__init__"}
    around = {"machine", "errata", "plots", "tools"}
    assert max(FLOORS[part] for part in heart) < min(FLOORS[part] for part in around)


def test_no_circle_stands_in_the_house_also_not_between_the_files_of_a_folder():
    sources = package_modules() | package_modules(PROJECT / "fa2_studio")
    every = frozenset(sources)
    assert circles({name: imported_modules(source, name, every) - {name} for name, source in sources.items()}) == []


def test_circles_are_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}}) == [{"b", "c"}]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == [{"a", "b", "c"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}}) == []
    source = "def f():\n    from fa2_lab.kernels import launch, tools"
    assert imported_modules(source, "x", frozenset({"fa2_lab.kernels.launch"})) == {
        "fa2_lab.kernels.launch",
        "fa2_lab.kernels",
    }


@pytest.mark.parametrize(
    "module, source, arrow",
    [
        ("fa2_lab.kernels.portable.forward", "from fa2_lab.reference.fa2 import forward", "kernels imports reference"),
        (
            "fa2_lab.kernels.portable.forward",
            "def f():\n    from fa2_lab import reference",
            "kernels imports reference",
        ),
        ("fa2_lab.kernels.decode.plan", "from fa2_lab.machine import grid", "kernels imports machine"),
        ("fa2_lab.api.attention", "def f():\n    from fa2_lab.errata import ERRATA", "api imports errata"),
        ("fa2_lab.api.packed", "import fa2_lab.plots.style", "api imports plots"),
        ("fa2_lab.distributed.ring", "from fa2_lab.tools import offline", "distributed imports tools"),
        ("fa2_lab.plots.order", "import fa2_lab.tools.offline as o", "plots imports tools"),
        ("fa2_lab.reference.fa2", "from fa2_lab.machine import io", "reference imports machine"),
        ("fa2_lab.errata.article", "from ..machine import io", "errata imports machine"),
        ("fa2_lab.paper", "from . import tiles", "paper imports tiles"),
        ("fa2_lab.trace", "from fa2_lab.tiles import Tiling", "trace imports tiles"),
        ("fa2_lab.api.attention", "import fa2_lab", "api imports __init__"),
        ("fa2_lab.reference.fa1", "from fa2_lab.__main__ import main", "reference imports __main__"),
        ("fa2_lab.tools.ladder", "def f():\n    from fa2_studio.bench import suites", "tools imports fa2_studio"),
        (
            "fa2_lab.attic.old",
            "import numpy",
            "attic: no floor in tests/heart/test_house.py",
        ),
    ],
)
def test_wrong_arrows_are_seen(module, source, arrow):
    assert wrong_arrows(source, module) == [arrow]


@pytest.mark.parametrize(
    "module, source",
    [
        ("fa2_lab.reference.fa2", "from fa2_lab.tiles import Mask\nfrom .dropout import Dropout\nimport numpy"),
        ("fa2_lab.__main__", "from fa2_lab.tools.tour import tour"),
        ("fa2_lab.machine.splits", "from fa2_lab.kernels.decode import plan"),
    ],
)
def test_right_arrows_are_let_through(module, source):
    assert wrong_arrows(source, module) == []


# Tags ---------------------------------------------------------------------------------------------------------


def tags_in(folder: Path) -> set[str]:
    """Tags that the lines of a folder's files carry."""
    sources = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
    return {tag for source in sources for tags, _, _ in tagged_lines(source) for tag in tags}


def computing(paper: str) -> set[str]:
    """Tags of the computing lines of a paper."""
    return {tag for tag, (algorithm, line) in LINES.items() if line.computes and algorithm.tag.startswith(paper)}


def in_order(tags: set[str]) -> list[str]:
    return sorted(tags, key=list(LINES).index)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_computing_line_has_its_numpy_line(algorithm):
    assert in_order(computing(algorithm) - tags_in(PACKAGE / "reference")) == []


def test_every_computing_line_of_fa2_has_its_triton_line():
    assert in_order(computing("FA2") - tags_in(PACKAGE / "kernels")) == []


def test_every_computing_line_of_fa1_s_forward_has_its_rung():
    assert in_order(computing("FA1.A2") - set(NO_TRITON) - tags_in(PACKAGE / "kernels" / "ladder")) == []


def files_that_may_tag() -> list[Path]:
    notebooks = PROJECT / "notebooks" / "text"
    return [*PACKAGE.rglob("*.py"), *notebooks.rglob("*.py"), PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"]


def test_no_tag_names_a_line_that_does_not_exist():
    named = {tag: path for path in files_that_may_tag() for tag in TAG.findall(path.read_text(encoding="utf-8"))}
    assert {tag: path.name for tag, path in named.items() if tag not in LINES} == {}


def test_loop_ends_carry_no_tag():
    ends = {tag for tag, (_, line) in LINES.items() if not line.computes}
    assert in_order(ends & (tags_in(PACKAGE / "reference") | tags_in(PACKAGE / "kernels"))) == []


# Importing ----------------------------------------------------------------------------------------------------

REFUSING = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused}:
            raise ImportError(f"{{name}} is refused here")
sys.meta_path.insert(0, Refuse())
"""


def python(source: str, refused: set[str]) -> str:
    """Run a source in a fresh interpreter that cannot import some modules; its output."""
    code = REFUSING.format(refused=refused) + source
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    return done.stdout


ALL_BUT_NUMPY = {"torch", "triton", "matplotlib", "tqdm", "yaml", "scipy", "IPython"}


def test_the_package_needs_numpy_alone_and_is_quick():
    timed = "import time; t = time.process_time(); import fa2_lab; print(time.process_time() - t)"
    assert min(float(python(timed, ALL_BUT_NUMPY)) for _ in range(3)) < 0.3


def test_importing_the_package_changes_nothing_around_it():
    watched = "import os; before = dict(os.environ); import fa2_lab; fa2_lab.where('FA2.A1.L9'); "
    assert python(watched + "print(os.environ == before)", {"torch", "triton"}) == "True\n"


def test_a_public_call_can_be_replaced():
    assert python("import fa2_lab; fa2_lab.attention = 3; print(fa2_lab.attention)", {"torch", "triton"}) == "3\n"


def test_what_is_not_a_kernel_needs_numpy_alone():
    alone = {"tiles", "trace", "paper", "glossary", "reference", "machine", "errata"}
    modules = [name for name in package_modules() if part_of(name) in alone]
    assert len(modules) > 15
    python("\n".join(f"import {name}" for name in modules), ALL_BUT_NUMPY)


def test_the_tour_goes_without_torch_and_triton():
    source = (
        "from fa2_lab.tools.tour import STAGES, run\nfor stage in STAGES[-3:]: print(run(stage).note, run(stage).ok)"
    )
    out = python(source, {"torch", "triton", "matplotlib"})
    assert out.splitlines() == [" True"] + ["skipped: torch is not installed True"] * 2


def test_the_refusing_interpreter_refuses():
    with pytest.raises(AssertionError, match="torch is refused here"):
        python("import torch", {"torch"})


# Packaging ----------------------------------------------------------------------------------------------------


def pyproject() -> dict:
    try:
        import tomllib
    except ImportError:  # Python 3.10, where pytest brings tomli
        import tomli as tomllib
    return tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements() -> list[Requirement]:
    project = pyproject()["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    needed = [Requirement(line) for line in project["dependencies"] + extras]
    return [requirement for requirement in needed if requirement.name != "fa2-lab"]  # an extra within an extra


def test_the_package_sets_lower_bounds_only():
    operators = {r.name: {spec.operator for spec in r.specifier} for r in requirements()}
    assert operators and all(used == {">="} for used in operators.values()), operators
    triton = next(r for r in requirements() if r.name == "triton")
    assert triton.marker.evaluate({"platform_system": "Linux"}) and not triton.marker.evaluate(
        {"platform_system": "Darwin"}
    )


def test_constraints_set_upper_bounds_that_fit():
    lines = (PROJECT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    bounds = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all({spec.operator for spec in bound.specifier} == {"<"} for bound in bounds)
    lower = {r.name: next(iter(r.specifier)).version for r in requirements()}
    assert {"torch", "triton", "pytest"} <= {bound.name for bound in bounds} <= set(lower)
    assert all(bound.specifier.contains(lower[bound.name]) for bound in bounds)


def conda_environment() -> dict:
    return yaml.safe_load((PROJECT / "environment.yml").read_text(encoding="utf-8"))


def test_environment_yml_line_by_line():
    environment = conda_environment()
    assert set(environment) == {"name", "channels", "dependencies"}
    assert re.fullmatch(r"[a-z][a-z0-9-]*", environment["name"]) and environment["channels"] == ["conda-forge"]
    *specs, pip = environment["dependencies"]
    assert [Requirement(spec).name for spec in specs] == ["python", "pip"]
    assert list(pip) == ["pip"] and pip["pip"] == ["-c constraints.txt", "-e .[dev]"]
    extra = Requirement("fa2-lab" + pip["pip"][1].removeprefix("-e ."))
    assert extra.extras <= set(pyproject()["project"]["optional-dependencies"])


def test_the_version_has_one_place():
    project = pyproject()
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fa2_lab.__version__"}


def test_conda_and_pip_agree_on_python():
    python_spec = conda_environment()["dependencies"][0]
    assert python_spec.startswith("python" + pyproject()["project"]["requires-python"])


# Calls --------------------------------------------------------------------------------------------------------

EVERY_KERNEL = sorted((PROJECT / "fa2_lab" / "kernels").rglob("*.py"))
KERNELS = [path for path in EVERY_KERNEL if path.parent.name != "ladder"]
CALLS = ("api/attention", "api/checks", "api/operators", "api/packed", "api/paged", "transformers")
HEART = [*KERNELS, *(PROJECT / "fa2_lab" / f"{name}.py" for name in CALLS)]


def unnamed(source: str, ours: set[str]) -> list[str]:
    """Calls of our own functions that pass None, a truth value or 0 without a name."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if getattr(call.func, "id", "") in ours
        and any(isinstance(x, ast.Constant) and (x.value is None or x.value is True or x.value == 0) for x in call.args)
    ]


def nested_targets(source: str) -> list[str]:
    """Lines of functions for the GPU that take a tuple of tuples apart: Triton 3.6 cannot read them."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    ours = [f for f in functions if any("jit" in ast.unparse(decorator) for decorator in f.decorator_list)]
    lines = [node for f in ours for node in ast.walk(f) if isinstance(node, ast.Assign)]
    return [
        ast.unparse(line)
        for line in lines
        for target in line.targets
        if isinstance(target, ast.Tuple) and any(isinstance(x, ast.Tuple) for x in target.elts)
    ]


@cache
def functions_of(paths: tuple[Path, ...]) -> set[str]:
    """Names of functions and classes that modules define, methods left out."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    return {node.name for tree in trees for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


@pytest.mark.parametrize("path", HEART, ids=lambda path: str(path.relative_to(PROJECT / "fa2_lab")))
def test_constants_are_passed_by_name(path):
    assert not unnamed(path.read_text(encoding="utf-8"), functions_of(tuple(HEART)) - {"keep", "call"})


@pytest.mark.parametrize("path", EVERY_KERNEL, ids=lambda path: str(path.relative_to(PROJECT / "fa2_lab")))
def test_kernels_keep_to_what_the_oldest_triton_reads(path):
    assert not nested_targets(path.read_text(encoding="utf-8"))


def test_a_tuple_of_tuples_is_found():
    assert nested_targets("@triton.jit\ndef f(x):\n    (a, b), c = x")
    assert not nested_targets("@triton.jit\ndef f(x):\n    a, b = x\ndef g(x):\n    (a, b), c = x")


def test_unnamed_constants_are_found():
    assert unnamed("b(x, None); b(c=None); b(0); b(False, d=True); b(1); c(None)", {"b"}) == [
        *("b(x, None)", "b(0)", "b(False, d=True)")
    ]
