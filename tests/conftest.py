"""Hooks and fixtures for all tests: a clean start of each, and worker programs that run beside the tests.

Work that takes long and needs its own process is done by workers, for example compiling for GPUs that are not present.
A test that needs one is marked `beside(worker, *arguments)`. Its fixture `worker_rows` has the lines of JSON that this
worker prints. If one process runs all tests, the workers start with the first test and run one after another on an idle
core, and the tests that need them run last. If several processes share the tests (pytest-xdist), each starts the
workers that its own tests need.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import fa2_lab.kernels  # noqa: F401 — before a test file imports Triton: it switches the interpreter on where there is no GPU

for library in ("OPENBLAS", "MKL", "OMP"):  # set before NumPy and torch: on small tiles, more threads only wait
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes three quarters of a GPU's memory

TESTS = Path(__file__).parent

# Files that take at least 13 seconds of one core, in this order. Others follow by their number of tests.
SLOWEST_FILES = (
    *("test_compile.py", "test_hopper_backward.py", "test_hopper.py", "test_examine.py", "test_examine_calls.py"),
    *("test_examine_descriptions.py", "test_examine_checks.py", "test_course_sandbox.py"),
    *("test_calls.py", "test_ladder.py", "test_course.py", "test_site.py", "test_xray.py", "11_workshop.ipynb"),
    *("12b_hopper_kernel.ipynb", "09_triton_backward.ipynb", "08_triton_forward.ipynb", "test_decode_splits.py"),
    *("test_course_grading.py", "10_ladder.ipynb", "test_attention.py", "test_plots.py", "test_judges.py"),
    *("test_attention_call.py", "12a_hopper_rungs.ipynb", "test_cli.py"),
)


def pytest_configure(config):
    config.addinivalue_line("markers", "beside(worker, *arguments): needs the rows that this program prints")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Let several processes share a run of all tests, and more of them with a GPU, where each case compiles kernels.

    Each process takes whole files, because a notebook's cells depend on each other. The exhaustive tests are in a few
    files with many long tests, so they are distributed one by one, except for groups that one worker compiles.
    """
    runs_all_tests = config.args_source is config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if runs_all_tests and getattr(config.option, "numprocesses", 0) is None:
        processes = min(os.cpu_count(), 4)
        if torch.cuda.is_available():
            processes = min(os.cpu_count() - 2, torch.cuda.get_device_properties(0).total_memory // (8 * 2**30), 12)
        if processes > 1:
            config.option.numprocesses = processes
            config.option.dist = "loadgroup" if config.option.markexpr == "exhaustive" else "loadfile"
            config.option.loadscopereorder = False  # pytest_collection_modifyitems has put the longest first


def in_xdist() -> bool:
    """Return whether this process is one of several that share the tests."""
    return "PYTEST_XDIST_WORKER" in os.environ


def worker_command(item) -> tuple[str, ...]:
    """Return the worker that a test needs and the worker's arguments, or () for most tests."""
    marker = item.get_closest_marker("beside")
    return marker.args if marker else ()


def pytest_collection_modifyitems(items):
    """Move tests that need a worker to the end.

    If several processes share the tests, put the longest files first instead, so that the processes end at nearly the
    same time.
    """
    if not in_xdist():
        return items.sort(key=lambda item: bool(worker_command(item)))
    tests = Counter(item.path for item in items)
    order = {name: n for n, name in enumerate(SLOWEST_FILES)}
    items.sort(key=lambda item: (order.get(item.path.name, len(SLOWEST_FILES)), -tests[item.path], item.path))


def pytest_runtest_setup(item):
    """Skip tests whose GPU is not present, and clear the caches, which may hold choices made with patched kernels."""
    for marker in item.iter_markers("gpu"):
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
        if marker.args and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip(f"needs a {marker.args[0]} GPU")
    if cache_module := sys.modules.get("fa2_lab.kernels.cache"):
        cache_module.clear_caches()


def run_worker(name: str, *arguments: str) -> list[dict]:
    """Run a worker without Triton's interpreter, and return the lines of JSON that it prints."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS.parent)])  # PYTHONPATH may have another Triton
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, str(next(TESTS.glob(f"*/{name}"))), *arguments]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def lower_priority() -> None:
    """Give this process the lowest priority, and its own process group, which can be ended as a whole."""
    os.setsid()
    os.nice(19)


@pytest.fixture(scope="session")
def start_worker():
    """Yield a function that starts a worker once: start_worker(*command).result() waits for it and returns its rows.

    Workers run one after another, as children of one process that starts before any test. So a test that ends stray
    processes does not end a worker.
    """
    with ProcessPoolExecutor(1, get_context("fork"), lower_priority) as one_at_a_time:
        group = one_at_a_time.submit(os.getpid).result()
        yield cache(partial(one_at_a_time.submit, run_worker))
        one_at_a_time.shutdown(wait=False, cancel_futures=True)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def start_workers(request):
    """Start all workers with the first test. If several processes share the tests, each test starts its own instead."""
    commands = dict.fromkeys(command for item in request.session.items if (command := worker_command(item)))
    if commands and not in_xdist():
        start_worker = request.getfixturevalue("start_worker")
        for command in commands:
            start_worker(*command)


@pytest.fixture
def worker_rows(request, start_worker) -> list[dict]:
    """Return the rows of the worker with which the test is marked."""
    return start_worker(*worker_command(request.node)).result()


def pytest_runtest_teardown(item):
    """Release the GPU memory that a test no longer uses, because other processes need it."""
    if in_xdist() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
