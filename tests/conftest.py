"""What all tests share: a clean start, and programs that run beside them, on a core that they leave idle.

What takes long and needs a process of its own is done there, above all compiling for GPUs that need not be here. Such a
test is marked `beside(worker, *arguments)` and gets as `rows` what that program of this folder prints, lines of JSON.
All workers begin with the first test, one after the other, and are asked for what they found after the last.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import fa2_lab  # noqa: F401 — before a test file imports Triton: it switches the interpreter on where there is no GPU

for library in ("OPENBLAS", "MKL", "OMP"):  # before NumPy and torch: threads that share a tile wait for each other
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

HERE = Path(__file__).parent


def pytest_configure(config):
    config.addinivalue_line("markers", "beside(worker, *arguments): needs the rows that this program prints")


def command_of(item) -> tuple[str, ...]:
    """The worker that a test needs, and its arguments; nothing for most tests."""
    marker = item.get_closest_marker("beside")
    return marker.args if marker else ()


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: bool(command_of(item)))


def pytest_runtest_setup(item):
    """What calls have found out with other kernels in place is nothing for this test."""
    if table := sys.modules.get("fa2_lab.kernels.prepared"):
        table.forget()


class Worker:
    """A program in a process of its own, without Triton's interpreter, that gives way to everybody else."""

    def __init__(self, name, *arguments):
        self.command, self.process = [sys.executable, HERE / name, *arguments], None

    def run(self) -> list[dict]:
        """What it prints."""
        env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(HERE.parent)}
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(["nice", "-n", "19", *self.command], env=env, start_new_session=True, **pipes)
        out, errors = self.process.communicate(timeout=900)
        assert self.process.returncode == 0, errors[-4000:]
        return [json.loads(line) for line in out.splitlines()]

    def stop(self) -> None:
        """It and the processes that it has started."""
        if self.process and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def found_by(request):
    """{command: what will be found}, for the tests that were selected; one worker after the other."""
    workers = {command: Worker(*command) for item in request.session.items if (command := command_of(item))}
    with ThreadPoolExecutor(1) as one_at_a_time:
        yield {command: one_at_a_time.submit(worker.run) for command, worker in workers.items()}
        one_at_a_time.shutdown(wait=False, cancel_futures=True)
        for worker in workers.values():
            worker.stop()


@pytest.fixture
def rows(request, found_by) -> list[dict]:
    """What the worker has found that the test is marked with."""
    return found_by[command_of(request.node)].result()
