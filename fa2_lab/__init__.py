"""FlashAttention-2, built step by step.

The package itself requires only NumPy. `attention` loads torch and Triton on first use.
"""

from importlib import import_module
from typing import Any

from fa2_lab.paper import where

__all__ = ["attention", "attention_packed", "attention_paged", "examine", "where"]
__version__ = "0.1.0"

# {public call: module of fa2_lab.api that defines it}
MODULES = {"attention": "attention", "attention_packed": "packed", "attention_paged": "paged"}


def __getattr__(name: str) -> Any:
    """Import a public function or module on first use and return it."""
    if name == "examine":  # fa2_lab.examine is a callable module
        return import_module("fa2_lab.examine")
    if name not in MODULES:
        raise AttributeError(f"module 'fa2_lab' has no attribute {name!r}")
    try:
        found = globals()[name] = getattr(import_module(f"fa2_lab.api.{MODULES[name]}"), name)
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"fa2_lab.{name} needs torch, which is not installed: pip install 'fa2-lab[kernels]'", name="torch"
        ) from missing
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
