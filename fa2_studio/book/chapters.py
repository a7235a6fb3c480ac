"""The chapters in reading order, and the navigation bar at the beginning and the end of each notebook."""

from pathlib import Path
from typing import NamedTuple

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
TEXT = NOTEBOOKS / "text"


class Chapter(NamedTuple):
    """One notebook and the question it answers."""

    name: str
    title: str
    question: str

    @property
    def number(self) -> str:
        """Return the chapter's number, from 00 to 17 with 12a and 12b, or the letter of an appendix."""
        return self.name.split("_")[0]


CHAPTERS = [
    Chapter("00_start", "The map", "What will we build, and what is a GPU?"),
    Chapter("01_naive_attention", "Naive attention", "What does attention compute, and what does it cost?"),
    Chapter("02_online_softmax", "Online softmax", "Can softmax be finished before all scores are known?"),
    Chapter("03_fa1", "FlashAttention", "What if the score matrix never leaves the chip?"),
    Chapter("04_fa2_forward", "FlashAttention-2, forward", "Same answer, same tiles: what is left to save?"),
    Chapter("05_backward", "The backward pass", "How do gradients come back without the score matrix?"),
    Chapter("06_parallelism", "Parallelism", "Who works on which tiles, and who waits?"),
    Chapter("07_warps", "Warps", "How do the warps of one block share a tile?"),
    Chapter("08_triton_forward", "The Triton forward kernel", "How do these lines become a GPU kernel?"),
    Chapter("09_triton_backward", "The Triton backward kernels", "How do many blocks add into one dQ?"),
    Chapter("10_ladder", "The ladder, measured", "What did each change gain on a real GPU?"),
    Chapter("11_workshop", "The workshop", "What does a GPU programmer do all day?"),
    Chapter("12a_hopper_rungs", "Hopper, machine and rungs", "What can an H100 do that FlashAttention-2 does not use?"),
    Chapter("12b_hopper_kernel", "Hopper, the kernel", "How does the fast kernel work, line by line?"),
    Chapter("13_hopper_backward", "Hopper, backward", "One pass over the columns: who adds up dQ?"),
    Chapter("14_decode", "Decode", "One query, a long cache: who does the work?"),
    Chapter("15_rings", "Rings", "What if the sequence does not fit on one GPU?"),
    Chapter("16_masks", "The same loop, other masks", "Windows, documents, sinks: what changes in the loop?"),
    Chapter("17_change_it", "Change it", "How do I add a bias or a mask of my own, and what comes after Hopper?"),
    Chapter("A_lanes", "Lanes, layouts, banks", "Where exactly are the numbers of a tile?"),
    Chapter("B_errata", "Errata", "Which tests does a wrong formula survive?"),
    Chapter(
        "C_package", "The package and its commands", "What is in the package, and how do I use it for my own work?"
    ),
    Chapter("D_numbers", "Numbers", "Which digits of a result can I trust?"),
]

PARTS = {  # {part of the book: numbers of its chapters}
    "I · The method": "00 01 02 03 04 05",
    "II · The machine": "06 07",
    "III · Triton": "08 09 10 11",
    "IV · Hopper": "12a 12b 13",
    "V · Beyond one call": "14 15 16 17",
    "Appendices": "A B C D",
}


def written() -> list[Chapter]:
    """Return the chapters whose text exists in notebooks/text."""
    return [c for c in CHAPTERS if (TEXT / f"{c.name}.py").exists()]


def navigation(name: str, chapters: list[Chapter]) -> str:
    """Return a chapter's navigation bar, with links to the previous chapter, the map and the next chapter."""
    names = [c.name for c in chapters]
    here = names.index(name)
    parts = []
    if here > 0:
        parts.append(f"[← {chapters[here - 1].title}]({names[here - 1]}.ipynb)")
    if here > 0 and names[0] == "00_start" and here != 1:
        parts.append("[The map](00_start.ipynb)")
    if here + 1 < len(names):
        parts.append(f"[{chapters[here + 1].title} →]({names[here + 1]}.ipynb)")
    return " · ".join(parts)
