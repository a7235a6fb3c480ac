"""Runs the Hopper kernels' own functions by Python, on NumPy tiles: one warp after the other, nothing at the same time.

Who is where, who sees whom, what is masked or wiped, and whose turn it is are computed by the very lines that a GPU
runs. Layouts, barriers and registers mean nothing here; the softmax and what is assembly have plain stand-ins.
"""

from types import SimpleNamespace

import numpy as np

from fa2_lab.kernels.hopper.backward import kernel as backward
from fa2_lab.kernels.hopper.backward import products, rows
from fa2_lab.kernels.hopper.forward import kernel as forward
from fa2_lab.kernels.hopper.forward import softmax
from fa2_lab.kernels.hopper.shared import geometry
from fa2_lab.kernels.portable import tile


class Whole(int):
    """A whole number that divides as a GPU does: towards zero."""

    def __floordiv__(self, other):
        return Whole(abs(self) // abs(other) * (1 if (self < 0) == (other < 0) else -1))

    def __mod__(self, other):
        return Whole(self - self.__floordiv__(other) * other)


def closed(name):
    def operation(self, other):
        found = getattr(int, name)(self, other)
        return found if found is NotImplemented else Whole(found)

    return operation


for operator in ("add", "sub", "mul", "and", "radd", "rsub", "rmul"):
    setattr(Whole, f"__{operator}__", closed(f"__{operator}__"))


class Tile(np.ndarray):
    """A matrix with the methods of one in shared memory, or in registers."""

    def to(self, dtype):
        return self

    def permute(self, order):
        return self.transpose(order)

    def slice(self, begin, size, dim):
        return self[begin : begin + size] if dim == 0 else self[:, begin : begin + size]


def either(scalar, array):
    """One function for whole numbers and for arrays."""
    return lambda *x: array(*x) if any(isinstance(y, np.ndarray) for y in x) else Whole(scalar(*x))


LANGUAGE = SimpleNamespace(
    minimum=either(min, np.minimum),
    maximum=either(max, np.maximum),
    where=either(lambda condition, a, b: a if condition else b, np.where),
    cdiv=lambda a, b: Whole(-(-a // b)),
    cast=lambda x, dtype: x,
    arange=lambda begin, end, layout: np.arange(begin, end),
    zeros=lambda shape, dtype, layout: np.zeros(shape),
    broadcast=np.broadcast_arrays,
    exp2=np.exp2,
    SliceLayout=lambda *_: None,
    static_range=range,
    int64=None,
    float32=None,
)


def plain(owner) -> dict:
    """The functions of a module or the methods of a class that are written for a GPU, as Python's own."""
    return {name: x.fn for name, x in vars(owner).items() if hasattr(x, "fn") and hasattr(x, "arg_names")}


def made(cls, fields: dict):
    """One of the kernels' aggregates."""
    one = type(cls.__name__, (), plain(cls))()
    vars(one).update({name: Whole(x) if type(x) is int else x for name, x in fields.items()})
    return one


def maker(cls, *names):
    """What stands in for an aggregate's constructor."""
    return lambda *values, **named: made(cls, dict(zip(names, values, strict=False)) | named)


def multiply(a, b, to, use_acc=True, is_async=True):
    return ((to if use_acc else 0) + np.asarray(a) @ np.asarray(b)).view(Tile)


def wait(running, deps):
    return deps[0] if len(deps) == 1 else deps


def wipe(tile, real, BEFORE=False):
    tile[: max(0, real)] = 0 if BEFORE else tile[: max(0, real)]
    tile[max(0, real) :] = tile[max(0, real) :] if BEFORE else 0


def by_python(monkeypatch) -> None:
    """From now on the kernels' functions are Python's."""
    for module in (tile, geometry, forward, softmax, backward, rows, products):
        stand_ins = plain(module) | dict(tl=LANGUAGE, gl=LANGUAGE, ROWS=64, COLS=64, CONSUMERS=2, NEG_INF=-np.inf)
        stand_ins |= dict(NO_ROW=2**30, LN2=np.log(2), accumulator=lambda columns: None, wipe=wipe, matrix=lambda x: x)
        stand_ins |= dict(warpgroup_mma=multiply, warpgroup_mma_wait=wait, as_operand=lambda x, *_: x)
        stand_ins |= dict(tma=SimpleNamespace(store_wait=lambda n: None), **STAND_INS.get(module, {}))
        for name, x in stand_ins.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, x)


# The forward's softmax, without assembly ------------------------------------------------------------------------


def softmax_step(s, m, l, scales, MASKED):
    """p, m, l and alpha; m is the exact maximum."""
    top = np.maximum(m, s.max(1))
    at = np.where(top == -np.inf, 0.0, top) if MASKED else top
    p, alpha = np.exp2((s - at[:, None]) * scales.fine), np.exp2((m - at) * scales.fine)
    return p, top, alpha * l + p.sum(1), alpha


def store(O, L, o, m, l, o_tile, batch, head, row, geometry, scales):
    """O and L of 64 rows, as far as there are so many."""
    n = min(64, geometry.N_q - row)
    O[batch, head, row : row + n] = (o / np.where(l == 0, 1, l)[:, None])[:n]
    L[batch, head, row : row + n] = ((m * scales.fine + np.log2(np.where(l == 0, 1, l))) * np.log(2))[:n]


STAND_INS = {
    forward: dict(
        first_state=lambda s, scales: (np.full(len(s), -np.inf), np.zeros(len(s))),
        softmax_step=softmax_step,
        shrunk=lambda o, alpha: o * alpha[:, None],
        rounded=lambda p, dtype: p,
        store=store,
        Interval=maker(softmax.Interval, "end", "full_end", "begin", "full"),
    ),
    rows: dict(Interval=maker(rows.Interval, "begin", "full", "end", "CUT")),
}


# Rings and mailboxes, all of whose stages are kept ----------------------------------------------------------------


class Ring:
    """Everything that was ever filled; and who has released it, which must be everybody in the order of the tiles."""

    def __init__(self, rows: int):
        self.rows, self.filled, self.released = rows, [], 0
        self.tiles = SimpleNamespace(dtype=None, index=lambda n: self.filled[n])

    def fill(self, n, X, batch, head, row):
        assert n == len(self.filled)
        found = np.zeros((self.rows, X.shape[3])).view(Tile)
        part = X[batch, head, row : row + self.rows]
        found[: len(part)] = part
        self.filled.append(found)

    def wait_for_room(self, n):
        pass

    def take(self, n):
        return self.filled[n]

    def release(self, n):
        assert n == self.released
        self.released += 1


class Mailbox:
    """All letters."""

    def __init__(self, names):
        self.names, self.sent = names, []

    def send(self, n, values):
        self.sent.append(values)

    def wait(self, n):
        pass

    def read(self, n, name):
        return self.sent[n][self.names.index(name)]

    def release(self, n):
        pass


def scheduler(blocks: int, heads: int, at_once: int, only=None):
    """Hands out all blocks to one program, or only one."""
    numbers = iter(range(blocks * heads) if only is None else [only])
    one = made(geometry.Scheduler, dict(blocks=blocks, heads=heads, at_once=at_once))
    one.first = one.next = lambda: Whole(next(numbers, blocks * heads))
    one.leave = lambda: None
    return one


def described(Q, K, lengths, window, B_r, B_c):
    """The geometry of a call."""
    (_, H, N_q, _), (_, H_kv, N_k, _) = Q.shape, K.shape
    left, right = window
    sizes = dict(N_q=N_q, N_k=N_k, H=H, group=H // H_kv, B_r=B_r, B_c=B_c, left=left, right=right or 0)
    flags = dict(KEYS=lengths is not None, RAGGED=True, CAUSAL=right is not None)
    one = made(geometry.Geometry, sizes | flags)
    one.length = lambda entry: Whole(min(lengths[entry], N_k) if lengths else N_k)
    return one


def run_forward(Q, K, V, window, lengths=None, B_c=64, consumers=2):
    """O and L (batch, heads, N_q), NaN where nobody wrote."""
    batch, H, N_q, d = Q.shape
    place = described(Q, K, lengths, window, 64 * consumers, B_c)
    O, L = np.full(Q.shape, np.nan), np.full(Q.shape[:3], np.nan)
    mailbox = Mailbox(forward.NEXT.value)
    pipes = SimpleNamespace(
        q=Ring(64), k=Ring(B_c), v=Ring(B_c), mailbox=mailbox, consumers=consumers, O_APART=True, d=d
    )
    pipes.ping_pong = SimpleNamespace(wait=lambda c, n: turns.append(n), pass_on=lambda c: None)
    pipes.o, turns = SimpleNamespace(index=lambda c: None), []
    forward.producer(Q, K, V, pipes, scheduler(-(-N_q // place.B_r), batch * H, 1), place)
    for c in range(consumers):
        pipes.k.released, pipes.q.release = 0, lambda n: None
        turns.clear()
        forward.consumer(c, O, L, pipes, place, SimpleNamespace(fine=d**-0.5 / np.log(2)))
        assert turns == list(range(len(pipes.k.filled))) and pipes.k.released == len(turns) == len(pipes.v.filled)
    return O, L


def in_turn(N_q, N_k, window, lengths=None, group=1, parts=1, B_r=64, at_once=1):
    """What the backward's producer has added, for every number at the scheduler: [(place, turn), …] of a consumer."""
    shape = len(lengths or [N_k]), 2, N_k, 8
    Q, T_r, T_c = SimpleNamespace(shape=(shape[0], 2 * group, N_q, 8)), Whole(-(-N_q // B_r)), -(-N_k // 128)
    place = described(Q, SimpleNamespace(shape=shape), lengths, window, B_r, 128)
    for number in range(T_c * shape[0] * 2 * parts):
        added, mailbox, nothing = [], Mailbox(rows.NEXT_IN_TURN.value), SimpleNamespace(fill=lambda *_: None)
        pipes = SimpleNamespace(mailbox=mailbox, k=nothing, v=nothing, turns=SimpleNamespace(USED=True))
        pipes.rows = SimpleNamespace(fill=lambda *told, added=added: added.append(told[-2:]))
        blocks = scheduler(T_c, shape[0] * 2 * parts, at_once * parts, only=number)
        backward.producer(Q, None, None, None, None, pipes, blocks, place, T_r, parts)
        if parts > 1 and added:
            added.append((mailbox.read(0, "place"), mailbox.read(0, "turn")))
        yield added


def run_backward(Q, K, V, dO, L, D, window, lengths=None, B_r=64):
    """dK and dV, NaN where nobody wrote. dQ is made of the same tiles."""
    (batch, _, N_q, d), (_, H_kv, N_k, _) = Q.shape, K.shape
    place, T_r, told = described(Q, K, lengths, window, B_r, 128), Whole(-(-N_q // B_r)), []
    starts = np.stack([np.where(L == -np.inf, -np.inf, -L / d**-0.5), np.where(L == -np.inf, 0.0, -D)], -1)

    def fill(n, k_stage, Q, dO, starts, batch, head, i, number, turn):
        found = np.zeros((B_r, 2 * d + 2)).view(Tile)
        found[:, -2] = -np.inf
        joined = np.concatenate([X[batch, head, i * B_r : (i + 1) * B_r] for X in (Q, dO, starts)], 1)
        found[: len(joined)] = joined
        told.append((Whole(i * B_r), found, len(pipes.k.filled) - 1))

    told_rows = SimpleNamespace(fill=fill, wait=lambda n: None, release=lambda n: None, first=lambda n: told[n][0])
    told_rows.tiles, told_rows.k_stage = lambda n: (told[n][1][:, :d], told[n][1][:, d : 2 * d]), lambda n: told[n][2]
    told_rows.start = lambda n, which: told[n][1][None, :, 2 * d + which]
    sizes = SimpleNamespace(B_r=B_r, d_pad=d, dk_late=False, dv_late=False, hold_v=False)
    pipes = SimpleNamespace(k=Ring(128), v=Ring(128), rows=told_rows, sizes=sizes, mailbox=Mailbox(rows.NEXT.value))
    pipes.turns, dK, dV = SimpleNamespace(USED=False), np.full(K.shape, np.nan), np.full(V.shape, np.nan)
    blocks = scheduler(-(-N_k // 128), batch * H_kv, 1)
    backward.producer(Q, K, V, dO, starts, pipes, blocks, place, T_r, Whole(1))
    for c in range(2):
        pipes.k.released = pipes.v.released = 0
        backward.consumer(c, dK, dV, None, pipes, place, d**-0.5 / np.log(2))
    return dK, dV


def finish(c, r, n, dk, dv, dK, dV, pipes, scale):
    """dK and dV of 64 columns, as far as there are so many."""
    batch, head, col = (pipes.mailbox.read(r, name) for name in ("batch", "head", "col"))
    at = batch, head, slice(col + 64 * c, col + 64 * c + 64)
    size = len(dK[at])
    dK[at], dV[at] = dk[:size] * (scale * np.log(2)), dv[:size]


STAND_INS[backward] = dict(
    finish=finish,
    exchange=lambda *_: None,
    start_dq=lambda *_: 0,
    add_dq=lambda *_: None,
    pass_on=lambda *_, later: None,
)
