"""Read a kernel's TTGIR: how warps share matmuls, and in Hopper's kernels, lines that would be a race."""

import re


def shares_of_warps(ttgir: str) -> list[tuple]:
    """Return (rows, columns, rows per round, columns per round) of each matmul by mma.sync.

    A round is what all warps together compute at once.
    """
    by_mma = r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = 2.*?warpsPerCTA = \[(\d+), (\d+)\]"
    warps = {name: (int(rows), int(columns)) for name, rows, columns in re.findall(by_mma, ttgir, re.MULTILINE)}
    made = re.findall(r"tt\.dot .*-> tensor<(\d+)x(\d+)xf32, (#\w+)>", ttgir)
    return [(int(m), int(n), 16 * warps[name][0], 8 * warps[name][1]) for m, n, name in made if name in warps]


def idle_barriers(ttgir: str) -> list[str]:
    """Return the barriers that no partition of the kernel takes, so that other data may get their memory."""
    taken = set(re.search(r"ttg\.warp_specialize\((.*?)\)", ttgir)[1].split(", "))
    whole = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", ttgir))
    made = re.findall(r"ttng\.init_barrier (%\w+),", ttgir)
    return [name for name in made if name not in taken and whole.get(name) not in taken]


# The forward --------------------------------------------------------------------------------------------------


def producer_of(ttgir: str) -> str:
    """Return the producer's partition of a kernel."""
    (part,) = (part for part in re.split(r"partition\d+\(", ttgir) if "async_tma_copy_global_to_local" in part)
    return part


def before_the_draw(ttgir: str) -> int:
    """Return the number of the producer's copies before the line that draws the next block number."""
    return producer_of(ttgir).split("tt.atomic_rmw")[0].count("async_tma_copy_global_to_local")


def overwrites(ttgir: str) -> list[str]:
    """Return the producer's lines that write to shared memory without waiting until all have read the old contents.

    One wait is enough for a whole message of the mailbox, or for one copy of K and one of V.
    """
    found, asked, made = [], False, 2
    for line in producer_of(ttgir).splitlines():
        name = re.search(r"ttn?g\.\w+|$", line)[0]
        if name == "ttng.wait_barrier":
            asked, made = True, 0
        elif name == "ttng.arrive_barrier":
            asked = False
        elif name == "ttng.async_tma_copy_global_to_local":
            asked, made = False, made + 1
            found += [line] if made > 2 else []
        elif name == "ttg.local_store" and not asked:
            found.append(line)
    return found


def hasty(ttgir: str, ping_pong: bool) -> list[str]:
    """Return the consumers' lines that release a tile which a matmul may be reading, or that use unfenced stores.

    While a matmul runs, a consumer may arrive at no barrier, except that with ping-pong it lets the next consumer
    start. Stores need a fence before tensor cores or the copy engine read them.
    """
    found, running, told, shown = [], 0, 0, True
    for line in ttgir.splitlines():
        name = re.search(r"ttn?g\.\w+|$", line)[0]
        if name == "ttng.warp_group_dot":
            running, told = running + 1, 0
        elif name == "ttng.warp_group_dot_wait":
            running = int(re.search(r"pendings = (\d)", line)[1])
        elif name == "ttng.arrive_barrier" and running:
            told += 1
            found += [line] if told > ping_pong else []
        elif name == "ttg.local_store":
            shown = "1xi32" in line  # a mailbox's number, which threads read
        elif name == "ttng.fence_async_shared":
            shown = True
        if name in ("ttng.warp_group_dot", "ttng.async_tma_copy_local_to_global") and not shown:
            found.append(line)
    return found


# The backward -------------------------------------------------------------------------------------------------


def too_early(ttgir: str) -> list[str]:
    """Return lines that release or overwrite shared memory which a matmul or the copy engine may still be reading.

    While matmuls run, a warp may arrive at a barrier only if the memory that the producer writes after a wait at this
    barrier is not read by these matmuls. A tile for the copy engine may be stored only after the engine has read all
    earlier tiles, or a consumer has announced this at a barrier. No warp may end before that.
    """
    rewritten, found, products, all_read, free, met = written_after_waits(ttgir), [], [], None, False, set()
    for name, given, line in operations(ttgir):
        met.add(name)
        pending = int(re.findall(r"pendings = (\d+)", line + "pendings = 0")[0])
        if name == "ttng.warp_group_dot":
            products.append({*given[:2]})
        elif name == "ttng.warp_group_dot_wait":
            products = products[max(0, len(products) - pending) :]
        elif name == "ttng.async_tma_store_wait":
            all_read = pending == 0
        elif name == "ttg.local_store":
            free = all_read
        elif name == "ttng.wait_barrier" and "ttg.local_store" not in met:  # a writer, which adds what consumers store
            free = all_read is not False
        elif name in ("ttng.async_tma_reduce", "ttng.async_tma_copy_local_to_global"):
            found += [] if free else [line]
            all_read = False
        elif name == "ttng.arrive_barrier" and products:
            harmless = given[0] in rewritten and rewritten[given[0]].isdisjoint(set().union(*products))
            found += [] if harmless else [line]
        elif name.startswith("partition"):
            found += [line] if products or all_read is False else []
            all_read, products, met = None, [], set()
    return found


def written_after_waits(ttgir: str) -> dict[str, set]:
    """Return {barrier: memory that the producer or a writer fills after a wait at it and before the next wait}."""
    written, barrier, part = {}, None, ""
    for name, given, _ in operations(ttgir):
        part = name if name.startswith("partition") else part
        if name == "ttng.wait_barrier" and part not in ("", "partition0"):
            barrier = given[0]
            written.setdefault(barrier, set())
        elif name in ("ttg.local_store", "ttng.async_tma_copy_global_to_local") and barrier:
            written.setdefault(barrier, set()).update(given)
    return written


def operations(ttgir: str):
    """Yield (operation, operands, line) for each line. Slots and parts of shared memory are replaced by the whole."""
    whole, outside = {}, []
    for line in ttgir.splitlines():
        result, name, rest = re.search(r"(?:(%\w+) = )?(ttn?g\.\w+|partition\d+|$)(.*)", line).groups()
        given = [whole.get(x, x) for x in re.findall(r"%\w+", rest.split(" : ")[0])]
        if name == "ttg.warp_specialize":
            outside = given
        elif name.startswith("partition"):
            whole = dict(zip(re.findall(r"(%\w+):", rest), outside, strict=True))
        elif name.startswith("ttg.memdesc_"):
            whole[result] = given[0]
        yield name, given, line
