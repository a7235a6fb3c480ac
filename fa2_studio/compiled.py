"""What the compiler makes of the forward kernel and of each rung, recorded for pictures and tables.

`python -m fa2_studio.compiled` compiles for chips that need not be here, each in a process of its own, and writes
figures/data/layouts.json, compiled.json and rungs.json. `python -m fa2_studio.compiled ladder` writes rungs.json alone.
"""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from io import BytesIO
from itertools import product
from pathlib import Path
from tokenize import NAME, NUMBER, OP, STRING, tokenize

from tqdm import tqdm

from fa2_lab.kernels import ladder
from fa2_lab.machine.budget import blocks_per_sm
from fa2_lab.machine.chips import H200
from fa2_lab.machine.layouts import parse
from fa2_lab.plots import block_budget
from fa2_lab.records import COMPILE
from fa2_lab.records import FOLDER as RECORDED
from fa2_lab.tools import files
from fa2_lab.tools.xray import Compiled, loops, xray

PROJECT = Path(__file__).resolve().parents[1]
SOURCES = ("portable/forward.py", "common/softmax.py", "common/tile.py")  # what decides how the forward compiles
TARGETS = ("sm_80", "sm_90")
TILE = dict(B_r=128, B_c=64, warps=4, stages=2)  # whose layouts are drawn
INSTRUCTIONS = {2: "mma", 3: "wgmma"}
FORWARD = "forward_kernel, fp16, not causal"


def record(folder: Path = RECORDED) -> None:
    """Compile the forward at every block size, and for its layouts on both targets, and write down what came out."""
    files.check_writable(folder, "fa2_studio.compiled")
    source = source_digest()
    jobs = [dict(target=target, d=d, **TILE) for target, d in product(TARGETS, (64, 128))]
    rows = [row for target in TARGETS for row in compiled(target, [job for job in jobs if job["target"] == target])]
    kept = [{name: row[name] for name in (*jobs[0], "instruction", "warpsPerCTA", "S", "O", "K")} for row in rows]
    write(folder / "layouts.json", "layouts", kept, dict(source=source, triton=rows[0]["triton"]), FORWARD)
    sizes = budget_jobs("sm_90")
    rows = [*tqdm(compiled("sm_90", sizes), total=len(sizes), desc="compile", unit="kernel", disable=None)]
    kept = [{name: row[name] for name in (*sizes[0], "registers", "spills", "shared")} for row in rows]
    write(folder / "compiled.json", "forward", kept, dict(source=source, triton=rows[0]["triton"]), FORWARD)
    record_rungs(folder)


def record_rungs(folder: Path = RECORDED) -> None:
    """Compile every rung for an H200, at both head dimensions, with and without a mask, and write it down."""
    import triton

    jobs = [(rung, d, causal) for rung in ladder.RUNGS + ladder.OTHERS for d in (128, 64) for causal in (False, True)]
    with ThreadPoolExecutor(os.cpu_count()) as several:
        made = several.map(lambda job: numbers_of(*job), jobs)
        rows = list(tqdm(made, total=len(jobs), desc="compile", unit="kernel", disable=None))
    versions = dict(source=digest_of_rungs(), triton=triton.__version__)
    write(folder / "rungs.json", "rungs", rows, versions, "forward(q, k, v, causal) of each rung, bf16, sm_90")


def digest_of_rungs() -> str:
    """A fingerprint of the rungs' sources that comments, docstrings and line breaks do not change."""
    trees = [
        ast.parse((ladder.FOLDER / f"{rung}.py").read_text(encoding="utf-8")) for rung in ladder.RUNGS + ladder.OTHERS
    ]
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node):
                node.body = node.body[1:]
    return sha256("".join(map(ast.unparse, trees)).encode()).hexdigest()[:16]


def numbers_of(rung: str, d: int, causal: bool) -> dict:
    """What is recorded of a rung's largest kernel. The loop is that over tiles, without a mask where there are two."""
    kernel = max(xray(rung, "sm_90", d=d, causal=causal), key=lambda kernel: kernel.numbers["registers"])
    numbers, found = kernel.numbers, loops(kernel.stages["sass"])
    loop = min(found, key=lambda loop: loop.instructions)
    products = 1 if rung.startswith("r00") else 2  # in that loop
    return dict(rung=rung, d=d, causal=causal, registers=registers_of(kernel), spills=numbers["spills"]) | dict(
        programs=blocks_per_sm(H200, numbers["shared"], numbers["registers"], numbers["warps"]),
        shared=numbers["shared"],
        consumers=max(1, numbers["warps"] // 4 - 1),
        keys=round(loop.multiplications / (16 * d * products)),  # a warp has 16 rows
        instructions=loop.instructions,
        exponentials=loop.exponentials,
        waits=loop.waits,
    )


def registers_of(kernel: Compiled) -> int:
    """Registers of a thread that multiplies: where warps have roles, those of the consumer that has fewest."""
    launched = kernel.numbers["registers"]
    handed_out = map(int, re.findall(r"setmaxnreg\S*\s+(\d+)", kernel.stages["ptx"]))
    return min([n for n in handed_out if launched < n < 256], default=launched)


def budget_jobs(target: str) -> list[dict]:
    """One compilation for every cell of the picture of block sizes, with the warps and stages that it names."""
    data = block_budget.data()
    return [
        dict(target=target, d=d, B_r=B_r, B_c=B_c, warps=cell["warps"], stages=data["stages"])
        for d, cells in data["cells"].items()
        for (B_r, B_c), cell in cells.items()
    ]


def write(file: Path, name: str, rows: list[dict], versions: dict, kernel: str) -> None:
    """The rows, one to a line, after what made them."""
    made = dict(command=COMPILE, kernel=kernel) | versions
    head = json.dumps(dict(made_by=made), indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    files.write(file, f'{head},\n "{name}": [\n  {lines}\n ]\n}}\n')


def source_digest() -> str:
    """A fingerprint of the forward's source that comments, line breaks and imports do not change."""
    words = []
    for name in SOURCES:
        source = (PROJECT / "fa2_lab" / "kernels" / name).read_text(encoding="utf-8")
        plain = re.sub(r"^(from|import) [^(\n]*(\([^)]*\))?\n", "", source, flags=re.MULTILINE).encode()
        words += [t.string for t in tokenize(BytesIO(plain).readline) if t.type in (NAME, NUMBER, OP, STRING)]
    return sha256(" ".join(words).encode()).hexdigest()[:16]


def compiled(target: str, jobs: list[dict]) -> Iterator[dict]:
    """Each job with what the compiler made of it, from a process that never runs Triton's interpreter."""
    command = [sys.executable, "-m", "fa2_studio.compile_worker", target]
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


if __name__ == "__main__":
    record_rungs() if sys.argv[1:] == ["ladder"] else record()
