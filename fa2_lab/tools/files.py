"""Functions that write files atomically, check in advance whether a folder is writable, and import Python files."""

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]  # the root of the checkout, if there is one
NO_CHECKOUT = "{what} needs a checkout of the repository, and there is none around this package"


def checkout(what: str) -> Path:
    """Return the root of the checkout that contains this package. Raise an error if there is none.

    The error message says that `what` needs a checkout.
    """
    if not (ROOT / "pyproject.toml").is_file():
        raise ValueError(NO_CHECKOUT.format(what=what))
    return ROOT


def write(path: Path, content: str | bytes) -> Path:
    """Write a file under a temporary name and then rename it, so that readers never see an incomplete file."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def check_writable(folder: Path, what: str) -> None:
    """Raise an error if the results of `what` cannot be written to a folder. Call this before doing the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder / f".{what}", "").unlink(missing_ok=True)  # a concurrent run may already have deleted the file
    except OSError as failure:
        raise ValueError(f"{what}: cannot write into {folder} ({failure.strerror}); nothing was done") from failure


def module_at(path: Path | str) -> ModuleType:
    """Import a Python file and return the module."""
    spec = spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"path: got {path}; it takes a Python file")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
