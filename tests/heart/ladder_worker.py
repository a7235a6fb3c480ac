"""Compile the Gluon rungs and the ladder's side kernels for sm_90 without a GPU, and print a line of JSON for each."""

import json

from fa2_lab.kernels import ladder
from fa2_lab.tools import rung_diff
from fa2_lab.tools.xray import worker  # xray() would start a process for each

JOB = dict(chip="sm_90", causal=True, dtype="bfloat16", launches=[{}])

if __name__ == "__main__":
    jobs = [(rung, dict(d=128, N=4096)) for rung in ladder.RUNGS if "gluon" in rung_diff.source(rung)]
    jobs += [(rung, dict(d=64, N=1024)) for rung in ladder.SIDE + ladder.BACKWARD + ladder.VARIANTS]
    for rung, sizes in jobs:
        for kernel in worker.main(dict(name=rung) | JOB | sizes)[0]:
            print(json.dumps(dict(rung=rung) | kernel["numbers"]), flush=True)
