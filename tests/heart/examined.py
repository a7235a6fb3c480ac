"""Attention functions, and steps of them, that the tests of examine/ share."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from fa2_lab.examine import SECONDS


@pytest.fixture(autouse=True)
def enough_time(monkeypatch):
    """Raise the time limit, so that a test also passes on a busy machine."""
    monkeypatch.setitem(SECONDS, True, 600)


def names(report) -> list[str]:
    """Return the names of a report's findings."""
    return [finding.name for finding in report.findings]


def sdpa_with_backend(backend):
    """Return PyTorch's attention with one of its backends."""

    def sdpa(query, key, value, attn_mask=None, is_causal=False, scale=None):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale)

    return sdpa


def scores(q, k, tau=None):
    return q @ k.mT * (q.shape[-1] ** -0.5 if tau is None else tau)


def mask_later(s, later=0, corner=None):
    """Return scores with −∞ for keys that are more than `later` places after their row.

    The diagonal begins at the bottom right corner, or at an offset `corner` from the top left one.
    """
    N_q, N_k = s.shape[-2:]
    ahead = torch.arange(N_k) - torch.arange(N_q)[:, None] - (N_k - N_q if corner is None else corner)
    return s.masked_fill(ahead > later, -torch.inf)


def softmax(s):
    """Return the softmax of each row, and zeros for a row of −∞."""
    return torch.nan_to_num(s.softmax(-1))


def grouped_attention(q, k, v):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return scores(q, k).softmax(-1) @ v


def plain_attention(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
