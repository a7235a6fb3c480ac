"""Compile before measuring, with all cores: FlexAttention alone takes seconds for each shape, one after the other.

Torch and Triton keep what they compile on disk; the run that measures finds it there.
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

from fa2_studio.bench import contestants
from fa2_studio.bench.problem import Problem


def compile_ahead(problems: Sequence[Problem], names: Sequence[str] = contestants.names("grid")) -> None:
    """Let other processes call once, forward and backward, those who compile. What fails there, fails again later."""
    compiling = [name for name in names if name in contestants.preparing("compiles")]
    elsewhere(call_once, [(problem, name) for name in compiling for problem in problems])


def elsewhere(call: Callable[..., None], jobs: Sequence[tuple]) -> None:
    """Call a function in other processes, once with the arguments of each job. What fails there, fails again later."""
    if not jobs or pool() is None:
        return
    try:
        done = pool().map(partial(tried, call), *zip(*jobs, strict=True))
        list(tqdm(done, total=len(jobs), desc="compile", unit="kernel", disable=None, leave=False))
    except BrokenProcessPool:  # one has died; what it could not do is compiled when it is measured
        return
    except KeyboardInterrupt:
        pool().shutdown(cancel_futures=True)
        raise


@cache
def pool() -> ProcessPoolExecutor | None:
    """The processes, which serve every suite of a run: as many as there are cores and memory of the GPU for them."""
    workers = min(os.cpu_count() - 1, torch.cuda.mem_get_info()[0] // (8 * 2**30))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each would start as many again
    return ProcessPoolExecutor(workers, get_context("spawn"), ignore_interrupts) if workers > 1 else None


def ignore_interrupts() -> None:
    """Ctrl-C is for the process that measures."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def tried(call: Callable[..., None], *job) -> None:
    """The call, until the GPU is done with it; the run that measures meets its failure again, and names it."""
    try:
        call(*job)
        torch.cuda.synchronize()
    except Exception:
        return
    finally:
        torch.cuda.empty_cache()


def call_once(problem: Problem, name: str) -> None:
    """One forward without gradients and one with, then a backward."""
    attention = contestants.prepare(name, problem)
    q, k, v, dO = problem.tensors(grad=True)
    with torch.no_grad():
        attention(q, k, v)
    torch.autograd.grad(attention(q, k, v), (q, k, v), dO)
