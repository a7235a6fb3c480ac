"""Parts of this package as a folder: what a student's process in the box may import, and what a bundle holds."""

import ast
from pathlib import Path

from fa2_studio.course.notebooks import FOLDER, PROJECT, Assignment

CHECKS = FOLDER / "checks"
BESIDE = ("probes", "probes_triton", "probes_cases", "probes_ladder")  # checks that run beside a student's code
NOTHING = '''"""While work is graded, the checks are in another process: what is asked of them here is nothing."""


class Nothing:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_, **__):
        return self

    __add__ = __radd__ = __iadd__ = __getitem__ = __enter__ = __call__

    def __exit__(self, *_):
        return None

    def __iter__(self):
        return iter(())

    def __bool__(self):
        return False

    def __float__(self):
        return 0.0


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing()
'''


def for_box(folder: Path, assignment: Assignment) -> Path:
    """Write what a student's process gets: what runs it, the probes, and what the assignment gives."""
    wanted = ["fa2_studio.course.worker", *(f"checks.{name}" for name in BESIDE), *assignment.gives]
    for path in closure(wanted):
        copy(path, folder / path.relative_to(top_of(path)))
    (folder / "checks" / "__init__.py").write_text(NOTHING, encoding="utf-8")
    for home in {parent for path in folder.rglob("*.py") for parent in path.parents if folder in parent.parents}:
        if not (home / "__init__.py").exists():
            (home / "__init__.py").write_text('"""What was given of the package."""\n', encoding="utf-8")
    for place in (folder, *folder.rglob("*")):
        place.chmod(0o755 if place.is_dir() else 0o644)
    return folder


def visible_checks(assignments: list[Assignment]) -> list[Path]:
    """The files of the checks that these assignments' notebooks import, with all that those import of the checks."""
    texts = [FOLDER / "text" / f"{a.name}.py" for a in assignments]
    wanted = [name for text in texts for name in imported(text) if name.startswith("checks.")]
    return sorted(path for path in closure([*wanted, "checks.__main__"]) if path.parent == CHECKS)


def top_of(path: Path) -> Path:
    """The folder that a module's name begins in."""
    return FOLDER if path.parent == CHECKS else PROJECT


def copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(path.read_bytes())


def closure(modules: list[str]) -> set[Path]:
    """The files of these modules, of all modules below them, and of what they import of this project."""
    found: set[Path] = set()
    todo = [file for name in modules for file in files_of(name, below=True)]
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += [file for name in imported(path) for file in files_of(name)]
    return found


def files_of(module: str, below: bool = False) -> list[Path]:
    """A module's file; a package's own file, and with `below` everything in it. The two tops hold too much."""
    place = (FOLDER if module.startswith("checks.") else PROJECT).joinpath(*module.split("."))
    if place.is_dir():
        return sorted(place.rglob("*.py")) if below else [place / "__init__.py"] if "." in module else []
    return [place.with_suffix(".py")] if place.with_suffix(".py").is_file() else []


def imported(path: Path) -> list[str]:
    """Modules that a file imports; `from a import b` counts as a and as a.b, and so does `from . import b`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            here = ".".join(path.relative_to(top_of(path)).parts[:-1]) if node.level else ""
            module = ".".join(filter(None, (here, node.module)))
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.startswith(("fa2_lab.", "fa2_studio.", "checks."))]
