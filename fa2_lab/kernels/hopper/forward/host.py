"""From torch to a launch: what the copy engine must be told, which sizes fit, and little work on the host per call.

Which plan is fastest where was measured on an H200; figures/data/bench_ideas.json says what most of them are worth.
"""

import functools
from dataclasses import dataclass, replace

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fa2_lab.kernels import interpreter, launch
from fa2_lab.kernels.relaunch import Relaunch, relaunch


@dataclass(frozen=True)
class Plan:
    """Sizes of one launch: what fits the registers (64 K) and the shared memory (227 KiB) of an SM."""

    B_c: int
    consumers: int
    slots: int  # tiles of K, and as many of V
    take_turns: bool = False
    O_apart: bool = True
    lag: bool = True  # m may lag behind the maximum
    d_pad: int = 128
    tile: float = 1.0  # how long a row block takes for 128 keys, one unit with two consumers,
    start: float = 1.0  # and before and after all keys

    @property
    def registers(self) -> int:
        """Of a consumer thread; the producer's are few."""
        return 160 if self.consumers == 3 else 240

    def rounds(self, N_q: int, heads: int, SMs: int) -> int:
        """How many row blocks the busiest SM works through, one after the other."""
        return -(-(-(-N_q // (64 * self.consumers)) * heads) // SMs)

    def options(self) -> dict:
        """As keywords of a launch."""
        return dict(CONSUMERS=self.consumers, SLOTS=self.slots, TAKE_TURNS=self.take_turns, O_APART=self.O_apart,
                    LAG=self.lag, REGISTERS=self.registers, num_warps=4)  # fmt: skip


PLANS = {  # by d
    64: Plan(128, 3, 4, d_pad=64, tile=1.2, start=0.6),
    96: Plan(128, 2, 2),
    128: Plan(128, 2, 2),
    192: Plan(64, 2, 2, O_apart=False, d_pad=256),
    256: Plan(64, 2, 2, O_apart=False, d_pad=256),
}
# One consumer, where rows are few: slower than two, but on twice as many SMs.
FEW = {d: replace(sizes, consumers=1, tile=0.75, start=0.45 if d > 64 else 0.0) for d, sizes in PLANS.items()}
# Up to so many blocks of 64 causal rows to an SM: drawn one by one, heavy before light, they fill its time.
FEW_CAUSAL = {64: 2.5, 96: 2.3, 128: 2.3, 192: 1.5, 256: 2.3}
# For d 64, where blocks of 192 rows fit badly. With exact m: short loops hardly let it come to rest.
SHORT = Plan(128, 2, 3, lag=False, d_pad=64, start=0.0)
EVEN = replace(SHORT, take_turns=True)  # without a mask
TURNS = Plan(128, 3, 4, take_turns=True, d_pad=64)  # long and causal
# Short and causal: half as many keys a tile, because the diagonal cuts through tiles.
HALF = {64: Plan(64, 3, 8, d_pad=64), 128: Plan(64, 2, 4)}
# For d 128 without a mask, where it leaves no SM idle: K and V are read for 192 rows at a time.
WIDE = Plan(64, 3, 5, O_apart=False, tile=1.41, start=2.8)
HALVES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def plan(d: int, N_q: int, heads: int, SMs: int, causal: bool, lengths: bool) -> Plan:
    """The sizes for one kind of call; `heads` of all batch entries; `lengths`: whether there are key_lengths."""
    share = -(-N_q // 64) * heads / SMs  # blocks of 64 rows to an SM
    if causal:
        return plan_causal(d, N_q, share, lengths)
    fitting = [PLANS[d], FEW[d]] + [EVEN] * (d == 64) + [WIDE] * (d == 128 and not lengths)
    return min(fitting, key=lambda sizes: sizes.rounds(N_q, heads, SMs) * (sizes.tile * N_q / 128 + sizes.start))


def plan_causal(d: int, N_q: int, share: float, lengths: bool) -> Plan:
    """The same under the causal mask. Where row blocks differ in weight, there are no rounds to count."""
    if share <= FEW_CAUSAL[d]:
        return FEW[d]
    if d == 64 and (share <= 4.6 or N_q <= 256 or lengths):
        return SHORT
    if share > (10 if d == 64 else 8) and N_q <= (2048 if d == 64 else 512) and d in HALF and not lengths:
        return HALF[d]
    if d == 64:
        return TURNS if N_q > 2048 else SHORT
    return PLANS[d]


def heads_at_once(K_shape, causal: bool) -> int:
    """How many heads of K and V to have in use at a time: for 16 MiB of L2, 32 where long causal rows differ most.

    Where all row blocks are equal, neighbours had better read the same head.
    """
    if not causal:
        return 1
    one = 4 * K_shape[2] * K_shape[3]
    return max(1, (32 if one >= launch.MiB else 16) * launch.MiB // one)


def descriptor(dtype, shape, strides, rows: int, d: int) -> dict:
    """What a bulk copy must know to fetch or store `rows` rows of one head, except where the tensor lies."""
    block = [1, 1, rows, d]
    layout = gl.NVMMASharedLayout.get_default_for(block, HALVES[dtype])
    strides = [stride if n > 1 else d for n, stride in zip(shape[:3], strides[:3], strict=True)]
    return vars(TensorDescriptor(torch.empty(0, dtype=dtype), list(shape), [*strides, 1], block, layout))


def of(X: torch.Tensor, described: dict) -> TensorDescriptor:
    """The descriptor of X, without the checks that its kind has passed already."""
    new = object.__new__(TensorDescriptor)
    vars(new).update(described, base=X)
    return new


@dataclass
class Recipe:
    """All that launches on tensors of the same shapes, strides and types have in common."""

    grid: tuple[int, int, int]
    descriptors: tuple[dict, dict, dict, dict]  # of Q, K, V, O
    scalars: tuple  # the kernel's arguments after key_lengths
    options: dict
    again: Relaunch | None = None  # what launches from the second time on

    def launch(self, kernel, stream: int, tensors: tuple, others: tuple) -> None:
        """Q, K, V, O and what else the kernel needs: first through Triton's own call, which compiles, then past it."""
        if self.again is not None:
            self.again(stream, launch.addresses((*tensors, *others)))
            return
        described = [*map(of, tensors, self.descriptors)]
        compiled = kernel[self.grid](*described, *others, *self.scalars, **self.options)
        self.again = relaunch(
            compiled, self.grid, stream, (*described, *others, *self.scalars), len(described), len(others)
        )


def recipe_for(Q, K, V, key_lengths, causal: bool, scale: float) -> Recipe | None:
    """The launch for these tensors; None where the copy engine cannot have them."""
    if not aligned(Q, K, V, key_lengths):
        return None
    lengths = None if key_lengths is None else key_lengths.dtype
    return recipe(*kind(Q, K, V), lengths, causal, scale)


@functools.lru_cache(maxsize=1024)
def recipe(device, dtype, same, Q_shape, K_shape, V_shape, Q_strides, K_strides, V_strides, lengths, causal, scale):
    """The same for all tensors of one kind; `lengths` is the dtype of key_lengths, None without."""
    if not fits(device, dtype, same, Q_shape, K_shape, V_shape, Q_strides, K_strides, V_strides):
        return None
    lengths = lengths is not None
    O_strides = torch.empty_like(torch.empty_strided(Q_shape, Q_strides, device="meta")).stride()
    (batch, H, N_q, d), (_, H_kv, N_k, _) = Q_shape, K_shape
    sizes, group = plan(d, N_q, batch * H, multiprocessors(device), causal, lengths), H // H_kv
    describe = functools.partial(descriptor, dtype, d=sizes.d_pad)
    descriptors = (
        describe(Q_shape, Q_strides, rows=64),
        describe(K_shape, K_strides, rows=sizes.B_c),
        describe(K_shape, V_strides, rows=sizes.B_c),
        describe(Q_shape, O_strides, rows=64),
    )
    row_blocks = -(-N_q // (64 * sizes.consumers)) * batch * H
    at_once = heads_at_once(K_shape, causal) * group
    fine, coarse, huge = launch.scales(scale)
    slack = min(8.0 / fine, 2.0**126)
    scalars = H, group, N_q, N_k, batch * H, at_once, fine, coarse, huge, slack
    options = dict(sizes.options(), CAUSAL=causal, RAGGED=lengths or N_k % sizes.B_c != 0)
    return Recipe((min(multiprocessors(device), row_blocks), 1, 1), descriptors, scalars, options)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many SMs a GPU has; 0 if it is no Hopper, or the kernels were made for the interpreter."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip or (properties.major, properties.minor) != (9, 0) or interpreter.switched_on():
        return 0
    return properties.multi_processor_count


def pays(Q, K, causal: bool) -> bool:
    """Whether there is work enough: with few blocks of 64 rows on an SM the portable kernel, which starts sooner, wins.

    Measured on an H200. At d 64 it is ahead up to 4 blocks on an SM, with up to 64 rows 32, and so where 128 + 64 rows
    without a mask fit no block but that of 192; not from 512 rows and keys on, or if all blocks fit at once and have
    512 keys to go through. At d 96 and 128 it is ahead up to 2 blocks with less than 256 keys.
    """
    batch, H, N_q, d = Q.shape
    share = batch * H * -(-N_q // 64) / multiprocessors(Q.device)
    N_k = K.shape[2]
    if d == 64:
        least = 32 if N_q <= 64 or (128 < N_q <= 192 and not causal) else 4
        return share > least or (N_k >= 512 and (N_q >= 512 or share <= 1))
    return d > 128 or share > 2 or N_k >= 256


def supports(Q, K, V, key_lengths=None) -> bool:
    """Whether forward() takes these tensors."""
    return aligned(Q, K, V, key_lengths) and fits(*kind(Q, K, V))


def aligned(Q, K, V, key_lengths) -> bool:
    """Whether they begin where the copy engine can begin."""
    if key_lengths is not None and not key_lengths.is_contiguous():
        return False
    return (Q.data_ptr() | K.data_ptr() | V.data_ptr()) % 16 == 0


def kind(Q, K, V) -> tuple:
    """All that matters of tensors but their place."""
    same = Q.dtype == K.dtype == V.dtype
    return Q.device, Q.dtype, same, Q.shape, K.shape, V.shape, Q.stride(), K.stride(), V.stride()


@functools.lru_cache(maxsize=1024)
def fits(device, dtype, same, Q_shape, K_shape, V_shape, *strides) -> bool:
    """Whether tensors of such a kind can be taken, wherever they lie."""
    return (
        device.type == "cuda"
        and multiprocessors(device) > 0
        and dtype in HALVES
        and same
        and Q_shape[3] in PLANS
        and K_shape == V_shape
        and all(map(copyable, (Q_shape, K_shape, V_shape), strides))
    )


def copyable(shape, strides) -> bool:
    """Whether the copy engine can address such a tensor: in whole steps of 16 bytes, no dimension repeated."""
    steps = all(n == 1 or (stride > 0 and stride % 8 == 0) for n, stride in zip(shape[:3], strides[:3], strict=True))
    return strides[3] == 1 and steps and min(shape) > 0


COUNTERS: dict = {}  # one for each stream: on a stream only one launch runs at a time


def counter_of(device: torch.device, stream: int) -> torch.Tensor:
    """Two zeros for the kernel to count in, which it leaves as zeros; a CUDA graph gets its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    found = COUNTERS.get((device, stream))
    if found is None:
        found = COUNTERS[device, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return found
