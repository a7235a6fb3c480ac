"""Guards around a call of the examined function: guard elements in memory past the end of arrays, and a time limit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

LIMIT = 60  # seconds that one call may take
FENCE = -7.0  # value of the guard elements around an output
MAKERS = ("empty", "empty_like", "zeros", "zeros_like", "full", "full_like")  # functions of torch that allocate
METHODS = ("new_empty", "new_zeros", "new_full")  # methods of a tensor that allocate


class Endless(BaseException):
    """Raised if a call does not return in time. The examination cannot continue after this error."""


def guard(size: int) -> int:
    """Return the number of guard elements on each side of an array, enough for a function that confuses heads."""
    return (1 << 14) + 2 * size


@contextmanager
def fenced(library: str, unset: float | None) -> Iterator[list]:
    """Append guard elements to every tensor that torch allocates inside the `with` block, and yield the list of guards.

    If `unset` is not None, also fill tensors created by torch.empty with this value. If `library` is not torch, the
    list stays empty.
    """
    ends: list = []
    if library != "torch":
        yield ends
        return
    import torch

    full, new_empty = torch.full, torch.Tensor.new_empty

    def with_guards(make: Callable) -> Callable:
        def allocate(*args: Any, **options: Any) -> Any:
            made = make(*args, **options)
            is_memory = type(made) is torch.Tensor and made.device.type != "meta"
            if not is_memory or not made.is_floating_point() or not made.is_contiguous():
                return made
            memory = full((made.numel() + guard(made.numel()),), FENCE, dtype=made.dtype, device=made.device)
            ends.append(memory[made.numel() :])
            copy = new_empty(made, 0).set_(memory.untyped_storage(), 0, made.shape, made.stride())
            copy.copy_(made.detach()) if "empty" not in make.__name__ or unset is None else copy.fill_(unset)
            return copy.requires_grad_(made.requires_grad)

        return allocate

    functions: Any = {name: with_guards(getattr(torch, name)) for name in MAKERS}
    methods: Any = {name: with_guards(getattr(torch.Tensor, name)) for name in METHODS}
    with patch.multiple(torch, **functions), patch.multiple(torch.Tensor, **methods):
        yield ends


@contextmanager
def time_limit(name: str) -> Iterator[None]:
    """Raise Endless if the `with` block, a call of the function `name`, takes longer than LIMIT seconds.

    The limit works only in the main thread of a Unix process.
    """

    def stop(*_: object) -> None:
        raise Endless(f"one call of {name} did not return within {LIMIT} seconds")

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return
    begun, before = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    left = signal.alarm(LIMIT)  # seconds until an alarm that the caller has set
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.alarm(max(1, left - int(time.monotonic() - begun)) if left else 0)
