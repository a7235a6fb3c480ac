"""Ring attention: queries stay in place, keys and values travel around a ring of ranks, and partial results are merged.

For n ranks, the forward pass has n steps. In each step except the last, a rank sends its current block of K and V to
the rank on its right and receives the next block from the rank on its left, while its queries attend to the current
block.

The attention of a rank's queries to its own block needs no communication. It is split into two halves of about equal
cost. The first half runs while the ranks compare their calls, and the second half while the first transfer runs.

In the backward pass, the blocks travel around the ring again. A block's dK and dV follow one step behind the block, in
fp32, and each rank adds its contribution to them. The gradients of a rank's own block are also computed in two halves.
The first half runs during the first transfer, and the second while the rank's own dK and dV return.

A transfer starts as soon as its data have been computed and runs concurrently with the kernels (NCCL on its own stream,
gloo in threads). The rank waits for the transfer just before it needs the block. Until then, the tensors in transit
stay referenced, so that the allocator cannot reuse their memory too early. On a GPU, only the kernels' stream waits for
the transfer's stream, and the host never waits.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from fa2_lab.api import operators
from fa2_lab.api.attention import attention
from fa2_lab.api.checks import check_flags, check_scale, check_tensors, runs_on_triton, scale_or_default
from fa2_lab.distributed.group import AGREEMENTS, Exchange, check_timeout, process_group, reporting_refusal
from fa2_lab.distributed.state import State
from fa2_lab.kernels.arguments import Options, Tensors
from fa2_lab.reference import shards
from fa2_lab.reference.shards import ShardTile
from fa2_lab.tiles import Tile, cdiv

MESSAGE_BYTES = 64 * 2**20  # limit on K and V per message; any further heads are sent later, so that buffers stay small


def not_compiled(function: Callable) -> Callable:
    """Wrap `function` so that torch.compile does not trace it.

    torch.compiler.disable is applied only while torch.compile is tracing, because applying it immediately would load
    torch's compiler, which takes seconds.
    """

    @wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        return (torch.compiler.disable(function) if compiling else function)(*arguments, **options)

    return wrapper


@not_compiled
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "zigzag",
    return_lse: bool = False,
    backend: str = "auto",
    timeout: float = 300.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return this rank's rows of softmax(scale · Q Kᵀ) V, for q (batch, heads, N, d) and k, v (batch, kv heads, N, d).

    mesh        A 1-D DeviceMesh, a ProcessGroup, or None for all ranks. All of these ranks must make the same call.
    layout      The layout that was passed to `shard`, either "zigzag" or "contiguous". Shards may have different
                lengths and may be empty, because the ranks exchange their lengths. In the zigzag layout, the front
                piece of a shard has ⌈N/2⌉ rows.
    return_lse  If True, return (O, L), where L (batch, heads, N) covers the keys of all ranks. Gradients flow through O
                and L.
    timeout     The number of seconds to wait for the other ranks before the transfers begin.

    causal, scale and backend are the same as in attention(). The ranks must agree on everything except N. If they do
    not, or if a rank rejects an argument, every rank raises an error once all of them have made the call. However, a
    rank whose `mesh` or `timeout` is invalid or differs from the others' cannot reach the other ranks, so they raise an
    error only after their full timeout. If gradients are needed, the backward pass must also run on every rank. If the
    loss on a rank does not depend on O, add 0 · O to that loss.

    Each partial O is rounded to q's dtype before it is merged in fp32, and the merged O is rounded once more.
    """
    group, timeout = process_group(mesh), check_timeout(timeout)
    with reporting_refusal(group, timeout):
        header = call_header(q, k, v, causal=causal, scale=scale, layout=layout, return_lse=return_lse, backend=backend)
    if dist.get_world_size(group) == 1:
        return attention(q, k, v, causal=causal, scale=scale, return_lse=return_lse, backend=backend)
    q, k, v = (x.resolve_neg() for x in (q, k, v))  # a transfer sends raw memory, so apply pending negations first
    if header["scale"] < 0:  # the kernels compute row maxima before scaling, so the scale must not be negative
        q = -q
    ring = RingCall(
        group=group,
        rank=dist.get_rank(group),
        lengths=(),  # not known yet
        layout=layout,
        causal=causal,
        scale=abs(header["scale"]),
        timeout=timeout,
        call_number=0,
        on_triton=runs_on_triton(backend, q.device.type),
        exclude_hopper=backend == "portable",
    )
    with torch.cuda.device(q.device if q.is_cuda else -1):
        O, L = RingAttention.apply(q, k, v, ring, header)
    return (O, L) if return_lse else O


def call_header(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, layout: str, return_lse: bool, backend: str
) -> dict:
    """Check the arguments as attention() does and return the header of the call.

    The header contains the shard's length and the arguments that must be the same on all ranks.
    """
    check_tensors(q, k, v)
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: got shape {tuple(k.shape)}; a shard has as many keys as queries, {q.shape[2]}")
    check_flags(causal=causal, return_lse=return_lse)
    scale = scale_or_default(scale, q.shape[3])
    shards.check_layout(layout)
    if runs_on_triton(backend, q.device.type):
        check_scale(scale)
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    shape = dict(batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], d=q.shape[3], length=q.shape[2])
    options = dict(causal=causal, scale=scale, layout=layout, gradients=needs_gradients)
    options |= dict(return_lse=return_lse, backend=backend)
    return dict(call="forward", dtype=str(q.dtype), device=q.device.type) | shape | options


# The ring -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RingCall:
    """One rank's call to ring_attention().

    `lengths` is empty and `call_number` is 0 until the ranks have compared their calls.
    """

    group: dist.ProcessGroup
    rank: int
    lengths: tuple[int, ...]  # number of rows on each rank
    layout: str
    causal: bool
    scale: float
    timeout: float
    call_number: int
    on_triton: bool
    exclude_hopper: bool = False

    @property
    def size(self) -> int:
        return len(self.lengths)

    def source(self, step: int) -> int:
        """Return the rank whose block of keys this rank holds in the given step."""
        return (self.rank - step) % self.size

    def visible_tile(self, source: int) -> ShardTile:
        return shards.visible_tile(self.lengths, self.rank, source, self.layout, self.causal)

    def pass_on(self, block: list[Tensor], what: str, source: int) -> "Transfer":
        """Start a transfer: send `block` to the rank on the right, and receive rank `source`'s block from the left.

        `what` names the tensors in the block, and counting() adds up the bytes under this name.
        """
        incoming = [x.new_empty((*x.shape[:2], self.lengths[source], x.shape[3])) for x in block]
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        plan = [(dist.isend, x, right) for x in block] + [(dist.irecv, x, left) for x in incoming]
        operations = [dist.P2POp(f, x, group=self.group, group_peer=peer) for f, x, peer in plan if x.numel()]
        for count in COUNTERS:
            count[what] += sum(x.numel() * x.element_size() for x in block)
        return Transfer(incoming, block, dist.batch_isend_irecv(operations) if operations else [])


@dataclass
class Transfer:
    """A running transfer. It keeps references to the tensors sent and received until wait() returns."""

    incoming: list[Tensor]
    outgoing: list[Tensor]
    pending: list

    def wait(self) -> list[Tensor]:
        """Wait for the transfer to finish and return the tensors received from the left.

        On a GPU, only the current stream waits, and the host does not.
        """
        for operation in self.pending:
            operation.wait()
        return self.incoming


COUNTERS: list[Counter] = []
Partial = tuple[slice, Tensor, Tensor]  # (rows, O, L), where O and L cover only some of the keys


@contextmanager
def counting() -> Iterator[Counter]:
    """Count the bytes that this rank sends inside the `with` block, and yield the counts as {"K V": …, "dK dV": …}."""
    COUNTERS.append(Counter())
    try:
        yield COUNTERS[-1]
    finally:
        COUNTERS.pop()


# Forward ------------------------------------------------------------------------------------------------------


def ring_steps(ring: RingCall, k: Tensor, v: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield (source, [K, V]) for the block of each rank `source`, starting with this rank's own block.

    The next block is transferred while the caller uses the current one.
    """
    kv = [k.contiguous(), v.contiguous()]
    for step in range(ring.size):
        transfer = ring.pass_on(kv, "K V", ring.source(step + 1)) if step + 1 < ring.size else None
        yield ring.source(step), kv
        if transfer:
            kv = transfer.wait()


def first_half(ring: RingCall, q: Tensor, k: Tensor, v: Tensor) -> Partial | None:
    """Return the partial result of the first half of the attention to this rank's own keys.

    This half needs no communication. It covers the first half of the queries or, with a causal mask, the first three
    quarters of them.
    """
    return partial_forward(ring, shards.halves(q.shape[2], ring.causal)[0], q, k, v)


def forward(ring: RingCall, q: Tensor, k: Tensor, v: Tensor, O: Tensor, L: Tensor, part: Partial | None) -> None:
    """Compute O and L of this rank's queries over the keys of all ranks, and write them to the arguments O and L.

    `part` is the result of first_half() for these heads. A partial result is merged only after the next transfer has
    started. The transfer needs some SMs, which it gets while a small kernel such as the merge runs between two large
    ones. If it started right before a kernel that fills all SMs, it would often have to wait for that kernel to end.
    """
    state: State | Any = None
    last_tile = shards.halves(q.shape[2], ring.causal)[1]
    for source, kv in ring_steps(ring, k, v):
        state = state or State(q, ring.on_triton)
        tile = last_tile if source == ring.rank else ring.visible_tile(source)
        if tile.kind is not Tile.SKIP:
            if part is not None:
                state.merge(*part)
            part = partial_forward(ring, tile, q, *kv)
    if part:  # a rank without rows has no partial result
        state.finalize(part, O, L)


def partial_forward(ring: RingCall, tile: ShardTile, q: Tensor, k: Tensor, v: Tensor) -> Partial | None:
    """Return (rows, O, L), the partial result for the queries and keys in `tile`, or None if `tile` is empty."""
    if tile.kind is Tile.SKIP:
        return None
    tensors = Tensors(q[:, :, tile.queries], k[:, :, tile.keys], v[:, :, tile.keys])
    return tile.queries, *operators.forward(tensors, options_of(ring, tile))


def options_of(ring: RingCall, tile: ShardTile) -> Options:
    """Return the Options of the kernel call for the queries and keys in `tile`."""
    reference, exclude_hopper = not ring.on_triton, ring.exclude_hopper
    return Options(tile.kind is Tile.DIAGONAL, ring.scale, exclude_hopper=exclude_hopper, reference=reference)


# Backward -----------------------------------------------------------------------------------------------------


def backward(
    ring: RingCall, dO: Tensor, dL: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, L: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dQ, dK, dV) for this rank's rows, in fp32.

    O and L cover the keys of all ranks, so P = exp(S − L) and D = rowsum(dO ∘ O) are exact for every rank's block.
    """
    blocks = ring_steps(ring, k, v)
    own, own_kv = next(blocks)
    dQ, *own_dkv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, *own_kv))
    part_of = partial(partial_backward, ring, dO, dL, q, O, L)
    first_tile, last_tile = shards.halves(ring.lengths[own], ring.causal)
    add_gradients(first_tile, part_of(first_tile, own_kv), dQ, *own_dkv)
    transfer: Transfer | Any = None
    for source, kv in blocks:
        tile = ring.visible_tile(source)
        part = part_of(tile, kv)  # these kernels run while the block's partial dK and dV are still in transit
        gradients = transfer.wait() if transfer else [torch.zeros_like(x, dtype=torch.float32) for x in kv]
        add_gradients(tile, part, dQ, *gradients)
        transfer = ring.pass_on(gradients, "dK dV", (source - 1) % ring.size)
    add_gradients(last_tile, part_of(last_tile, own_kv), dQ, *own_dkv)
    dK, dV = (own_part.add_(others_part) for own_part, others_part in zip(own_dkv, transfer.wait(), strict=True))
    return dQ, dK, dV


def partial_backward(
    ring: RingCall, dO: Tensor, dL: Tensor | None, q: Tensor, O: Tensor, L: Tensor, tile: ShardTile, kv: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return what the queries and keys in `tile` contribute to dQ, dK and dV, or None if `tile` is empty."""
    if tile.kind is Tile.SKIP:
        return None
    dO, q, O, L = (x[:, :, tile.queries] for x in (dO, q, O, L))
    dL = None if dL is None else dL[:, :, tile.queries]
    tensors = Tensors(q, *(x[:, :, tile.keys] for x in kv))
    dQ, dK, dV = operators.backward(dO, dL, O, L.contiguous(), tensors, options_of(ring, tile))
    return dQ, dK, dV


def add_gradients(
    tile: ShardTile, part: tuple[Tensor, Tensor, Tensor] | None, dQ: Tensor, dK: Tensor, dV: Tensor
) -> None:
    """Add `part` to this rank's dQ, and to the dK and dV of the block that this rank's queries attended to."""
    if part:
        for X, rows, more in zip((dQ, dK, dV), (tile.queries, tile.keys, tile.keys), part, strict=True):
            X[:, :, rows] += more


# The autograd function ----------------------------------------------------------------------------------------


class RingAttention(torch.autograd.Function):
    """The autograd function for ring attention.

    Work that needs data from other ranks begins only after the ranks have verified that their calls match.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingCall, header: dict) -> tuple[Tensor, Tensor]:
        exchange = Exchange(ring.group, header, ring.timeout)
        try:
            first_partial = first_half(ring, q, k, v)
        finally:  # complete the exchange even if a kernel has failed
            headers = exchange.agree()
        ring = replace(ring, lengths=tuple(h["length"] for h in headers), call_number=AGREEMENTS[ring.group])
        O, L = all_heads_forward(ring, q, k, v, first_partial)
        ctx.save_for_backward(q, k, v, O, L)
        ctx.set_materialize_grads(value=False)
        ctx.ring = ring
        return O, L

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor | None, dL: Tensor | None) -> tuple:
        Exchange(ctx.ring.group, dict(call=f"backward of call {ctx.ring.call_number}"), ctx.ring.timeout).agree()
        return *all_heads_backward(ctx.ring, dO, dL, *ctx.saved_tensors), None, None


def all_heads_forward(
    ring: RingCall, q: Tensor, k: Tensor, v: Tensor, first_partial: Partial | None
) -> tuple[Tensor, Tensor]:
    """Compute and return (O, L), a few heads at a time. `first_partial` is the result of first_half() for all heads."""
    O, L = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:3], dtype=torch.float32)
    for heads, kv_heads in head_chunks(ring, q, k):
        part = first_partial and (first_partial[0], first_partial[1][:, heads], first_partial[2][:, heads])
        forward(ring, q[:, heads], k[:, kv_heads], v[:, kv_heads], O[:, heads], L[:, heads], part)
    return O, L


def all_heads_backward(
    ring: RingCall, dO: Tensor | None, dL: Tensor | None, q: Tensor, k: Tensor, v: Tensor, O: Tensor, L: Tensor
) -> list[Tensor]:
    """Compute dQ, dK and dV, a few heads at a time, and return them in the dtype of q."""
    gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    dO = torch.zeros_like(O) if dO is None else dO
    for heads, kv_heads in head_chunks(ring, q, k):
        dO_, q_, O_, L_ = (x[:, heads] for x in (dO, q, O, L))
        dL_ = None if dL is None else dL[:, heads]
        parts = backward(ring, dO_, dL_, q_, k[:, kv_heads], v[:, kv_heads], O_, L_)
        for x, at, part in zip(gradients, (heads, kv_heads, kv_heads), parts, strict=True):
            x[:, at] = part
    return gradients


def head_chunks(ring: RingCall, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
    """Divide the heads into groups whose K and V fit into one message and return a list with a pair for each group.

    A pair is (slice of q's heads, slice of their K/V heads). The slices are the same on all ranks, because they depend
    only on the length of the longest shard, not on the length of this rank's shard.
    """
    batch, kv_heads, _, d = k.shape
    bytes_per_head = 2 * batch * max(ring.lengths) * d * k.element_size()
    count = cdiv(kv_heads, max(1, MESSAGE_BYTES // max(1, bytes_per_head)))
    group, ends = q.shape[1] // kv_heads, [kv_heads * n // count for n in range(count + 1)]
    return [(slice(a * group, b * group), slice(a, b)) for a, b in pairwise(ends)]
