"""The work that an attention method requires of each unit of a chip, and the time that the unit takes to do it.

There are six rates: tensor-core FLOPs, other instructions, exponentials, and bytes from shared memory, L2 and DRAM. An
FMA is one instruction and two FLOPs. Tensor cores, FP32 units, special function units, L2 and DRAM can all work
concurrently, so the slowest of them determines a method's time.
"""

from dataclasses import dataclass

from fa2_lab.machine import chips, io_model
from fa2_lab.machine.chips import Chip
from fa2_lab.machine.time_model import fp32_instructions
from fa2_lab.records import load, path_of
from fa2_lab.tiles import Mask, Tiling, cdiv, whole_number

L2_BYTES_PER_CLOCK = 5120  # bytes per clock from an A100's L2 (NVIDIA A100 whitepaper); unpublished for later chips


@dataclass(frozen=True)
class Rates:
    """A chip's rates per second: tensor-core FLOPs, other instructions, exponentials, and bytes from each memory."""

    tensor: float
    fp32: float
    exp: float
    shared: float
    l2: float
    dram: float

    def in_flops(self) -> dict[str, float]:
        """Return {unit: number of tensor-core FLOPs that take as long as one operation or byte on this unit}."""
        return {name: self.tensor / getattr(self, name) for name in ("fp32", "exp", "shared", "l2", "dram")}


def rates(chip: Chip) -> Rates:
    """Return a chip's rates. All except the L2 rate are taken from the manufacturer's specifications.

    If an L2 rate has been recorded on this chip, it is used. Otherwise, the L2 rate is the A100's published number of
    bytes per clock, multiplied by this chip's clock frequency.
    """
    clocks = chip.SMs * chip.clock_hz
    l2 = measured_rates(chip).get("L2 TB/s")
    return Rates(
        tensor=chip.tensor_flops_per_second,
        fp32=chip.fp32_per_clock * clocks,
        exp=chip.exp_per_clock * clocks,
        shared=chip.shared_bytes_per_clock * clocks,
        l2=1e12 * l2 if l2 else L2_BYTES_PER_CLOCK * chip.clock_hz,
        dram=chip.hbm_bytes_per_second,
    )


def measured_rates(chip: Chip) -> dict[str, float]:
    """Return the rates that `fa2-lab bench bandwidth` recorded on this chip, or {} if there is no record."""
    record = load("bandwidth") if path_of("bandwidth").exists() else None
    return record.ceilings if record and chips.find(record.machine["gpu"]) == chip else {}


# Work per method ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """The work of one call on each unit of a chip, summed over all heads."""

    flops: int  # matmul FLOPs
    instructions: int  # instructions other than matmuls and exponentials
    exponentials: int
    requested_bytes: int  # bytes that the SMs load and store
    dram_bytes: int  # requested bytes that reach DRAM because they are not in L2
    workers: int  # thread blocks that can run concurrently

    def seconds(self, chip: Chip) -> dict[str, float]:
        """Return {unit: seconds that the work of this call takes if the unit runs at its full rate}.

        If there are fewer workers than SMs, the remaining SMs are idle.
        """
        rate, busy_share = rates(chip), min(1.0, self.workers / chip.SMs)
        return {
            "tensor cores": self.flops / rate.tensor / busy_share,
            "FP32 units": self.instructions / rate.fp32 / busy_share,
            "special function units": self.exponentials / rate.exp / busy_share,
            "L2": self.requested_bytes / rate.l2,
            "DRAM": self.dram_bytes / rate.dram,
        }

    def limit(self, chip: Chip) -> tuple[str, float]:
        """Return the name of the unit that takes longest, and its time in seconds.

        No kernel for this method can take less time, unless the L1 caches of the SMs serve some requests before they
        reach L2. In the recorded run of the ladder, L2 served a fifth fewer bytes than FA2 requests with 64 × 64 tiles.
        """
        seconds = self.seconds(chip)
        slowest = max(seconds, key=lambda unit: seconds[unit])
        return slowest, seconds[slowest]

    def intensity(self, counted: str) -> float:
        """Return the number of matmul FLOPs per byte.

        `counted` is "requested_bytes" to count the bytes that the SMs request, or "dram_bytes" to count those that
        reach DRAM.
        """
        return self.flops / getattr(self, counted)


METHODS = {  # {name: (algorithm, direction) in io_model}
    "standard": ("standard", "forward"),
    "FA1": ("fa1", "forward"),
    "FA2": ("fa2", "forward"),
    "standard backward": ("standard", "backward"),
    "FA1 backward": ("fa1", "backward"),
    "FA2 backward": ("fa2", "backward"),
    "decode": ("fa2", "forward"),  # N_q is the number of queries that share a K/V head
}


def cost(
    method: str,
    *,
    N: int = 4096,
    d: int = 128,
    B_r: int = 64,
    B_c: int = 64,
    heads: int = 64,
    N_q: int | None = None,
    causal: bool = False,
    chip: Chip = chips.H200,
) -> Cost:
    """Return the cost of `heads` heads of N_q queries and N keys, as counted by machine/io_model. N_q defaults to N.

    `method` is a key of METHODS. Standard attention stores S and P, and its operations are counted as if S were one
    tile. Its matmuls request their operands repeatedly, but only the first request for Q, K and V reaches DRAM, because
    L2 serves all later requests. Decode splits the keys, so every SM has work.
    """
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}; it takes one of {', '.join(METHODS)}")
    whole_number("heads", heads, low=1)
    algorithm, direction = METHODS[method]
    tiling = Tiling(N if N_q is None else N_q, N, B_r, B_c, Mask(causal=causal))
    requests, workers = io_model.requests(algorithm, direction, tiling, d), workers_per_head(method, tiling, chip)
    moved = io_model.traffic(algorithm, direction, tiling, d)
    passes = dram_passes(algorithm, tiling, d, moved, workers, heads, chip)
    dram_bytes = io_model.limit_passes(moved, passes, io_model.tensor_sizes(tiling, d))
    if algorithm == "standard":
        algorithm, tiling = "fa2", Tiling(tiling.N_q, N, tiling.N_q, N)
    ops = io_model.operations(algorithm, direction, tiling, d)
    tiles = io_model.scores_visited(tiling) / (tiling.B_r * tiling.B_c)
    instructions = tiles * fp32_instructions(algorithm, tiling.B_r, tiling.B_c, d, direction)
    return Cost(
        flops=heads * ops["matmul"],
        instructions=round(heads * instructions),
        exponentials=heads * ops["exp"],
        requested_bytes=heads * io_model.in_bytes(METHODS[method][0], requests).total,
        dram_bytes=heads * io_model.in_bytes(METHODS[method][0], dram_bytes).total,
        workers=heads * workers,
    )


def workers_per_head(method: str, tiling: Tiling, chip: Chip) -> int:
    """Return the number of thread blocks that share one head under `method`.

    FA1, as published, has one block per head. FA2 has one per row block in the forward pass, and one per column block
    in the backward pass. Standard attention has enough blocks for all SMs, and so does decode, because it splits
    the keys.
    """
    algorithm, direction = METHODS[method]
    if algorithm == "standard" or method == "decode":
        return chip.SMs
    return 1 if algorithm == "fa1" else tiling.T_r if direction == "forward" else tiling.T_c


def dram_passes(
    algorithm: str, tiling: Tiling, d: int, moved: io_model.Traffic, workers: int, heads: int, chip: Chip
) -> int:
    """Return how many times the data that a head loads repeatedly are read from DRAM.

    `moved` is the traffic of one head in elements, and `workers` is the number of workers that share a head.

    The data are read only once if they fit in L2 for all heads that are computed concurrently. Otherwise, FA2 reads
    them once per wave of workers, because a head's workers load the same tile at about the same time. FA1 has one
    worker per head, and standard attention runs one kernel after another, so both read the data from DRAM each time.
    """
    size = io_model.tensor_sizes(tiling, d)
    repeated = {tensor: size[tensor] for tensor, n in moved.loads.items() if n > size[tensor]}
    at_once = heads if algorithm == "standard" else min(heads, cdiv(chip.SMs, workers))
    if at_once * io_model.in_bytes(algorithm, io_model.Traffic(repeated, {})).total <= chip.l2_bytes:
        return 1
    return cdiv(workers, chip.SMs) if algorithm == "fa2" else max(tiling.T_c, 2)
