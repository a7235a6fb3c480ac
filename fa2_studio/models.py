"""Train a small model of Hugging Face's transformers with one attention after the other, and print the loss curves.

    python -m fa2_studio.models             with what runs on this machine
    python -m fa2_studio.models --record    and keep the curves in figures/data/models.json

The model is a Llama of two layers that reads the package's own sources byte by byte. All start with the same weights
and see the same batches, so the curves differ by rounding alone.
"""

from __future__ import annotations

import argparse
import json
import sys

from fa2_lab.tools import files

RECORD = files.ROOT / "figures" / "data" / "models.json"
NAMES = ("eager", "sdpa", "flex_attention", "fa2_lab")
CONTEXT, BATCH, STEPS, RATE = 32, 2, 31, 1e-2
SIZES = dict(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=16)
HEADS = dict(num_attention_heads=2, num_key_value_heads=1)


def train(implementation: str, device: str, steps: int = STEPS) -> list[float]:
    """The loss of every step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import fa2_lab.transformers  # noqa: F401 (registers itself)
    from fa2_studio.bench.train import batches, losses

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, attn_implementation=implementation)).to(device)
    data = batches(steps, BATCH, CONTEXT, device)
    return [loss.item() for loss in losses(model, lambda model, batch: model(batch, labels=batch).loss, RATE, data)]


def train_all(device: str) -> tuple[dict[str, list[float]], dict[str, str]]:
    """{implementation: its losses}, and why others have none."""
    curves, failed = {}, {}
    for name in NAMES:
        try:
            curves[name] = train(name, device)
        except Exception as failure:  # another's attention may not run here
            if name == "fa2_lab":
                raise
            failed[name] = " ".join(str(failure).split())[:80]
    return curves, failed


def table(curves: dict[str, list[float]]) -> str:
    """Every tenth loss of each curve, and how far it lies from the first curve at most."""
    first = next(iter(curves.values()))
    steps = range(0, len(first), 10)
    lines = [f"{'loss after step':16}" + "".join(f"{n:8}" for n in steps) + "   largest difference"]
    for name, losses in curves.items():
        apart = max(abs(a - b) for a, b in zip(losses, first, strict=True))
        lines.append(
            f"{name:16}" + "".join(f"{losses[n]:8.3f}" for n in steps) + f"   {apart:.0e}" * (losses is not first)
        )
    return "\n".join(lines)


def recorded() -> dict:
    """The curves of the recorded run and what it ran on."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fa2_studio.models", description=__doc__.split("\n")[0])
    parser.add_argument("--record", action="store_true", help=f"keep the curves in figures/data/{RECORD.name}")
    arguments = parser.parse_args(argv)
    import torch

    curves, failed = train_all("cuda" if torch.cuda.is_available() else "cpu")
    print(table(curves))
    for name, why in failed.items():
        print(f"{name} does not train here: {why}")
    if arguments.record:
        from importlib.metadata import version

        from fa2_studio.bench.results import machine

        made = machine() | dict(transformers=version("transformers"))
        files.write(RECORD, json.dumps(dict(machine=made, curves=curves), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
