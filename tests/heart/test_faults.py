"""Planted faults: the checks of the ladder must fail for each of them, or they prove nothing."""

import contextlib
import functools
import importlib
import importlib.machinery
import sys
import warnings

import pytest
from ladder_checks import CORNERS, check_heads, check_merge, check_meter, check_one_head, check_tiles

FAULTS = [  # (module, right, wrong)
    ("reference.online_softmax", "alpha * self.l + p.sum", "self.l + p.sum"),
    ("reference.online_softmax", "alpha[:, None] * self.o + dropped", "self.o + dropped"),
    (
        "reference.online_softmax",
        "alpha = np.exp(self.m - finite(m))  #",
        "alpha = np.exp(finite(m) - finite(self.m))  #",
    ),
    ("reference.online_softmax", "alpha[:, None] * self.o + beta[:, None]", "beta[:, None] * self.o + alpha[:, None]"),
    ("reference.online_softmax", "np.where(np.isneginf(m), 0.0, m)", "m"),
    ("reference.online_softmax", "np.where(l == 0, 1.0, l)", "l"),
    ("reference.online_softmax", "L = self.m + np.log(l)", "L = self.m + l"),
    ("tiles", "bottom[1]) <= max(", "bottom[1]) < max("),
    ("tiles", "max(cols.start, top[0])", "max(cols.start, bottom[0])"),
    ("tiles", "cols.stop <= top[1]", "cols.stop <= bottom[1]"),
    ("tiles", "bottom[0] <= cols.start", "top[0] <= cols.start"),
    ("tiles", "row + N_k - N_q", "row"),
    ("tiles", "diagonal - left", "diagonal - left + 1"),
    ("tiles", "diagonal + right + 1", "diagonal + right"),
    ("tiles", "cdiv(last, self.B_c)", "last // self.B_c"),
    ("reference.fa1", "(r * alpha * l_i)[:, None]", "(r * l_i)[:, None]"),
    ("reference.fa1", "dp_ij = dropped(dp_dropped, z_ij)", "dp_ij = dp_dropped"),
    ("reference.fa1", "dQ[rows] = dq_i + tau *", "dQ[rows] = tau *"),
    ("reference.fa2", "(dO[:] * O[:]).sum(axis=1)", "(dO[:] * O[:])[:, 0]"),
    ("reference.fa2", "p_dropped.T @ do_i", "p_ij.T @ do_i"),
    ("reference.fa2", "dk_j + tau * (ds_ij.T @ q_i)", "dk_j + (ds_ij.T @ q_i)"),
    ("tiles", "if self.kind(i, j) is Tile.FULL else", "if self.kind(i, j) is not Tile.SKIP else"),
    ("reference.fa1", "np.exp(s_ij - finite(m_ij)[:, None])", "np.exp(s_ij - finite(m_new)[:, None])"),
    ("reference.fa1", "alpha * l_i + beta * l_ij", "alpha * l_i + l_ij"),
    ("reference.fa1", "np.where(l_new == 0, 1, l_new)", "l_new"),
    ("reference.fa2", "np.exp(s_ij - finite(m_new)[:, None])", "np.exp(s_ij - finite(m_ij)[:, None])"),
    ("reference.fa2", "alpha * l_i + l_ij", "l_i + l_ij"),
    ("reference.fa2", "alpha[:, None] * o_i + p_ij @ v_j", "o_i + p_ij @ v_j"),
    ("reference.fa2", "p_ij = drop(p_ij, rows, cols)", "pass"),
    ("reference.fa2", "np.where(l_i == 0, 1, l_i)", "l_i"),
    ("reference.naive", "P * (dP - D_from", "(dP - D_from"),
    ("reference.dropout", ") / (1 - self.p)", ") / 1.0"),
    ("reference.fa2", "q_i, do_i, L_i, D_i = Q[rows], dO[rows]", "_, q_i, do_i, L_i, D_i = O[rows], Q[rows], dO[rows]"),
    ("reference.fa1", "l[rows], m[rows] = l_i, m_i", "l[rows], m[rows] = l_i, m_i + 0 * l[rows]"),
    ("trace", "2 * np.size(result) * inputs[0].shape[-1]", "2 * np.size(result) * inputs[0].shape[0]"),
    ("trace", "np.size(inputs[0]) - np.size(result)", "np.size(inputs[0])"),
    ("machine.io", "- first * tiling.B_c", ""),
    ("reference.scores", "(1 - (finite(s) / softcap) ** 2)", "1.0"),
    ("reference.scores", "ds * (1 - (finite(s)", "ds * (1 - (s"),
    ("reference.scores", "softcap * np.tanh(s / softcap)", "np.tanh(s / softcap)"),
    ("reference.scores", "-(np.exp(sink", "(np.exp(sink"),
    ("reference.scores", "np.concatenate([s, np.full((*s.shape[:-1], 1), sink)], axis=-1)", "s"),
    ("reference.online_softmax", "(float(sink), 1.0)", "(float(sink), 0.0)"),
    ("reference.fa1", "O[:], l[:], m[:] = 0, l_0, m_0", "O[:], l[:], m[:] = 0, 0, m_0"),
    ("reference.fa1", "ds_ij = cap_backward(ds_ij, s_ij, softcap)", "pass"),
    ("reference.fa2", "ds_ij = cap_backward(ds_ij, s_ij, softcap)", "pass"),
    ("reference.fa2", "Q.shape[1], sink)  # once", "Q.shape[1])  # once"),
    ("reference.fa2", "SoftmaxState.reset(*q_i.shape)", "SoftmaxState.reset(*q_i.shape, sink)"),
    ("reference.fa2", "cap(tau * (q_i @ K[cols].T), softcap)", "tau * (q_i @ K[cols].T)"),
    ("reference.naive", "if softcap is not None:", "if False:"),
    ("reference.heads", "sink=sinks[h]", "sink=sinks[0]"),
    ("reference.heads", "k[b, h // group], v[b, h // group]", "k[b, h % k.shape[1]], v[b, h // group]"),
    ("reference.heads", "dK[b, h // group] += dk", "dK[b, h // group] = dk"),
    ("reference.heads", "Dropout(dropout_p, seed, b, h)", "Dropout(dropout_p, seed, b, h // group)"),
]


@functools.cache
def compiled(source: str, path: str):
    """What has no fault is compiled once."""
    return compile(source, path, "exec", dont_inherit=True)


@contextlib.contextmanager
def package_with(module: str | None, right: str = "", wrong: str = ""):
    """The package freshly imported, with one line of one module changed; the old one is put back at the end."""

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname):
            source = self.get_data(self.path).decode()
            if fullname == f"fa2_lab.{module}":
                if right not in source:
                    raise LookupError(f"{module} has no {right!r} any more: plant the fault elsewhere")
                source = source.replace(right, wrong)
            return compiled(source, self.path)

    class Finder(importlib.machinery.PathFinder):
        @classmethod
        def find_spec(cls, fullname, path=None, target=None):
            spec = super().find_spec(fullname, path, target) if fullname.split(".")[0] == "fa2_lab" else None
            if spec is not None:
                spec.loader = Loader(fullname, spec.origin)
            return spec

    kept = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "fa2_lab"}
    for name in kept:
        del sys.modules[name]
    sys.meta_path.insert(0, Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(Finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "fa2_lab"]:
            del sys.modules[name]
        sys.modules.update(kept)


def run_all_checks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in CORNERS:
            check_tiles(case)
            check_one_head(case)
            check_meter(case)
        check_heads(4, 2, "fa2", causal=True, p=0.3, lengths=[10, 7], window=(3, 0), softcap=2.0, with_sinks=True)
        check_merge()


def test_the_package_as_it_is_passes():
    with package_with(None):
        run_all_checks()


@pytest.mark.parametrize(("module", "right", "wrong"), FAULTS, ids=[f"{m}: {w}" for m, _, w in FAULTS])
def test_a_planted_fault_is_caught(module, right, wrong):
    with package_with(module, right, wrong), pytest.raises((AssertionError, RuntimeWarning)):
        run_all_checks()
