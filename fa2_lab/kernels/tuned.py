"""The file of sizes that `fa2-lab tune` has found to be the fastest on a GPU at hand."""

import json
import os
from pathlib import Path
from typing import Any

from fa2_lab.kernels.prepared import forget, prepared


def tuned_file() -> Path:
    """Where finds are kept: $FA2_LAB_TUNED, or a file in the user's cache folder."""
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FA2_LAB_TUNED") or Path(cache_folder) / "fa2_lab" / "tuned.json")


def finds() -> dict[str, Any]:
    """{name: [B_r, B_c, warps, stages, registers]}; empty where nothing was tuned."""
    file = tuned_file()
    return prepared(("finds", file), read, file)


def read(file: Path) -> dict:
    """What a file of finds holds."""
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{file}: got {error}; it takes what `fa2-lab tune` writes: delete it, or tune again"
        ) from error


def keep(new: dict[str, list[int]]) -> Path:
    """Add finds to the file, which is whole at any time, and use them from now on."""
    file = tuned_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(read(file) | new, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    unfinished.replace(file)
    forget()
    return file
