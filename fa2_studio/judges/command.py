"""`fa2-lab judge`: run other projects' tests on these kernels."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from fa2_lab.paper import PACKAGE
from fa2_lab.tools import files
from fa2_studio.bench.recording import environment
from fa2_studio.judges.suites import SUITES, PeerTests

RECORD = files.ROOT / "figures" / "data" / "judged.json"


def main(argv: list[str]) -> int:
    """Run one suite and print its outcomes or, without a suite, print the recorded ones. Return 0 if no test failed."""
    words = "Run other projects' own tests on our calls. Without a suite, print the recorded outcomes."
    parser = argparse.ArgumentParser(prog="fa2-lab judge", description=words)
    parser.add_argument("suite", nargs="?", help=", ".join(SUITES))
    parser.add_argument(
        "checkout", nargs="?", type=Path, help="a checkout of that project, at the commit that the suite names"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="the number of processes; 6 suit a GPU, because the tests' references need much memory",
    )
    parser.add_argument("--record", action="store_true", help=f"keep the counts in {RECORD.name}")
    arguments = parser.parse_args(argv)
    if arguments.suite is None:
        print(outcomes_table(load_outcomes()))
        return 0
    if arguments.suite not in SUITES:
        raise ValueError(f"suite: got {arguments.suite!r}; it takes {', '.join(SUITES)}")
    suite = SUITES[arguments.suite]
    check_suite(suite, arguments.checkout)
    counts = run_suite(arguments.suite, arguments.checkout, arguments.processes)
    print(outcomes_table({arguments.suite: counts}))
    print(*counts["failures"], sep="\n")
    if arguments.record:
        files.write(RECORD, json.dumps(load_outcomes() | {arguments.suite: counts}, indent=1) + "\n")
    return 1 if counts["failures"] else 0


def check_suite(suite: PeerTests, checkout: Path | None) -> None:
    """Raise ValueError if the checkout, the installed packages or the GPU do not meet the suite's requirements."""
    import torch

    how = f"git clone {suite.repository} && git -C {Path(suite.repository).name} checkout {suite.commit[:8]}"
    if checkout is None:
        raise ValueError(f"checkout: got none; it takes a folder with that project's files: {how}")
    missing = [name for name in (suite.tests, *suite.copied_files) if not (checkout / name).is_file()]
    if missing:
        raise ValueError(f"checkout: got {checkout}, where there is no {missing[0]}; it takes what this makes: {how}")
    git = ["git", "-C", str(checkout), "rev-parse", "HEAD", f"{suite.commit}^{{commit}}"]
    commit, *expected_commit = subprocess.run(git, capture_output=True, text=True).stdout.split() or [""]
    if (checkout / ".git").exists() and expected_commit != [commit]:
        raise ValueError(f"checkout: got commit {commit[:8]}; it takes {suite.commit[:8]}: {how}")
    if lacking := [name for name in suite.needs if find_spec(name) is None]:
        raise ValueError(f"suite: {suite.title}'s tests import {lacking[0]}; pip install {' '.join(lacking)}")
    if suite.needs_gpu and not torch.cuda.is_available():
        raise ValueError(f"suite: {suite.title}'s tests need a CUDA GPU, and there is none here")


def stage_tests(suite: PeerTests, checkout: Path, folder: Path) -> None:
    """Copy their tests and helpers to a folder, and replace the modules that they import with our adapter."""
    for name in suite.replaced_modules:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(
            f"import fa2_studio.judges.adapters.{suite.adapter} as ours\n\n"
            "globals().update({name: x for name, x in vars(ours).items() if not name.startswith('__')})\n",
            encoding="utf-8",
        )
    for name, place in suite.copied_files.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, folder / place)
    text = (checkout / suite.tests).read_text(encoding="utf-8")
    for theirs, ours in suite.replacements.items():
        text = text.replace(theirs, ours)
    (folder / suite.tests).parent.mkdir(parents=True, exist_ok=True)
    (folder / suite.tests).write_text(text, encoding="utf-8")


def run_suite(name: str, checkout: Path, processes: int = 1) -> dict:
    """Run the tests of a suite, and return the number of tests per outcome, the failures and the machine."""
    import pytest

    suite = SUITES[name]
    here = environment()
    about = {"commit": suite.commit, "ours": here["commit"]} | {key: here[key] for key in ("gpu", "torch", "triton")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        stage_tests(suite, checkout, folder)
        path = os.pathsep.join([scratch, str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, **suite.environment, "FA2_LAB_SUITE": name, "FA2_LAB_JUDGED": scratch, "PYTHONPATH": path}
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:warnings"]
        command += ["-p", "fa2_studio.judges.plugin"]
        command += ["-n", str(processes)] if processes > 1 else []
        done = subprocess.run([*command, suite.pytest_file or suite.tests], cwd=folder, env=env, check=False)
        if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise ValueError(f"suite: {suite.title}'s tests did not start; pytest explains why above")
        outcomes = json.loads((folder / "outcomes.json").read_text())
        left_out = json.loads((folder / "left_out.json").read_text())
    return {**about, "left out": left_out, **outcomes}


def load_outcomes() -> dict[str, dict]:
    """Return the recorded outcomes as {suite: counts}."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def outcomes_table(found: dict[str, dict]) -> str:
    """Return a table with one line per suite, followed by the reasons for which tests were left out."""
    lines = [f"{'suite':20}{'passed':>8}{'failed':>8}{'skipped':>9}{'left out':>10}   on"]
    for name, counts in found.items():
        numbers = [counts.get(kind, 0) for kind in ("passed", "failed", "skipped by themselves")]
        out = counts["left out"]
        lines.append(
            f"{name:20}{numbers[0]:8,}{numbers[1]:8,}{numbers[2]:9,}{sum(out.values()):10,}   "
            f"{counts['gpu']}, torch {counts['torch']}, Triton {counts['triton']}, commit {counts['ours']}"
        )
        lines += [f"{'':20}{n:8,} left out: {reason}" for reason, n in out.items()]
    return "\n".join(lines)
