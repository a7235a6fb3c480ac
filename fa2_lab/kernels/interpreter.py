"""The switch of Triton's interpreter, which runs kernels in Python, tile by tile, if there is no GPU.

The switch has to be set before Triton is imported.
"""

import os
import sys
from functools import cache
from pathlib import Path
from threading import RLock

GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, and GPUs under Windows' Linux
ONE_AT_A_TIME = RLock()  # the interpreter keeps its state in global variables


def decide(gpu: bool | None = None) -> None:
    """Switch Triton's interpreter on if there is no GPU, unless the user or an earlier import of Triton has decided.

    With None, the device files of the drivers show whether there is a GPU.
    """
    if "triton" in sys.modules or os.environ.get("TRITON_INTERPRET"):
        return
    if gpu is None:
        gpu = any(Path(node).exists() for node in GPU_NODES)
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"


@cache
def installed() -> bool:
    """Return whether Triton is installed."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def switched_on() -> bool:
    """Return whether the kernels of this process are run by Triton's interpreter."""
    import triton

    from fa2_lab.kernels.common.tile import tile_coord

    return not isinstance(tile_coord, triton.JITFunction)


@cache
def misfit() -> str:
    """Return what to install if the installed Triton and NumPy cannot run the kernels, or else an empty string."""
    import numpy
    import triton

    from fa2_lab.kernels import triton_versions

    return triton_versions.misfit_of(triton.__version__, numpy.__version__, switched_on())


@cache
def say_so() -> None:
    """Print once to stderr that the kernels run in Triton's interpreter, because this explains why they are slow."""
    print("fa2_lab: no GPU here, so the Triton kernels run in Triton's interpreter: right, but slow.", file=sys.stderr)
