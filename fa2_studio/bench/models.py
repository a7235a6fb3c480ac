"""The suite `models`: a small model from Hugging Face's transformers, trained once per attention implementation.

The model is a Llama with two layers that reads the package's own sources byte by byte. All runs start with the same
weights and use the same batches, so their loss curves differ only by rounding.
"""

from functools import partial

import torch

from fa2_lab.records import Measurement, Record
from fa2_studio.bench.compare import Plan, prepare_all
from fa2_studio.bench.problem import Problem
from fa2_studio.bench.recording import environment, installed_version
from fa2_studio.bench.train import batches, training_losses

NAMES = ("eager", "sdpa", "flex_attention", "fa2_lab")  # as transformers calls them
CONTEXT, BATCH, STEPS, LEARNING_RATE = 32, 2, 31, 1e-2
SIZES = dict(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16)
HEADS = dict(num_attention_heads=2, num_key_value_heads=1)
PROBLEM = Problem(BATCH, *HEADS.values(), CONTEXT, CONTEXT, SIZES["head_dim"], causal=True, dtype="float32")
PROTOCOL = (
    f"We compare the loss after {STEPS} steps of AdamW in float32. Every implementation of attention uses the same "
    "seed and the same batches."
)


def train(implementation: str, device: str, steps: int = STEPS) -> list[float]:
    """Train the model with one attention implementation, and return the loss after each step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import fa2_lab.transformers  # noqa: F401 (registers itself)

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attn_implementation=implementation)).to(device)
    data = batches(steps, BATCH, CONTEXT, device)
    return [
        loss.item()
        for loss in training_losses(model, lambda model, batch: model(batch, labels=batch).loss, LEARNING_RATE, data)
    ]


def run() -> Plan:
    """Train with each implementation that runs here, and return a finished record that contains the loss curves."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    curves, failed = prepare_all({name: partial(train, name, device) for name in NAMES})
    last = {name: curve[-1:] for name, curve in curves.items()}
    row = Measurement(PROBLEM.as_dict(), "loss", last, failed, unit="nats")
    made_with = environment() | dict(transformers=installed_version("transformers"))
    return Plan(Record("models", made_with, PROTOCOL, rows=[row], curves=curves))


def table(curves: dict[str, list[float]]) -> str:
    """Return a table with every tenth loss of each curve, and each curve's largest difference from the first curve."""
    first = next(iter(curves.values()))
    steps = range(0, len(first), 10)
    lines = [f"{'loss after step':16}" + "".join(f"{n:8}" for n in steps) + "   largest difference"]
    for name, curve in curves.items():
        apart = max(abs(a - b) for a, b in zip(curve, first, strict=True))
        numbers = "".join(f"{curve[n]:8.3f}" for n in steps)
        lines.append(f"{name:16}{numbers}" + f"   {apart:.0e}" * (curve is not first))
    return "\n".join(lines)
