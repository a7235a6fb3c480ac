"""Compile kernels as calls launch them, for GPUs that need not be present, and print a line of JSON for each.

    python tests/heart/compile_worker.py KIND few|all [TARGET …]

KIND is portable, decode, forward or backward. The last two are Hopper's kernels. Triton's interpreter must be
off. A process can compile only for its first target, so each target gets its own process.
"""

import json
import os
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from multiprocessing import get_context

import machine_code
import torch
import ttgir
from biases import BIASES
from triton.runtime import cache as cache_of_triton

from fa2_lab.kernels import tables
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.kernels.decode import plan
from fa2_lab.kernels.portable import backward, forward
from fa2_lab.tools import offline

# Options of a call of Hopper's kernels
PACKED, WINDOW, DETERMINISTIC = dict(packed=3), dict(left=100), dict(deterministic=True)


class OnlyCompiles:
    """A stand-in for a kernel that is launched in the same way, but only compiles and keeps the compiled kernel."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, None

    def __getitem__(self, grid):
        def call(*arguments, **options):
            self.compiled = self.kernel.warmup(*arguments, grid=grid, **options)

        return call


def only_compile(module, *names: str) -> list[OnlyCompiles]:
    """Replace kernels of a module by stand-ins that only compile, and return these."""
    for name in names:
        if not isinstance(getattr(module, name), OnlyCompiles):
            setattr(module, name, OnlyCompiles(getattr(module, name)))
    return [getattr(module, name) for name in names]


def meta_tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


# Portable -----------------------------------------------------------------------------------------------------


def causal_bf16(*dimensions: int) -> list[tuple]:
    return [(d, "bfloat16", True, None) for d in dimensions]


# Every entry of the tables for d > 16. 40 and 72, whose rows are loaded as 8 · 5 and 8 · 9 numbers, have the entries of
# 64 and 128. What the tables of two chips with the same instructions have in common is compiled for one of both.
ALIBI = (128, "bfloat16", True, "alibi")
FEW_PORTABLE = {
    "sm_80": [*causal_bf16(32, 40, 72), ALIBI],
    "sm_86": [(256, "float32", False, None)],
    "sm_89": causal_bf16(64, 128, 256),
    "sm_90": [*causal_bf16(64, 128, 256), (128, "float16", False, None), ALIBI],
    "sm_100": causal_bf16(64, 128, 256),
    "sm_120": causal_bf16(64, 128),
    "gfx942": [*causal_bf16(64, 128), (256, "float32", False, None)],
}
MORE_PORTABLE = [*product((16, 32, 40, 64, 72, 88, 96, 104, 120, 128, 256), ("bfloat16",), (True, False), (None,))]
MORE_BIASED = [*product((64, 128), ("bfloat16",), (True, False), ("alibi", "tree"))]  # a tree mask needs more registers


def compile_portable(target: str, which: str) -> list[dict]:
    """Return rows of the portable kernels for the head dimensions and biases of this target, a few or all."""
    more = MORE_PORTABLE + MORE_BIASED * (target in ("sm_80", "sm_89", "sm_90"))
    return compiled_for(target, list(dict.fromkeys(FEW_PORTABLE[target] + more * (which == "all"))))


def compiled_for(target: str, wanted: list[tuple]) -> list[dict]:
    """Return a row per portable kernel for each wanted (d, dtype, causal, name of a bias or None)."""
    offline.compile_for(target)
    kernels = dict(zip(("dkdv", "dq"), only_compile(backward, "bwd_dkdv", "bwd_dq"), strict=True))
    kernels |= dict(forward=only_compile(forward, "forward_kernel")[0])
    rows = []
    for d, dtype, causal, bias in wanted:
        Q = meta_tensor(2, 16, 8192, d, dtype=getattr(torch, dtype))
        tensors, options = Tensors(Q, Q, Q), Options(causal, scale=0.1, bias=bias and BIASES[bias][0])
        O, L = forward.prepare(tensors, options)(tensors)
        backward.prepare(O, O, tensors, options)(O, None, O, L, tensors)
        for name, kernel in kernels.items():
            blocks = tables.choose_config(name, Q, causal)
            row = dict(target=target, kernel=name, d=d, dtype=dtype, causal=causal, bias=bias, warps=blocks.warps)
            waits = target == "sm_90" and dtype != "float32"
            asm = kernel.compiled.asm
            row |= dict(compiled=kernel.compiled, waits=waits, narrow_accesses=narrow_accesses(asm.get("ptx", "")))
            rows.append(row | dict(mma_shapes=ttgir.mma_shapes(asm["ttgir"])))
    return rows


def narrow_accesses(ptx: str) -> int:
    """Return the number of loads, copies and stores of a 16-bit tensor that move fewer than sixteen bytes.

    L and D are fp32, so their accesses do not count.
    """
    narrow = r"(?:ld|st)\.global\S*\.(?:b16|v2\.b32)\s|cp\.async\S*\s+\[[^]]*\], \[[^]]*\], (?:0x)?[28]\b"
    return len(re.findall(narrow, ptx))


# Decode -------------------------------------------------------------------------------------------------------

DECODE_CALLS = {  # (batch, query heads, N_q, page size or 0, key_lengths, causal, num_splits), all with 8 K/V heads
    "one query": (2, 32, 1, 0, False, False, 0),
    "whole heads": (32, 32, 1, 0, False, False, 0),
    "a head on each SM": (16, 32, 1, 0, False, False, 0),
    "shares": (12, 32, 1, 0, False, False, 0),
    "lengths": (2, 32, 4, 0, True, True, 0),
    "pages of 16": (2, 32, 1, 16, True, True, 0),
    "pages of 64": (2, 32, 1, 64, True, True, 0),
    "64 rows": (2, 32, 16, 0, True, True, 0),
    "splits": (2, 32, 1, 0, False, False, 7),
    "splits of pages": (2, 32, 1, 16, True, True, 7),
}
D_64_CALLS = ("lengths", "64 rows", "one query", "a head on each SM")


def compile_decode(target: str, which: str) -> list[dict]:
    """Return a row per kind of decode call at d = 128, and at d = 64 for the calls of D_64_CALLS.

    At d = 64, these are the two that take the most registers and those with sizes of their own. Other targets than
    Hopper compile only two calls at d = 128, unless all are asked for.
    """
    offline.compile_for(target)
    plan.has_pdl = lambda device: target in ("sm_90", "sm_100", "sm_120")
    split_kv, stream_k, merge = only_compile(plan, "split_kv_kernel", "stream_k_kernel", "merge_partials_kernel")
    rows, few_calls = [], ("one query", "64 rows")  # for targets other than Hopper
    all_calls = which == "all" or target == "sm_90"
    for d, calls in ((64, D_64_CALLS), (128, DECODE_CALLS)) if all_calls else ((128, few_calls),):
        for name in calls:
            batch, heads, N_q, page, lengths, causal, splits = DECODE_CALLS[name]
            q = meta_tensor(batch, heads, N_q, d)
            k = meta_tensor(1000, page, 8, d) if page else meta_tensor(batch, 8, 8192, d)
            table = meta_tensor(2, 500, dtype=torch.int32) if page else None
            key_lengths = meta_tensor(2, dtype=torch.int32) if lengths else None
            tensors = Tensors(q, k, k, key_lengths=key_lengths, block_table=table)
            options = Options(causal, scale=0.1, num_splits=splits)
            call = plan.prepare(tensors, options)
            call(tensors)
            one_length = key_lengths is None and not splits
            programs = plan.decode_config(q, plan.shape_of(tensors, one_length))[1]
            warps = call.attend.compiler_options["num_warps"]
            row = dict(target=target, call=name, d=d, warps=warps, programs=programs // 132)
            attend_kernel = split_kv if call.attend.kernel is split_kv else stream_k
            rows.append(row | dict(compiled=attend_kernel.compiled, merge=merge.compiled))
    return rows


# Hopper's forward ---------------------------------------------------------------------------------------------


FORWARD_LENGTHS, HEAD_COUNTS = (60, 250, 500, 1000, 2000, 8000, 32000), (1, 8, 32, 128, 512)


def kinds_of(d: int) -> list[tuple]:
    """Return all (sizes, causal, with key_lengths) that the forward kernel chooses for any shape with this d."""
    from fa2_lab.kernels.hopper.forward.configs import choose

    masks = product((False, True), (False, True))
    shapes = product(masks, FORWARD_LENGTHS, (1, 2), HEAD_COUNTS)
    return list(dict.fromkeys((choose(d, N, n * N, H, 132, *mask), *mask) for mask, N, n, H in shapes))


def all_jobs() -> list[tuple]:
    """Return jobs for all kinds of calls, with whole and ragged tiles, packed sequences, and windows.

    At d = 48 and d = 96, matmuls that sum over d leave out the last quarter of the d_pad columns.
    """
    all_kinds = [(d, kind) for d in (32, 48, 64, 96, 128, 256) for kind in kinds_of(d)]
    packed = [(d, 511, sizes, causal, False, PACKED) for d, (sizes, causal, keys) in all_kinds if not keys]
    return [(d, N, *kind) for d, kind in all_kinds for N in (512, 511)] + packed + windowed_jobs(WINDOWED)


# d, causal, with key_lengths
WINDOWED = [(64, True, True), (128, False, False), (96, True, True), (128, True, False)]


def windowed_jobs(calls: list[tuple]) -> list[tuple]:
    return [(d, 511 + keys, None, causal, keys, WINDOW) for d, causal, keys in calls]


def few_jobs() -> list[tuple]:
    """Return jobs with each choice of sizes once, and a few more with windows and packed sequences.

    Each has the mask and the length that earlier jobs have least. Sizes whose tiles have fewer keys than those of other
    sizes with as many consumers take fewer registers, and are left out.
    """
    from fa2_lab.kernels.hopper.forward.configs import DEFAULT, THREE_CONSUMERS, choose

    jobs, uses = [], Counter()
    for d in (64, 128, 256):
        chosen = [x for x, *_ in kinds_of(d)]
        widest = {(x.consumers, max(y.B_c for y in chosen if y.consumers == x.consumers)) for x in chosen}
        for sizes in dict.fromkeys(x for x in chosen if (x.consumers, x.B_c) in widest):
            masks = [tuple(mask) for other, *mask in kinds_of(d) if other == sizes]
            mask, N = min(product(masks, (512, 511)), key=uses.__getitem__)
            uses[mask, N] += 1
            jobs.append((d, N, sizes, *mask))
    jobs.append((128, 512, THREE_CONSUMERS, True, False))  # above, these sizes occur only without the mask
    jobs += [(d, 511, choose(d, 4096, 4096, 128, 132, True, False), True, False) for d in (32, 48, 96)]
    long_rows = replace(DEFAULT[64], low_reg_schedule=tables.USE_LOW_REG)
    packed = ((64, DEFAULT[64], False), (64, long_rows, True), (128, THREE_CONSUMERS, True))
    return jobs + windowed_jobs(WINDOWED[:2]) + [(d, 511, sizes, causal, False, PACKED) for d, sizes, causal in packed]


@cache
def pretend_hopper() -> None:
    """Make the kernels' modules compile as on a Hopper GPU."""
    from fa2_lab.kernels.hopper.shared import host

    offline.compile_for("sm_90")
    host.supports = lambda *kind: True
    host.scheduler_counter = lambda X, in_custom_op: torch.zeros(2, dtype=torch.int32)


def call_tensors(d: int, N: int, keys: torch.dtype | None, packed: int | None = None) -> Tensors:
    """Return the tensors of a call, with key_lengths of dtype `keys`, or packed in this number of sequences."""
    Q = torch.empty((2, 4, N, d) if packed is None else (N, 4, d), dtype=torch.bfloat16)
    lengths = None if keys is None else torch.ones(2, dtype=keys)
    starts = None if packed is None else torch.zeros(packed + 1, dtype=torch.int32)
    return Tensors(Q, Q, Q, key_lengths=lengths, cu_seqlens_q=starts, cu_seqlens_k=starts)


def compile_forward(d: int, N: int, sizes, causal: bool, keys: bool, extra: dict | None = None) -> list[dict]:
    """Compile the forward kernel of one call, and return its row."""
    pretend_hopper()
    from fa2_lab.kernels.hopper.forward import launch

    launch.configs.choose = lambda *_: sizes
    extra = extra or {}
    options = Options(causal, d**-0.5, left=extra.get("left"))
    tensors = call_tensors(d, N, torch.int32 if keys else None, extra.get("packed"))
    (kernel,) = only_compile(launch, "forward_kernel")
    launch.prepare(tensors, options)(tensors)
    chosen = launch.prepare_launch(tensors, options).arguments["CONFIG"]
    text, row = kernel.compiled.asm["ttgir"], dict(d=d, N=N, consumers=chosen.consumers, causal=causal, keys=keys)
    row |= dict(compiled=kernel.compiled, waits=True, idle_barriers=ttgir.idle_barriers(text))
    row |= dict(stores_without_wait=ttgir.stores_without_wait(text))
    row |= dict(copies_before_next_tile=ttgir.copies_before_next_tile(text))
    return [row | dict(races=ttgir.forward_races(text, chosen.ping_pong))]


# Hopper's backward --------------------------------------------------------------------------------------------

BACKWARD_KERNELS = ("bwd_preprocess", "backward_kernel", "bwd_postprocess")
BACKWARD_CALLS = [*product((64, 128), (1024,), (False, True), (False, True))]  # d, N, causal, key_lengths
BACKWARD_CALLS += [(64, 1000, True, False), (96, 1000, True, False), (96, 1000, False, False), (96, 1024, False, False)]
BACKWARD_CALLS += [(128, 4096, True, False), (96, 4096, True, True)]  # long enough to compute dK in the next step
BACKWARD_CALLS += [(32, 1000, True, False), (32, 1024, False, False), (48, 1000, True, False)]
OPTIONS_OF_CALLS = [  # number of the call, parts, options
    *[(0, 3, DETERMINISTIC), (7, 1, DETERMINISTIC), (8, 3, DETERMINISTIC), (6, 1, WINDOW), (2, 3, WINDOW)],
    *[(2, 1, WINDOW | DETERMINISTIC), (2, 1, PACKED), (4, 3, PACKED | DETERMINISTIC)],
]
OPTION_JOBS = [(BACKWARD_CALLS[n], parts, options) for n, parts, options in OPTIONS_OF_CALLS]
# In one part, and in three parts that add to the same dK and dV
ALL_BACKWARD_JOBS = [*product(BACKWARD_CALLS, (1, 3), ({},)), *OPTION_JOBS]
FEW_BACKWARD_JOBS = [(BACKWARD_CALLS[n], parts, {}) for n, parts in ((0, 1), (3, 3), (5, 3), (6, 1), (12, 3), (14, 3))]
FEW_BACKWARD_JOBS += OPTION_JOBS


def compile_backward(sizes: tuple, parts: int, extra: dict) -> list[dict]:
    """Compile the backward kernels of one call, and return their rows."""
    pretend_hopper()
    from fa2_lab.kernels.hopper.backward import launch

    d, N, causal, keys = sizes
    launch.configs.choose_parts = lambda *_: parts
    tensors = call_tensors(d, N, torch.int64 if keys else None, extra.get("packed"))
    kernels, L = only_compile(launch, *BACKWARD_KERNELS), torch.empty(2, 4, N)
    options = Options(causal, d**-0.5, left=extra.get("left"))
    call = launch.prepare(tensors.q, tensors.q, tensors, options, "deterministic" in extra)
    call(tensors.q, L if causal else None, tensors.q, L, tensors)
    rows = []
    for name, kernel in zip(BACKWARD_KERNELS, kernels, strict=True):
        text, specialized = kernel.compiled.asm["ttgir"], name == "backward_kernel"
        row = dict(kernel=name, d=d, N=N, causal=causal, keys=keys, parts=parts, compiled=kernel.compiled) | extra
        row |= dict(races=ttgir.backward_races(text), waits=specialized)
        row |= dict(pdl=kernel.compiled.metadata.launch_pdl, awaits="griddepcontrol.wait" in kernel.compiled.asm["ptx"])
        row |= dict(released=len(re.findall(r"\b(?:red|atom)\.global\.gpu\.release\.", kernel.compiled.asm["ptx"])))
        rows.append(row | dict(idle_barriers=ttgir.idle_barriers(text) if specialized else []))
    return rows


COMPILERS = dict(portable=compile_portable, decode=compile_decode, forward=compile_forward, backward=compile_backward)


def compile_jobs(task: tuple[str, list]) -> list[dict]:
    """Return the rows of some jobs of a kind."""
    kind, jobs = task
    return with_machine_code([row for job in jobs for row in COMPILERS[kind](*job)])


def with_machine_code(rows: list[dict]) -> list[dict]:
    """Return the rows with numbers from the kernels' machine code in place of the compiled kernels.

    `waits` is added where a row asks for it.
    """
    kernels = [row[name] for row in rows for name in ("compiled", "merge") if name in row]
    cubins = {x.asm["cubin"]: x.metadata.target.arch for x in kernels if "cubin" in x.asm}
    offline.read = machine_code.disassemble(cubins).get
    for row in rows:
        compiled = row.pop("compiled")
        row |= offline.report(compiled)
        row |= {"merge": offline.report(row["merge"])} if "merge" in row else {}
        row |= {"waits": serialized(compiled)} if row.get("waits") else {}
    return rows


def serialized(kernel) -> bool:
    """Return whether the compiler makes each asynchronous matmul (Hopper's wgmma) wait for the previous one."""
    code = offline.disassembled(kernel.asm["cubin"])
    return len(re.findall(r"WARPGROUP\.DEPBAR", code)) > len(re.findall("HGMMA", code)) / 2


def tasks(kind: str, which: str, targets: list[str]) -> list[tuple[str, list]]:
    """Return tasks, each for one process: all jobs of one target, or a part of Hopper's jobs."""
    if targets:
        return [(kind, [(target, which)]) for target in targets]
    if kind == "forward":
        jobs = all_jobs() if which == "all" else few_jobs()
    else:
        jobs = ALL_BACKWARD_JOBS if which == "all" else FEW_BACKWARD_JOBS
    return [(kind, jobs[n :: 4 * os.cpu_count()]) for n in range(min(len(jobs), 4 * os.cpu_count()))]


if __name__ == "__main__":
    kind, which, *targets = sys.argv[1:]
    context = get_context("fork")  # so that what is slow is done once, by a process that compiles nothing:
    torch.empty_like(meta_tensor(1))  # imports sympy
    getattr(cache_of_triton, "triton_key", int)()  # hashes Triton's files
    with context.Pool(os.cpu_count(), maxtasksperchild=1 if targets else None) as pool:
        for rows in pool.imap(compile_jobs, tasks(kind, which, targets)):
            print(*map(json.dumps, rows), sep="\n", flush=True)
