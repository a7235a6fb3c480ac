"""What all tests share: a clean start, processes that share them, and programs that run beside them.

What takes long and needs a process of its own is done there, above all compiling for GPUs that need not be here. Such a
test is marked `beside(worker, *arguments)` and gets as `rows` what that program beside the tests prints, lines of JSON.
In one process all workers begin with the first test, one after the other, on a core that it leaves idle, and are asked
for what they found after the last. Where processes share the tests, each begins the workers that its own tests need.
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

for library in ("OPENBLAS", "MKL", "OMP"):  # before NumPy and torch: threads that share a tile wait for each other
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes three quarters of a GPU's memory

HERE = Path(__file__).parent

LONGEST = (  # at least 15 seconds of one core; all others follow by their number of tests
    *("test_compile.py", "test_hopper_backward.py", "test_hopper.py", "test_plots.py", "test_calls.py"),
    *("test_course.py", "test_examine.py", "test_xray.py", "12b_hopper_kernel.ipynb", "11_workshop.ipynb"),
    *("08_triton_forward.ipynb", "09_triton_backward.ipynb", "10_ladder.ipynb", "12a_hopper_rungs.ipynb"),
    *("test_attention.py", "test_attention_call.py", "test_cli.py", "test_decode.py"),
)


def pytest_configure(config):
    config.addinivalue_line("markers", "beside(worker, *arguments): needs the rows that this program prints")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Processes share the whole run; many on a GPU, where every case compiles kernels.

    Each takes whole files, as a notebook's cells follow one another. What is exhaustive are a few files with many long
    tests: those go one by one, but for what is compiled together.
    """
    whole = config.args_source is config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput")
    if whole and getattr(config.option, "numprocesses", 0) is None:
        processes = min(os.cpu_count(), 4)
        if torch.cuda.is_available():
            processes = min(os.cpu_count() - 2, torch.cuda.get_device_properties(0).total_memory // (8 * 2**30), 12)
        if processes > 1:
            config.option.numprocesses = processes
            config.option.dist = "loadgroup" if config.option.markexpr == "exhaustive" else "loadfile"
            config.option.loadscopereorder = False  # pytest_collection_modifyitems has put the longest first


def shared() -> bool:
    """Whether this process has a part of the tests."""
    return "PYTEST_XDIST_WORKER" in os.environ


def command_of(item) -> tuple[str, ...]:
    """The worker that a test needs, and its arguments; nothing for most tests."""
    marker = item.get_closest_marker("beside")
    return marker.args if marker else ()


def pytest_collection_modifyitems(items):
    """What waits for a worker comes last. Where processes share the tests, the longest files come first, so that the
    processes end at nearly the same time.
    """
    if not shared():
        return items.sort(key=lambda item: bool(command_of(item)))
    tests = Counter(item.path for item in items)
    place = {name: n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.name, len(LONGEST)), -tests[item.path], item.path))


def pytest_runtest_setup(item):
    """Whether its GPU is here; and what calls have found out with other kernels in place is nothing for this test."""
    for asked in item.iter_markers("gpu"):
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA GPU")
        if asked.args and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip(f"needs a {asked.args[0]} GPU")
    if table := sys.modules.get("fa2_lab.kernels.prepared"):
        table.clear_caches()


def lines_of(name: str, *arguments: str) -> list[dict]:
    """What a program beside the tests prints, without Triton's interpreter."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE.parent)])  # another Triton may lie there
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, str(next(HERE.glob(f"*/{name}"))), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def give_way() -> None:
    """To everybody else; and be a group that can be ended as a whole."""
    os.setsid()
    os.nice(19)


@pytest.fixture(scope="session")
def begin():
    """Has a worker begin, and gives what it will have found: begin(*command).result(). One works after the other.

    They begin below one process that is there from the first on: a test that ends strays ends no worker.
    """
    with ProcessPoolExecutor(1, get_context("fork"), give_way) as one_at_a_time:
        group = one_at_a_time.submit(os.getpid).result()
        yield cache(partial(one_at_a_time.submit, lines_of))
        one_at_a_time.shutdown(wait=False, cancel_futures=True)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def all_begin(request):
    """With the first test; where processes share the tests, each worker when a test of its file asks for it."""
    commands = dict.fromkeys(command for item in request.session.items if (command := command_of(item)))
    if commands and not shared():
        begin = request.getfixturevalue("begin")
        for command in commands:
            begin(*command)


@pytest.fixture
def rows(request, begin) -> list[dict]:
    """What the worker has found that the test is marked with."""
    return begin(*command_of(request.node)).result()


def pytest_runtest_teardown(item):
    """What a test held on a GPU is given back, as other processes need it."""
    if shared() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
