"""The suites of the bench by name, and the records that no command writes."""

from typing import NamedTuple


class Suite(NamedTuple):
    """Which function plans it, and what it is."""

    measure: str  # module:function
    what: str
    gpu: bool = True
    takes: tuple[str, ...] = ()  # options of the command; what takes "sustained" takes the suite's name, too


PARTS = ("rungs", "experiments", "lengths", "backward", "counters", "sustained")  # of the ladder
CONTESTS = {
    "paper": "the FA2 paper's grid: d 64 and 128, 16k tokens",
    "nvidia": "64 query heads on 8, d 128, one sequence",
    "long": "one sequence of up to 262,144 tokens",
    "heads": "grouped heads",
    "deterministic": "gradients with the same bits in every call, beside the fast ones",
    "sweep": "200 random shapes, beside cuDNN and FlashAttention-3",
    "masks": "a window, a softcap and sinks under the causal mask; FLOPs are those of the keys that rows see",
}
SUITES = {"smoke": Suite("suites:smoke", "no GPU needed: small problems checked, in Triton's interpreter", gpu=False)}
SUITES |= {name: Suite("suites:contests", what, takes=("sustained",)) for name, what in CONTESTS.items()}
SUITES |= {
    "packed": Suite("packed:run", "sequences of different lengths, packed or padded"),
    "accuracy": Suite("accuracy:run", "errors of O, dQ, dK and dV against float64, for everybody"),
    "decode": Suite("decode:run", "one query over long caches, dense and in pages"),
    "small": Suite("suites:small", "what one call costs on the host"),
    "memory": Suite("suites:memory", "peak bytes over the length"),
    "ladder": Suite(
        "ladder:run",
        "one change of a kernel at a time, beside the fastest peers; experiments, clock, power and counters",
        takes=("part", "beside"),
    ),
    "prices": Suite("prices:run", "bytes per second from shared memory, from L2 and from DRAM"),
    "train": Suite("train:run", "a small GPT with its attention swapped"),
    "models": Suite("models:run", "no GPU needed: a small Llama of transformers with its attention swapped", gpu=False),
    "ring": Suite("ring:run", "one sequence over several GPUs: torchrun --nproc-per-node 4 -m fa2_lab bench ring"),
}
OTHERS = {  # records that no command writes; each says how it was made
    "h100": "the paper's grid on an H100",
    "ideas": "ideas for the Hopper kernels and decode, each with and without it, measured on an earlier version",
}
