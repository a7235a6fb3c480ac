"""What each GPU can do in one clock and in one second, every figure with its source.

Rates per SM and clock are the architecture; rates per second are those times SMs and clock. The datasheets' own
TFLOP/s stand beside them, so that one checks the other. "Tensor" always means dense fp16/bf16 products added up in
fp32, which consumer cards do at half the rate that their advertised fp16 figure names. A GB of capacity is 2³⁰ bytes
on these sheets, a GB/s of bandwidth 10⁹.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

KiB, MiB, GiB = 2**10, 2**20, 2**30
TFLOPS, GB, MHZ = 10**12, 10**9, 10**6


@dataclass(frozen=True)
class Chip:
    """One GPU. `sources` says for every other field where its figure is printed."""

    name: str
    compute_capability: tuple[int, int]
    SMs: int
    clock_hz: int  # boost clock while the tensor cores run
    tensor_flops: float  # per second, dense fp16/bf16 with fp32 accumulation, as the datasheet prints it
    fp32_flops: float  # per second, as the datasheet prints it (an FMA counts as two)
    tensor_per_clock: int  # FLOPs per clock and SM
    fp32_per_clock: int  # FP32 instructions (add, multiply or FMA) per clock and SM: its FP32 lanes
    exp_per_clock: int  # exponentials per clock and SM
    shared_per_clock: int  # shared-memory bytes per clock and SM
    shared_per_sm: int  # bytes
    shared_per_block: int  # bytes, the most that one block can ask for (opt-in)
    registers_per_sm: int  # of 32 bits
    registers_per_thread: int
    threads_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    hbm_bytes: int
    hbm_per_second: float  # bytes
    l2_bytes: int
    link_per_second: float  # bytes to other GPUs of the machine, in one direction; sheets print both directions added
    sources: Mapping[str, str] = field(repr=False, hash=False, compare=False)


# What holds for every chip of one compute capability ------------------------------------------------------------

_THROUGHPUT = "CUDA C++ Programming Guide, table Throughput of Native Arithmetic Instructions"
_LIMITS = "CUDA C++ Programming Guide, table Technical Specifications per Compute Capability"
_BANKS = "CUDA C++ Programming Guide, section Compute Capabilities, Shared Memory: 32 banks of 32 bits per clock"

_PER_CAPABILITY = {
    "compute_capability": "CUDA GPU Compute Capability list (developer.nvidia.com/cuda-gpus)",
    "fp32_per_clock": f"{_THROUGHPUT}, row 32-bit floating-point add, multiply, multiply-add",
    "exp_per_clock": f"{_THROUGHPUT}, row 32-bit reciprocal, square root, base 2 exponential",
    "shared_per_clock": _BANKS,
    "shared_per_sm": f"{_LIMITS}, row maximum shared memory per multiprocessor",
    "shared_per_block": f"{_LIMITS}, row maximum shared memory per thread block",
    "registers_per_sm": f"{_LIMITS}, row 32-bit registers per multiprocessor",
    "registers_per_thread": f"{_LIMITS}, row maximum 32-bit registers per thread",
    "threads_per_sm": f"{_LIMITS}, row maximum resident threads per multiprocessor",
    "warps_per_sm": f"{_LIMITS}, row maximum resident warps per multiprocessor",
    "blocks_per_sm": f"{_LIMITS}, row maximum resident blocks per multiprocessor",
}

_SMS = """
SM   FP32 lanes  shared KiB  warps  blocks
80   64          164         64     32
86   128         100         48     16
89   128         100         48     24
90   128         228         64     32
100  128         228         64     32
"""

# The chips ------------------------------------------------------------------------------------------------------

# TFLOP/s of tensor cores and of FP32; tensor FLOPs per clock and SM; memory; L2; the link to other GPUs, one way.
_CHIPS = """
chip              SM   SMs  MHz   TFLOP/s  FP32  per clock  GiB  GB/s  L2 MiB  link GB/s
A100 SXM 80GB     80   108  1410  312      19.5  2048       80   2039  40      300
H100 SXM          90   132  1830  989.4    66.9  4096       80   3350  50      450
H200              90   132  1830  989.4    66.9  4096       141  4800  60      450
B200              100  148  1860  2250     75    8192       180  7672  126.5   900
GeForce RTX 3090  86   82   1695  71       35.6  512        24   936   6       56.25
GeForce RTX 4090  89   128  2520  165.2    82.6  512        24   1008  72      32
L40S              89   142  2520  362.05   91.6  1024       48   864   96      32
"""


def _rows(table: str) -> dict[str, list]:
    """{first column: the numbers of the others}, without the head."""
    rows = [re.split(r"\s{2,}", line) for line in table.strip().splitlines()[1:]]
    return {name: [float(x) if "." in x else int(x) for x in numbers] for name, *numbers in rows}


def _sources(sheet: str, memory: str | None = None, **other: str) -> dict[str, str]:
    """Sources of one chip: its own sheet for what is its own, the CUDA guide for the rest."""
    own = ("name", "SMs", "clock_hz", "tensor_flops", "fp32_flops", "tensor_per_clock", "l2_bytes", "link_per_second")
    table = dict.fromkeys(own, sheet) | dict.fromkeys(("hbm_bytes", "hbm_per_second"), memory or sheet)
    return table | _PER_CAPABILITY | other


_GA100 = "NVIDIA A100 Tensor Core GPU Architecture (whitepaper), table Comparison of NVIDIA Data Center GPUs"
_GH100 = "NVIDIA H100 Tensor Core GPU Architecture (whitepaper), table Comparison of NVIDIA A100 and H100"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture (whitepaper V2), appendix A, table GeForce RTX 3090"
_AD102 = "NVIDIA Ada GPU Architecture (whitepaper), appendix A, table GeForce RTX 4090"
_L40S = "NVIDIA L40S datasheet, table Specifications"
_L40 = "NVIDIA Ada Lovelace Professional GPU Architecture (whitepaper), table of the L40, same die and SM count"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet, table Specifications"
_B200 = "NVIDIA HGX B200 datasheet, table Specifications, an eighth of its figure for eight GPUs"
_DGX_B200 = "NVIDIA DGX B200 datasheet, table Specifications, an eighth of its figure for eight GPUs"
_BLACKWELL = "NVIDIA Blackwell Tuning Guide (docs.nvidia.com/cuda/blackwell-tuning-guide)"
_B200_DRIVER = "reported by the driver of a B200 (github.com/pytorch/ao, pull request 4002)"
_SM_TENSOR = "section on the tensor core: FMAs per clock and tensor core, times 4 tensor cores, times 2"
_FP32_SUMS = "row Peak FP16 Tensor TFLOPS with FP32 Accumulate"
_HOPPER = dict(
    clock_hz=f"{_GH100}: 1830 MHz for tensor-core work (its FP32 figure is given at 1980 MHz)",
    tensor_per_clock=f"NVIDIA H100 Tensor Core GPU Architecture (whitepaper), {_SM_TENSOR}",
)
_SOURCES = {
    "A100 SXM 80GB": _sources(
        _GA100,
        memory="NVIDIA A100 datasheet, column A100 80GB SXM",
        link_per_second="NVIDIA A100 datasheet, row Interconnect: NVLink 600 GB/s, half of it each way",
        tensor_per_clock=f"NVIDIA A100 Tensor Core GPU Architecture (whitepaper), {_SM_TENSOR}",
    ),
    "H100 SXM": _sources(
        _GH100,
        memory="NVIDIA H100 datasheet, column H100 SXM",
        link_per_second="NVIDIA H100 datasheet, row Interconnect: NVLink 900 GB/s, half of it each way",
        **_HOPPER,
    ),
    "H200": _sources(
        f"{_GH100}; the H200 datasheet prints them rounded (1,979 sparse, 67)",
        memory=_H200,
        name=_H200,
        SMs=_GH100,
        link_per_second=f"{_H200}: NVLink 900 GB/s, half of it each way",
        l2_bytes="reported by the driver of an H200 (torch.cuda.get_device_properties, L2_cache_size)",
        **_HOPPER,
    ),
    "B200": _sources(
        _B200,
        memory=f"{_B200_DRIVER}: 7,680 bits twice in each of 3,996 million clocks a second; {_DGX_B200}: 8 TB/s",
        SMs=_B200_DRIVER,
        l2_bytes=f"{_B200_DRIVER}; {_BLACKWELL}, section Increased L2 Capacity, rounds it to 126 MB",
        hbm_bytes=f"{_DGX_B200}: 1,440 GB",
        clock_hz="worked out: 2,250 dense TFLOP/s are 148 SMs × 8,192 at 1860 MHz (the FP32 figure is one at 1980 MHz)",
        tensor_per_clock="twice the H100's of each SM: it gives the datasheet's 2,250 TFLOP/s at 1860 MHz",
        link_per_second=f"{_BLACKWELL}, section Fifth-Generation NVLink: 1.8 TB/s, half of it each way",
        shared_per_sm=f"{_BLACKWELL}, section Unified Shared Memory/L1/Texture Cache",
        shared_per_block=f"{_BLACKWELL}, section Unified Shared Memory/L1/Texture Cache",
    ),
    "GeForce RTX 3090": _sources(
        _GA102,
        tensor_flops=f"{_GA102}, {_FP32_SUMS}",
        link_per_second="NVIDIA Ampere GA102 GPU Architecture (whitepaper V2), third-generation NVLink: 112.5 GB/s "
        "both ways, between the two cards of a bridge",
    ),
    "GeForce RTX 4090": _sources(
        _AD102,
        tensor_flops=f"{_AD102}, {_FP32_SUMS}",
        link_per_second="no NVLink: PCI Express 4.0 with 16 lanes, 64 GB/s both ways on the L40S sheet",
    ),
    "L40S": _sources(
        _L40S,
        SMs=f"{_L40S}: 18,176 CUDA cores of 128 per SM",
        clock_hz=f"{_L40S}: 91.6 TFLOP/s of FP32 are 142 SMs × 128 lanes × 2 at 2520 MHz",
        tensor_flops=f"{_L40S}, row BFLOAT16 Tensor Core (its sparse figure, 733, would be 366.4 dense at 2520 MHz)",
        tensor_per_clock=f"{_L40S}: professional cards accumulate in fp32 at the full rate, twice the RTX 4090's",
        l2_bytes=_L40,
        link_per_second=f"{_L40S}, row Interconnect Interface: PCIe Gen4 x16, 64 GB/s bidirectional",
    ),
}


def _chip(name: str, SM: int, SMs: int, clock: int, *numbers: float) -> Chip:
    """A row of the table of chips, with what holds for every SM of its kind."""
    tensor, fp32, tensor_per_clock, hbm, hbm_speed, l2, link = numbers
    lanes, shared, warps, blocks = _rows(_SMS)[str(SM)]
    return Chip(
        name=name,
        compute_capability=divmod(SM, 10),
        SMs=SMs,
        clock_hz=clock * MHZ,
        tensor_flops=tensor * TFLOPS,
        fp32_flops=fp32 * TFLOPS,
        tensor_per_clock=int(tensor_per_clock),
        fp32_per_clock=lanes,
        exp_per_clock=16,
        shared_per_clock=128,
        shared_per_sm=shared * KiB,
        shared_per_block=(shared - 1) * KiB,
        registers_per_sm=65536,
        registers_per_thread=255,
        threads_per_sm=32 * warps,
        warps_per_sm=warps,
        blocks_per_sm=blocks,
        hbm_bytes=int(hbm * GiB),
        hbm_per_second=hbm_speed * GB,
        l2_bytes=int(l2 * MiB),
        link_per_second=link * GB,
        sources=_SOURCES[name],
    )


CHIPS = {name: _chip(name, *numbers) for name, numbers in _rows(_CHIPS).items()}
A100, H100, H200, B200, RTX_3090, RTX_4090, L40S = CHIPS.values()


# The GPU that is here -------------------------------------------------------------------------------------------

DRIVER_NAMES = {f"NVIDIA {name}": chip for name, chip in CHIPS.items()}
DRIVER_NAMES |= {"NVIDIA A100-SXM4-80GB": A100, "NVIDIA H100 80GB HBM3": H100}


def named(name: str) -> Chip:
    """The chip of that name in the table, or of the name that its driver reports."""
    known = CHIPS | DRIVER_NAMES
    if not isinstance(name, str):
        raise TypeError(f"name: got {name!r}; it takes a string, one of {', '.join(known)}")
    if name not in known:
        raise ValueError(f"name: got {name!r}; it takes one of {', '.join(known)}")
    return known[name]


def figures(chip: Chip) -> list[str]:
    """The fields that hold a figure: all but the sources themselves."""
    return [f.name for f in fields(chip) if f.name != "sources"]


def check_chip(chip: Chip) -> None:
    """Refuse anything but a Chip."""
    if not isinstance(chip, Chip):
        raise TypeError(f"chip: got {chip!r}; it takes a Chip, as in chips.A100")
