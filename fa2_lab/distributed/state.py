"""SoftmaxState of the NumPy ladder on tensors in fp32, changed in place."""

from __future__ import annotations

import torch
from torch import Tensor


class State:
    """m and l (batch, heads, N), o (batch, heads, N, d): what is known of a rank's rows, at first nothing."""

    def __init__(self, q: Tensor, on_triton: bool):
        options = dict(dtype=torch.float32, device=q.device)
        self.m = torch.full(q.shape[:3], -torch.inf, **options)
        self.l = torch.zeros(q.shape[:3], **options)
        self.o = torch.zeros(q.shape, **options)
        self.on_triton = on_triton

    def merge(self, rows: slice, O: Tensor, L: Tensor) -> None:
        """Take in the output of more keys for some of the rows. A finished part says as much as a state, with m = L and
        l = 1."""
        if self.on_triton:
            from fa2_lab.kernels.portable import merge

            merge.merge(self.m, self.l, self.o, rows, O, L)
            return
        m, l, o = self.m[:, :, rows], self.l[:, :, rows], self.o[:, :, rows]
        m_new = torch.maximum(m, L)
        finite = m_new.masked_fill(m_new == -torch.inf, 0.0)
        alpha, beta = torch.exp(m - finite), torch.exp(L - finite)
        l.mul_(alpha).add_(beta)
        o.mul_(alpha[..., None]).addcmul_(O, beta[..., None])
        m.copy_(m_new)

    def finalize(self, O: Tensor, L: Tensor) -> None:
        """Write O = o / l and L = m + log l: one division, one logarithm, one rounding to the dtype of O."""
        if self.on_triton:
            from fa2_lab.kernels.portable import merge

            merge.finalize(self.m, self.l, self.o, O, L)
            return
        l = torch.where(self.l == 0, 1.0, self.l)
        O.copy_(self.o / l[..., None])
        L.copy_(self.m + torch.log(l))
