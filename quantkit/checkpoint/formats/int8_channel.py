"""INT8 per output channel, the compressed-tensors `int-quantized` form.

I8 `weight [.., N, K]`, `weight_scale [.., N, 1]`.
"""

from __future__ import annotations

from torch import Tensor

from quantkit.arithmetic import dequantize
from quantkit.checkpoint.formats.base import (
    FLOATS,
    NativeFormat,
    ReadPart,
    Rows,
    Stored,
    decode_scale,
    expected,
    require_finite,
)
from quantkit.checkpoint.formats.context import FormatContext


def _misfit(stored: Stored, _context: FormatContext) -> str:
    shape = stored["weight"].shape
    if len(shape) < 2:
        return f"{stored['weight'].name} has {len(shape)} dimensions, expected at least 2"
    return expected(stored, (*shape[:-1], 1), "for one scale per output channel")


def _decode(stored: Stored, read: ReadPart, rows: Rows | None, _context: FormatContext) -> Tensor:
    first_row = rows[0] if rows else 0
    scale = decode_scale(stored["weight_scale"], read("weight_scale", rows), first_row)
    return require_finite(dequantize(read("weight", rows), scale), stored["weight"].name, first_row)


FORMAT = NativeFormat(
    name="int8-channel",
    payload=("weight", frozenset({"I8"})),
    scales=("weight_scale",),
    scale_dtypes=FLOATS,
    declared_as=frozenset({"int-quantized", "naive-quantized"}),
    misfit=_misfit,
    decode=_decode,
)
