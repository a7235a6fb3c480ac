"""Compiles the Gluon rungs, and what stands beside the ladder, for sm_90 without a GPU; a line of JSON for each."""

import json

from fa2_lab.kernels import ladder
from fa2_lab.studio import steps
from fa2_lab.studio.xray import xray

if __name__ == "__main__":
    jobs = [(rung, dict(d=128)) for rung in ladder.RUNGS if "gluon" in steps.source(rung)]
    jobs += [(rung, dict(d=64, N=1024)) for rung in ladder.SIDE + ladder.BACKWARD]
    for rung, sizes in jobs:
        for kernel in xray(rung, "sm_90", causal=True, **sizes):
            print(json.dumps(dict(rung=rung) | kernel.numbers), flush=True)
