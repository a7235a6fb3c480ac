"""A contest: who gives right answers is timed, who does not is named with the reason; and the rows of a whole suite."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from tqdm import tqdm

from fa2_lab.records import Measurement, Record
from fa2_studio.bench import contestants
from fa2_studio.bench.peers import dense
from fa2_studio.bench.problem import Problem, Several, error, gradient_error, gradients_by_definition, worst
from fa2_studio.bench.protocol import Timing, measure, tried
from fa2_studio.bench.results import label

DIRECTIONS = ("forward", "backward")
TOLERANCE = 2e-2  # of ‖x − truth‖ / ‖truth‖ in bf16, x = O, dQ, dK or dV: anything wrong is far above

Prepared = Callable[[], object] | str  # the call to time, or why there is none

# A suite ------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """A record without its rows, and the jobs that measure them, with pauses and without."""

    record: Record
    jobs: Sequence[partial] = ()
    sustained: Sequence[partial] = ()


def collect(plan: Plan, keep: Callable[[Record], object]) -> Record:
    """Run the jobs under a progress bar. Ctrl-C keeps what is measured so far, with the rest as missing.

    `keep` is handed the record after each row: what it keeps stays even if the process is killed.
    """
    record, jobs = plan.record, [*plan.jobs, *plan.sustained]
    record.missing = [described(job) for job in jobs]
    try:
        for n, job in enumerate(tqdm(jobs, desc=f"bench {record.suite}", unit="row", disable=None)):
            row = attempt(job)
            (record.rows if n < len(plan.jobs) else record.sustained).append(row)
            del record.missing[0]
            keep(record)
    except KeyboardInterrupt:
        pass
    return record


def attempt(job: partial) -> Measurement:
    """A row; one without numbers where not even the inputs and the check fit into memory, or anything else fails."""
    row = tried(job)  # what was measured before must not be lost
    return empty(job, {"everybody": row}) if isinstance(row, str) else row


def empty(job: partial, failed: dict[str, str]) -> Measurement:
    """The row of a job, without numbers."""
    problem, *direction = job.args
    return Measurement(problem.as_dict(), *(direction[:1] or ["forward"]), {}, failed)


def described(job: partial) -> str:
    """A job that was not reached, in a few words."""
    return label(empty(job, {}))


# A row --------------------------------------------------------------------------------------------------------


def all_tried(prepares: Mapping[str, Callable]) -> tuple[dict, dict[str, str]]:
    """{contestant: what it has prepared}, and {contestant: why it has not}."""
    prepared = {name: tried(prepare) for name, prepare in prepares.items()}
    failed = {name: why for name, why in prepared.items() if isinstance(why, str)}
    return {name: call for name, call in prepared.items() if name not in failed}, failed


def contest(
    where: dict,
    direction: str,
    prepares: Mapping[str, Callable[[], Prepared]],
    flops: float = 0.0,
    timing: Callable[[dict], dict] = measure,
    unit: str = "ms",
) -> Measurement:
    """One row: the contestants that give right answers, timed in turn."""
    calls, failed = all_tried(prepares)
    timings = timing(calls)
    failed |= {name: why for name, why in timings.items() if isinstance(why, str)}
    timed = {name: t for name, t in timings.items() if isinstance(t, Timing)}
    values = {name: t.numbers(scale=1e3 if unit.startswith("µs") else 1.0) for name, t in timed.items()}
    chip = {name: list(t.chip) for name, t in timed.items() if t.chip}
    return Measurement(where, direction, values, failed, unit, flops=flops, chip=chip)


def ready(problem: Problem, direction: str, names: Sequence[str], tensors: Several) -> dict[str, Callable]:
    """What prepares each contestant for a problem and looks whether its answer is right."""
    mask = dict(causal=problem.causal) | problem.mask(tensors[0].device)
    truth = gradients_by_definition(*tensors, **mask) if direction != "forward" else None

    def errors(O: torch.Tensor, gradients: Several) -> list[float]:
        of_gradients = [gradient_error(gradients, truth)] if gradients else []
        return [error(O, *tensors[:3], **mask), *of_gradients]

    def prepared(name: str) -> Prepared:
        return checked(contestants.prepare(name, problem), tensors, direction, errors)

    return {name: partial(prepared, name) for name in names}


def checked(attention: dense.Attend, tensors: Several, direction: str, errors: Callable) -> Prepared:
    """The call to time, or how wrong its answer is: errors(O, gradients), where dO is given with gradients."""
    O, gradients = attention(*tensors[:3]), ()
    if len(tensors) == 4:
        gradients = torch.autograd.grad(O, tensors[:3], tensors[3], retain_graph=True)
    return refused(errors(O, gradients)) or call_of(attention, direction, tensors, O)


def refused(errors: Sequence[float]) -> str:
    """How wrong an answer is, where it is."""
    most = worst(errors)
    return "" if most <= TOLERANCE else f"wrong: error {most:.1e}"


def call_of(attention: dense.Attend, direction: str, tensors: Several, O: torch.Tensor | None = None) -> Callable:
    """The call to time: forward, backward from a kept forward, or both."""
    (q, k, v, *dO), (bare, context) = tensors, dense.apart(attention)
    free = [x.detach() for x in (q, k, v)]  # nothing is kept for a backward
    calls = dict(
        forward=lambda: bare(*free),
        backward=lambda: torch.autograd.grad(O, (q, k, v), dO, retain_graph=True),
        both=lambda: torch.autograd.grad(bare(q, k, v), (q, k, v), dO),
    )
    return dense.Within(calls[direction], context)


def ceilings() -> dict[str, float]:
    """What this GPU reaches in this run on a large product and a large copy."""
    (gemm, flops), (copy, moved) = dense.gemm_call(), dense.copy_call()
    timings = measure(dict(gemm=gemm, copy=copy))
    return {"GEMM TFLOP/s": flops / timings["gemm"].median / 1e9, "copy TB/s": moved / timings["copy"].median / 1e9}
