"""Exact attention over a sequence that is sharded among ranks, on torch.distributed. Start it with torchrun.

group   the ranks that take part, and how they check that they agree before any large transfer
ring    ring_attention: K and V travel round the ring, (O, L) are merged, and in the backward dK and dV travel with them
state   the softmax state of a rank's rows so far: m, l and o
shard   cutting a tensor into one shard per rank, and joining the shards again
"""

from fa2_lab.distributed.ring import counting, ring_attention
from fa2_lab.distributed.shard import shard, unshard

__all__ = ["counting", "ring_attention", "shard", "unshard"]
