"""A pytest plugin that leaves out tests that do not apply to us, and counts outcomes.

Both counts are written to the folder $FA2_LAB_JUDGED.
"""

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from fa2_studio.judges.suites import SUITES

SUITE, FOLDER = SUITES[os.environ["FA2_LAB_SUITE"]], Path(os.environ["FA2_LAB_JUDGED"])
SAMPLE = SUITE.sample if torch.cuda.is_available() else SUITE.sample_on_a_laptop
left_out: Counter = Counter()
emptied: set[str] = set()
outcomes: Counter = Counter()
failures: list[str] = []


def is_in_sample(name: str) -> bool:
    """Return True if a test belongs to the sample, which is chosen by a hash of the test's name."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % SAMPLE == 0


def reason_to_skip(test: str, name: str, case: dict) -> str:
    """Return the reason for leaving a case out, or "" if the case runs. Cases are counted by reason."""
    why = SUITE.reason_to_leave_out(test, case) or ("" if is_in_sample(name) else "not in the sample")
    left_out[why] += 1
    return why


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc):
    """Remove cases before pytest turns them into tests, because one of the files has half a million cases."""
    test, cases = metafunc.function.__name__, metafunc._calls
    if cases:
        cases[:] = [case for case in cases if not reason_to_skip(test, f"{test}[{case.id}]", case.params)]
        if not cases:
            emptied.add(metafunc.definition.nodeid)  # pytest now treats it as a test without parameters


def pytest_collection_modifyitems(config, items):
    keep, drop = [], []
    for item in items:
        bare = not hasattr(item, "callspec")
        out = bare and (item.nodeid in emptied or reason_to_skip(item.originalname, item.name, {}))
        (drop if out else keep).append(item)
    items[:] = keep
    config.hook.pytest_deselected(items=drop)
    if getattr(config, "workerinput", {}).get("workerid", "gw0") == "gw0":
        del left_out[""]
        (FOLDER / "left_out.json").write_text(json.dumps(left_out))


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
