"""Record the GPU's SM clock and power with nvidia-smi, and note whether the power limit held the clock down."""

import statistics
import subprocess
import threading
import time
from contextlib import suppress

INTERVAL_MS = 100  # milliseconds between readings
POWER_CAP = 0x4  # the driver's bit that is set while the power limit holds the clock down


class PowerMeter:
    """A context manager whose thread collects readings from nvidia-smi. Without nvidia-smi, there are no readings."""

    def __init__(self, command: list[str] | None = None):
        self.command, self.process, self.readings = command, None, []  # (seconds, MHz, watts, 0 or 1)

    def __enter__(self) -> "PowerMeter":
        with suppress(OSError):
            self.process = subprocess.Popen(self.command or nvidia_smi_command(), stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self.listen, daemon=True).start()
        return self

    def __exit__(self, *failure) -> None:
        if self.process:
            self.process.terminate()
            self.process.wait()

    def listen(self) -> None:
        """Record the reading from each line that contains the clock, the power and the reasons for a reduced clock."""
        for line in self.process.stdout:
            with suppress(ValueError):
                clock, watts, reasons = line.split(",")
                capped = bool(int(reasons, 16) & POWER_CAP)
                self.readings.append((time.perf_counter(), float(clock), float(watts), float(capped)))

    def between(self, begin: float, end: float) -> list[float]:
        """Return the medians of the readings between two values of `time.perf_counter`, or [] if there are no readings.

        The medians are those of the clock in MHz, the power in watts, and a flag that is 1 while the power limit holds
        the clock down and 0 otherwise.
        """
        readings = [reading for when, *reading in list(self.readings) if begin <= when <= end]
        return [statistics.median(kind) for kind in zip(*readings, strict=True)]


def nvidia_smi_command() -> list[str]:
    """Return the nvidia-smi command that prints a reading of the current GPU every INTERVAL_MS milliseconds."""
    import torch

    gpu = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    query = ["--query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.active", "--format=csv,noheader,nounits"]
    return ["nvidia-smi", "-i", gpu, *query, "-lms", str(INTERVAL_MS)]
