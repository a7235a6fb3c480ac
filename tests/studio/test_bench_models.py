"""The loss curves of one model with several attentions."""

import pytest
from kernel_truth import DEVICE

from fa2_lab.records import load
from fa2_studio.bench import models


def test_recorded_loss_curves_fall_and_agree():
    record = load("models")
    curves = record.curves
    assert {"eager", "fa2_lab"} <= set(curves) <= set(models.NAMES) and "transformers" in record.machine
    for losses in curves.values():
        assert len(losses) == models.STEPS and losses[-1] < losses[0] - 1
        assert all(abs(x - y) < 1e-3 for x, y in zip(losses, curves["eager"], strict=True))
    assert models.table(curves).count("\n") == len(curves)


def test_training_steps_match_eager_losses():
    pytest.importorskip("transformers", reason="transformers is not installed")
    eager, ours = (models.train(name, DEVICE, steps=2) for name in ("eager", "fa2_lab"))
    assert all(abs(x - y) < 1e-4 for x, y in zip(eager, ours, strict=True)) and ours[1] != ours[0]
