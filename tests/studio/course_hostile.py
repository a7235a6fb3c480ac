"""Submissions that try to be graded better than they are, or to stop, fool or harm the grader; and what each gets.

Each is assignment 1. Those that try to gain have no answer at all, so that 0 is what they deserve; those that try to
harm have all answers, so that 12 is theirs unless they break their own work.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from fa2_studio.course.notebooks import grade_id, is_solution, source, student_version, written

FIRST = next(a for a in written() if a.name == "1_online_softmax")
FILE = f"{FIRST.name}.ipynb"
NAMES = ("update", "merge", "finalize", "own")


def notebook(answers: dict | None = None, own: tuple = (), solved: bool = True) -> dict:
    """The student version with answers, as plain JSON; `own` are code cells put before everything."""
    original = source(FIRST)
    solution = {grade_id(c): c.source for c in original.cells if is_solution(c)}
    book = json.loads(json.dumps(student_version(original)))
    for cell in book["cells"]:
        name = cell["metadata"].get("nbgrader", {}).get("grade_id", "")
        if name in NAMES and (solved or name in (answers or {})):
            cell["source"] = (answers or {}).get(name, solution[name])
    book["cells"] = [code(text) for text in own] + book["cells"]
    return book


def code(text: str, **marks) -> dict:
    metadata = {"nbgrader": marks} if marks else {}
    return dict(cell_type="code", id="own", metadata=metadata, source=text, outputs=[], execution_count=None)


def marked(book: dict, name: str) -> dict:
    return next(c for c in book["cells"] if c["metadata"].get("nbgrader", {}).get("grade_id") == name)


@dataclass
class Hostile:
    """One submission: cells of its own, answers, or another way to write its folder; its score and part of a remark."""

    own: tuple[str, ...] = ()
    answers: dict = field(default_factory=dict)
    solved: bool = True
    write: object = None  # write(home) in place of the notebook
    change: object = None  # change(notebook) before it is written
    score: float = 12.0
    most: float = 0.0  # where chance has a say: the score is between the two
    remark: str = ""  # or one of several: "this|that"
    quick: bool = False  # is part of every test run


def gain(*own: str, **more) -> Hostile:
    """An attempt to get points for nothing."""
    return Hostile(own, solved=False, score=0.0, **more)


def merging(text: str, **more) -> Hostile:
    """All answers but `merge` are right."""
    return Hostile(answers={"merge": text}, **{"score": 9.0} | more)


def testing(text: str, **more) -> Hostile:
    """All answers but the student's own test are right."""
    return Hostile(answers={"own": text}, **{"score": 9.0} | more)


def instead(write, remark: str, **more) -> Hostile:
    """Something else in the place of the notebook."""
    return Hostile(write=write, score=0.0, remark=remark, **more)


def besides(act) -> Hostile:
    """The right notebook, and something beside it."""

    def write(home):
        (home / FILE).write_text(json.dumps(notebook()))
        act(home)

    return Hostile(write=write)


def hand_in(one: Hostile, home: Path) -> None:
    """Write a submission's folder."""
    home.mkdir(parents=True)
    if one.write:
        one.write(home)
        return
    book = notebook(one.answers, one.own, one.solved)
    if one.change:
        book = one.change(book) or book
    (home / FILE).write_text(json.dumps(book))


# Attempts to gain ---------------------------------------------------------------------------------------------------


def copied_test(book):
    book["cells"].append(code("99.0", grade_id="test_update", grade=True, points=99, locked=True, solution=False))
    book["cells"].insert(0, code("99.0", grade_id="test_update", grade=True, points=99, locked=True, solution=False))


def forged_points(book):
    for name in NAMES:
        cell = marked(book, f"test_{name}")
        cell["source"], cell["metadata"]["nbgrader"]["points"] = "99.0", 99
        cell["outputs"] = [{"output_type": "execute_result", "data": {"text/plain": "99.0"}, "metadata": {}}]
    book["metadata"]["fa2_lab"] = {"steps": {"test_update": 99}}


def locked_answers(book):
    for name in NAMES:
        marked(book, name)["metadata"]["nbgrader"] |= {"locked": True, "solution": False, "grade": True, "points": 50}


SEARCH = """import glob, json, os, sys
texts = []
for root in ("/root", "/home", "/tmp", "/work", "/usr", "/opt", os.getcwd(), *sys.path):
    for place, folders, files in os.walk(root):
        texts += [os.path.join(place, f) for f in files if f.startswith("1_online_softmax") or f == "online_softmax.py"]
for path in texts:
    text = open(path).read()
    if "BEGIN SOLUTION" in text or "def merge" in text:
        for cell in json.loads(text)["cells"] if path.endswith("ipynb") else [{"source": text}]:
            try:
                exec("".join(cell["source"]), globals())
            except Exception:
                pass
"""
STACK = """def update(*a):
    import sys, gc
    frame = sys._getframe()
    while frame:
        for name in ("want", "whole"):
            if name in frame.f_locals:
                return frame.f_locals[name]
        frame = frame.f_back
    return [x for x in gc.get_objects() if isinstance(x, tuple) and len(x) == 3][0]
merge = finalize = test_merge = update"""
MEMORY = """import os
found = []
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) != os.getpid():
        try:
            found.append(open(f"/proc/{pid}/maps").read())
            open(f"/proc/{pid}/mem", "rb+")
        except OSError:
            pass
if found:
    def test_merge(merge): raise AssertionError"""
FORGED_FRAMES = """import json, os, struct
text = json.dumps({"dict": [["token", ""], ["value", 99.0], ["points", 99.0]]}).encode()
for number in range(3, 64):
    try:
        os.write(number, struct.pack(">QQ", len(text), 0) + text)
    except OSError:
        pass"""
CHANNEL = """import fa2_studio.course.channel as channel
real = channel.send
def send(stream, message, *more):
    real(stream, message | dict(value=99.0, points=99.0) if "value" in message else message, *more)
channel.send = send"""
DESCRIPTORS = """import os
for place in ("/proc/self/fd", f"/proc/{os.getppid()}/fd"):
    for number in os.listdir(place) if os.access(place, os.R_OK) else ():
        try:
            text = os.read(os.open(f"{place}/{number}", os.O_RDONLY | os.O_NONBLOCK), 10**7).decode()
            exec(text[text.index("def merge"):], globals())
        except (OSError, ValueError):
            pass"""
DEBUGGER = """import ctypes, os
c, found = ctypes.CDLL(None), []
for pid in [os.getppid(), *range(1, 40_000)]:
    if pid != os.getpid() and (c.ptrace(16, pid, 0, 0) == 0 or c.syscall(310, pid, 0, 0, 0, 0, 0) >= 0 and pid > 1):
        found.append(pid)
if found:
    def test_merge(merge): raise AssertionError"""
STARTUP = """import os, site, sys
text = "import fa2_studio.course.worker as w\\nw.Worker.do_call = lambda s, r: {'value': (0, 0, 0)}"
home = os.environ["HOME"]
places = [f"{home}/.ipython/profile_default/startup", f"{home}/profile_default/startup", *sys.path]
places += [site.getusersitepackages(), *site.getsitepackages(), os.getcwd()]
for place in places:
    for name in ("sitecustomize.py", "usercustomize.py", "00-first.py", "numpy.py", "x.pth"):
        try:
            os.makedirs(place, exist_ok=True)
            open(os.path.join(place, name), "w").write(text)
        except OSError:
            pass
os._exit(1)"""
CLOCKED = """import time
def test_merge(merge):
    a = (np.zeros(4), np.ones(4), np.ones((4, 8)))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        merge(a, a)
        times.append(time.perf_counter() - began)
    globals().setdefault("usual", min(times))
    assert min(times) <= usual"""


def own_setup(book):
    cell = code("check = type('C', (), {'__getattr__': lambda s, n: lambda *a, **k: s, 'points': lambda s, m: m})()")
    cell["metadata"] = {"nbgrader": {"grade_id": "setup", "locked": True, "solution": False, "grade": False}}
    book["cells"].insert(0, cell)


GAIN = {
    "a copy of a test prints 99": gain(change=copied_test, quick=True),
    "points and tests forged": gain(change=forged_points, quick=True),
    "answers marked as tests": gain(change=locked_answers),
    "Report.points replaced": gain("from fa2_studio.course.report import Report\nReport.points = lambda s, m: m"),
    "builtins.round replaced": gain("import builtins\nbuiltins.round = lambda *_: 99.0"),
    "a formatter for floats": gain(
        "get_ipython().display_formatter.formatters['text/plain'].for_type(float, lambda *_: '99')"
    ),
    "check swapped before each cell": gain(
        "class C:\n    def __getattr__(s, n): return lambda *a, **k: s\n    def points(s, m): return m\n"
        "get_ipython().events.register('pre_run_cell', lambda *_: globals().update(check=C()))"
    ),
    "check = its own": gain("check = type('C', (), dict(update=lambda *a, **k: 4.0))"),
    "right values from the call stack": gain(STACK),
    "the solution from this disk": gain(SEARCH, quick=True),
    "the package's own solution imported": gain(
        "from fa2_lab.reference.online_softmax import SoftmaxState", remark="off limits in this assignment", quick=True
    ),
    "the checks imported": gain("import fa2_studio.course.softmax as s\nmerge = s.right_merge", remark="off limits"),
    "torch's attention": gain("import flash_attn", remark="finished attention"),
    "the memory of other processes": gain(MEMORY),
    "forged answers": gain(FORGED_FRAMES, quick=True),
    "a link to another's work": gain(write=lambda home: (home / FILE).symlink_to("../zoe/" + FILE), remark="a link"),
    "a link to another's folder": gain(
        write=lambda home: (home / FIRST.name).symlink_to("../zoe"), remark="nothing handed in"
    ),
    "a test that refuses everything": testing("def test_merge(merge): raise AssertionError"),
    "a test that counts its calls": testing(
        "n = 0\ndef test_merge(merge):\n    global n\n    n += 1\n    assert n <= 3", most=10.5
    ),
    "a test that ends its process": testing(
        "def test_merge(merge):\n    import os\n    os._exit(1)", remark="the process ended"
    ),
    "numpy replaced": gain("import numpy as np\nnp.allclose = np.array_equal = lambda *a, **k: True\nnp.exp = np.log"),
    "an array that equals everything": gain(
        "import numpy as np\nclass A(np.ndarray):\n    def __eq__(s, o): return True\n"
        "update = lambda m, l, o, s, v: tuple(x.view(A) for x in (m, l, o))"
    ),
    "messages with other values": gain(CHANNEL),
    "open file descriptors": gain(DESCRIPTORS),
    "a debugger on every process": gain(DEBUGGER, quick=True),
    "start-up files for the next process": gain(STARTUP, remark="the process ended", quick=True),
    "a set-up cell of its own": gain(change=own_setup),
    "not a number, everywhere": gain("update = merge = lambda *a: tuple(x * np.nan for x in a[:3])"),
    "a test that looks at the clock": testing(CLOCKED, most=10.5),
    "a result that runs code when it is read": gain(
        "class P:\n    def __reduce__(s): return (exec, ('1/0',))\nupdate = merge = lambda *a: (P(), P(), P())"
    ),
}

# Attempts to harm ---------------------------------------------------------------------------------------------------


def with_metadata(metadata):
    def change(book):
        for cell in book["cells"]:
            if cell["metadata"].get("nbgrader", {}).get("grade_id") == "merge":
                cell["metadata"] = metadata

    return change


def many_cells(book):
    book["cells"] += [code("1")] * 3000


def surrogates(book):
    book["cells"].append(code("x = '\ud800'"))
    book["cells"][0]["metadata"]["\udfff"] = "\ud800"


def nowhere(book):
    return {"cells": {"0": 1}, "nbformat": 4}


def odd_cells(book):
    book["cells"] += [
        None,
        7,
        "cell",
        {"cell_type": "code"},
        {"source": None, "metadata": []},
        {"cell_type": "code", "source": 5},
    ]


DAEMONS = """import os, time
for _ in range(20):
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(1000)"""
BOMB = """import os
while True:
    try:
        os.fork()
    except OSError:
        pass"""
VANDAL = """import os, pathlib, shutil, fa2_lab, sys
for root in {target!r}:
    for place, _, files in os.walk(root):
        for name in files:
            for act in (lambda p: open(p, "a").write("1/0"), os.unlink):
                try:
                    act(os.path.join(place, name))
                except OSError:
                    pass
    shutil.rmtree(root, ignore_errors=True)"""
KILLER = """import os, signal
for pid in (-1, os.getppid(), *range(2, 400)):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass"""
NETWORK = """import socket
for place in (("127.0.0.1", 22), ("10.0.0.1", 80)):
    s = socket.socket()
    s.settimeout(1)
    s.connect(place)"""
FULL_DISK = """block = b"x" * 2**20
for n in range(100_000):
    for folder in (".", "/tmp", "/var/tmp", "/dev/shm"):
        try:
            with open(f"{folder}/{n}", "wb") as f:
                f.write(block)
        except OSError as e:
            last = e
    if n > 400:
        raise last"""
STUBBORN = """def merge(a, b):
    while True:
        try:
            sum(range(10**5))
        except BaseException:
            pass"""
DEAF = """import signal
signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
while True: pass"""
HUNGRY = """def merge(a, b):
    kept = []
    while True:
        kept.append(np.empty(10**7))"""
FAMILY = """import os, time
come, go = os.pipe()
for _ in range(8):
    if not os.fork():
        kept = b"x" * (300 * 2**20)
        os.write(go, b"x")
        time.sleep(1000)
while len(os.read(come, 1)): pass"""
FLOOD = """import json, os, struct
text = json.dumps({"dict": [["token", "x"], ["value", 99.0]]}).encode()
frame = struct.pack(">QQ", len(text), 0) + text
if not os.fork():
    while True:
        for number in range(3, 16):
            try:
                os.write(number, frame * 100)
            except OSError:
                pass"""
NOBODYS = """import os
kept = [os.memfd_create(str(n)) for n in range(200)]
for number in kept:
    os.write(number, b"x" * 90 * 2**20)"""
STREAMS = """import os, sys
block = b"x" * 2**20
for _ in range(10_000):
    os.write(1, block)
    os.write(2, block)
for stream in (sys.__stdout__, sys.__stderr__):
    stream.write("x" * 2**28)"""
LATER = """import os, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    until = time.time() + 30
    while time.time() < until:
        for place, _, files in os.walk("/"):
            for name in files:
                if name.endswith((".json", ".html", ".csv", ".ipynb")):
                    try:
                        open(os.path.join(place, name), "a").write("99")
                    except OSError:
                        pass"""


UNREADABLE = "not a notebook that can be read"
GROWS = """def update(m, l, o, s, v):
    m_new = np.maximum(m[:, None], s.max(axis=1, keepdims=True))
    return m_new, l, o"""
HARM = {
    "nbgrader is null": Hostile(change=with_metadata({"nbgrader": None}), quick=True),
    "nbgrader is a list": Hostile(change=with_metadata({"nbgrader": [1]})),
    "a name that is a list": Hostile(change=with_metadata({"nbgrader": {"grade_id": ["merge"], "solution": True}})),
    "metadata is a list": Hostile(change=with_metadata(["x"])),
    "letters that are none": Hostile(change=surrogates),
    "not text": instead(lambda h: (h / FILE).write_bytes(b"\xff\xfe\x00{"), UNREADABLE),
    "brackets without end": instead(lambda h: (h / FILE).write_text("[" * 200_000), UNREADABLE, quick=True),
    "cells are no list": Hostile(change=nowhere, score=0, remark="no list of cells"),
    "cells that are no cells": Hostile(change=odd_cells),
    "three thousand cells": Hostile(change=many_cells, score=0, remark="at most 2,000 are read"),
    "a huge file": instead(lambda h: (h / FILE).write_bytes(b" " * 21 * 2**20), "it takes at most"),
    "an empty file": instead(lambda h: (h / FILE).write_text(""), UNREADABLE),
    "a pipe": instead(lambda h: os.mkfifo(h / FILE), "a pipe or a device", quick=True),
    "a folder": instead(lambda h: (h / FILE).mkdir(), "nothing handed in"),
    "a PDF": instead(lambda h: (h / "1_online_softmax.pdf").write_text("%PDF"), "does not end in .ipynb"),
    "another name": instead(lambda h: (h / "homework.docx").write_text("?"), "there is homework.docx"),
    "nothing": instead(lambda h: None, "nothing handed in"),
    "twenty daemons": Hostile((DAEMONS,), quick=True),
    "a fork bomb": Hostile((BOMB,), score=0, most=12, remark="did not end within|used more than"),  # or memory ends
    "killing everything": Hostile((KILLER,)),
    "no way out": Hostile((NETWORK,), remark="unreachable"),
    "a full disk": Hostile((FULL_DISK,)),
    "a cell without end": Hostile(("while True: pass",), remark="did not end within 6 s", quick=True),
    "a function without end": merging("def merge(a, b):\n    while True: pass", remark="did not end within 6 s"),
    "a function that cannot be interrupted": merging(STUBBORN, remark="could not be interrupted"),
    "deaf to the alarm": Hostile((DEAF,), remark="could not be interrupted"),
    "all the memory": merging(HUNGRY, quick=True),
    "all the memory, in a family": Hostile((FAMILY,), score=9, most=12, remark="a cell of your own"),
    "shapes that grow with every key": Hostile(answers={"update": GROWS}, score=8),
    "output without end": Hostile(('while True: print("x" * 1000)',), remark="did not end within 6 s"),
    "os._exit": merging("import os\ndef merge(a, b): os._exit(0)", remark="the process ended"),
    "sys.exit": Hostile(("import sys; sys.exit(3)",), remark="SystemExit"),
    "a segmentation fault": Hostile(("import ctypes; ctypes.string_at(0)",), remark="the process ended"),
    "recursion": Hostile(("def f(): return f()\nf()",), remark="RecursionError"),
    "every file descriptor closed": Hostile(("import os; os.closerange(0, 256)",), remark="the process ended"),
    "garbage to every file descriptor": Hostile(
        ("import os\nfor n in range(64):\n    try: os.write(n, b'\\xff' * 4000)\n    except OSError: pass",),
        remark="the process ended",
    ),
    "a gigabyte for an answer": merging("def merge(a, b): return np.zeros(2**26), a[1], a[2]"),
    "a flood of answers": Hostile((FLOOD,), score=0, most=12),
    "memory that is nobody's": Hostile((NOBODYS,), remark="Operation not permitted", quick=True),
    "gigabytes to every stream": Hostile((STREAMS,)),
    "a daemon that edits what comes later": Hostile((LATER,)),
    "a process that stops itself": Hostile(("import os; os.kill(os.getpid(), 19)",)),
    "a date that is a pipe": besides(lambda home: os.mkfifo(home / "timestamp.txt")),
    "a date that is a device": besides(lambda home: (home / "timestamp.txt").symlink_to("/dev/zero")),
    "a date that no calendar has": besides(lambda home: os.utime(home / FILE, (2**38, 2**38))),
    "a link to nowhere": gain(write=lambda home: (home / FILE).symlink_to("nowhere"), remark="a link", quick=True),
    "links in a circle": besides(lambda home: (home / "more").symlink_to(".")),
    "an error whose words never end": Hostile(
        ("class E(Exception):\n    def __str__(s): return 'x' * 10**10\nraise E",), remark="a cell of your own: E"
    ),
    "\x1b[2Ja name\x07 that is none": Hostile(),
    "markup": Hostile(("raise ValueError('<script>alert(1)</script>')",), remark="<script>"),
    "a wrong name in a cell of one's own": Hostile(
        ("import fa2_lab.machine.chips\n",), remark="off limits", quick=True
    ),
    "magics": Hostile(("%matplotlib inline\n!ls\n%timeit -n1 -r1 1",)),
    "check called in a cell of one's own": Hostile(
        ("report = check.update(check)\nreport.points(4)",), remark="NameError"
    ),
}


def vandal(targets: list[str]) -> Hostile:
    """Deletes and rewrites whatever it can in these folders."""
    return Hostile((VANDAL.replace("{target!r}", repr(targets)),), quick=True)
