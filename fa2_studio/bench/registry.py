"""The benchmark suites by name, and the records that are not written by a command."""

from typing import NamedTuple


class Suite(NamedTuple):
    """A suite: the function that plans its measurements, and a description of what they measure."""

    planner: str  # module:function; plan_dense() is also passed the name of the suite
    what: str  # object of a sentence that begins with "`bench NAME` times" or "`bench NAME` measures"
    gpu: bool = True
    flags: tuple[str, ...] = ()  # accepted flags of the command line


# The parts of the suite `ladder`
LADDER_PARTS = ("rungs", "experiments", "lengths", "backward", "counters", "sustained")
DENSE_SUITES = {
    "paper": "attention on the benchmark problems of the FA2 paper, each of which has 16k tokens",
    "nvidia": "attention over one sequence, with head counts for which NVIDIA publishes cuDNN's speed",
    "long": "attention over a single sequence of up to 262,144 tokens",
    "heads": "grouped-query attention, with 1 to 32 K/V heads",
    "deterministic": "attention with deterministic gradients and, for comparison, with faster nondeterministic ones",
    "sweep": "fa2_lab, cuDNN, FlashAttention-3 and FlashAttention-4 on 200 random shapes",
    "masks": (
        "causal attention with a window, a softcap or sinks, and counts FLOPs only for the keys that each row sees"
    ),
    "bias": (
        "attention with ALiBi as a bias, computed either from the distance or from the column alone. For comparison, "
        "it also times the same problems without the bias"
    ),
}
SUITES = {"smoke": Suite("suites:smoke", "small problems, checked in Triton's interpreter (no GPU needed)", gpu=False)}
SUITES |= {name: Suite("suites:plan_dense", what, flags=("sustained",)) for name, what in DENSE_SUITES.items()}
SUITES |= {
    "ampere": Suite(
        "suites:plan_dense",
        "the portable kernels on the FA2 paper's problems if they are compiled for an A100 but run on this GPU. For "
        "comparison, it also times FlashAttention-2's own kernels in PyTorch, which use the A100's instructions, too. "
        "To start this suite, run "
        "`TRITON_OVERRIDE_ARCH=sm80 python -m fa2_lab bench ampere`",
    ),
    "packed": Suite("packed:run", "attention over sequences of different lengths, both packed and padded"),
    "accuracy": Suite("accuracy:run", "how far each implementation's O, dQ, dK and dV are from float64 results"),
    "decode": Suite("decode:run", "attention of a single query over a long cache, which is either dense or paged"),
    "small": Suite("suites:small", "the time that one call takes on the host"),
    "memory": Suite("suites:memory", "peak memory as a function of the sequence length"),
    "ladder": Suite(
        "ladder:run",
        "the kernel after each change and, for comparison, the fastest of the other implementations and several "
        "experimental kernels. It also reads the hardware counters",
        flags=("part", "beside"),
    ),
    "bandwidth": Suite("bandwidth:run", "how many bytes per second a GPU loads from shared memory, L2 and DRAM"),
    "train": Suite("train:run", "how a small GPT trains when only its attention is replaced"),
    "models": Suite(
        "models:run",
        "how a small Llama model from transformers trains when only its attention is replaced. It needs no GPU",
        gpu=False,
    ),
    "ring": Suite(
        "ring:run",
        "attention over one sequence that is divided among several GPUs. To start this suite, run "
        "`torchrun --nproc-per-node 4 -m fa2_lab bench ring`",
    ),
}
RECORDS_WITHOUT_COMMAND = {  # records not written by a command; `made_by` in each record describes how it was made
    "h100": "attention timings for the benchmark problems of the FA2 paper, measured on an H100",
    "ideas": (
        "timings of earlier Hopper and decode kernels, each with and without one optimization that was expected to help"
    ),
}
RECORD_TITLES = {  # the titles of all records, for the headings of RESULTS.md and the rows of its tables
    "paper": "The FA2 paper's grid",
    "ampere": "The A100's code on a newer GPU",
    "nvidia": "64 query heads that share 8 K/V heads",
    "long": "Long sequences",
    "heads": "Grouped-query attention",
    "deterministic": "Deterministic gradients",
    "sweep": "200 random shapes",
    "masks": "Windows, softcap and sinks",
    "bias": "ALiBi as a bias",
    "packed": "Packed sequences of different lengths",
    "accuracy": "Errors against float64",
    "decode": "One query and a long cache",
    "small": "Short calls, timed on the host",
    "memory": "Peak memory",
    "ladder": "The ladder, one change per kernel",
    "bandwidth": "Bandwidth of shared memory, L2 and DRAM",
    "train": "Training a small GPT",
    "models": "Training a small Llama model",
    "ring": "One sequence over several GPUs",
    "h100": "The FA2 paper's grid on an H100",
    "ideas": "Single ideas in earlier kernels",
}
RECORD_GROUPS = {  # {heading on the site: its records}; the first heading has all records that no other one has
    "The speed of single calls": (),
    "Errors, memory and training": ("accuracy", "memory", "train", "models", "ring"),
    "The ladder and the machine": ("ladder", "bandwidth", "ideas"),
}
