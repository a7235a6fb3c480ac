"""A process that compiles every launch of one call for one chip without running it and prints the results as JSON."""

import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import triton

from fa2_lab.kernels import ladder, triton_versions
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.tools import files, offline
from fa2_lab.tools.xray.lines import by_line

SMs = 132  # the SM count reported to persistent kernels, as on an H100 or H200
RUN = triton.JITFunction.run
launched, asked = dict[str, Any](), dict[str, Any]()  # {kernel name: compiled kernel}, {compiler option: value}


def compile_only(run: Callable) -> Callable:
    """Return a substitute for JITFunction.run that only compiles a kernel and stores it in `launched`."""

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: Any, **options: Any) -> None:
        launched[self.fn.__name__] = run(self, *arguments, grid=grid, warmup=True, **options | asked)

    return compiled


def call(name: str, q: torch.Tensor, causal: bool) -> None:
    """Call a pass of `name` (a rung, a package kernel or a file), passing q in place of every tensor."""
    L, dL = torch.empty(q.shape[:3], device=q.device), None
    tensors, options = Tensors(q, q, q), Options(causal, scale=0.1, in_custom_op=True)
    if name == "portable.forward":
        import_module("fa2_lab.kernels.portable.forward").prepare(tensors, options)(tensors)
    elif name == "portable.backward":
        import_module("fa2_lab.kernels.portable.backward").prepare(q, q, tensors, options)(q, dL, q, L, tensors)
    elif name.startswith("hopper."):
        beside, given = ((), ()) if name == "hopper.forward" else ((q, q), (q, dL, q, L))
        prepared = import_module(f"fa2_lab.kernels.{name}.launch").prepare(*beside, tensors, options)
        if prepared is None:
            raise ValueError(f"it does not take d = {q.shape[3]} in {q.dtype}")
        prepared(*given, tensors)
    elif name.endswith(".py"):
        files.module_at(name).forward(q, q, q, causal)
    elif name[0] == "b":
        ladder.load(name).backward(q, q, q, q, L, q, causal)
    else:
        ladder.load(name).forward(q, q, q, causal and name[0] != "s")


def read(name: str, kernel: Any) -> dict:
    """Return a compiled kernel's counts, layouts, code at each stage and instructions by line, as a dictionary."""
    amd = "amdgcn" in kernel.asm
    code = kernel.asm["amdgcn"] if amd else offline.disassembled(kernel.asm["cubin"])
    stages = {stage: kernel.asm[stage] for stage in ("ttir", "ttgir", "ptx") if stage in kernel.asm} | dict(sass=code)
    numbers = offline.report(kernel)
    exponentials = len(re.findall(r"\bMUFU\.EX2|\bv_exp_f32", code))
    numbers = dict(
        registers=numbers["regs"],
        spills=numbers["ldl"] + numbers["stl"],
        shared=numbers["shared"],
        tensor=numbers["tensor"],
        exponential=exponentials,
        instructions=len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)) if not amd else 0,
        warps=kernel.metadata.num_warps,
    )
    layouts = dict(re.findall(r"^#(\w+) = (#ttg\.\w+<\{.*\}>)$", kernel.asm["ttgir"], re.MULTILINE))
    lines = {} if amd else by_line(kernel.asm["cubin"])
    return dict(name=name, numbers=numbers, layouts=layouts, stages=stages, lines=lines)


def main(job: dict) -> list[list[dict]]:
    """Compile a call once for each entry of job["launches"] and return one list of kernels per entry."""
    chip = job["chip"]
    offline.compile_for(chip)
    triton_versions.add_newest_names()  # a user's file may use names from the newest version of Triton
    properties: Any = SimpleNamespace(multi_processor_count=SMs)
    torch.cuda.get_device_properties = lambda device=None: properties
    triton.JITFunction.run = compile_only(RUN)
    q = torch.empty(4, 16, job["N"], job["d"], dtype=getattr(torch, job["dtype"]), device="meta")
    answers = []
    for launch in job["launches"]:
        launched.clear()
        asked.clear()
        asked.update(launch)
        call(job["name"], q, job["causal"])
        answers.append([read(name, kernel) for name, kernel in launched.items()])
    return answers


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
