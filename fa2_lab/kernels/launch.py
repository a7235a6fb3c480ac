"""How the kernels are launched: block sizes, warps and stages for each chip family and d, and what else a launch needs.

Three kernels: "forward", and of the backward "columns" (dK, dV, and dQ by atomic adds) and "rows" (dQ). The entries for
Hopper were found by measuring on an H200. The others were chosen by compiling (tests/test_compile.py does it again):
the largest that fit the chip's shared memory and, up to d = 128, spill no register. `fa2-lab tune` measures on the GPU
at hand and its finds come first.
"""

import json
import math
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from fa2_lab.kernels import interpreter, triton_versions
from fa2_lab.kernels.portable.tile import Tile
from fa2_lab.kernels.prepared import forget, prepared
from fa2_lab.kernels.triton_versions import by_triton, driver, relaunch

triton_versions.prepare()
MiB = 2**20


@dataclass(frozen=True)
class Blocks:
    """The size of a tile (B_r × B_c; elsewhere BLOCK_M × BLOCK_N), warps of a program, stages of loads in flight."""

    B_r: int
    B_c: int
    warps: int
    stages: int
    registers: int | None = None  # the most a thread may take; only NVIDIA's compiler can be told
    thrifty: bool = False  # whether the compiler must do with fewer registers than it would
    d_pad: int = 0  # d as the tensor cores take it
    upcast: bool = False  # whether tiles become fp32 before they are multiplied

    def compiler_options(self) -> dict:
        """What Triton's compiler is told: warps, stages, and the most registers of a thread if they are limited."""
        limit = {} if self.registers is None else dict(maxnreg=self.registers)
        return dict(num_warps=self.warps, num_stages=self.stages) | limit | (FEWER_REGISTERS if self.thrifty else {})

    def tile(self, Q: torch.Tensor) -> Tile:
        """What a kernel for tensors like Q is compiled for."""
        numbers = self.B_r, self.B_c, Q.shape[-1], self.d_pad, self.upcast
        return Tile(*map(triton.language.constexpr, numbers))


TIGHT = by_triton({"3.6": False, "3.9": True})  # it keeps more addresses in registers: without care some are spilled
FEWER_REGISTERS = dict(sched4reg=True)  # an option since Triton 3.9: its order of instructions needs fewer

# Triton compiles one kernel for all values of these.
SIZES = ["H", "group", "N_k", "heads", "heads_at_once", "sequences"]

# {kernel: {d_pad: (B_r, B_c, warps, stages[, registers[, thrifty]])}}; a pair is (full, causal)
HOPPER = dict(
    forward={
        16: (64, 64, 4, 3),
        32: (64, 64, 4, 3),
        64: (64, 64, 4, 3, 128, TIGHT),  # with 128 registers four programs fit on an SM, with 132 three: 10% slower
        128: (64, 64, 4, 3),
        256: (128, 32, 8, 2, None, TIGHT),
    },
    columns={
        16: (64, 64, 4, 2),
        32: (64, 64, 4, 2),
        64: (64, 64, 4, 3),
        # the large one is 12% faster; with grouped heads it spills 14 registers, and is as much faster all the same
        128: by_triton({"3.6": (64, 128, 8, 3), "3.7": (32, 128, 8, 3)}),
        256: (32, 64, 8, 2),
    },
    # at 16, 64 × 64 in two or three stages crashes the ptxas of Triton 3.6 where N_q = N_k = 1
    rows={
        16: (64, 32, 4, 2),
        32: (64, 64, 4, 3),
        64: (64, 64, 4, 3),
        128: ((64, 64, 4, 2), (128, 64, 8, 3)),
        256: (64, 32, 4, 2),
    },
)
AMPERE = dict(  # sm_80 to sm_89: everything fits into the 99 KiB of the small ones
    forward={16: (128, 64, 4, 2), 32: (128, 64, 4, 2), 64: (128, 64, 8, 2), 128: (64, 64, 4, 2), 256: (64, 32, 4, 2)},
    columns={16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (32, 64, 4, 1), 128: (32, 64, 4, 2), 256: (32, 32, 4, 1)},
    rows={16: (64, 64, 4, 2), 32: (64, 64, 4, 2), 64: (128, 64, 8, 2), 128: (64, 32, 4, 2), 256: (32, 32, 4, 1)},
)
BLACKWELL = dict(  # sm_100 and sm_120, the latter with 99 KiB
    # at 64, without a number of registers, ptxas stops at 128 for sm_100 and spills 4
    forward=AMPERE["forward"] | {64: (128, 64, 8, 2, 168), 128: (128, 64, 8, 2)},
    columns=AMPERE["columns"] | {128: (32, 64, 8, 2)},
    rows=AMPERE["rows"],
)
CDNA = dict(  # AMD's MI300 family: 64 KiB
    forward={16: (128, 64, 4, 1), 32: (128, 64, 4, 1), 64: (128, 64, 4, 1), 128: (64, 64, 4, 1), 256: (32, 32, 4, 1)},
    columns={16: (64, 64, 4, 1), 32: (64, 64, 4, 1), 64: (32, 64, 4, 1), 128: (32, 32, 4, 1), 256: (32, 32, 4, 1)},
    rows={16: (64, 64, 4, 1), 32: (64, 64, 4, 1), 64: (64, 64, 4, 1), 128: (32, 32, 4, 1), 256: (32, 32, 4, 1)},
)
FP32 = dict(  # no tensor cores: products of single numbers, held in registers
    forward={16: (32, 32, 4, 1), 32: (32, 32, 4, 1), 64: (32, 32, 4, 1), 128: (32, 16, 4, 1), 256: (32, 16, 4, 1)},
    columns={16: (32, 32, 4, 1), 32: (32, 32, 4, 1), 64: (16, 32, 4, 1), 128: (16, 16, 8, 1), 256: (16, 16, 8, 1)},
    rows={16: (32, 32, 4, 1), 32: (32, 32, 4, 1), 64: (32, 32, 4, 1), 128: (32, 16, 4, 1), 256: (16, 16, 4, 1)},
)
INTERPRETED = dict(forward=(32, 64, 1, 1), columns=(64, 32, 1, 1), rows=(32, 64, 1, 1))  # a few large tiles are fastest


def family() -> dict:
    """The table for the GPU that the current driver speaks to."""
    target = driver.active.get_current_target()
    if target.backend == "hip":
        return CDNA
    return HOPPER if target.arch // 10 == 9 else BLACKWELL if target.arch >= 100 else AMPERE


def padded(d: int) -> int:
    """d as the tensor cores take it: a power of two of at least 16."""
    return max(16, triton.next_power_of_2(d))


def upcast(Q: torch.Tensor) -> bool:
    """Whether tiles must become fp32 before they are multiplied: bf16 in the interpreter."""
    return Q.dtype == torch.bfloat16 and interpreter.switched_on()


def blocks(kernel: str, Q: torch.Tensor, causal: bool) -> Blocks:
    """The block sizes of one kernel for tensors like Q: what was tuned here, else the chip family's entry."""
    fixed = dict(d_pad=padded(Q.shape[-1]), upcast=upcast(Q))
    if interpreter.switched_on():
        return Blocks(*INTERPRETED[kernel], **fixed)
    if tuned := finds().get(name(kernel, Q, causal)):
        return Blocks(*tuned, **fixed)
    entry = (FP32 if Q.dtype == torch.float32 else family())[kernel][fixed["d_pad"]]
    if isinstance(entry[0], tuple):
        entry = entry[causal]
    return Blocks(*entry, **fixed)


# What `fa2-lab tune` found ------------------------------------------------------------------------------------


def TUNED_FILE() -> Path:
    """Where finds are kept: $FA2_LAB_TUNED, or a file in the user's cache folder."""
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FA2_LAB_TUNED") or Path(cache_folder) / "fa2_lab" / "tuned.json")


def name(kernel: str, Q: torch.Tensor, causal: bool) -> str:
    """A find's name: the chip, the kernel, the shape's padded d, the dtype and the mask."""
    chip = torch.cuda.get_device_name(Q.device) if Q.is_cuda else str(Q.device)
    dtype, mask = str(Q.dtype).removeprefix("torch."), "causal" if causal else "full"
    return f"{chip}, {kernel}, d {padded(Q.shape[-1])}, {dtype}, {mask}"


def finds() -> dict[str, list[int]]:
    """{name: [B_r, B_c, warps, stages, registers]}; empty where nothing was tuned."""
    file = TUNED_FILE()
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
    file = TUNED_FILE()
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(read(file) | new, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    unfinished.replace(file)
    forget()
    return file


# A launch, short on the host -----------------------------------------------------------------------------------


FUSED = dict(enable_fp_fusion=True)  # a product and a sum are one instruction: from Triton 3.10 on no longer unasked


class Launch:
    """A kernel and all its arguments but the pointers, which come first: what calls of one kind have in common.

    Arguments are given by their names, strides and sizes with those that are constants to the compiler, and then the
    compiler's own options.
    """

    def __init__(self, kernel, grid: int | tuple[int, int, int], options: dict, **arguments):
        if interpreter.switched_on():
            interpreter.say_so()
        self.kernel, self.options, self.arguments = kernel, options | FUSED, arguments
        self.grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
        self.again = None  # what launches from the second time on; False where Triton does not let itself be passed by

    def __call__(self, *pointers) -> None:
        """Launch by Triton's own call, which compiles; from the second time on past it, at a third of the cost.

        Triton compiles another kernel where a pointer is no multiple of 16, so then it is asked each time.
        """
        at = addresses(pointers)
        aligned = math.gcd(16, *at) == 16
        if aligned and self.again:
            self.again(current_stream(pointers[0]), at)
            return
        made = self.kernel[self.grid](*pointers, **self.arguments, **self.options)
        if aligned and self.again is None and isinstance(made, triton.compiler.CompiledKernel):
            rest = [self.arguments[name] for name in made.src.fn.arg_names[len(pointers) :]]
            stream, everything = current_stream(pointers[0]), (*pointers, *rest)
            self.again = relaunch(made, self.grid, stream, everything, pointers=len(pointers)) or False


def current_stream(X: torch.Tensor) -> int:
    """The stream that work on X goes to."""
    return driver.active.get_current_stream(X.get_device())


def addresses(tensors) -> list[int]:
    """Where tensors lie; 0 for None, whose place in a launch nobody reads."""
    return [0 if X is None else X.data_ptr() for X in tensors]


# What else a launch needs -------------------------------------------------------------------------------------


def shape(X: torch.Tensor) -> tuple[int, int, int, int]:
    """(batch, heads, N, d); packed sequences, (tokens, heads, d), are the rows of one batch entry."""
    return X.shape if X.dim() == 4 else (1, X.shape[1], X.shape[0], X.shape[2])


def strides(X: torch.Tensor) -> tuple[int, int, int]:
    """How far apart batch entries, heads and rows of a tensor lie; its columns lie side by side.

    A packed sequence is found by its first row, as a batch entry is by its number.
    """
    return X.stride()[:3] if X.dim() == 4 else (X.stride(0), X.stride(1), X.stride(0))


def programs(X: torch.Tensor, B: int, sequences: int | None) -> int:
    """One for each block of B rows of each head; or enough for so many packed sequences and what lies behind them."""
    batch, H, N, _ = shape(X)
    return batch * H * (triton.cdiv(N, B) if sequences is None else N // B + sequences + 1)


def sizes(Q: torch.Tensor, K: torch.Tensor, of: torch.Tensor, streamed: torch.Tensor, sequences: int | None) -> dict:
    """The sizes that kernels take as they are. Programs belong to the heads `of` one tensor and stream two like one."""
    (_, H, N_q, _), (_, H_kv, N_k, _), (batch, heads, *_) = shape(Q), shape(K), shape(of)
    found = dict(H=H, group=H // H_kv, N_q=N_q, N_k=N_k, heads=batch * heads, sequences=sequences)
    return found | dict(heads_at_once=heads_at_once(streamed, 8))


def window(options) -> tuple:
    """(left, right) of the diagonal. The causal mask's 0 is known to the compiler, a window's sizes are not."""
    return options.left, triton.language.constexpr(0) if options.causal else options.right


def heads_at_once(X: torch.Tensor, megabytes: int) -> int:
    """How many heads to run side by side, so that what they stream (two tensors like X) stays in the L2 cache."""
    _, _, N, d = shape(X)
    return max(1, megabytes * MiB // (2 * max(1, N) * d * X.element_size()))


def dropout(p: float) -> tuple[int, float]:
    """Random words below the first number mean "drop"; the second is the factor of what is kept."""
    return math.floor(p * 2**32), 1 / (1 - p)


def on_device_of(Q: torch.Tensor):
    """Triton launches on the current GPU: make it Q's for the time of a launch. The interpreter does one at a time."""
    if not Q.is_cuda:
        return interpreter.ONE_AT_A_TIME
    if Q.get_device() == torch.accelerator.current_device_index():
        return HERE
    return torch.cuda.device(Q.device)


HERE = nullcontext()
