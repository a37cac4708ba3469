"""FP8 per output channel or per tensor (compressed-tensors `float-quantized`, and others' static FP8).

F8_E4M3 `weight [.., N, K]`; `weight_scale` is `[.., N, 1]` or `[N]` (channel), or holds one number (tensor), per
expert `[E, 1, 1]` where experts are stacked. One number may also be called `weight_scale_inv` (multiplied all the
same). An `input_scale` or `activation_scale` of static activations may stand beside it; it says nothing about the
weight and is not used.
"""

from __future__ import annotations

from torch import Tensor

from quantkit.checkpoint.formats.base import (
    FLOATS,
    NativeFormat,
    ReadPart,
    Rows,
    Stored,
    decode_e4m3,
    decode_scale,
    require_finite,
    scale_info,
    scale_part,
)
from quantkit.checkpoint.formats.context import FormatContext

ACTIVATION_SCALES = {"input_scale": FLOATS, "activation_scale": FLOATS}


def is_tensor(stored: Stored) -> bool:
    """Whether one scale serves the whole weight (of each expert)."""
    weight, scale = stored["weight"].shape, scale_info(stored)
    return scale.numel == 1 or (len(weight) > 2 and scale.shape == (*weight[:-2], 1, 1))


def is_channel(stored: Stored) -> bool:
    """Whether there is one scale per output channel; a single channel counts as tensor."""
    weight, scale = stored["weight"].shape, scale_info(stored)
    return not is_tensor(stored) and (
        (len(weight) >= 2 and scale.shape == (*weight[:-1], 1)) or (len(weight) == 2 and scale.shape == weight[:1])
    )


def _channel_misfit(stored: Stored, _context: FormatContext) -> str:
    return "" if is_channel(stored) else _says(stored, [*stored["weight"].shape[:-1], 1], "output channel")


def _tensor_misfit(stored: Stored, _context: FormatContext) -> str:
    of_block = scale_part(stored) != "weight_scale" and len(scale_info(stored).shape) >= 2
    return "" if is_tensor(stored) and not of_block else _says(stored, [1], "tensor")


def _says(stored: Stored, wanted: list[int], what: str) -> str:
    scale = scale_info(stored)
    return f"{scale.name} is {list(scale.shape)}, expected {wanted} for one scale per {what}"


def _decode_channel(stored: Stored, read: ReadPart, rows: Rows | None, _context: FormatContext) -> Tensor:
    info, part, start = stored["weight"], scale_part(stored), rows[0] if rows else 0
    scale = decode_scale(stored[part], read(part, rows), start)
    if len(stored[part].shape) == 1:
        scale = scale[:, None]
    return require_finite(decode_e4m3(read("weight", rows)).mul_(scale), info.name, start)


def _decode_tensor(stored: Stored, read: ReadPart, rows: Rows | None, _context: FormatContext) -> Tensor:
    info, part, start = stored["weight"], scale_part(stored), rows[0] if rows else 0
    if stored[part].numel == 1:
        scale = decode_scale(stored[part], read(part, None)).reshape(())
    else:
        scale = decode_scale(stored[part], read(part, rows), start)
    return require_finite(decode_e4m3(read("weight", rows)).mul_(scale), info.name, start)


CHANNEL = NativeFormat(
    name="fp8-channel",
    payload=("weight", frozenset({"F8_E4M3"})),
    scales=("weight_scale",),
    scale_dtypes=FLOATS,
    optional=ACTIVATION_SCALES,
    declared_as=frozenset({"float-quantized", "naive-quantized", "fbgemm_fp8", "fp8"}),
    misfit=_channel_misfit,
    decode=_decode_channel,
)

TENSOR = NativeFormat(
    name="fp8-tensor",
    payload=("weight", frozenset({"F8_E4M3"})),
    scales=("weight_scale", "weight_scale_inv"),
    scale_dtypes=FLOATS,
    optional=ACTIVATION_SCALES,
    declared_as=frozenset({"float-quantized", "naive-quantized", "fp8", "modelopt"}),
    misfit=_tensor_misfit,
    decode=_decode_tensor,
)
