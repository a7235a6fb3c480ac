"""Time calls with CUDA events in one of three ways: kernel only, sustained or repeated. Each begins with a warm-up.

Kernel-only timing (`measure_kernels`) uses pauses and a cold L2 cache, and alternates between the implementations so
that drift affects them alike. Sustained timing (`measure_sustained`) runs one implementation after another without
pauses. Repeated timing (`measure_repeated`) makes a few calls in a row, so host time counts if it exceeds the GPU's
time. `measure_host_time` measures host time alone.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from fa2_studio.bench.peers.dense import call_and_context
from fa2_studio.bench.power import PowerMeter
from fa2_studio.bench.problem import Missing

REPEATS, WARM_UP = 20, 3
HEAD_START = 3_000_000  # number of clock cycles (about 1.5 ms) that keep the GPU busy while the host launches a call


def describe_kernel_timing(repeats: int, flush: str = "the L2 cache is overwritten") -> str:
    """Return a description of how `measure_kernels` times calls. `flush` says what happens to the L2 cache."""
    return (
        f"We measure {repeats} repetitions with CUDA events, after {WARM_UP} warm-up calls, and report the median. "
        "Each repetition runs the implementations in a new random order, so that no implementation always runs after "
        f"the same one. Before every call, {flush}. Host time does not count, because the GPU is "
        "kept busy until the whole call is in its queue. Before the timing starts, we check every result."
    )


KERNEL_PROTOCOL = describe_kernel_timing(REPEATS)
SUSTAINED_SECONDS = 1.0  # for each implementation
CHUNK_SECONDS, SETTLE_SECONDS = 0.05, 0.3  # of a timed interval, and of the discarded beginning
SUSTAINED_PROTOCOL = (
    "On each problem, the implementations run one after another in random order, and each of them runs for at least "
    f"{SUSTAINED_SECONDS:g} s without a pause. We discard the first {SETTLE_SECONDS:g} s, divide the rest into "
    f"intervals of {1e3 * CHUNK_SECONDS:g} ms, measure these intervals with CUDA events, and report the median. We do "
    "not overwrite the L2 cache. While the calls run, nvidia-smi reports the clock, the power and other values, and we "
    "record their medians. Before the timing starts, we check every result."
)
HOST_ROUNDS, REPEATED_ROUNDS, HOST_WARM_UP, CALLS_IN_A_ROW = 15, 5, 5, 20
REPEATED_PROTOCOL = (
    f"We measure {CALLS_IN_A_ROW} calls in a row with CUDA events, so the host time between the calls counts. In each "
    f"of {REPEATED_ROUNDS} rounds, the implementations take turns in a new random order, and we report the median. "
    "PyTorch's backend is chosen before the clock starts. Before the timing starts, we check every result."
)
HOST_PROTOCOL = (
    f"On the host, we measure how many microseconds a call takes to return. In each turn, we average {CALLS_IN_A_ROW} "
    f"calls in a row, after {HOST_WARM_UP} warm-up calls that do not count. The implementations alternate, and we "
    f"report the median of {HOST_ROUNDS} such turns. PyTorch's backend is chosen before the clock starts. Before the "
    "timing starts, we check every result."
)


@dataclass(frozen=True)
class Timing:
    """A call's time in milliseconds: the median and the quartiles of all repetitions."""

    median: float
    low: float
    high: float
    chip: tuple[float, ...] = ()  # during the call: MHz, watts, and 1 if the power limit held the clock down

    def numbers(self, scale: float = 1.0) -> list[float]:
        """Return the numbers to record: the median and the quartiles, multiplied by `scale`."""
        return [scale * x for x in (self.median, self.low, self.high)]


def l2_overwriting_call() -> Callable[[], object]:
    """Return a call that writes to a large buffer to replace the contents of the L2 cache."""
    return torch.empty(2 * l2_bytes(), dtype=torch.uint8, device="cuda").zero_


def l2_reading_call() -> Callable[[], object]:
    """Return a call that reads a large buffer to replace the contents of the L2 cache.

    If the buffer were written instead, the next call would spend about 12 µs writing the changed lines back.
    """
    return torch.zeros(l2_bytes() // 2, dtype=torch.float32, device="cuda").amax


def measure_kernels(
    calls: dict[str, Callable[[], object]], repeats: int = REPEATS, flushing: Callable = l2_overwriting_call
) -> dict[str, Timing | str]:
    """Return a Timing for each call, or the reason that it could not be timed."""
    failed = {name: reason for name, call in calls.items() if (reason := warm_up(call))}
    names = [name for name in calls if name not in failed]
    flush = flushing()
    events = {name: [] for name in names}
    for name in names_in_random_order(names, repeats):
        flush()
        torch.cuda._sleep(HEAD_START)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[name]()
        end.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    return failed | {name: timing_of([a.elapsed_time(b) for a, b in pairs]) for name, pairs in events.items()}


def names_in_random_order(names: list[str], rounds: int) -> list[str]:
    """Return all names once per round, each round in a random order.

    The order is random because the clock is higher after a pause or after a call that used little power.
    """
    return [name for n in range(rounds) for name in random.Random(n).sample(names, len(names))]


def measure_sustained(calls: dict[str, Callable[[], object]]) -> dict[str, Timing | str]:
    """Return a Timing for each call, or the reason that it failed. Calls run one after another, without pauses."""
    failed = {name: reason for name, call in calls.items() if (reason := warm_up(call))}
    with PowerMeter() as meter:
        order = random.sample([*calls], len(calls))
        timings = {name: failed.get(name) or time_without_pause(calls[name], meter) for name in order}
    return {name: timings[name] for name in calls}


def time_without_pause(call: Callable[[], object], meter: PowerMeter) -> Timing:
    """Time a call in chunks of CHUNK_SECONDS seconds, and return the Timing of one call.

    The host waits for a chunk only after it has launched the next two, so the GPU never runs out of work.
    """
    calls_per_chunk = max(1, round(1e3 * CHUNK_SECONDS / milliseconds_per_call(call, 3)))
    marks, begun = [record_event()], time.perf_counter()
    while time.perf_counter() - begun < SETTLE_SECONDS + SUSTAINED_SECONDS or len(marks) < 4:
        for _ in range(calls_per_chunk):
            call()
        marks.append(record_event())
        if len(marks) > 3:
            marks[-3].synchronize()
    ended = time.perf_counter()
    torch.cuda.synchronize()
    pieces = [first.elapsed_time(last) for first, last in pairwise(marks)]
    settled = [
        piece / calls_per_chunk
        for piece, after in zip(pieces, accumulate(pieces), strict=True)
        if after > 1e3 * SETTLE_SECONDS
    ]
    timing = timing_of(settled) if len(settled) > 1 else timing_of([piece / calls_per_chunk for piece in pieces])
    return replace(timing, chip=tuple(meter.between(begun + SETTLE_SECONDS, ended)))


def measure_repeated(calls: dict[str, Callable[[], object]]) -> dict[str, Timing | str]:
    """Time calls in a row, including their host time, as in a training loop.

    Return a Timing for each call, or the reason that it could not be timed.
    """
    failed = {name: reason for name, call in calls.items() if (reason := warm_up(call))}
    times = {name: [] for name in calls if name not in failed}
    for name in names_in_random_order([*times], REPEATED_ROUNDS):
        bare, context = call_and_context(calls[name])
        with context():
            times[name].append(milliseconds_per_call(bare, CALLS_IN_A_ROW))
    return failed | {name: timing_of(taken) for name, taken in times.items()}


def record_event() -> torch.cuda.Event:
    """Record an event in the GPU's queue and return it."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_per_call(call: Callable[[], object], times: int) -> float:
    """Return the milliseconds per call, averaged over `times` calls in a row."""
    first = record_event()
    for _ in range(times):
        call()
    last = record_event()
    torch.cuda.synchronize()
    return max(first.elapsed_time(last) / times, 1e-3)


def warm_up(call: Callable[[], object], times: int = WARM_UP) -> str:
    """Run a call a few times. Return the reason if it fails, or "" if it succeeds."""

    def runs() -> str:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
        return ""

    return result_or_reason(runs)


def result_or_reason(call: Callable):
    """Return the call's result or, if it fails, a one-line reason that lets the run continue.

    A failure after which this process can no longer use the GPU is raised, because all further calls would also fail.
    """
    try:
        return call()
    except Missing as why:
        return str(why)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "it ran out of memory"
    except Exception as failure:
        if isinstance(failure, torch.AcceleratorError):
            torch.cuda.synchronize()  # raises the failure again if the GPU is no longer usable
        return f"{type(failure).__name__}: {failure}".splitlines()[0][:160]


def timing_of(milliseconds: list[float]) -> Timing:
    """Return the Timing that holds the median and the quartiles of these times."""
    low, _, high = statistics.quantiles(milliseconds, n=4)
    return Timing(statistics.median(milliseconds), low, high)


def l2_bytes() -> int:
    """Return the size of this GPU's L2 cache."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def measure_host_time(
    calls: dict[str, Callable[[], object]],
    rounds: int = HOST_ROUNDS,
    warm_up_calls: int = HOST_WARM_UP,
    in_a_row: int = CALLS_IN_A_ROW,
) -> dict[str, Timing]:
    """Return the host time of a warm call that returns before the GPU is done, as the median over several rounds.

    Each round makes several calls in a row. With one call per round, an implementation would find the processor's
    caches full of the other implementations' code, and would take about twice as long as in a program that repeats the
    call. The context of a call is entered once per round, because PyTorch takes longer to choose a backend than to call
    it, and a program makes this choice only once.
    """
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else int
    times = {name: [] for name in calls}
    for name, call in rounds * [*calls.items()]:
        bare, context = call_and_context(call)
        with context():
            for _ in range(warm_up_calls):
                bare()
            synchronize()
            start = time.perf_counter()
            for _ in range(in_a_row):
                bare()
            times[name].append(1e3 * (time.perf_counter() - start) / in_a_row)
    synchronize()
    return {name: timing_of(taken) for name, taken in times.items()}
