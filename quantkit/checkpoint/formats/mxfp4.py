"""MXFP4 in its three spellings: two E2M1 values a byte, low nibble first, one E8M0 scale per 32 values.

| row | payload | scale | seen in |
|---|---|---|---|
| mxfp4-blocks | U8 `X_blocks [.., N, K/32, 16]` | U8 `X_scales [.., N, K/32]` | gpt-oss |
| mxfp4-packed | U8 `weight_packed [.., N, K/2]` | U8 `weight_scale [.., N, K/32]` | compressed-tensors |
| fp4-in-i8 | I8 `weight [.., N, K/2]` | F8_E8M0 `scale [.., N, K/32]` | reported for DeepSeek-V4 |

In the last row the I8 are pairs of nibbles: I8 does not mean int8-quantized. The experts of gpt-oss are `[E, N, K]`
in this form although their BF16 form is transposed.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from quantkit.checkpoint.formats.base import (
    E8M0,
    NativeFormat,
    ReadPart,
    Rows,
    Shape,
    Stored,
    decode_nibbles,
    decode_scale,
    expected,
    multiply_groups,
    nibble_table,
    require_finite,
    scale_part,
)
from quantkit.checkpoint.formats.context import FormatContext
from quantkit.checkpoint.formats.int_packed import require_weight_shape
from quantkit.checkpoint.formats.mxfp8 import GROUP

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""Values of the 16 E2M1 codes (OCP Microscaling Formats v1.0, 5.3.3)."""


@cache
def _table() -> Tensor:
    return nibble_table(E2M1)


def decode_e2m1(packed: Tensor) -> Tensor:
    """Bytes `[..., K/2]` -> float32 `[..., K]`."""
    return decode_nibbles(_table(), packed)


def _flat_shape(payload: str, stored: Stored) -> Shape:
    shape = stored[payload].shape
    return (*shape[:-1], shape[-1] * 2)


def _decode_flat(payload: str, stored: Stored, read: ReadPart, rows: Rows | None) -> Tensor:
    part, start = scale_part(stored), rows[0] if rows else 0
    scale = decode_scale(stored[part], read(part, rows), start)
    values = multiply_groups(decode_e2m1(read(payload, rows)), scale, GROUP)
    return require_finite(values, stored[payload].name, start)


def _flat_misfit(payload: str, stored: Stored) -> str:
    info = stored[payload]
    if len(info.shape) < 2:
        return f"{info.name} has {len(info.shape)} dimensions, expected at least 2"
    k = info.shape[-1] * 2
    if k % GROUP:
        return f"{info.name} has {k} values a row, expected a multiple of {GROUP}"
    return expected(stored, (*info.shape[:-1], k // GROUP), f"for groups of {GROUP} values")


def _blocks_misfit(stored: Stored, _context: FormatContext) -> str:
    info = stored["blocks"]
    if len(info.shape) < 3 or info.shape[-1] != GROUP // 2:
        return f"{info.name} is {list(info.shape)}, expected [.., N, K/{GROUP}, {GROUP // 2}]"
    return expected(stored, info.shape[:-1], f"for blocks of {GROUP} values")


def _blocks_shape(stored: Stored, _read: ReadPart, _context: FormatContext) -> Shape:
    *outer, groups, _ = stored["blocks"].shape
    return (*outer, groups * GROUP)


def _decode_blocks(stored: Stored, read: ReadPart, rows: Rows | None, _context: FormatContext) -> Tensor:
    start = rows[0] if rows else 0
    scale = decode_scale(stored["scales"], read("scales", rows), start)
    values = decode_e2m1(read("blocks", rows)).mul_(scale[..., None]).flatten(-2)
    return require_finite(values, stored["blocks"].name, start)


def _decode_packed(stored: Stored, read: ReadPart, rows: Rows | None, _context: FormatContext) -> Tensor:
    if "weight_shape" in stored:
        require_weight_shape(stored, read, _flat_shape("weight_packed", stored))
    return _decode_flat("weight_packed", stored, read, rows)


BLOCKS = NativeFormat(
    name="mxfp4-blocks",
    payload=("blocks", frozenset({"U8"})),
    scales=("scales",),
    scale_dtypes=E8M0,
    declared_as=frozenset({"mxfp4"}),
    oriented=True,
    misfit=_blocks_misfit,
    shape=_blocks_shape,
    decode=_decode_blocks,
)

PACKED = NativeFormat(
    name="mxfp4-packed",
    payload=("weight_packed", frozenset({"U8"})),
    scales=("weight_scale",),
    scale_dtypes=E8M0,
    optional={"weight_shape": frozenset({"I64", "I32"})},
    declared_as=frozenset({"mxfp4", "mxfp4-pack-quantized"}),
    oriented=True,
    misfit=lambda stored, _context: _flat_misfit("weight_packed", stored),
    shape=lambda stored, _read, _context: _flat_shape("weight_packed", stored),
    decode=_decode_packed,
)

IN_I8 = NativeFormat(
    name="fp4-in-i8",
    payload=("weight", frozenset({"I8"})),
    scales=("scale", "weight_scale", "weight_scale_inv"),
    scale_dtypes=frozenset({"F8_E8M0"}),
    declared_as=frozenset({"fp8", "fp4", "mxfp4"}),
    oriented=True,
    misfit=lambda stored, _context: _flat_misfit("weight", stored),
    shape=lambda stored, _read, _context: _flat_shape("weight", stored),
    decode=lambda stored, read, rows, _context: _decode_flat("weight", stored, read, rows),
)
