import numpy as np

from fa2_lab.machine.asynchrony import Barrier, ThreadBlock


def pipeline(Q, K, V, causal, consumers, stages, copy, scores, softmax, values):
    """O and the clocks it took: a producer copies tiles, consumers share the rows."""
    block, B_c = ThreadBlock(), 4
    tiles, B_r, shift = len(K) // B_c, len(Q) // consumers, len(K) - len(Q)
    ring = [(np.full((B_c, Q.shape[1]), np.nan),) * 2 for _ in range(stages)]
    filled = [Barrier(f"stage {s} filled", 1) for s in range(stages)]
    emptied = [Barrier(f"stage {s} emptied", consumers) for s in range(stages)]
    O = np.full(Q.shape, np.nan)

    def producer():
        for n in range(tiles):
            stage, phase = n % stages, n // stages & 1
            yield emptied[stage].over(phase ^ 1)
            block.start("copy", copy, f"tile {n}", lambda n=n, at=stage: arrive(n, at))

    def arrive(n, stage):
        ring[stage] = K[n * B_c : (n + 1) * B_c], V[n * B_c : (n + 1) * B_c]
        filled[stage].arrive("copy engine")

    def consumer(c):
        row = c * B_r + np.arange(B_r)
        o, l, m = np.zeros((B_r, Q.shape[1])), np.zeros(B_r), np.full(B_r, -1e30)
        for n in range(tiles):
            stage, phase, col = n % stages, n // stages & 1, n * B_c + np.arange(B_c)
            yield filled[stage].over(phase)
            if causal and col[0] > row[-1] + shift:
                emptied[stage].arrive(block.actor)
                continue
            qk = block.start("tensor", scores, f"Q Kᵀ {n}",
                             lambda stage=stage: Q[row] @ ring[stage][0].T)
            yield qk.done()
            s = np.where(causal & (col > row[:, None] + shift), -np.inf, qk.result)
            m_new = np.maximum(m, s.max(axis=1))
            p, alpha = np.exp(s - m_new[:, None]), np.exp(m - m_new)
            yield block.start("exp", softmax, f"softmax {n}").done()
            pv = block.start("tensor", values, f"P V {n}",
                             lambda stage=stage, p=p: p @ ring[stage][1])
            yield pv.done()
            emptied[stage].arrive(block.actor)
            o, l, m = alpha[:, None] * o + pv.result, alpha * l + p.sum(axis=1), m_new
        O[row] = o / l[:, None]

    consuming = {f"consumer {c}": consumer(c) for c in range(consumers)}
    block.run({"producer": producer()} | consuming)
    return O, block.clock
