"""The INT8 arithmetic: scale, round, dequantize. The rounding rule stands here and nowhere else.

Shape suffixes: N output channels, K input channels, T tokens, G groups of K.

Symmetric INT8 as the compressed-tensors ``int-quantized`` form defines it: ``q = clamp(round(x / s), -127, 127)``
with round half to even and ``s = absmax / 127`` in float32. -128 is not used, so that the range is symmetric and a
negated tensor quantizes to negated values.
"""

from __future__ import annotations

import torch
from torch import Tensor

QMAX = 127
SCALE_FLOOR = torch.finfo(torch.float32).tiny * QMAX
"""Smallest scale (1.49e-36): an all-zero channel gets it, so that 0 / s is 0 and 1 / s is finite in float32."""

MAX_INT32_K = (2**31 - 1) // (QMAX * QMAX)
"""Longest sum of int8 x int8 products that cannot overflow int32: 133,144."""

EXACT_F32_K = 2**24 // (QMAX * QMAX)
"""Longest sum of int8 x int8 products that float32 represents exactly in any order: 1,040."""


def scale_from_absmax(absmax: Tensor) -> Tensor:
    """Scale of a slice whose largest magnitude is `absmax`; any shape, any float dtype in, float32 out."""
    return (absmax.float() / QMAX).clamp_min(SCALE_FLOOR)


def channel_scales(w_NK: Tensor) -> Tensor:
    """Per-output-channel scales of a weight `[..., N, K]`, or per-token ones of rows -> float32 `[..., N, 1]`."""
    # two passes that only read are faster than writing and reading |w|; NaN and infinity survive both
    low, high = w_NK.amin(dim=-1, keepdim=True), w_NK.amax(dim=-1, keepdim=True)
    return scale_from_absmax(torch.maximum(high, -low))


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize `x` with a float32 `scale` that broadcasts against it -> int8 of x's shape."""
    return _rounded(x.float() / scale).to(torch.int8)


def quotient_scratch(x: Tensor, scale: Tensor) -> Tensor:
    """The values of `quantize`, but in a float32 `x` that the caller gives up: it is overwritten."""
    return _rounded(x.div_(scale))


def represented(x: Tensor, scale: Tensor) -> Tensor:
    """`dequantize(quantize(x, scale), scale)`, without codes in between."""
    return _rounded(x.float() / scale).mul_(scale)


def rounding_error(x: Tensor, scale: Tensor, *, out: Tensor) -> Tensor:
    """What rounding adds to `x`, ``dequantize(quantize(x, scale), scale) - x``, bit for bit, without codes in between.

    Args:
        x: float32.
        scale: of `scale_from_absmax` of slices of `x`, which clips nothing; it broadcasts against x.
        out: float32 of x's shape, overwritten and returned.
    """
    return torch.div(x, scale, out=out).round_().mul_(scale).sub_(x)


def _rounded(quotient: Tensor) -> Tensor:
    return quotient.round_().clamp_(-QMAX, QMAX)


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """Float32 value of int8 `q` under `scale`, which broadcasts against it."""
    return q.float() * scale


def quantize_tokens(x_TK: Tensor, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize activations per token, or per token and group of K, as the engines do at run time.

    Args:
        x_TK: activations `[..., K]`, float.
        group_size: length of a group of K; it must divide K. None: one scale per token.

    Returns:
        int8 of x's shape, and float32 scales `[..., 1]` or `[..., K / group_size]`.
    """
    if group_size is None:
        scale = channel_scales(x_TK)
        return quantize(x_TK, scale), scale
    grouped = x_TK.unflatten(-1, (-1, group_size))
    scale = channel_scales(grouped)
    return quantize(grouped, scale).flatten(-2), scale.squeeze(-1)
