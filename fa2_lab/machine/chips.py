"""GPU limits and rates, per clock and per second. The comments next to the tables name the source of each value.

Rates per clock per SM depend only on the architecture. Rates per second are these rates times the number of SMs and the
clock frequency. The tables also list the TFLOP/s from the datasheets, so that these products can be checked against
them. "Tensor" always means dense fp16 or bf16 matmuls with fp32 accumulators, which consumer cards run at half of their
advertised fp16 rate. In the datasheets, a GB of capacity is 2³⁰ bytes, and a GB/s of bandwidth is 10⁹ bytes per second.
"""

import re
from dataclasses import dataclass

KiB, MiB, GiB = 2**10, 2**20, 2**30
TFLOPS, GB, MHZ = 10**12, 10**9, 10**6


@dataclass(frozen=True, kw_only=True)
class Chip:
    """The limits and rates of one GPU."""

    name: str
    compute_capability: tuple[int, int]
    SMs: int
    clock_hz: int  # boost clock in Hz while the tensor cores are working
    tensor_flops_per_second: (
        float  # dense fp16 or bf16 FLOPs per second with fp32 accumulators, as printed in the datasheet
    )
    fp32_flops_per_second: float  # FP32 FLOPs per second, as printed in the datasheet (an FMA counts as two)
    tensor_flops_per_clock: int  # FLOPs per clock per SM
    fp32_per_clock: int  # FP32 instructions (add, multiply or FMA) per clock per SM: one per FP32 lane
    exp_per_clock: int = 16  # exponentials per clock per SM
    shared_bytes_per_clock: int = 128  # bytes of shared memory per clock per SM
    shared_per_sm: int  # bytes
    shared_per_block: int  # maximum bytes that one block can request (opt-in)
    registers_per_sm: int = 65536  # 32-bit registers
    registers_per_thread: int = 255
    threads_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    hbm_bytes: int
    hbm_bytes_per_second: float  # bytes per second
    l2_bytes: int
    link_bytes_per_second: float  # bytes per second to other GPUs in one direction; datasheets add up both directions


# The tables ------------------------------------------------------------------------------------------------------
#
# Sources of the values that depend only on the compute capability or are the same for all chips:
# - FP32 instructions and exponentials per clock: CUDA C++ Programming Guide, table "Throughput of Native Arithmetic
#   Instructions", rows "32-bit floating-point add, multiply, multiply-add" and "32-bit reciprocal, square root, base 2
#   exponential".
# - Limits per SM: the same guide, table "Technical Specifications per Compute Capability".
# - Bytes of shared memory per clock: the same guide, section "Compute Capabilities, Shared Memory" (32 32-bit banks).
# - Shared memory of B200: NVIDIA Blackwell Tuning Guide, section "Unified Shared Memory".
_SMS = """
SM   FP32 lanes  shared KiB  warps  blocks
80   64          164         64     32
86   128         100         48     16
89   128         100         48     24
90   128         228         64     32
100  128         228         64     32
"""

# The columns after MHz: tensor-core and FP32 TFLOP/s, tensor FLOPs per clock per SM, memory size and bandwidth, L2
# size, and the bandwidth of the link to other GPUs in one direction.
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

# Sources of each row. A link's datasheet bandwidth adds up both directions, so the table lists half of it.
# - A100: NVIDIA A100 Tensor Core GPU Architecture (whitepaper), table "Comparison of NVIDIA Data Center GPUs". FLOPs
#   per clock: the FMAs per clock and tensor core (from the section on the tensor core), times 4 tensor cores, times 2.
#   Memory and link: NVIDIA A100 datasheet, column "A100 80GB SXM" (NVLink, 600 GB/s).
# - H100: NVIDIA H100 Tensor Core GPU Architecture (whitepaper), table "Comparison of NVIDIA A100 and H100", which gives
#   1830 MHz for tensor-core work (but the FP32 figure at 1980 MHz). FLOPs per clock: as for the A100. Memory and link:
#   NVIDIA H100 datasheet, column "H100 SXM" (NVLink, 900 GB/s).
# - H200: the same whitepaper, because the H200 datasheet prints rounded figures (1,979 sparse, 67). Memory and link:
#   NVIDIA H200 datasheet. L2: reported by the driver (torch.cuda.get_device_properties, L2_cache_size).
# - B200: NVIDIA HGX B200 and DGX B200 datasheets, an eighth of the figures for eight GPUs (1,440 GB, 64 TB/s). SMs, L2
#   (which the tuning guide rounds to 126 MB) and memory (7,680 bits, transferred twice per clock at 3,996 MHz): as
#   reported by the driver (github.com/pytorch/ao, pull request 4002). FLOPs per clock: twice the H100's. Clock: derived
#   from these figures, because 148 SMs × 8,192 FLOPs per clock give 2,250 dense TFLOP/s at 1860 MHz (the FP32 figure is
#   given at 1980 MHz). Link: tuning guide, section "Fifth-Generation NVLink" (1.8 TB/s).
# - RTX 3090: NVIDIA Ampere GA102 GPU Architecture (whitepaper V2), appendix A, row "Peak FP16 Tensor TFLOPS with FP32
#   Accumulate". Link: third-generation NVLink between two bridged cards (112.5 GB/s).
# - RTX 4090: NVIDIA Ada GPU Architecture (whitepaper), appendix A, the same row. The card has no NVLink, so its link is
#   PCI Express 4.0 with 16 lanes, which has 64 GB/s according to the L40S datasheet.
# - L40S: NVIDIA L40S datasheet. Its 18,176 CUDA cores are 142 SMs with 128 lanes each, so 91.6 TFLOP/s of FP32 mean
#   2520 MHz. Tensor cores: row "BFLOAT16 Tensor Core" (its sparse figure, 733, corresponds to 366.4 dense TFLOP/s at
#   2520 MHz). Professional cards accumulate in fp32 at the full rate, which is twice the RTX 4090's rate. L2: NVIDIA
#   Ada Lovelace Professional GPU Architecture (whitepaper), table of the L40, which has the same die and the same
#   number of SMs. Link: PCI Express 4.0 with 16 lanes (64 GB/s).


def _parse_table(table: str) -> dict[str, list]:
    """Parse the rows below a table's header and return {first column: [numbers in the other columns]}."""
    rows = [re.split(r"\s{2,}", line) for line in table.strip().splitlines()[1:]]
    return {name: [float(x) if "." in x else int(x) for x in numbers] for name, *numbers in rows}


def _chip_of_row(name: str, SM: int, SMs: int, clock: int, *numbers: float) -> Chip:
    """Return the Chip for one row of _CHIPS. `SM` selects the row of _SMS with the architecture's limits."""
    tensor, fp32, tensor_flops_per_clock, hbm, hbm_speed, l2, link = numbers
    lanes, shared, warps, blocks = _parse_table(_SMS)[str(SM)]
    return Chip(
        name=name,
        compute_capability=divmod(SM, 10),
        SMs=SMs,
        clock_hz=clock * MHZ,
        tensor_flops_per_second=tensor * TFLOPS,
        fp32_flops_per_second=fp32 * TFLOPS,
        tensor_flops_per_clock=int(tensor_flops_per_clock),
        fp32_per_clock=lanes,
        shared_per_sm=shared * KiB,
        shared_per_block=(shared - 1) * KiB,
        threads_per_sm=32 * warps,
        warps_per_sm=warps,
        blocks_per_sm=blocks,
        hbm_bytes=int(hbm * GiB),
        hbm_bytes_per_second=hbm_speed * GB,
        l2_bytes=int(l2 * MiB),
        link_bytes_per_second=link * GB,
    )


CHIPS = {name: _chip_of_row(name, *numbers) for name, numbers in _parse_table(_CHIPS).items()}
A100, H100, H200, B200, RTX_3090, RTX_4090, L40S = CHIPS.values()


# Chips by name --------------------------------------------------------------------------------------------------

DRIVER_NAMES = {f"NVIDIA {name}": chip for name, chip in CHIPS.items()}
DRIVER_NAMES |= {"NVIDIA A100-SXM4-80GB": A100, "NVIDIA H100 80GB HBM3": H100}


def find(name: str) -> Chip:
    """Return the chip with this name, as listed in the table of chips or as reported by a driver."""
    chips = CHIPS | DRIVER_NAMES
    if not isinstance(name, str):
        raise TypeError(f"name: got {name!r}; it takes a string, one of {', '.join(chips)}")
    if name not in chips:
        raise ValueError(f"name: got {name!r}; it takes one of {', '.join(chips)}")
    return chips[name]


def check_chip(chip: Chip) -> None:
    """Raise a TypeError unless `chip` is a Chip."""
    if not isinstance(chip, Chip):
        raise TypeError(f"chip: got {chip!r}; it takes a Chip, as in chips.A100")
