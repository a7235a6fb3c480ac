"""Functions that compile kernels for any GPU, even an absent one, and report their use of registers and memory.

    compile_for("sm_90")
    kernel = forward_kernel.warmup(..., grid=(1,))
    report(kernel)

Tensors may be on any device. A process can compile for only one target and cannot use Triton's interpreter.
"""

import re
import subprocess
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from fa2_lab.kernels.triton_versions import driver


def compile_for(chip: str) -> None:
    """Make this process compile for `chip`, such as sm_90 or gfx942, even if this machine has no GPU of that kind."""
    target = GPUTarget("hip", chip, 64) if chip.startswith("gfx") else GPUTarget("cuda", int(chip[3:]), 32)
    driver.set_active(Absent(target))


class Absent:
    """A stand-in for the driver of an absent GPU. It names its target but cannot launch a kernel."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        raise ValueError("triton.autotune has several configurations to time, and nothing runs here; leave it one")

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def report(kernel: Any) -> dict[str, int]:
    """Return the resources that a compiled kernel uses, and the counts of its spill and tensor-core instructions.

    The resources are registers and bytes of stack per thread, and bytes of shared memory.
    """
    numbers = from_amdgcn(kernel.asm["amdgcn"]) if "amdgcn" in kernel.asm else from_cubin(kernel.asm["cubin"])
    return numbers | dict(shared=kernel.metadata.shared)


@cache
def read(cubin: bytes) -> tuple[str, str]:
    """Return a cubin's resource usage and its SASS with source-line annotations.

    Two NVIDIA tools that ship with Triton print these texts. The result is cached because nvdisasm spends most of each
    run starting up.
    """
    with NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return nvidia_tool("cuobjdump", "-res-usage", file.name), nvidia_tool("nvdisasm", "-g", "-c", file.name)


def from_cubin(cubin: bytes) -> dict[str, int]:
    """Return the same counts as report() for an NVIDIA binary, except the bytes of shared memory."""
    usage, code = read(cubin)[0], disassembled(cubin)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    counts = {name: len(re.findall(rf"\b{name.upper()}\b", code)) for name in ("ldl", "stl", "hgmma", "hmma")}
    tensor = sum(len(re.findall(rf"\b{name}\b", code)) for name in ("HGMMA", "HMMA", "UTCHMMA"))
    return dict(regs=int(registers), stack=int(stack), tensor=tensor, **counts)


def disassembled(cubin: bytes) -> str:
    """Return the SASS of a cubin, without source-line annotations."""
    return re.sub(r"^\s*//##.*\n", "", read(cubin)[1], flags=re.MULTILINE)


def nvidia_tool(tool: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def from_amdgcn(code: str) -> dict[str, int]:
    """Return the same counts as report() for assembly code from the AMD compiler, except the bytes of shared memory."""

    def field(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", code)[0])

    spilled = field("vgpr_spill_count")
    stack = field("private_segment_fixed_size")
    return dict(regs=field("vgpr_count"), stack=stack, ldl=spilled, stl=spilled, tensor=len(re.findall("v_mfma", code)))
