"""Run ranks as processes with the backend gloo: run_ranks(task, world) runs task(rank, world, *arguments) in each."""

import multiprocessing
import os
import pickle
import socket
import sys
import time
from datetime import timedelta
from queue import Empty

import torch
import torch.distributed as dist

from fa2_lab.distributed import counting, ring, ring_attention, shard, unshard

DIED = "died"
METHOD = "forkserver" if sys.platform == "linux" else "spawn"


def run_ranks(task, world, *arguments, limit=50):
    """Run a task on all ranks, and return their results in order, with DIED for a rank that returned nothing."""
    context = multiprocessing.get_context(METHOD)
    if METHOD == "forkserver":
        context.set_forkserver_preload(["torch._dynamo", "fa2_lab.distributed"])
    queue, port, data = context.Queue(), free_port(), pickle.dumps(arguments)
    processes = [context.Process(target=main_of_rank, args=(r, world, port, queue, task, data)) for r in range(world)]
    for process in processes:
        process.start()
    results, end = [DIED] * world, time.monotonic() + limit
    while any(p.is_alive() for p in processes) or not queue.empty():
        try:
            rank, value = queue.get(timeout=0.1)
            results[rank] = pickle.loads(value)
        except Empty:
            if time.monotonic() > end:
                [p.kill() for p in processes]
                raise TimeoutError(f"{task.__name__}: some rank hung; answers so far: {results}") from None
    for process in processes:
        process.join()
    return results


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main_of_rank(rank, world, port, queue, task, arguments):
    """Join as one rank, run the task, send its result, and exit without waiting for ranks that have died."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    queue.put((rank, pickle.dumps(task(rank, world, *pickle.loads(arguments)))))  # no handles that die with it
    queue.close()
    queue.join_thread()
    time.sleep(0.5 if rank == 0 else 0)  # rank 0 keeps the store for the others
    os._exit(0)


# Tasks ---------------------------------------------------------------------------------------------------------


def run_ring(inputs, group, *, layout=None, backend="reference", **options):
    """Return (O, L, dQ, dK, dV) of whole tensors, which are sharded, sent through the ring and joined again."""
    layout_option = dict(layout=layout) if layout else {}  # else all three functions use their own default
    q, k, v, dO, dL = (shard(x, group, **layout_option) for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    O, L = ring_attention(*leaves, group, return_lse=True, backend=backend, timeout=20.0, **layout_option, **options)
    gradients = torch.autograd.grad((O, L), leaves, (dO, dL))
    return [unshard(x, group, timeout=20.0, **layout_option) for x in (O, L, *gradients)]


def run_cases(rank, world, cases):
    """Run each case on the first `size` ranks, and return {name: results on this rank, or the text of an error}."""
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    results = {}
    for name, (size, inputs, options) in cases.items():
        if rank < size:
            try:
                with counting() as sent, counting():  # one within the other
                    results[name] = dict(results=run_ring(inputs, groups[size], **options), sent=sent)
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"
    return results


def run_on_meshes(rank, world, inputs):
    """Return results from a mesh of all ranks and from each row of a 2 × 2 mesh, a refusal, and joined uneven parts."""
    from torch.distributed.device_mesh import init_device_mesh

    line = init_device_mesh("cpu", (world,), mesh_dim_names=("context",))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "context"))
    try:
        ring_attention(*inputs[:3], square)
    except ValueError as error:
        refused = str(error)
    uneven = unshard(torch.full((3, 2 + rank), rank), line, dim=-1, layout="contiguous")
    return run_ring(inputs, line, causal=True), run_ring(inputs, square["context"], causal=True), refused, uneven


FAULTS = {  # the fault: (changed arguments of rank 1, text of the error that every rank has to raise)
    "dtype": (dict(dtype=torch.float16), "do not agree on dtype: rank 0, 2: 'torch.float32'; rank 1: 'torch.float16'"),
    "heads": (dict(heads=2), "do not agree on heads"),
    "kv heads": (dict(kv_heads=4), "do not agree on kv_heads"),
    "batch": (dict(batch=3), "do not agree on batch"),
    "d": (dict(d=4), "do not agree on d"),
    "causal": (dict(causal=True), "do not agree on causal"),
    "scale": (dict(scale=0.5), "do not agree on scale"),
    "layout": (dict(layout="contiguous"), "do not agree on layout"),
    "gradient": (dict(grad=True), "do not agree on gradients"),
    "backend": (dict(backend="auto"), "do not agree on backend: rank 0, 2: 'reference'; rank 1: 'auto'"),
    "return_lse": (dict(return_lse=True), "do not agree on return_lse"),
    "refused": (dict(kv_heads=3), "k: got 3 heads; with 4 heads of q it takes a number that divides 4"),
}
DEFAULT_INPUTS = dict(batch=1, heads=4, kv_heads=2, d=8, dtype=torch.float32, grad=False)
DEFAULT_OPTIONS = dict(causal=False, scale=None, layout="zigzag", return_lse=False, backend="reference")


def call_ring(group=None, timeout=20.0, rows=6, **changes):
    """Run a small call with some arguments changed."""
    given = DEFAULT_INPUTS | DEFAULT_OPTIONS | changes
    heads, options = [given[name] for name in ("heads", "kv_heads", "kv_heads")], {n: given[n] for n in DEFAULT_OPTIONS}
    q, k, v = (torch.randn(given["batch"], h, rows, given["d"]).to(given["dtype"]) for h in heads)
    return ring_attention(*(x.requires_grad_(given["grad"]) for x in (q, k, v)), group, timeout=timeout, **options)


def error_and_seconds(call):
    """Return (type, message, seconds) of the error that `attempt` raises, or ("nothing", result, seconds)."""
    start = time.monotonic()
    try:
        value = call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", str(value), time.monotonic() - start


def recorded_actions():
    """Return a list to which this rank from now on appends what it does.

    "kernel" is a computation, "wait" a wait for headers, "start …" the begin of a transfer, and "arrive" its end.
    """
    actions = []

    def watch(owner, name, action):
        real = getattr(owner, name)

        def watching(*arguments):
            actions.append(action.format(*arguments))
            return real(*arguments)

        setattr(owner, name, watching)

    watch(ring, "partial_forward", "kernel")
    watch(ring, "partial_backward", "kernel")
    watch(ring.Exchange, "wait", "wait")
    watch(ring.RingCall, "pass_on", "start {2}")
    watch(ring.Transfer, "wait", "arrive")
    return actions


def run_disagreements(rank, world):
    """Return what this rank raises for each fault of rank 1, and what it did until then.

    The last tasks are a backward pass of another call on rank 1, a kernel that fails on all ranks, and two calls
    without a fault, which have to work.
    """
    actions, actions_of = recorded_actions(), {}
    tasks = {name: lambda c=change: call_ring(**(c if rank == 1 else {})) for name, (change, _) in FAULTS.items()}
    tasks["unshard"] = lambda: unshard(torch.zeros(1, 2, 3 + rank, 4 + (rank == 1)), timeout=20.0)
    tasks["joined otherwise"] = lambda: unshard(torch.zeros(1, 2, 3), layout=("zigzag", "contiguous")[rank == 1])
    tasks["as doubles"] = lambda: unshard(torch.zeros(1, 2, 3).to((torch.float32, torch.float64)[rank == 1]))
    tasks["bad dim"] = lambda: unshard(torch.zeros(1, 2, 3), dim=(2, 3)[rank == 1], timeout=20.0)
    tasks["no tensor"] = lambda: unshard((torch.zeros(1, 2, 3), None)[rank == 1], timeout=20.0)
    tasks["bad layout"] = lambda: unshard(torch.zeros(1, 2, 3), layout=("zigzag", "ring")[rank == 1], timeout=20.0)
    tasks["backward"] = lambda: [call_ring(grad=True), call_ring(grad=True)][rank == 1].sum().backward()
    tasks["kernel"] = fail_kernel
    tasks["afterwards"] = lambda: tuple(call_ring(rows=5 + rank).shape)
    tasks["and back"] = lambda: call_ring(rows=5 + rank, grad=True).sum().backward()
    outcomes = {}
    for name, task in tasks.items():
        actions.clear()
        outcomes[name], actions_of[name] = error_and_seconds(task), actions.copy()
    return outcomes | dict(actions=actions_of)


def fail_kernel():
    """Run a call whose first kernel fails on every rank."""
    kept, ring.partial_forward = ring.partial_forward, lambda *_: 1 / 0
    try:
        call_ring(rows=9)
    finally:
        ring.partial_forward = kept


def dies_before(rank, world):
    call_ring()
    if rank == 2:
        os._exit(1)
    return error_and_seconds(lambda: call_ring(timeout=3.0))


def dies_before_first(rank, world):
    store = dist.distributed_c10d._get_default_store()
    store.add("joined", 1)
    if rank == 2:
        while store.add("joined", 0) < world:  # a rank that is still joining would not reach the call
            time.sleep(0.01)
        os._exit(1)
    return error_and_seconds(lambda: call_ring(timeout=3.0))


def dies_between(rank, world):
    O = call_ring(grad=True)
    if rank == 2:
        os._exit(1)
    return error_and_seconds(lambda: O.sum().backward())


def dies_within(rank, world):
    if rank == 2:
        ring.RingCall.pass_on = lambda *_: os._exit(1)
    return error_and_seconds(call_ring)


def skips_backward(rank, world):
    O = call_ring(grad=True, timeout=3.0)
    if rank == 2:
        time.sleep(6)
        return None
    return error_and_seconds(lambda: O.sum().backward())


def skips_calls(rank, world):
    if rank == 2:
        time.sleep(6)
        return None
    return error_and_seconds(lambda: call_ring(timeout=3.0)), error_and_seconds(lambda: call_ring(timeout=3.0))


def another_group(rank, world):
    group = dist.new_group([1, 2])
    return error_and_seconds(lambda: call_ring(group if rank == 2 else None, timeout=3.0))
