"""The rotation against its definition: orthogonal at odd sizes, flat, the same for any slice of the input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.rotation import Rotation

SIZES = (1, 3, 64, 96, 160, 576, 2880)
LARGE = (5120, 7168)


@pytest.mark.parametrize("size", SIZES)
def test_matrix_is_orthogonal(size: int) -> None:
    q = Rotation(size, 0).matrix().numpy()
    np.testing.assert_allclose(q @ q.T, np.eye(size), atol=1e-12)


@pytest.mark.parametrize("size", LARGE)
def test_large_rotation_keeps_inner_products(size: int) -> None:
    """The whole Gram matrix of 7168 vectors takes a minute; 64 random ones and 64 unit ones do not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, size, generator=generator, dtype=torch.float64)
    x = torch.cat((x, torch.eye(size, dtype=torch.float64)[torch.randperm(size, generator=generator)[:64]]))
    y = Rotation(size, 3)(x)
    np.testing.assert_allclose((y @ y.T).numpy(), (x @ x.T).numpy(), atol=1e-9)


@pytest.mark.parametrize("size", [48, 96, 160])
def test_matrix_is_signs_times_hartley_kron_hadamard(size: int) -> None:
    power = size & -size
    odd = size // power
    i = np.arange(odd)
    angle = 2 * np.pi * np.outer(i, i) / odd
    hartley = (np.cos(angle) + np.sin(angle)) / np.sqrt(odd)
    signs = 1 - 2 * np.random.default_rng(7).integers(0, 2, size)
    hadamard = np.ones((1, 1))
    while len(hadamard) < power:  # Sylvester's construction
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    expected = signs[:, None] * np.kron(hartley, hadamard / np.sqrt(power))
    np.testing.assert_allclose(Rotation(size, 7).matrix().numpy(), expected, atol=1e-13)


@pytest.mark.parametrize("size", [96, 160, 576])
def test_no_entry_stands_out(size: int) -> None:
    assert float(Rotation(size, 0).matrix().abs().max()) <= (2 / size) ** 0.5 + 1e-12


def test_seeds_differ() -> None:
    assert not torch.equal(Rotation(96, 0).matrix(), Rotation(96, 1).matrix())


def test_slices_equal_the_whole_bit_for_bit() -> None:
    x = torch.randn(37, 160, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = Rotation(160, 0)(x)
    assert torch.equal(torch.cat([Rotation(160, 0)(x[start : start + 5]) for start in range(0, 37, 5)]), whole)
