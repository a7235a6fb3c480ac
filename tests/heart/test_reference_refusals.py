"""What the reference refuses: every wrong argument of every stage, and the words it is told with."""

import inspect
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from fa2_lab.reference import fa1, fa2, heads, naive, online_softmax, shards
from fa2_lab.reference.dropout import Dropout, sequential_mask
from fa2_lab.tiles import Mask, Tiling

SIDES = st.none() | st.integers(0, 16)
SETTINGS = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)


ONE = np.ones((4, 3))
GOOD = dict(B_r=2, B_c=2)


@pytest.mark.parametrize(
    ("call", "kind", "word"),
    [
        (lambda: fa2.forward(ONE[0], ONE, ONE, **GOOD), ValueError, "Q"),
        (lambda: fa2.forward(ONE, ONE[:, :2], ONE, **GOOD), ValueError, "K"),
        (lambda: fa2.forward(ONE, ONE, ONE[:2], **GOOD), ValueError, "V"),
        (lambda: fa2.forward(ONE[:0], ONE, ONE, **GOOD), ValueError, "Q"),
        (lambda: fa2.forward(ONE * 1j, ONE, ONE, **GOOD), TypeError, "Q"),
        (lambda: fa2.forward(ONE, [[1.0], [1.0, 2.0]], ONE, **GOOD), TypeError, "K"),
        (lambda: fa2.forward(ONE, ONE, ONE, B_r=0, B_c=2), ValueError, "B_r"),
        (lambda: fa2.forward(ONE, ONE, ONE, B_r=2, B_c=2.5), TypeError, "B_c"),
        (lambda: fa2.forward(ONE, ONE, ONE, tau=-1.0, **GOOD), ValueError, "scale"),
        (lambda: fa2.forward(ONE, ONE, ONE, tau=float("nan"), **GOOD), ValueError, "scale"),
        (lambda: fa2.forward(ONE, ONE, ONE, tau="1", **GOOD), TypeError, "scale"),
        (lambda: fa2.forward(ONE, ONE, ONE, mask=Mask(key_length=5), **GOOD), ValueError, "key_length"),
        (lambda: fa2.forward(ONE, ONE, ONE, mask=Mask(window=(0, -1)), **GOOD), ValueError, "window"),
        (lambda: fa2.forward(ONE, ONE, ONE, softcap=0.0, **GOOD), ValueError, "softcap"),
        (lambda: fa1.forward(ONE, ONE, ONE, softcap=-1, **GOOD), ValueError, "softcap"),
        (lambda: naive.forward(ONE, ONE, ONE, softcap=float("inf")), ValueError, "softcap"),
        (lambda: fa2.backward(ONE, ONE, ONE, ONE, ONE[:, 0], ONE, softcap="2", **GOOD), TypeError, "softcap"),
        (lambda: fa2.forward_split_keys(ONE, ONE, ONE, softcap=0.0, splits=1, **GOOD), ValueError, "softcap"),
        (lambda: fa1.backward(*[ONE] * 4, ONE[:, 0], ONE[:, 0], ONE, softcap=0.0, **GOOD), ValueError, "softcap"),
        (lambda: naive.backward(*[ONE] * 5, softcap=0.0), ValueError, "softcap"),
        (lambda: naive.forward_linear_memory(ONE, ONE, ONE, softcap=0.0), ValueError, "softcap"),
        (lambda: naive.backward_linear_memory(*[ONE] * 4, ONE[:, 0], ONE, softcap=0.0), ValueError, "softcap"),
        (lambda: fa2.forward(ONE, ONE, ONE, sink=float("nan"), **GOOD), ValueError, "sink"),
        (lambda: fa2.forward(ONE, ONE, ONE, sink=ONE[0], **GOOD), TypeError, "sink"),
        (lambda: fa2.forward(ONE, ONE, ONE, dropout=0.1, **GOOD), TypeError, "dropout"),
        (lambda: fa2.forward_split_keys(ONE, ONE, ONE, splits=0, **GOOD), ValueError, "splits"),
        (lambda: fa2.backward(ONE, ONE, ONE, ONE, ONE[:, 0], ONE[:3], **GOOD), ValueError, "dO"),
        (lambda: fa2.backward(ONE, ONE, ONE, ONE, ONE, ONE, **GOOD), ValueError, "L"),
        (lambda: fa1.forward(ONE, ONE, ONE), ValueError, "M, B_r, B_c"),
        (lambda: fa1.forward(ONE, ONE, ONE, M=8, B_r=2, B_c=2), ValueError, "M, B_r, B_c"),
        (lambda: fa1.forward(ONE, ONE, ONE, B_r=2), ValueError, "M, B_r, B_c"),
        (lambda: fa1.forward(ONE, ONE, ONE, M=0), ValueError, "M"),
        (lambda: fa1.backward(ONE, ONE, ONE, ONE, ONE[:2, 0], ONE[:, 0], ONE, **GOOD), ValueError, "l"),
        (lambda: naive.forward(ONE, ONE, ONE, mask=Mask(allowed=np.ones((2, 2), bool))), ValueError, "mask"),
        (lambda: naive.backward(ONE, ONE, ONE, ONE, ONE), ValueError, "P"),
        (lambda: Dropout(1.0, 0), ValueError, "dropout_p"),
        (lambda: Dropout(-0.1, 0), ValueError, "dropout_p"),
        (lambda: Dropout("0.1", 0), TypeError, "dropout_p"),
        (lambda: Dropout(float("nan"), 0), ValueError, "dropout_p"),
        (lambda: Dropout(0.1), ValueError, "seed"),
        (lambda: Dropout(0.1, -1), ValueError, "seed"),
        (lambda: sequential_mask(Tiling(4, 4, 2, 2), 0.5, 0, "fa3"), ValueError, "order"),
        (lambda: heads.forward(ONE, ONE, ONE), ValueError, "q"),
        (lambda: heads.forward(ONE[None, None], ONE[None, None, :, :2], ONE[None, None]), ValueError, "k"),
        (lambda: heads.forward(np.ones((1, 6, 4, 3)), *np.ones((2, 1, 4, 4, 3))), ValueError, "k"),
        (lambda: heads.forward(*np.ones((3, 1, 2, 4, 3)), stage="fa3"), ValueError, "stage"),
        (lambda: heads.forward(*np.ones((3, 1, 2, 4, 3)), key_lengths=[np.nan]), TypeError, "key_lengths"),
        (lambda: heads.forward(*np.ones((3, 1, 2, 4, 3)), key_lengths=[5]), ValueError, "key_lengths"),
        (lambda: heads.forward(*np.ones((3, 1, 2, 4, 3)), key_lengths=[1, 2]), ValueError, "key_lengths"),
        (lambda: heads.forward(*np.ones((3, 1, 2, 4, 3)), causal="yes"), TypeError, "causal"),
        (lambda: heads.forward(*np.ones((3, 1, 2, 4, 3)), window=3), TypeError, "window"),
        (lambda: heads.forward(*np.ones((3, 1, 2, 4, 3)), sinks=np.ones(3)), ValueError, "sinks"),
        (lambda: heads.forward(*np.ones((3, 1, 2, 4, 3)), sinks=["a", "b"]), TypeError, "sinks"),
    ],
)
def test_bad_input_is_named(call, kind, word):
    with pytest.raises(kind, match=rf"^{word}: got "):
        call()


TALL, WIDE = np.ones((4, 3)), np.ones((5, 3))  # four queries, five keys
TAKEN = dict(Q=TALL, K=WIDE, V=WIDE, O=TALL, dO=TALL, P=np.ones((4, 5)), l=TALL[:, 0], m=TALL[:, 0], L=TALL[:, 0])
SIZES = dict(B_r=2, B_c=2, splits=2)
REFUSED = dict(
    **{name: x[:-1] for name, x in TAKEN.items() if name not in ("Q", "K")},  # a row too few
    **dict(Q=TALL[0], K=WIDE[:, :2], B_r=0, B_c=0, splits=0),
    **dict(tau=-1.0, softcap=0.0, sink=float("nan"), dropout=0.1, mask="causal"),
)
STAGE_CALLS = [
    *(naive.forward, naive.backward, naive.forward_linear_memory, naive.backward_linear_memory),
    *(fa1.forward, fa1.backward, fa2.forward, fa2.backward, fa2.forward_split_keys),
]


@pytest.mark.parametrize("call", STAGE_CALLS, ids=lambda call: f"{call.__module__.split('.')[-1]}-{call.__name__}")
def test_every_stage_looks_at_every_argument(call):
    """One argument at a time is wrong; the error names it."""
    takes = inspect.signature(call).parameters
    good = {name: x for name, x in (TAKEN | SIZES).items() if name in takes}
    call(**good)
    for name in takes.keys() - {"M", "trace"}:
        with pytest.raises((TypeError, ValueError), match=rf"^{'scale' if name == 'tau' else name}: got "):
            call(**good | {name: REFUSED[name]})


HEADS_TAKEN = dict(q=np.ones((2, 4, 4, 3)), k=np.ones((2, 2, 5, 3)), v=np.ones((2, 2, 5, 3))) | {
    name: np.ones((2, 4, *TAKEN[name].shape)) for name in ("O", "L", "dO")
}
HEADS_REFUSED = dict(
    **{name: x[:, :, :-1] for name, x in HEADS_TAKEN.items() if name not in ("q", "k")},
    **dict(q=HEADS_TAKEN["q"][0], k=HEADS_TAKEN["k"][:1], stage="fa3", causal="yes", window=3, softcap=0.0),
    **dict(sinks=np.ones(3), scale=-1.0, key_lengths=[6, 6], dropout_p=1.0, seed=-1, B_r=0, B_c=0),
)


@pytest.mark.parametrize("stage", heads.STAGES)
@pytest.mark.parametrize("call", [heads.forward, heads.backward], ids=lambda call: call.__name__)
def test_a_batch_of_heads_looks_at_every_argument(call, stage):
    takes = inspect.signature(call).parameters
    good = {name: x for name, x in HEADS_TAKEN.items() if name in takes} | dict(stage=stage)
    call(**good)
    for name in takes.keys() - {"trace", *(("B_r", "B_c") if stage == "naive" else ())}:
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: got "):
            call(**good | {name: HEADS_REFUSED[name]})


HEADS = np.ones((3, 1, 2, 4, 3))
NUMBER = "it takes a finite number"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fa2.forward(ONE, [[1.0], [1.0, 2.0]], ONE, **GOOD), "nested lists of unequal length; it takes a real"),
        (lambda: fa2.forward(ONE == 1, ONE, ONE, **GOOD), "Q: got dtype bool; it takes real numbers"),
        (lambda: fa2.forward(ONE[0], ONE, ONE, **GOOD), "shape (3,); it takes 2 dimensions, none of them empty"),
        (lambda: fa2.forward(ONE, ONE[:, :2], ONE, **GOOD), "K: got head dimension 2; it takes that of Q, d = 3"),
        (lambda: fa2.forward(ONE, ONE, ONE[:2], **GOOD), "V: got shape (2, 3); it takes the shape of K = (4, 3)"),
        (lambda: fa2.forward(ONE, ONE, ONE, dropout=0.1, **GOOD), "0.1; it takes a Dropout, as in Dropout(p=0.1, se"),
        (lambda: fa2.forward(ONE, ONE, ONE, softcap=0, **GOOD), f"0; {NUMBER} above 0, or None for no cap"),
        (lambda: fa2.forward(ONE, ONE, ONE, softcap=np.inf, **GOOD), f"inf; {NUMBER} above 0, or None for no cap"),
        (lambda: fa2.forward(ONE, ONE, ONE, softcap=True, **GOOD), f"True; {NUMBER} above 0, or None for no cap"),
        (lambda: fa2.forward(ONE, ONE, ONE, sink="1", **GOOD), f"'1'; {NUMBER}, or None for no sink"),
        (lambda: fa2.forward(ONE, ONE, ONE, sink=-np.inf, **GOOD), f"-inf; {NUMBER}, or None for no sink"),
        (lambda: fa2.forward(ONE, ONE, ONE, tau=True, **GOOD), "scale: got True; it takes a number, or None for 1/√d"),
        (lambda: fa2.forward(ONE, ONE, ONE, tau=np.inf, **GOOD), "inf; it takes a finite number of at least 0"),
        (lambda: fa2.backward(ONE, ONE, ONE, ONE[:2], ONE[:, 0], ONE, **GOOD), "it takes the shape of Q = (4, 3)"),
        (
            lambda: fa2.backward(ONE, ONE, ONE, ONE, ONE[:2, 0], ONE, **GOOD),
            "L: got shape (2,); it takes one number for each row of Q, shape = (4,)",
        ),
        (lambda: naive.backward(ONE, ONE, ONE, ONE, ONE), "shape (4, 3); it takes (N_q, N_k) = (4, 4)"),
        (lambda: fa1.forward(ONE, ONE, ONE, M=0), "M: got 0; it takes a whole number of at least 1"),
        (lambda: fa1.block_sizes(8, 0), "d: got 0; it takes a whole number of at least 1"),
        (lambda: fa1.forward(ONE, ONE, ONE, B_c=2), "M=None, B_r=None, B_c=2; it takes M alone, or B_r and B_c"),
        (lambda: fa2.forward_split_keys(ONE, ONE, ONE, splits=0, **GOOD), "splits: got 0; it takes a whole number of"),
        (lambda: Dropout(True), "dropout_p: got True; it takes a probability, 0 ≤ p < 1"),
        (lambda: Dropout(1), "dropout_p: got 1; it takes a probability, 0 ≤ p < 1"),
        (lambda: Dropout(0.1), "seed: got None; with dropout it takes a whole number from 0 to 2**64 - 1"),
        (lambda: Dropout(0, 2**64), f"seed: got {2**64}; it takes a whole number from 0 to 18446744073709551615"),
        (lambda: sequential_mask(Tiling(4, 4, 2, 2), 0.5, 0, "fa3"), "it takes 'fa1' (columns outside) or 'fa2' (rows"),
        (lambda: online_softmax.two_blocks(ONE, ONE[0], ONE, ONE), "S2: got shape (3,); it takes 2 dimensions"),
        (lambda: online_softmax.two_blocks(ONE[0], ONE, ONE, ONE), "S1: got shape (3,); it takes 2 dimensions"),
        (lambda: online_softmax.two_blocks(ONE, ONE, ONE[0], ONE), "V1: got shape (3,); it takes 2 dimensions"),
        (lambda: online_softmax.two_blocks(ONE, ONE, ONE, ONE[0]), "V2: got shape (3,); it takes 2 dimensions"),
        (lambda: heads.forward(ONE, *HEADS[1:]), "q: got shape (4, 3); it takes 4 dimensions, none of them empty"),
        (lambda: heads.forward(HEADS[0], ONE, HEADS[2]), "k: got shape (4, 3); it takes 4 dimensions, none of them"),
        (lambda: heads.forward(HEADS[0, :, :1], *HEADS[1:]), "k: got 2 heads; it takes a divisor of the 1 heads of q"),
        (lambda: heads.forward(*HEADS[1:, ..., :2], HEADS[0]), "shape (1, 2, 4, 3); it takes the shape of k = (1, 2, "),
        (lambda: heads.forward(HEADS[0], *HEADS[1:, ..., :2]), "the batch and head dimension of q, (1, 2, 4, 3)"),
        (lambda: heads.forward(*HEADS, stage="fa3"), "stage: got 'fa3'; it takes one of naive, fa1, fa2"),
        (lambda: heads.forward(*HEADS, key_lengths=[0.5]), "got dtype float64; it takes whole numbers"),
        (lambda: heads.forward(*HEADS, key_lengths=[1, 2]), "key_lengths: got shape (2,); it takes (batch,) = (1,)"),
        (lambda: heads.forward(*HEADS, key_lengths=[-1]), "key_lengths: got -1; it takes a whole number from 0 to 4"),
        (lambda: heads.forward(*HEADS, sinks=np.ones(3)), "sinks: got shape (3,); it takes (heads,) = (2,)"),
        (lambda: heads.sinks_backward(np.ones(2), ONE, ONE, ONE), "O: got shape (4, 3); it takes 4 dimensions, none"),
        (lambda: shards.check_layout("ring"), "layout: got 'ring'; it takes one of zigzag, contiguous"),
        (lambda: shards.even_lengths(0, 2), "N: got 0; it takes a whole number of at least 1"),
        (lambda: shards.even_lengths(2, 0), "ranks: got 0; it takes a whole number of at least 1"),
    ],
)
def test_a_refusal_says_what_it_got_and_what_it_takes(call, says):
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        call()
