# %% [markdown]
# # Assignment 5 · Break it, find it
#
# **Would your tests have found it?** Attention kernels with thousands of users have been wrong for some scale, length,
# mask or layout. Here you write the tests, and grading runs them on correct kernels and on kernels with one bug each.
# The bugs come from the errata of the papers and from public bug trackers.
#
# | step | points |
# | --- | --- |
# | 1. `forward`: your `test_forward` | 6 |
# | 2. `backward`: your `test_backward` | 6 |
#
# *Time: 4 to 5 hours. Before this: assignments 2 and 3, appendix B. Hardware: any laptop, NumPy alone.*
#
# **How it is graded.** Each step scores the share of bugs that your test catches, minus the share of correct kernels
# that it rejects. Three bugs of each kind are shown by name, and grading uses more. Your test may use any oracle that
# you trust, so write one or call `fa2_lab.reference`. The rest of `fa2_lab` and torch are off limits, and neither is
# available while your work is graded. Each kernel is tested twice, so a test that draws random numbers has to use a
# fixed seed. A step has 60 seconds for all of its kernels, of which there are about 20. If your test does not finish on
# a kernel within that time, the kernel counts as rejected if it is correct, and as not caught if it has a bug. `python
# -m checks` warns you if your test comes close to that limit.

# %% locked="setup"
import numpy as np

from checks import break_it as check

# %% [markdown]
# ## The kernel
#
# A kernel is an object with two functions:
#
# - `O, L = kernel.forward(q, k, v, causal=False, scale=None)`
# - `dq, dk, dv = kernel.backward(q, k, v, O, L, dO, causal=False, scale=None)`
#
# `q`, `O`, `dO` are `(heads, N_q, d)`, `k`, `v` are `(key heads, N_k, d)`, and `L` is `(heads, N_q)`. All of them are
# float64 NumPy arrays with any strides. The number of query heads is a multiple of the number of key heads, and query
# head `h` reads key head `h // (heads // key heads)`. If no scale is given, it is 1/√d, but 0 is a scale like any
# other. With the causal mask, row `r` sees column `c` if `c ≤ r + N_k − N_q`. `L` is the logsumexp, with the natural
# logarithm. A row that sees no key has `O` = 0 and `L` = −∞, and adds nothing to any gradient. Lengths are arbitrary,
# and the kernel works in tiles whose sizes you do not know. Scores may be large or very negative.
#
# A correct kernel may differ from the dense result by rounding errors of at most one part in a hundred thousand of the
# largest entry. A kernel is wrong if any call with an input that fits this description gives a wrong result.
# %% [markdown]
# ## An oracle
#
# What do you compare a kernel with? Both tests can use the oracle that you write here, which is not checked on its own.

# %% solution="oracle"
def oracle(q, k, v, causal, scale):
    """Return an O and an L that you trust."""
    ### BEGIN SOLUTION
    p, L = weights(q, k, causal, scale)
    return p @ np.repeat(v, len(q) // len(v), axis=0), L


def weights(q, k, causal, scale):
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    s = scale * q @ np.repeat(k, len(q) // len(k), axis=0).transpose(0, 2, 1)
    if causal:
        s[:, ~np.tri(q.shape[1], k.shape[1], k.shape[1] - q.shape[1], dtype=bool)] = -np.inf
    top = s.max(axis=2, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = e.sum(axis=2, keepdims=True)
    return e / np.where(total == 0, 1, total), (top + np.log(np.where(total == 0, 1, total)))[..., 0]


def tensors(heads, key_heads, N_q, N_k, seed, size=1.0, shift=0.0):
    draw = np.random.default_rng(seed).standard_normal
    q, k = size * draw((heads, N_q, 4)), size * draw((key_heads, N_k, 4))
    v = draw((key_heads, 4, N_k)).transpose(0, 2, 1)
    return q + shift, k - shift, v, draw((heads, 4, N_q)).transpose(0, 2, 1)

# %% [markdown]
# ## 1. Test the forward
#
# `test_forward(kernel)` raises an `AssertionError` if `kernel.forward` is wrong, and returns quietly if it is correct.

# %% solution="forward"
def test_forward(kernel):
    """Raise an AssertionError if kernel.forward is wrong."""
    ### BEGIN SOLUTION
    for number, (heads, key_heads, N_q, N_k, causal, scale, size, shift) in enumerate(SHAPES):
        q, k, v, _ = tensors(heads, key_heads, N_q, N_k, number, size, shift)
        O, L = kernel.forward(q, k, v, causal=causal, scale=scale)
        want_O, want_L = oracle(q, k, v, causal, scale)
        assert same(O, want_O), f"O of shape {number}"
        assert same(L, want_L), f"L of shape {number}"


SHAPES = [  # heads, key heads, N_q, N_k, causal, scale, size of q and k, added to q against k
    (2, 2, 19, 23, False, None, 1.0, 0.0),
    (4, 2, 17, 30, True, None, 1.0, 0.0),
    (6, 3, 21, 9, True, 0.3, 2.0, 0.0),
    (2, 1, 25, 25, True, 0.0, 1.0, 0.0),
    (1, 1, 33, 31, False, None, 40.0, 0.0),
    (1, 1, 16, 16, True, 1.0, 0.01, 350.0),
]


def same(got, want):
    return np.allclose(got, want, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(want[np.isfinite(want)]).max()))

# %% test="forward" points=6
report = check.forward(test_forward)
B = check.Bug
names = ["scale-zero", "L-base-2", "keys-padded", "hidden-1e4", "hidden-zero", "diagonal-unmasked", "maximum-missing"]
names += ["upside-down", "group-modulo", "sums-rounded", "o-not-rescaled", "tile-unvisited"]
more = [
    *map(B, names),
    B(told="an empty row has L = 0 (FlashAttention 978)", outputs=lambda O, L: (O, np.where(np.isneginf(L), 0, L))),
    B(told="an empty row is NaN (erratum fa1-empty-rows)", outputs=lambda O, L: (np.where(np.isneginf(L)[..., None], np.nan, O), L)),
    B(told="strides of v are ignored (FlashAttention 818)", inputs=lambda q, k, v, dO: (q, k, np.ravel(v, order="K").reshape(v.shape), dO)),
]
report = check.forward(test_forward, more)

# %% [markdown]
# ## 2. Test the backward
#
# `test_backward(kernel)` raises an `AssertionError` if `kernel.backward` is wrong. `kernel.forward` is correct here, so
# you can use its `O` and `L`. Central differences are an oracle that no formula can fool. For an entry x of `q`, `k` or
# `v`, take `(f(x + h) − f(x − h)) / 2h` with f = Σ dO ∘ O.

# %% solution="backward"
def test_backward(kernel):
    """Raise an AssertionError if kernel.backward is wrong."""
    ### BEGIN SOLUTION
    for number, (heads, key_heads, N_q, N_k, causal, scale, *_) in enumerate(SHAPES[:4]):
        q, k, v, dO = tensors(heads, key_heads, N_q, N_k, number)
        O, L = kernel.forward(q, k, v, causal=causal, scale=scale)
        want = gradients_of(q, k, v, dO, causal, scale)
        for call in range(2):
            got = kernel.backward(q, k, v, O, L, dO, causal=causal, scale=scale)
            for name, a, b in zip(("dq", "dk", "dv"), got, want):
                assert same(a, b), f"{name} of shape {number}, call {call}"


def gradients_of(q, k, v, dO, causal, scale):
    identity = np.tile(np.eye(k.shape[1]), (len(k), 1, 1))
    p, _ = oracle(q, k, identity, causal, scale)  # O = P if V is the identity
    group, tau = len(q) // len(k), 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    K, V = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
    dp = dO @ V.transpose(0, 2, 1)
    ds = p * (dp - (p * dp).sum(axis=2, keepdims=True))
    dk, dv = tau * ds.transpose(0, 2, 1) @ q, p.transpose(0, 2, 1) @ dO
    return tau * ds @ K, *(x.reshape(len(k), group, *x.shape[1:]).sum(axis=1) for x in (dk, dv))

# %% test="backward" points=6 given="oracle"
report = check.backward(test_backward)
B = check.Bug


class Stale:
    def __init__(self):
        self.kept = {}

    def __call__(self, dq, dk, dv):
        self.kept = self.kept | {dq.shape: dq + self.kept.get(dq.shape, 0)}
        return self.kept[dq.shape], dk, dv


more = [
    *map(B, ["dQ-set", "group-last", "group-mean", "gradient-corner", "dQ-unscaled", "D-of-O", "dKV-set"]),
    B(told="a row without keys has dQ = NaN (FlashAttention 443)", gradients=lambda dq, dk, dv: (np.where((dq == 0).all(axis=2, keepdims=True), np.nan, dq), dk, dv)),
    B(told="gradients of one call are added to the next (Triton 3004)", gradients=Stale()),
    B(told="dO is read as if contiguous (FlashAttention 355)", inputs=lambda q, k, v, dO: (q, k, v, np.ravel(dO, order="K").reshape(dO.shape))),
    B(told="all heads read dO of head 0 (a forgotten stride)", inputs=lambda q, k, v, dO: (q, k, v, np.broadcast_to(dO[:1], dO.shape))),
]
report = check.backward(test_backward, more)
