"""Whose turn is it? How the kernels of decode count the equal shares of machine/splits.py.

The lengths of sequences are known to the GPU alone, so every program adds them up for itself.
"""

import triton
import triton.language as tl

LENGTHS = tl.constexpr(256)  # key_lengths that are looked at together


@triton.jit
def turns_of(length, B_c: tl.constexpr):
    """A head's turns: one to begin it, which also gives a row that sees no key its O = 0 and L = −∞, and its tiles."""
    return tl.cdiv(length, B_c) + 1


@triton.jit
def turns_among(key_lengths, N_k, heads, first, batch, B_c: tl.constexpr):
    """Turns of each of the sequences first … first + LENGTHS, as far as they exist."""
    index = first + tl.arange(0, LENGTHS)
    length = tl.load(key_lengths + index, mask=index < batch, other=0)
    length = tl.minimum(tl.maximum(length, 0), N_k).to(tl.int32)
    return tl.where(index < batch, heads * turns_of(length, B_c), 0)  # (LENGTHS,)


@triton.jit
def turns_before(b, key_lengths, N_k, heads, B_c: tl.constexpr):
    """Turns of all the sequences before b."""
    if key_lengths is None:
        return b * heads * turns_of(N_k, B_c)
    else:
        turns = 0 * b
        for first in range(0, b, LENGTHS):
            turns += tl.sum(turns_among(key_lengths, N_k, heads, first, b, B_c), 0)
        return turns


@triton.jit
def sequence_of(t, key_lengths, N_k, heads, batch, B_c: tl.constexpr):
    """Whose turn t is, and the first turn of that sequence."""
    if key_lengths is None:
        turns = heads * turns_of(N_k, B_c)
        return t // turns, t // turns * turns
    else:
        b, begin, before = 0 * t, 0 * t, 0 * t
        for first in range(0, batch, LENGTHS):
            turns = turns_among(key_lengths, N_k, heads, first, batch, B_c)
            over = (before + tl.cumsum(turns, 0) <= t) & (first + tl.arange(0, LENGTHS) < batch)
            b += tl.sum(over.to(tl.int32), 0)
            begin += tl.sum(tl.where(over, turns, 0), 0)
            before += tl.sum(turns, 0)
        return b, begin


@triton.jit
def share_of(T, programs, least, key_lengths):
    """How many of all T turns each program takes: machine/splits.py, Shares.share. Without lengths the host knows."""
    return least if key_lengths is None else tl.maximum(tl.cdiv(T, programs), least)
