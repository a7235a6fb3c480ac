"""Pictures whose data comes from the definitions, from running the NumPy ladder, and from its meter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import isqrt

import numpy as np

from fa2_lab.gallery.picture import Picture
from fa2_lab.machine import chips
from fa2_lab.plots import causal, deferred, dropouts, groups, memory, merge, order, softmax, stream
from fa2_lab.reference import fa1, fa2, heads, naive
from fa2_lab.reference.dropout import Dropout, sequential_mask
from fa2_lab.reference.online_softmax import SoftmaxState
from fa2_lab.tiles import CAUSAL, Tile, Tiling, cdiv
from fa2_lab.trace import Trace

# What attention takes ------------------------------------------------------------------------------------------


def memory_data(heads: int = 32, d: int = 128, width: int = 2) -> dict:
    """Bytes of one layer's tensors over N, and the largest N whose S and P fit each GPU; L is kept in fp32."""
    N = np.rint(2 ** np.arange(7, 20.01, 0.125)).astype(int)
    sizes = {"S and P": 2 * width * heads * N**2, "Q, K, V, O": 4 * width * heads * N * d, "L": 4 * heads * N}
    of_size: dict[int, list[str]] = {}
    for chip in chips.CHIPS.values():
        of_size.setdefault(chip.hbm_bytes, []).append(chip.name.removeprefix("GeForce ").split(" SXM")[0])
    fits = [(", ".join(names), size, isqrt(size // (2 * width * heads))) for size, names in sorted(of_size.items())]
    setting = f"One layer, batch 1, {heads} heads, d = {d}, {width} bytes per element (L: 4)"
    return dict(N=N, sizes=sizes, chips=fits, setting=setting)


# Softmax three ways ---------------------------------------------------------------------------------------------

Rounding = Callable[[np.ndarray], np.ndarray]  # float64 to the nearest number of another type


def bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 with the last 16 bits rounded away, to nearest even; inf and NaN stay."""
    bits = np.atleast_1d(np.asarray(x, np.float32)).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).reshape(np.shape(x)).astype(np.float64)


DTYPES: dict[str, Rounding] = {
    "float16": lambda x: np.asarray(x).astype(np.float16).astype(np.float64),
    "bfloat16": bfloat16,
    "float32": lambda x: np.asarray(x).astype(np.float32).astype(np.float64),
}


def unsafe_row(s: np.ndarray, to: Rounding) -> dict:
    """exp(s) / Σ exp(s) of each row, every operation rounded."""
    e = to(np.exp(s))
    total = to(e.sum(axis=-1, keepdims=True))
    return dict(e=e, sum=total, p=to(e / total))


def safe_row(s: np.ndarray, to: Rounding) -> dict:
    """The same after subtracting the row's maximum."""
    return unsafe_row(to(s - s.max(axis=-1, keepdims=True)), to)


def online_row(s: np.ndarray, to: Rounding, B_c: int) -> dict:
    """m, α and l of each row after every block of B_c scores, then p from the last of them; every operation rounded."""
    m, l = np.full((*s.shape[:-1], 1), -np.inf), np.zeros((*s.shape[:-1], 1))
    steps: dict[str, list] = dict(m=[], l=[], alpha=[])
    for block in np.split(s, s.shape[-1] // B_c, axis=-1):
        m_new = np.maximum(m, block.max(axis=-1, keepdims=True))
        alpha = to(np.exp(to(m - m_new)))
        l = to(to(alpha * l) + to(to(np.exp(to(block - m_new))).sum(axis=-1, keepdims=True)))
        m = m_new
        for name, value in dict(m=m, l=l, alpha=alpha).items():
            steps[name].append(value)
    return {k: np.stack(v) for k, v in steps.items()} | dict(p=to(to(np.exp(to(s - m))) / l))


def softmax_data(scores=(2, 5, 1, 9, 12, 10, 4, 11), rows: int = 32, N: int = 512) -> dict:
    """A row of small integers that float16 cannot take unsafely, and errors on random rows over their scale."""
    scales = 2 ** np.linspace(-3, 7, 41)
    normal = np.random.default_rng(0).standard_normal((rows, N))
    with np.errstate(over="ignore", invalid="ignore"):  # to overflow is what these rows are for
        errors = {name: softmax_errors(normal, scales, to) for name, to in DTYPES.items()}
        s, to = np.array(scores, dtype=np.float64), DTYPES["float16"]
        unsafe, safe, online = unsafe_row(s, to), safe_row(s, to), online_row(s, to, B_c=2)
    row = dict(s=s, unsafe_e=unsafe["e"], unsafe_p=unsafe["p"], safe_e=safe["e"], safe_p=safe["p"], dtype="float16")
    row |= dict(online_p=online["p"], sums={"unsafe": unsafe["sum"].item(), "safe": safe["sum"].item()})
    row |= {k: online[k].ravel() for k in ("m", "l", "alpha")}
    return dict(row=row, scales=scales, errors=errors)


def softmax_errors(normal: np.ndarray, scales: np.ndarray, to: Rounding) -> dict[str, np.ndarray]:
    """Largest Σ|p − exact p| of any row at each scale, from scores rounded beforehand; NaN where p is not finite.

    Three digits: the last ones depend on the machine's exp.
    """
    errors: dict[str, list] = dict(unsafe=[], safe=[], online=[])
    for scale in scales:
        s = to(scale * normal)
        exact = naive.safe_softmax(s)
        ways = dict(unsafe=unsafe_row(s, to), safe=safe_row(s, to), online=online_row(s, to, B_c=64))
        for name, way in ways.items():
            errors[name].append(np.abs(way["p"] - exact).sum(axis=-1).max())
    return {name: np.array([float(f"{x:.3g}") for x in values]) for name, values in errors.items()}


# The state and its merge ----------------------------------------------------------------------------------------


def stream_data(B_r: int = 4, B_c: int = 4, T_c: int = 10, d: int = 4, row: int = 2, seed: int = 35) -> dict:
    """One row block's state after each key block, and α; of o and O the first component."""
    rng = np.random.default_rng(seed)
    Q, K, V = rng.standard_normal((B_r, d)), *rng.standard_normal((2, T_c * B_c, d))
    tiling = Tiling(B_r, T_c * B_c, B_r, B_c)
    state, seen = SoftmaxState.reset(B_r, d), dict(s=[], m=[], l=[], o=[], alpha=[])
    for j in range(T_c):
        s = Q @ K[tiling.cols(j)].T
        after = state.update(s, V[tiling.cols(j)])
        alpha = np.exp(state.m - after.m)
        for name, value in dict(s=s, m=after.m, l=after.l, o=after.o[:, 0], alpha=alpha).items():
            seen[name].append(value)
        state = after
    O, _ = naive.forward(Q, K, V, tau=1.0)
    return dict(row=row, O=O[:, 0]) | {name: np.stack(values) for name, values in seen.items()}


def merge_data(blocks: int = 8, B_c: int = 4) -> dict:
    """The states of one row's key blocks (d = 1), merged by three orders: pairs (left, right) of node numbers."""
    s, v = np.random.default_rng(2).standard_normal((2, blocks, B_c)) * [[[2.0]], [[1.0]]]
    leaves = [SoftmaxState.reset(1, 1).update(s[b : b + 1], v[b][:, None]) for b in range(blocks)]
    drawn, L = {}, {}
    for name, pairs in merge_pairs(blocks).items():
        states = list(leaves)
        for left, right in pairs:
            states.append(states[left].merge(states[right]))
        drawn[name] = [_node(state, *pair) for state, pair in zip(states[blocks:], pairs, strict=True)]
        L[name] = states[-1].finalize()[1].item()
    return dict(leaves=[_node(state) for state in leaves], orders=drawn, L=L)


def merge_pairs(blocks: int) -> dict[str, list[tuple[int, int]]]:
    """Which two nodes each merge joins: leaves are numbered 0 … blocks − 1, merges from there on."""
    half, tree, layer = blocks // 2, [], range(blocks)
    while len(layer) > 1:
        made = range(blocks + len(tree), blocks + len(tree) + len(layer) // 2)
        tree += zip(layer[::2], layer[1::2], strict=True)
        layer = made
    first, second = _chain(0, half, blocks), _chain(half, blocks, blocks + half - 1)
    last_of_each = (blocks + half - 2, blocks + 2 * half - 3)
    return dict(loop=_chain(0, blocks, blocks), tree=tree, split=[*first, *second, last_of_each])


def _chain(start: int, stop: int, number: int) -> list[tuple[int, int]]:
    """Leaves start … stop − 1 taken in one after the other by merges that are numbered from `number` on."""
    lefts = [start, *range(number, number + stop - start - 2)]
    return list(zip(lefts, range(start + 1, stop), strict=True))


def _node(state: SoftmaxState, left: int | None = None, right: int | None = None) -> merge.Node:
    return merge.Node(state.m.item(), state.l.item(), state.o.item(), left, right)


# The order of FA1 and FA2 --------------------------------------------------------------------------------------


def order_data(N: int = 12, d: int = 4, B_r: int = 4, B_c: int = 3) -> dict:
    """What the meter sees of FA1 and FA2 on the same small problem."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
    events = {}
    for name, stage in (("FA1", fa1), ("FA2", fa2)):
        trace = Trace()
        stage.forward(Q, K, V, B_r=B_r, B_c=B_c, trace=trace)
        events[name] = trace.events
    return dict(T_r=cdiv(N, B_r), T_c=cdiv(N, B_c), events=events)


# Deferred normalisation ---------------------------------------------------------------------------------------


class OperationLog(Trace):
    """A meter that also remembers the order of the operations."""

    def __init__(self):
        super().__init__()
        self.log: list[tuple] = []  # (i, j, kind, operations)

    def _count(self, *operation) -> None:
        before = Counter(self.work)
        super()._count(*operation)
        self.log += [(i, j, kind, n) for (_, i, j, kind), n in (self.work - before).items()]


# What each operation of a tile is for, in the order the algorithms run it: name, and the tensor whose hue it takes.
# Two kinds take no clocks: × τ is part of the FMA of τ s − m, and the sum into o part of the product's.
Q_K, TAU, MAX, EXPONENT = ("q kᵀ", "S"), ("× τ", "S"), ("max", "m"), ("τs − m", "S")
EXP, SUM, P_V, ADD, SCALE_O = ("exp", "P"), ("Σ", "l"), ("p v", "O"), ("+", "O"), ("scale o", "O")
ROW, ROW_FA1, SCALE_P_V = ("", "m"), ("", "l", True), ("scale p v", "O", True)
FA1_TILE = [Q_K, TAU, MAX, ROW, EXPONENT, EXP, SUM, ROW, ROW, ROW_FA1, ROW_FA1, ROW, ROW_FA1, ROW]
FA1_TILE += [ROW_FA1, ROW_FA1, ROW_FA1, SCALE_O, ROW_FA1, P_V, SCALE_P_V, ADD]
FA2_TILE = [Q_K, TAU, MAX, ROW, EXPONENT, EXP, SUM, ROW, ROW, ROW, ROW, SCALE_O, P_V, ADD]
FA2_END = [ROW, SCALE_O, ROW, ROW]
FREE = (TAU, ADD)


def deferred_data(B_r: int = 128, B_c: int = 64, d: int = 128, chip: chips.Chip = chips.A100) -> dict:
    """The arithmetic of one tile of FA1 and FA2, and of FA2's end of a row block, in order and in clocks of one SM."""
    fa1_tile, fa2_tile = (operation_log(stage, B_r, B_c, d, j=1) for stage in (fa1, fa2))
    end = operation_log(fa2, B_r, B_c, d, j=None)
    loops = {"FA1": steps(FA1_TILE, fa1_tile, chip), "FA2": steps(FA2_TILE, fa2_tile, chip)}
    columns = [(FA1_TILE, fa1_tile), (FA2_TILE, fa2_tile), (FA2_END, end)]
    counts = {
        "multiply o by a factor": [sum(n for w, (_, n) in zip(*c, strict=True) if w == SCALE_O) for c in columns],
        "multiply p v by a factor": [sum(n for w, (_, n) in zip(*c, strict=True) if w == SCALE_P_V) for c in columns],
        "divide by l": [sum(n for kind, n in log if kind == "divide") for _, log in columns],
    }
    setting = f"Tile {B_r} × {B_c}, d = {d}, one SM of {chip.name}"
    return dict(loops=loops, end=steps(FA2_END, end, chip), counts=counts, setting=setting)


def operation_log(stage, B_r: int, B_c: int, d: int, j: int | None) -> list[tuple[str, int]]:
    """(kind, operations) of the first row block in column block j, in the order they ran."""
    Q, K, V = (np.random.default_rng(0).standard_normal((n, d)) for n in (B_r, 2 * B_c, 2 * B_c))
    trace = OperationLog()
    stage.forward(Q, K, V, B_r=B_r, B_c=B_c, trace=trace)
    return [(kind, n) for _, at, kind, n in trace.log if at == j]


def steps(names: list[tuple], log: list[tuple[str, int]], chip: chips.Chip) -> list[deferred.Step]:
    """The operations under their names with the clocks they take; free ones are left out."""
    rate = {"matmul": chip.tensor_per_clock, "exp": chip.exp_per_clock}
    return [
        deferred.Step(what[0], what[1], n / rate.get(kind, chip.fp32_per_clock), len(what) == 3)
        for what, (kind, n) in zip(names, log, strict=True)
        if what not in FREE
    ]


# Masks, heads, dropout -----------------------------------------------------------------------------------------


def causal_data(N: int = 512, B: int = 64) -> dict:
    """Three causal tilings, and the share of tiles computed over N for three block sizes, by formula and counted."""
    tilings = {
        "Square": Tiling(N, N, B, B, CAUSAL),
        "Tall tiles": Tiling(N, N, 2 * B, B, CAUSAL),
        "Fewer queries than keys": Tiling(N // 2, N, B, B, CAUSAL),
    }
    lengths = 2 ** np.arange(8, 15)
    shares = {}
    for size in (256, 128, 64):
        T = lengths // size
        shares[size] = (T + 1) / (2 * T), np.array([visited_share(Tiling(n, n, size, size, CAUSAL)) for n in lengths])
    return dict(tilings=tilings, N=lengths, shares=shares)


def visited_share(tiling: Tiling) -> float:
    """Tiles that are not skipped, over all tiles."""
    return 1 - tiling.counts()[Tile.SKIP] / (tiling.T_r * tiling.T_c)


def heads_data(query_heads: int = 8) -> dict:
    """Who reads and who adds, found out by running: disturb one K and see which O move; send one dO and see where."""
    layouts = {}
    for name, key_heads in (("Multi-head", query_heads), ("Grouped", query_heads // 4), ("Multi-query", 1)):
        rng = np.random.default_rng(0)
        q, dO = rng.standard_normal((2, 1, query_heads, 4, 2))
        k, v = rng.standard_normal((2, 1, key_heads, 4, 2))
        layouts[name] = dict(key_heads=key_heads, reads=readers(q, k, v), adds=adders(q, k, v, dO))
    return dict(heads=query_heads, layouts=layouts)


def readers(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[tuple[int, int]]:
    """(query head, key head) wherever another K in the key head changes O in the query head."""
    before, pairs = heads.forward(q, k, v)[0], []
    for g in range(k.shape[1]):
        other = k.copy()
        other[:, g] += 1.0 + np.arange(k.shape[2])[:, None]
        moved = (heads.forward(q, other, v)[0] != before).any(axis=(0, 2, 3))
        pairs += [(int(h), g) for h in np.flatnonzero(moved)]
    return sorted(pairs)


def adders(q: np.ndarray, k: np.ndarray, v: np.ndarray, dO: np.ndarray) -> list[tuple[int, int]]:
    """(query head, key head) wherever the dO of the query head alone gives the key head a dK and a dV."""
    O, L = heads.forward(q, k, v)
    pairs = []
    for h in range(q.shape[1]):
        alone = np.zeros_like(dO)
        alone[:, h] = dO[:, h]
        _, dK, dV = heads.backward(q, k, v, O, L, alone)
        reached = (dK != 0).any(axis=(0, 2, 3)) & (dV != 0).any(axis=(0, 2, 3))
        pairs += [(h, int(g)) for g in np.flatnonzero(reached)]
    return pairs


def dropout_data(N: int = 16, B_r: int = 4, B_c: int = 2, p: float = 0.25, seed: int = 7) -> dict:
    """The mask that each order of the tiles draws, from one running generator and from the keyed one."""
    tiling = Tiling(N, N, B_r, B_c)
    sequential = {name: sequential_mask(tiling, p, seed, name.lower()) for name in ("FA1", "FA2")}
    keyed = {name: keyed_mask(tiling, Dropout(p, seed), tiles) for name, tiles in orders(tiling).items()}
    return dict(masks=dict(sequential=sequential, keyed=keyed), B_r=B_r, B_c=B_c, p=p)


def orders(tiling: Tiling) -> dict[str, list[tuple[int, int]]]:
    """The tiles (i, j) in the order of FA1's loops and of FA2's."""
    T_r, T_c = range(tiling.T_r), range(tiling.T_c)
    return {"FA1": [(i, j) for j in T_c for i in T_r], "FA2": [(i, j) for i in T_r for j in T_c]}


def keyed_mask(tiling: Tiling, dropout: Dropout, tiles: list[tuple[int, int]]) -> np.ndarray:
    """True where kept, drawn tile after tile in the order given."""
    keep = np.zeros((tiling.N_q, tiling.N_k), dtype=bool)
    for i, j in tiles:
        keep[tiling.rows(i), tiling.cols(j)] = dropout.z(tiling.rows(i), tiling.cols(j)) > 0
    return keep


PICTURES = [
    Picture(
        "quadratic_memory",
        "S and P grow with the square of N and fill every GPU; everything else grows with N.",
        "01_naive_attention",
        memory.quadratic_memory,
        memory_data,
    ),
    Picture(
        "three_softmaxes",
        "With the row's maximum, or a running one, subtracted, no exponential overflows.",
        "02_online_softmax",
        softmax.three_softmaxes,
        softmax_data,
    ),
    Picture(
        "state_stream",
        "A new maximum shrinks what l and o have summed so far; all other blocks just add.",
        "02_online_softmax",
        stream.state_stream,
        stream_data,
    ),
    Picture(
        "merge_orders",
        "One operator, any order: a loop, a tree and a split end at the same o and L.",
        "02_online_softmax",
        merge.merge_orders,
        merge_data,
    ),
    Picture(
        "visiting_order",
        "FA1 moves O, l and m through HBM at every tile; FA2 keeps them on chip.",
        "04_fa2_forward",
        order.visiting_order,
        order_data,
    ),
    Picture(
        "deferred_normalisation",
        "One division per row instead of one per tile, and one scaling of o instead of two.",
        "04_fa2_forward",
        deferred.deferred_normalisation,
        deferred_data,
    ),
    Picture(
        "dropout_orders",
        "Swap the loops: sequential dropout changes its mask, keyed dropout does not.",
        "03_fa1",
        dropouts.dropout_orders,
        dropout_data,
    ),
    Picture(
        "causal_tiles",
        "Causal: whole tiles above the diagonal are never touched, and few of the others need a mask.",
        "04_fa2_forward",
        causal.causal_tiles,
        causal_data,
    ),
    Picture(
        "grouped_heads",
        "A group of query heads reads one K and V, and adds into one dK and dV.",
        "05_backward",
        groups.grouped_heads,
        heads_data,
    ),
]
