"""Read a kernel's TTGIR: how warps share matmuls, and in Hopper's kernels, lines that would be a race."""

import re


def mma_shapes(ttgir: str) -> list[tuple]:
    """Return (rows, columns, rows per round, columns per round) of each matmul by mma.sync.

    A round is what all warps together compute at once.
    """
    by_mma = r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = 2.*?warpsPerCTA = \[(\d+), (\d+)\]"
    warps = {name: (int(rows), int(columns)) for name, rows, columns in re.findall(by_mma, ttgir, re.MULTILINE)}
    matmuls = re.findall(r"tt\.dot .*-> tensor<(\d+)x(\d+)xf32, (#\w+)>", ttgir)
    return [(int(m), int(n), 16 * warps[name][0], 8 * warps[name][1]) for m, n, name in matmuls if name in warps]


def idle_barriers(ttgir: str) -> list[str]:
    """Return the barriers that no partition of the kernel takes, so that other data may get their memory."""
    taken = set(re.search(r"ttg\.warp_specialize\((.*?)\)", ttgir)[1].split(", "))
    base = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", ttgir))
    barriers = re.findall(r"ttng\.init_barrier (%\w+),", ttgir)
    return [name for name in barriers if name not in taken and base.get(name) not in taken]


# The forward --------------------------------------------------------------------------------------------------


def producer_of(ttgir: str) -> str:
    """Return the producer's partition of a kernel."""
    (part,) = (part for part in re.split(r"partition\d+\(", ttgir) if "async_tma_copy_global_to_local" in part)
    return part


def copies_before_next_tile(ttgir: str) -> int:
    """Return the number of the producer's copies before the line that draws the next block number."""
    return producer_of(ttgir).split("tt.atomic_rmw")[0].count("async_tma_copy_global_to_local")


def stores_without_wait(ttgir: str) -> list[str]:
    """Return the producer's lines that write to shared memory without waiting until all have read the old contents.

    One wait is enough for a whole message of the mailbox, or for one copy of K and one of V.
    """
    races, waited, copies = [], False, 2
    for line in producer_of(ttgir).splitlines():
        name = re.search(r"ttn?g\.\w+|$", line)[0]
        if name == "ttng.wait_barrier":
            waited, copies = True, 0
        elif name == "ttng.arrive_barrier":
            waited = False
        elif name == "ttng.async_tma_copy_global_to_local":
            waited, copies = False, copies + 1
            races += [line] if copies > 2 else []
        elif name == "ttg.local_store" and not waited:
            races.append(line)
    return races


def forward_races(ttgir: str, ping_pong: bool) -> list[str]:
    """Return the consumers' lines that release a tile which a matmul may be reading, or that use unfenced stores.

    While a matmul runs, a consumer may arrive at no barrier, except that with ping-pong it lets the next consumer
    start. Stores need a fence before tensor cores or the copy engine read them.
    """
    races, running, arrivals, fenced = [], 0, 0, True
    for line in ttgir.splitlines():
        name = re.search(r"ttn?g\.\w+|$", line)[0]
        if name == "ttng.warp_group_dot":
            running, arrivals = running + 1, 0
        elif name == "ttng.warp_group_dot_wait":
            running = int(re.search(r"pendings = (\d)", line)[1])
        elif name == "ttng.arrive_barrier" and running:
            arrivals += 1
            races += [line] if arrivals > ping_pong else []
        elif name == "ttg.local_store":
            fenced = "1xi32" in line  # a mailbox's number, which threads read
        elif name == "ttng.fence_async_shared":
            fenced = True
        if name in ("ttng.warp_group_dot", "ttng.async_tma_copy_local_to_global") and not fenced:
            races.append(line)
    return races


# The backward -------------------------------------------------------------------------------------------------


def backward_races(ttgir: str) -> list[str]:
    """Return lines that release or overwrite shared memory which a matmul or the copy engine may still be reading.

    While matmuls run, a warp may arrive at a barrier only if the memory that the producer writes after a wait at this
    barrier is not read by these matmuls. A tile for the copy engine may be stored only after the engine has read all
    earlier tiles, or a consumer has announced this at a barrier. No warp may end before that.
    """
    rewritten, met = written_after_waits(ttgir), set()
    races, matmuls, all_read, may_store = [], [], None, False
    for name, operands, line in operations(ttgir):
        met.add(name)
        pending = int(re.findall(r"pendings = (\d+)", line + "pendings = 0")[0])
        if name == "ttng.warp_group_dot":
            matmuls.append({*operands[:2]})
        elif name == "ttng.warp_group_dot_wait":
            matmuls = matmuls[max(0, len(matmuls) - pending) :]
        elif name == "ttng.async_tma_store_wait":
            all_read = pending == 0
        elif name == "ttg.local_store":
            may_store = all_read
        elif name == "ttng.wait_barrier" and "ttg.local_store" not in met:  # a writer, which adds what consumers store
            may_store = all_read is not False
        elif name in ("ttng.async_tma_reduce", "ttng.async_tma_copy_local_to_global"):
            races += [] if may_store else [line]
            all_read = False
        elif name == "ttng.arrive_barrier" and matmuls:
            harmless = operands[0] in rewritten and rewritten[operands[0]].isdisjoint(set().union(*matmuls))
            races += [] if harmless else [line]
        elif name.startswith("partition"):
            races += [line] if matmuls or all_read is False else []
            all_read, matmuls, met = None, [], set()
    return races


def written_after_waits(ttgir: str) -> dict[str, set]:
    """Return {barrier: memory that the producer or a writer fills after a wait at it and before the next wait}."""
    written, barrier, part = {}, None, ""
    for name, operands, _ in operations(ttgir):
        part = name if name.startswith("partition") else part
        if name == "ttng.wait_barrier" and part not in ("", "partition0"):
            barrier = operands[0]
            written.setdefault(barrier, set())
        elif name in ("ttg.local_store", "ttng.async_tma_copy_global_to_local") and barrier:
            written.setdefault(barrier, set()).update(operands)
    return written


def operations(ttgir: str):
    """Yield (operation, operands, line) for each line. Slots and parts of shared memory are replaced by the whole."""
    base, outside = {}, []
    for line in ttgir.splitlines():
        result, name, rest = re.search(r"(?:(%\w+) = )?(ttn?g\.\w+|partition\d+|$)(.*)", line).groups()
        operands = [base.get(x, x) for x in re.findall(r"%\w+", rest.split(" : ")[0])]
        if name == "ttg.warp_specialize":
            outside = operands
        elif name.startswith("partition"):
            base = dict(zip(re.findall(r"(%\w+):", rest), outside, strict=True))
        elif name.startswith("ttg.memdesc_"):
            base[result] = operands[0]
        yield name, operands, line
