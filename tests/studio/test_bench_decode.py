"""The suite `decode`, as far as it goes without a GPU: its problems, its bytes, its pages."""

import pytest
import torch
from kernel_truth import DEVICE

from fa2_lab.records import Measurement
from fa2_studio.bench import command, decode, reading
from fa2_studio.bench.problem import Problem
from fa2_studio.bench.results import label


def test_the_grid_holds_the_shapes_that_peers_are_measured_on():
    shapes = {(p.batch, p.N_k) for p in decode.grid() if (p.heads, p.kv_heads, p.d) == (32, 8, 128)}
    assert {(1, 8192), (1, 65536), (8, 16384), (32, 8192)} <= shapes
    assert all(p.N_q == 1 and not p.causal for p in decode.grid())
    assert command.SUITES["decode"].baseline == "cuDNN"


def test_bytes_of_a_cache():
    p = Problem(1, 32, 8, 1, 65536, 128, False)
    assert decode.cache_bytes(p) == 2 * 8 * 65536 * 128 * 2
    assert label(Measurement(decode.described(p), "decode", {})).startswith("decode      N 1×65536 b 1 h 32/8 d 128")


@pytest.mark.parametrize("page", (1, 8, 16))
def test_shuffled_pages_hold_the_cache(page):
    k, v = torch.arange(2 * 2 * 3 * 32 * 4.0).view(2, 2, 3, 32, 4)
    k_pages, v_pages, table = decode.shuffled(k, v, page)
    assert table.shape == (2, 32 // page) and k_pages.shape == (64 // page, page, 3, 4)
    for x, made in ((k, k_pages), (v, v_pages)):
        for b in range(2):
            assert torch.equal(made[table[b].long()].flatten(0, 1), x[b].transpose(0, 1))


def test_the_protocol_says_how_the_cache_is_emptied():
    assert "filled with other data by reading" in decode.PROTOCOL and "overwritten" not in decode.PROTOCOL


@pytest.mark.parametrize("at", (0, 4095, 4096, 9998, None))
def test_reading_alone_looks_at_every_number(at):
    X = torch.zeros(9999, dtype=torch.int32, device=DEVICE)
    X[at if at is not None else []] = reading.RARE.value
    assert reading.reading(X)().item() == (at is not None)
    assert reading.reading(torch.zeros(2, 2, 3, dtype=torch.bfloat16, device=DEVICE))().item() == 0
