"""From torch to the three launches of the Hopper backward."""

import functools
import math
from dataclasses import dataclass

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fa2_lab.kernels import launch
from fa2_lab.kernels.hopper.forward import host


@dataclass(frozen=True)
class Plan:
    """One launch: sizes that fit the registers and, to the last KiB, the shared memory of an SM; and a step's order."""

    B_r: int
    d_pad: int
    dv_late: bool  # dV's product after dS: fewer registers
    dk_late: bool  # dK's product in the next step
    hold_v: bool  # half of V in registers
    registers: int = 240  # of a consumer thread


DIMENSIONS = (64, 96, 128)
SMALLEST_SCALE = 2.0**-60  # S starts from −L/scale, which must not overflow


@dataclass(frozen=True)
class Recipe:
    """All that calls on tensors of the same shapes, strides and types have in common."""

    before: launch.Plan
    main: host.Recipe
    after: launch.Plan
    starts: tuple[int, int]  # shapes of what lies between them
    sums: tuple[int, int]
    shared: tuple[int, int] | None  # where the sums of dK and dV begin, if column blocks are divided


def pays(Q, K) -> bool:
    """Whether there is work enough. Measured on an H200: up to 256 keys at d 64 the portable kernels start sooner.

    They are ahead up to one block of 64 rows on an SM, with up to 128 keys two; grouped heads are not for them.
    """
    (batch, H, N_q, d), (_, H_kv, N_k, _) = Q.shape, K.shape
    if d != 64 or N_k > 256 or H != H_kv:
        return True
    return batch * H * -(-N_q // 64) > (1 if N_k > 128 else 2) * host.multiprocessors(Q.device)


def recipe_for(dO, dL, Q, K, V, O, L, key_lengths, causal: bool, scale: float) -> Recipe | None:
    """The launches for these tensors; None where the copy engine cannot have them."""
    bits = dO.data_ptr() | O.data_ptr() | L.data_ptr() | (0 if dL is None else dL.data_ptr())
    if bits % 16 or not host.aligned(Q, K, V, key_lengths):
        return None
    lengths = None if key_lengths is None else key_lengths.dtype
    return recipe(host.kind(Q, K, V), O.stride(), dO.stride(), dL is None, lengths, causal, scale)


@functools.lru_cache(maxsize=1024)
def recipe(kind, O_strides, dO_strides, no_dL, lengths, causal, scale) -> Recipe | None:
    """The same for all tensors of one kind; `lengths` is the dtype of key_lengths, None without."""
    device, dtype, _, Q_shape, K_shape, _, *strides = kind
    (batch, H, N_q, d), (_, H_kv, N_k, _) = Q_shape, K_shape
    if d not in DIMENSIONS or not host.fits(*kind) or not host.copyable(Q_shape, dO_strides) or scale < SMALLEST_SCALE:
        return None
    ragged = lengths is not None or N_k % 128 != 0
    sizes, T_c = plan(d, N_q, causal, ragged), -(-N_k // 128)
    T_r = -(-N_q // sizes.B_r)
    row_blocks, column_blocks, group = T_r * batch * H, T_c * batch * H_kv, H // H_kv
    parts = parts_for(column_blocks, group * T_r, host.multiprocessors(device), causal)
    shared, sums = shapes_of_sums(row_blocks * sizes.B_r, column_blocks * 128, sizes.d_pad, parts)
    starts = row_blocks, 2 * sizes.B_r
    lots = batch * H_kv * parts
    at_once = min(lots, lots_at_once(N_q, d, causal))
    scalars = H, group, N_q, N_k, T_r, parts, lots, at_once, launch.base_2(scale)
    options = dict(CAUSAL=causal, RAGGED=ragged, DV_LATE=sizes.dv_late, DK_LATE=sizes.dk_late, HOLD_V=sizes.hold_v)
    options |= dict(REGISTERS=sizes.registers, num_warps=4)
    described = describe(dtype, sizes, Q_shape, K_shape, (*strides, dO_strides), starts, sums, shared)
    grid = min(host.multiprocessors(device), column_blocks * parts), 1, 1
    constants, plain = (d, sizes.d_pad, sizes.B_r), launch.Blocks(64, sizes.d_pad, 4, 1)
    rest = O_strides[:3], dO_strides[:3], H, N_q, T_r, sums[0] // (2 * sizes.d_pad)
    before = launch.Plan(plain, row_blocks * sizes.B_r // 64, rest, constants)
    outputs = (like(shape, x)[:3] for shape, x in zip((Q_shape, K_shape, K_shape), strides, strict=True))
    rest = *outputs, H, H_kv, N_q, N_k, T_r, T_c, 2 * row_blocks, 2 * column_blocks
    after = launch.Plan(plain, 2 * row_blocks + (4 * column_blocks if shared else 0), rest, constants)
    return Recipe(before, host.Recipe(grid, described, scalars, options), after, starts, sums, shared)


def plan(d: int, N_q: int, causal: bool, ragged: bool) -> Plan:
    """What was fastest on an H200.

    dK's product in the next step, beside S, is 2 to 7% faster under the causal mask, at d 128 in long sequences only,
    and 1 to 4% slower without it. Half of V in 16 registers is 1 to 4% faster at d 128; with a mask it is too many.
    """
    if d == 64:
        return Plan(128, 64, dv_late=True, dk_late=causal, hold_v=False)
    return Plan(64, 128, dv_late=False, dk_late=causal and N_q >= 4096, hold_v=not (causal or ragged))


def parts_for(column_blocks: int, steps: int, multiprocessors: int, causal: bool) -> int:
    """Into how many parts to divide each column block, of so many steps, so that all is done first.

    In the time of a step: a part takes 3 to begin and end; sums take 2, and a 50th for each column block. Parts of the
    same length run in rounds. Causal ones have half the steps on average, the longest come first, and a tenth of these
    is lost at the end. These numbers were fitted to times on an H200.
    """

    def time(parts: int) -> float:
        rounds, longest = column_blocks * parts / multiprocessors, steps / parts
        sums = 2 + column_blocks / 50 if parts > 1 else 0
        if causal:
            return max(rounds * (longest / 2 + 3) + longest / 10, longest + 3) + sums
        return math.ceil(rounds) * (longest + 3) + sums

    return min((2**n for n in range(9) if 2**n <= steps), key=time)


def lots_at_once(N_q: int, d: int, causal: bool) -> int:
    """How many parts of a K/V head to run at a time, each with Q and dO of one query head: 8 MiB of L2.

    So little is faster than 16 MiB where N is small. Causal parts differ, and more of them level that out: 16 MiB, or
    32 where they are long.
    """
    one = 4 * N_q * d
    if not causal:
        return max(1, 8 * launch.MiB // one)
    return max(1, (32 if one > launch.MiB else 16) * launch.MiB // one)


def shapes_of_sums(rows: int, columns: int, d_pad: int, parts: int):
    """Where the sums of dK and dV begin, None if undivided, and the shape of all sums, dQ's first; in lines of 32."""
    dQ, dK = rows * d_pad // 32, columns * d_pad // 32
    return (None, (dQ, 32)) if parts == 1 else ((dQ, dQ + dK), (dQ + 2 * dK, 32))


def describe(dtype, sizes: Plan, Q_shape, K_shape, strides, starts, sums, shared) -> tuple[dict, ...]:
    """What bulk copies must know of Q, K, V, dO, starts, sums, and of dK and dV or their sums."""
    of = functools.partial(host.descriptor, dtype, d=sizes.d_pad)
    Q, K, V, dO = strides
    if shared is None:
        columns = of(K_shape, like(K_shape, K), rows=64), of(K_shape, like(K_shape, V), rows=64)
    else:
        columns = 2 * (numbers((shared[1] - shared[0], 32), [128, 32], 128),)
    return (
        of(Q_shape, Q, rows=sizes.B_r),
        of(K_shape, K, rows=128),
        of(K_shape, V, rows=128),
        of(Q_shape, dO, rows=sizes.B_r),
        numbers(starts, [1, 2 * sizes.B_r], 0),
        numbers(sums, [sizes.B_r * sizes.d_pad // 64, 32], 128),
        *columns,
    )


def numbers(shape, block, swizzle: int) -> dict:
    """What a bulk copy must know to fetch, or to add, a block of a matrix of fp32."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=32, rank=2)
    return vars(TensorDescriptor(torch.empty(0), list(shape), [shape[1], 1], block, layout))


def like(shape, strides) -> tuple[int, ...]:
    """The strides that torch.empty_like gives."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()
