"""Number formats in NumPy: E4M3 is torch's, the rotation keeps the scores, and rounding errors of one sign add up."""

import numpy as np
import pytest
import torch

from fa2_lab.machine import rounding


def test_e4m3_rounding_equals_torch():
    """All its rounding, all halves between them, and numbers of every size; torch does not saturate."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    codes = np.unique(codes[np.isfinite(codes)])
    draw = np.random.default_rng(0)
    drawn = np.clip(draw.standard_normal(10_000) * 10.0 ** draw.integers(-4, 3, 10_000), -448, 448)
    for x in (codes, (codes[1:] + codes[:-1]) / 2, drawn.astype(np.float32).astype(float)):
        want = torch.from_numpy(x).float().to(torch.float8_e4m3fn).double().numpy()
        assert (rounding.e4m3(x) == want).all()
    assert (rounding.e4m3(np.array([1e6, -449.0])) == [448, -448]).all()


@pytest.mark.parametrize("rows", [8, 32])
def test_block_scaling_maps_the_largest_value_to_the_format_maximum(rows):
    X = np.random.default_rng(1).standard_normal((32, 4)) * np.repeat([1.0, 1e-6, 1e6, 3.0], 8)[:, None]
    found = rounding.scaled_e4m3(X, rows)
    for begin in range(0, 32, rows):
        block, got = X[begin : begin + rows], found[begin : begin + rows]
        assert np.isclose(abs(got).max(), abs(block).max(), rtol=1e-12)
        assert abs(got - block).max() <= abs(block).max() / 16
    assert np.allclose(found[8:16], X[8:16], rtol=0.07, atol=0) == (rows == 8)  # beside 1e6, 1e-6 is nothing


def test_rotation_preserves_scores_and_spreads_an_outlier():
    turn, outlier = rounding.rotation(64), np.zeros(64)
    outlier[5] = 80.0
    assert np.allclose(turn @ turn.T, np.eye(64)) and np.allclose(abs(outlier @ turn), 10)
    assert len({*turn[:, 0].round(3)}) == 2  # random signs: the first column is not constant


def D_gradient_errors(sum_bits, at=lambda m: m):
    """Return the sum of D's errors divided by its standard deviation if their signs were random."""
    S, V, dO = rounding.repeated_maxima()
    found = rounding.rounded_outputs(S, V, at(S.max(1, keepdims=True)), sum_bits)
    errors = (dO * (found - rounding.exact_outputs(S, V))).sum(1)
    return errors.sum() / np.sqrt((errors**2).sum())


def test_rounding_bias_needs_rounded_sums_and_equal_row_maxima():
    assert D_gradient_errors(rounding.BF16) > 10 and D_gradient_errors(rounding.BF16, lambda m: m + np.log(2)) > 10
    assert D_gradient_errors(rounding.BF16, lambda m: m + 0.3) > 10
    assert abs(D_gradient_errors(rounding.BF16, lambda m: 2 * m)) < 3 and abs(D_gradient_errors(rounding.FP32)) < 3
