"""Row statistics and their sums against numpy in float64, and the clipping matrix by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.calibrate.statistics import (
    EDGES,
    BatchStats,
    InputStats,
    TokenStats,
    clipping_shares,
    input_stats,
    measured_rows,
    token_stats,
)
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
    measured, stands_for = measured_rows(found.absmax)
    count = np.zeros(shape[0])
    count[measured] = stands_for
    assert bool((count == 1).all()) == (shape[0] < 256)
    np.testing.assert_allclose(found.square, count * (array.astype(np.float64) ** 2).sum(-1), rtol=2e-5)
    tiny = 1e-12 * float(found.square.max())  # a value at the end of its range is exact up to the scale's own rounding
    for name, group in (("token_error", shape[1]), ("group_error", group_size_for(shape[1]))):
        np.testing.assert_allclose(getattr(found, name), count * ref_error(array, group), rtol=1e-3, atol=tiny)


@pytest.mark.parametrize("tokens", [1, 255, 256, 777, 1024, 3000])
def test_rows_that_are_measured_stand_for_all(tokens: int) -> None:
    absmax = np.random.default_rng(tokens).lognormal(size=tokens).astype(np.float32)
    rows, stands_for = measured_rows(absmax)
    step = max(1, min(8, tokens // 128))
    assert len(set(rows.tolist())) == len(rows)
    assert set(stands_for.tolist()) <= {1.0, float(step)}
    assert abs(stands_for.sum() - tokens) < step
    if step > 1:
        largest = set(np.argsort(absmax)[-(tokens // 16) :].tolist())
        assert {int(row) for row, count in zip(rows, stands_for, strict=True) if count == 1} == largest
        assert len(rows) < 0.6 * tokens


@pytest.mark.parametrize("k", [96, 768])
def test_errors_of_part_of_the_rows_are_those_of_all(k: int) -> None:
    """Sequences whose first token is a thousand times the others and holds most of the squares, as in real models."""
    generator = np.random.default_rng(3)
    x = generator.standard_normal((6, 512, k)) * generator.lognormal(sigma=1.0, size=(6, 512, 1))
    x[:, 0] *= 3.0
    x[:, 0, 5] = generator.uniform(600, 1400, 6)
    rows = x.reshape(-1, k).astype(np.float32)
    found = token_stats(torch.from_numpy(rows))
    assert (found.square > 0).mean() < 0.2
    square = (rows.astype(np.float64) ** 2).sum()
    for name, group in (("token_error", k), ("group_error", group_size_for(k))):
        part = getattr(found, name).sum(dtype=np.float64) / found.square.sum(dtype=np.float64)
        assert np.sqrt(part) == pytest.approx(np.sqrt(ref_error(rows, group).sum() / square), rel=0.03), name


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
        total.add(BatchStats.of(absmax, token_stats(x), of), each)
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
    whole, merged = filled(rows, owner, kind), filled(rows[:23], owner[:23], kind[:23])
    merged.merge(filled(rows[23:], owner[23:], kind[23:]))
    pooled = filled(rows, np.zeros(40, np.int64), kind, experts=1)
    one_by_one = InputStats.empty(3, 16, 2, torch.device("cpu"))
    for row, expert in zip(rows, owner.tolist(), strict=True):
        one_by_one.add_rows(expert, row.abs(), token_stats(row[None]))
    for other, wanted in ((merged, whole), (one_by_one, whole), (whole.over_experts(), pooled)):
        tensors = other.tensors()
        del tensors["absmax_by_kind"]  # `add` alone knows of kinds
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, wanted.tensors()[name], rtol=1e-9, atol=0)


def test_experts_without_a_measured_row_are_told_from_zeros() -> None:
    found = token_stats(torch.ones(3, 8))
    part = TokenStats(
        found.absmax, *(each * np.float32([1, 0, 0]) for each in (found.square, found.token_error)), found.group_error
    )
    absmax = torch.tensor([[1.0] * 8, [1.0] * 8, [0.0] * 8])
    stats = InputStats.empty(3, 8, 1, torch.device("cpu"))
    stats.add(BatchStats.of(absmax, part, np.array([0, 1, 1])), 0)
    assert [stats.is_measured(expert) for expert in range(3)] == [True, False, True]


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
