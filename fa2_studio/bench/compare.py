"""Time the implementations whose results are right, and record for each of the others why it was not timed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from tqdm import tqdm

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import implementations
from fa2_studio.bench.peers import dense
from fa2_studio.bench.problem import (
    Problem,
    TensorSequence,
    largest_error,
    relative_error_of_gradients,
    relative_error_of_O,
    sampled_gradients,
)
from fa2_studio.bench.protocol import Timing, measure_kernels, result_or_reason
from fa2_studio.bench.recording import problem_text

DIRECTIONS = ("forward", "backward")
# The largest ‖x − truth‖ / ‖truth‖ allowed in bf16, where x is O, dQ, dK or dV. Wrong results are far above it.
TOLERANCE = 2e-2

Prepared = Callable[[], object] | str  # the call to time, or the reason why it cannot be timed

# A suite ------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A record without its rows, and the jobs that measure them, with and without pauses."""

    record: Record
    jobs: Sequence[partial] = ()
    sustained: Sequence[partial] = ()


def run_plan(plan: Plan, keep: Callable[[Record], object]) -> Record:
    """Run the jobs under a progress bar. After Ctrl-C, keep the rows measured so far, and list the rest as missing.

    `keep` is called with the record after each row, so the rows that it saves survive even if the process is killed.
    """
    record, jobs = plan.record, [*plan.jobs, *plan.sustained]
    record.missing = [describe_job(job) for job in jobs]
    try:
        for n, job in enumerate(tqdm(jobs, desc=f"bench {record.suite}", unit="row", disable=None)):
            row = measure_or_report(job)
            (record.rows if n < len(plan.jobs) else record.sustained).append(row)
            del record.missing[0]
            keep(record)
    except KeyboardInterrupt:
        pass
    return record


def measure_or_report(job: partial) -> Measurement:
    """Return a row, which has no numbers if the job fails, for example because the inputs do not fit into memory."""
    row = result_or_reason(job)  # a failure must not lose the rows measured before
    return row_without_numbers(job, {"everybody": row}) if isinstance(row, str) else row


def row_without_numbers(job: partial, failed: dict[str, str]) -> Measurement:
    """Return a job's row without any numbers."""
    problem, *direction = job.args
    return Measurement(problem.as_dict(), *(direction[:1] or ["forward"]), {}, failed)


def describe_job(job: partial) -> str:
    """Return a short description of a job that was not reached."""
    return problem_text(row_without_numbers(job, {}))


# A row --------------------------------------------------------------------------------------------------------


def prepare_all(prepare_by_name: Mapping[str, Callable]) -> tuple[dict, dict[str, str]]:
    """Call each function, and return {name: result}, and {name: reason} for the functions that failed.

    A function fails if it raises an exception or returns a string. In the latter case, the string is the reason.
    """
    prepared = {name: result_or_reason(prepare) for name, prepare in prepare_by_name.items()}
    failed = {name: why for name, why in prepared.items() if isinstance(why, str)}
    return {name: call for name, call in prepared.items() if name not in failed}, failed


def compare(
    problem: dict,
    direction: str,
    prepare_by_name: Mapping[str, Callable[[], Prepared]],
    flops: float = 0.0,
    timing: Callable[[dict], dict] = measure_kernels,
    unit: str = "ms",
) -> Measurement:
    """Time the implementations whose results are right, and return one row with all times and failures."""
    calls, failed = prepare_all(prepare_by_name)
    timings = timing(calls)
    failed |= {name: why for name, why in timings.items() if isinstance(why, str)}
    timed = {name: t for name, t in timings.items() if isinstance(t, Timing)}
    values = {name: t.numbers(scale=1e3 if unit.startswith("µs") else 1.0) for name, t in timed.items()}
    chip = {name: list(t.chip) for name, t in timed.items() if t.chip}
    return Measurement(problem, direction, values, failed, unit, flops=flops, chip=chip)


def prepare_checked_calls(
    problem: Problem, direction: str, names: Sequence[str], tensors: TensorSequence
) -> dict[str, Callable]:
    """Return {name: function that prepares an implementation, checks its result and returns the call to time}."""
    mask = dict(causal=problem.causal) | problem.mask(tensors[0].device)
    truth = sampled_gradients(*tensors, **mask) if direction != "forward" else None

    def errors(O: torch.Tensor, gradients: TensorSequence) -> list[float]:
        of_gradients = [relative_error_of_gradients(gradients, truth)] if gradients else []
        return [relative_error_of_O(O, *tensors[:3], **mask), *of_gradients]

    def prepared(name: str) -> Prepared:
        return checked_call(implementations.prepare(name, problem), tensors, direction, errors)

    return {name: partial(prepared, name) for name in names}


def checked_call(attention: dense.Attend, tensors: TensorSequence, direction: str, errors: Callable) -> Prepared:
    """Return the call to time, or the reason that its result is wrong according to errors(O, gradients).

    If dO is among the tensors, the gradients are checked as well.
    """
    O, gradients = attention(*tensors[:3]), ()
    if len(tensors) == 4:
        gradients = torch.autograd.grad(O, tensors[:3], tensors[3], retain_graph=True)
    return wrong_result_reason(errors(O, gradients)) or timed_call(attention, direction, tensors, O)


def wrong_result_reason(errors: Sequence[float]) -> str:
    """Return a message with the largest error if it exceeds TOLERANCE, or "" if the result is right."""
    most = largest_error(errors)
    return "" if most <= TOLERANCE else f"wrong: error {most:.1e}"


def timed_call(
    attention: dense.Attend, direction: str, tensors: TensorSequence, O: torch.Tensor | None = None
) -> Callable:
    """Return the call to time: the forward pass, the backward pass of a stored forward pass, or both."""
    (q, k, v, *dO), (bare, context) = tensors, dense.call_and_context(attention)
    free = [x.detach() for x in (q, k, v)]  # detached, so nothing is saved for a backward pass
    calls = dict(
        forward=lambda: bare(*free),
        backward=lambda: torch.autograd.grad(O, (q, k, v), dO, retain_graph=True),
        both=lambda: torch.autograd.grad(bare(q, k, v), (q, k, v), dO),
    )
    return dense.WithContext(calls[direction], context)


def measure_ceilings() -> dict[str, float]:
    """Measure the speed of a large matmul and of a large copy on this GPU, and return both."""
    (gemm, flops), (copy, moved) = dense.gemm_call(), dense.copy_call()
    timings = measure_kernels(dict(gemm=gemm, copy=copy))
    return {"GEMM TFLOP/s": flops / timings["gemm"].median / 1e9, "copy TB/s": moved / timings["copy"].median / 1e9}
