"""Functions that locate a tile's elements in shared memory, or in the registers of warps and lanes.

Triton records its layouts in its intermediate representation (TTGIR). `parse` reads them from there, so these functions
show the layouts that the compiler chose. They do not support clusters of thread blocks.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

ATTRIBUTE = re.compile(r"#ttg\.(\w+)<\{(.*)\}>", re.DOTALL)
FIELD = re.compile(r"(\w+) = (\[[^\]]*\]|\w+)")
CHUNK_BYTES = 16  # bytes per chunk; ldmatrix loads one chunk per address, and swizzling moves chunks as a whole
LINE_BYTES = 128  # 32 banks of 4 bytes


class Owners(NamedTuple):
    """The warp, lane and register that hold each element of a tile, as three arrays with the tile's shape."""

    warp: np.ndarray
    lane: np.ndarray
    register: np.ndarray


@dataclass(frozen=True)
class MmaLayout:
    """The layout of the accumulators of a matmul: mma.m16n8 (version 2, sm_80) or wgmma.m64 (version 3, sm_90)."""

    version: int
    warps: tuple[int, int]  # number of warps along the rows and along the columns
    instruction: tuple[int, int]  # rows and columns that one instruction computes per warp

    def owners(self, shape: tuple[int, int]) -> Owners:
        """Return the warp, lane and register that hold each element of a tile of this shape.

        The shape must be a multiple of the tile that the warps compute together with one instruction each.
        """
        sizes = [w * n for w, n in zip(self.warps, self.instruction, strict=True)]
        if any(length % size for length, size in zip(shape, sizes, strict=True)):
            raise ValueError(
                f"shape: got {shape}; it takes multiples of {tuple(sizes)}: all warps, one instruction each"
            )
        row, col = np.indices(shape)
        (warps_r, warps_c), (_, N) = self.warps, self.instruction
        (repeat_r, w_r), (repeat_c, w_c) = np.divmod(row // 16, warps_r), np.divmod(col // N, warps_c)
        warp = w_r * warps_c + w_c if self.version == 2 else w_c * warps_r + w_r
        instruction = repeat_r * (shape[1] // sizes[1]) + repeat_c
        within = col % N // 8 * 4 + row % 16 // 8 * 2 + col % 2
        return Owners(warp, row % 8 * 4 + col % 8 // 2, instruction * (N // 2) + within)


@dataclass(frozen=True)
class SharedLayout:
    """The layout of a swizzled tile in shared memory.

    Swizzling permutes the chunks of `vec` elements within each row. The permutation changes every `per_phase` rows.
    """

    vec: int
    per_phase: int  # number of consecutive rows with the same permutation
    max_phase: int  # number of different permutations
    block: int | None = None  # columns per block if the tile is stored in blocks of columns
    transposed: bool = False

    def offsets(self, shape: tuple[int, int]) -> np.ndarray:
        """Return the offset of each element, in elements, from the start of a tile of this shape."""
        row, col = np.indices(shape)[:: -1 if self.transposed else 1]
        rows, cols = shape[:: -1 if self.transposed else 1]
        width = self.block or cols
        if cols % width or width % (self.vec * self.max_phase):
            raise ValueError(f"shape: got {shape}; it takes rows of whole blocks and blocks of whole swizzle periods")
        phase = row // self.per_phase % self.max_phase
        chunk = (col % width // self.vec) ^ phase
        return col // width * (rows * width) + row * width + chunk * self.vec + col % self.vec


def parse(text: str) -> MmaLayout | SharedLayout:
    """Parse a TTGIR attribute, such as #ttg.swizzled_shared<{vec = 8, …}>, and return the layout that it describes."""
    match = ATTRIBUTE.search(text)
    fields = {name: _value(value) for name, value in FIELD.findall(match[2])} if match else {}
    kind = match[1] if match else text
    if kind == "nvidia_mma" and fields["versionMajor"] in (2, 3):
        return MmaLayout(fields["versionMajor"], fields["warpsPerCTA"], fields["instrShape"][:2])
    if kind == "swizzled_shared":
        vec, per_phase, max_phase = (fields[name] for name in ("vec", "perPhase", "maxPhase"))
        return SharedLayout(vec, per_phase, max_phase, transposed=fields["order"] == (0, 1))
    if kind == "nvmma_shared":
        width = fields["swizzlingByteWidth"]
        elements = width * 8 // fields["elementBitWidth"]
        vec = CHUNK_BYTES * 8 // fields["elementBitWidth"]
        return SharedLayout(vec, LINE_BYTES // width, width // CHUNK_BYTES, elements, fields["transposed"])
    raise ValueError(f"layout: got {kind}; it takes nvidia_mma (version 2 or 3), swizzled_shared or nvmma_shared")


def _value(text: str) -> Any:
    if text.startswith("["):
        return tuple(int(n) for n in text[1:-1].split(","))
    return text == "true" if text in ("true", "false") else int(text)


def bank_conflicts(offsets: np.ndarray, itemsize: int = 2) -> int:
    """Return the largest number of 16-byte chunks in `offsets` that share a group of banks. 1 means no conflict."""
    groups = offsets * itemsize % LINE_BYTES // CHUNK_BYTES
    return int(np.bincount(groups.ravel()).max())
