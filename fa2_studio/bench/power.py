"""SM clock and power of the GPU, read beside a measurement by a process of nvidia-smi."""

import statistics
import subprocess
import threading
import time
from contextlib import suppress

EVERY = 100  # milliseconds from reading to reading


class Meter:
    """While it is open, a thread notes what nvidia-smi says; without nvidia-smi it notes nothing."""

    def __init__(self, command: list[str] | None = None):
        self.command, self.process, self.noted = command, None, []  # noted: seconds, MHz, watts

    def __enter__(self) -> "Meter":
        with suppress(OSError):
            self.process = subprocess.Popen(self.command or smi(), stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self.listen, daemon=True).start()
        return self

    def __exit__(self, *failure) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait()

    def listen(self) -> None:
        """Note every line that holds two numbers."""
        for line in self.process.stdout:
            with suppress(ValueError):
                clock, watts = map(float, line.split(","))
                self.noted.append((time.perf_counter(), clock, watts))

    def between(self, first: float, last: float) -> list[float]:
        """Median MHz and watts from one time of `time.perf_counter` to another; empty where nothing was noted."""
        found = [(clock, watts) for when, clock, watts in list(self.noted) if first <= when <= last]
        return [statistics.median(kind) for kind in zip(*found, strict=True)]


def smi() -> list[str]:
    """nvidia-smi, which says again and again how the running GPU is."""
    import torch

    gpu = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = ["--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]
    return ["nvidia-smi", "-i", gpu, *query, "-lms", str(EVERY)]
