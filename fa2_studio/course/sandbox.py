"""The sandbox around a process that runs a student's notebook. Each notebook is run in a separate sandbox.

SandboxProcess describes the kinds of sandbox. The usual kind, bubblewrap, blocks the network. It lets the process read
only Python and a part of the package, and lets it write only to the folder /stage, which is in memory. In every kind,
the process is limited to one core, and its memory, processes, files, time and message size are limited. The filter in
seccomp.py makes the kernel refuse the system calls with which notebooks could exchange data.
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
PACKAGE_FOLDERS = ("site-packages", "dist-packages")  # the names of folders with installed packages
STAGE_MB = 256  # size of /stage, the folder in memory that holds all files written by a notebook
MAX_PROCESSES = 64  # the most processes of one notebook, counting each thread as a process
MAX_FILE_BYTES = 100 * 2**20  # the most bytes of one file written by a notebook
GRACE_SECONDS = 3.0  # seconds after a request's time is over until a process that has not answered is killed
START_SECONDS = (
    300.0  # seconds allowed for starting a process, because importing torch takes a minute on a busy machine
)
NO_SANDBOX = (
    "there is no sandbox for students' code on this machine, so install bubblewrap (Linux: apt-get install bubblewrap)."
    " If it is installed but may not start, as for a plain user on Ubuntu 24.04, run grade with sudo (INSTRUCTOR.md). "
    "With --trust, grade uses no sandbox"
)


class NotReady(Exception):
    """Raised if a sandbox does not start. This is the machine's fault, so no student loses points."""


@dataclass(frozen=True)
class Limits:
    """The time and memory that one notebook may use."""

    cell_seconds: float = 60.0
    notebook_seconds: float = 300.0
    memory_mb: int = 4096


# The kind of sandbox, and the command that starts it ----------------------------------------------------------------


@cache
def sandbox_kind() -> str:
    """Return the kind of sandbox that works here: "bwrap", or "" if bubblewrap is missing or cannot start."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        command = [*bubblewrap_command(Path(sys.prefix)), "true"]
        return "bwrap" if subprocess.run(command, capture_output=True, timeout=30).returncode == 0 else ""
    return ""


def describe_sandbox(kind: str) -> str:
    """Return the description of a sandbox kind that `grade` prints."""
    if not kind:
        return "none, so students' code runs under your account"
    if kind == "user":
        return "a separate user in this container"
    return f"bubblewrap, {'started by root, with a user for each notebook' if os.getuid() == 0 else 'started by you'}"


def bubblewrap_command(package: Path, needs: tuple[str, ...] = ()) -> list[str]:
    """Return the beginning of a command line that runs the rest of it in a bubblewrap sandbox.

    Python, the folder `package` and the folders of the packages named in `needs` are visible inside the sandbox.
    Without `needs`, NumPy is the only installed package. If root starts the sandbox, it keeps only the right to become
    another user.
    """
    namespaces = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try"
    rights = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID"
    shut = f"{namespaces} {rights}" if os.getuid() == 0 else "--unshare-all"
    command = ["bwrap", *shut.split(), "--die-with-parent", "--new-session", "--clearenv"]
    seen = [
        "/usr",
        "/etc/ld.so.cache",
        "/etc/alternatives",
        sys.base_prefix,
        sys.prefix,
        *map(str, site_folders(needs)),
    ]
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
    for place in dict.fromkeys(place for s in seen if Path(s) != package for place in hidden_folders(Path(s))):
        command += ["--size", "4096", "--tmpfs", str(place), "--remount-ro", str(place)]
    if not needs:  # NumPy alone
        folders = dict.fromkeys(str(p.resolve()) for s in seen if Path(s) != package for p in package_folders(Path(s)))
        command += [word for place in folders for word in ("--size", "4096", "--tmpfs", place)]
        for path in sorted(path for site in site_folders(()) for path in site.glob("numpy*")):
            command += ["--ro-bind", str(path), str(path)]
        command += [word for place in folders for word in ("--remount-ro", place)]
    command += ["--proc", "/proc", "--dev", "/dev"]
    command += ["--perms", "0777", "--size", str(STAGE_MB * 2**20), "--tmpfs", "/stage"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/"]


def site_folders(needs: tuple[str, ...]) -> list[Path]:
    """Return the package folders that contain NumPy and the packages named in `needs`."""
    specs = (find_spec(name) for name in ("numpy", *needs))
    return list(dict.fromkeys(Path(spec.origin).resolve().parents[1] for spec in specs if spec and spec.origin))


def package_folders(seen: Path) -> list[Path]:
    """Return the package folders below a folder that is visible in the sandbox. One of them may contain torch."""
    if seen.name in PACKAGE_FOLDERS:
        return [seen]
    return [
        p
        for name in PACKAGE_FOLDERS
        for p in sorted(seen.glob(f"lib*/python3*/{name}")) + sorted(seen.glob(f"local/lib/python3*/{name}"))
    ]


def hidden_folders(seen: Path) -> list[Path]:
    """Return the parts of a folder that the sandbox must hide because they contain solutions.

    These are this checkout, and fa2_lab, fa2_studio and checks if they are installed in the folder.
    """
    places = [seen / name for name in ("fa2_lab", "fa2_studio", "checks")] + [PROJECT]
    return [p for p in places if p.is_dir() and p.is_relative_to(seen) and p != seen]


def pin_command(core: int) -> list[str]:
    """Return the words that, placed before a command, pin it and all its children to one core.

    Graders that run at the same time begin with different cores, because they count from their process numbers.
    """
    if not shutil.which("taskset"):
        return []  # this system is not Linux
    cores = sorted(os.sched_getaffinity(0))
    return ["taskset", "-c", str(cores[(os.getpid() + core) % len(cores)])]


def limit_command(limits: Limits, uid: int, counts_apart: bool) -> list[str]:
    """Return the words that, placed before a command, make it and all its children observe `limits`.

    Unless `uid` is 0, the command also runs as that user. `counts_apart` means that the kernel counts the sandbox's
    processes separately from the user's other processes, which makes it possible to limit their number.
    """
    if not shutil.which("prlimit"):
        return []  # this system is not Linux
    # CUDA reserves far more address space than it uses, so only private memory is counted on a GPU machine.
    memory = "data" if os.path.exists("/dev/nvidiactl") else "as"
    words = f"nice -n 5 prlimit --{memory}={limits.memory_mb * 2**20}"
    words += f" --fsize={MAX_FILE_BYTES} --core=0 --nofile=256 --cpu={int(limits.notebook_seconds) + 60}"
    if uid or counts_apart:  # otherwise, the user's other processes would count, so _watch() counts instead
        words += f" --nproc={MAX_PROCESSES}"
    if uid:
        words += f" setpriv --reuid {uid} --regid {uid} --clear-groups --no-new-privs"
    return words.split()


def sandbox_environment(package: Path, home: str, needs: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables of a student's process, which inherits none of ours."""
    own = dict(PATH="/usr/local/bin:/usr/bin:/bin", LANG="C.UTF-8")
    own |= dict(PYTHONPATH=os.pathsep.join(map(str, [package, *site_folders(needs)])))
    own |= dict.fromkeys(("HOME", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR", "TRITON_HOME"), home)
    own |= dict(MPLBACKEND="Agg", PYTHONDONTWRITEBYTECODE="1", PYTHONUTF8="1")
    own |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return own | {"TRITON_INTERPRET": "1"}


# Messages to a process in its sandbox -------------------------------------------------------------------------------


class SandboxProcess:
    """One process in a sandbox. It imports the packages named in `needs` before it answers the first request.

    `kind` is "bwrap" for bubblewrap, "user" for a different user without bubblewrap (on a platform that already
    provides a container), or "" for no sandbox. A `clean` process never runs a student's code, and does not share a
    user with the processes that do. Raises NotReady if the process does not start.
    """

    def __init__(self, package: Path, limits: Limits, kind: str, needs: tuple[str, ...] = (), clean: bool = False):
        self.limits, self.far, self.kind, self.why = limits, [], kind, ""
        self.home = "" if kind == "bwrap" else tempfile.mkdtemp(prefix="fa2-course-")
        self.errors = tempfile.TemporaryFile()
        uid = 100_000 + 2 * (os.getpid() % 25_000) + clean if can_switch_user(kind, package) else 0
        if kind == "user" and os.getuid() == 0 and not uid:
            raise NotReady(
                "the sandbox could not be started: no other user can read this Python, and root may do everything"
            )
        if self.home and uid:
            os.chown(self.home, uid, uid)
        apart = kind == "bwrap" and not uid and tuple(map(int, platform.release().split(".")[:2])) >= (5, 14)
        beforehand = [*needs, *(["checks.probes_triton"] if clean and needs else [])]
        run = [*limit_command(limits, uid, apart), sys.executable, "-m", "fa2_studio.course.worker", *beforehand]
        env = sandbox_environment(package, self.home or "/stage", needs)
        if kind == "bwrap":
            inside = [word for key, value in env.items() for word in ("--setenv", key, value)]
            run = [*bubblewrap_command(package, needs), *inside, *run]
        self.process = subprocess.Popen(
            run, env=env, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            start_new_session=True,
        )  # fmt: skip
        self.arrived: queue.Queue = queue.Queue(2)  # a process that sends more messages than this must wait
        for listen in (self._listen, self._watch):
            threading.Thread(target=listen, daemon=True).start()
        try:
            is_filtered = self._next(time.monotonic() + START_SECONDS)["filtered"]
        except Stopped as failure:
            late = f"it was not ready after {START_SECONDS:.0f} s" if self.process.poll() is None else ""
            said = self._last_words() or late or str(failure)
            self.close()
            raise NotReady(f"the sandbox could not be started: {said}") from failure
        if kind and not is_filtered:
            self.close()
            raise NotReady(
                "the sandbox could not be started: this system has no seccomp filters, or its processor is unknown"
            )

    def ask(self, request: dict, seconds: float) -> dict:
        """Send a request and return the reply. Raises Stopped if the process ends or no reply comes within `seconds`.

        Until the reply comes, the student's code may call the functions and objects among the request's arguments as
        often as it likes.
        """
        token, self.far = secrets.token_hex(8), []  # objects from earlier requests can no longer be called
        try:
            channel.send(self.process.stdin, request | {"token": token, "seconds": seconds}, self._refer)
            until = time.monotonic() + seconds + GRACE_SECONDS
            while True:
                reply = self._next(until)
                if not isinstance(reply, dict) or reply.get("token") != token:
                    continue  # ignore messages of an earlier request, and messages forged by the student's code
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
        """Return the number by which the student's code may call `thing`, a function or an object of the grader."""
        self.far.append(thing)
        return len(self.far) - 1

    def _do(self, question: dict, until: float) -> dict:
        """Call the function or public method requested by the student's code, and return its value or error."""
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
        """Put each message from the process into `arrived`, in a separate thread so that `_next` can time out."""
        try:
            while True:
                self.arrived.put(channel.receive(self.process.stdout))
        except Exception as end:  # any error counts as the end of the process, because no further message can be read
            self.arrived.put(end)

    def _next(self, until: float):
        """Return the next message. Raises Stopped if the process ends or no message comes before the time `until`."""
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
                raise self._late()  # even if more messages are waiting
            return message

    def _watch(self) -> None:
        """End the process if it and its children together use too much memory or are too numerous.

        The kernel's limits cannot do this, because they apply to each process individually. This runs in a separate
        thread.
        """
        while self.process.poll() is None and not self.why:
            memory, processes = memory_and_threads(self.process.pid)
            if memory > self.limits.memory_mb:
                self.why = f"it used more than {self.limits.memory_mb:,} MB of memory"
            if processes > 2 * MAX_PROCESSES:
                self.why = f"it started more than {MAX_PROCESSES} processes"
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
        """Return the last line that the process wrote to stderr."""
        with contextlib.suppress(OSError, ValueError):
            self.errors.seek(0)
            lines = self.errors.read(10_000).decode(errors="replace").strip().splitlines()
            return lines[-1][:200] if lines else ""
        return ""


def can_switch_user(kind: str, package: Path) -> bool:
    """Return True if a student's code can run as another user, who owns no files but can read Python's files."""
    if kind not in ("bwrap", "user") or os.getuid() != 0:
        return False
    places = [Path(p).resolve() for p in (sys.prefix, sys.base_prefix, package)] if kind == "user" else []
    return all(p.stat().st_mode & 0o005 == 0o005 for place in places for p in (place, *place.parents))


def memory_and_threads(pid: int) -> tuple[float, int]:
    """Return the total memory in MB and the total number of threads of a process and all its children."""
    parents, used = {}, {}
    for entry in Path("/proc").glob("[0-9]*") if os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = (int(fields[21]) * 4096 / 2**20, int(fields[17]))
    processes = {pid}
    while more := {p for p, parent in parents.items() if parent in processes} - processes:
        processes |= more
    usage = [used[p] for p in processes if p in used]
    return sum(m for m, _ in usage), sum(n for _, n in usage)
