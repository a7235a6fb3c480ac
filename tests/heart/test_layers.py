"""Imports between the layers, tags, packaging, and the texts that planted faults replace."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from inspect import signature
from pathlib import Path
from typing import get_args

import yaml
from packaging.requirements import Requirement
from planted import faults

from fa2_lab.paper import LINES, TAG

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "fa2_lab"

# A folder imports from lower layers, never from another in its own layer or above. `import fa2_lab` ends with __init__.
LAYERS = {
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
    "examine": 6,
    "machine": 7,
    "errata": 7,
    "plots": 8,
    "tools": 9,
    "__main__": 10,
}
LAYER_OF = {"transformers": "api"}
FORBIDDEN = {("kernels", "reference")}  # downward, and still not wanted, because a kernel is read without the reference


# Imports ------------------------------------------------------------------------------------------------------


def folder_of(module: str) -> str:
    """Return the part of the package to which a module belongs.

    For example, it is "reference" for fa2_lab.reference.fa2, and "__init__" for fa2_lab itself.
    """
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    return LAYER_OF.get(name, name)


def imported_modules(source: str, module: str, modules: frozenset[str] = frozenset()) -> set[str]:
    """Return all modules of the package that a source imports, at its top or inside a function.

    `from fa2_lab.kernels import launches` imports fa2_lab.kernels.launches if that is one of the modules, and a name
    that fa2_lab.kernels defines if it is not. From the package itself only modules are taken.
    """
    found = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *filter(None, [node.module])])
            inside = {f"{base}.{alias.name}" for alias in node.names}
            found |= inside if base == "fa2_lab" else {name if name in modules else base for name in inside}
    return {name for name in found if name.split(".")[0] in ("fa2_lab", "fa2_studio")}


def wrong_imports(source: str, module: str) -> list[str]:
    """Return the imports of a file that are not from a lower layer, or that FORBIDDEN lists, in words."""
    folder, wrong = folder_of(module), []
    if folder not in LAYERS:
        return [f"{folder}: no layer in tests/heart/test_layers.py"]
    for name in sorted(imported_modules(source, module)):
        imported = "fa2_studio" if name.startswith("fa2_studio") else folder_of(name)
        if imported == folder:
            continue
        if LAYERS.get(imported, 99) >= LAYERS[folder] or (folder, imported) in FORBIDDEN:
            wrong.append(f"{folder} imports {imported}")
    return wrong


@cache
def package_modules(folder: Path = PACKAGE) -> dict[str, str]:
    """Return {module: source} for a whole package."""
    names = {path: ".".join(path.relative_to(PROJECT).with_suffix("").parts) for path in folder.rglob("*.py")}
    return {name.removesuffix(".__init__"): path.read_text(encoding="utf-8") for path, name in names.items()}


def test_imports_come_from_lower_layers_only():
    wrong = {module: wrong_imports(source, module) for module, source in package_modules().items()}
    assert not {module: imports for module, imports in wrong.items() if imports}
    assert {"tiles", "reference", "errata", "__main__"} <= {folder_of(module) for module in wrong}


def test_imports_have_no_cycles():
    sources = package_modules() | package_modules(PROJECT / "fa2_studio")
    modules = frozenset(sources)
    imports = {name: imported_modules(source, name, modules) - {name} for name, source in sources.items()}
    assert imports["fa2_lab.kernels.dispatch"] >= {"fa2_lab.kernels.decode.plan", "fa2_lab.kernels.portable.forward"}
    TopologicalSorter(imports).prepare()  # a CycleError names the files


def test_paper_tags_name_existing_lines():
    named = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *(PROJECT / "notebooks" / "text").rglob("*.py")]
    named = {tag: path for path in [*named, *PACKAGE.rglob("*.py")] for tag in TAG.findall(path.read_text("utf-8"))}
    assert {tag: path.name for tag, path in named.items() if tag not in LINES} == {}


# Packaging ----------------------------------------------------------------------------------------------------


PUBLIC_CALLS = "attention", "attention_packed", "attention_paged"
# The arguments of flash_attn_func(), flash_attn_varlen_func() and flash_attn_with_kvcache() that are also ours.
FLASH_ATTN = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "causal", "softcap", "block_table"}
FLASH_ATTN |= {"num_splits"}
OWN = {"window", "sinks", "bias", "key_lengths", "seed", "backend", "k_pages", "v_pages"}  # differ, or exist only here


def type_names(source: str) -> set[str]:
    """Return the names of all classes, and of types that are defined at the top level, as in Rows = tuple[int, int]."""
    tree = ast.parse(source)
    named = [node for node in tree.body if isinstance(node, ast.Assign)]
    named = [node for node in named if isinstance(node.value, (ast.Name, ast.Subscript, ast.BinOp))]
    names = {ast.unparse(target) for node in named for target in node.targets}
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return classes | {name for name in names if re.fullmatch(r"([A-Z][a-z]+)+", name)}


def duplicate_types(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return {type: modules} for types that several modules define. Rungs may repeat each other and the kernels."""
    modules_of: dict[str, set[str]] = {}
    for module, source in sources.items():
        if not module.startswith("fa2_lab.kernels.ladder."):
            for name in type_names(source):
                modules_of.setdefault(name, set()).add(module)
    return {name: modules for name, modules in modules_of.items() if len(modules) > 1}


def test_type_names_are_unique():
    assert duplicate_types(package_modules() | package_modules(PROJECT / "fa2_studio")) == {}
    sources = {"a": "class A: ...", "b": "def f():\n    class A: ...", "c": "class B(A): ...", "d": "Ab = list[A]"}
    sources |= {"e": "class Ab: ...", "fa2_lab.kernels.ladder.r01": "class B: ..."}
    assert duplicate_types(sources) == {"A": {"a", "b"}, "Ab": {"d", "e"}}


def test_public_arguments_have_the_same_names_as_in_torch_and_flash_attn():
    """Wherever a name is an argument of our calls, it also takes the same type."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    import fa2_lab

    documented = torch.nn.functional.scaled_dot_product_attention.__doc__ or ""
    in_torch = {*re.findall(r"(\w+)=", documented.partition("->")[0]), *signature(flex_attention).parameters}
    meaning: dict[str, set[frozenset]] = {}
    for call in PUBLIC_CALLS:
        for name, parameter in signature(getattr(fa2_lab, call)).parameters.items():
            types = get_args(parameter.annotation) or [parameter.annotation]
            meaning.setdefault(name, set()).add(frozenset(types) - {type(None)})
    assert not {name: kinds for name, kinds in meaning.items() if len(kinds) > 1}
    assert meaning.keys() - in_torch - FLASH_ATTN == OWN and meaning.keys() >= FLASH_ATTN and not in_torch & OWN


def pyproject() -> dict:
    try:
        import tomllib
    except ImportError:  # Python 3.10, where pytest brings tomli
        import tomli as tomllib
    return tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


def requirements() -> list[Requirement]:
    project = pyproject()["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    lines = [Requirement(line) for line in project["dependencies"] + extras]
    return [line for line in lines if line.name != "fa2-lab"]  # an extra within an extra


def test_dependencies_have_lower_bounds_only():
    operators = {r.name: {spec.operator for spec in r.specifier} for r in requirements()}
    assert operators and all(used == {">="} for used in operators.values()), operators
    project = pyproject()["project"]
    assert [Requirement(line).name for line in project["dependencies"]] == ["numpy"], "of itself it needs no more"
    assert {"kernels", "plots", "transformers", "dev"} <= set(project["optional-dependencies"])
    triton = next(r for r in requirements() if r.name == "triton")
    needed_on = [name for name in ("Linux", "Darwin") if triton.marker.evaluate({"platform_system": name})]
    assert needed_on == ["Linux"]


def test_constraints_bound_every_dependency_from_above():
    lines = (PROJECT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    bounds = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all({spec.operator for spec in bound.specifier} == {"<"} for bound in bounds)
    lower = {r.name: next(iter(r.specifier)).version for r in requirements()}
    assert {"torch", "triton", "pytest"} <= {bound.name for bound in bounds} <= set(lower)
    assert all(bound.specifier.contains(lower[bound.name]) for bound in bounds)


def test_environment_yml_agrees_with_pyproject():
    environment = yaml.safe_load((PROJECT / "environment.yml").read_text(encoding="utf-8"))
    python, pip, installs = environment["dependencies"]
    assert python.startswith("python" + pyproject()["project"]["requires-python"]) and pip.startswith("pip")
    assert installs == {"pip": ["-c constraints.txt", "-e .[dev]"]}


def test_planted_faults_match_exactly_one_line():
    for fault in faults():
        assert fault.right != fault.wrong and all((PROJECT / "tests/heart" / test).exists() for test in fault.tests)
        fault.place(PROJECT)  # or it raises
