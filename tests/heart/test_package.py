"""The wheel holds the package alone, and all of it works in a fresh environment, far from the checkout."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

PROJECT = Path(__file__).resolve().parents[2]

PUBLIC_CALLS = """
import numpy as np, torch, fa2_lab, fa2_lab.records
from fa2_lab.distributed import ring_attention
from fa2_lab.kernels import ladder
from fa2_lab.reference import fa2
assert "checkout" not in fa2_lab.__file__ and "{site}" in fa2_lab.__file__, fa2_lab.__file__
q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
want, _ = fa2.forward(*(x[0, 0].double().numpy() for x in (q, k, v)), B_r=16, B_c=16)
close = lambda O: np.abs(O.double().numpy() - want).max() < 1e-5
leaf = q.clone().requires_grad_()
O = fa2_lab.attention(leaf, k, v)
O.sum().backward()
assert close(O[0, 0].detach()) and leaf.grad.isfinite().all()
starts = torch.tensor([0, 40], dtype=torch.int32)
packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
assert close(fa2_lab.attention_packed(*packed, starts, starts)[:, 0])
pages = [x[0].transpose(0, 1).reshape(5, 8, 2, 16).contiguous() for x in (k, v)]
table, lengths = torch.arange(5, dtype=torch.int32)[None], torch.tensor([40], dtype=torch.int32)
paged = fa2_lab.attention_paged(q, *pages, table, lengths, causal=False)
assert close(paged[0, 0])
assert fa2_lab.where("FA2.A1.L9").first_numpy and fa2_lab.where("FA2.A1.L9").first_triton
assert fa2_lab.records.load("ladder").rows
device = "cuda" if torch.cuda.is_available() else "cpu"
half = [x.to(device).half() for x in (q, k, v)]
assert ladder.load("11").forward(*half, causal=True)[0].shape == q.shape
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # building leaves files behind
    source.mkdir()
    texts = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "LICENSE-TEXT")
    for name in ("fa2_lab", "figures/data", *texts):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).symlink_to(PROJECT / name)
    sdist = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"]
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    for command in (sdist, wheel):  # the wheel from the sdist, so that both are whole
        done = subprocess.run(
            [*command, *folder.glob("*.tar.gz")], cwd=source, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel) -> dict:
    """Make an environment with the wheel and with all other packages that are installed here.

    Return its folder of commands, its site-packages, and the arguments with which subprocess.run uses it.
    """
    home = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=60)
    python = home / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60).stdout.strip())
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    subprocess.run([*command, str(wheel)], check=True, env=environment, timeout=120)
    others = [path for path in sys.path if path.endswith("-packages")] or [sysconfig.get_path("purelib")]
    (site / "others.pth").write_text("\n".join(others) + "\n")
    return dict(bin=home / "bin", site=site, run=dict(cwd=wheel.parent, env=environment, text=True, timeout=120))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"fa2_lab", next(name for name in tops if name.endswith(".dist-info"))}
    written = {path.relative_to(PROJECT).as_posix() for path in (PROJECT / "fa2_lab").rglob("*.py")}
    assert written == {name for name in names if name.endswith(".py")}
    assert {"fa2_lab/py.typed", "fa2_lab/data/bench_ladder.json", "fa2_lab/machine/reasons.md"} <= set(names)
    kinds = {Path(name).suffix for name in names if name.startswith("fa2_lab/")}
    assert kinds <= {".py", ".json", ".md", ".typed"}, "what else is in there?"


def test_every_public_call_works_from_the_wheel(installed):
    call = [str(installed["bin"] / "python"), "-c", PUBLIC_CALLS.format(site=installed["site"])]
    done = subprocess.run(call, capture_output=True, **installed["run"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("where FA2.A1.L9", "reference/fa2.py"),
        ("errata", "differ"),
        ("glossary warp", "线程束"),
        ("ladder", "TFLOP/s"),
        ("figures climb --folder figures", ""),
        ("doctor", "fa2_lab"),
    ],
)
def test_every_command_works_from_the_wheel(arguments, words, installed):
    call = [str(installed["bin"] / "fa2-lab"), *arguments.split()]
    done = subprocess.run(call, capture_output=True, **installed["run"])
    assert re.search(words, done.stdout), done.stderr
    assert done.returncode == 0 or arguments == "doctor"  # which may find something wrong on this machine


@pytest.mark.parametrize("arguments", ["bench smoke", "book", "course build", "tune", "figures"])
def test_commands_that_need_a_checkout_say_so_in_a_wheel(arguments, installed):
    call = [str(installed["bin"] / "fa2-lab"), *arguments.split()]
    done = subprocess.run(call, capture_output=True, **installed["run"])
    assert done.returncode == 2 and "a checkout of the repository" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_wheel_help_lists_only_available_commands(installed):
    listed = subprocess.run([str(installed["bin"] / "fa2-lab"), "--help"], capture_output=True, **installed["run"])
    names = re.findall(r"^    (\w+)  ", listed.stdout, re.MULTILINE)
    assert {"tour", "where", "xray"} <= set(names) and not {"bench", "book", "course", "judge", "tune"} & set(names)


def test_reference_errata_and_tour_need_numpy_alone(wheel):
    import numpy

    alone = wheel.parent / "alone"
    with ZipFile(wheel) as archive:
        archive.extractall(alone)
    for path in Path(numpy.__file__).parents[1].glob("numpy*"):
        (alone / path.name).symlink_to(path)
    here = f"import sys; sys.path.insert(0, {str(alone)!r}); "
    shows = {"tour": "skipped: torch is not installed", "errata": "errata", "where FA2.A1": ""}
    for arguments, words in {**shows, "where FA2.A1.L9 --sass": "needs torch, which is not installed"}.items():
        source = here + "from fa2_lab.tools.command import main; sys.exit(main())"
        call = [sys.executable, "-I", "-S", "-c", source, *arguments.split()]
        done = subprocess.run(call, capture_output=True, text=True, cwd=alone, timeout=60)
        assert done.returncode == (0 if arguments in shows else 2), done.stdout + done.stderr
        assert words in (done.stdout if arguments in shows else done.stderr) and "Traceback" not in done.stderr
    kinds = ("*.py", "reference/*.py", "machine/*.py", "errata/*.py")
    files = [file for kind in kinds for file in (alone / "fa2_lab").glob(kind)]
    modules = [".".join(file.relative_to(alone).with_suffix("").parts) for file in files]
    names = [name for name in modules if name not in ("fa2_lab.transformers", "fa2_lab.__main__")]
    assert len(names) > 30
    every = here + "".join(f"import {name}; " for name in names)
    call = [sys.executable, "-I", "-S", "-c", every + "fa2_lab.attention"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=alone, timeout=60)
    assert "needs torch, which is not installed: pip install 'fa2-lab[kernels]'" in done.stderr
