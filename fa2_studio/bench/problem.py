"""One attention problem with its tensors, its FLOPs, and a check that an answer is right."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

TensorSequence = Sequence[torch.Tensor]  # q, k, v and, for a backward pass, dO


class Missing(Exception):
    """Raised if an implementation cannot take part. The record then contains the reason instead of a number."""


def default_device() -> str:
    """Return the device on which a suite runs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Problem:
    """The shape of one call. As in the FA2 paper, a head takes 4 N_q N_k d FLOPs, or half of that if causal."""

    batch: int
    heads: int
    kv_heads: int
    N_q: int
    N_k: int
    d: int
    causal: bool
    dtype: str = "bfloat16"
    window: int | None = None  # number of keys that a row sees under the causal mask, including its own key
    softcap: int | None = None
    sinks: bool = False
    # "distance" or "column", from which ALiBi is computed for 16 heads, or empty without ALiBi.
    alibi: str = ""

    @classmethod
    def square(cls, N: int, d: int, causal: bool) -> "Problem":
        """Return self-attention with the paper's sizes: 16k tokens in total and a hidden dimension of 2,048."""
        heads = 2048 // d
        return cls(max(1, 16384 // N), heads, heads, N, N, d, causal)

    @property
    def forward_flops(self) -> float:
        """Return the FLOPs of a forward pass, counting only the keys that each row sees."""
        seen = self.N_q * self.N_k * (0.5 if self.causal else 1)
        if self.window is not None:
            seen = self.N_q * self.window - self.window * (self.window - 1) / 2
        return 4 * self.batch * self.heads * seen * self.d

    def flops(self, direction: str) -> float:
        """Return the FLOPs of "forward", of "backward" (2.5 times as many) or of "both" together."""
        return self.forward_flops * {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]

    def tensors(self, seed: int = 0, grad: bool = False, device: str = "") -> tuple[torch.Tensor, ...]:
        """Return q, k, v and, with `grad`, dO, drawn from a normal distribution, each of shape (batch, heads, N, d)."""
        device = device or default_device()
        options = dict(device=device, dtype=getattr(torch, self.dtype), generator=torch.Generator(device))
        options["generator"].manual_seed(seed)

        def draw(heads: int, N: int) -> torch.Tensor:
            return torch.randn((self.batch, heads, N, self.d), **options)

        q, k, v = (draw(*s) for s in ((self.heads, self.N_q), (self.kv_heads, self.N_k), (self.kv_heads, self.N_k)))
        inputs = tuple(x.requires_grad_(grad) for x in (q, k, v))
        return (*inputs, draw(self.heads, self.N_q)) if grad else inputs

    def mask(self, device: torch.device | str) -> dict:
        """Return the problem's masks other than the causal one: window, softcap, and each head's sink and slope."""
        sinks = torch.linspace(-1, 3, self.heads, device=device) if self.sinks else None
        slopes = 2 ** (-0.5 * torch.arange(1, self.heads + 1, device=device)) if self.alibi else None
        masks = dict(window=self.window, softcap=self.softcap, sinks=sinks, slopes=slopes)
        return {name: value for name, value in masks.items() if value is not None}

    def as_dict(self) -> dict:
        """Return the fields for a record, in which a text describes all masks other than the causal one."""
        fields = asdict(self)
        window, softcap, sinks, alibi = (fields.pop(name) for name in ("window", "softcap", "sinks", "alibi"))
        words = [f"window {window}"] * (window is not None) + [f"softcap {softcap}"] * (softcap is not None)
        words += ["sinks"] * sinks
        if alibi:
            words += ["causal" if self.causal else "non-causal", f"ALiBi by {alibi}"]
        return fields | (dict(mask=", ".join(words)) if words else {})


# Right or wrong -----------------------------------------------------------------------------------------------

MAX_P_ELEMENTS = 2**26  # the most float64 elements of P to compute at a time (512 MiB)
SAMPLE = 64  # number of rows and keys to check, enough to tell right from wrong


def float64_attention(
    q, k, v, *, last: int, causal: bool, window: int | None = None, softcap=None, sink=None, slope=None
) -> torch.Tensor:
    """Return O for some rows of one head. `last` is the last key that the first row sees under the causal mask.

    Under the causal mask, row r sees the `window` columns that end with column last + r.
    """
    s = q @ k.T * q.shape[1] ** -0.5
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    row, key = (torch.arange(len(x), device=k.device) for x in (q, k))
    behind = last + row[:, None] - key
    if slope is not None:
        s = s - slope * behind
    if causal:
        s = s.masked_fill((behind < 0) | (behind >= (window or len(k))), -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink.expand(len(s), 1)], dim=1)
    return torch.softmax(s, dim=1)[:, : len(k)] @ v


def float64_gradients(q, k, v, dO, **mask) -> tuple[torch.Tensor, ...]:
    """Return O, dQ, dK and dV for some rows of one head, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    O = float64_attention(*leaves, **mask)
    return O.detach(), *torch.autograd.grad(O, leaves, dO.double())


def mask_of_head(head: int, mask: dict) -> dict:
    """Return the mask of one head, with the sink and the slope of that head."""
    own = dict(sinks="sink", slopes="slope")
    return {own.get(name, name): x[head].double() if name in own else x for name, x in mask.items()}


def sampled_gradients(q, k, v, dO, causal: bool, sample: int = SAMPLE, **mask) -> tuple[torch.Tensor, ...]:
    """Return dQ for the last rows of the last head, and dK and dV for the first keys of the last K/V head.

    All three are in float64 and contain `sample` rows or keys.
    """
    group, chunk = q.shape[1] // k.shape[1], max(sample, MAX_P_ELEMENTS // k.shape[2])
    k, v = k[-1, -1], v[-1, -1]
    dK, dV = (torch.zeros(x[:sample].shape, dtype=torch.float64, device=x.device) for x in (k, v))
    for head in range(q.shape[1] - group, q.shape[1]):
        for first in range(0, q.shape[2], chunk):
            q_i, dO_i = (x[-1, head, first : first + chunk] for x in (q, dO))
            mask_arguments = dict(last=first + len(k) - q.shape[2], causal=causal, **mask_of_head(head, mask))
            _, dQ, dK_i, dV_i = float64_gradients(q_i, k, v, dO_i, **mask_arguments)
            dK += dK_i[:sample]
            dV += dV_i[:sample]
    return dQ[-sample:], dK, dV


def relative_error_of_O(O: torch.Tensor, q, k, v, causal: bool, **mask) -> float:
    """Return ‖O − truth‖ / ‖truth‖ for the last rows of the last head, where the truth is computed in float64."""
    O, q = (x.detach()[-1, -1, -SAMPLE:] for x in (O, q))
    q, k, v = q.double(), k.detach()[-1, -1].double(), v.detach()[-1, -1].double()
    return relative_error(O, float64_attention(q, k, v, last=len(k) - len(q), causal=causal, **mask_of_head(-1, mask)))


def relative_error_of_gradients(gradients, truth) -> float:
    """Return the largest relative error of the three gradients, for the rows and keys that `truth` contains."""
    dQ, dK, dV = gradients
    got = dQ[-1, -1, -len(truth[0]) :], dK[-1, -1, : len(truth[1])], dV[-1, -1, : len(truth[2])]
    return largest_error(relative_error(x, right) for x, right in zip(got, truth, strict=True))


def relative_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())


def largest_error(errors) -> float:
    """Return the largest error, or NaN if any error is NaN (Python's max() might ignore a NaN)."""
    return float(torch.tensor(list(errors)).max())
