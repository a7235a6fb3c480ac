"""Exact attention over a sequence sharded across the ranks of torch.distributed.

Programs that use this package are started with torchrun.

group   the ranks that take part in a call, and how they check that their calls match before any large transfer
ring    ring_attention(): K and V travel around the ring of ranks, and each rank merges its partial results (O, L). In
        the backward pass, dK and dV follow K and V
state   the softmax state of a rank's rows: m, l and o
merge   the kernel that merges a partial result into this state
shard   functions that split a tensor into one shard per rank and join the shards again
"""

from fa2_lab.distributed.ring import counting, ring_attention
from fa2_lab.distributed.shard import shard, unshard

__all__ = ["counting", "ring_attention", "shard", "unshard"]
