"""What the compiler makes of the forward kernel: its layouts as pictures, and the command that records all of it.

`fa2-lab figures --compile` compiles for chips that need not be here, each in a process of its own, and writes
figures/data/layouts.json and compiled.json. The pictures are drawn from these files alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from io import BytesIO
from itertools import product
from pathlib import Path
from tokenize import NAME, NUMBER, OP, STRING, tokenize

import numpy as np
from tqdm import tqdm

from fa2_lab.gallery.machine import RECORDED, budget_data, recorded
from fa2_lab.gallery.picture import Picture
from fa2_lab.machine.layouts import Mma, Owners, Shared, parse
from fa2_lab.plots import layouts

PROJECT = Path(__file__).resolve().parents[2]
SOURCES = ("forward.py", "tile.py")  # of the kernels: what decides how the forward compiles
COMMAND = "python -m fa2_lab figures --compile"
TARGETS = ("sm_80", "sm_90")
TILE = dict(B_r=128, B_c=64, warps=4, stages=2)  # whose layouts are drawn
INSTRUCTIONS = {2: "mma", 3: "wgmma"}

# Recording ----------------------------------------------------------------------------------------------------


def record(folder: Path = RECORDED) -> None:
    """Compile the forward at every block size, and for its layouts on both targets, and write down what came out."""
    source = source_digest()
    jobs = [dict(target=target, d=d, **TILE) for target, d in product(TARGETS, (64, 128))]
    rows = [row for target in TARGETS for row in compiled(target, [job for job in jobs if job["target"] == target])]
    kept = [{name: row[name] for name in (*jobs[0], "instruction", "warpsPerCTA", "S", "O", "K")} for row in rows]
    write(folder / "layouts.json", "layouts", kept, dict(source=source, triton=rows[0]["triton"]))
    sizes = budget_jobs("sm_90")
    rows = [*tqdm(compiled("sm_90", sizes), total=len(sizes), desc="compile", unit="kernel", disable=None)]
    kept = [{name: row[name] for name in (*sizes[0], "registers", "spills", "shared")} for row in rows]
    write(folder / "compiled.json", "forward", kept, dict(source=source, triton=rows[0]["triton"]))


def budget_jobs(target: str) -> list[dict]:
    """One compilation for every cell of the picture of block sizes, with the warps and stages that it names."""
    data = budget_data()
    return [
        dict(target=target, d=d, B_r=B_r, B_c=B_c, warps=cell["warps"], stages=data["stages"])
        for d, cells in data["cells"].items()
        for (B_r, B_c), cell in cells.items()
    ]


def write(file: Path, name: str, rows: list[dict], versions: dict) -> None:
    """The rows, one to a line, after what made them."""
    made = dict(command=COMMAND, kernel="forward_kernel, fp16, not causal") | versions
    head = json.dumps(dict(made_by=made), indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{head},\n "{name}": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def source_digest() -> str:
    """A fingerprint of the forward's source that comments and line breaks do not change."""
    words = []
    for name in SOURCES:
        source = (PROJECT / "fa2_lab" / "kernels" / name).read_bytes()
        words += [t.string for t in tokenize(BytesIO(source).readline) if t.type in (NAME, NUMBER, OP, STRING)]
    return sha256(" ".join(words).encode()).hexdigest()[:16]


def compiled(target: str, jobs: list[dict]) -> Iterator[dict]:
    """Each job with what the compiler made of it, from a process that never runs Triton's interpreter."""
    command = [sys.executable, "-m", "fa2_lab.gallery.compile_worker", target]
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=PROJECT)
    with subprocess.Popen(command, **pipes) as worker:
        worker.stdin.write("".join(json.dumps(job) + "\n" for job in jobs))
        worker.stdin.close()
        for job, line in zip(jobs, worker.stdout, strict=False):
            yield job | found_in(json.loads(line))
    if worker.returncode:
        raise ValueError(f"compiling for {target} failed, as told above; it needs torch and Triton, hence Linux")


def found_in(made: dict) -> dict:
    """Layouts and shapes out of a kernel's ttgir, beside what is kept as it is."""
    ttgir = made.pop("ttgir")
    named = dict(re.findall(r"^#(\w+) = (#ttg\.\w+<\{.*\}>)$", ttgir, re.MULTILINE))
    dots = re.findall(r"(?:tt\.dot|warp_group_dot) .*-> tensor<(\d+)x(\d+)xf32, #(\w+)>", ttgir)
    (streamed,) = set(re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<\d+x(\d+)x(\d+)xf16, #(\w+),", ttgir))
    S, O = dots[:2]  # the tile's two products; every loop over tiles repeats them
    if dots != len(dots) // 2 * [S, O]:
        raise ValueError(f"the forward's products differ from loop to loop: {dots}")
    for tensor, (rows, cols, name) in dict(S=S, O=O, K=streamed).items():
        made[tensor] = dict(shape=[int(rows), int(cols)], layout=named[name])
    layout = parse(made["S"]["layout"])
    return made | dict(instruction=INSTRUCTIONS[layout.version], warpsPerCTA=list(layout.warps))


# Pictures -----------------------------------------------------------------------------------------------------


def layouts_record() -> dict:
    """figures/data/layouts.json, or one sentence on how to get it."""
    found = recorded("layouts")
    if found is None:
        raise ValueError(f"figures/data/layouts.json is missing: `{COMMAND}` compiles the forward and writes it")
    return found


def made(record: dict) -> str:
    """What the pictures say of how their data came about."""
    return f"Triton {record['made_by']['triton']}, tile {TILE['B_r']} × {TILE['B_c']}, {TILE['warps']} warps"


def accumulators_data(size: int = 16, row: int = 5) -> dict:
    """Owners of S and O as compiled, and of the corner of S for the targets that agree on it."""
    record = layouts_record()
    kernels = [_kernel(k) for k in record["layouts"]]
    corners: list[tuple[list[str], Owners]] = []
    for kernel in kernels:
        corner = Owners(*(x[:size, :size] for x in kernel["S"]))
        same = [names for names, other in corners if all(map(np.array_equal, corner, other))]
        names = same[0] if same else []
        if not same:
            corners.append((names, corner))
        if kernel["target"] not in names:
            names.append(kernel["target"])
    return dict(kernels=kernels, corner={" and ".join(n): c for n, c in corners}, row=row, made=made(record))


def _kernel(found: dict) -> dict:
    """Owners of S and O, and what one instruction computes of each."""
    S, O = (parse(found[tensor]["layout"]) for tensor in "SO")
    owners = {t: layout.owners(tuple(found[t]["shape"])) for t, layout in dict(S=S, O=O).items()}
    gives = dict(S=one_instruction(S), O=one_instruction(O))
    return dict(target=found["target"], d=found["d"], instruction=found["instruction"], gives=gives, **owners)


def one_instruction(layout: Mma) -> tuple[int, int]:
    """Rows and columns that one instruction computes: mma belongs to one warp, wgmma to four below each other."""
    rows, cols = layout.instruction
    return (rows, cols) if layout.version == 2 else (4 * rows, cols)


def swizzle_data(rows: int = 8, chunk: int = 2, itemsize: int = 2) -> dict:
    """Byte addresses of K's first rows, chunk by chunk: row-major, which nobody uses, and as compiled."""
    record, panels = layouts_record(), {}
    for kernel in record["layouts"]:
        layout, shape = parse(kernel["K"]["layout"]), tuple(kernel["K"]["shape"])
        plain = Shared(layout.vec, 1, 1)
        for name, kind in (("Row-major, for contrast", plain), (kernel["target"], layout)):
            panels[name, kernel["d"]] = itemsize * kind.offsets(shape)[:rows, :: layout.vec]
    return dict(panels=panels, chunk=chunk, made=made(record))


PICTURES = [
    Picture(
        "accumulators",
        "As compiled: a row of S and of O belongs to one warp, spread over four of its lanes.",
        "07_warps",
        layouts.accumulators,
        accumulators_data,
    ),
    Picture(
        "swizzled_keys",
        "As compiled: the same chunk of eight rows of K lies in eight different groups of shared-memory banks.",
        "07_warps",
        layouts.swizzled_keys,
        swizzle_data,
    ),
]
