"""The rules by which decode divides the keys of all heads among programs. They need neither Triton nor torch.

Decode has too few heads to fill a GPU, so several programs read each head's keys. If a K/V head's query rows take
several row blocks, each of them counts as a head here. There are two ways to divide the work:

    split-KV   every head has the same number of programs, its splits: split w reads tiles w, w + splits, …
    stream-K   the work of all heads is concatenated, and every program gets an equal share, even across heads:
               a head has one unit of work per tile, plus one unit for starting the head

Stream-K suits every batch. Split-KV is chosen if all heads have the same length and their splits fill the GPU. Each
program then works on a single head, and tiles that are read at the same time are close together in memory.
"""

from fa2_lab.tiles import cdiv

# Fitted on an H200 with `python -m fa2_lab bench decode`.
WHOLE_HEADS_FILL = 0.9  # if this share of slots is in use over all waves, whole heads are as fast as stream-K
SPLITS_FILL = 0.95  # if splits fill less than this share of slots, stream-K on all slots is as fast

FP32_BYTES = 4  # bytes per element of a partial result, whose m, l and o are fp32


def heads_fill(slots: int, heads: int) -> bool:
    """Return whether one program per head fills nearly all `slots` in every wave, for `heads` heads of equal length."""
    return heads > 0 and heads / (cdiv(heads, slots) * slots) >= WHOLE_HEADS_FILL


def splits_of_head(slots: int, heads: int, tiles: int, min_share: int = 1) -> int:
    """Return the number of programs per head in split-KV, for heads of `tiles` tiles, or 0 if stream-K is better.

    The result is 1 if whole heads fill the GPU's `slots` program slots. Otherwise, it is the number of slots per head,
    on two conditions: few slots stay empty, and every program gets at least 2 · `min_share` tiles, so that writing its
    partial result is worth the time.
    """
    if heads_fill(slots, heads):
        return 1
    splits = slots // max(heads, 1)
    filled = splits * heads >= SPLITS_FILL * slots
    worth_it = tiles >= 2 * min_share * splits
    return splits if splits > 1 and filled and worth_it else 0


def partial_bytes(rows: int, d: int) -> int:
    """Return the bytes moved when a partial result (m, ℓ, o) of `rows` rows is written and read once."""
    return 2 * rows * (d + 2) * FP32_BYTES


def tile_bytes(B_c: int, d: int, itemsize: int) -> int:
    """Return the number of bytes in a tile of B_c keys and their values."""
    return 2 * B_c * d * itemsize


def min_share(rows: int, d: int, B_c: int, itemsize: int) -> int:
    """Return the smallest number of tiles that makes an additional program worth the partial result that it writes.

    Reading that many tiles moves at least as many bytes as writing and reading the partial result.
    """
    return cdiv(partial_bytes(rows, d), tile_bytes(B_c, d, itemsize))
