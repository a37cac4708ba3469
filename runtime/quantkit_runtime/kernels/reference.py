"""The exact INT8 product in plain torch: the reference of every other kernel, and the CPU's kernel.

int8 x int8 products are integers of at most 127^2, and float32 holds every integer up to 2^24. A float32 GEMM over at
most `EXACT_F32_K` = 1,040 inputs is therefore exact in any order of summation, and the chunks add up in int32. The
int8 GEMMs of oneDNN and fbgemm are not used: without VNNI they saturate 16-bit intermediates silently.

Shape suffixes: T tokens, N output channels, K input channels, G groups of K.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantkit.arithmetic import EXACT_F32_K, MAX_INT32_K
from quantkit_runtime.errors import ShapeMismatch

Product = Callable[[Tensor, Tensor], Tensor]
"""(x int8 [T, K], w int8 [N, K]) -> int32 [T, N], exact."""


def check_accumulator(k: int, name: str = "a weight") -> None:
    """Refuse a K whose sum could overflow int32.

    Raises:
        ShapeMismatch: K > 133,144.
    """
    if k > MAX_INT32_K:
        raise ShapeMismatch(
            f"{name} has {k} inputs; an int32 accumulator is safe up to {MAX_INT32_K}",
            "split this weight along its inputs (tensor parallelism) or keep it unquantized",
        )


def int32_product(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """Exact `x @ w.T` of int8 matrices -> int32 `[T, N]`."""
    k = x_TK.shape[1]
    check_accumulator(k)
    if k <= EXACT_F32_K:
        return (x_TK.float() @ w_NK.float().T).to(torch.int32)
    total = x_TK.new_zeros((x_TK.shape[0], w_NK.shape[0]), dtype=torch.int32)
    for start in range(0, k, EXACT_F32_K):
        chunk = slice(start, start + EXACT_F32_K)
        total += (x_TK[:, chunk].float() @ w_NK[:, chunk].float().T).to(torch.int32)
    return total


def scaled_product(
    product: Product,
    x_TK: Tensor,
    x_scale: Tensor,
    w_NK: Tensor,
    w_scale_N1: Tensor,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`product` with the epilogue of the `w8a8` schemes, in float32.

    Per token: `acc * x_scale * w_scale + bias`. Per group: int32 sums of each group, scaled by the group's `x_scale`
    and added in float32, then `* w_scale + bias`.
    """
    groups = x_scale.shape[1]
    if groups == 1:
        out = product(x_TK, w_NK).float() * x_scale
    else:
        size = x_TK.shape[1] // groups
        out = x_scale.new_zeros((x_TK.shape[0], w_NK.shape[0]))
        for group in range(groups):
            part = slice(group * size, (group + 1) * size)
            out += product(x_TK[:, part], w_NK[:, part]).float() * x_scale[:, group : group + 1]
    out *= w_scale_N1.T
    if bias_N is not None:
        out += bias_N.float()
    return out.to(out_dtype)


def w8a8_gemm(
    x_TK: Tensor, x_scale: Tensor, w_NK: Tensor, w_scale_N1: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See `kernels.registry`."""
    return scaled_product(int32_product, x_TK, x_scale, w_NK, w_scale_N1, bias_N, out_dtype)
