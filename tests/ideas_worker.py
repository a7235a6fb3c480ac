"""Compiles a few edited kernels for sm_90 without a GPU; prints a line of JSON for each."""

import json

import torch
from compiling import Compiling

FEW = (
    "one release for a tile of V and the next of K",
    "dQ under the next S, not in its own step",
    "teams that read a head's tiles in turn",
)
NAMES = dict(
    forward=["forward_kernel"],
    backward=["backward_kernel", "before_kernel", "after_kernel"],
    decode=["share_kernel", "team_kernel", "merge_kernel"],
)


def compile_one(idea) -> dict:
    """One call of an idea's variant as far as the launch, on the first of its problems."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from fa2_lab.studio import offline
    from fa2_lab.studio.bench.variants import variant
    from fa2_lab.studio.bench.worth import call

    driver.set_active(offline.Absent(GPUTarget("cuda", 90, 32)))
    kernels, problem = variant(idea), idea.problems[0]
    kernels.host.multiprocessors = lambda device: 132
    kernels.host.fits = lambda *kind: True
    kernels.decode.early = lambda device: True
    kernels.host.counter_of = kernels.backward.counter_of = lambda device, stream: torch.zeros(2, dtype=torch.int32)
    room = getattr(kernels, idea.part)
    for name in NAMES[idea.part]:
        setattr(room, name, Compiling(getattr(room, name)))
    Q = torch.empty(problem.batch, problem.heads, problem.N_q, problem.d, dtype=torch.bfloat16)
    K = torch.empty(problem.batch, problem.kv_heads, problem.N_k, problem.d, dtype=torch.bfloat16)
    inputs = (Q, K, K, Q, Q, Q[..., 0].float()) if idea.part == "backward" else (Q, K, K)
    call(kernels, problem, idea.part, inputs)()
    first = next(made for name in NAMES[idea.part] if (made := getattr(room, name).made))
    return dict(idea=idea.name, part=idea.part) | offline.report(first)


if __name__ == "__main__":
    from fa2_lab.studio.bench.ideas import IDEAS

    for idea in IDEAS:
        if idea.name in FEW:
            print(json.dumps(compile_one(idea)), flush=True)
