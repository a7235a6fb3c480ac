"""Data in motion: what travels and what is counted, read back from the SVG and compared with the meter."""

import re
from collections import Counter
from itertools import accumulate
from xml.etree import ElementTree

import numpy as np
import pytest

from fa2_lab.plots import motion
from fa2_lab.reference import fa1, fa2, naive
from fa2_lab.tools import files
from fa2_lab.trace import Trace

SVG = "{http://www.w3.org/2000/svg}"
N, d, B = 24, 8, 8
WIDTH = dict(S=4, l=4, m=4, L=4)  # bytes of a number that takes more than two
COLUMNS = ["standard", "FA1", "FA2"]


@pytest.fixture(scope="module")
def drawn():
    return motion.moving(**motion.data(N, d, B))


@pytest.fixture(scope="module")
def groups(drawn):
    """(column, start and end in percent, the rectangle's class, every text) of each group that comes and goes."""
    svg = ElementTree.fromstring(drawn)
    frames = dict(re.findall(r"@keyframes (k\d+)\{(.*)\}", svg.find(f"{SVG}style").text))
    found = []
    for g in svg.iter(f"{SVG}g"):
        body = frames[re.search(r"animation-name:(k\d+)", g.get("style"))[1]]
        start, end = (float(t) for t in re.findall(r"([\d.]+)%\{opacity:1", body))
        rect = g.find(f"{SVG}rect")
        column = COLUMNS[int(float(rect.get("x")) // motion.COLUMN)]
        found.append((column, start, end, rect.get("class"), [t.text for t in g.iter(f"{SVG}text")]))
    return found


def metered(name):
    trace = Trace()
    Q, K, V = np.random.default_rng(1).standard_normal((3, N, d))
    stage = {"standard": naive, "FA1": fa1, "FA2": fa2}[name]
    stage.forward(Q, K, V, **({} if stage is naive else dict(B_r=B, B_c=B)), trace=trace)
    return trace


@pytest.mark.parametrize("name", COLUMNS)
def test_the_counters_run_with_the_meter_and_end_at_its_totals(name, groups):
    events = metered(name).events
    bytes_of = [e.elements * WIDTH.get(e.tensor, 2) for e in events]
    counters = sorted((start, end, words) for c, start, end, what, words in groups if c == name and len(words) == 2)
    assert [a[1] for a in counters[:-1]] == [b[0] for b in counters[1:]]  # one after the other, without a gap
    requested, crossed = ([int(words[k].replace(",", "").removesuffix(" B")) for *_, words in counters] for k in (0, 1))
    assert requested[0] == crossed[0] == 0 and requested[-1] == sum(bytes_of)
    assert set(accumulate(bytes_of)) <= set(requested) and requested == sorted(requested)
    sizes = {t: N * d * 2 for t in "QKVO"} | {t: N * 4 for t in "lmL"} | {"S": N * N * 4, "P": N * N * 2}
    there = {e.tensor for e in events}
    twice = sizes["S"] if name == "standard" else 0  # alone S is larger than L2, and comes back
    assert crossed[-1] == sum(sizes[t] for t in there) + twice


@pytest.mark.parametrize("name", COLUMNS)
def test_every_load_and_store_travels_once_at_its_time(name, groups):
    events = metered(name).events
    total = max(sum(e.elements * WIDTH.get(e.tensor, 2) for e in metered(n).events) for n in COLUMNS)
    want, now = [], 0
    for e in events:
        n = e.elements * WIDTH.get(e.tensor, 2)
        blocks = {None: 3}.get(e.i if e.tensor not in "KV" else e.j, 1) ** (2 if e.tensor in "SP" else 1)
        near = "shared memory" if e.tensor in "QKV" else "registers"
        want += [(e.op, near, round(now + n * k / blocks)) for k in range(blocks)]
        now += n
    seen = sorted((start, what) for c, start, _, what, words in groups if c == name and words and " to " in what)
    assert len(seen) == len(want)
    for (op, near, at), (start, what) in zip(want, seen, strict=True):
        assert start == pytest.approx(100 * at / (1.1 * total), abs=0.011)
        assert what.split(" to ")[op == "load"] == near and what.split(" to ")[op == "store"] in ("HBM", "L2")


def test_fa2_keeps_its_row_state_in_registers_and_finds_k_and_v_in_l2(groups):
    moved = {
        c: Counter((what, words[0][0]) for k, _, _, what, words in groups if k == c and words and " to " in what)
        for c in COLUMNS
    }
    assert not any(what.endswith("registers") for what, _ in moved["FA2"])  # no o, no ℓ, no m comes in
    for letter in "kv":
        assert moved["FA2"]["HBM to shared memory", letter] == 3  # each block once
        assert moved["FA2"]["L2 to shared memory", letter] == 6
    for letter in "oℓm":
        assert moved["FA1"]["L2 to registers", letter] == 9 and moved["FA1"]["registers to L2", letter] == 3 + 9
    assert moved["standard"]["HBM to registers", "s"] == 9 and moved["standard"]["L2 to registers", "p"] == 9
    state = [(start, end) for c, start, end, what, words in groups if c == "FA2" and what == "chip O"]
    assert len(state) == 3  # one accumulator a row block, there from its beginning to its store


def test_it_has_no_script_stands_still_where_asked_and_its_file_is_current(drawn):
    assert (
        "<script" not in drawn and "prefers-reduced-motion:reduce" in drawn and "<title>" in drawn and "<desc>" in drawn
    )
    assert (files.ROOT / "figures" / "motion.svg").read_text(encoding="utf-8") == motion.moving(**motion.data())
    page = motion.page(**motion.data())
    assert drawn in page and "pause" in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
