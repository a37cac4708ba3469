"""Row statistics and their sums against numpy in float64, and the clipping matrix by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.calibrate.statistics import EDGES, InputStats, clipping_shares, input_stats, token_stats
from quantkit.spec.scheme import group_size_for


def ref_error(x: np.ndarray, group: int) -> np.ndarray:
    """Sum of squared rounding errors per row in float64; scales in float32 as the engines compute them."""
    grouped = x.reshape(len(x), -1, group).astype(np.float64)
    absmax = np.abs(x.reshape(len(x), -1, group)).max(-1, keepdims=True).astype(np.float32)
    scale = np.maximum(absmax / np.float32(127), np.float32(1.5e-36)).astype(np.float64)
    return ((grouped - np.clip(np.rint(grouped / scale), -127, 127) * scale) ** 2).sum((1, 2))


@pytest.mark.parametrize("shape", [(1, 1), (3, 97), (7, 257), (33, 160), (5, 384), (4000, 96), (2, 300_001)])
def test_row_statistics(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=generator) * torch.rand(shape[1], generator=generator).mul(4).exp()
    found, channels = input_stats(x)
    array = x.numpy()
    np.testing.assert_array_equal(channels.numpy(), np.abs(array).max(0))
    np.testing.assert_array_equal(found.absmax, np.abs(array).max(-1))
    np.testing.assert_allclose(found.square, (array.astype(np.float64) ** 2).sum(-1), rtol=2e-5)
    tiny = 1e-12 * float(found.square.max())  # a value at the end of its range is exact up to the scale's own rounding
    np.testing.assert_allclose(found.token_error, ref_error(array, shape[1]), rtol=1e-3, atol=tiny)
    np.testing.assert_allclose(found.group_error, ref_error(array, group_size_for(shape[1])), rtol=1e-3, atol=tiny)


def test_no_rows() -> None:
    found, channels = input_stats(torch.zeros(0, 6))
    assert len(found.absmax) == len(found.group_error) == 0
    assert channels.tolist() == [0.0] * 6


def test_zero_and_constant_rows() -> None:
    x = torch.zeros(3, 256)
    x[1] = 5.0
    found = token_stats(x)
    np.testing.assert_array_equal(found.token_error[[0, 2]], 0)
    np.testing.assert_array_equal(found.group_error[[0, 2]], 0)
    assert found.token_error[1] < 256 * 25 * 1e-12  # 5 = 127 x its scale


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_shows_in_absmax(value: float) -> None:
    x = torch.ones(5, 130)
    x[3, 77] = value
    found, channels = input_stats(x)
    assert np.flatnonzero(~np.isfinite(found.absmax)).tolist() == [3]
    assert (~channels.isfinite()).nonzero().flatten().tolist() == [77]


def filled(rows: torch.Tensor, owner: np.ndarray, kind: np.ndarray, experts: int = 3) -> InputStats:
    """Statistics built one batch per kind of text."""
    total = InputStats.empty(experts, rows.shape[1], 2, torch.device("cpu"))
    for each in (0, 1):
        x, of = rows[kind == each], owner[kind == each]
        absmax = torch.stack(
            [x[of == e].abs().amax(0) if (of == e).any() else torch.zeros(rows.shape[1]) for e in range(experts)]
        )
        total.add(absmax, each, token_stats(x), of)
    return total


def test_sums_by_expert_and_by_kind() -> None:
    generator = np.random.default_rng(1)
    rows = torch.from_numpy(generator.standard_normal((57, 24), np.float32) * 10)
    owner, kind = generator.integers(0, 2, 57), generator.integers(0, 2, 57)  # expert 2 sees nothing
    stats = filled(rows, owner, kind)
    x = rows.numpy().astype(np.float64)
    assert stats.tokens.tolist() == [(owner == 0).sum(), (owner == 1).sum(), 0]
    for expert in (0, 1):
        mine = x[owner == expert]
        np.testing.assert_array_equal(stats.absmax[expert].numpy(), np.abs(mine).max(0).astype(np.float32))
        np.testing.assert_allclose(stats.square[expert], (mine**2).sum(), rtol=1e-5)
        error = ref_error(rows.numpy()[owner == expert], 24).sum()
        assert stats.token_relative(expert) == pytest.approx(np.sqrt(error / (mine**2).sum()), rel=1e-4)
        counts = np.histogram(np.abs(mine).max(1), np.concatenate(([0], EDGES, [np.inf])))[0]
        np.testing.assert_array_equal(stats.histogram[expert], counts)
    for each in (0, 1):
        np.testing.assert_array_equal(stats.absmax_by_kind[each], rows[kind == each].abs().amax(0))
    assert stats.token_relative(2) == 0.0
    assert len(stats.outlier_channels(2)) == 0


def test_merge_and_pool_equal_one_pass() -> None:
    generator = np.random.default_rng(2)
    rows = torch.from_numpy(generator.standard_normal((40, 16), np.float32))
    owner, kind = generator.integers(0, 3, 40), generator.integers(0, 2, 40)
    whole = filled(rows, owner, kind)
    merged = filled(rows[:23], owner[:23], kind[:23]).merge(filled(rows[23:], owner[23:], kind[23:]))
    pooled = filled(rows, np.zeros(40, np.int64), kind, experts=1)
    for other, wanted in ((merged, whole), (whole.over_experts(), pooled)):
        for name, tensor in other.tensors().items():
            torch.testing.assert_close(tensor, wanted.tensors()[name], rtol=1e-9, atol=0)


def test_outlier_channels() -> None:
    rows = torch.ones(4, 9)
    rows[2, 3], rows[1, 8] = -6.5, 6.0
    stats = filled(rows, np.zeros(4, np.int64), np.zeros(4, np.int64), experts=1)
    assert stats.outlier_channels(0).tolist() == [3]


def test_clipping_matrix_by_hand() -> None:
    first = torch.tensor([[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 2.0, 5.0]])  # b exceeds a on 2 channels, a exceeds b on 1
    second = torch.tensor([[1.0, 1.0], [0.5, 0.5]])  # a exceeds b on both
    np.testing.assert_allclose(clipping_shares([first, second]), [[0, 2 / 6], [3 / 6, 0]])
    assert clipping_shares([]).shape == (0, 0)
