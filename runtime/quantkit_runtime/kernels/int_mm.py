"""`torch._int_mm` on cards (cuBLASLt, hipBLASLt): the plain fallback where no tuned kernel serves.

It wants more than 16 rows and N, K in multiples of 8; smaller and odd sizes are padded with zeros, which add nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit_runtime.kernels.reference import check_accumulator, scaled_product

MIN_ROWS = 17
MULTIPLE = 8


def int32_product(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """Exact `x @ w.T` of int8 matrices -> int32 `[T, N]`."""
    (t, k), n = x_TK.shape, w_NK.shape[0]
    check_accumulator(k)
    x = _padded(x_TK, max(t, MIN_ROWS), k + -k % MULTIPLE)
    w = _padded(w_NK, n + -n % MULTIPLE, k + -k % MULTIPLE)
    return torch._int_mm(x, w.T)[:t, :n]


def _padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix, contiguous and of this size; a weight that fits is not copied."""
    more_rows, more_columns = rows - matrix.shape[0], columns - matrix.shape[1]
    return (pad(matrix, (0, more_columns, 0, more_rows)) if more_rows or more_columns else matrix).contiguous()


def w8a8_gemm(
    x_TK: Tensor, x_scale: Tensor, w_NK: Tensor, w_scale_N1: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `kernels.registry`."""
    return scaled_product(int32_product, x_TK, x_scale, w_NK, w_scale_N1, bias_N, out_dtype)
