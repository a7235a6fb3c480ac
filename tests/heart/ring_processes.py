"""Run ranks as processes with the backend gloo: launch(task, world) runs task(rank, world, *arguments) in each."""

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


def launch(task, world, *arguments, limit=50):
    """Run a task on all ranks, and return their results in order, with DIED for a rank that returned nothing."""
    context = multiprocessing.get_context(METHOD)
    if METHOD == "forkserver":
        context.set_forkserver_preload(["torch._dynamo", "fa2_lab.distributed"])
    answers, port, data = context.Queue(), free_port(), pickle.dumps(arguments)
    everybody = [context.Process(target=rank_main, args=(r, world, port, answers, task, data)) for r in range(world)]
    for process in everybody:
        process.start()
    found, end = [DIED] * world, time.monotonic() + limit
    while any(p.is_alive() for p in everybody) or not answers.empty():
        try:
            rank, value = answers.get(timeout=0.1)
            found[rank] = pickle.loads(value)
        except Empty:
            if time.monotonic() > end:
                [p.kill() for p in everybody]
                raise TimeoutError(f"{task.__name__}: some rank hung; answers so far: {found}") from None
    for process in everybody:
        process.join()
    return found


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_main(rank, world, port, answers, task, arguments):
    """Join as one rank, run the task, send its result, and exit without waiting for ranks that have died."""
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    answers.put((rank, pickle.dumps(task(rank, world, *pickle.loads(arguments)))))  # no handles that die with it
    answers.close()
    answers.join_thread()
    time.sleep(0.5 if rank == 0 else 0)  # rank 0 keeps the store for the others
    os._exit(0)


# Tasks ---------------------------------------------------------------------------------------------------------


def run(inputs, group, *, layout=None, backend="reference", **options):
    """Return (O, L, dQ, dK, dV) of whole tensors, which are sharded, sent through the ring and joined again."""
    cut = dict(layout=layout) if layout else {}  # else all three functions use their own default
    q, k, v, dO, dL = (shard(x, group, **cut) for x in inputs)
    mine = [x.detach().requires_grad_() for x in (q, k, v)]
    O, L = ring_attention(*mine, group, return_lse=True, backend=backend, timeout=20.0, **cut, **options)
    gradients = torch.autograd.grad((O, L), mine, (dO, dL))
    return [unshard(x, group, timeout=20.0, **cut) for x in (O, L, *gradients)]


def all_cases(rank, world, cases):
    """Run each case on the first `size` ranks, and return {name: results on this rank, or the text of an error}."""
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    found = {}
    for name, (size, inputs, options) in cases.items():
        if rank < size:
            try:
                with counting() as sent, counting():  # one within the other
                    found[name] = dict(results=run(inputs, groups[size], **options), sent=sent)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


def meshes(rank, world, inputs):
    """Return results from a mesh of all ranks and from each row of a 2 × 2 mesh, a refusal, and joined uneven parts."""
    from torch.distributed.device_mesh import init_device_mesh

    line = init_device_mesh("cpu", (world,), mesh_dim_names=("context",))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "context"))
    try:
        ring_attention(*inputs[:3], square)
    except ValueError as error:
        refused = str(error)
    uneven = unshard(torch.full((3, 2 + rank), rank), line, dim=-1, layout="contiguous")
    return run(inputs, line, causal=True), run(inputs, square["context"], causal=True), refused, uneven


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


def small_call(group=None, timeout=20.0, rows=6, **changes):
    """Run a small call with some arguments changed."""
    c = DEFAULT_INPUTS | DEFAULT_OPTIONS | changes
    draw = [torch.randn(c["batch"], h, rows, c["d"]).to(c["dtype"]) for h in (c["heads"], c["kv_heads"], c["kv_heads"])]
    q, k, v = (x.requires_grad_(c["grad"]) for x in draw)
    return ring_attention(q, k, v, group, timeout=timeout, **{name: c[name] for name in DEFAULT_OPTIONS})


def outcome_of(attempt):
    """Return (type, message, seconds) of the error that `attempt` raises, or ("nothing", result, seconds)."""
    start = time.monotonic()
    try:
        value = attempt()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", str(value), time.monotonic() - start


def record_actions():
    """Return a list to which this rank from now on appends what it does.

    "kernel" is a computation, "wait" a wait for headers, "start …" the begin of a transfer, and "arrive" its end.
    """
    seen = []

    def watch(owner, name, what):
        real = getattr(owner, name)

        def watching(*arguments):
            seen.append(what.format(*arguments))
            return real(*arguments)

        setattr(owner, name, watching)

    watch(ring, "partial_forward", "kernel")
    watch(ring, "partial_backward", "kernel")
    watch(ring.Exchange, "wait", "wait")
    watch(ring.RingCall, "pass_on", "start {2}")
    watch(ring.Transfer, "wait", "arrive")
    return seen


def disagreements(rank, world):
    """Return what this rank raises for each fault of rank 1, and what it did until then.

    The last tasks are a backward pass of another call on rank 1, a kernel that fails on all ranks, and two calls
    without a fault, which have to work.
    """
    seen, did = record_actions(), {}
    tasks = {name: lambda c=change: small_call(**(c if rank == 1 else {})) for name, (change, _) in FAULTS.items()}
    tasks["unshard"] = lambda: unshard(torch.zeros(1, 2, 3 + rank, 4 + (rank == 1)), timeout=20.0)
    tasks["joined otherwise"] = lambda: unshard(torch.zeros(1, 2, 3), layout=("zigzag", "contiguous")[rank == 1])
    tasks["as doubles"] = lambda: unshard(torch.zeros(1, 2, 3).to((torch.float32, torch.float64)[rank == 1]))
    tasks["bad dim"] = lambda: unshard(torch.zeros(1, 2, 3), dim=(2, 3)[rank == 1], timeout=20.0)
    tasks["no tensor"] = lambda: unshard((torch.zeros(1, 2, 3), None)[rank == 1], timeout=20.0)
    tasks["bad layout"] = lambda: unshard(torch.zeros(1, 2, 3), layout=("zigzag", "ring")[rank == 1], timeout=20.0)
    tasks["backward"] = lambda: [small_call(grad=True), small_call(grad=True)][rank == 1].sum().backward()
    tasks["kernel"] = kernel_fails
    tasks["afterwards"] = lambda: tuple(small_call(rows=5 + rank).shape)
    tasks["and back"] = lambda: small_call(rows=5 + rank, grad=True).sum().backward()
    found = {}
    for name, task in tasks.items():
        seen.clear()
        found[name], did[name] = outcome_of(task), seen.copy()
    return found | dict(did=did)


def kernel_fails():
    """Run a call whose first kernel fails on every rank."""
    kept, ring.partial_forward = ring.partial_forward, lambda *_: 1 / 0
    try:
        small_call(rows=9)
    finally:
        ring.partial_forward = kept


def dies_before(rank, world):
    small_call()
    if rank == 2:
        os._exit(1)
    return outcome_of(lambda: small_call(timeout=3.0))


def dies_before_first(rank, world):
    store = dist.distributed_c10d._get_default_store()
    store.add("joined", 1)
    if rank == 2:
        while store.add("joined", 0) < world:  # a rank that is still joining would not reach the call
            time.sleep(0.01)
        os._exit(1)
    return outcome_of(lambda: small_call(timeout=3.0))


def dies_between(rank, world):
    O = small_call(grad=True)
    if rank == 2:
        os._exit(1)
    return outcome_of(lambda: O.sum().backward())


def dies_within(rank, world):
    if rank == 2:
        ring.RingCall.pass_on = lambda *_: os._exit(1)
    return outcome_of(small_call)


def skips_backward(rank, world):
    O = small_call(grad=True, timeout=3.0)
    if rank == 2:
        time.sleep(6)
        return None
    return outcome_of(lambda: O.sum().backward())


def never_comes(rank, world):
    if rank == 2:
        time.sleep(6)
        return None
    return outcome_of(lambda: small_call(timeout=3.0)), outcome_of(lambda: small_call(timeout=3.0))


def another_group(rank, world):
    some = dist.new_group([1, 2])
    return outcome_of(lambda: small_call(some if rank == 2 else None, timeout=3.0))
