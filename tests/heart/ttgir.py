"""What a kernel's TTGIR tells: how warps share products, and in Hopper's kernels what must not stand there."""

import re


def shares_of_warps(ttgir: str) -> list[tuple]:
    """Of each product by mma.sync its rows and columns, and how many of them all warps together take in one round."""
    by_mma = r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = 2.*?warpsPerCTA = \[(\d+), (\d+)\]"
    warps = {name: (int(rows), int(columns)) for name, rows, columns in re.findall(by_mma, ttgir, re.MULTILINE)}
    made = re.findall(r"tt\.dot .*-> tensor<(\d+)x(\d+)xf32, (#\w+)>", ttgir)
    return [(int(m), int(n), 16 * warps[name][0], 8 * warps[name][1]) for m, n, name in made if name in warps]


def idle_barriers(ttgir: str) -> list[str]:
    """Barriers that are made for nobody: no part of the kernel takes them along, so others may get their memory."""
    taken = set(re.search(r"ttg\.warp_specialize\((.*?)\)", ttgir)[1].split(", "))
    whole = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", ttgir))
    made = re.findall(r"ttng\.init_barrier (%\w+),", ttgir)
    return [name for name in made if name not in taken and whole.get(name) not in taken]


# The forward --------------------------------------------------------------------------------------------------


def producer_of(ttgir: str) -> str:
    """The producer's part of a kernel."""
    (part,) = (part for part in re.split(r"partition\d+\(", ttgir) if "async_tma_copy_global_to_local" in part)
    return part


def before_the_draw(ttgir: str) -> int:
    """How many of the producer's lines that copy stand before the one that draws the next number."""
    return producer_of(ttgir).split("tt.atomic_rmw")[0].count("async_tma_copy_global_to_local")


def overwrites(ttgir: str) -> list[str]:
    """The producer's lines that write to shared memory without asking whether all have read what is there.

    One wait stands for a whole letter of the mailbox, or for a copy of K and one of V.
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
    """The consumers' lines that give up a tile which a product may be reading, or hide from one what was written.

    While a product runs, nobody is told anything, but the next consumer that it may start. What was stored is fenced
    before tensor cores or the copy engine read it.
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
    """Lines that give up, or write over, shared memory which a product or the copy engine may still be reading.

    While products run, a barrier may be arrived at only if what the producer writes, once it need not wait there, is
    none of what they read. A tile that the copy engine is to read is stored when it has read all it had to before, or a
    consumer has said so at a barrier, and no warp ends earlier.
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
        elif name == "ttng.wait_barrier" and "ttg.local_store" not in met:  # a writer: what it adds, others store
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
    """For each barrier what the producer, or a writer, writes or has copied before it waits at another."""
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
    """Of each line its operation and what that is given; of shared memory not a slot or a part, but the whole."""
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
