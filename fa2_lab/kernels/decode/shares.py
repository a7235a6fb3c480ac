"""The rules by which decode divides the keys of all heads among programs. They need neither Triton nor torch.

There are too few heads to fill a GPU, so several programs read each head. There are two ways to divide the work:

    split-KV   every head has the same number of programs, its splits: split w reads tiles w, w + splits, …
    stream-K   the work of all heads is put end to end, and every program gets an equal share of it, even across heads:
               a head has as many units of work as it has tiles, and one more unit, to begin it

Stream-K fits every batch. Split-KV is chosen if all heads have one length and their splits fill the GPU. In that case,
each of its programs works on one head, and tiles that are read at the same time are close together in memory.
"""

from fa2_lab.tiles import cdiv

# Fitted on an H200 with `python -m fa2_lab bench decode`.
WHOLE_HEADS_FILL = 0.9  # of the slots, over all waves: whole heads are then as fast as equal shares, and need no merge
SPLITS_FILL = 0.95  # of the slots: with fewer splits equal shares on all slots are as fast

STATISTIC = 4  # bytes per number of a partial result, whose m, l and o are fp32


def heads_fill(slots: int, heads: int) -> bool:
    """Return whether `heads` heads of equal length, with one program each, fill nearly all slots in all waves."""
    return heads > 0 and heads / (cdiv(heads, slots) * slots) >= WHOLE_HEADS_FILL


def splits_of_head(slots: int, heads: int, tiles: int, least: int = 1) -> int:
    """Return how many programs read each of `heads` heads of `tiles` tiles in split-KV, or 0 if stream-K is better.

    The result is 1 if whole heads fill the slots for programs. Otherwise, it is the number of slots per head, on two
    conditions: few slots stay empty, and every program gets at least 2 · `least` tiles, so that writing its partial
    result is worth the time.
    """
    if heads_fill(slots, heads):
        return 1
    splits = slots // max(heads, 1)
    filled = splits * heads >= SPLITS_FILL * slots
    worth_it = tiles >= 2 * least * splits
    return splits if splits > 1 and filled and worth_it else 0


def part_bytes(rows: int, d: int) -> int:
    """Return the bytes moved by one partial result (m, l, o) of `rows` rows, which is written once and read once."""
    return 2 * rows * (d + 2) * STATISTIC


def tile_bytes(B_c: int, d: int, itemsize: int) -> int:
    """Return the bytes of one tile of keys and the tile of their values."""
    return 2 * B_c * d * itemsize


def least_share(rows: int, d: int, B_c: int, itemsize: int) -> int:
    """Return the smallest number of tiles that is worth a partial result.

    Reading these tiles moves at least as many bytes as writing and reading the partial result.
    """
    return cdiv(part_bytes(rows, d), tile_bytes(B_c, d, itemsize))
