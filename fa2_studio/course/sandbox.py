"""The box around a student's process: what it may use, what it may see, and how it ends.

Where the system has them: namespaces of its own (processes, network, mounts), a user without rights, everything
read-only but a small home in memory. Everywhere: limits on memory, processes, files, output and time.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
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
from pathlib import Path

import numpy as np

import fa2_studio.course.channel as channel
import fa2_studio.course.walls as walls

KEPT = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SYSTEMROOT", "CUDA_VISIBLE_DEVICES")
FILE_BYTES = 100 * 2**20  # of one file that a notebook writes
HOME_BYTES = 256 * 2**20  # of all files together, where the home is in memory
PROCESSES = 64  # threads count
GRACE = 3.0  # seconds after its time is up before a process is ended
START = 180.0  # seconds that a process may take to be ready: the first import on a busy machine takes a minute
GPU = os.path.exists("/dev/nvidiactl")
NAMESPACES = {"processes": 0x20000000, "network": 0x40000000, "files": 0x00020000, "ipc": 0x08000000}
NEW_USER = 0x10000000
BOX = ("user", "network", "files", "processes", "signals")  # what a full box keeps apart


@dataclass(frozen=True)
class Limits:
    """What one notebook may use."""

    cell_seconds: float = 60.0
    notebook_seconds: float = 300.0
    memory_mb: int = 4096  # 0: no limit
    walls: str = "namespaces"  # or what stands in for them, "landlock"; or "none", limits alone


class Late(Exception):
    """A request took longer than it may."""


class Died(Exception):
    """The student's process ended."""


# On the grader's side -------------------------------------------------------------------------------------------------


class Room:
    """One student's process in its box. `hidden` are folders that it must not see."""

    def __init__(self, stage: Path, limits: Limits, hidden: tuple[str, ...] = ()):
        self.limits, self.far, self.folder = limits, [], tempfile.mkdtemp(prefix="fa2-course-")
        os.chmod(self.folder, 0o755)
        home = Path(self.folder, "home")
        home.mkdir()
        become_subreaper()
        box = dict(stage=str(stage), home=str(home), hidden=list(hidden), walls=limits.walls)
        box |= dict(uid=100_000 + os.getpid() % 50_000)
        box |= dict(memory_mb=limits.memory_mb, seconds=limits.notebook_seconds)
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fa2_studio.course.sandbox", json.dumps(box)],
            cwd=self.folder,
            env=environment(stage, home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
        )
        self.arrived: queue.Queue = queue.Queue(2)  # who sends more than is asked for has to wait
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.confined = self._next(time.monotonic() + START)["confined"]
        except (Died, Late, KeyError, TypeError) as failure:
            said = self._last_words()
            self.close()
            late = f"it was not ready after {START:.0f} s" if isinstance(failure, Late) else failure
            raise Died(f"the box could not be started: {said or late}") from failure

    def ask(self, request: dict, seconds: float) -> dict:
        """The reply to a request. The student's code may ask back in between, as often as it likes."""
        token = secrets.token_hex(8)
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
            raise Died(self._last_words()) from gone

    def close(self) -> None:
        """End the process and everything that it started."""
        with contextlib.suppress(OSError):
            self.process.kill()
        end_descendants(self.process)
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(OSError, ValueError):
                stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)

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
            with deadline(until - time.monotonic()), np.errstate(all="ignore"):
                return {"value": act(*question["args"], **question["kwargs"])}
        except Late:
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
        """The next message, or Late, or Died."""
        while True:
            try:
                message = self.arrived.get(timeout=0.25)
            except queue.Empty:
                if self.limits.memory_mb and resident_mb(self.process.pid) > self.limits.memory_mb:
                    raise Died(f"it used more than {self.limits.memory_mb:,} MB of memory") from None
                if size_of(self.folder) > HOME_BYTES:
                    raise Died(f"it wrote more than {HOME_BYTES // 2**20} MB of files") from None
                if time.monotonic() > until:
                    raise Late from None
                if self.process.poll() is not None and self.arrived.empty():
                    raise Died(self._last_words()) from None
                continue
            if isinstance(message, Exception):
                raise Died(self._last_words() or str(message))
            if time.monotonic() > until:
                raise Late  # however many more there are
            return message

    def _last_words(self) -> str:
        """The last line that the process wrote about itself."""
        with contextlib.suppress(OSError, ValueError):
            self.errors.seek(0)
            lines = self.errors.read(10_000).decode(errors="replace").strip().splitlines()
            return lines[-1][:200] if lines else ""
        return ""


@contextlib.contextmanager
def deadline(seconds: float):
    """Late if what is done inside, on the grader's side, takes longer."""

    def ring(*_):
        raise Late

    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def environment(stage: Path, home: Path) -> dict[str, str]:
    """Little of the grader's environment, and a home of its own."""
    own = {name: os.environ[name] for name in KEPT if name in os.environ}
    own |= dict.fromkeys(("HOME", "USERPROFILE", "TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR", "TRITON_HOME"), str(home))
    own |= {"PYTHONPATH": str(stage), "MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}
    own |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return own if GPU else own | {"TRITON_INTERPRET": "1"}


# Processes and their children -----------------------------------------------------------------------------------------


def become_subreaper() -> None:
    """Orphans among the descendants become children of this process, so that none gets lost."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def keep_to_oneself() -> None:
    """No other process, of the same user even, may read this one's memory."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def children() -> dict[int, list[int]]:
    """{process: its children}, where the system tells."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if os.path.isdir("/proc/self") else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                found.setdefault(parent, []).append(int(entry.name))
    return found


def descendants(pid: int) -> list[int]:
    tree, found, todo = children(), [], [pid]
    while todo:
        todo += (below := tree.get(todo.pop(), []))
        found += below
    return found


def end_descendants(process: subprocess.Popen, seconds: float = 10.0) -> None:
    """End every process below this one, again and again until none is left."""
    until = time.monotonic() + seconds
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap(process)
        time.sleep(0.005)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)


def reap(process: subprocess.Popen) -> None:
    """Take leave of whatever has ended."""
    process.poll()
    with contextlib.suppress(OSError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def size_of(folder: str) -> int:
    """The bytes of all files below a folder; a home in memory is not seen from outside, and has its own limit."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def resident_mb(pid: int) -> float:
    """The memory that a process and everything below it hold."""
    pages = 0
    for one in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


# Inside -----------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Build the box, then serve in it. The outer process waits for the inner one, which is the student's."""
    box = json.loads(argv[0])
    die_with_parent()
    outgoing, incoming = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nowhere, number)
    confined = shut(box) if box["walls"] == "namespaces" else {}
    if "processes" in confined and (inner := os.fork()):
        incoming.close()
        outgoing.close()
        return os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF
    if confined.get("processes"):
        with contextlib.suppress(OSError):
            mount("proc", "/proc", "proc", 0xE)
    os.chdir(box["home"])
    limit_resources(box, "processes" in confined)
    confined["user"] = leave_rights(box)
    if box["walls"] != "none":
        apart = confined.get("files", False)
        needed = [sys.prefix, sys.base_prefix, box["stage"], *filter(os.path.isdir, sys.path)]
        confined |= {} if apart else walls.landlock(box["home"], needed, box["hidden"])
        confined |= {"network": walls.filtered(apart) or apart}
    die_with_parent()
    os.dup2(nowhere, 2)
    worker = importlib.import_module("fa2_studio.course.worker")
    worker.serve(incoming, outgoing, confined)
    return 0


def shut(box: dict) -> dict:
    """Namespaces of its own, with what it must not see out of sight and everything but its home read-only."""
    wanted = sum(NAMESPACES.values())
    try:
        uid, gid = os.getuid(), os.getgid()
        system("unshare", wanted if uid == 0 else wanted | NEW_USER)
        if uid:
            for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                Path("/proc/self", name).write_text(text)
        mount("none", "/", "", 0x44000)  # private, all of it: nothing of this is seen outside
        mount("home", box["home"], "tmpfs", 0x6, f"size={HOME_BYTES},nr_inodes=10000,mode=0777")
        for folder in map(Path, box["hidden"]):
            hide(folder, [sys.prefix, sys.base_prefix, box["stage"], box["home"]])
        mount("shm", "/dev/shm", "tmpfs", 0x6, f"size={HOME_BYTES},mode=0777")
        read_only("/", True)
        for folder in (box["home"], "/dev/shm"):
            read_only(folder, False)
    except (OSError, AttributeError) as refusal:
        return {"refused": str(refusal)[:200]}
    return {"processes": True, "network": True, "files": True, "signals": True}


def hide(folder: Path, needed: list[str]) -> None:
    """Put an empty folder in a folder's place, with what Python needs of it where it was."""
    inside = [p for p in dict.fromkeys(Path(p).resolve() for p in needed) if p.is_relative_to(folder)]
    if not folder.is_dir() or folder in inside:
        return
    kept = [os.open(p, os.O_PATH | os.O_DIRECTORY) for p in inside]
    mount("hidden", str(folder), "tmpfs", 0x6, "size=1m,mode=0755")
    for number, place in zip(kept, inside, strict=True):
        place.mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{number}", str(place), "", 0x5000)  # bind, with all below it
        os.close(number)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    system("mount", source.encode(), target.encode(), kind.encode() or None, flags, options.encode() or None)


def read_only(folder: str, yes: bool) -> None:
    """Make a folder, and all that is mounted in it, read-only; or a single mount writable again."""
    flags = (ctypes.c_uint64 * 4)(1, 0, 0, 0) if yes else (ctypes.c_uint64 * 4)(0, 1, 0, 0)
    below = 0x8000 if yes else 0
    system("syscall", 442, -100, folder.encode(), below, ctypes.byref(flags), ctypes.c_size_t(32))  # mount_setattr


def system(name: str, *arguments) -> None:
    """A call of the C library, or an OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def limit_resources(box: dict, apart: bool) -> None:
    """Limits that every process in the box inherits. Where the system knows none of them, only time is limited."""
    try:
        import resource
    except ImportError:
        return
    # CUDA reserves far more addresses than it uses: on a GPU machine only private memory is counted.
    memory = resource.RLIMIT_DATA if GPU else resource.RLIMIT_AS
    wanted = {memory: box["memory_mb"] * 2**20} if box["memory_mb"] else {}
    wanted |= {resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 256}
    wanted[resource.RLIMIT_CPU] = int(4 * box["seconds"]) + 60
    if hasattr(resource, "RLIMIT_NPROC"):
        wanted[resource.RLIMIT_NPROC] = PROCESSES + (0 if apart or os.getuid() == 0 else threads_of(os.getuid()))
    for which, value in wanted.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(which, (value, value))


def threads_of(uid: int) -> int:
    """How many threads a user has already: they count towards the limit."""
    count = 0
    for entry in Path("/proc").iterdir() if os.path.isdir("/proc/self") else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                count += len(list((entry / "task").iterdir()))
    return count


def leave_rights(box: dict) -> bool:
    """Become a user that owns nothing, if this is the superuser; give up every capability."""
    became = False
    reachable = all(seen_by_all(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix, box["stage"], box["home"]))
    if hasattr(os, "setresuid") and os.getuid() == 0 and reachable:
        for uid in (box["uid"], 65_534):
            with contextlib.suppress(OSError):
                os.chown(box["home"], uid, uid)
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                became = True
                break
    with contextlib.suppress(OSError, AttributeError):
        system("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        system("capset", ctypes.byref(header), ctypes.byref(nothing))
    return became


def seen_by_all(folder: Path) -> bool:
    """Whether every user may enter a folder."""
    return all(p.stat().st_mode & 0o005 == 0o005 for p in (folder, *folder.parents))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
