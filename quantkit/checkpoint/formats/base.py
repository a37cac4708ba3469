"""The shape of a native format's row, and what rows share: reading scales, placing them, finite checks.

Shape suffixes: N output channels, K input channels, E experts, G scales along K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from quantkit.checkpoint.formats.context import FormatContext
from quantkit.errors import InputError
from quantkit.spec.tensorfile import TensorInfo

ReadPart = Callable[[str, tuple[int, int] | None], Tensor]
"""(part, rows along dimension 0 or None) -> the stored tensor."""

Shape = tuple[int, ...]
Rows = tuple[int, int]
Stored = Mapping[str, TensorInfo]

SCALE_PARTS = ("weight_scale", "weight_scale_inv", "scale", "scales", "scale_inv")
FLOATS = frozenset({"F32", "BF16", "F16"})
E8M0 = frozenset({"U8", "F8_E8M0"})


@dataclass(frozen=True)
class NativeFormat:
    """One way to store a weight.

    A row matches when its payload, exactly one of its scales and nothing else but optional parts are there, each with
    a dtype of the row, and when `misfit` finds nothing. Rows must exclude each other.

    Attributes:
        name: for reports.
        payload: part -> dtypes; the tensor that holds the values (one part).
        scales: parts, exactly one of which must be there; empty for a format without scales.
        scale_dtypes: dtypes that the scale may have.
        required: further parts that must be there -> their dtypes.
        optional: further parts that may be present -> their dtypes.
        declared_as: names in `quantization_config` (quant_method, or format of compressed-tensors) that announce it.
        oriented: the logical weight is `[.., N, K]` even where the architecture stores plain stacked experts
            transposed.
        misfit: what the shapes contradict, as "part is ..., expected ...", "" when they agree. Headers only.
        shape: logical shape; it may read a few bytes of the stored tensors where headers leave it open.
        decode: the logical weight in float, or rows of it along dimension 0; reads no more than these rows need.
        dtype: dtype of what `decode` returns, by the stored tensors (safetensors name).
    """

    name: str
    payload: tuple[str, frozenset[str]]
    decode: Callable[[Stored, ReadPart, Rows | None, FormatContext], Tensor]
    scales: tuple[str, ...] = ()
    scale_dtypes: frozenset[str] = frozenset()
    required: Mapping[str, frozenset[str]] = field(default_factory=dict)
    optional: Mapping[str, frozenset[str]] = field(default_factory=dict)
    declared_as: frozenset[str] = frozenset()
    oriented: bool = False
    misfit: Callable[[Stored, FormatContext], str] = lambda _stored, _context: ""
    shape: Callable[[Stored, ReadPart, FormatContext], Shape] = lambda stored, _read, _context: stored["weight"].shape
    dtype: Callable[[Stored], str] = lambda _stored: "F32"

    def problems(self, stored: Stored) -> list[str]:
        """What keeps parts and dtypes from being this format; empty when they are."""
        allowed = {self.payload[0]: self.payload[1], **dict.fromkeys(self.scales, self.scale_dtypes)}
        allowed |= {**self.required, **self.optional}
        found = [part for part in self.scales if part in stored]
        wrong = [
            f"{info.name} is {info.dtype}, expected {' or '.join(sorted(allowed[part]))}"
            for part, info in stored.items()
            if part in allowed and info.dtype not in allowed[part]
        ]
        wrong += [f"{info.name} does not belong to it" for part, info in stored.items() if part not in allowed]
        wrong += [f"{part} is missing" for part in (self.payload[0], *self.required) if part not in stored]
        if self.scales and not found:
            wrong.append(f"its scale is missing ({' or '.join(self.scales)})")
        if len(found) > 1:
            wrong.append(f"it has {len(found)} scales ({', '.join(found)})")
        return wrong


def scale_part(stored: Stored) -> str:
    """The part that is the scale; `stored` has matched a row, so there is exactly one."""
    return next(part for part in SCALE_PARTS if part in stored)


def scale_info(stored: Stored) -> TensorInfo:
    return stored[scale_part(stored)]


def expected(stored: Stored, shape: Shape, why: str) -> str:
    """A misfit's sentence for a scale whose shape should be `shape`; "" when it is."""
    scale = scale_info(stored)
    if scale.shape == shape:
        return ""
    return f"{scale.name} is {list(scale.shape)}, expected {list(shape)} {why}"


@cache
def e8m0_table() -> Tensor:
    """Float32 value of each E8M0 byte: 2^(byte - 127), byte 255 NaN (OCP Microscaling Formats v1.0, 5.4.1)."""
    return torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")], dtype=torch.float32)


@cache
def e4m3_table() -> Tensor:
    """Float32 value of each F8_E4M3 byte (the "fn" variant: no infinities, 0x7F and 0xFF are NaN)."""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()


@cache
def _e4m3_pairs() -> Tensor:
    """Both float32 values of each two bytes, seen as one float64: 512 KiB, which a core's cache holds."""
    one = e4m3_table()
    pairs = torch.stack((one.repeat(256), one.repeat_interleave(256)), 1)  # the first value is in the low byte
    return pairs.view(torch.float64).squeeze(1)


def lookup(table: Tensor, codes: Tensor) -> Tensor:
    """`table[codes]` for byte codes of any shape; int32 indices are three times as fast as int64 ones on a CPU."""
    return table.index_select(0, codes.contiguous().view(torch.uint8).flatten().int()).reshape(codes.shape)


def decode_e4m3(codes: Tensor) -> Tensor:
    """F8_E4M3 codes -> float32 of the same shape; two at a time, 4 times as fast as torch's own conversion."""
    flat = codes.contiguous().view(torch.uint8).flatten()
    if flat.numel() % 2 or flat.storage_offset() % 2:
        return lookup(e4m3_table(), codes)
    index = flat.view(torch.uint16).int()
    return _e4m3_pairs().index_select(0, index).view(torch.float32).reshape(codes.shape)


def nibble_table(values: Sequence[float]) -> Tensor:
    """Both float32 values of each byte of two 4-bit codes, low nibble first, seen as one float64."""
    pairs = [(values[byte & 15], values[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32).view(torch.float64).squeeze(1)


def decode_nibbles(table: Tensor, packed: Tensor) -> Tensor:
    """Bytes `[..., K/2]` -> float32 `[..., K]` by a `nibble_table`."""
    index = packed.contiguous().view(torch.uint8).flatten().int()
    found = table.index_select(0, index).view(torch.float32)
    return found.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def decode_scale(info: TensorInfo, raw: Tensor, first_row: int = 0) -> Tensor:
    """Float32 scales of stored ones: floats as they are, one-byte ones as E8M0 exponents.

    Raises:
        InputError: a scale is NaN (E8M0 byte 255) or infinite; it names tensor and position.
    """
    scale = lookup(e8m0_table(), raw) if info.dtype in E8M0 else raw.float()
    return require_finite(scale, info.name, first_row)


def require_finite(x: Tensor, name: str, first_row: int = 0) -> Tensor:
    """Return `x`, float, unchanged when every value is finite.

    Args:
        x: rows `first_row`... of a tensor.
        name: of the tensor, for the error.

    Raises:
        InputError: NaN or infinity, with its position in the whole tensor.
    """
    if x.numel() == 0:
        return x
    low, high = torch.aminmax(x)  # one pass without a mask; NaN propagates
    if torch.isfinite(low) and torch.isfinite(high):
        return x
    bad = (~torch.isfinite(x)).nonzero()
    position = bad[0].tolist()
    value = x[tuple(position)].item()
    if position:
        position[0] += first_row
    raise InputError(
        f"{name} holds {value} at {position} ({len(bad)} values are not finite)",
        "copy or download the checkpoint again; a file that holds such values cannot be converted",
    )


def group_rows(rows: Rows | None, block: int, total: int) -> Rows:
    """Rows of a scale that weight rows [start, stop) need when `block` weight rows share one."""
    start, stop = rows if rows is not None else (0, total)
    return start // block, -(-stop // block)


def multiply_groups(w_NK: Tensor, scale_NG: Tensor, size: int) -> Tensor:
    """Multiply `w` `[.., N, K]` in place by scales `[.., N, G]` of `size` columns each; the last group may be short."""
    whole = w_NK.shape[-1] // size
    if whole:
        w_NK[..., : whole * size].unflatten(-1, (whole, size)).mul_(scale_NG[..., :whole, None])
    if whole * size < w_NK.shape[-1]:
        w_NK[..., whole * size :].mul_(scale_NG[..., whole:])
    return w_NK
