"""Listings that a chapter calls whole are run as they are printed, on what a reader would try next."""

import re
from pathlib import Path

import numpy as np
import pytest

from fa2_lab.reference import naive
from fa2_lab.tiles import Mask, Tiling
from fa2_lab.trace import UNWATCHED

TEXT = Path(__file__).resolve().parents[2] / "notebooks" / "text"
CASES = [  # N_q, N_k, causal: square; ragged; more keys; rows that see no key, with and without blocks that are skipped
    (8, 8, False),
    (13, 11, True),
    (5, 17, True),
    (8, 4, True),
    (17, 3, True),
]


def listing(chapter: str, *functions: str) -> dict:
    """The functions of a chapter's cells by their names; its numbers have d = 4."""
    source = (TEXT / f"{chapter}.py").read_text(encoding="utf-8")
    names = {"np": np, "UNWATCHED": UNWATCHED, "tau": 0.5}
    for function in functions:
        exec(re.search(rf"^def {function}\(.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)[0], names)
    return names


@pytest.mark.parametrize("N_q, N_k, causal", CASES)
def test_forward_and_backward_of_chapters_04_and_05(N_q, N_k, causal):
    draw = np.random.default_rng(N_q)
    Q, K, V, dO = (draw.standard_normal((n, 4)) for n in (N_q, N_k, N_k, N_q))
    tiling = Tiling(N_q, N_k, 4, 2, Mask(causal))
    O, L = np.full((N_q, 4), np.nan), np.full(N_q, np.nan)
    with np.errstate(all="raise", under="ignore"):
        listing("04_fa2_forward", "raw_step", "fa2_forward")["fa2_forward"](Q, K, V, O, L, tiling)
        found = listing("05_backward", "p_and_ds", "fa2_backward")["fa2_backward"](Q, K, V, O, L, dO, tiling)
    true_O, P = naive.forward(Q, K, V, mask=tiling.mask)
    visible = Tiling(N_q, N_k, N_q, N_k, tiling.mask).visible(0, 0)
    true_L = naive.logsumexp(np.where(visible, Q @ K.T / 2, -np.inf))
    assert np.allclose(O, true_O, atol=1e-12) and np.allclose(L, true_L, atol=1e-12)
    for ours, true in zip(found, naive.backward(Q, K, V, P, dO), strict=True):
        assert np.allclose(ours, true, atol=1e-12)
