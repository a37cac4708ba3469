"""Native formats: how one logical weight `[N, K]` (or `[E, N, K]`) is stored, one file per format.

A format is recognised by the set of tensors that stand beside each other under one module name, their dtypes and
the relation of their shapes; exactly one row must match, so the order of the rows means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from quantkit.checkpoint.formats import fp8_block, fp8_channel, int8_channel, int_packed, mxfp4, mxfp8, plain
from quantkit.checkpoint.formats.base import NativeFormat, ReadPart, Shape
from quantkit.checkpoint.formats.context import FormatContext
from quantkit.errors import InputError
from quantkit.spec.tensorfile import TensorInfo

FORMATS: tuple[NativeFormat, ...] = (
    plain.FORMAT,
    int8_channel.FORMAT,
    fp8_block.FORMAT,
    fp8_channel.CHANNEL,
    fp8_channel.TENSOR,
    mxfp8.FORMAT,
    mxfp4.BLOCKS,
    mxfp4.PACKED,
    mxfp4.IN_I8,
    int_packed.FORMAT,
)

__all__ = ["FORMATS", "FormatContext", "NativeFormat", "ReadPart", "disagreements", "recognise"]


def recognise(name: str, stored: Mapping[str, TensorInfo], context: FormatContext | None = None) -> NativeFormat:
    """The format of a weight whose tensors, by part, are `stored`.

    Args:
        name: for errors.
        context: what the config says about quantization; only where the tensors leave something open.

    Raises:
        InputError: no format or more than one matches; it says what each format that comes close would need.
    """
    context = context or FormatContext()
    found = _matching(tuple((part, info.dtype, info.shape) for part, info in stored.items()), context)
    if len(found) == 1:
        return found[0]
    shown = ", ".join(f"{part} {info.dtype} {list(info.shape)}" for part, info in sorted(stored.items()))
    if found:
        what, items = f"ambiguous ({', '.join(row.name for row in found)})", []
    else:
        what = "no known format"
        candidates = [row for row in FORMATS if not row.problems(stored)]
        items = [f"as {row.name}: {row.misfit(stored, context)}" for row in candidates] or _nearest(stored)
    raise InputError(
        f"{name} is stored as {shown}: {what}",
        "a scale is missing, orphan or misplaced; complete the checkpoint, or add a file to checkpoint/formats",
        items=items,
        choices=[row.name for row in FORMATS],
    )


@lru_cache(maxsize=4096)
def _matching(parts: tuple[tuple[str, str, Shape], ...], context: FormatContext) -> tuple[NativeFormat, ...]:
    """Rows that fit tensors (part, dtype, shape); hundreds of thousands of weights share a few dozen of these."""
    stored = {part: TensorInfo(part, dtype, shape, 0, 0) for part, dtype, shape in parts}
    return tuple(row for row in FORMATS if not row.problems(stored) and not row.misfit(stored, context))


def _nearest(stored: Mapping[str, TensorInfo]) -> list[str]:
    """What the formats with the fewest contradictions would need."""
    problems = {row.name: row.problems(stored) for row in FORMATS}
    fewest = min(map(len, problems.values()))
    return [f"as {name}: {'; '.join(found)}" for name, found in problems.items() if len(found) == fewest]


def disagreements(context: FormatContext, counts: Mapping[str, int]) -> list[str]:
    """Where config.json and the tensors differ about quantization, as sentences; the tensors count.

    Args:
        counts: name of a format -> number of tensors stored in it.
    """
    declared = ", ".join(context.declared)
    quantized = {row.name: row for row in FORMATS if row.scales and counts.get(row.name)}
    if declared and not quantized:
        return [f"config.json declares quantization ({declared}), but no tensor is quantized: all are read as stored"]
    if not declared:
        return [
            f"config.json declares no quantization, but {counts[name]} weights are stored as {name}: read as such"
            for name in quantized
        ]
    notes = [
        f"config.json declares {declared}, but {counts[name]} weights are stored as {name}: read as such"
        for name, row in quantized.items()
        if not row.declared_as & set(context.declared)
    ]
    if fp8_block.FORMAT.name in quantized and context.block is None:
        notes.append("config.json names no block size: that of the FP8 weights follows from the shapes of their scales")
    return notes
