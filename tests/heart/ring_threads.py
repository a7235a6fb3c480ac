"""Run the ring's own code with threads of one process as ranks and queues as links, for any number of ranks.

On a GPU, all threads use one stream, so each waits for work that was launched before. A rank's pieces, kernels, merges
and memory are the real ones, but need only one GPU.
"""

import threading
from queue import Queue

import torch

from fa2_lab.distributed import ring as rings
from fa2_lab.distributed.shard import join_shards
from fa2_lab.reference import shards


class ThreadedRing(rings.RingCall):
    """A ring that passes blocks through queues."""

    def pass_on(self, block, what, source):
        self.group[(self.rank + 1) % self.size, what].put(block)
        incoming = [(*x.shape[:2], self.lengths[source], x.shape[3]) for x in block]
        return ArrivingBlock(self.group[self.rank, what], incoming)


class ArrivingBlock:
    """A transfer: the block that will arrive at the other end of a link."""

    def __init__(self, link, shapes):
        self.link, self.shapes = link, shapes

    def wait(self):
        block = self.link.get(timeout=20)
        assert block is not None and [x.shape for x in block] == self.shapes
        return [x.clone() for x in block]


def run_threads(size, run_rank):
    """Run work(rank, links) in a thread per rank, and return the results in order."""
    links = {(rank, what): Queue() for rank in range(size) for what in ("K V", "dK dV")}
    results, failures = [None] * size, []

    def task(rank):
        try:
            with torch.no_grad():
                results[rank] = run_rank(rank, links)
        except BaseException as failure:
            failures.append(failure)
            for link in links.values():
                link.put(None)

    threads = [threading.Thread(target=task, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


def make_ring(rank, links, lengths, layout, causal, scale, on_triton):
    options = dict(group=links, rank=rank, lengths=tuple(lengths), layout=layout, causal=causal, scale=scale)
    return ThreadedRing(**options, timeout=60.0, call_number=0, on_triton=on_triton)


def joined(parts, lengths, layout):
    """Return the shards (batch, heads, N, …) of all ranks joined to one tensor."""
    return join_shards([part.movedim(2, 0) for part in parts], lengths, layout).movedim(0, 2)


def run_ring(q, k, v, dO, dL, lengths, layout, causal, scale, on_triton):
    """Return (O, L, dQ, dK, dV) of whole tensors, which are sharded, sent round and joined. dO or dL may be None."""
    pieces = shards.pieces(lengths, layout)

    def run_rank(rank, links):
        ring = make_ring(rank, links, lengths, layout, causal, scale, on_triton)
        own = (x if x is None else torch.cat([x[:, :, p] for p in pieces[rank]], 2) for x in (q, k, v, dO, dL))
        q_, k_, v_, dO_, dL_ = own
        O, L = rings.all_heads_forward(ring, q_, k_, v_, rings.first_half(ring, q_, k_, v_))
        return O, L, *rings.all_heads_backward(ring, dO_, dL_, q_, k_, v_, O, L)

    return [joined(parts, lengths, layout) for parts in zip(*run_threads(len(lengths), run_rank), strict=True)]
