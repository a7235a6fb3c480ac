"""The exercise of chapter 12a: a kernel in Gluon, of which the reader writes one function.

The function first runs on NumPy, with a small model in place of Gluon's functions. This model detects mistakes such as
a wait that never ends or a tile that is read too early. Then the whole kernel is compiled for Hopper.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np

from fa2_lab.machine.asynchrony import Barrier
from fa2_lab.tools.xray import xray
from fa2_studio.book.build import invitation
from fa2_studio.book.verdicts import close

IMPORTS = """import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
"""
KERNEL = """
@gluon.jit
def row_maxima(Q, K, M, N_k):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    i = 64 * gl.program_id(0)
    q = gl.allocate_shared_memory(Q.dtype, Q.block_shape, Q.layout)
    k = gl.allocate_shared_memory(K.dtype, K.block_shape, K.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    fence_async_shared()
    mbarrier.expect(arrived, Q.block_type.nbytes)
    tma.async_load(Q, [i, 0], arrived, q)
    mbarrier.wait(arrived, 0)
    m = gl.full([64], float("-inf"), gl.float32, ROWS)
    for j in range(gl.cdiv(N_k, 64)):
        m = gl.maximum(m, tile_maxima(j, q, k, K, arrived, gl.zeros([64, 64], gl.float32, SCORES)))
    gl.store(M + i + gl.arange(0, 64, ROWS), m)
"""
HOST = """
def forward(q, k, v, causal):
    Q, K = q[0, 0], k[0, 0]
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    M = torch.full((len(Q),), torch.nan, device=q.device)
    tiles = [TensorDescriptor.from_tensor(X, [64, 64], layout) for X in (Q, K)]
    row_maxima[(len(Q) // 64,)](*tiles, M, len(K), num_warps=4)
    return M
"""

SOLUTION = """mbarrier.expect(arrived, K.block_type.nbytes)
tma.async_load(K, [64 * j, 0], arrived, k)
mbarrier.wait(arrived, (j + 1) & 1)
s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
s = warpgroup_mma_wait(0, deps=[s])
return gl.max(s, 1)"""


def check_kernel(source: str) -> str:
    """Return "right", or a sentence that describes what is wrong with a reader's `tile_maxima`."""
    if re.search(r"^(def .*:)? +\.\.\.$", source, re.MULTILINE):
        return invitation("tile_maxima")
    if wrong := mistake_on_numpy(source):
        return wrong
    if find_spec("triton") is None:
        return "right on NumPy, but Triton is missing here (it exists for Linux only), so the kernel was not compiled"
    return mistake_in_compilation(source) or "right"


# On NumPy ----------------------------------------------------------------------------------------------------------


class SharedTile(np.ndarray):
    """A tile of shared memory: an array that supports Gluon's `permute` and raises an error for NumPy's `T`."""

    def permute(self, order: tuple[int, ...]) -> np.ndarray:
        return self.transpose(order)

    @property
    def T(self):
        raise RuntimeError("shared memory has no .T, so write its transpose as k.permute((1, 0))")


def model_of_gluon(coming: list) -> dict:
    """Return {name: NumPy model} for all parts of Gluon that the function may use.

    `coming` lists the copies that have started but not yet arrived. They arrive in order, during a wait.
    """

    def start_copy(X, place, barrier, tile, pred=True):
        if len(place) != 2 or place[1] != 0:
            raise RuntimeError("K is two-dimensional here, so a tile begins at its first row and at column 0, [row, 0]")
        tile[:] = np.nan
        coming.append((X, place[0], barrier, tile))

    def wait(barrier, phase, pred=True):
        if coming and barrier.over(phase).ready():
            raise RuntimeError(
                f"phase {phase} was over before the copy arrived, so a tile is read that is still on its way"
            )
        while not barrier.over(phase).ready():
            if not coming:
                raise RuntimeError(f"it waits forever, because no copy is under way that could end phase {phase}")
            X, row, arrived, tile = coming.pop(0)
            if vars(arrived).pop("bytes", 0) != X.block_type.nbytes:
                raise RuntimeError("the barrier was not told how many bytes to expect")
            inside = X.rows[row : row + 64]  # rows outside of X arrive as zeros
            tile[:] = np.pad(inside, ((0, 64 - len(inside)), (0, 0)))
            arrived.arrive("copy engine")

    def expect(barrier, nbytes, pred=True):
        barrier.bytes = nbytes

    def product(a, b, c, is_async=False, **options):
        running = SimpleNamespace(when_waited_for=lambda: np.asarray(a @ b))
        return running if is_async else running.when_waited_for()

    def product_wait(num_outstanding=0, deps=None):
        return deps[0] if num_outstanding > 0 or isinstance(deps[0], np.ndarray) else deps[0].when_waited_for()

    def over_what_is_there(function):
        def checked(*values, **options):
            if any(isinstance(x, SimpleNamespace) for x in values):
                raise RuntimeError("the matmul may still be running, so use what warpgroup_mma_wait(0, …) returns")
            return function(*values, **options)

        return checked

    return dict(
        tma=SimpleNamespace(async_load=start_copy),
        mbarrier=SimpleNamespace(expect=expect, wait=wait),
        gl=SimpleNamespace(
            max=over_what_is_there(np.max), maximum=over_what_is_there(np.maximum), barrier=lambda: None
        ),
        warpgroup_mma=product,
        warpgroup_mma_wait=product_wait,
    )


def mistake_on_numpy(source: str) -> str:
    """Run the function on three tiles. Return a description of what is wrong, or "" if the result is right."""
    rows = np.random.default_rng(1).standard_normal((4, 64, 64))
    q, k = rows[0].view(SharedTile), np.full((64, 64), np.nan).view(SharedTile)
    K = SimpleNamespace(rows=rows[1:].reshape(192, 64), block_type=SimpleNamespace(nbytes=8192))
    arrived, m = Barrier("a copy", 1), np.full(64, -np.inf)
    arrived.arrive("copy engine")  # the copy of Q
    words, zero = model_of_gluon([]), None  # `zero` stands for the accumulator, which NumPy does not need
    exec(source, words)
    try:
        for j in range(3):
            found = words["tile_maxima"](j, q, k, K, arrived, zero)
            if found is None:
                raise RuntimeError("it returns nothing, but it should return the largest score of each row")
            m = np.maximum(m, found)
    except RuntimeError as stuck:
        return f"tile {j}: {stuck}"
    except Exception as failure:
        return f"tile {j}: {type(failure).__name__}: {failure}"
    if np.isnan(m).any():
        return "a tile was read while its copy was still on its way"
    tiles = K.rows.reshape(3, 64, 64)
    causes = {
        "": (q @ K.rows.T).max(axis=1),
        "it runs, but its maxima are those of the columns, whereas the scores of a row are along axis 1": (
            tiles @ rows[0].T
        ).max((0, 2)),
        "it runs, but its scores are q k. For q kᵀ, the matmul must get the transpose of k": (q @ tiles).max((0, 2)),
    }
    return next((cause for cause, found in causes.items() if close(m, found)), "it runs, but its maxima are wrong")


# Compiled -----------------------------------------------------------------------------------------------------------


def mistake_in_compilation(source: str) -> str:
    """Compile the whole kernel for Hopper. Return a description of what is wrong, or "" if nothing is."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "mine.py")
        file.write_text(IMPORTS + "@gluon.jit\n" + source + KERNEL + HOST, encoding="utf-8")
        try:
            (made,) = xray(str(file), "sm_90", d=64)
        except ValueError as error:
            return f"it does not compile: {str(error).split(' here: ')[-1]}"
    return "some values do not fit into registers, so they spill" if made.numbers["spills"] else ""
