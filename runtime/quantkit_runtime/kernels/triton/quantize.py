"""Fused quantize, one program per token: plain; residual + RMSNorm; silu(gate) * up.

A row lies in registers as `[groups, group]` (one group for a scale per token), is read once and written once. The
arithmetic is that of `quantkit.arithmetic` bit for bit: correctly rounded quotients, round half to even.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantkit.arithmetic import SCALE_FLOOR
from quantkit_runtime.kernels.reference import Normed
from quantkit_runtime.kernels.triton.overlap import after_previous, overlap
from quantkit_runtime.kernels.tuning import tuning

_FLOOR = tl.constexpr(SCALE_FLOOR)
HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 x 2^23: adding it leaves no bits for a fraction, and rounds half to even


@triton.jit
def round_half_even(value):
    """Of magnitudes below 2^22, without libdevice."""
    return (value + HALF_EVEN) - HALF_EVEN


@triton.jit
def absmax_scale(value):
    """Scales `[G]` of rows `[G, W]`."""
    # Bits of magnitudes order as integers with NaN above all, so that a NaN reaches the scale, as in torch.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    absmax = tl.max(bits, axis=1).to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(absmax, tl.full(absmax.shape, 127.0, tl.float32))
    scale = tl.where(scale == float("inf"), float("nan"), scale)  # or a score of -infinity could hide a key
    return tl.where(scale < _FLOOR, _FLOOR, scale)


@triton.jit
def rounded_quotient(value, scale):
    """int8 of `value / scale`, rounded half to even."""
    # A correctly rounded reciprocal and one step with the exact remainder give the correctly rounded quotient
    # (Markstein, IBM J. Res. Dev. 34, 1990) at a third of the cost of a division.
    inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    quotient = value * inverse
    quotient = tl.math.fma(tl.math.fma(-quotient, scale[:, None], value), inverse, quotient)
    # The sum's low bits are the integer in two's complement: no conversion, which is slow on some cards.
    return (quotient + HALF_EVEN).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _places(groups, GROUP: tl.constexpr, G: tl.constexpr, W: tl.constexpr):
    """Places `[G, W]` of a row's values, and which of them there are."""
    g, j = tl.arange(0, G), tl.arange(0, W)
    inside = (g[:, None] < groups) & (j[None, :] < GROUP)
    return g[:, None] * GROUP + j[None, :], inside


@triton.jit
def _store_quantized(q, scale, value, offs, inside, row, groups, G: tl.constexpr):
    s = absmax_scale(value)
    tl.store(q + offs, rounded_quotient(value, s), mask=inside)
    g = tl.arange(0, G)
    tl.store(scale + row * groups + g, s, mask=g < groups)


@triton.jit
def _quantize(
    x, q, scale, k, groups, GROUP: tl.constexpr, G: tl.constexpr, W: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    after_previous(OVERLAP)
    place, inside = _places(groups, GROUP, G, W)
    offs = row * k + place
    value = tl.load(x + offs, mask=inside, other=0.0).to(tl.float32)
    _store_quantized(q, scale, value, offs, inside, row, groups, G)


@triton.jit
def _norm_quantize(
    x, residual, weight, q, scale, normed, total, k, eps, groups,
    RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr, KEEP: tl.constexpr,
    GROUP: tl.constexpr, G: tl.constexpr, W: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    after_previous(OVERLAP)
    place, inside = _places(groups, GROUP, G, W)
    offs = row * k + place
    dtype = x.dtype.element_ty
    value = tl.load(x + offs, mask=inside, other=0.0)
    if RESIDUAL:
        added = value.to(tl.float32) + tl.load(residual + offs, mask=inside, other=0.0).to(tl.float32)
        value = added.to(dtype)
        tl.store(total + offs, value, mask=inside)
    value = value.to(tl.float32)
    mean = tl.sum(tl.sum(value * value, axis=1), axis=0) / k
    value = value * tl.rsqrt(mean + eps)
    w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        value = value * (1.0 + w)
    else:
        value = value.to(dtype).to(tl.float32) * w
    rounded = value.to(dtype)
    if KEEP:
        tl.store(normed + offs, rounded, mask=inside)
    _store_quantized(q, scale, rounded.to(tl.float32), offs, inside, row, groups, G)


@triton.jit
def _silu_mul_quantize(
    gate_up, q, scale, k, groups, GROUP: tl.constexpr, G: tl.constexpr, W: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    after_previous(OVERLAP)
    place, inside = _places(groups, GROUP, G, W)
    gate = tl.load(gate_up + row * 2 * k + place, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * k + k + place, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    value = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    _store_quantized(q, scale, value, row * k + place, inside, row, groups, G)


def quantize(x_TK: Tensor, group_size: int = 0, warps: int = 0) -> tuple[Tensor, Tensor]:
    """See `kernels.registry`; `warps` overrides the device's table."""
    x = x_TK.contiguous()
    q, scale, sizes = _outputs(x, x.shape[1], group_size, warps)
    if x.shape[0]:
        _quantize[(x.shape[0],)](x, q, scale, x.shape[1], scale.shape[1], **sizes)
    return q, scale


def norm_quantize(
    x_TK: Tensor,
    weight_K: Tensor,
    eps: float,
    residual_TK: Tensor | None = None,
    unit_offset: bool = False,
    group_size: int = 0,
    keep: bool = True,
) -> Normed:
    """See `kernels.registry`."""
    x = x_TK.contiguous()
    q, scale, sizes = _outputs(x, x.shape[1], group_size)
    normed = torch.empty_like(x) if keep else x
    residual = x if residual_TK is None else residual_TK.contiguous()
    total = x if residual_TK is None else torch.empty_like(x)
    if x.shape[0]:
        _norm_quantize[(x.shape[0],)](
            x, residual, weight_K, q, scale, normed, total, x.shape[1], eps, scale.shape[1],
            RESIDUAL=residual_TK is not None, UNIT_OFFSET=unit_offset, KEEP=keep, **sizes,
        )  # fmt: skip
    return Normed(q, scale, normed if keep else None, total)


def silu_mul_quantize(gate_up_TI: Tensor, group_size: int = 0, warps: int = 0) -> tuple[Tensor, Tensor]:
    """See `kernels.registry`; `warps` overrides the device's table."""
    x = gate_up_TI.contiguous()
    inner = x.shape[1] // 2
    q, scale, sizes = _outputs(x, inner, group_size, warps)
    if x.shape[0]:
        _silu_mul_quantize[(x.shape[0],)](x, q, scale, inner, scale.shape[1], **sizes)
    return q, scale


def _outputs(x: Tensor, k: int, group_size: int, warps: int = 0) -> tuple[Tensor, Tensor, dict[str, int]]:
    """int8 `[T, k]`, scales, and the kernel's sizes."""
    group = group_size or k
    groups = k // group
    q = x.new_empty((x.shape[0], k), dtype=torch.int8)
    scale = x.new_empty((x.shape[0], groups), dtype=torch.float32)
    g, w = triton.next_power_of_2(groups), triton.next_power_of_2(group)
    warps = warps or tuning().quantize_warps(g * w)
    return q, scale, {"GROUP": group, "G": g, "W": w, **overlap(), "num_warps": warps}
