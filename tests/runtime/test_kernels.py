"""The INT8 product against numpy in int64 and against torch's own, at odd sizes and at the ends of the range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.arithmetic import EXACT_F32_K, MAX_INT32_K
from quantkit.errors import UsageError
from quantkit_runtime.errors import ShapeMismatch
from quantkit_runtime.kernels import int_mm, reference, registry

SIZES = [
    (1, 1, 1),
    (3, 5, 7),
    (1, 33, 96),
    (17, 1, 160),
    (2, 3, EXACT_F32_K),
    (5, 9, EXACT_F32_K + 1),
    (16, 7, 2 * EXACT_F32_K),
    (129, 31, 3001),
    (1, 2, MAX_INT32_K),
]


def ref_int32_product(x: torch.Tensor, w: torch.Tensor) -> np.ndarray:
    return x.numpy().astype(np.int64) @ w.numpy().astype(np.int64).T


def random_int8(seed: int, *shape: int) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(-127, 128, shape, dtype=np.int8)
    return torch.from_numpy(values)


@pytest.mark.parametrize(("t", "n", "k"), SIZES)
@pytest.mark.parametrize("product", [reference.int32_product, int_mm.int32_product], ids=["f32-chunks", "int_mm"])
def test_product_is_exact_on_random_values(product: reference.Product, t: int, n: int, k: int) -> None:
    x, w = random_int8(k, t, k), random_int8(k + 1, n, k)
    got = product(x, w)
    assert got.dtype == torch.int32
    assert got.shape == (t, n)
    assert np.array_equal(got.numpy(), ref_int32_product(x, w))


@pytest.mark.parametrize(("t", "n", "k"), SIZES)
@pytest.mark.parametrize("sign", [1, -1])
def test_product_is_exact_where_saturation_would_show(t: int, n: int, k: int, sign: int) -> None:
    """All products at +-127^2: kernels that saturate 16-bit intermediates, or float32 sums that are too long, fail."""
    x, w = torch.full((t, k), 127, dtype=torch.int8), torch.full((n, k), 127 * sign, dtype=torch.int8)
    assert np.array_equal(reference.int32_product(x, w).numpy(), np.full((t, n), sign * k * 127 * 127))


def test_the_chunk_length_is_the_longest_exact_one() -> None:
    """One more product than EXACT_F32_K passes 2^24, beyond which float32 skips odd integers."""
    assert EXACT_F32_K * 127**2 <= 2**24 < (EXACT_F32_K + 1) * 127**2


def test_torch_int_mm_agrees_where_it_is_exact() -> None:
    """torch's own int8 GEMM, as second oracle; on CPUs it runs through oneDNN, so its exactness is checked first."""
    ones = torch.full((17, 256), 127, dtype=torch.int8)
    if not bool((torch._int_mm(ones, ones.T) == 256 * 127**2).all()):
        pytest.fail(f"torch._int_mm saturates on this CPU ({torch.backends.cpu.get_cpu_capability()})")
    for t, n, k in SIZES[:-1]:
        x, w = random_int8(k, t, k), random_int8(k + 1, n, k)
        assert torch.equal(torch._int_mm(x, w.T), reference.int32_product(x, w))


@pytest.mark.parametrize("product", [reference.int32_product, int_mm.int32_product])
def test_a_sum_that_may_overflow_is_refused(product: reference.Product) -> None:
    long = torch.zeros((1, MAX_INT32_K + 1), dtype=torch.int8)
    with pytest.raises(ShapeMismatch, match="133144"):
        product(long, long)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("module", [reference, int_mm])
def test_epilogue_against_float64(module: object, groups: int, with_bias: bool) -> None:
    t, n, k = 5, 7, 33
    rng = np.random.default_rng(3)
    x, w = random_int8(1, t, k), random_int8(2, n, k)
    x_scale = rng.uniform(1e-3, 1, (t, groups)).astype(np.float32)
    w_scale = rng.uniform(1e-3, 1, (n, 1)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32) if with_bias else None
    got = module.w8a8_gemm(  # type: ignore[attr-defined]
        x,
        torch.from_numpy(x_scale),
        w,
        torch.from_numpy(w_scale),
        None if bias is None else torch.from_numpy(bias),
        torch.float32,
    )
    real_x = x.numpy().astype(np.float64) * np.repeat(x_scale.astype(np.float64), k // groups, axis=1)
    want = real_x @ (w.numpy().astype(np.float64) * w_scale).T + (0 if bias is None else bias)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_every_row_of_the_registry_can_be_called_or_says_why_not() -> None:
    for row in registry.ROWS:
        if registry.has(row.op, row.family, row.layout):
            kernel = registry.find(row.op, row.family, row.layout)
            assert callable(kernel.run)
            assert kernel.name
        else:
            assert any(line.startswith(f"{row.op} by {row.name}: ") for line in registry.skipped(row.family))


FEW = {"expert_gemm", "quantize_gemm"}


def test_the_cpu_has_a_kernel_for_every_operation_but_the_shortcut_for_few_tokens() -> None:
    for op in {row.op for row in registry.ROWS} - FEW:
        assert registry.find(op, "cpu").name in ("torch", "f32-chunks")
    assert not any(registry.has(op, "cpu") for op in FEW)


def test_an_unknown_layout_names_the_choices() -> None:
    with pytest.raises(UsageError, match="w8a8_gemm plain on cpu"):
        registry.find("w8a8_gemm", "cpu", "marlin_k64")
