"""What the gallery knows of one picture, and how it tells whether the file in figures/ is current."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum

import numpy as np

from fa2_lab.plots import style


@dataclass(frozen=True)
class Picture:
    """One picture: its message, the notebook that shows it, the function that draws it and the data it draws."""

    name: str
    sentence: str
    notebook: str
    draw: Callable
    data: Callable[[], dict]

    @property
    def call(self) -> str:
        """The call that draws it, as a reader would write it."""
        return f"{self.draw.__module__}.{self.draw.__name__}(**{self.data.__module__}.{self.data.__name__}())"

    def digest(self, data: dict) -> str:
        """A fingerprint of what decides the picture: its data, its drawing code and the common style."""
        code = inspect.getsource(sys.modules[self.draw.__module__]) + inspect.getsource(style)
        return hashlib.sha256((code + json.dumps(canonical(data))).encode()).hexdigest()[:16]


def canonical(x):
    """Data as JSON can hold it, with floats rounded so that the last bits of a machine do not matter."""
    if isinstance(x, np.ndarray):
        return canonical(x.tolist())
    if is_dataclass(x):
        return {f.name: canonical(getattr(x, f.name)) for f in fields(x)}
    if isinstance(x, dict):
        return {str(canonical(k)): canonical(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [canonical(v) for v in x]
    if isinstance(x, (float, np.floating)):
        return f"{x:.6g}"
    if isinstance(x, Enum):
        return x.name
    return x.item() if isinstance(x, np.generic) else x
