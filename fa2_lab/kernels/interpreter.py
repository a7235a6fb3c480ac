"""The switch for Triton's interpreter, which runs kernels in Python, program by program, if there is no GPU.

The switch has to be set before Triton is imported.
"""

import os
import sys
from functools import cache
from pathlib import Path
from threading import RLock

GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, and GPUs in WSL
LOCK = RLock()  # the interpreter keeps its state in global variables


def enable_without_gpu(gpu: bool | None = None) -> None:
    """Enable Triton's interpreter if there is no GPU.

    If the user or an earlier import of Triton has already decided, do nothing. If `gpu` is None, look for the GPU
    drivers' device files to find out whether there is a GPU.
    """
    if "triton" in sys.modules or os.environ.get("TRITON_INTERPRET"):
        return
    if gpu is None:
        gpu = any(Path(node).exists() for node in GPU_NODES)
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"


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
    """Return the packages to install if the installed Triton and NumPy cannot run the kernels, or "" if they can."""
    import numpy
    import triton

    from fa2_lab.kernels import triton_versions

    return triton_versions.version_conflict(triton.__version__, numpy.__version__, is_enabled())


@cache
def announce_once() -> None:
    """Print once to stderr that Triton's interpreter runs the kernels, because this explains why they are slow."""
    print("fa2_lab: no GPU here, so the Triton kernels run in Triton's interpreter: right, but slow.", file=sys.stderr)
