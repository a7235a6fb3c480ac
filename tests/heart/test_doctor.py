"""`fa2-lab doctor`: what it reports about a machine, and its advice."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from fa2_lab.kernels import interpreter
from fa2_lab.tools import command, doctor
from fa2_lab.tools.doctor import FINE, Environment, advice, interpreted, screen, untested

LAPTOP = Environment("3.12.1", "Linux", "2.3.0", "2.13.0+cpu", "3.8.0")
H100 = replace(LAPTOP, torch="2.13.0", gpu="NVIDIA H100", capability=9.0, driver="570.1", gpu_node=True)


@pytest.mark.parametrize(
    "environment", [LAPTOP, H100, replace(H100, capability=8.0), replace(LAPTOP, system="Darwin", triton="")]
)
def test_doctor_reports_a_machine_without_problems(environment):
    assert advice(environment) == f"{FINE}." and screen(environment).endswith(f"{FINE}.")


@pytest.mark.parametrize(
    "environment, words",
    [
        (replace(LAPTOP, torch="", triton=""), "pip install 'fa2-lab[kernels]'"),
        (replace(LAPTOP, triton=""), "Triton is not installed"),
        (replace(LAPTOP, misfit="install 'triton>=3.6'"), "install 'triton>=3.6'"),
        (replace(H100, gpu="", capability=0.0), "torch cannot use the GPU"),
        (replace(H100, asked="1", untested="Triton 3.10.0"), "unset TRITON_INTERPRET"),  # the first of two things
        (replace(LAPTOP, asked="0"), "unset it"),
        (replace(H100, gpu="Tesla T4", capability=7.5), "TRITON_INTERPRET=1"),
    ],
)
def test_doctor_names_each_problem_with_its_fix(environment, words):
    assert words in advice(environment) and screen(environment).endswith(advice(environment))


def test_doctor_says_whether_and_why_the_interpreter_is_on():
    assert interpreted(LAPTOP) == "on: there is no GPU"
    assert interpreted(H100) == "off: there is a GPU"
    assert interpreted(replace(H100, gpu="", capability=0.0)) == "on: torch finds no GPU"
    assert interpreted(replace(H100, asked="1")) == "on: TRITON_INTERPRET=1 is set"
    assert interpreted(replace(LAPTOP, asked="0")) == "off: TRITON_INTERPRET=0 is set"
    assert interpreted(replace(LAPTOP, triton="")) == "off: Triton is not installed"
    assert doctor.serving(replace(LAPTOP, asked="0"))["64"] == "the NumPy reference"


def test_doctor_compares_versions_as_numbers():
    assert untested("2.11.0+cpu", "3.9.1", ("3.8.0", "3.9.0")) == untested("2.15.1", "", ()) == ""
    assert untested("2.13.0", "3.10.0", ("3.1.0", "3.9.0")) == "Triton 3.10.0"
    assert (untested("2.10.1", "", ()), untested("99.0", "", ())) == ("torch 2.10.1", "torch 99.0")
    assert untested("", "", ()) == "" and untested("unknown", "", ()) == "torch unknown"  # of a build without metadata


def test_doctor_prints_at_most_24_lines_of_120_characters(capsys):
    status = command.main(["doctor"])
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 120
    assert status == (0 if out.splitlines()[-1].startswith(FINE) else 1)


@pytest.mark.parametrize(
    "torch, triton, status, says",
    [
        ("2.99.0", "3.9.0", 0, "not tested with torch 2.99.0. If a kernel fails, pip install -c constraints.txt"),
        ("2.15.0", "3.10.0", 0, "not tested with Triton 3.10.0"),
        ("2.10.1", "3.9.0", 1, "torch 2.10.1 is too old: pip install 'torch>=2.11'"),
        ("2.15.0", "3.5.1", 1, "Triton 3.5.1 is too old"),
    ],
)
def test_doctor_warns_of_untested_versions_and_fails_for_old_ones(torch, triton, status, says, monkeypatch, capsys):
    monkeypatch.setattr(interpreter, "GPU_NODES", ())
    monkeypatch.setattr(doctor, "version", dict(numpy="2.3.0", torch=torch, triton=triton).get)
    assert command.main(["doctor"]) == status
    out = capsys.readouterr().out
    assert says in out.splitlines()[-1] and "torch 2.11 to 2.15, Triton 3.6 to 3.9" in out


def test_doctor_reports_numpy_that_the_interpreter_cannot_use(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(interpreter, "GPU_NODES", ())
    monkeypatch.setattr(doctor, "version", dict(numpy="2.4.0", torch="2.13.0", triton="3.6.0").get)
    assert command.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert (
        "numpy<2.4" in out
        and "the NumPy reference" in out
        and "sm_90, driver unknown" in screen(replace(H100, driver=""))
    )


def test_doctor_prints_json_for_scripts():
    """In a process of its own, as importing the kernels sets what the command reads first."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    call = [sys.executable, "-m", "fa2_lab", "doctor", "--json"]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, timeout=60)
    found = json.loads(done.stdout)
    assert (done.returncode == 0) == found["advice"].startswith(FINE) and found["kernels"].keys() == {"64", "128"}
    assert found["python"] == sys.version.split()[0] and found["asked"] == ""
