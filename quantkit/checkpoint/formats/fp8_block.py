"""FP8 in blocks (DeepSeek-V3 and its followers): F8_E4M3 `weight [.., N, K]`, one scale per block of `bn x bk`.

The scale `[.., ceil(N / bn), ceil(K / bk)]` is multiplied (`weight_scale_inv` is the inverse of what quantization
multiplied by); blocks at the edges are cropped. Spellings: `weight_scale_inv` (F32 or BF16), `weight_scale`
(compressed-tensors, strategy "block"), `scale` (E8M0, reported for DeepSeek-V4). The block size is the config's, else
it follows from the shapes; stacked experts may stand before N.
"""

from __future__ import annotations

from torch import Tensor

from quantkit.checkpoint.formats import mxfp8
from quantkit.checkpoint.formats.base import (
    FLOATS,
    NativeFormat,
    ReadPart,
    Rows,
    Stored,
    decode_e4m3,
    decode_scale,
    group_rows,
    multiply_groups,
    require_finite,
    scale_info,
    scale_part,
)
from quantkit.checkpoint.formats.context import FormatContext
from quantkit.checkpoint.formats.fp8_channel import ACTIVATION_SCALES, is_channel, is_tensor

_LARGEST_BLOCK = 2**16


def block_size(stored: Stored, context: FormatContext) -> tuple[int, int] | None:
    """Rows and columns of a block; None when no block size explains the scale's shape.

    Without a config each side is the power of two `b` with `ceil(size / b)` scales. It is unique when there are two
    scales or more; a single scale covers the whole side.
    """
    weight, scale = stored["weight"].shape, scale_info(stored).shape
    if len(weight) < 2 or len(scale) != len(weight) or scale[:-2] != weight[:-2]:
        return None
    if context.block:
        fits = all(-(-size // b) == n for size, n, b in zip(weight[-2:], scale[-2:], context.block, strict=True))
        rows, columns = (min(b, max(size, 1)) for size, b in zip(weight[-2:], context.block, strict=True))
        return (rows, columns) if fits else None  # cut to the weight: a config may name any number
    rows, columns = (_side(size, n) for size, n in zip(weight[-2:], scale[-2:], strict=True))
    return (rows, columns) if rows and columns else None


def _side(size: int, scales: int) -> int:
    if scales == 1:
        return max(size, 1)
    powers = (1 << exponent for exponent in range(_LARGEST_BLOCK.bit_length()))
    return next((b for b in powers if -(-size // b) == scales), 0)


def _misfit(stored: Stored, context: FormatContext) -> str:
    scale = scale_info(stored)
    if mxfp8.fits(stored):
        return "its scales are those of mxfp8"
    if scale_part(stored) == "weight_scale" and (is_channel(stored) or is_tensor(stored)):
        return "its scales are those of fp8-channel or fp8-tensor"
    if block_size(stored, context):
        return ""
    weight = stored["weight"].shape
    if len(weight) < 2:
        return f"{stored['weight'].name} has {len(weight)} dimensions, expected at least 2"
    rows, columns = context.block or (128, 128)
    wanted = [*weight[:-2], -(-weight[-2] // rows), -(-weight[-1] // columns)]
    origin = "of config.json" if context.block else "(config.json names none)"
    return f"{scale.name} is {list(scale.shape)}, expected {wanted} for blocks of {rows} x {columns} {origin}"


def _decode(stored: Stored, read: ReadPart, rows: Rows | None, context: FormatContext) -> Tensor:
    info, part, size = stored["weight"], scale_part(stored), block_size(stored, context)
    assert size is not None
    start = rows[0] if rows else 0
    values = decode_e4m3(read("weight", rows))
    if len(info.shape) > 2:  # rows are experts
        scale = decode_scale(stored[part], read(part, rows), start)
        scale = scale.repeat_interleave(size[0], -2)[..., : info.shape[-2], :]
    else:
        scale_rows = group_rows(rows, size[0], info.shape[0])
        scale = decode_scale(stored[part], read(part, scale_rows), scale_rows[0])
        skip = start - scale_rows[0] * size[0]
        scale = scale.repeat_interleave(size[0], 0)[skip : skip + values.shape[0]]
    return require_finite(multiply_groups(values, scale, size[1]), info.name, start)


FORMAT = NativeFormat(
    name="fp8-block",
    payload=("weight", frozenset({"F8_E4M3"})),
    scales=("weight_scale_inv", "weight_scale", "scale", "scale_inv"),
    scale_dtypes=FLOATS | {"F8_E8M0"},
    optional=ACTIVATION_SCALES,
    declared_as=frozenset({"fp8", "float-quantized", "naive-quantized"}),
    misfit=_misfit,
    decode=_decode,
)
