"""INT8 arithmetic against numpy, written independently: IEEE float32 division, rint, int64 sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit import arithmetic
from quantkit.spec.scheme import group_size_for


def numpy_quantize(x: np.ndarray, axis: int = -1) -> tuple[np.ndarray, np.ndarray]:
    absmax = np.abs(x.astype(np.float32)).max(axis=axis, keepdims=True)
    scale = np.maximum(absmax / np.float32(127), np.float32(1e-35))
    return np.clip(np.rint(x.astype(np.float32) / scale), -127, 127).astype(np.int8), scale


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 129), (2, 7, 33)])
def test_weights_quantize_as_numpy_does(shape: tuple[int, ...]) -> None:
    w = normal(*shape)
    scale = arithmetic.channel_scales(torch.from_numpy(w))
    q = arithmetic.quantize(torch.from_numpy(w), scale)
    expected, expected_scale = numpy_quantize(w)
    np.testing.assert_array_equal(q.numpy(), expected)
    np.testing.assert_array_equal(scale.numpy(), expected_scale)


def test_rounding_is_half_to_even() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
    assert arithmetic.quantize(x, torch.tensor(1.0)).tolist() == [0, 2, 2, 0, -2, 126]


def test_range_is_symmetric() -> None:
    q = arithmetic.quantize(torch.tensor([-1e9, 1e9]), torch.tensor(1.0))
    assert q.tolist() == [-127, 127]


def test_zero_rows_stay_zero_with_a_positive_scale() -> None:
    w = torch.zeros(2, 8)
    scale = arithmetic.channel_scales(w)
    assert (scale > 0).all()
    assert torch.isfinite(1 / scale).all()
    assert arithmetic.quantize(w, scale).count_nonzero() == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.floats(1e-30, 1e30), st.integers(0, 99))
def test_dequantized_value_is_within_half_a_step(n: int, k: int, size: float, seed: int) -> None:
    w = torch.from_numpy(normal(n, k, seed=seed)).double().mul(size).float()
    scale = arithmetic.channel_scales(w)
    error = (arithmetic.dequantize(arithmetic.quantize(w, scale), scale).double() - w.double()).abs()
    assert (error <= scale.double() / 2 * (1 + 1e-5)).all()


def test_tokens_by_group_equal_each_group_alone() -> None:
    x = torch.from_numpy(normal(5, 96))
    q, scale = arithmetic.quantize_tokens(x, 32)
    assert q.shape == (5, 96)
    assert scale.shape == (5, 3)
    for group in range(3):
        columns = slice(32 * group, 32 * group + 32)
        alone_q, alone_scale = numpy_quantize(x.numpy()[:, columns])
        np.testing.assert_array_equal(q[:, columns].numpy(), alone_q)
        np.testing.assert_array_equal(scale[:, group : group + 1].numpy(), alone_scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_represented_values_are_those_of_codes(dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.random.default_rng(6).uniform(-1, 1, (9, 77)).astype(np.float32)).to(dtype)
    x[3] = 0
    scale = arithmetic.channel_scales(x) * 0.8  # clips
    before = x.clone()
    found = arithmetic.represented(x, scale)
    assert found.dtype == torch.float32
    assert torch.equal(found, arithmetic.dequantize(arithmetic.quantize(x, scale), scale))
    assert torch.equal(x, before)


@pytest.mark.parametrize("size", [0.0, 1e-37, 1.0, 3e38])
def test_rounding_error_has_the_bits_of_codes(size: float) -> None:
    x = torch.from_numpy(np.random.default_rng(5).uniform(-1, 1, (9, 5, 77)).astype(np.float32)) * size
    scale = arithmetic.scale_from_absmax(x.abs().amax(-1, keepdim=True))
    scratch = torch.full_like(x, 7)
    found = arithmetic.rounding_error(x, scale, out=scratch)
    assert found is scratch
    assert torch.equal(found, arithmetic.dequantize(arithmetic.quantize(x, scale), scale) - x)


def test_tokens_without_groups_have_one_scale() -> None:
    q, scale = arithmetic.quantize_tokens(torch.from_numpy(normal(4, 7)))
    assert (q.shape, scale.shape) == ((4, 7), (4, 1))


@pytest.mark.parametrize(
    ("k", "expected"), [(128, 128), (256, 128), (96, 96), (192, 96), (2880, 120), (7, 7), (131, 1)]
)
def test_group_size_divides(k: int, expected: int) -> None:
    assert group_size_for(k) == expected


def test_limits_of_exact_sums() -> None:
    """The worst case at each limit fits, one more does not."""
    worst = arithmetic.QMAX**2
    assert worst * arithmetic.MAX_INT32_K < 2**31 <= worst * (arithmetic.MAX_INT32_K + 1)
    assert worst * arithmetic.EXACT_F32_K <= 2**24 < worst * (arithmetic.EXACT_F32_K + 1)
    full = torch.full((1, arithmetic.EXACT_F32_K), 127.0)
    assert int(full @ full.T) == worst * arithmetic.EXACT_F32_K
