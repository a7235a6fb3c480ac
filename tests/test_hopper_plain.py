"""What Hopper's kernels do with whole numbers, run by Python: who adds when."""

import random
from itertools import product
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from hopper_plain import Whole, language, plain

from fa2_lab.kernels.hopper.backward import kernel as backward
from fa2_lab.kernels.hopper.shared import geometry
from fa2_lab.kernels.portable import tile


@pytest.fixture
def by_python(monkeypatch):
    """The kernels' functions called from here, or from one another."""
    for module in (tile, geometry, backward):
        for name, function in plain(module).items():
            monkeypatch.setattr(module, name, function)
        for name in ("tl", "gl"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, language())


def made(cls, **fields):
    """One of a kernel's aggregates."""
    return type(cls.__name__, (), plain(cls))() if not fields else fill(made(cls), fields)


def fill(x, fields):
    vars(x).update({name: Whole(v) if type(v) is int else v for name, v in fields.items()})
    return x


# The order of additions ---------------------------------------------------------------------------------------


def handed_out(N_q, N_k, causal, lengths=None, group=1, parts=1, B_r=64, at_once=1):
    """What the producer has added for every number at the scheduler: [(place, turn), …], as the consumers do it."""
    heads, batch, T_r = 2, len(lengths or [N_k]), Whole(-(-N_q // B_r))
    options = dict(KEYS=lengths is not None, RAGGED=True, CAUSAL=causal, B_r=B_r, B_c=128)
    place = made(geometry.Geometry, N_q=N_q, N_k=N_k, H=heads * group, group=group, key_lengths=None, **options)
    place.length = lambda entry: Whole(min(lengths[entry], N_k) if lengths else N_k)
    scheduler = made(geometry.Scheduler, counter=None, blocks=-(-N_k // 128), heads=batch * heads * parts)
    scheduler.at_once, scheduler.first, scheduler.next = Whole(at_once * parts), lambda: Whole(now), lambda: None
    scheduler.more, scheduler.leave = lambda t: t is not None, lambda: None
    Q = SimpleNamespace(shape=(batch, heads * group))
    for now in range(scheduler.blocks * scheduler.heads):
        added, last = [], []
        pipes = SimpleNamespace(k=SimpleNamespace(fill=lambda *_: None), turns=SimpleNamespace(USED=True))
        pipes.mailbox = SimpleNamespace(send=lambda r, told: last.append((told[9], told[8])) if told[0] else None)
        pipes.rows = SimpleNamespace(fill=lambda *told: added.append(told[-2:]))
        pipes.v = pipes.k
        backward.producer(Q, None, None, None, None, pipes, scheduler, place, T_r, parts)
        yield added + last * (parts > 1)


def in_any_order(items, programs, chance):
    """Each program adds what it has drawn, in order, and draws one item ahead; returns who added where, in order."""
    counters, order, left = {}, {}, list(enumerate(items))[::-1]
    todo = [[] for _ in range(programs)]
    while left or any(todo):
        for adds in chance.sample(todo, programs):
            while left and len({number for number, _, _ in adds}) < 2:
                number, item = left.pop()
                adds += [(number, place, turn) for place, turn in item]
            while adds and counters.get(adds[0][1], 0) == adds[0][2] and chance.random() < 0.7:
                number, place, turn = adds.pop(0)
                counters[place] = turn + 1
                order.setdefault(place, []).append(number)
        firsts = [adds[0] for adds in todo if adds]
        assert not firsts or any(counters.get(place, 0) == turn for _, place, turn in firsts), "all wait for another"
    return order


SHAPES = [(64, 128), (200, 700), (700, 200), (500, 500), (1, 900), (900, 1), (640, 640)]


@pytest.mark.parametrize("N_q, N_k", SHAPES)
def test_all_add_in_one_order_and_nobody_waits_for_ever(N_q, N_k, by_python):
    chance = random.Random(N_q)
    lengths = (None, [N_k, 0], [N_k // 3, 129])
    for causal, real, (group, parts), B_r in product((False, True), lengths, ((1, 1), (2, 3), (3, 7)), (64, 128)):
        options = dict(causal=causal, lengths=real, group=group, parts=parts, B_r=B_r, at_once=chance.choice((1, 2)))
        items = list(handed_out(N_q, N_k, **options))
        orders = [in_any_order(items, programs, chance) for programs in (1, 2, 5, 200)]
        assert all(order == orders[0] for order in orders), options
        assert sum(map(len, items)) == sum(map(len, orders[0].values())), options
