"""`fa2-lab doctor`: report this machine's software and GPU, which kernels run on it, and how to fix what is wrong."""

import argparse
import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import fa2_lab

TORCH = "2.11", "2.15"  # the oldest and the newest tested versions
OLDEST_GPU = 8.0  # the lowest compute capability whose tensor cores Triton can use
FINE = "Nothing is wrong"  # the advice begins with these words if there is nothing to fix


@dataclass(frozen=True)
class Environment:
    """The software versions and the GPU of this machine, as strings.

    An empty string means that the package or the device is missing.
    """

    python: str
    system: str
    numpy: str
    torch: str
    triton: str
    gpu: str = ""  # the name of the GPU
    capability: float = 0.0
    driver: str = ""
    gpu_node: bool = False  # whether the system reports a GPU, which torch may be unable to use
    asked: str = ""  # the value of TRITON_INTERPRET before the command ran
    untested: str = ""  # installed versions with which the kernels were not tested
    misfit: str = ""  # which installed versions do not work together, and what to install instead
    kernels: dict[str, str] = field(default_factory=dict)  # {head dimension d: the kernels that a causal call uses}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="fa2-lab doctor", description="Print what this machine has, what runs on it, and what is wrong."
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for reports and scripts")
    arguments = parser.parse_args(argv)
    environment = inspect_environment()
    if arguments.json:
        print(json.dumps(dict(fa2_lab=fa2_lab.__version__) | asdict(environment) | dict(advice=advice(environment))))
    else:
        print(screen(environment))
    return 0 if advice(environment).startswith(FINE) else 1


# The environment ----------------------------------------------------------------------------------------------


def inspect_environment() -> Environment:
    """Return this machine's Environment. TRITON_INTERPRET is read first, because importing the kernels may set it."""
    asked = os.environ.get("TRITON_INTERPRET", "")
    asked = "1" if asked.lower() in ("true", "on", "yes", "y") else asked  # Triton accepts these words
    from fa2_lab.kernels import triton_versions
    from fa2_lab.kernels.interpreter import GPU_NODES

    numpy, torch, triton = map(version, ("numpy", "torch", "triton"))
    here: dict[str, Any] = dict(
        python=platform.python_version(),
        system=platform.system(),
        numpy=numpy,
        torch=torch,
        triton=triton,
        gpu_node=any(os.path.exists(node) for node in GPU_NODES),
        asked=asked,
        untested=untested(torch, triton, triton_versions.TESTED),
    )
    if torch and here["gpu_node"]:  # graphics() imports torch, which takes a second
        here |= graphics()
    if number(torch) and number(torch) < number(TORCH[0]):
        here["misfit"] = f"torch {torch} is too old: pip install 'torch>={TORCH[0]}'"
    elif number(triton):
        interpreted = asked == "1" or not here.get("gpu")
        here["misfit"] = triton_versions.version_conflict(triton, numpy, interpreted)
    return Environment(**here, kernels=serving(Environment(**here)))


def version(package: str) -> str:
    """Return the installed version of a package without importing it, or an empty string if it is not installed."""
    try:
        return metadata.version(package) if find_spec(package) else ""
    except metadata.PackageNotFoundError:
        return "unknown"


def graphics() -> dict:
    """Return the name, compute capability and driver of the GPU, or an empty dictionary if torch cannot use one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    major, minor = torch.cuda.get_device_capability()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=1).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        driver = ""
    return dict(gpu=torch.cuda.get_device_name(), capability=major + minor / 10, driver=driver)


def serving(environment: Environment) -> dict[str, str]:
    """Return {d: kernels that run a causal bf16 call with 16 heads and N = 4,096} for d = 64 and 128."""
    forbidden = not environment.gpu and environment.asked not in ("", "1")
    if not (environment.torch and environment.triton) or environment.misfit or forbidden:
        return dict.fromkeys(("64", "128"), "the NumPy reference")
    if not environment.gpu or environment.asked == "1":
        return dict.fromkeys(("64", "128"), "portable, in the interpreter")
    import torch

    from fa2_lab.kernels import dispatch

    served = {}
    for d in (64, 128):
        q = torch.empty(1, 16, 4096, d, dtype=torch.bfloat16, device="cuda")
        modules = {direction: dispatch.hopper_module(direction, q.device) for direction in ("forward", "backward")}
        own = {direction: module is not None and module.is_fastest(q, q) for direction, module in modules.items()}
        served[str(d)] = ", ".join(
            f"{direction} {'by Hopper' if mine else 'portable'}" for direction, mine in own.items()
        )
    return served


# Advice on the environment ------------------------------------------------------------------------------------


def number(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, such as (2, 15) for "2.15.0+cpu", or () if the version is empty."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def untested(torch: str, triton: str, versions: tuple[str, ...]) -> str:
    """Return the installed torch and Triton versions with which the kernels were not tested, or "" if there are none.

    `versions` lists the tested versions of Triton.
    """
    unknown = []
    if torch and not number(TORCH[0]) <= number(torch) <= number(TORCH[1]):
        unknown.append(f"torch {torch}")
    if triton and number(triton) not in map(number, versions):
        unknown.append(f"Triton {triton}")
    return " and ".join(unknown)


def interpreted(environment: Environment) -> str:
    """Return "on" or "off" for the state of Triton's interpreter, followed by the reason."""
    if not environment.triton:
        return "off: Triton is not installed"
    if environment.asked:
        return f"{'on' if environment.asked == '1' else 'off'}: TRITON_INTERPRET={environment.asked} is set"
    if environment.gpu:
        return "off: there is a GPU"
    return "on: torch finds no GPU" if environment.gpu_node else "on: there is no GPU"


def advice(environment: Environment) -> str:
    """Return the most urgent advice as a sentence. If nothing is wrong, the sentence begins with FINE."""
    if not environment.torch:
        return "torch is not installed, but the NumPy reference works. For attention, pip install 'fa2-lab[kernels]'"
    if not environment.triton:
        if environment.system == "Linux":
            return "Triton is not installed, so the NumPy reference runs instead: pip install 'fa2-lab[kernels]'"
        return f"{FINE}."  # Triton is available only on Linux, so there is nothing to fix here
    if environment.misfit:
        return environment.misfit
    if environment.gpu_node and not environment.gpu:
        return "torch cannot use the GPU of this machine: install a build of torch for it, or a newer driver"
    if environment.gpu and environment.asked == "1":
        return "the interpreter is on although there is a GPU. To compile the kernels, unset TRITON_INTERPRET"
    if not environment.gpu and environment.asked not in ("", "1"):
        return f"no GPU, and TRITON_INTERPRET={environment.asked} switches the interpreter off: unset it"
    if environment.gpu and environment.capability < OLDEST_GPU and not environment.asked:
        return "Triton cannot use the tensor cores of this GPU, so set TRITON_INTERPRET=1, or expect slow kernels"
    if environment.untested:
        remedy = "pip install -c constraints.txt -e '.[dev]'"
        return f"{FINE}, but fa2_lab was not tested with {environment.untested}. If a kernel fails, {remedy}"
    return f"{FINE}."


def screen(environment: Environment) -> str:
    """Return the text that the command prints: a report on the environment, with the advice in the last line."""
    from fa2_lab.kernels.triton_versions import TESTED

    oldest, newest = (version.rpartition(".")[0] for version in (TESTED[0], TESTED[-1]))
    tested = f"torch {' to '.join(TORCH)}, Triton {oldest} to {newest}"
    gpu = (
        f"{environment.gpu}, sm_{environment.capability * 10:.0f}, driver {environment.driver or 'unknown'}"
        if environment.gpu
        else ""
    )
    rows = {
        "fa2_lab": fa2_lab.__version__,
        "Python": f"{environment.python}, {environment.system}",
        "NumPy": environment.numpy,
        "torch": environment.torch or "not installed",
        "Triton": environment.triton or ("not installed" if environment.system == "Linux" else "exists for Linux only"),
        "GPU": gpu or ("there is one that torch cannot use" if environment.gpu_node else "none"),
        "interpreter": interpreted(environment),
        **{f"causal, d {d}": kernels for d, kernels in environment.kernels.items()},
        "tested": tested + f"; not {environment.untested}" * bool(environment.untested),
    }
    return "\n".join([*(f"{name:15}{what}" for name, what in rows.items()), "", advice(environment)])
