"""The pytest plugin of a run: which of their tests apply, and what became of them. Both go into $FA2_LAB_JUDGED."""

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

import torch

from fa2_studio.judges.suites import SUITES

SUITE, FOLDER = SUITES[os.environ["FA2_LAB_SUITE"]], Path(os.environ["FA2_LAB_JUDGED"])
SAMPLE = SUITE.sample if torch.cuda.is_available() else SUITE.sample_on_a_laptop
outcomes: Counter = Counter()
failures: list[str] = []


def chosen(name: str) -> bool:
    """Whether a test belongs to the sample."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % SAMPLE == 0


def pytest_collection_modifyitems(config, items):
    keep, drop, reasons = [], [], Counter()
    for item in items:
        case = item.callspec.params if hasattr(item, "callspec") else {}
        reason = SUITE.left_out(item.originalname, case)
        if not reason and not chosen(item.name):
            reason = "not in the sample"
        reasons[reason] += 1
        (drop if reason else keep).append(item)
    items[:] = keep
    config.hook.pytest_deselected(items=drop)
    if getattr(config, "workerinput", {}).get("workerid", "gw0") == "gw0":
        del reasons[""]
        (FOLDER / "left_out.json").write_text(json.dumps(reasons))


def pytest_runtest_logreport(report):
    skipped_early = report.when == "setup" and report.outcome != "passed"
    if report.when == "call" or skipped_early:
        outcomes["skipped by themselves" if report.outcome == "skipped" else report.outcome] += 1
        if report.failed:
            failures.append(report.nodeid.split("::", 1)[-1])


def pytest_runtest_teardown(item):
    torch.use_deterministic_algorithms(mode=False)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        (FOLDER / "outcomes.json").write_text(json.dumps({**outcomes, "failures": failures}))
