"""Integers packed into I32 words, compressed-tensors `pack-quantized`: 4 bits (Kimi-K2 Thinking and others) or 8.

I32 `weight_packed [.., N, ceil(K * bits / 32)]`, first value in the lowest bits, each stored with 2^(bits-1) added;
`weight_scale [.., N, K / group]` (`[N, 1]` per channel); `weight_shape` holds `[.., N, K]`. An asymmetric weight has
`weight_zero_point [ceil(N * bits / 32), G]`, packed along N in the same way. Value = (code - zero point) x scale.
`weight_g_idx` (columns in the order of activations) is refused.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from quantkit.checkpoint.formats.base import (
    FLOATS,
    NativeFormat,
    ReadPart,
    Rows,
    Shape,
    Stored,
    decode_nibbles,
    decode_scale,
    multiply_groups,
    nibble_table,
    require_finite,
)
from quantkit.checkpoint.formats.context import FormatContext
from quantkit.errors import InputError

_BITS = (4, 8)
"""Widths that divide a word; others exist in the format and nobody ships them."""


def require_weight_shape(stored: Stored, read: ReadPart, shape: Shape) -> None:
    """Hold `weight_shape` against the shape that the headers give.

    Raises:
        InputError: they differ.
    """
    info = stored["weight_shape"]
    found = tuple(read("weight_shape", None).tolist())
    if found != shape:
        raise InputError(
            f"{info.name} says {list(found)}, the packed tensor and its scale hold {list(shape)}",
            "copy or download the checkpoint again",
        )


def _bits(stored: Stored, k: int, context: FormatContext) -> int:
    """Bits of a value when a row has `k` of them; 0 when no width explains the packed shape.

    Rows of at most 4 values fit one word in either width: there the config decides.
    """
    words = stored["weight_packed"].shape[-1]
    fitting = [bits for bits in _BITS if -(-k * bits // 32) == words]
    if len(fitting) > 1:
        told = {bits for bits, _ in context.packings}
        fitting = [bits for bits in fitting if bits in told]
    return fitting[0] if len(fitting) == 1 else 0


def _shape(stored: Stored, read: ReadPart, context: FormatContext) -> Shape:
    """From the headers where the config's group size settles K (one read less for each of 100,000 experts), else
    from `weight_shape`."""
    packed, scale, told = stored["weight_packed"], stored["weight_scale"], stored["weight_shape"]
    for bits, group in context.packings:
        k = scale.shape[-1] * group
        if group and scale.shape[-1] > 1 and -(-k * bits // 32) == packed.shape[-1]:
            return (*packed.shape[:-1], k)
    shape = tuple(int(size) for size in read("weight_shape", None).tolist())
    if (
        len(shape) != len(packed.shape)
        or shape[:-1] != packed.shape[:-1]
        or shape[-1] < 1
        or not _bits(stored, shape[-1], context)
    ):
        raise InputError(
            f"{told.name} says {list(shape)}, {packed.name} is {list(packed.shape)}: no width of "
            f"{' or '.join(map(str, _BITS))} bits explains both",
            "copy or download the checkpoint again",
        )
    if shape[-1] % scale.shape[-1]:
        raise InputError(
            f"{scale.name} is {list(scale.shape)}: {scale.shape[-1]} groups do not divide {shape[-1]} inputs",
            "copy or download the checkpoint again",
        )
    return shape


def _misfit(stored: Stored, _context: FormatContext) -> str:
    packed, scale, told = stored["weight_packed"], stored["weight_scale"], stored["weight_shape"]
    if "weight_g_idx" in stored:
        return f"{stored['weight_g_idx'].name}: columns in the order of activations (actorder) are not supported"
    if len(packed.shape) < 2:
        return f"{packed.name} has {len(packed.shape)} dimensions, expected at least 2"
    if told.shape != (len(packed.shape),):
        return f"{told.name} is {list(told.shape)}, expected [{len(packed.shape)}]"
    if len(scale.shape) != len(packed.shape) or scale.shape[:-1] != packed.shape[:-1] or not scale.shape[-1]:
        return f"{scale.name} is {list(scale.shape)}, expected {[*packed.shape[:-1]]} + [groups]"
    zero = stored.get("weight_zero_point")
    if zero is None:
        return ""
    wanted = [[-(-packed.shape[0] * bits // 32), scale.shape[-1]] for bits in _BITS]
    if len(packed.shape) != 2 or list(zero.shape) not in wanted:
        return f"{zero.name} is {list(zero.shape)}, expected {' or '.join(map(str, wanted))}"
    return ""


@cache
def _table() -> Tensor:
    return nibble_table([code - 8 for code in range(16)])


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """I32 words `[..., W]` -> the first `count` values of each row, float32, 2^(bits-1) subtracted."""
    codes = words.contiguous().view(torch.uint8)  # little-endian: the first value is in the first byte
    if bits == 4:
        return decode_nibbles(_table(), codes)[..., :count].contiguous()
    return codes[..., :count].float().sub_(128)


def _zero_point(read: ReadPart, bits: int, rows: Rows) -> Tensor:
    """Zero points `[rows, G]` of weight rows [start, stop), read from the words that hold them."""
    per_word = 32 // bits
    first, last = rows[0] // per_word, -(-rows[1] // per_word)
    # a plain .contiguous() keeps the strides of a single row or column, and they do not allow a view as bytes
    words_GW = read("weight_zero_point", (first, last)).T.clone(memory_format=torch.contiguous_format)
    skip = rows[0] - first * per_word
    return unpack(words_GW, bits, (last - first) * per_word).T[skip : skip + rows[1] - rows[0]]


def _decode(stored: Stored, read: ReadPart, rows: Rows | None, context: FormatContext) -> Tensor:
    shape, start = _shape(stored, read, context), rows[0] if rows else 0
    require_weight_shape(stored, read, shape)
    bits, size = _bits(stored, shape[-1], context), shape[-1] // stored["weight_scale"].shape[-1]
    values = unpack(read("weight_packed", rows), bits, shape[-1])
    if "weight_zero_point" in stored:
        zero = _zero_point(read, bits, rows or (0, shape[0]))
        values.unflatten(-1, (-1, size)).sub_(zero[..., None])
    scale = decode_scale(stored["weight_scale"], read("weight_scale", rows), start)
    return require_finite(multiply_groups(values, scale, size), stored["weight_packed"].name, start)


FORMAT = NativeFormat(
    name="int-packed",
    payload=("weight_packed", frozenset({"I32"})),
    scales=("weight_scale",),
    scale_dtypes=FLOATS,
    required={"weight_shape": frozenset({"I64", "I32"})},
    optional={"weight_zero_point": frozenset({"I32"}), "weight_g_idx": frozenset({"I32", "I64"})},
    declared_as=frozenset({"pack-quantized"}),
    oriented=True,
    misfit=_misfit,
    shape=_shape,
    decode=_decode,
)
