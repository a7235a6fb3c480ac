"""A GPU and a host that are nothing but clocks, so that a bench's numbers can be known beforehand."""

from types import SimpleNamespace


class Clocks:
    """Seconds of the host, and the second until which the GPU has work; how long the GPU had nothing to do."""

    def __init__(self):
        self.host = self.gpu = self.idle = 0.0

    def work(self, seconds: float, launch: float = 0.0) -> None:
        """The host needs `launch` to hand over work that keeps the GPU busy for some seconds."""
        self.host += launch
        self.idle += max(0.0, self.host - self.gpu)
        self.gpu = max(self.gpu, self.host) + seconds

    def wait(self, until: float | None = None) -> None:
        """The host waits for the GPU."""
        self.host = max(self.host, self.gpu if until is None else until)

    def put_in_place(self, monkeypatch, torch, time) -> "Clocks":
        """Let torch.cuda and the host's clock be these."""
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.work(cycles / 1e9), raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: self.wait())
        monkeypatch.setattr(time, "perf_counter", lambda: self.host)
        return self


class Event(SimpleNamespace):
    """What torch.cuda.Event is to the GPU's clock."""

    def __init__(self, clocks: Clocks):
        super().__init__(clocks=clocks, when=0.0)

    def record(self) -> None:
        self.when = max(self.clocks.gpu, self.clocks.host)

    def synchronize(self) -> None:
        self.clocks.wait(self.when)

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.when - self.when)
