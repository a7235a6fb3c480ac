"""Slips in the bilingual (English and Chinese) notes on FlashAttention-2."""

from __future__ import annotations

import numpy as np

from fa2_lab.errata.cases import Case
from fa2_lab.errata.erratum import Erratum
from fa2_lab.glossary import GLOSSARY

CASE = Case(N=8, d=4)


def rows_written(inside_the_loop: bool) -> int:
    """Rows of O that are finished when the writes stand inside loop i, or after it."""
    O, blocks = np.full_like(CASE.O, np.nan), np.split(np.arange(8), 4)
    for rows in blocks:
        o_i = CASE.O[rows]
        if inside_the_loop:
            O[rows] = o_i
    O[rows] = o_i
    return int((O == CASE.O).all(axis=1).sum())


WRITES = Erratum(
    id="bilingual-writes",
    source="bilingual notes on FA2, Algorithm 1 (forward), lines 12 to 15, in both languages",
    claim="The numbering starts again at 1 after the inner loop: O_i and L_i are divided and written after the loops.",
    why="Done after loop i, only the last row block is ever written.",
    instead="They are the last four steps of each pass of loop i.",
    wrong=lambda: rows_written(inside_the_loop=False),
    right=lambda: rows_written(inside_the_loop=True),
    error=lambda rows: abs(rows - CASE.N),
)

WARP = Erratum(
    id="bilingual-warp",
    source="bilingual notes on FA2, abstract",
    claim="warp is 翘曲.",
    why="翘曲 is what a wet board does. The word is taken from weaving: the threads that run side by side.",
    instead="线程束, a bundle of threads.",
    wrong=lambda: "翘曲",
    right=lambda: "线程束",
    error=lambda word: float(word != GLOSSARY["warp"].chinese),  # a word can only be held against the glossary
)

ERRATA = (WRITES, WARP)
