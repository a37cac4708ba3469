"""Packers and readers of native formats that share nothing with quantkit: numpy in float64 and ml_dtypes.

Each packer takes a weight `[.., N, K]` and returns its tensors by part and what they decode to, float32. A product of
a float64 code and a float64 scale is exact and rounds to float32 once, so decoded values must match bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from quantkit.checkpoint.formats import FormatContext, recognise
from quantkit.spec.tensorfile import TensorInfo, dtype_name

Packed = tuple[dict[str, torch.Tensor], np.ndarray]
E2M1 = ml_dtypes.float4_e2m1fn


def as_torch(array: np.ndarray) -> torch.Tensor:
    """Torch tensor of a numpy array, ml_dtypes' types included."""
    names = {
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e8m0fnu": torch.float8_e8m0fnu,
        "bfloat16": torch.bfloat16,
    }
    array = np.ascontiguousarray(array)
    if array.dtype.name in names:
        raw = array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint8)
        return torch.from_numpy(raw.copy()).view(names[array.dtype.name])
    return torch.from_numpy(array.copy())


def spread(scale: np.ndarray, shape: tuple[int, ...], rows: int, columns: int) -> np.ndarray:
    """Block scales repeated over their blocks and cropped to `shape`."""
    full = scale.astype(np.float64).repeat(rows, -2).repeat(columns, -1)
    return full[..., : shape[-2], : shape[-1]]


def block_absmax(w: np.ndarray, rows: int, columns: int) -> np.ndarray:
    n, k = w.shape[-2:]
    pad = [(0, 0)] * (w.ndim - 2) + [(0, -n % rows), (0, -k % columns)]
    padded = np.pad(np.abs(w), pad)
    shape = (*w.shape[:-2], padded.shape[-2] // rows, rows, padded.shape[-1] // columns, columns)
    return np.maximum(padded.reshape(shape).max((-3, -1)), 1e-12)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """4-bit codes `[.., K]` -> bytes `[.., K/2]`, the first value in the low nibble."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def fp8_block(w: np.ndarray, rows: int = 128, columns: int = 128, dtype: type = np.float32) -> Packed:
    scale = (block_absmax(w, rows, columns) / 448).astype(dtype)
    spread_scale = spread(scale, w.shape, rows, columns)
    codes = (w / spread_scale).astype(ml_dtypes.float8_e4m3fn)
    decoded = (codes.astype(np.float64) * spread_scale).astype(np.float32)
    return {"weight": as_torch(codes), "weight_scale_inv": as_torch(scale)}, decoded


def fp8_block_e8m0(w: np.ndarray) -> Packed:
    """As DeepSeek-V4 has it: blocks of 128 x 128 whose scales are powers of two, called `scale`."""
    exponents = (127 + np.ceil(np.log2(block_absmax(w, 128, 128) / 448))).astype(np.uint8)
    scale = spread(e8m0(exponents), w.shape, 128, 128)
    codes = (w / scale).astype(ml_dtypes.float8_e4m3fn)
    decoded = (codes.astype(np.float64) * scale).astype(np.float32)
    return {"weight": as_torch(codes), "scale": as_torch(exponents.view(ml_dtypes.float8_e8m0fnu))}, decoded


def fp8_channel(w: np.ndarray) -> Packed:
    parts, decoded = fp8_block(w, 1, w.shape[-1])
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}, decoded


def fp8_tensor(w: np.ndarray) -> Packed:
    scale = np.float32(np.abs(w).max() / 448)
    codes = (w / scale).astype(ml_dtypes.float8_e4m3fn)
    parts = {"weight": as_torch(codes), "weight_scale": torch.tensor(scale), "input_scale": torch.tensor([0.5])}
    return parts, (codes.astype(np.float64) * np.float64(scale)).astype(np.float32)


def mx_exponents(w: np.ndarray, largest: float) -> np.ndarray:
    """E8M0 bytes `[.., N, ceil(K/32)]` such that the largest value of a group stays below `largest`."""
    return (127 + np.ceil(np.log2(block_absmax(w, 1, 32) / largest))).astype(np.uint8)


def e8m0(bytes_: np.ndarray) -> np.ndarray:
    return bytes_.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)


def mxfp8(w: np.ndarray) -> Packed:
    exponents = mx_exponents(w, 448.0)
    scale = spread(e8m0(exponents), w.shape, 1, 32)
    codes = (w / scale).astype(ml_dtypes.float8_e4m3fn)
    decoded = (codes.astype(np.float64) * scale).astype(np.float32)
    return {"weight": as_torch(codes), "weight_scale_inv": as_torch(exponents)}, decoded


def _mxfp4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    exponents = mx_exponents(w, 6.0)
    scale = spread(e8m0(exponents), w.shape, 1, 32)
    values = (w / scale).astype(E2M1)
    return pack_nibbles(values.view(np.uint8)), exponents, (values.astype(np.float64) * scale).astype(np.float32)


def mxfp4_blocks(w: np.ndarray) -> Packed:
    packed, exponents, decoded = _mxfp4(w)
    blocks = packed.reshape(*exponents.shape, 16)
    return {"blocks": as_torch(blocks), "scales": as_torch(exponents)}, decoded


def mxfp4_packed(w: np.ndarray) -> Packed:
    packed, exponents, decoded = _mxfp4(w)
    shape = torch.tensor(w.shape)
    return {"weight_packed": as_torch(packed), "weight_scale": as_torch(exponents), "weight_shape": shape}, decoded


def fp4_in_i8(w: np.ndarray) -> Packed:
    packed, exponents, decoded = _mxfp4(w)
    scale = as_torch(exponents.view(ml_dtypes.float8_e8m0fnu))
    return {"weight": as_torch(packed.view(np.int8)), "scale": scale}, decoded


def int4_packed(w: np.ndarray, group: int = 32) -> Packed:
    scale = (block_absmax(w, 1, group) / 7).astype(ml_dtypes.bfloat16)
    spread_scale = spread(scale, w.shape, 1, group)
    codes = np.clip(np.round(w / spread_scale), -8, 7).astype(np.int8)  # integers have one zero
    pad = [(0, 0)] * (w.ndim - 1) + [(0, -w.shape[-1] % 8)]
    words = pack_nibbles(np.pad((codes + 8).astype(np.uint8), pad, constant_values=8)).view(np.uint32).view(np.int32)
    parts = {"weight_packed": as_torch(words), "weight_scale": as_torch(scale), "weight_shape": torch.tensor(w.shape)}
    return parts, (codes * spread_scale).astype(np.float32)


def int8_channel(w: np.ndarray) -> Packed:
    scale = (block_absmax(w, 1, w.shape[-1]) / 127).astype(np.float32)
    codes = np.clip(np.round(w / scale), -127, 127).astype(np.int8)
    decoded = (codes.astype(np.float64) * scale.astype(np.float64)).astype(np.float32)
    return {"weight": as_torch(codes), "weight_scale": as_torch(scale)}, decoded


PACKERS: dict[str, Callable[[np.ndarray], Packed]] = {
    "fp8-block": fp8_block,
    "fp8-channel": fp8_channel,
    "fp8-tensor": fp8_tensor,
    "mxfp8": mxfp8,
    "mxfp4-blocks": mxfp4_blocks,
    "mxfp4-packed": mxfp4_packed,
    "fp4-in-i8": fp4_in_i8,
    "int-packed": int4_packed,
    "int8-channel": int8_channel,
}

CONFIGS: dict[str, dict[str, object]] = {
    "fp8-block": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "fp8-channel": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "fp8-tensor": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, 32]},
    "mxfp4-blocks": {"quant_method": "mxfp4"},
    "mxfp4-packed": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "fp4-in-i8": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "int-packed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}},
    },
    "int8-channel": {"quant_method": "compressed-tensors", "format": "int-quantized"},
}
"""`quantization_config` of a checkpoint in each format."""


def weight(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Values over many magnitudes, with zeros and negative zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 3, shape))
    values[rng.random(shape) < 0.05] = -0.0
    return values


def infos(parts: dict[str, torch.Tensor], module: str = "m") -> dict[str, TensorInfo]:
    found = {}
    for part, tensor in parts.items():
        found[part] = TensorInfo(f"{module}.{part}", dtype_name(tensor.dtype), tuple(tensor.shape), 0, tensor.nbytes)
    return found


class Memory:
    """Stored tensors in memory, read as `Source` reads them; `read_rows` notes what was read."""

    def __init__(self, parts: dict[str, torch.Tensor], context: FormatContext | None = None) -> None:
        self.parts, self.stored = parts, infos(parts)
        self.context = context or FormatContext()
        self.format = recognise("m.weight", self.stored, self.context)
        self.read_rows: dict[str, int] = {}

    def read(self, part: str, rows: tuple[int, int] | None) -> torch.Tensor:
        tensor = self.parts[part]
        found = tensor if rows is None else tensor[rows[0] : rows[1]]
        self.read_rows[part] = found.shape[0] if found.ndim else 1
        return found.clone()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.format.shape(self.stored, self.read, self.context)

    def decode(self, rows: tuple[int, int] | None = None) -> np.ndarray:
        self.read_rows = {}
        return self.format.decode(self.stored, self.read, rows, self.context).numpy()


def assert_same_bits(actual: np.ndarray, wanted: np.ndarray) -> None:
    """Equal float32 arrays, signs of zeros included."""
    assert actual.dtype == wanted.dtype == np.float32
    assert actual.shape == wanted.shape
    np.testing.assert_array_equal(actual.view(np.int32), wanted.view(np.int32))


TINY = Path(__file__).parents[1] / "models" / "tiny-deepseek-v3"
