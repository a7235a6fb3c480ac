"""The loss curves of one model with several attentions."""

import pytest
from kernel_truth import DEVICE

from fa2_studio import models


def test_the_table_has_every_tenth_loss_and_the_distance_from_the_first_curve():
    a, b = [float(n) for n in range(21)], [n + 0.5 * (n == 7) for n in range(21)]
    lines = models.table(dict(eager=a, fa2_lab=b)).splitlines()
    assert lines[0].split() == "loss after step 0 10 20 largest difference".split()
    assert lines[1].split() == ["eager", "0.000", "10.000", "20.000"]
    assert lines[2].split() == ["fa2_lab", "0.000", "10.000", "20.000", "5e-01"]


def test_recorded_curves_fall_and_lie_together():
    found = models.recorded()
    curves = found["curves"]
    assert {"eager", "fa2_lab"} <= set(curves) <= set(models.NAMES) and "transformers" in found["machine"]
    for losses in curves.values():
        assert len(losses) == models.STEPS and losses[-1] < losses[0] - 1
        assert all(abs(x - y) < 1e-3 for x, y in zip(losses, curves["eager"], strict=True))


def test_two_steps_with_both():
    pytest.importorskip("transformers", reason="transformers is not installed")
    eager, ours = (models.train(name, DEVICE, steps=2) for name in ("eager", "fa2_lab"))
    assert all(abs(x - y) < 1e-4 for x, y in zip(eager, ours, strict=True)) and ours[1] != ours[0]


def test_what_cannot_train_is_named_with_its_reason(monkeypatch):
    def train(name, device):
        if name != "fa2_lab":
            raise RuntimeError(f"no {name}")
        return [1.0]

    monkeypatch.setattr(models, "train", train)
    curves, failed = models.train_all("cpu")
    assert curves == dict(fa2_lab=[1.0]) and failed["sdpa"] == "no sdpa" and len(failed) == 3
    monkeypatch.setattr(models, "NAMES", ("fa2_lab",))
    monkeypatch.setattr(models, "train", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # ours has no excuse
        models.train_all("cpu")
