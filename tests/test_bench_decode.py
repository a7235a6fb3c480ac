"""The suite `decode`, as far as it goes without a GPU: its problems, its bytes, its pages."""

import ast

import numpy as np
import pytest
import torch
from kernel_truth import DEVICE, GPU

from fa2_lab.studio.bench import clocks, command, decode, reading
from fa2_lab.studio.bench.problem import Problem
from fa2_lab.studio.bench.results import Row, label
from fa2_lab.studio.bench.variants import edited, sources


def test_the_grid_holds_the_shapes_that_peers_are_measured_on():
    shapes = {(p.batch, p.N_k) for p in decode.grid() if (p.heads, p.kv_heads, p.d) == (32, 8, 128)}
    assert {(1, 8192), (1, 65536), (8, 16384), (32, 8192)} <= shapes
    assert all(p.N_q == 1 and not p.causal for p in decode.grid())
    assert command.SUITES["decode"].baseline == "cuDNN"


def test_bytes_of_a_cache():
    p = Problem(1, 32, 8, 1, 65536, 128, False)
    assert decode.cache_bytes(p) == 2 * 8 * 65536 * 128 * 2
    assert label(Row(decode.described(p), "decode", {})).startswith("decode      N 1×65536 b 1 h 32/8 d 128")


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


# Clocks -------------------------------------------------------------------------------------------------------


def test_the_clocks_find_their_places_in_the_kernel():
    ast.parse(edited(sources(), clocks.EDITS)["decode"])


def test_ends_count_from_the_first_beginning_and_are_medians():
    """Three programs, five calls; in one of them a clock wrapped, in another a program lay elsewhere."""
    begun, took, place = np.array([5e3, 4e3, 6e3]), np.array([200e3, 210e3, 190e3]), np.array([0, 0, 1])
    calls = [
        np.stack([begun + late, begun + took + late + noise, place], 1) for late, noise in ((0, 0), (70, 1e3), (9, 7e3))
    ]
    wrapped, elsewhere = calls[1] + [0, -3e5, 0], calls[1] + [0, 9e3, 0] + [[0, 0, 7], [0, 0, 0], [0, 0, 0]]
    found = clocks.medians(np.stack([wrapped, elsewhere, *calls]))
    assert found == dict(SM=[0, 0, 1], ended=[202.0, 211.0, 193.0])
    with pytest.raises(ArithmeticError, match="in no call"):
        clocks.medians(wrapped[None])


@pytest.mark.skipif(not GPU or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU here")
def test_every_program_writes_its_clock_down():
    found = clocks.ends(Problem(32, 32, 8, 1, 2048, 128, False))
    assert len(found["SM"]) == len(found["ended"]) == 256
    assert set(found["SM"]) <= set(range(132)) and len(set(found["SM"])) > 100
    assert 10 < min(found["ended"]) <= max(found["ended"]) < 1000
