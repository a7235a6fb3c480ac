"""The ladder: forward kernels for attention, from three simple ones to one that is faster than FlashAttention-3.

    from fa2_lab.kernels import ladder
    O, L = ladder.load("08").forward(q, k, v, causal=True)

Each numbered file is one rung and can be read on its own, because it imports no other rung. The first line of the file
names the one change from the previous rung. `forward` accepts q, k and v of shape (batch, heads, N, d) in fp16 or bf16,
with the same number of heads in all three. N may differ between q and k. The Triton rungs accept any d that is a power
of two and at least 16. The Gluon rungs need a Hopper GPU and d = 64 or 128. `fa2-lab ladder 08 --run` runs rung 08 by
itself.

The folder also has side rungs, which are not part of the numbered sequence. s00 and s01 divide a tile among warps in
two different ways. x23 loads rung 23 and replaces its softmax, so that the FMA units compute some of the exponentials.
b00, b01 and b02 compute the backward pass and differ in the way they accumulate dQ. Each of these three has a function
`backward(q, k, v, O, L, dO, causal)` that returns dQ, dK and dV. b02 is written in Gluon.
"""

import ast
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
RUNGS = tuple(sorted(path.stem for path in FOLDER.glob("r[0-9][0-9]_*.py")))
SIDE, BACKWARD, VARIANTS = (tuple(sorted(path.stem for path in FOLDER.glob(f"{x}[0-9][0-9]_*.py"))) for x in "sbx")
copies = count()


def find(rung: str) -> str:
    """Return the full name of a rung given as 7, 07, r07 or r07_skipping, or of a side rung such as s00."""
    asked = rung.strip().lower().removeprefix("r")
    found = [name for name in RUNGS if asked in (name[1:], name[1:3], str(int(name[1:3])))]
    found += [name for name in SIDE + BACKWARD + VARIANTS if asked in (name, name[:3])]
    if not asked or not found:
        known = ", ".join(RUNGS + SIDE + BACKWARD + VARIANTS)
        raise ValueError(f"rung: got {rung!r}; it takes {known}, or the number alone")
    return found[0]


def load(rung: str) -> ModuleType:
    """Import a rung and return its module, whose forward(q, k, v, causal) returns O and L."""
    patch_triton()
    return import_module(f"{__name__}.{find(rung)}")


def copied(rung: str) -> ModuleType:
    """Import a rung a second time and return the new module. Changes to this module do not affect the original."""
    patch_triton()
    spec = spec_from_file_location(f"{__name__}.copy_{next(copies)}_of_{find(rung)}", FOLDER / f"{find(rung)}.py")
    assert spec and spec.loader  # the file exists, so neither is None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def patch_triton() -> None:
    """Make the API names that the rungs use available in older Triton versions. Call this before importing a rung."""
    from fa2_lab.kernels import triton_versions

    triton_versions.check_and_patch()
    triton_versions.add_newest_names()


def change(rung: str) -> tuple[str, str]:
    """Return a rung's short name and the sentence that describes its change, read from the first line of its file."""
    tree = ast.parse((FOLDER / f"{find(rung)}.py").read_text(encoding="utf-8"))
    first = str(ast.get_docstring(tree)).split("\n")[0]
    name, _, sentence = first.partition(", ")[2].partition(": ")
    if not sentence:
        raise ValueError(f"{rung}: got {first!r} in its first line; it takes 'Rung 07, its name: its one change'")
    return name, sentence
