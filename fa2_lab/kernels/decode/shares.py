"""The rules by which decode cuts the keys of all heads among programs. They need neither Triton nor torch.

Heads alone are too few to fill a GPU, so several programs read each head. There are two ways to cut:

    split-KV   every head has the same number of programs, its splits: split w takes tiles w, w + splits, …
    stream-K   the work of all heads lies end to end, and every program takes an equal share of it, across heads if need
               be: a head is as many units of work as it has tiles, and one more, to begin it

Stream-K fits every batch. Split-KV is taken where all heads have one length and their splits fill the GPU: its programs
have one head each, and tiles that are read at the same time lie close together in memory.
"""

from fa2_lab.tiles import cdiv

# Fitted on an H200 with `python -m fa2_lab bench decode`.
WHOLE_HEADS_FILL = 0.9  # of the slots, over all waves: whole heads are then as fast as equal shares, and need no merge
SPLITS_FILL = 0.95  # of the slots: with fewer splits equal shares on all slots are as fast

STATISTIC = 4  # bytes of a number in a part: m, l and o are kept in fp32


def heads_fill(slots: int, heads: int) -> bool:
    """Whether so many heads of one length, a program for each, fill the slots; a slot is room for one program."""
    return heads > 0 and heads / (cdiv(heads, slots) * slots) >= WHOLE_HEADS_FILL


def splits_of_head(slots: int, heads: int, tiles: int, least: int = 1) -> int:
    """Split-KV: how many programs read each of the heads, which all have so many tiles. 0 where stream-K is better.

    One where whole heads fill the slots. Otherwise as many as there are slots for, if these leave few slots empty and
    every program gets two tiles or more, each worth `least` units of work, so that its part is worth writing.
    """
    if heads_fill(slots, heads):
        return 1
    splits = slots // max(heads, 1)
    filled = splits * heads >= SPLITS_FILL * slots
    worth_it = tiles >= 2 * least * splits
    return splits if splits > 1 and filled and worth_it else 0


def part_bytes(rows: int, d: int) -> int:
    """Bytes that one part (m, l, o) of so many rows moves: it is written once and read once."""
    return 2 * rows * (d + 2) * STATISTIC


def tile_bytes(B_c: int, d: int, itemsize: int) -> int:
    """Bytes of one tile of keys and its values."""
    return 2 * B_c * d * itemsize


def least_share(rows: int, d: int, B_c: int, itemsize: int) -> int:
    """The fewest tiles that are worth a part: reading them moves no fewer bytes than writing and reading the part."""
    return cdiv(part_bytes(rows, d), tile_bytes(B_c, d, itemsize))
