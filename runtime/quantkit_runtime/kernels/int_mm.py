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
    more_k, more_n = -k % MULTIPLE, -n % MULTIPLE
    x = pad(x_TK, (0, more_k, 0, max(0, MIN_ROWS - t)))
    w = pad(w_NK, (0, more_k, 0, more_n))
    return torch._int_mm(x.contiguous(), w.contiguous().T)[:t, :n]


def w8a8_gemm(
    x_TK: Tensor, x_scale: Tensor, w_NK: Tensor, w_scale_N1: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `kernels.registry`."""
    return scaled_product(int32_product, x_TK, x_scale, w_NK, w_scale_N1, bias_N, out_dtype)
