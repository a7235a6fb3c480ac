"""Running a notebook that nobody trusts: a process of its own, with limits on memory, time and output.

It protects from accidents and laziness, not from an attacker: see INSTRUCTOR.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
KEPT = ("PATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SYSTEMROOT", "CUDA_VISIBLE_DEVICES")
OUTPUT_CHARACTERS = 100_000  # of one cell
FILE_BYTES = 100 * 2**20  # of one file that a notebook writes
GRACE = 5.0  # seconds between asking a cell to stop and stopping it


@dataclass(frozen=True)
class Limits:
    """What one notebook may use."""

    cell_seconds: float = 60.0
    notebook_seconds: float = 300.0
    memory_mb: int = 4096  # 0: no limit


# On the grader's side -------------------------------------------------------------------------------------------


def run(notebook: dict, limits: Limits) -> tuple[dict, str]:
    """The notebook, plain JSON, with its outputs, and a sentence if it could not be run to its end."""
    with tempfile.TemporaryDirectory(prefix="fa2-course-", ignore_cleanup_errors=True) as folder:
        before, after = Path(folder, "before.ipynb"), Path(folder, "after.ipynb")
        home = Path(folder, "home")
        home.mkdir()
        before.write_text(json.dumps(notebook), encoding="utf-8")
        options = [str(x) for x in (limits.cell_seconds, limits.notebook_seconds, limits.memory_mb)]
        command = [sys.executable, "-m", "fa2_lab.studio.course.sandbox", str(before), str(after), *options]
        ended = _supervised(command, home, limits.notebook_seconds + 60)
        if not after.is_file():
            return notebook, f"the notebook could not be run: {ended or 'its process left no result'}"
        return json.loads(after.read_text(encoding="utf-8")), ended


def _supervised(command: list[str], home: Path, seconds: float) -> str:
    """Run a process in a session of its own; empty if it ended well."""
    process = subprocess.Popen(
        command,
        cwd=home,
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, complaint = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        complaint = "it did not end when it was told to"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    return (complaint.strip().splitlines() or [""])[-1] if process.returncode else ""


def environment(home: Path) -> dict[str, str]:
    """Little of the grader's environment, and a home of its own."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    paths = [str(PROJECT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = dict.fromkeys(("HOME", "USERPROFILE", "TMPDIR", "IPYTHONDIR"), str(home))
    own |= {"PYTHONPATH": os.pathsep.join(paths), "JUPYTER_PREFER_ENV_PATH": "1", "MPLBACKEND": "Agg"}
    own |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    return kept | own


# Inside ---------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run a notebook cell by cell and write it after each, with what became of it."""
    parser = argparse.ArgumentParser(prog="sandbox")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("cell_seconds", type=float)
    parser.add_argument("notebook_seconds", type=float)
    parser.add_argument("memory_mb", type=int)
    options = parser.parse_args(argv)
    limit_resources(options.memory_mb, options.notebook_seconds)
    run_cells(json.loads(options.before.read_text(encoding="utf-8")), options)
    return 0


def limit_resources(memory_mb: int, seconds: float) -> None:
    """Limits that the kernel inherits. Where the system knows none of them, only time is limited."""
    try:
        import resource
    except ImportError:
        return
    # CUDA reserves far more addresses than it uses: on a GPU machine only private memory is counted.
    memory = resource.RLIMIT_DATA if os.path.exists("/dev/nvidiactl") else resource.RLIMIT_AS
    wanted = {memory: memory_mb * 2**20} if memory_mb else {}
    wanted |= {resource.RLIMIT_FSIZE: FILE_BYTES, resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: int(4 * seconds) + 60}
    for which, value in wanted.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(which, (value, value))


def run_cells(notebook: dict, options) -> None:
    """Every code cell in order; a cell that raises or is stopped does not stop the others."""
    from jupyter_client.manager import start_new_kernel

    until = time.monotonic() + options.notebook_seconds
    manager, client = start_new_kernel(startup_timeout=60, kernel_name="python3")
    over = ""
    try:
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                continue
            cell["outputs"], cell["execution_count"] = [], None
            if over:
                cell["outputs"] = [error("NotRun", over)]
            else:
                over = run_cell(manager, client, cell, min(options.cell_seconds, until - time.monotonic()))
            write_whole(notebook, options.after)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def write_whole(notebook: dict, path: Path) -> None:
    """Replace a file by a new one, so that whoever reads it never finds half of it."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(notebook), encoding="utf-8")
    os.replace(new, path)


def run_cell(manager, client, cell: dict, seconds: float) -> str:
    """Run one cell into its outputs; a sentence if nothing can run after it."""
    if seconds <= 0:
        cell["outputs"] = [error("NotRun", "the notebook's time was up")]
        return "the notebook's time was up"
    request = client.execute(cell["source"], allow_stdin=False)
    ended = collect(manager, client, request, cell, time.monotonic() + seconds)
    if ended == "late":
        cell["outputs"].append(error("Stopped", f"this cell did not end within {seconds:.0f} s"))
        manager.interrupt_kernel()
        if collect(manager, client, request, {"outputs": []}, time.monotonic() + GRACE) != "done":
            manager.shutdown_kernel(now=True)
            return "an earlier cell did not end and could not be interrupted"
    if ended == "died":
        cell["outputs"].append(error("Died", "the process ended in this cell (too much memory, exit(), or a crash)"))
        return "the process had ended in an earlier cell"
    return ""


def collect(manager, client, request: str, cell: dict, until: float) -> str:
    """Take a cell's messages until it is "done", or "late", or the kernel "died"."""
    written = 0
    while time.monotonic() < until:
        try:
            message = client.get_iopub_msg(timeout=0.2)
        except queue.Empty:
            if not manager.is_alive():
                return "died"
            continue
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return "done"
        written += keep(cell["outputs"], message["msg_type"], message["content"], OUTPUT_CHARACTERS - written)
    return "late"


def keep(outputs: list[dict], kind: str, content: dict, room: int) -> int:
    """Add a message to a cell's outputs as far as there is room; results and errors have room of their own."""
    if kind == "stream":
        text, last = content["text"][: max(room, 0)], outputs[-1] if outputs else {}
        if last.get("output_type") == "stream" and last["name"] == content["name"]:
            last["text"] += text
        elif text:
            outputs.append({"output_type": "stream", "name": content["name"], "text": text})
        return len(text)
    if kind == "execute_result":
        text = content["data"].get("text/plain", "")[:OUTPUT_CHARACTERS]
        result = {"output_type": kind, "data": {"text/plain": text}, "metadata": {}, "execution_count": None}
        outputs.append(result)
    elif kind == "error":
        outputs.append(error(content["ename"], content["evalue"][:1000]))
    return 0


def error(name: str, sentence: str) -> dict:
    """An error as a notebook holds it."""
    return {"output_type": "error", "ename": name, "evalue": sentence, "traceback": []}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
