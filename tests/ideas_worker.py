"""Compiles a few edited Hopper kernels for sm_90 without a GPU; prints a line of JSON for each."""

import json

import torch
from compiling import Compiling

FEW = ("one release for a tile of V and the next of K", "dQ under the next S, not in its own step")


def compile_one(idea) -> dict:
    """One call of an idea's variant as far as the launch, on the first of its problems."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from fa2_lab.bench.variants import variant
    from fa2_lab.bench.worth import call
    from fa2_lab.kernels import offline

    driver.set_active(offline.Absent(GPUTarget("cuda", 90, 32)))
    kernels, problem = variant(idea), idea.problems[0]
    kernels.host.multiprocessors = lambda device: 132
    kernels.host.fits = lambda *kind: True
    kernels.host.counter_of = kernels.backward.counter_of = lambda device, stream: torch.zeros(2, dtype=torch.int32)
    names = ("before_kernel", "backward_kernel", "after_kernel") if idea.part == "backward" else ("forward_kernel",)
    room = getattr(kernels, idea.part)
    for name in names:
        setattr(room, name, Compiling(getattr(room, name)))
    Q = torch.empty(problem.batch, problem.heads, problem.N_q, problem.d, dtype=torch.bfloat16)
    inputs = (Q, Q, Q, Q, Q, Q[..., 0].float()) if idea.part == "backward" else (Q, Q, Q)
    call(kernels, problem, idea.part, inputs)()
    return dict(idea=idea.name, part=idea.part) | offline.report(getattr(room, f"{idea.part}_kernel").made)


if __name__ == "__main__":
    from fa2_lab.bench.ideas import IDEAS

    for idea in IDEAS:
        if idea.name in FEW:
            print(json.dumps(compile_one(idea)), flush=True)
