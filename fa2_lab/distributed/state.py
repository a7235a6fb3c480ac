"""The softmax state of a rank's rows, stored in fp32 tensors and updated in place.

State is the counterpart of SoftmaxState in the NumPy reference.
"""

from typing import Any

import torch
from torch import Tensor


class State:
    """The softmax state of a rank's rows: m and l (batch, heads, N), and o (batch, heads, N, d).

    In a new State, no row has seen a key.
    """

    def __init__(self, q: Tensor, on_triton: bool) -> None:
        options: dict[str, Any] = dict(dtype=torch.float32, device=q.device)
        blank = torch.empty if on_triton else torch.zeros  # the kernel does not read l and o of rows whose m is −∞
        self.m = torch.full(q.shape[:3], -torch.inf, **options)
        self.l, self.o = blank(q.shape[:3], **options), blank(q.shape, **options)
        self.on_triton = on_triton

    def merge(self, rows: slice, O: Tensor, L: Tensor) -> None:
        """Merge (O, L), the output that `rows` have for further keys, into the state of these rows.

        An output (O, L) is equivalent to the state m = L, l = 1 and o = O.
        """
        if self.on_triton:
            from fa2_lab.distributed import merge

            merge.merge(self.m, self.l, self.o, rows, O, L)
            return
        m, l, o = self.m[:, :, rows], self.l[:, :, rows], self.o[:, :, rows]
        m_new = torch.maximum(m, L)
        finite = m_new.masked_fill(m_new == -torch.inf, value=0.0)
        alpha, beta = torch.exp(m - finite), torch.exp(L - finite)
        l.mul_(alpha).add_(beta)
        o.mul_(alpha[..., None]).addcmul_(O, beta[..., None])
        m.copy_(m_new)

    def finalize(self, part: tuple[slice, Tensor, Tensor], O: Tensor, L: Tensor) -> None:
        """Merge the last partial result, and write O = o / l and L = m + log l of all rows to the arguments O and L.

        `part` is (rows, O, L). Every partial O has already been rounded to its dtype. The state is in fp32, so the
        merges round to fp32, and the final O is rounded to its dtype once more.
        """
        if self.on_triton:
            from fa2_lab.distributed import merge

            merge.merge(self.m, self.l, self.o, *part, O_out=O, L_out=L)
            return
        self.merge(*part)
        l = torch.where(self.l == 0, 1.0, self.l)
        O.copy_(self.o / l[..., None])
        L.copy_(self.m + torch.log(l))
