"""The rules, in plain Python, by which decode divides the keys of all heads among programs.

Decode has too few heads to fill a GPU, so several programs read each head's keys. If the query rows of a K/V head
occupy several row blocks, this file treats each row block as a head. There are two ways to divide the work:

    split-KV   every head is divided into the same number of splits, one per program: split w reads tiles w,
               w + splits, …
    stream-K   the work of all heads is concatenated, and every program gets an equal share, which may span heads: a
               head has one unit of work per tile, plus one unit for starting the head

Stream-K suits every batch. Split-KV is chosen if all heads have the same length and their splits fill the GPU. In this
case, each program works on a single head, and tiles that are read concurrently are close together in memory.
"""

from fa2_lab.tiles import cdiv

# These values were fitted on an H200 with `python -m fa2_lab bench decode`.
WHOLE_HEADS_FILL = 0.9  # whole heads are as fast as stream-K if they fill at least this fraction of all waves' slots
SPLITS_FILL = 0.95  # if splits fill less than this fraction of the slots, stream-K, which fills all slots, is no slower

FP32_BYTES = 4  # bytes per element of m, l and o, which are fp32 in a partial result


def heads_fill(slots: int, heads: int) -> bool:
    """Return whether one program for each of `heads` equally long heads fills nearly all slots of all waves."""
    return heads > 0 and heads / (cdiv(heads, slots) * slots) >= WHOLE_HEADS_FILL


def splits_of_head(slots: int, heads: int, tiles: int, min_share: int = 1) -> int:
    """Return the number of programs per head in split-KV for heads of `tiles` tiles, or 0 if stream-K is better.

    If whole heads fill the GPU's `slots` program slots, return 1. Otherwise, return the number of slots per head,
    provided that few slots stay empty and that every program gets at least 2 · `min_share` tiles. With fewer tiles,
    writing a partial result would not be worthwhile.
    """
    if heads_fill(slots, heads):
        return 1
    splits = slots // max(heads, 1)
    filled = splits * heads >= SPLITS_FILL * slots
    worth_it = tiles >= 2 * min_share * splits
    return splits if splits > 1 and filled and worth_it else 0


def partial_bytes(rows: int, d: int) -> int:
    """Return the number of bytes moved by writing and then reading a partial result (m, ℓ, o) of `rows` rows."""
    return 2 * rows * (d + 2) * FP32_BYTES


def tile_bytes(B_c: int, d: int, itemsize: int) -> int:
    """Return the number of bytes in a tile with B_c keys and their values."""
    return 2 * B_c * d * itemsize


def smallest_share(rows: int, d: int, B_c: int, itemsize: int) -> int:
    """Return the smallest number of tiles for which an additional program is worthwhile.

    Reading this number of tiles moves at least as many bytes as writing and reading the program's partial result.
    """
    return cdiv(partial_bytes(rows, d), tile_bytes(B_c, d, itemsize))
