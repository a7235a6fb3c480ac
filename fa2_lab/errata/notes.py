"""Mistakes in two sets of notes on FlashAttention-2: an outline of the paper, and notes in English and Chinese."""

from fa2_lab.errata.cases import Small, distance
from fa2_lab.errata.erratum import Erratum

CASE = Small(N=8, d=4)


EVERY_LOOP = Erratum(
    id="notes-every-loop",
    source="lecture notes on FA2, algorithm",
    claim="The un-scaled output is divided by ℓ at the end of every loop.",
    why="The next step would add an un-scaled block to a scaled one, so the division has to wait until the last tile.",
    instead="It is divided once for each row block, after its last tile.",
    wrong=lambda: CASE.computed("divided-per-tile"),
    right=CASE.computed,
    error=lambda O: distance(O, CASE.O),
)


WRITES = Erratum(
    id="bilingual-writes",
    source="bilingual notes on FA2, Algorithm 1 (forward), lines 12 to 15, in both languages",
    claim="After the inner loop, the numbering starts again at 1, so O_i and L_i are divided and written after the "
    "loops.",
    why="After loop i, these steps would write only the last row block.",
    instead="These steps are the last four of each iteration of loop i.",
    wrong=lambda: CASE.computed("rows-last-alone"),
    right=CASE.computed,
    error=lambda O: distance(O, CASE.O),
)

ERRATA = (EVERY_LOOP, WRITES)
