"""MXFP8: F8_E4M3 `weight [.., N, K]` with one E8M0 scale per 32 inputs, `[.., N, ceil(K / 32)]`.

Scales are bytes (U8 or F8_E8M0), 2^(byte - 127); 255 is NaN and refused. Spellings: `weight_scale_inv` (MiniMax-M3),
`weight_scale` (compressed-tensors `mxfp8-quantized`).
"""

from __future__ import annotations

from torch import Tensor

from quantkit.checkpoint.formats.base import (
    E8M0,
    NativeFormat,
    ReadPart,
    Rows,
    Stored,
    decode_e4m3,
    decode_scale,
    expected,
    multiply_groups,
    require_finite,
    scale_info,
    scale_part,
)
from quantkit.checkpoint.formats.context import FormatContext

GROUP = 32
"""Values that share a scale in every MX format (OCP Microscaling Formats v1.0)."""


def fits(stored: Stored) -> bool:
    """Whether dtype and shape of the scale are those of this format."""
    scale = scale_info(stored)
    return scale.dtype in E8M0 and len(stored["weight"].shape) >= 2 and scale.shape == _scale_shape(stored)


def _scale_shape(stored: Stored) -> tuple[int, ...]:
    shape = stored["weight"].shape
    return (*shape[:-1], -(-shape[-1] // GROUP)) if shape else ()


def _misfit(stored: Stored, _context: FormatContext) -> str:
    weight = stored["weight"]
    if len(weight.shape) < 2:
        return f"{weight.name} has {len(weight.shape)} dimensions, expected at least 2"
    return expected(stored, _scale_shape(stored), f"for groups of {GROUP}")


def _decode(stored: Stored, read: ReadPart, rows: Rows | None, _context: FormatContext) -> Tensor:
    part, start = scale_part(stored), rows[0] if rows else 0
    scale = decode_scale(stored[part], read(part, rows), start)
    values = multiply_groups(decode_e4m3(read("weight", rows)), scale, GROUP)
    return require_finite(values, stored["weight"].name, start)


FORMAT = NativeFormat(
    name="mxfp8",
    payload=("weight", frozenset({"F8_E4M3"})),
    scales=("weight_scale_inv", "weight_scale", "scale", "scale_inv"),
    scale_dtypes=E8M0,
    declared_as=frozenset({"mxfp8", "mxfp8-quantized", "fp8"}),
    misfit=_misfit,
    decode=_decode,
)
