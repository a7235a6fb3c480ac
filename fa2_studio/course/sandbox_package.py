"""Choose the parts of this package that a student's sandboxed process may import, and those that a bundle contains."""

from collections.abc import Sequence
from modulefinder import ModuleFinder
from pathlib import Path

from fa2_studio.course.notebooks import FOLDER, PROJECT, Assignment

CHECKS = FOLDER / "checks"
CHECKS_IN_SANDBOX = ("cells", "probes", "probes_triton", "probes_cases")  # the checks that run in the student's process
EMPTY_CHECKS = '''"""While work is graded, the checks are in another process: what is asked of them here is nothing."""

from unittest.mock import MagicMock


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
'''


def write_sandbox_package(folder: Path, assignment: Assignment) -> Path:
    """Write to a folder all modules that a student's process may import, and return the folder.

    These are the worker, the probes, and the modules of fa2_lab that the assignment provides.
    """
    wanted = ["fa2_studio.course.worker", *(f"checks.{name}" for name in CHECKS_IN_SANDBOX), *assignment.gives]
    for path in imported_files(wanted):
        copy = folder / path.relative_to(FOLDER if path.parent == CHECKS else PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    (folder / "checks" / "__init__.py").write_text(EMPTY_CHECKS, encoding="utf-8")
    for home in {parent for path in folder.rglob("*.py") for parent in path.parents if folder in parent.parents}:
        if not (home / "__init__.py").exists():
            (home / "__init__.py").write_text('"""What was given of the package."""\n', encoding="utf-8")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def visible_checks(assignments: list[Assignment]) -> list[Path]:
    """Return the files of `checks` that these assignments' notebooks import, directly or through other checks."""
    texts = [FOLDER / "text" / f"{a.name}.py" for a in assignments]
    return sorted(path for path in imported_files(["checks.__main__"], texts) if path.parent == CHECKS)


def imported_files(modules: list[str], scripts: Sequence[Path] = ()) -> set[Path]:
    """Return the files of these modules and their submodules, and of all project modules that they or scripts use."""
    tops = {"fa2_lab": PROJECT, "fa2_studio": PROJECT, "checks": FOLDER}
    finder = ModuleFinder([])
    for name, home in tops.items():  # register each package without its __init__.py, which would import many modules
        finder.add_module(name).__path__ = [str(home / name)]
    for name in modules:
        place = tops[name.partition(".")[0]].joinpath(*name.split("."))
        below = [path.relative_to(place.parent).with_suffix("").parts for path in place.rglob("*.py")]
        for parts in [[place.name], *below]:
            finder.import_hook(".".join([*name.split(".")[:-1], *parts]).removesuffix(".__init__"))
    for path in scripts:
        finder.load_file(str(path))
    files = {Path(module.__file__) for module in finder.modules.values() if module.__file__}
    return files - set(scripts)
