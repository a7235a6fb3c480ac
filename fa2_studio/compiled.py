"""The results of compiling the forward kernel and each rung, recorded for pictures and tables.

`python -m fa2_studio.compiled` compiles for GPUs that need not be installed, each in a separate process, and writes
layouts.json, compiled.json and rungs.json in figures/data. `python -m fa2_studio.compiled forward` writes only the
first two files, and `python -m fa2_studio.compiled ladder` only the last one.
"""

import ast
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from fa2_lab.kernels import ladder
from fa2_lab.machine.budget import blocks_per_sm
from fa2_lab.machine.chips import H200
from fa2_lab.machine.layouts import parse
from fa2_lab.paper import PACKAGE
from fa2_lab.plots import block_budget
from fa2_lab.records import COMPILE
from fa2_lab.records import FOLDER as RECORDED
from fa2_lab.tools import files
from fa2_lab.tools.xray import Compiled, loops, xray

SOURCES = ("portable/forward.py", "common/softmax.py", "common/tile.py")  # the sources of the forward kernel
TARGETS = ("sm_80", "sm_90")
INSTRUCTIONS = {2: "mma", 3: "wgmma"}
FORWARD = "forward_kernel, fp16, not causal"
CLIMBING = ladder.RUNGS + ladder.VARIANTS


def record(folder: Path = RECORDED) -> None:
    """Compile the forward kernel and the ladder, and write all three files."""
    files.check_writable(folder, "fa2_studio.compiled")
    record_forward(folder)
    record_rungs(folder)


def record_forward(folder: Path = RECORDED) -> None:
    """Compile the forward kernel, and write layouts.json (the package's tiles) and compiled.json (all block sizes)."""
    source = digest(PACKAGE / "kernels" / name for name in SOURCES)
    drawn = [dict(target=target, d=d, **shipped_config(target, d)) for target, d in product(TARGETS, (64, 128))]
    write(folder / "layouts.json", "layouts", compile_in_parallel(layouts_of, drawn), source, FORWARD)
    write(folder / "compiled.json", "forward", compile_in_parallel(budget_of, jobs_of_size_figure()), source, FORWARD)


def record_rungs(folder: Path = RECORDED) -> None:
    """Compile each rung for an H200, for both head dimensions and with and without a mask, and write rungs.json."""
    jobs = [dict(rung=rung, d=d, causal=mask) for rung in CLIMBING for d in (128, 64) for mask in (False, True)]
    jobs += [dict(rung=rung, d=128, causal=False) for rung in ladder.BACKWARD]
    kernel = "forward(q, k, v, causal) of each rung, bf16, sm_90"
    write(folder / "rungs.json", "rungs", compile_in_parallel(numbers_of, jobs), digest_of_rungs(), kernel)


def compile_in_parallel(compile_one: Callable[[dict], dict], jobs: Sequence[dict]) -> list[dict]:
    """Compile all jobs in parallel, one per core, and return each job together with its results."""
    with ThreadPoolExecutor(os.cpu_count()) as several:
        made = tqdm(several.map(compile_one, jobs), total=len(jobs), desc="compile", unit="kernel", disable=None)
        return [job | found for job, found in zip(jobs, made, strict=True)]


def digest_of_rungs() -> str:
    """Return a fingerprint of the rungs' sources."""
    return digest(ladder.FOLDER / f"{rung}.py" for rung in CLIMBING + ladder.BACKWARD)


def digest(sources: Iterable[Path]) -> str:
    """Return a fingerprint of source files that ignores comments, docstrings and line breaks."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sources]
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node):
                node.body = node.body[1:]
    return sha256("".join(map(ast.unparse, trees)).encode()).hexdigest()[:16]


def write(file: Path, name: str, rows: list[dict], source: str, kernel: str) -> None:
    """Write a record with one row per line, below a header that names the command, the sources and Triton's version."""
    import triton

    made = dict(command=COMPILE, kernel=kernel, source=source, triton=triton.__version__)
    head = json.dumps(dict(made_by=made), indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    files.write(file, f'{head},\n "{name}": [\n  {lines}\n ]\n}}\n')


# Rungs ----------------------------------------------------------------------------------------------------------


def numbers_of(job: dict) -> dict:
    """Return the recorded numbers of a rung's largest kernel.

    Loop counts refer to the loop over tiles or, if there are two, to the one without a mask.
    """
    rung, d = job["rung"], job["d"]
    kernel = max(xray(rung, "sm_90", d=d, causal=job["causal"]), key=lambda kernel: kernel.numbers["registers"])
    numbers = kernel.numbers
    made = dict(
        registers=registers_of(kernel),
        spills=numbers["spills"],
        programs=blocks_per_sm(H200, numbers["shared"], numbers["registers"], numbers["warps"]),
        shared=numbers["shared"],
    )
    if rung in ladder.BACKWARD:
        return made
    loop = min(loops(kernel.stages["sass"]), key=lambda loop: loop.instructions)
    products = 1 if rung.startswith("r00") else 2  # number of matmuls in this loop
    return made | dict(
        consumers=max(1, numbers["warps"] // 4 - 1),
        keys=round(loop.multiplications / (16 * d * products)),  # a warp has 16 rows
        instructions=loop.instructions,
        exponentials=loop.exponentials,
        waits=loop.waits,
    )


def registers_of(kernel: Compiled) -> int:
    """Return the registers per matmul thread. If the warps have roles, return the smallest number of any consumer."""
    launched = kernel.numbers["registers"]
    handed_out = map(int, re.findall(r"setmaxnreg\S*\s+(\d+)", kernel.stages["ptx"]))
    return min([n for n in handed_out if launched < n < 256], default=launched)


# The package's forward at various sizes -------------------------------------------------------------------------

FILE = """
from fa2_lab.kernels import tables
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.portable import forward as portable

def forward(q, k, v, causal):
    d = q.shape[3]
    config = tables.KernelConfig({B_r}, {B_c}, {warps}, {stages}, d_pad=tables.padded_head_dim(d))
    tensors = Tensors(q, k, v)
    portable.prepare(tensors, Options(causal, scale=d**-0.5), config)(tensors)
"""


def shipped_config(target: str, d: int) -> dict:
    """Return the forward kernel's block sizes from the package's table for this target and d."""
    from fa2_lab.kernels import tables

    table = dict(sm_80=tables.AMPERE, sm_90=tables.HOPPER)[target]
    return dict(zip(("B_r", "B_c", "warps", "stages"), table["forward"][d], strict=False))


def jobs_of_size_figure() -> list[dict]:
    """Return a job for each cell of the picture of block sizes, using the cell's warps and the picture's stages."""
    data = block_budget.data()
    return [
        dict(target="sm_90", d=d, B_r=B_r, B_c=B_c, warps=cell["warps"], stages=data["stages"])
        for d, cells in data["cells"].items()
        for (B_r, B_c), cell in cells.items()
    ]


def compile_forward(job: dict) -> Compiled:
    """Compile the forward kernel with a job's block sizes, and return it."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "forward_at.py")
        file.write_text(FILE.format(**job), encoding="utf-8")
        (kernel,) = xray(str(file), job["target"], d=job["d"], causal=False, dtype="float16")
    return kernel


def budget_of(job: dict) -> dict:
    """Compile the forward kernel for a job, and return its registers, spills and shared memory."""
    numbers = compile_forward(job).numbers
    return {name: numbers[name] for name in ("registers", "spills", "shared")}


def layouts_of(job: dict) -> dict:
    """Return the matmul instruction, and the layouts and shapes of S, O (or a piece of it) and the tile of K."""
    kernel = compile_forward(job)
    ttgir = kernel.stages["ttgir"]
    dots = re.findall(r"(?:tt\.dot|warp_group_dot) .*-> tensor<(\d+)x(\d+)xf32, #(\w+)>", ttgir)
    S, O, *others = dots[: len(dots) // 2]  # a tile's matmuls, which occur in both loops over tiles
    if dots != 2 * [S, O, *others] or {O, *others} != {O}:
        raise ValueError(f"the forward's products differ from loop to loop: {dots}")
    allocated = re.findall(r"local_alloc : \(\) -> !ttg\.memdesc<\d+x(\d+)x(\d+)xf16, #(\w+),", ttgir)
    (K,) = {found for found in allocated if found[:2] == (S[1], str(job["d"]))}
    tensors = {
        tensor: dict(shape=[int(rows), int(columns)], layout=kernel.layouts[name])
        for tensor, (rows, columns, name) in dict(S=S, O=O, K=K).items()
    }
    layout = parse(tensors["S"]["layout"])
    return dict(instruction=INSTRUCTIONS[layout.version], warpsPerCTA=list(layout.warps)) | tensors


if __name__ == "__main__":
    commands = {(): record, ("forward",): record_forward, ("ladder",): record_rungs}
    if tuple(sys.argv[1:]) not in commands:
        raise SystemExit(__doc__)
    commands[tuple(sys.argv[1:])]()
