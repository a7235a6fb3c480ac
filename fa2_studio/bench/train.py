"""The suite `train`: a small GPT trained once per attention implementation to compare loss, speed and memory."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn
from tqdm import tqdm

from fa2_lab.paper import PACKAGE
from fa2_lab.records import Measurement, Record
from fa2_studio.bench import implementations
from fa2_studio.bench.compare import Plan, prepare_all
from fa2_studio.bench.problem import Problem
from fa2_studio.bench.recording import environment

PROTOCOL = (
    "The model trains with bf16 autocast and AdamW. Every implementation of attention uses the same seed and the same "
    "batches. The first 10 steps do not count towards the time."
)
SKIPPED = 10  # the number of steps before the clock starts

# Parts of every training run ----------------------------------------------------------------------------------


@cache
def package_sources_as_bytes() -> torch.Tensor:
    """Return the bytes of the package's own sources, in a fixed order."""
    text = b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(steps: int, batch: int, length: int, device: str) -> Iterator[torch.Tensor]:
    """Yield batches of random excerpts from the text, each of shape (batch, length). All runs use the same batches."""
    text, draw = package_sources_as_bytes(), torch.Generator().manual_seed(1)
    for _ in range(steps):
        at = torch.randint(len(text) - length, (batch, 1), generator=draw)
        yield text[at + torch.arange(length)].to(device)


def training_losses(
    model: nn.Module, loss_of: Callable, rate: float, data: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Train the model with AdamW, and yield the loss after each step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    for batch in data:
        loss = loss_of(model, batch)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        yield loss.detach()


# The model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The sizes of the model and of the training run."""

    layers: int = 6
    heads: int = 8
    d: int = 64
    context: int = 4096
    batch: int = 8
    steps: int = 200
    rate: float = 6e-4

    def problem(self) -> Problem:
        return Problem(self.batch, self.heads, self.heads, self.context, self.context, self.d, causal=True)


class Layer(nn.Module):
    """A transformer layer: attention and a feed-forward network, each with a preceding LayerNorm and a residual."""

    def __init__(self, setting: Setting, attention):
        super().__init__()
        width = setting.heads * setting.d
        self.heads, self.attention = setting.heads, attention
        self.norm_a, self.norm_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # (batch, N, width)
        q, k, v = self.qkv(self.norm_a(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed(self.norm_f(x))


class GPT(nn.Module):
    """A model that maps a sequence of bytes to the logits of the next byte at each position."""

    def __init__(self, setting: Setting, attention):
        super().__init__()
        width = setting.heads * setting.d
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(setting.context, width)
        self.layers = nn.Sequential(*(Layer(setting, attention) for _ in range(setting.layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, x):  # (batch, N)
        return self.head(self.layers(self.byte(x) + self.place.weight[: x.shape[1]]))


def next_byte_loss(model: GPT, batch: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of the next bytes, computed with bf16 autocast as is usual in training."""
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


# The suite ----------------------------------------------------------------------------------------------------


def train(implementation: str, setting: Setting, device: str = "cuda") -> tuple[list[float], float, float]:
    """Train with one implementation, and return the loss after each step, the µs per token and the peak memory in MiB.

    All implementations start with the same weights and use the same batches.
    """
    torch.manual_seed(0)
    model = GPT(setting, implementations.prepare(implementation, setting.problem())).to(device)
    data = batches(setting.steps, setting.batch, setting.context + 1, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    kept, start = [], time.perf_counter()
    steps = training_losses(model, next_byte_loss, setting.rate, data)
    for loss in tqdm(steps, total=setting.steps, desc=implementation, unit="step", disable=None, leave=False):
        kept.append(loss)
        if len(kept) == SKIPPED:
            loss.item()  # wait until the GPU has finished these steps
            start = time.perf_counter()
    curve = [loss.item() for loss in kept]
    seconds = time.perf_counter() - start
    tokens = (setting.steps - SKIPPED) * setting.batch * setting.context
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    return curve, 1e6 * seconds / tokens, peak


def run(setting: Setting = Setting()) -> Plan:
    """Train with every implementation, and return a finished record.

    The record contains one loss curve per implementation and three rows: the mean of the last losses, the time and the
    memory.
    """
    runs, failed = prepare_all({name: partial(train, name, setting) for name in implementations.names("train")})
    problem = setting.problem().as_dict() | dict(layers=setting.layers, steps=setting.steps)
    values = dict(
        loss=({name: [sum(curve[-20:]) / 20] for name, (curve, _, _) in runs.items()}, "nats"),
        time=({name: [microseconds] for name, (_, microseconds, _) in runs.items()}, "µs per token"),
        memory=({name: [mebibytes] for name, (_, _, mebibytes) in runs.items()}, "MiB"),
    )
    rows = [Measurement(problem, what, numbers, failed, unit) for what, (numbers, unit) in values.items()]
    curves = {name: [round(loss, 5) for loss in curve] for name, (curve, _, _) in runs.items()}
    return Plan(Record("train", environment(), PROTOCOL, rows=rows, curves=curves))
