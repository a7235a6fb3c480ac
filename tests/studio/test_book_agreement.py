"""What chapters say about the same quantity: each statement is read out of the book and held against a computation."""

import re
from functools import cache

import nbformat
import numpy as np
import pytest

from fa2_lab.errata.article import full_scalings
from fa2_lab.machine import chips, io, warps
from fa2_lab.reference import fa2, naive
from fa2_lab.tiles import CAUSAL, Tile, Tiling
from fa2_lab.trace import Trace
from fa2_studio.book.chapters import NOTEBOOKS, written

NUMBERS = {"four": 4, "five": 5, "seven": 7, "third": 3}


@cache
def pages() -> dict[str, str]:
    """{number of a chapter: all that it says and prints, in one line}."""
    said = {}
    for chapter in written():
        found = []
        for cell in nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4).cells:
            found += [cell.source] if cell.cell_type == "markdown" else []
            for output in cell.get("outputs", []):
                found += [output.get("text", ""), output.get("data", {}).get("text/markdown", "")]
        said[chapter.number] = re.sub(r"\s+", " ", " ".join(found))
    return said


def number(text: str) -> float:
    """4, 2,048 or 3/2, in digits or as a word."""
    text = text.lower().replace(",", "")
    top, _, bottom = text.partition("/")
    return NUMBERS[text] if text in NUMBERS else int(top) / int(bottom or 1)


def statements(pattern: str) -> list[tuple[str, tuple[float, ...]]]:
    """(chapter, the numbers of the statement) for every place in the book that fits a pattern."""
    return [
        (name, tuple(map(number, found.groups())))
        for name, text in pages().items()
        for found in re.finditer(pattern, text)
    ]


# What the package computes ------------------------------------------------------------------------------------


def standard_elements() -> tuple[int, int]:
    """a and b of the a N² + b N d elements that the meter counts for standard attention."""
    moved = []
    for N, d in ((8, 2), (8, 4)):
        meter = Trace()
        naive.forward(*np.ones((3, N, d)), trace=meter)
        moved.append(meter.hbm_elements)
    b = (moved[1] - moved[0]) // (8 * 2)
    return (moved[0] - b * 8 * 2) // 8**2, b


def products(backward) -> int:
    """Matrix products of a backward pass, by its FLOPs on one tile."""
    meter, X = Trace(), np.ones((4, 8, 2))
    backward(meter, X)
    return meter.matmul_flops // (2 * 8 * 8 * 2)


def standard_backward(meter: Trace, X: np.ndarray) -> None:
    naive.backward(*X[:3], np.full((8, 8), 1 / 8), X[3], trace=meter)


def fa2_backward(meter: Trace, X: np.ndarray) -> None:
    fa2.backward(*X[:3], X[2], np.zeros(8), X[3], B_r=8, B_c=8, trace=meter)


def causal_tiles() -> tuple[int, int]:
    """Tiles visited and tiles masked, of 4 × 4 under the causal mask."""
    counts = Tiling(8, 8, 2, 2, CAUSAL).counts()
    return 16 - counts[Tile.SKIP], counts[Tile.DIAGONAL]


H100, A100 = chips.H100, chips.A100
swap = float(io.fa1_over_fa2(Tiling(2**20, 2**20, 128, 128), d=2**14))  # for many tiles and a large d
four, five = products(standard_backward), products(fa2_backward)
T_r, block = Tiling(8192, 8192, 128, 128).T_r, H100.shared_per_block // 1024
scalings = full_scalings("fa1", 64), full_scalings("fa2", 64)
visited, masked = causal_tiles()

AGREED = {  # quantity: how the chapters say it, with a group for each number, and what the package computes for these
    "elements of standard attention": {
        r"[Ss]tandard attention moves (?:about )?\$(\d)N\^2 \+ (\d)Nd\$": standard_elements(),
        r"(\d)N² \+ (\d)Nd =": standard_elements(),
    },
    "SMs of an H100": {r"H100 has (\d+)": (H100.SMs,), r"this GPU has (\d+) SMs": (H100.SMs,)},
    "shared memory of a thread block": {
        r"single block can have (\d+)": (block,),
        r"\b(\d+) KiB for one block": (block,),
        r"a program can have (\d+) KiB of shared memory": (block,),
    },
    "scalings over 64 tiles": {r"(\d+) scalings(?: of a B_r × d block)? become (\d+)": scalings},
    "price of an exponential": {
        r"About (\d+) times on an A100, (\d+) times on an H100": (A100.flops_per_exp, H100.flops_per_exp),
        r"one exponential (\d+)": (H100.flops_per_exp,),
    },
    "causal tiles": {
        r"(\d+) of 16 tiles computed, (\d+) of them masked": (visited, masked),
        r"(\d+) are visited. The (\d+) on the diagonal": (visited, masked),
        r">= \(i \+ 1\)·B: (\d+) tiles visited": (visited,),
        r"13 tiles instead of (\d+)": (visited,),
    },
    "products of a backward pass": {
        r"(\d+) \$N\^2 d\$ FLOPs instead of (\d+)": (2 * five, 2 * four),
        r"(five) products instead of (four)": (five, four),
        r"[Bb]ackward pass has (\w+) products": (five,),
        r"(five) products and one exponential": (five,),
    },
    "products of a backward pass in two passes": {
        r"second pass takes (\w+) products instead of (\w+)": (five + 2, five),
        r"two passes take (seven) products instead of (\w+)": (five + 2, five),
        r"second pass \((\w+) products": (five + 2,),
        r"[Tt]wo products of (seven)": (five + 2,),
    },
    "row blocks of 8,192 queries": {
        r"8,192 queries in blocks of 128: (\d+)": (T_r,),
        r"8,192 / 128 = (\d+)": (T_r,),
        r"row blocks of 128 gives (\d+) workers": (T_r,),
    },
    "what the loop swap saves": {
        r"swap saves a (third) of": (1 / (1 - 1 / swap),),
        r"moves about (3/2) times the elements of FA2": (swap,),
    },
}


@pytest.mark.parametrize("quantity", AGREED)
def test_chapters_that_name_a_quantity_agree_with_the_package(quantity):
    chapters = set()
    for pattern, computed in AGREED[quantity].items():
        found = statements(pattern)
        assert found, f"nobody says {pattern!r} any more"
        for name, said in found:
            assert said == pytest.approx(computed, rel=2e-3), f"chapter {name}: {pattern}"
        chapters |= {name for name, _ in found}
    assert len(chapters) > 1, "said in one chapter alone"


def test_chapters_agree_on_what_crosses_warps_before_the_softmax():
    """Split-K meets twice: maxima before the exponentials; sums and parts of P V after them."""
    run = warps.split_k(*np.ones((3, 8, 4)), Tiling(8, 8, 8, 8), 0, 4)
    meetings = [reason for reason in run.shared.waits if "all warps" in reason]
    assert meetings == ["row maxima of all warps", "row sums and P V of all warps"]
    before = r"([^.;|]*\b(?:cross|published)\b[^.;|]*\bbefore\b[^.;|]*)"
    said = [(name, clause) for name, text in pages().items() for clause in re.findall(before, text)]
    about_warps = [(name, clause) for name, clause in said if re.search("[Mm]axima|sums", clause)]
    assert {name for name, _ in about_warps} >= {"07", "B"}
    assert not [clause for _, clause in about_warps if re.search(r"\bsums\b", clause.split("before")[0])], about_warps
