"""The switch for Triton's interpreter. Without a GPU, it runs the kernels in Python, one program after another.

The interpreter must be enabled before Triton is imported.
"""

import os
import sys
from functools import cache
from pathlib import Path
from threading import RLock

GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # device files of NVIDIA GPUs, AMD GPUs, and GPUs in WSL
LOCK = RLock()  # locked during a launch because the interpreter keeps its state in global variables


def enable_without_gpu() -> None:
    """Enable Triton's interpreter if there is no GPU driver, or if torch finds no GPU.

    Do nothing if the user has set TRITON_INTERPRET or Triton has already been imported.
    """
    if "triton" not in sys.modules and not os.environ.get("TRITON_INTERPRET") and not has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"


def has_gpu() -> bool:
    """Return whether there is a GPU driver and torch finds a GPU. If torch is not installed, check only for a driver.

    Importing torch takes a second, so torch is imported only if there is a driver.
    """
    if not any(Path(node).exists() for node in GPU_NODES):
        return False
    try:
        import torch
    except ImportError:
        return True
    return torch.cuda.is_available()


@cache
def triton_is_installed() -> bool:
    """Return whether Triton is installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def is_enabled() -> bool:
    """Return whether Triton's interpreter runs the kernels in this process."""
    import triton

    from fa2_lab.kernels.common.tile import block_coord

    return not isinstance(block_coord, triton.JITFunction)


@cache
def version_conflict() -> str:
    """Return what to install if the installed Triton and NumPy cannot run the kernels, or "" if they can run them."""
    import numpy
    import triton

    from fa2_lab.kernels import triton_versions

    return triton_versions.version_conflict(triton.__version__, numpy.__version__, is_enabled())


@cache
def announce_once() -> None:
    """Print once to stderr that Triton's interpreter runs the kernels, to explain why they are slow."""
    print("fa2_lab: no GPU here, so the Triton kernels run in Triton's interpreter: right, but slow.", file=sys.stderr)
