"""The rules by which decode divides the keys of all heads among programs. They need neither Triton nor torch.

Heads alone are too few to fill a GPU, so several programs read each head. There are two ways to divide the work:

    split-KV   every head has the same number of programs, its splits: split w takes tiles w, w + splits, …
    stream-K   the work of all heads is laid end to end, and every program takes an equal share of it, even across
               heads: a head is as many units of work as it has tiles, and one more, to begin it

Stream-K fits every batch. Split-KV is chosen if all heads have one length and their splits fill the GPU: then each of
its programs has one head, and tiles that are read at the same time are close together in memory.
"""

from fa2_lab.tiles import cdiv

# Fitted on an H200 with `python -m fa2_lab bench decode`.
WHOLE_HEADS_FILL = 0.9  # of the slots, over all waves: whole heads are then as fast as equal shares, and need no merge
SPLITS_FILL = 0.95  # of the slots: with fewer splits equal shares on all slots are as fast

STATISTIC = 4  # bytes of a number in a part: m, l and o are kept in fp32


def heads_fill(slots: int, heads: int) -> bool:
    """Return whether `heads` heads of one length, with one program each, fill the slots for programs."""
    return heads > 0 and heads / (cdiv(heads, slots) * slots) >= WHOLE_HEADS_FILL


def splits_of_head(slots: int, heads: int, tiles: int, least: int = 1) -> int:
    """Return how many programs read each of `heads` heads of `tiles` tiles in split-KV, or 0 if stream-K is better.

    It is 1 if whole heads fill the slots. Otherwise it is the number of slots per head, provided that few slots stay
    empty and every program gets at least two tiles, each worth `least` units of work, so that its partial result is
    worth writing.
    """
    if heads_fill(slots, heads):
        return 1
    splits = slots // max(heads, 1)
    filled = splits * heads >= SPLITS_FILL * slots
    worth_it = tiles >= 2 * least * splits
    return splits if splits > 1 and filled and worth_it else 0


def part_bytes(rows: int, d: int) -> int:
    """Return the bytes moved by one partial result (m, l, o) of these rows, which is written once and read once."""
    return 2 * rows * (d + 2) * STATISTIC


def tile_bytes(B_c: int, d: int, itemsize: int) -> int:
    """Return the bytes of one tile of keys and its values."""
    return 2 * B_c * d * itemsize


def least_share(rows: int, d: int, B_c: int, itemsize: int) -> int:
    """Return the fewest tiles worth a partial result: reading them moves at least as many bytes as the result does."""
    return cdiv(part_bytes(rows, d), tile_bytes(B_c, d, itemsize))
