"""Without a GPU, Triton runs kernels in Python, tile by tile. That must be settled before Triton is imported."""

import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from threading import RLock

GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, and GPUs under Windows' Linux
ONE_AT_A_TIME = RLock()  # the interpreter keeps what it is doing in global variables


def decide(gpu: bool | None = None) -> None:
    """Switch Triton's interpreter on where there is no GPU, unless the user or an earlier import has settled it."""
    if "triton" in sys.modules or "TRITON_INTERPRET" in os.environ:
        return
    if gpu is None:
        gpu = any(Path(node).exists() for node in GPU_NODES)
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"


@cache
def quicken() -> None:
    """Have the interpreter leave out two things that change no result, which makes it almost three times as fast.

    To run a kernel it puts its own functions in the place of triton.language's, takes them away again at the end, and
    does both anew for every function that the kernel calls. They are in place already then, so once is enough. And it
    computes each sum of integers twice, to see whether it overflows; with `debug` off it does not look.

    A Triton that is another inside is left as it is, and so is one whose interpreter is off.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    with suppress(AttributeError, ImportError):
        from triton import language
        from triton.runtime import interpreter as inside

        replace_all, nothing, builder = inside._patch_lang, inside._LangPatchScope, inside.interpreter_builder
        rooms, is_builtin = (language, language.core), language.core.is_builtin

        @wraps(replace_all)
        def replace_once(function):
            """What undoes the replacements when `function` ends: nothing, where its caller has made them."""
            seen = [room for room in rooms if any(x is room for x in function.__globals__.values())]
            first = not seen or any(is_builtin(room.load) for room in seen)  # Triton's own `load` is there still
            return replace_all(function) if first else nothing()

        if not builder.options.debug:
            builder.options = replace(builder.options, sanitize_overflow=False)
        inside._patch_lang = replace_once


@cache
def installed() -> bool:
    """Whether Triton can be imported at all."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def switched_on() -> bool:
    """Whether the kernels were made for the interpreter."""
    import triton

    from fa2_lab.kernels.portable.tile import place

    return not isinstance(place, triton.JITFunction)


@cache
def misfit() -> str:
    """What to install where the interpreter cannot work; nothing where it can."""
    import numpy
    import triton

    return misfit_of(triton.__version__, numpy.__version__)


def misfit_of(triton: str, numpy: str) -> str:
    """The same for any two versions."""

    def number(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".")[:2])

    if number(triton) < (3, 7) and number(numpy) >= (2, 4):
        return (
            f"the interpreter of Triton {triton} does not work with NumPy {numpy}: install 'triton>=3.7' or 'numpy<2.4'"
        )
    return ""


@cache
def say_so() -> None:
    """One sentence, once, for whoever wonders why it is slow."""
    print("fa2_lab: no GPU here, so the Triton kernels run in Triton's interpreter: right, but slow.", file=sys.stderr)
