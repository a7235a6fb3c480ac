"""Attacks on the sandbox and the grader: an attacker gets no points, other students lose none, and nothing leaks."""

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'fa2-lab[course]'")
from checks import meter
from course_class import FIRST, LONG_LIMITS, SHORT_LIMITS, code_cell, grade_books, needs_limits, submission, write_book

from fa2_studio.course import channel, command, grade, grade_notebook, notebooks, results, sandbox, sandbox_package
from fa2_studio.course.notebooks import find_assignment, grade_id, source_notebook

pytestmark = needs_limits
no_sandbox = "no sandbox here: bubblewrap is missing or not allowed"
needs_sandbox = pytest.mark.skipif(not sandbox.sandbox_kind(), reason=no_sandbox)

SEARCH_DISK = """import json, os, sys
found = []
for root in ("/", *sys.path):
    for place, folders, names in os.walk(root):
        if place.startswith(("/proc", "/sys")):
            folders[:] = []
        found += [os.path.join(place, n) for n in names if n.startswith(("1_online", "secret", "online_s", "keys"))]
        found += [place] if place.endswith(("/notebooks/assignments", "/graded", "/.ssh")) else []
found = [f for f in found if "site-packages" not in f and not f.startswith(("/usr/", "/proc/", sys.base_prefix))]
for path in found:
    try:
        text = open(path).read()
        for cell in json.loads(text)["cells"] if path.endswith("ipynb") else [{"source": text}]:
            exec("".join(cell["source"]), globals())
    except Exception:
        pass
assert not found, found"""
READ_ENVIRONMENT = """import os
left = {k: v for k, v in os.environ.items() if "SECRET" in k or "secret" in v}
assert not left, left"""
FORGE_VALUES = """import fa2_studio.course.channel as channel
real = channel.send
def send(stream, message, *more):
    real(stream, message | dict(value=99.0, points=99.0) if "value" in message else message, *more)
channel.send = send"""
FORGE_MESSAGES = """import json, os
text = json.dumps({"dict": [["token", ""], ["value", 99.0], ["points", 99.0]]}).encode()
for number in range(3, 64):
    try:
        os.write(number, text + b"\\n")
    except OSError:
        pass"""
SEE_PROCESSES = """import os
others = [p for p in os.listdir("/proc") if p.isdigit() and int(p) > 2 and int(p) != os.getpid()]
assert not others, others
import ctypes
for pid in (1, os.getppid()):
    assert ctypes.CDLL(None).ptrace(16, pid, 0, 0) != 0"""
USE_NETWORK = """import socket
for place in (("10.0.0.1", 80), ("169.254.169.254", 80)):
    s = socket.socket()
    s.settimeout(1)
    s.connect(place)"""
WRITE_ANYWHERE = """import os
for place in ("/tmp", "/dev/shm", "/var/tmp", "/usr", "/etc", os.path.dirname(__import__("numpy").__file__), "/"):
    try:
        open(os.path.join(place, "left-behind"), "w").write("x")
    except OSError:
        continue
    raise AssertionError(place)"""
SPIN_ON_ALL_CORES = """import os, time
try:
    os.sched_setaffinity(0, range(os.cpu_count()))
except OSError:
    pass
for _ in range(58):
    if not os.fork():
        while True:
            pass
until = time.monotonic() + 100
while time.monotonic() < until:
    time.sleep(0.1)"""
FORK_AND_ALLOCATE = """import os, time
for _ in range(8):
    if not os.fork():
        kept = bytearray(300 * 2**20)
        time.sleep(1000)
time.sleep(1000)"""
START_DAEMON = """import os, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(1000)"""
FILL_DISK = """for n in range(10_000):
    open(f"{n}", "wb").write(b"x" * 2**20)"""
FORK_BOMB = """import os
while True:
    try:
        os.fork()
    except OSError:
        pass"""
TAKE_ALL_MEMORY = "def merge(a, b):\n    kept = []\n    while True:\n        kept.append(np.ones(10**7))"
IGNORE_ALARM = """import signal
signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
while True:
    pass"""
LONG_LIST = "def merge(a, b):\n    return [0.0] * 10**7"
HUGE_ARRAY = "def finalize(m, l, o):\n    return np.zeros(2**26), l"
DEEP_LIST = "def update(*a):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x"

GAINING = {  # nothing is solved: 0 is what they deserve
    "the solution, a secret or others' work from this disk": SEARCH_DISK,
    "messages with other values": FORGE_VALUES,
    "forged answers on every file, and checks replaced": FORGE_MESSAGES
    + "\nimport checks\nchecks.softmax = type('C', (), dict(update=lambda *a, **k: 99))()",
}
TOO_LARGE = dict(update=DEEP_LIST, merge=LONG_LIST, finalize=HUGE_ARRAY)
LOOK_AROUND = (READ_ENVIRONMENT, SEE_PROCESSES, WRITE_ANYWHERE, USE_NETWORK)
HARMING = {  # all is solved; (own cells, answers, the least it gets, the most, part of a remark, whether it can wait)
    "looking around": (LOOK_AROUND, {}, 12, 12, "Operation not permitted", False),
    "answers that are too large": ((), TOO_LARGE, 3, 3, "own: 3 points", False),
    "58 spinning children on every core": ((SPIN_ON_ALL_CORES,), {}, 0, 12, "", False),
    "memory of a whole family": ((FORK_AND_ALLOCATE,), {}, 0, 12, "a cell of your own", False),
    "a daemon": ((START_DAEMON,), {}, 12, 12, "", True),
    "a full disk": ((FILL_DISK,), {}, 12, 12, "No space left", True),
    "a fork bomb": ((FORK_BOMB,), {}, 0, 12, "", True),
    "all the memory": ((), {"merge": TAKE_ALL_MEMORY}, 9, 9, "", True),
    "deaf to the alarm": ((IGNORE_ALARM,), {}, 12, 12, "could not be interrupted", True),
    "every file closed": (("import os; os.closerange(0, 256)",), {}, 12, 12, "the process ended", True),
    "a segmentation fault": (("import ctypes; ctypes.string_at(0)",), {}, 12, 12, "the process ended", True),
}
FIRST_ATTACKS = [name for name, (*_, waits) in HARMING.items() if not waits]
LATER_ATTACKS = [name for name in HARMING if name not in FIRST_ATTACKS]
EXHAUSTIVE_ATTACKS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in LATER_ATTACKS]


def grade_attackers(names: list[str], folder: Path) -> dict:
    """Return the results of these attackers, graded two at a time, with neighbours among them whose work is right."""
    books = {name: submission(own=(text,), solved=False) for name, text in GAINING.items() if names is FIRST_ATTACKS}
    for name in names:
        books[name] = submission(own=HARMING[name][0], answers=HARMING[name][1])
        books |= {f"beside {name}": submission()} if not HARMING[name][2] else {}
    (folder / "secret.txt").write_text("secret words")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLASS_SECRET", "secret words")
        patch.setattr(tempfile, "tempdir", str(folder))  # so that its processes differ from those of other tests
        return grade_books(folder, books, sandbox.sandbox_kind(), SHORT_LIMITS)


@pytest.fixture(scope="module")
def first_results(tmp_path_factory):
    return grade_attackers(FIRST_ATTACKS, tmp_path_factory.mktemp("attacked"))


@pytest.fixture(scope="module")
def later_results(tmp_path_factory):
    return grade_attackers(LATER_ATTACKS, tmp_path_factory.mktemp("later"))


@needs_sandbox
@pytest.mark.parametrize("name", GAINING)
def test_attack_gains_no_points(name, first_results):
    assert first_results[name].score == 0, first_results[name].page
    assert not [s for s in first_results[name].sentences if "AssertionError" in s]


@needs_sandbox
@pytest.mark.parametrize("name", FIRST_ATTACKS + EXHAUSTIVE_ATTACKS)
def test_attack_does_not_harm_other_students(name, request):
    _, _, least, most, remark, waits = HARMING[name]
    graded = request.getfixturevalue("later_results" if waits else "first_results")
    got = graded[name]
    assert least <= got.score <= most and remark in "; ".join(got.sentences), got.sentences
    assert not [s for s in got.sentences if "AssertionError" in s], got.sentences
    if (neighbour := graded.get(f"beside {name}")) is not None:
        assert neighbour.score == 12, neighbour.sentences


@needs_sandbox
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="this system does not list what runs")
def test_no_student_process_survives_grading(first_results, tmp_path_factory):
    time.sleep(0.5)
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    own_folder = bytes(tmp_path_factory.getbasetemp()) + b"/attacked"
    assert not [c for c in commands if b"course.worker" in c and own_folder in c]


def test_feedback_page_has_a_size_limit(tmp_path):
    """Two thousand cells that print much are one page of a fifth of a megabyte."""
    graded = grade_notebook.Graded("ada", "1_online_softmax", {"test_a": 1.0})
    for _ in range(2000):
        graded.show("code", "a cell", "x" * 1000, "y" * 20_000)
    graded.show("code", "the last cell", "z" * 10**7, "")
    results.write_record(graded, tmp_path)
    assert (tmp_path / "feedback" / "ada" / "1_online_softmax.html").stat().st_size < 2**20


def test_grader_chip_refuses_large_and_unlisted_operations():
    """Ten bytes of a request must not become gigabytes in the grader."""
    own_meter = meter.Meter(4, 4)
    chip = meter.Chip(own_meter, [meter.Placed("Q", np.zeros((1500, 8)), own_meter, "i")])

    def block(*request) -> dict:
        return {"block": chip.do([], *request, {})["block"][0]}

    rows = block("getitem", ({"block": 0}, slice(0, 1500)))
    wide, tall = block("reshape", (rows, 1, -1)), block("reshape", (rows, -1, 1))
    requests = [
        ("add.__call__", wide, tall), ("where", True, wide, tall), ("matmul.__call__", tall, wide),
        ("outer", tall, tall),
        ("full_like", wide, 0, None, None, True, (10**5, 10**5)), ("broadcast_to", wide, (10**5, 12_000)),
        ("concatenate", [wide] * 1000), ("getitem", rows, np.zeros(10**6, np.int8)), ("stack", (wide,) * 1000),
        ("frompyfunc", wide, 0), ("load", "/etc/passwd"), ("add.outer", tall, wide), ("astype", wide, "O"),
        ("astype", wide, "U1000000"), ("tofile", wide, "/etc/passwd"), ("add.at", wide, 0, 1),
    ]  # fmt: skip
    for name, *args in requests:
        with pytest.raises((ValueError, TypeError)):
            chip.do([], name, tuple(args), {})


def test_grade_without_a_sandbox_stops_with_instructions(tmp_path, monkeypatch, capsys):
    write_book(submission(), tmp_path / "in" / "ada")
    monkeypatch.setattr(sandbox, "sandbox_kind", lambda: "")
    assert command.main(["grade", str(tmp_path / "in"), "--only", "1", "--out", str(tmp_path / "out")]) == 1
    assert "install bubblewrap" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_student_code_never_runs_as_root(tmp_path, monkeypatch):
    """In a platform's container it is another user, or it is not run."""
    monkeypatch.setattr(sandbox, "can_switch_user", lambda *_: False)
    monkeypatch.setattr(sandbox.os, "getuid", lambda: 0)
    with pytest.raises(sandbox.NotReady, match="no other user"):
        sandbox.SandboxProcess(tmp_path, SHORT_LIMITS, "user")


SETUP = """import ctypes, fcntl, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
drop = lambda place: os.path.join(place, "drop")
places = ["/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/stage", os.path.expanduser("~"), "/run", "/proc/sys/kernel"]
places += [os.path.join(p, "__pycache__") for p in (os.path.dirname(os.__file__), *sys.path)] + sys.path
x86 = os.uname().machine == "x86_64"
keys = (248, 250) if x86 else (217, 219)
lock, byte = open(os.__file__), struct.pack("hhqqi", fcntl.F_RDLCK, 0, 0, 1, 0)
def attempt(act, *args):
    try:
        return act(*args)
    except (OSError, AttributeError, ValueError):
        return -1
"""
LEAVE_DATA = """for ring in (-2, -3, -4, -5):
    libc.syscall(keys[0], b"user", b"drop", b"word", 4, ring)
libc.shmget(4660, 4096, 0o1666), libc.msgget(4660, 0o1666), libc.semget(4660, 1, 0o1666)
attempt(lambda: libc.mq_open(b"/drop", 0o102, 0o666, None))
spoken = attempt(socket.socket, socket.AF_UNIX)
attempt(lambda: (spoken.bind("\\0drop"), spoken.listen()))
attempt(fcntl.flock, lock, fcntl.LOCK_SH)
attempt(fcntl.fcntl, lock, fcntl.F_SETLK, byte)
for place in places:
    attempt(lambda: open(drop(place), "w").write("word"))"""
FIND_DATA = """found = [f"ring {r}" for r in (-2, -3, -4, -5) if libc.syscall(keys[1], 10, r, b"user", b"drop", 0) > 0]
kept = dict(shm=libc.shmget(4660, 0, 0), msg=libc.msgget(4660, 0), sem=libc.semget(4660, 0, 0))
found += [name for name, number in kept.items() if number >= 0]
found += ["mq"] if attempt(lambda: libc.mq_open(b"/drop", 0)) >= 0 else []
listening = attempt(socket.socket, socket.AF_UNIX)
found += ["socket"] if attempt(lambda: listening.connect("\\0drop")) is None else []
vsock = attempt(socket.socket, 40)
found += ["vsock"] if vsock != -1 else []
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    found += ["flock"]
except OSError:
    pass
asked = attempt(fcntl.fcntl, lock, fcntl.F_GETLK, struct.pack("hhqqi", fcntl.F_WRLCK, 0, 0, 1, 0))
found += ["lock"] if asked != -1 and struct.unpack("hhqqi", asked)[0] != fcntl.F_UNLCK else []
found += [place for place in places if attempt(lambda: open(drop(place)).read()) == "word"]
found += ["user namespace"] if attempt(lambda: libc.unshare(0x10000000)) == 0 else []
assert not found, found"""


def error_in_a_sandbox(package: Path, *cells: str, processes=None) -> str:
    """Return what the last of these cells raised in a sandbox, which is then closed, or appended to `processes`."""
    process = sandbox.SandboxProcess(package, SHORT_LIMITS, sandbox.sandbox_kind(), FIRST.needs)
    try:
        replies = [process.ask({"do": "cell", "source": cell}, 60.0) for cell in cells]
        assert not replies[-1].get("late")
        return " ".join(map(str, replies[-1].get("error", ())))
    finally:
        process.close() if processes is None else processes.append(process)


@needs_sandbox
def test_notebooks_cannot_leave_data_for_each_other():
    """By none of the ways that the kernel has, neither beside it nor after it."""
    with grade.staged_packages([FIRST]) as staged:
        package, processes = staged[FIRST.name], []
        error_in_a_sandbox(package, SETUP, LEAVE_DATA, processes=processes)
        beside = error_in_a_sandbox(package, SETUP, FIND_DATA)
        processes[0].close()
        assert (beside, error_in_a_sandbox(package, SETUP, FIND_DATA)) == ("", "")


@needs_sandbox
@pytest.mark.parametrize("assignment", notebooks.ASSIGNMENTS, ids=lambda assignment: assignment.name)
def test_no_sandbox_contains_the_examiner_or_the_errata(assignment, tmp_path):
    """A test that calls the examiner catches every bug of 5, and its attention is an answer to 2, 3, 4 and 7."""
    package = sandbox_package.write_sandbox_package(tmp_path, assignment)
    files = {path.relative_to(tmp_path).parts for path in package.rglob("*.py")}
    assert files and not [path for path in files if path[:2] in (("fa2_lab", "examine"), ("fa2_lab", "errata"))]


@needs_sandbox
def test_a_sandbox_without_triton_cannot_import_torch():
    """Autograd and finished attention are no NumPy; no folder of packages is left to look in."""
    reach = """import glob, sys
for top in (sys.prefix, sys.base_prefix, "/usr", "/usr/local"):
    sys.path += glob.glob(f"{top}/lib*/python3*/*-packages")
import torch"""
    with grade.staged_packages([FIRST]) as staged:
        assert "ModuleNotFoundError" in error_in_a_sandbox(staged[FIRST.name], reach)


@needs_sandbox
def test_sandbox_hides_the_checkout_in_any_folder(tmp_path, monkeypatch):
    home = tmp_path / "my-packages" / "dist-packages-of-mine" / "notebooks" / "assignments"
    monkeypatch.setattr(sys, "path", [*sys.path, str(home), str(home.parents[1])])
    monkeypatch.setenv("PYTHONPATH", str(home))
    home.mkdir(parents=True)
    environment = sandbox.sandbox_environment(tmp_path / "package", "", ()).values()
    words = [*sandbox.bubblewrap_command(tmp_path / "package"), *environment]
    assert not [word for word in words if "my-packages" in word]


def test_clean_sandbox_process_runs_as_another_user(tmp_path, monkeypatch):
    """In a platform's container too: what a student's process leaves behind is not its to read, nor its to import."""
    users = []

    def popen(words, **_):
        users.append(words[words.index("--reuid") + 1])
        raise NotADirectoryError

    monkeypatch.setattr(sandbox, "can_switch_user", lambda *_: True)
    monkeypatch.setattr(sandbox.os, "chown", lambda *_: None)
    monkeypatch.setattr(sandbox.subprocess, "Popen", popen)
    for clean in (False, True):
        with pytest.raises(NotADirectoryError):
            sandbox.SandboxProcess(tmp_path, SHORT_LIMITS, "user", clean=clean)
    assert len(set(users)) == 2


def test_sandbox_imports_nothing_from_writable_folders():
    with grade.staged_packages([FIRST]) as staged:
        process = sandbox.SandboxProcess(staged[FIRST.name], LONG_LIMITS, "")
        cell = "open('left.py', 'w').write('x = 1')\nimport left"
        error = process.ask({"do": "cell", "source": cell}, 60.0)["error"]
        process.close()
    assert error[0] == "ModuleNotFoundError"


def test_unprivileged_sandbox_limits_processes():
    assert "--nproc=64" in sandbox.limit_command(SHORT_LIMITS, uid=0, counts_apart=True)


def test_grader_memory_limit_does_not_bind_the_student_process():
    """On a machine with a GPU, both processes have a limit on private memory, and only root can raise a hard limit."""
    words = "import resource; from fa2_studio.course import grade_notebook; grade_notebook.limit_own_memory()"
    words += "; print(*resource.getrlimit(resource.RLIMIT_DATA))"
    call = [sys.executable, "-c", words]
    soft, hard = subprocess.run(call, capture_output=True, text=True, check=True).stdout.split()
    assert (int(soft), int(hard)) == (2**30, resource.getrlimit(resource.RLIMIT_DATA)[1])


GROWING_TEST = """import os, time
def test_merge(merge):
    for _ in range(7):
        if not os.fork():
            kept = bytearray(300 * 2**20)
            time.sleep(1000)
    state = np.zeros(2), np.ones(2), np.zeros((2, 2))
    until = time.monotonic() + 20
    while time.monotonic() < until:
        merge(state, state)
"""
BROADCASTING_TEST = """def test_merge(merge):
    for n in (20_000, 5000):
        a, b = ((np.zeros(x), np.ones(x), np.zeros((n, 1))) for x in ((n, 1), (1, n)))
        try:
            merge(a, b)
        except ValueError:
            pass
    assert False
"""
FLOOD_CHANNEL = """import json, os, threading
line = json.dumps([[]] * 500_000).encode() + b"\\n"
def flood():
    while True:
        for number in range(3, 20):
            try:
                os.write(number, line)
            except OSError:
                pass
threading.Thread(target=flood, daemon=True).start()"""


@needs_sandbox
def test_notebook_that_exhausts_the_grader_affects_itself_only(tmp_path):
    """Memory that grows while messages come, arrays that broadcast to gigabytes, and a flood of messages."""
    books = {"grows": submission(answers={"own": GROWING_TEST}), "beside": submission()}
    books |= {"wide": submission(answers={"own": BROADCASTING_TEST})}
    books |= {"flood": submission(own=(FLOOD_CHANNEL,)), "beside too": submission()}
    peak, stop = [0.0], threading.Event()

    def watch():
        while not stop.wait(0.1):
            for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if b"course.grade_notebook" in cmdline.read_bytes():
                        pages = int((cmdline.parent / "statm").read_text().split()[1])
                        peak[0] = max(peak[0], pages * 4096 / 2**20)

    threading.Thread(target=watch, daemon=True).start()
    got = grade_books(tmp_path, books, sandbox.sandbox_kind(), sandbox.Limits(10, 60, 1500))
    stop.set()
    assert got["beside"].score == got["beside too"].score == 12 and peak[0] < 1200
    assert got["grows"].got["test_own"] == got["wide"].got["test_own"] == 0
    assert "more than 1,500 MB" in " ".join(got["grows"].sentences)


@needs_sandbox
def test_notebook_stops_at_its_time_limit(tmp_path):
    start = time.monotonic()
    limits = sandbox.Limits(cell_seconds=3, notebook_seconds=8, memory_mb=1500)
    books = {"deaf": submission(own=(IGNORE_ALARM,) * 12)}
    graded = grade_books(tmp_path, books, sandbox.sandbox_kind(), limits)["deaf"]
    assert time.monotonic() - start < 8 + 25 and graded.score == 0


@needs_sandbox
def test_endless_kernel_costs_its_step_only(tmp_path):
    """And torch's import costs nobody a step, though it may take longer than a step has."""
    pytest.importorskip("triton", reason="Triton is not installed")
    endless = source_notebook(find_assignment("4"))
    (cell,) = [c for c in endless.cells if grade_id(c) == "one_tile"]
    loop = "    while tl.sum(row) > 0:\n        row += 1\n    tl.store(O +"
    answers = {"one_tile": cell.source.replace("    tl.store(O +", loop)}
    limits = sandbox.Limits(cell_seconds=8, notebook_seconds=120)
    books = {"ada": submission("4", answers=answers)}
    graded = grade_books(tmp_path, books, sandbox.sandbox_kind(), limits, name="4")["ada"]
    assert graded.got == {"test_one_tile": 0, "test_loop": 4, "test_full": 5}, graded.sentences


def test_results_are_written_as_they_arrive(tmp_path, monkeypatch):
    """A notebook that takes long keeps nobody waiting."""
    arrived = []

    def grade_one(one, *_):
        time.sleep(2.0 if one.student == "a" else 0.0)
        return grade_notebook.Graded(one.student, one.assignment.name)

    monkeypatch.setattr(grade, "grade_one", grade_one)
    tasks = [(grade.Submission(name, FIRST), 0, "") for name in "abc"]
    settings = grade.GradingSettings(jobs=2, trust=True)
    grade.grade_all(tasks, {}, settings, lambda task, _: arrived.append(task[0].student))
    assert arrived == ["b", "c", "a"]


FORGED_LAUNCH = """import numpy as np
import checks.probes_triton as p
def launch(text, name, programs, tensors, outputs, options):
    Q, K, V = (np.asarray(x, float) for x in tensors.values())
    S = Q @ K.T * options["scale_log2"] * 0.6931471805599453
    P = np.exp(S - S.max(1, keepdims=True))
    products = {(options["B_r"], options["d"], options["B_c"], "ieee"): 1}
    return dict(O=P / P.sum(1, keepdims=True) @ V), dict(products=products), []
p.launch = launch
p.texts = lambda kernel: dict(kernels={"one_tile": "import os"}, constants={})"""


def test_kernel_launch_replaced_by_numpy_scores_nothing(tmp_path):
    """Probes beside a student's code may be replaced: what they hand over is text, and it is run in another process."""
    pytest.importorskip("triton", reason="Triton is not installed")
    graded = grade_books(tmp_path, {"eve": submission("4", own=(FORGED_LAUNCH,), solved=False)}, "", name="4")["eve"]
    assert graded.score == 0 and "not a single function under @triton.jit" in " ".join(graded.sentences)


ORACLE_TEST = """def test_backward(kernel):
    x = np.arange(6.0).reshape(1, 3, 2) / 3
    y, (O, L) = x + 1e-5 * (np.arange(6) == 2).reshape(x.shape), oracle(x, x, x, False, None)
    slope = np.sum(x * (oracle(x, y, x, False, None)[0] - O)) / 1e-5
    assert abs(kernel.backward(x, x, x, O, L, x)[1][0, 1, 0] - slope) < 1e-3
"""
WRONG_STEPS = {  # the rest is solved; these steps are wrong, and later ones are tried again without them
    "1": {"update": "def update(m, l, o, s, v):\n    return m, l, o"},
    "2": {"row_block": "def row_block(*a):\n    return 0"},
    "3": {"tile_gradients": "def tile_gradients(*a):\n    return 0"},
    "5": {"oracle": "def oracle(*a):\n    return 0, 0", "backward": ORACLE_TEST},
    "6": {"traffic": "def traffic(*a):\n    return 0"},
}


def solution_lines(name: str, wrong: dict) -> set[str]:
    """Return the lines that are only in the solutions which a student replaced by something wrong."""
    book = source_notebook(find_assignment(name))
    wrong_lines = {line.strip() for c in book.cells if grade_id(c) in wrong for line in c.source.splitlines()}
    others = {line.strip() for c in book.cells if grade_id(c) not in wrong for line in c.source.splitlines()}
    return {line for line in wrong_lines - others if len(line) > 12 and not line.startswith(("###", "def ", '"""'))}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_solution_lines_are_never_sent_to_the_student_process(name, tmp_path, monkeypatch):
    """A step is tried again with what right functions return: nothing else of them leaves the grader."""
    sent, real, path = [], channel.send, write_book(submission(name, answers=WRONG_STEPS[name]), tmp_path / "in")

    def send(stream, message, *more):
        sent.append(json.dumps(message, default=repr))
        real(stream, message, *more)

    monkeypatch.setattr(sandbox.channel, "send", send)
    with grade.staged_packages([find_assignment(name)]) as staged:
        package = staged[find_assignment(name).name]
        graded = grade_notebook.grade_notebook(
            source_notebook(find_assignment(name)),
            notebooks.read_submission(path),
            lambda _: sandbox.SandboxProcess(package, LONG_LIMITS, ""),
            LONG_LIMITS,
        )
    assert any(kind == "again" for kind, *_ in graded.page), "a step was tried again"
    secret = solution_lines(name, WRONG_STEPS[name])
    assert secret and not [line for line in secret if json.dumps(line)[1:-1] in "".join(sent)]


LOAD_TWICE = """
        earlier = kept.setdefault(len(K), K)
        if earlier is not K:
            earlier[col:end]
"""


def test_tensor_kept_from_an_earlier_run_cannot_bypass_the_trace(tmp_path):
    """Each key is loaded a second time, by a tensor that was kept: the meter of this run has to see it."""
    book, line = source_notebook(find_assignment("2")), "        k_j, v_j = K[col:end], V[col:end]\n"
    (cell,) = [c for c in book.cells if line in c.source]
    cell.source = f"kept = {{}}\n{cell.source.replace(line, line + LOAD_TWICE)}"
    graded = grade_books(tmp_path, {"eve": book}, "", name="2")["eve"]
    assert graded.got["test_row_block"] == 4 and graded.got["test_traffic"] < 3, graded.sentences


FREE_EARLY = """import checks.probes as p
def there(self, x, real=p.Asking.there):
    self.freed.extend(y.number for y in ([x] if type(x) is p.Block else []))
    return real(self, x)
p.Asking.there = there"""
LEAVE_METER = """import numpy as np
import checks.probes as p
def call(self, name, *args, real=p.Asking.__call__, **named):
    if name.startswith("divide"):
        args = [x.__array__() if isinstance(x, p.Block) else x for x in args]
        return args[0] / args[1]
    return real(self, name, *args, **named)
p.Asking.__call__ = call"""


@pytest.mark.parametrize("own, kept", [(FREE_EARLY, dict(traffic=0, operations=0, memory=0)),
                                       (LEAVE_METER, dict(operations=1.5, memory=1))])  # fmt: skip
def test_student_process_cannot_silence_the_trace(own, kept, tmp_path):
    """Blocks given back early are gone. Numbers taken off the chip hide no division, and nothing that is large."""
    graded = grade_books(tmp_path, {"eve": submission("2", own=(own,))}, "", name="2")["eve"]
    assert {step: graded.got[f"test_{step}"] for step in kept} == kept, graded.got


def test_forged_points_and_tests_in_a_submission_are_ignored(tmp_path):
    forged = submission(solved=False)
    for cell in forged["cells"]:
        marks = cell["metadata"].get("nbgrader", {})
        if marks.get("grade"):
            cell["source"], marks["points"] = "99.0", 99
    forged_test = code_cell("99.0", grade_id="test_update", grade=True, points=99, locked=True, solution=False)
    forged["cells"].insert(0, forged_test)
    graded = grade_books(tmp_path, {"eve": forged}, "")["eve"]
    assert graded.score == 0 and graded.full == 12
