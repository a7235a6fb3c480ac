"""Functions that split a tensor along its sequence dimension into one shard per rank and join the shards again."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fa2_lab.distributed.group import Exchange, check_timeout, process_group, reporting_refusal
from fa2_lab.reference import shards
from fa2_lab.tiles import whole_number


def shard(
    x: Tensor, mesh: DeviceMesh | dist.ProcessGroup | None = None, *, dim: int = 2, layout: str = "zigzag"
) -> Tensor:
    """Split x along `dim` and return this rank's shard. Gradients flow through the result.

    Every rank must pass the whole tensor x, so no data are sent between ranks. Shard everything that belongs to the
    sequence in the same way. For example, use dim=1 for token ids and targets, and shard(torch.arange(N), mesh, dim=0)
    for the positions of a rotary embedding.
    """
    group, dim = process_group(mesh), check_dim(x, dim)
    lengths = shards.even_lengths(x.shape[dim], dist.get_world_size(group))
    places = shards.pieces(lengths, layout)[dist.get_rank(group)]
    return torch.cat([x.narrow(dim, place.start, shards.row_count(place)) for place in places], dim)


@torch.no_grad()
def unshard(
    x: Tensor,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    dim: int = 2,
    layout: str = "zigzag",
    timeout: float = 300.0,
) -> Tensor:
    """Join the shards of all ranks and return the whole tensor on every rank. No gradient flows through the result.

    The shards may have different lengths. `timeout` is the number of seconds to wait for the other ranks. If a rank
    rejects an argument, the other ranks also raise an error, as in ring_attention().
    """
    group, timeout = process_group(mesh), check_timeout(timeout)
    with reporting_refusal(group, timeout):
        dim = check_dim(x, dim)
        shards.check_layout(layout)
    other_sizes = [n for at, n in enumerate(x.shape) if at != dim]
    header = dict(call="unshard", dtype=str(x.dtype), other_dimensions=other_sizes, dim=dim, layout=layout)
    headers = Exchange(group, header | dict(length=x.shape[dim]), timeout).agree()
    lengths = [h["length"] for h in headers]
    own_rows = x.new_zeros((max(lengths), *other_sizes))
    own_rows[: x.shape[dim]] = x.movedim(dim, 0)
    shards_of_all = [torch.empty_like(own_rows) for _ in lengths]
    dist.all_gather(shards_of_all, own_rows, group=group)
    return join_shards(shards_of_all, lengths, layout).movedim(0, dim).contiguous()


def check_dim(x: Tensor, dim: int) -> int:
    """Return `dim` as a nonnegative index. Raise an error unless x is a tensor with this dimension."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}; it takes a torch.Tensor")
    return whole_number("dim", dim, low=-x.dim(), high=x.dim() - 1) % x.dim()


def join_shards(parts: list[Tensor], lengths: list[int], layout: str) -> Tensor:
    """Return the sequence whose shards are `parts`, one per rank in rank order."""
    sequence = parts[0].new_empty((sum(lengths), *parts[0].shape[1:]))
    for part, places in zip(parts, shards.pieces(lengths, layout), strict=True):
        start = 0
        for place in places:
            sequence[place] = part[start : start + shards.row_count(place)]
            start += shards.row_count(place)
    return sequence
