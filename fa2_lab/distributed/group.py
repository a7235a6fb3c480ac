"""The ranks that take part in a call, and how they check that their calls match before any large transfer.

Before its transfers, every call exchanges a small header with every other rank. The header contains the name of the
call, its shapes, dtype and options, and the length of the shard. The headers are sent between the CPUs over a separate
gloo group, so the exchange does not wait for a GPU. The exchange takes 0.1 to 0.3 ms, during which the forward pass
already runs.

If a rank's call differs, or if a rank dies or never makes the call, every rank finds out within `timeout` seconds,
with two exceptions. First, with three or more ranks, a rank that calls just before the timeout may find that some ranks
have given up and others have not. Second, if a kernel fails while headers are in transit, the other ranks keep waiting
in the first transfer.

A rank that rejects an argument sends the error instead of its header. If the argument is `mesh` or `timeout`, however,
the rank cannot reach the others, and they treat it like a rank that never makes the call.

The ranks compare headers in every call, because a rank that relied on an earlier comparison might start a transfer that
no other rank answers. Once a rank knows that all calls match, its transfers use the timeout of the user's group.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from fa2_lab.tiles import real_number

HEADER_BYTES = 2048
PER_RANK_FIELDS = ("length",)  # header fields that may differ between ranks


class Disagreement(ValueError):
    """Raised if the ranks' calls do not match or if another rank has rejected its arguments."""


def process_group(mesh: DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group of `mesh`, which is a 1-D DeviceMesh, a ProcessGroup, or None for all ranks."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: start with torchrun and call init_process_group")
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(f"mesh: got a DeviceMesh of {mesh.ndim} dimensions; it takes one, as in mesh['context']")
        mesh = mesh.get_group()
    group = dist.group.WORLD if mesh is None else mesh
    if not isinstance(group, dist.ProcessGroup):
        takes = "a 1-D DeviceMesh, a ProcessGroup that this rank belongs to, or None"
        raise TypeError(
            f"mesh: got {'no member' if group is dist.GroupMember.NON_GROUP_MEMBER else mesh!r}; it takes {takes}"
        )
    return group


def check_timeout(timeout: float) -> float:
    """Return the timeout as a float. Raise an error unless it is a number of seconds above 0 and below a million."""
    return real_number("timeout", timeout, "seconds, a number above 0 and below a million", lambda s: 0 < s < 1e6)


# Agreement ----------------------------------------------------------------------------------------------------

GLOO_GROUPS: dict[tuple, dist.ProcessGroupGloo | None] = {}  # {(group, seconds): gloo group, or None if broken}
AGREEMENTS: dict[dist.ProcessGroup, int] = defaultdict(int)  # {group: number of matching calls so far}


class Exchange:
    """An exchange of headers between this rank and all other ranks, started by the constructor.

    The caller must always call wait() or agree(), even after an error. Otherwise, the next exchange would receive this
    exchange's headers.
    """

    def __init__(self, group: dist.ProcessGroup, header: dict, timeout: float) -> None:
        self.group, self.timeout = group, timeout
        rank, own_header = dist.get_rank(group), encode_header(header)
        self.headers = [torch.empty_like(own_header) for _ in range(dist.get_world_size(group))]
        self.headers[rank] = own_header
        peers = [other for other in range(len(self.headers)) if other != rank]
        check_no_rank_lost(group, timeout)
        with explaining_lost_ranks(group, timeout):
            gloo: Any = gloo_group(group, timeout)
            self.pending = [gloo.recv([self.headers[other]], other, tag=0) for other in peers]
            self.pending += [gloo.send([own_header], other, tag=0) for other in peers]

    def wait(self) -> list[dict]:
        """Wait until all headers have arrived and return them in rank order."""
        with explaining_lost_ranks(self.group, self.timeout):
            for message in self.pending:
                message.wait()
        return [json.loads(x.numpy().tobytes()) for x in self.headers]

    def agree(self) -> list[dict]:
        """Wait for the headers of all ranks and return them if they match.

        If they do not match, every rank raises a Disagreement.
        """
        headers = self.wait()
        refusals = [f"rank {rank}: {h['refused']}" for rank, h in enumerate(headers) if "refused" in h]
        if refusals:
            raise Disagreement(f"fa2_lab.distributed: refused on {'; '.join(refusals)}")
        for name in dict.fromkeys(name for h in headers for name in h if name not in PER_RANK_FIELDS):
            values = [h.get(name) for h in headers]
            if any(x != values[0] for x in values):
                raise Disagreement(f"fa2_lab.distributed: the ranks do not agree on {name}: {ranks_by_value(values)}")
        AGREEMENTS[self.group] += 1
        return headers


def ranks_by_value(values: Sequence) -> str:
    """Return text that lists which ranks have which value, such as "rank 0, 2: 'float16'; rank 1: 'float32'"."""
    distinct = [x for n, x in enumerate(values) if x not in values[:n]]
    return "; ".join(f"rank {', '.join(str(r) for r, y in enumerate(values) if y == x)}: {x!r}" for x in distinct)


def encode_header(header: dict) -> torch.Tensor:
    """Return a header encoded as a byte tensor of fixed length."""
    text = json.dumps(header).encode()
    if len(text) > HEADER_BYTES:
        text = json.dumps(dict(refused=str(header.get("refused"))[: HEADER_BYTES // 8])).encode()
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


@contextmanager
def reporting_refusal(group: dist.ProcessGroup, timeout: float) -> Iterator[None]:
    """If the `with` block raises an error, send the error to all ranks and raise it again.

    The block contains the checks of this rank's arguments.
    """
    try:
        yield
    except Exception as refusal:
        with suppress(RuntimeError):  # an error in the exchange must not hide this rank's own error
            Exchange(group, dict(refused=str(refusal)), timeout).wait()
        raise


@contextmanager
def explaining_lost_ranks(group: dist.ProcessGroup, timeout: float) -> Iterator[None]:
    """If gloo reports a timeout or a closed connection in the `with` block, raise an error that explains the cause.

    After such an error, the gloo group for `group` and `timeout` is no longer usable.
    """
    try:
        yield
    except RuntimeError as failure:
        GLOO_GROUPS[group, timeout] = None
        raise RuntimeError(
            f"fa2_lab.distributed: rank {dist.get_rank(group)} of {dist.get_world_size(group)} did not hear from all "
            f"others within {timeout:g} s: one of them has died, is late, or calls with another group or timeout"
        ) from failure


def gloo_group(group: dist.ProcessGroup, timeout: float) -> dist.ProcessGroupGloo:
    """Return the gloo group for the ranks of `group` and this timeout. The first such call creates the gloo group.

    Ranks outside `group` need not call this function.
    """
    if (group, timeout) not in GLOO_GROUPS:
        store = dist.PrefixStore(f"fa2_lab/{group.group_name}/{timeout}", _get_default_store())
        size, limit = dist.get_world_size(group), timedelta(seconds=timeout)
        GLOO_GROUPS[group, timeout] = dist.ProcessGroupGloo(store, dist.get_rank(group), size, limit)
    gloo = GLOO_GROUPS[group, timeout]
    assert gloo is not None, "check_no_rank_lost() comes first"
    return gloo


def check_no_rank_lost(group: dist.ProcessGroup, timeout: float) -> None:
    """Raise an error if a rank was lost in an earlier call on this group, because the gloo group is then unusable."""
    if GLOO_GROUPS.get((group, timeout), "not made yet") is None:
        raise RuntimeError(
            f"fa2_lab.distributed: rank {dist.get_rank(group)} of {dist.get_world_size(group)} has lost another rank "
            f"in an earlier call with this group and a timeout of {timeout:g} s, so the group can no longer be used"
        )
