"""What a student's code may import of this package, as a folder: what is off limits is not in it."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "fa2_lab"
COURSE = "fa2_studio.course"
INSIDE = [f"{COURSE}.{name}" for name in ("sandbox", "walls", "channel", "worker")]  # what runs the student's code
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


def stage(folder: Path, gives: tuple[str, ...]) -> Path:
    """Write the part of the package that a student's process gets: what runs it, the probes, and what is given."""
    probes = [f"{COURSE}.{path.stem}" for path in sorted(Path(__file__).parent.glob("probes*.py"))]
    files = closure([*INSIDE, *probes, *gives])
    for path in files:
        copy = folder / path.relative_to(PROJECT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    for init in {parent / "__init__.py" for path in files for parent in path.parents if PROJECT in parent.parents}:
        copy = folder / init.relative_to(PROJECT)
        if not copy.exists():
            copy.write_text('"""A part of the package."""\n', encoding="utf-8")
    (folder / "fa2_lab").mkdir(exist_ok=True)
    (folder / "fa2_lab" / "__init__.py").write_text('"""What was given of the package."""\n', encoding="utf-8")
    (folder / "fa2_studio" / "course" / "__init__.py").write_text(NOTHING, encoding="utf-8")
    return folder


def closure(modules: list[str]) -> set[Path]:
    """The files of these modules, of all modules below them, and of what they import of this package."""
    found: set[Path] = set()
    todo = [file for name in modules for file in files_of(name, below=True)]
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += [file for name in imported(path) for file in files_of(name)]
    return found


def files_of(module: str, below: bool = False) -> list[Path]:
    """A module's file; a package's own file, and with `below` everything in it."""
    place = PROJECT.joinpath(*module.split("."))
    if place.is_dir() and place != PACKAGE:
        return sorted(place.rglob("*.py")) if below else [place / "__init__.py"]
    file = place.with_suffix(".py")
    return [file] if file.is_file() else []


def imported(path: Path) -> list[str]:
    """Modules of this package that a file imports; `from a import b` counts as a and as a.b."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    parts = {".".join(name.split(".")[:n]) for name in found for n in range(2, name.count(".") + 2)}
    return sorted(name for name in parts if name.startswith(("fa2_lab.", "fa2_studio.")) and name != COURSE)


def fingerprint(*folders: Path) -> str:
    """A digest of every Python file in some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()
