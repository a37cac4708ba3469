"""Native formats: how one logical weight `[N, K]` (or `[E, N, K]`) is stored, one file per format.

A format is recognised by the set of tensors that stand beside each other under one module name and their dtypes;
exactly one row must match, so the order of the rows means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from quantkit.checkpoint.formats import int8_channel, plain
from quantkit.checkpoint.formats.base import NativeFormat, ReadPart
from quantkit.errors import InputError
from quantkit.spec.tensorfile import TensorInfo

FORMATS: tuple[NativeFormat, ...] = (plain.FORMAT, int8_channel.FORMAT)

__all__ = ["FORMATS", "NativeFormat", "ReadPart", "recognise"]


def recognise(name: str, stored: Mapping[str, TensorInfo]) -> NativeFormat:
    """The format of a weight whose tensors, by part, are `stored`.

    Raises:
        InputError: no format or more than one matches.
    """
    found = [row for row in FORMATS if row.matches(stored)]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(f"{part} {info.dtype} {list(info.shape)}" for part, info in sorted(stored.items()))
    what = "no known format" if not found else f"ambiguous ({', '.join(row.name for row in found)})"
    raise InputError(
        f"{name} is stored as {shown}: {what}",
        "a scale is missing, orphan or misplaced; complete the checkpoint, or add a file to checkpoint/formats",
        choices=[row.name for row in FORMATS],
    )
