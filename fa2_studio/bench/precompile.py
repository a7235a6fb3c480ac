"""Compile on all cores before measuring, because FlexAttention alone takes seconds per shape.

PyTorch and Triton store compiled kernels on disk, from where the measuring process loads them.
"""

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from multiprocessing import get_context

import torch
from tqdm import tqdm

from fa2_studio.bench import implementations
from fa2_studio.bench.problem import Problem


def precompile_all(problems: Sequence[Problem], names: Sequence[str] = implementations.names("dense")) -> None:
    """Call each implementation that needs compiling once per problem, in other processes. Failures are ignored.

    The measuring process will encounter the same failure and record it.
    """
    compiling = [name for name in names if name in implementations.values_of("compiles")]
    run_in_processes(call_once, [(problem, name) for name in compiling for problem in problems])


def run_in_processes(call: Callable[..., None], jobs: Sequence[tuple]) -> None:
    """Call a function once per job in other processes. Failures are ignored, because they will occur again later."""
    if not jobs or process_pool() is None:
        return
    try:
        done = process_pool().map(partial(call_ignoring_failures, call), *zip(*jobs, strict=True))
        list(tqdm(done, total=len(jobs), desc="compile", unit="kernel", disable=None, leave=False))
    except BrokenProcessPool:  # if a process dies, its kernels are compiled when they are measured
        return
    except KeyboardInterrupt:
        process_pool().shutdown(cancel_futures=True)
        raise


@cache
def process_pool() -> ProcessPoolExecutor | None:
    """Return the process pool shared by all suites of a run, with as many workers as cores and GPU memory allow."""
    workers = min(os.cpu_count() - 1, torch.cuda.mem_get_info()[0] // (8 * 2**30))
    # Otherwise, each process would itself start many compile threads.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # FlashAttention-4 uses its disk cache only on request.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    ignore = signal.signal, (signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is left to the measuring process
    return ProcessPoolExecutor(workers, get_context("spawn"), *ignore) if workers > 1 else None


def call_ignoring_failures(call: Callable[..., None], *job) -> None:
    """Make a call and wait for the GPU. Failures are ignored, because the measuring run will report them."""
    try:
        call(*job)
        torch.cuda.synchronize()
    except Exception:
        return
    finally:
        torch.cuda.empty_cache()


def call_once(problem: Problem, name: str) -> None:
    """Run a forward pass without gradients, then another with gradients, and a backward pass."""
    attention = implementations.prepare(name, problem)
    q, k, v, dO = problem.tensors(grad=True)
    with torch.no_grad():
        attention(q, k, v)
    torch.autograd.grad(attention(q, k, v), (q, k, v), dO)
