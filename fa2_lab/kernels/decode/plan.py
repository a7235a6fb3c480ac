"""Prepare the launches of the decode kernels: choose tile sizes, the number of programs, and split-KV or stream-K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from fa2_lab.kernels import interpreter, launches, tables
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.cache import get_or_prepare, tensor_keys
from fa2_lab.kernels.common.softmax import make_scales
from fa2_lab.kernels.contiguous import contiguous_like, result_stand_in
from fa2_lab.kernels.decode import split_rules
from fa2_lab.kernels.decode.kernel import (
    DecodeConstants,
    DecodeSizes,
    Strides,
    merge_partials_kernel,
    split_kv_kernel,
    stream_k_kernel,
)
from fa2_lab.kernels.tables import power_of_2
from fa2_lab.tiles import cdiv

MAX_ROWS = 64  # maximum number of query rows in a tile
MERGE_WIDTH = 32  # columns of O per program in the merge kernel

# The call -------------------------------------------------------------------------------------------------------


def is_fastest(Q: Tensor, K: Tensor, num_splits: int = 0) -> bool:
    """Return whether the decode kernels are the fastest choice for Q and K of these shapes.

    This is the case if each K/V head has few query rows, or if it has up to 64 query rows and the cache is long. If
    num_splits is given, however, the choice must not depend on the number of keys, because N_k is the length of the
    longest sequence in the batch, and a sequence's result must not depend on other sequences.
    """
    rows = Q.shape[1] // K.shape[1] * Q.shape[2]
    few_rows = rows <= 16 or (rows <= MAX_ROWS and (num_splits > 0 or K.shape[2] >= 2048))
    return few_rows and Q.shape[2] <= 16 and Q.numel() > 0 and K.numel() > 0


def decode(tensors: Tensors, options: Options, programs: int | None = None) -> Any:
    """Compute O (shaped like Q) and L (batch, heads, N_q) for a few queries with the decode kernels.

    If `programs` is given, divide the work equally among that many programs.
    """
    key = "decode", options, programs, *tensor_keys(tensors)
    return get_or_prepare(key, prepare, tensors, options, programs)(tensors)


@dataclass(frozen=True)
class PreparedDecode:
    """A prepared decode call, consisting of kernel launches with all arguments bound except the tensors.

    Calling the object with Tensors returns (O, L).
    """

    attend: launches.Launch
    merge: launches.Launch | None  # launch of the merge kernel, or None if every program reads whole heads
    scratch: int  # number of fp32 elements in the scratch memory for partial results

    def __call__(self, tensors: Tensors) -> Any:
        """Launch the kernels on these tensors, and return (O, L)."""
        Q, K, V, key_lengths, sinks = tensors.q, tensors.k, tensors.v, tensors.key_lengths, tensors.sinks
        O = contiguous_like(Q)
        L = torch.empty(size=Q.shape[:3], dtype=torch.float32, device=Q.device)
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=Q.device)
        with launches.on_device_of(Q):
            self.attend(Q, K, V, O, L, scratch, sinks, key_lengths, tensors.block_table)
            if self.merge is not None:
                self.merge(O, L, scratch, key_lengths)
        return O, L


def prepare(tensors: Tensors, options: Options, programs: int | None = None) -> PreparedDecode:
    """Prepare a decode call by choosing the sizes, the number of programs, and the kernels' constants."""
    Q = tensors.q
    shape = shape_of(tensors, one_length=tensors.key_lengths is None and not options.num_splits)
    config, slots = decode_config(Q, shape)
    window = launches.window_bounds(options)
    partition = partition_keys(shape, config, Q.element_size(), slots, programs, options)
    const = constants_of(shape, config, window, partition, slots, early_merge=has_pdl(Q.device))
    sizes, strides = sizes_of(shape, config, window), strides_of(tensors)
    scales = make_scales(options.scale, options.softcap)
    common: dict[str, Any] = dict(strides=strides, N_k=shape.N_k, scales=scales, sizes=sizes, const=const)
    if partition.splits:
        kernel, specific = split_kv_kernel, dict(splits=partition.splits, WHOLE=partition.whole_heads)
    else:
        kernel, specific = stream_k_kernel, dict(batch=shape.batch, share=partition.share)
    attend = launches.Launch(kernel, partition.programs, config.compiler_options(), **common, **specific)
    if partition.whole_heads:
        return PreparedDecode(attend, merge=None, scratch=0)
    merge = prepare_merge(shape, config, partition, common)
    parts = partition.programs + shape.batch * sizes.row_blocks_per_sequence
    return PreparedDecode(attend, merge, scratch=parts * sizes.R * (config.d_pad + 4))


def prepare_merge(
    shape: Shape, config: tables.KernelConfig, partition: Partition, common: dict[str, Any]
) -> launches.Launch:
    """Return the launch of the merge kernel, in which each program merges a few columns of one row of O.

    The number of warps per program depends on the number of columns and on the number of partial results per head.
    `common` contains the arguments shared by all decode kernels.
    """
    width, heads = min(config.d_pad, MERGE_WIDTH), shape.batch * common["sizes"].row_blocks_per_sequence
    parts = min(64, max(4, power_of_2(partition.programs // heads + 2)))
    warps, registers = min(4, max(1, parts * width // 1024)), config.registers and 128
    merge_config = tables.KernelConfig(config.B_r, config.B_c, warps, stages=1, registers=registers)
    compiler_options = merge_config.compiler_options()
    if common["const"].early_merge:
        compiler_options |= launches.USE_PDL
    numbers = dict(batch=shape.batch, share=partition.share, programs=partition.programs)
    specific = dict(SPLIT_KV=partition.splits > 0, PARTS=parts, WIDTH=width)
    grid = shape.batch * shape.H * shape.N_q * (config.d_pad // width)
    return launches.Launch(merge_partials_kernel, grid, compiler_options, **common | numbers | specific)


# Sizes -----------------------------------------------------------------------------------------------------------


class DecodeConfig(NamedTuple):
    """A table entry: keys per tile, warps per program, stages, programs per SM, and registers per thread."""

    B_c: int
    warps: int
    stages: int
    programs_per_SM: int  # number of programs that run concurrently on an SM
    registers: int = 255  # maximum number of registers per thread; only NVIDIA's compiler accepts this limit


# {case: {d_pad: DecodeConfig}}. decode_config() selects the first matching case that contains d_pad. The entries for
# Hopper were the fastest of those timed with `python -m fa2_lab bench decode` on an H200, a GPU that needs about 96 KiB
# of loads in flight per SM. For all entries, `python -m pytest tests/heart/test_compile.py` checks that no registers
# spill and that an SM can hold programs_per_SM programs.
FOR_HOPPER: dict[str, dict[int, tuple]] = {
    "fp32, 64 rows": {d: (32 if d < 256 else 16, 4, 3, 2, 240) for d in (16, 32, 64, 128, 256)},
    "fp32": {d: (64 if d < 256 else 16, 4, 2, 2, 240) for d in (16, 32, 64, 128, 256)},
    "64 rows": {16: (64, 4, 5, 2), 32: (64, 4, 5, 2), 64: (64, 4, 4, 2), 128: (32, 4, 4, 2), 256: (16, 4, 4, 2)},
    "a head on each SM": {64: (128, 4, 4, 1), 128: (64, 4, 4, 1)},
    "one query, split heads": {128: (64, 4, 4, 1)},
    "split or shared heads": {64: (64, 4, 3, 3, 168)},
    "pages": {128: (32, 4, 4, 2)} if tables.USE_LOW_REG else {},
    "any": {16: (128, 4, 4, 2), 32: (128, 4, 4, 2), 64: (128, 4, 3, 2), 128: (64, 4, 3, 2), 256: (32, 4, 3, 2)},
}
# All other NVIDIA GPUs use this table as well because its tiles fit even in 99 KiB of shared memory.
FOR_AMPERE: dict[str, dict[int, tuple]] = {
    "fp32, 64 rows": {d: (16, 4, 2, 2, 240) for d in (16, 32, 64, 128, 256)},
    "fp32": FOR_HOPPER["fp32"],
    "64 rows": {d: (16, 4, 3, 2) for d in (16, 32, 64, 128, 256)},
    "any": {16: (128, 4, 3, 2), 32: (128, 4, 3, 2), 64: (64, 4, 3, 2), 128: (32, 4, 3, 2), 256: (16, 4, 3, 2)},
}
FOR_BLACKWELL = FOR_AMPERE | {"64 rows": FOR_AMPERE["64 rows"] | {128: (32, 8, 3, 1)}}  # 4 warps would spill registers
FOR_CDNA = {  # AMD's MI300 family
    "fp32, 64 rows": {d: (32 if d < 256 else 16, 4, 2, 2) for d in (16, 32, 64, 128, 256)},
    "fp32": {d: (64 if d < 256 else 16, 4, 2, 2) for d in (16, 32, 64, 128, 256)},
    "64 rows": {16: (64, 4, 2, 2), 32: (64, 4, 2, 2), 64: (32, 4, 2, 2), 128: (16, 4, 2, 2), 256: (16, 4, 2, 2)},
    "any": {16: (128, 4, 2, 2), 32: (128, 4, 2, 2), 64: (64, 4, 2, 2), 128: (32, 4, 2, 2), 256: (16, 4, 2, 2)},
}
INTERPRETED = DecodeConfig(B_c=64, warps=1, stages=1, programs_per_SM=4)
# Paged calls with more than two stages get two extra stages because each block-table entry must be loaded before the
# page to which it points.
EXTRA_PAGED_STAGES = 2


def decode_config(Q: torch.Tensor, shape: Shape) -> tuple[tables.KernelConfig, int]:
    """Return the decode kernels' configuration for queries like Q, and the number of programs that run concurrently."""
    B_r, d_pad = min(MAX_ROWS, max(16, power_of_2(shape.rows))), tables.padded_head_dim(shape.d)
    if interpreter.is_enabled():
        SMs, entry, registers = 1, INTERPRETED, None
    else:
        SMs, table = launches.sm_count(Q.device), decode_table()
        entry = next(
            DecodeConfig(*table[case][d_pad])
            for case in matching_cases(Q, shape, SMs, B_r)
            if d_pad in table.get(case, ())
        )
        registers = None if table is FOR_CDNA else entry.registers
    stages = entry.stages + EXTRA_PAGED_STAGES * (shape.page_size > 0 and entry.stages > 2)
    fixed: dict[str, Any] = dict(registers=registers, d_pad=d_pad, upcast=tables.needs_upcast(Q))
    return tables.KernelConfig(B_r, entry.B_c, entry.warps, stages, **fixed), SMs * entry.programs_per_SM


def matching_cases(Q: torch.Tensor, shape: Shape, SMs: int, B_r: int) -> list[str]:
    """Return the names of the cases in this file's tables that match a call, from most to least specific.

    decode_config() uses the first case that has an entry for d_pad.
    """
    any_entry = DecodeConfig(*decode_table()["any"][tables.padded_head_dim(shape.d)])
    heads = shape.batch * shape.H_kv if shape.one_length else 0  # 0 if the heads may differ in length
    few_rows, fp32 = B_r == 16, Q.dtype == torch.float32
    splits = split_rules.splits_of_head(SMs, heads, cdiv(shape.N_k, any_entry.B_c))
    applies = {
        "fp32, 64 rows": fp32 and B_r == MAX_ROWS,
        "fp32": fp32,
        "64 rows": B_r == MAX_ROWS,
        "a head on each SM": few_rows and splits == 1 and heads <= SMs,
        "one query, split heads": few_rows and splits > 1 and shape.N_q == 1,
        "split or shared heads": few_rows and not split_rules.heads_fill(SMs * any_entry.programs_per_SM, heads),
        "pages": shape.page_size > 0,
        "any": True,
    }
    return [case for case in applies if applies[case]]


def decode_table() -> dict:
    """Return the table of decode configurations for the current GPU."""
    portable_table = tables.chip_tables()
    pairs = ((tables.HOPPER, FOR_HOPPER), (tables.BLACKWELL, FOR_BLACKWELL), (tables.CDNA, FOR_CDNA))
    return next((table for portable, table in pairs if portable is portable_table), FOR_AMPERE)


def has_pdl(device: torch.device) -> bool:
    """Return whether the GPU supports programmatic dependent launch (PDL).

    With PDL, a kernel can start before the previous kernel ends.
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


# Programs -------------------------------------------------------------------------------------------------------


class Partition(NamedTuple):
    """How the keys of all heads are divided among programs."""

    splits: int  # number of splits per head, or 0 for stream-K
    programs: int
    share: int  # work units per stream-K program, or a lower bound if the host does not know the lengths
    whole_heads: bool  # whether every program reads whole heads, so that no merge is needed


def partition_keys(
    shape: Shape, config: tables.KernelConfig, itemsize: int, slots: int, programs: int | None, options: Options
) -> Partition:
    """Return the Partition that divides the keys among programs, by split-KV or by stream-K.

    Split-KV is used if options.num_splits is given. It is also used if `programs` is None and split_rules.py prefers
    it. In all other cases, stream-K is used. `slots` is the number of programs that run concurrently on the GPU, and
    `itemsize` is the number of bytes per element.
    """
    row_blocks, tiles = cdiv(shape.rows, config.B_r), cdiv(shape.N_k, config.B_c)
    if options.left is not None:  # skip the tiles before the first query's window
        tiles -= max(shape.N_k - shape.N_q - options.left, 0) // config.B_c
    heads = shape.batch * shape.H_kv * row_blocks
    min_share = split_rules.smallest_share(min(config.B_r, shape.rows), config.d_pad, config.B_c, itemsize)
    splits = options.num_splits
    if shape.one_length and programs is None:
        splits = split_rules.splits_of_head(slots, heads, tiles, min_share)
    if splits:
        return Partition(splits, splits * heads, share=0, whole_heads=splits == 1)
    programs = programs or slots
    if not shape.one_length:
        return Partition(splits=0, programs=programs, share=min_share, whole_heads=False)
    share = max(cdiv(heads * (tiles + 1), programs), min_share)
    return Partition(splits=0, programs=programs, share=share, whole_heads=share % (tiles + 1) == 0)


def constants_of(
    shape: Shape, config: tables.KernelConfig, window: tuple, partition: Partition, slots: int, early_merge: bool
) -> DecodeConstants:
    """Return the decode kernels' compile-time constants.

    With stream-K, all tiles are masked because a program's share may end anywhere in a head. All tiles are also masked
    if there are more programs than `slots`. In this case, the kernel without masks takes about 10% longer on an H200,
    even though it has fewer instructions. If `early_merge` is set, the merge kernel may start before the kernel that
    reads the keys has ended.
    """
    left, right = window
    windowed = left is not None or (right is not None and shape.N_q > 1)
    # Whether every row sees every key of every tile.
    all_seen = shape.one_length and shape.N_k % config.B_c == 0 and not windowed
    split_kv = partition.splits > 0
    masked = not (split_kv and all_seen and partition.programs <= slots)
    sizes = shape.d, config.d_pad, config.B_r, config.B_c, shape.page_size
    switches = masked, not split_kv, early_merge, config.upcast
    return DecodeConstants(*map(tl.constexpr, (*sizes, *switches)))


def sizes_of(shape: Shape, config: tables.KernelConfig, window: tuple) -> DecodeSizes:
    """Return the DecodeSizes of a call.

    Triton recompiles a kernel whenever one of these sizes becomes 1 or a multiple of 16. DecodeSizes therefore contains
    only sizes that stay the same within a model. Sizes that change from call to call are separate arguments, listed in
    UNSPECIALIZED.
    """
    row_blocks, R = cdiv(shape.rows, config.B_r), min(config.B_r, shape.rows)
    return DecodeSizes(
        *(shape.H, shape.group, shape.N_q, row_blocks), row_blocks_per_sequence=shape.H_kv * row_blocks, R=R,
        pages=shape.pages, table_stride=shape.table_stride, left=window[0], right=window[1]
    )  # fmt: skip


# Shapes ---------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """The sizes of a call's tensors."""

    batch: int
    H_kv: int  # K/V heads
    group: int  # query heads per K/V head
    N_q: int
    N_k: int  # number of keys in the longest sequence
    d: int
    page_size: int  # keys per page, or 0 if the cache is not paged
    pages: int
    table_stride: int  # distance between the rows of the block table
    one_length: bool  # whether all sequences are known to have N_k keys, so that programs need not read the lengths

    @property
    def H(self) -> int:
        """The number of query heads."""
        return self.H_kv * self.group

    @property
    def rows(self) -> int:
        """The number of query rows per K/V head."""
        return self.group * self.N_q


def shape_of(tensors: Tensors, one_length: bool) -> Shape:
    """Return the Shape of a call.

    K and V are sets of pages if there is a block table, and single tensors otherwise. `one_length` is True if the host
    knows that all sequences have the same number of keys.
    """
    (batch, H, N_q, d), K, table = tensors.q.shape, tensors.k, tensors.block_table
    if table is None:
        _, H_kv, N_k, _ = K.shape
        return Shape(batch, H_kv, H // H_kv, N_q, N_k, d, page_size=0, pages=0, table_stride=0, one_length=one_length)
    pages, page_size, H_kv, _ = K.shape
    N_k = table.shape[1] * page_size
    return Shape(batch, H_kv, H // H_kv, N_q, N_k, d, page_size, pages, table.stride(0), one_length)


def strides_of(tensors: Tensors) -> Strides:
    """Return the strides of Q, K, V and O for batch entries (or pages), heads, and rows (or keys)."""
    Q, K, V = tensors.q, tensors.k, tensors.v
    (K_page, *K_rest), (V_page, *V_rest) = K.stride()[:3], V.stride()[:3]
    if tensors.block_table is not None:  # within a page, the key dimension precedes the head dimension
        K_rest, V_rest = K_rest[::-1], V_rest[::-1]
    return Strides(Q.stride()[:3], (K_page, *K_rest), (V_page, *V_rest), result_stand_in(Q).stride()[:3])
