"""Slips in the bilingual (English and Chinese) notes on FlashAttention-2."""

from __future__ import annotations

import numpy as np

from fa2_lab.errata.cases import Case, TwoBlocks, distance
from fa2_lab.errata.erratum import Erratum
from fa2_lab.glossary import GLOSSARY

CASE = Case(N=8, d=4)
TWO = TwoBlocks(CASE, cut=3)


def second_tile(alpha) -> np.ndarray:
    """Algorithm 1, line 10, on the second of two tiles, then line 12."""
    return (alpha * (TWO.e1 @ TWO.V1) + TWO.e2 @ TWO.V2) / TWO.l2


INVERSE = Erratum(
    id="bilingual-inverse",
    source="bilingual notes on FA2, Algorithm 1 (forward), line 10, in both languages",
    claim="O^(j) = diag(exp(m^(j−1) − m^(j)))⁻¹ O^(j−1) + P V_j.",
    why="The accumulator must shrink when the maximum grows; the inverse makes it grow, and at the first tile, where "
    "m^(0) = −∞, it gives 1/0 · 0 = NaN (here: the second tile).",
    instead="No inverse: O^(j) = diag(exp(m^(j−1) − m^(j))) O^(j−1) + P V_j.",
    wrong=lambda: second_tile(1 / np.exp(TWO.m1 - TWO.m2)),
    right=lambda: second_tile(np.exp(TWO.m1 - TWO.m2)),
    error=lambda O: distance(O, TWO.O),
)


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

ERRATA = (INVERSE, WRITES, WARP)
