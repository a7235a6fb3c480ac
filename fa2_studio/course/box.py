"""The box around a student's process, one for each notebook, made by bubblewrap.

No network, nothing of the disk but Python and a part of the package, all of it read-only; a stage in memory to write
on; one core; limits on memory, processes, files, time and on what comes back. `seal` refuses what is left.
"""

import contextlib
import os
import platform
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from checks.guard import Stopped

from fa2_studio.course import channel
from fa2_studio.course.worker import alarm

PROJECT = Path(__file__).resolve().parents[2]
SITES = ("site-packages", "dist-packages")  # what folders of installed packages are called
STAGE_MB = 256  # of all files that a notebook writes: they live in memory
PROCESSES = 64  # threads count
FILE_BYTES = 100 * 2**20  # of one file that a notebook writes
GRACE = 3.0  # seconds after its time is up before a process is ended
START = 300.0  # seconds that a process may take to be ready: torch's import on a busy machine takes a minute
NO_BOX = (
    "there is no sandbox for students' code on this machine, so install bubblewrap (Linux: apt-get install bubblewrap)."
    " If it is installed but may not start, as for a plain user on Ubuntu 24.04, run grade with sudo (INSTRUCTOR.md). "
    "With --trust, grade uses no sandbox"
)


class NotReady(Exception):
    """A process did not start: the machine's fault, and no student's."""


@dataclass(frozen=True)
class Limits:
    """What one notebook may use."""

    cell_seconds: float = 60.0
    notebook_seconds: float = 300.0
    memory_mb: int = 4096


# Which box, and how it is started -----------------------------------------------------------------------------------


@cache
def kind() -> str:
    """The box that this machine has: "bwrap", or nothing."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [*bubblewrap(Path(sys.prefix)), "true"]
        return "bwrap" if subprocess.run(command, capture_output=True, timeout=30).returncode == 0 else ""
    return ""


def in_words(box: str) -> str:
    """A box as `grade` names it."""
    if not box:
        return "none, so students' code runs under your account"
    if box == "user":
        return "a separate user in this container"
    return f"bubblewrap, {'started by root, with a user for each notebook' if os.getuid() == 0 else 'started by you'}"


def bubblewrap(package: Path, needs: tuple[str, ...] = ()) -> list[str]:
    """bwrap's part of the command: started by root, without rights but that of becoming another user."""
    namespaces = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try"
    rights = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID"
    shut = f"{namespaces} {rights}" if os.getuid() == 0 else "--unshare-all"
    command = ["bwrap", *shut.split(), "--die-with-parent", "--new-session", "--clearenv"]
    seen = ["/usr", "/etc/ld.so.cache", "/etc/alternatives", sys.base_prefix, sys.prefix, *map(str, sites(needs))]
    seen = [p for p in dict.fromkeys([*seen, str(package)]) if Path(p).exists()]
    for parent in dict.fromkeys(str(p) for s in seen for p in reversed(Path(s).parents) if str(p) != "/"):
        command += ["--perms", "0755", "--dir", parent]
    for place in seen:
        command += ["--ro-bind", place, place]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if Path("/", name).is_symlink():
            command += ["--symlink", f"usr/{name}", f"/{name}"]
        elif Path("/", name).is_dir():
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    for place in dict.fromkeys(place for s in seen if Path(s) != package for place in own_parts(Path(s))):
        command += ["--size", "4096", "--tmpfs", str(place), "--remount-ro", str(place)]
    if not needs:  # NumPy alone
        folders = dict.fromkeys(str(p.resolve()) for s in seen if Path(s) != package for p in installed(Path(s)))
        command += [word for place in folders for word in ("--size", "4096", "--tmpfs", place)]
        for path in sorted(path for site in sites(()) for path in site.glob("numpy*")):
            command += ["--ro-bind", str(path), str(path)]
        command += [word for place in folders for word in ("--remount-ro", place)]
    command += ["--proc", "/proc", "--dev", "/dev"]
    command += ["--perms", "0777", "--size", str(STAGE_MB * 2**20), "--tmpfs", "/stage"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/"]


def sites(needs: tuple[str, ...]) -> list[Path]:
    """The folders of installed packages that hold NumPy and what else an assignment needs."""
    found = (find_spec(name) for name in ("numpy", *needs))
    return list(dict.fromkeys(Path(spec.origin).resolve().parents[1] for spec in found if spec and spec.origin))


def installed(seen: Path) -> list[Path]:
    """All folders of installed packages below a visible folder, torch's among them."""
    if seen.name in SITES:
        return [seen]
    return [
        p
        for name in SITES
        for p in sorted(seen.glob(f"lib*/python3*/{name}")) + sorted(seen.glob(f"local/lib/python3*/{name}"))
    ]


def own_parts(seen: Path) -> list[Path]:
    """What of a visible folder holds solutions: this package where it is installed, this checkout."""
    places = [seen / name for name in ("fa2_lab", "fa2_studio", "checks")] + [PROJECT]
    return [p for p in places if p.is_dir() and p.is_relative_to(seen) and p != seen]


def pinned(core: int) -> list[str]:
    """The words that give a command, and all that it starts, one core."""
    if not shutil.which("taskset"):
        return []  # no Linux
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[core % len(cores)])]


def limited(limits: Limits, uid: int, counts_apart: bool) -> list[str]:
    """The words that give a command limits that everything below it inherits, and, unless 0, another user."""
    if not shutil.which("prlimit"):
        return []  # no Linux
    # CUDA reserves far more addresses than it uses: on a GPU machine only private memory is counted.
    memory = "data" if os.path.exists("/dev/nvidiactl") else "as"
    words = f"nice -n 5 prlimit --{memory}={limits.memory_mb * 2**20}"
    words += f" --fsize={FILE_BYTES} --core=0 --nofile=256 --cpu={int(limits.notebook_seconds) + 60}"
    if uid or counts_apart:  # elsewhere the user's other processes would count: they are watched from outside
        words += f" --nproc={PROCESSES}"
    if uid:
        words += f" setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs"
    return words.split()


def environment(package: Path, home: str, needs: tuple[str, ...]) -> dict[str, str]:
    """All that a student's process gets of an environment."""
    own = dict(PATH="/usr/local/bin:/usr/bin:/bin", LANG="C.UTF-8")
    own |= dict(PYTHONPATH=os.pathsep.join(map(str, [package, *sites(needs)])))
    own |= dict.fromkeys(("HOME", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR", "TRITON_HOME"), home)
    own |= dict(MPLBACKEND="Agg", PYTHONDONTWRITEBYTECODE="1", PYTHONUTF8="1")
    own |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return own | {"TRITON_INTERPRET": "1"}


# Talking to it ------------------------------------------------------------------------------------------------------


class Room:
    """One process in its box. `needs` is what it imports beforehand.

    A box is "bwrap"; "user", inside of a platform's container, is another user alone; "" is no box. A `clean` one runs
    no code of the student's, and is another user than those that do.
    """

    def __init__(self, package: Path, limits: Limits, box: str, needs: tuple[str, ...] = (), clean: bool = False):
        self.limits, self.far, self.box, self.why = limits, [], box, ""
        self.home = "" if box == "bwrap" else tempfile.mkdtemp(prefix="fa2-course-")
        self.errors = tempfile.TemporaryFile()
        uid = 100_000 + 2 * (os.getpid() % 25_000) + clean if other_user(box, package) else 0
        if box == "user" and os.getuid() == 0 and not uid:
            raise NotReady(
                "the sandbox could not be started: no other user can read this Python, and root may do everything"
            )
        if self.home and uid:
            os.chown(self.home, uid, uid)
        apart = box == "bwrap" and not uid and tuple(map(int, platform.release().split(".")[:2])) >= (5, 14)
        beforehand = [*needs, *(["checks.probes_triton"] if clean and needs else [])]
        run = [*limited(limits, uid, apart), sys.executable, "-m", "fa2_studio.course.worker", *beforehand]
        env = environment(package, self.home or "/stage", needs)
        if box == "bwrap":
            inside = [word for key, value in env.items() for word in ("--setenv", key, value)]
            run = [*bubblewrap(package, needs), *inside, *run]
        self.process = subprocess.Popen(
            run, env=env, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            start_new_session=True,
        )  # fmt: skip
        self.arrived: queue.Queue = queue.Queue(2)  # who sends more than is asked for has to wait
        for listen in (self._listen, self._watch):
            threading.Thread(target=listen, daemon=True).start()
        try:
            is_sealed = self._next(time.monotonic() + START)["sealed"]
        except Stopped as failure:
            late = f"it was not ready after {START:.0f} s" if self.process.poll() is None else ""
            said = self._last_words() or late or str(failure)
            self.close()
            raise NotReady(f"the sandbox could not be started: {said}") from failure
        if box and not is_sealed:
            self.close()
            raise NotReady(
                "the sandbox could not be started: this system has no seccomp filters, or its processor is unknown"
            )

    def ask(self, request: dict, seconds: float) -> dict:
        """The reply to a request. The student's code may ask back in between, as often as it likes."""
        token, self.far = secrets.token_hex(8), []  # what was lent for an earlier request is out of reach
        try:
            channel.send(self.process.stdin, request | {"token": token, "seconds": seconds}, self._refer)
            until = time.monotonic() + seconds + GRACE
            while True:
                reply = self._next(until)
                if not isinstance(reply, dict) or reply.get("token") != token:
                    continue  # what an earlier request or a stranger left behind
                if "ask" not in reply:
                    return reply
                channel.send(self.process.stdin, self._do(reply, until), self._refer)
        except (BrokenPipeError, ConnectionError) as gone:
            raise self._ended() from gone

    def close(self) -> None:
        """End the process and everything that it started."""
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(OSError, ValueError):
                stream.close()
        if self.home:
            shutil.rmtree(self.home, ignore_errors=True)

    def _refer(self, thing) -> int:
        """The number by which the student's code may call something of the grader's."""
        self.far.append(thing)
        return len(self.far) - 1

    def _do(self, question: dict, until: float) -> dict:
        """Call what the student's code asked for: a function, or a public method of an object."""
        try:
            thing, method = self.far[question["ask"]], question["method"]
            act = getattr(thing, method) if method and not method.startswith("_") else thing
            if not callable(act):
                raise TypeError("this cannot be called")
            with alarm(until - time.monotonic(), self._late()), np.errstate(all="ignore"):
                return {"value": act(*question["args"], **question["kwargs"])}
        except Stopped:
            raise
        except Exception as error:
            return {"error": [type(error).__name__, str(error)[:500]]}

    def _listen(self) -> None:
        """Read messages as they come; a thread of its own, so that waiting for one can end."""
        try:
            while True:
                self.arrived.put(channel.receive(self.process.stdout))
        except Exception as end:  # whatever came: it is the end of this process
            self.arrived.put(end)

    def _next(self, until: float):
        """The next message, or Stopped."""
        while True:
            try:
                message = self.arrived.get(timeout=0.25)
            except queue.Empty:
                if time.monotonic() > until:
                    raise self._late() from None
                if self.process.poll() is not None and self.arrived.empty():
                    raise self._ended() from None
                continue
            if isinstance(message, Exception):
                raise self._ended(self._last_words() or str(message))
            if time.monotonic() > until:
                raise self._late()  # however many more there are
            return message

    def _watch(self) -> None:
        """What limits for one process do not see: memory and number of all of them together. A thread of its own."""
        while self.process.poll() is None and not self.why:
            memory, processes = used_by(self.process.pid)
            if memory > self.limits.memory_mb:
                self.why = f"it used more than {self.limits.memory_mb:,} MB of memory"
            if processes > 2 * PROCESSES:
                self.why = f"it started more than {PROCESSES} processes"
            time.sleep(0.2)
        if self.why:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            getattr(os, "killpg", os.kill)(self.process.pid, getattr(signal, "SIGKILL", signal.SIGTERM))

    def _late(self) -> Stopped:
        return Stopped(f"it did not finish within {self.limits.cell_seconds:g} s and could not be interrupted")

    def _ended(self, why: str = "") -> Stopped:
        why = self.why or why or self._last_words() or "too much memory, exit(), or a crash"
        return Stopped(f"the process ended here ({why})")

    def _last_words(self) -> str:
        """The last line that the process wrote about itself."""
        with contextlib.suppress(OSError, ValueError):
            self.errors.seek(0)
            lines = self.errors.read(10_000).decode(errors="replace").strip().splitlines()
            return lines[-1][:200] if lines else ""
        return ""


def other_user(box: str, package: Path) -> bool:
    """Whether a student's code can run as a user that owns nothing, yet reads Python."""
    if box not in ("bwrap", "user") or os.getuid() != 0:
        return False
    places = [Path(p).resolve() for p in (sys.prefix, sys.base_prefix, package)] if box == "user" else []
    return all(p.stat().st_mode & 0o005 == 0o005 for place in places for p in (place, *place.parents))


def used_by(pid: int) -> tuple[float, int]:
    """MB of memory, and the number of processes and threads, of a process and everything below it."""
    parents, used = {}, {}
    for entry in Path("/proc").glob("[0-9]*") if os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = (int(fields[21]) * 4096 / 2**20, int(fields[17]))
    mine = {pid}
    while more := {p for p, parent in parents.items() if parent in mine} - mine:
        mine |= more
    found = [used[p] for p in mine if p in used]
    return sum(m for m, _ in found), sum(n for _, n in found)
