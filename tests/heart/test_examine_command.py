"""The command `fa2-lab examine`: what it prints, and what it refuses."""

import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from examined import enough_time, scores, softmax  # noqa: F401 — a fixture

from fa2_lab.examine import examine
from fa2_lab.tools.command import main


def test_a_backward_that_raises_is_said_and_an_alarm_of_the_caller_stays():
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return softmax(scores(q, k)) @ v

        @staticmethod
        def backward(ctx, do):
            raise RuntimeError("not written")

    def raises(q, k, v):
        return Raises.apply(q, k, v)

    before = signal.signal(signal.SIGALRM, own := lambda *_: None)
    signal.alarm(1000)
    try:
        report = examine(raises, quick=True)
        assert signal.getsignal(signal.SIGALRM) is own and 500 < signal.alarm(0) <= 1000
    finally:
        signal.signal(signal.SIGALRM, before)
    assert "not written" in report.refused["its gradients"] and report.parts == ["O"]


INVALID_SOURCES = {
    "takes one": ("def f(x): return x", "takes 1 arguments"),
    "never returns": ("def f(q, k, v):\n    while True: pass", "did not return"),
    "returns nothing": ("def f(q, k, v): pass", "it returns nothing"),
    "raises": ("def f(q, k, v): raise KeyError('no such head')", "KeyError"),
    "returns another shape": ("def f(q, k, v): return q[..., :1]", "returns shape"),
    "needs more": ("def f(q, k, v, blocks): return q", "--set blocks=…"),
    "dies": ("import os\ndef f(q, k, v): os._exit(7)", "ended with exit code 7 when it was asked probe"),
    "does not import": ("import nothing_of_that_name", "does not import"),
    "no function": ("f = 3", "is not a function"),
    "none of that name": ("def g(q, k, v): return q", "it has g"),
}


@pytest.mark.parametrize("what", INVALID_SOURCES)
def test_what_cannot_be_examined_is_one_sentence(what, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fa2_lab.examine.guards.LIMIT", 5)
    source, says = INVALID_SOURCES[what]
    (tmp_path / f"m_{what.replace(' ', '_')}.py").write_text(source)
    assert main(["examine", f"{tmp_path}/m_{what.replace(' ', '_')}.py:f"]) == 2
    errors = capsys.readouterr().err
    assert says in errors and errors.count("\n") == 1


def test_a_function_on_a_gpu_that_is_already_in_use_is_examined(tmp_path, monkeypatch, capsys):
    """A forked process cannot use CUDA if its parent already has, and it inherits what is patched here."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    source = "import torch\ndef f(q, k, v):\n    assert not torch.cuda.is_initialized(), 'forked'\n"
    (tmp_path / "on_gpu.py").write_text(source + "    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v")
    assert main(["examine", f"{tmp_path}/on_gpu.py:f", "--quick"]) == 0, capsys.readouterr()


def test_the_printed_program_runs_and_shows_the_mistake(tmp_path, capsys):
    source = "import numpy as np\ndef f(q, k, v):\n    s = q @ np.swapaxes(k, -1, -2)\n"
    (tmp_path / "bare.py").write_text(source + "    p = np.exp(s)\n    return p @ v / p.sum(-1, keepdims=True)\n")
    assert main(["examine", f"{tmp_path}/bare.py:f", "--quick"]) == 1
    page = capsys.readouterr().out
    assert "[scale-missing]" in page and "[maximum-missing]" in page
    lines = page.split("\n\n    import numpy")[1].split("\n\nWRONG")[0]
    program = "import numpy" + "\n".join(line[4:] if line.startswith("    ") else line for line in lines.split("\n"))
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    printed, comment = result.stdout.strip(), program.split("#")[1].split(";")[0].strip()
    assert np.allclose(eval(printed.replace("  ", ",").replace(" ", ",").replace("[,", "[").replace(",,", ",")), eval(
        ",".join(comment.split()).replace("[,", "[")), atol=1e-4), result.stderr  # fmt: skip


def test_the_last_line_points_at_remarks_only_if_there_are_some(tmp_path, capsys):
    scores = "def f(q, k, v, mask):\n    s = q @ k.mT / q.shape[-1]**0.5\n    s = s.masked_fill(~mask, -torch.inf)\n"
    for name, returns, has in (("zero", "s.softmax(-1).nan_to_num() @ v", False), ("nan", "s.softmax(-1) @ v", True)):
        (tmp_path / f"m_{name}.py").write_text(f"import torch\n\n{scores}    return {returns}\n")
        assert main(["examine", "--quick", f"{tmp_path}/m_{name}.py:f"]) == 0
        said = capsys.readouterr().out
        assert ("\nremark " in said) == has and ("none of the known mistakes, but look at the remarks" in said) == has
