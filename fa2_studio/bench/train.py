"""A small GPT trained on the project's own text, with its attention swapped: same curve, other speed and memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import nn
from tqdm import tqdm

from fa2_lab.paper import PACKAGE
from fa2_lab.records import Measurement, Record
from fa2_studio.bench import peers
from fa2_studio.bench.contest import tried
from fa2_studio.bench.problem import Problem
from fa2_studio.bench.results import machine

BACKENDS = ("fa2_lab", "fa2_lab portable", "torch flash", "cuDNN", "FlashAttention-3", "torch math")
PROTOCOL = "bf16 autocast, AdamW, the same seed and batches for every backend; seconds without the first 10 steps"


@dataclass(frozen=True)
class Setting:
    """Sizes of model and run."""

    layers: int = 6
    heads: int = 8
    d: int = 64
    context: int = 4096
    batch: int = 8
    steps: int = 200
    rate: float = 6e-4

    def problem(self) -> Problem:
        return Problem(self.batch, self.heads, self.heads, self.context, self.context, self.d, causal=True)


@dataclass
class Run:
    """What one backend did: the loss of every step, and what the steps cost."""

    losses: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    peak_mebibytes: float = 0.0


@cache
def own_text() -> torch.Tensor:
    """The bytes of the package's own sources, in a fixed order."""
    text = b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to the stream."""

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
    """Bytes in, the next byte's logits out."""

    def __init__(self, setting: Setting, attention):
        super().__init__()
        width = setting.heads * setting.d
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(setting.context, width)
        self.blocks = nn.Sequential(*(Block(setting, attention) for _ in range(setting.layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, x):  # (batch, N)
        return self.head(self.blocks(self.byte(x) + self.place.weight[: x.shape[1]]))


def train(backend: str, setting: Setting, device: str = "cuda") -> Run:
    """Train from the same start on the same batches with one backend's attention."""
    torch.manual_seed(0)
    model = GPT(setting, peers.PEERS[backend](setting.problem())).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=setting.rate)
    text, draw, run = own_text(), torch.Generator().manual_seed(1), Run()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, start = [], time.perf_counter()
    for step in tqdm(range(setting.steps), desc=backend, unit="step", disable=None, leave=False):
        if step == 10:
            losses[-1].item()
            start = time.perf_counter()
        at = torch.randint(len(text) - setting.context - 1, (setting.batch, 1), generator=draw)
        batch = text[at + torch.arange(setting.context + 1)].to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    run.losses = [x.item() for x in losses]
    tokens = (setting.steps - 10) * setting.batch * setting.context
    run.tokens_per_second = tokens / (time.perf_counter() - start)
    run.peak_mebibytes = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    return run


def run(setting: Setting = Setting()) -> Record:
    """Train with every backend: a loss curve for each, and a row each for the last losses, the time and the memory."""
    runs, failed, missing = {}, {}, []
    for backend in BACKENDS:
        try:
            found = tried(partial(train, backend, setting))
        except KeyboardInterrupt:
            missing = [name for name in BACKENDS if name not in runs | failed]
            break
        (failed if isinstance(found, str) else runs)[backend] = found
    problem = setting.problem().as_dict() | dict(layers=setting.layers, steps=setting.steps)
    values = dict(
        loss=({name: [sum(r.losses[-20:]) / 20] for name, r in runs.items()}, "nats"),
        time=({name: [1e6 / r.tokens_per_second] for name, r in runs.items()}, "µs per token"),
        memory=({name: [r.peak_mebibytes] for name, r in runs.items()}, "MiB"),
    )
    rows = [Measurement(problem, what, found, failed, unit) for what, (found, unit) in values.items()]
    curves = {name: [round(loss, 5) for loss in r.losses] for name, r in runs.items()}
    return Record("train", machine(), PROTOCOL, rows=rows, missing=missing, curves=curves)
