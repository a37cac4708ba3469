"""INT8 per output channel, the compressed-tensors `int-quantized` form: I8 `weight [N, K]`, `weight_scale [N, 1]`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantkit.arithmetic import dequantize
from quantkit.checkpoint.formats.base import NativeFormat, ReadPart
from quantkit.spec.tensorfile import TensorInfo


def _decode(stored: Mapping[str, TensorInfo], read: ReadPart, rows: tuple[int, int] | None) -> Tensor:
    return dequantize(read("weight", rows), read("weight_scale", rows).float())


FORMAT = NativeFormat(
    name="int8-channel",
    parts={"weight": frozenset({"I8"}), "weight_scale": frozenset({"F32", "BF16", "F16"})},
    shape=lambda stored: stored["weight"].shape,
    decode=_decode,
    dtype=lambda stored: "F32",
)
