"""bf16, fp16, fp32 (and the integer or boolean tensors that some checkpoints carry): stored as they are."""

from __future__ import annotations

from torch import Tensor

from quantkit.checkpoint.formats.base import NativeFormat, ReadPart, Rows, Stored
from quantkit.checkpoint.formats.context import FormatContext


def _decode(_stored: Stored, read: ReadPart, rows: Rows | None, _context: FormatContext) -> Tensor:
    return read("weight", rows)


FORMAT = NativeFormat(
    name="plain",
    # I8, U8 and F8 are left out: a lone 8-bit weight lacks its scale
    payload=("weight", frozenset({"BF16", "F16", "F32", "F64", "I16", "I32", "I64", "U16", "U32", "U64", "BOOL"})),
    decode=_decode,
    dtype=lambda stored: stored["weight"].dtype,
)
