"""Stand-ins for a GPU and a host that are only clocks, so that a test knows the times that the bench should measure."""

from types import SimpleNamespace


class Clocks:
    """Clocks in seconds: the host's time, the time until which the GPU has work, and the GPU's idle time so far."""

    def __init__(self):
        self.host = self.gpu = self.idle = 0.0

    def work(self, seconds: float, launch: float = 0.0) -> None:
        """Launch work that keeps the GPU busy for `seconds`. The launch takes `launch` seconds of the host's time."""
        self.host += launch
        self.idle += max(0.0, self.host - self.gpu)
        self.gpu = max(self.gpu, self.host) + seconds

    def wait(self, until: float | None = None) -> None:
        """Let the host wait for all work of the GPU, or until a time."""
        self.host = max(self.host, self.gpu if until is None else until)

    def put_in_place(self, monkeypatch, torch, time) -> "Clocks":
        """Replace the functions of torch.cuda and the host's clock by these clocks."""
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.work(cycles / 1e9), raising=False)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: self.wait())
        monkeypatch.setattr(time, "perf_counter", lambda: self.host)
        return self


class Event(SimpleNamespace):
    """A stand-in for torch.cuda.Event that records the time of these clocks."""

    def __init__(self, clocks: Clocks):
        super().__init__(clocks=clocks, when=0.0)

    def record(self) -> None:
        self.when = max(self.clocks.gpu, self.clocks.host)

    def synchronize(self) -> None:
        self.clocks.wait(self.when)

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.when - self.when)
