"""safetensors files, by header: parsed strictly, read with pread into caller's buffers.

The format is 8 bytes of little-endian header length, a JSON header, then the payload. Offsets are relative to the
payload. This module checks everything a reader relies on, so that a truncated or foreign file is an error that
names the file, never a wrong number.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import InputError
from quantkit.spec.files import open_regular

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100_000_000
"""Bound on the header, the safetensors package's own: longer ones no other reader opens."""

MAX_DIMENSIONS = 64
"""Bound on the number of dimensions, numpy's and torch's own."""

_MAX_BITS = 2**63
_MINUS = re.compile(rb"[:,\[]\s*-")

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}
"""Bits of one element of each dtype that is understood."""

_TORCH_NAMES: Mapping[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Header entry of one tensor; `start` and `end` are byte offsets from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """Parsed header of a file; tensors in the order of their offsets."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    payload_start: int
    file_size: int


def tensor_nbytes(dtype: str, shape: Iterable[int]) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def torch_dtype(dtype: str) -> torch.dtype:
    """torch dtype of a safetensors dtype name."""
    import torch

    found = getattr(torch, _TORCH_NAMES[dtype])
    assert isinstance(found, torch.dtype)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors name of a torch dtype."""
    wanted = str(dtype).removeprefix("torch.")
    return next(name for name, torch_name in _TORCH_NAMES.items() if torch_name == wanted)


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        InputError: the file is missing, truncated, has trailing bytes, or its header is not consistent.
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size < 8:
            raise _broken(path, f"it has {size} bytes, too few for a header")
        length = struct.unpack("<Q", _read_bytes(fd, 8, 0, path))[0]
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise _broken(path, f"its header claims {length} bytes, the file has {size}")
        raw = _read_bytes(fd, length, 8, path)
    finally:
        os.close(fd)
    table, metadata = _parse_table(path, raw)
    payload_start = 8 + length
    tensors = [_entry(path, name, row, payload_start) for name, row in table.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    position = payload_start
    for tensor in tensors:
        if tensor.start != position:
            raise _broken(path, f"tensor {tensor.name} starts at byte {tensor.start}, expected {position}")
        position = tensor.end
    if position != size:
        what = "truncated" if position > size else "followed by foreign bytes"
        raise _broken(path, f"its payload is {what}: the header describes {position} bytes, the file has {size}")
    return Header(path, {tensor.name: tensor for tensor in tensors}, metadata, payload_start, size)


def _read_bytes(fd: int, count: int, offset: int, path: Path) -> bytearray:
    raw = bytearray(count)
    pread_exact(fd, memoryview(raw), offset, str(path))
    return raw


def _parse_table(path: Path, raw: bytearray) -> tuple[dict[str, Any], dict[str, str]]:
    """Header JSON -> rows by tensor name, and metadata."""
    if not raw.startswith(b"{"):
        raise _broken(path, "its header does not begin with {")
    # most headers hold neither escapes nor anything that could be a negative number: no need to look at each value
    hooks: dict[str, Any] = {"object_pairs_hook": _unique}
    if b"\\u" in raw:
        hooks["object_pairs_hook"] = _unique_and_encodable
    if _MINUS.search(raw):
        hooks["parse_int"] = _unsigned
    try:
        # decoded here: json would take bytes for UTF-16 where they look like it
        table = json.loads(raw.decode("utf-8"), parse_float=_no_number, parse_constant=_no_number, **hooks)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({error})") from error
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, "its metadata is not an object of strings")
    return table, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's dict; a repeated key, of which json would keep the last silently, is an error."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def _unique_and_encodable(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As `_unique`; a lone surrogate, which JSON can spell and UTF-8 cannot, raises a ValueError too."""
    for key, value in pairs:
        key.encode()
        if isinstance(value, str):
            value.encode()
    return _unique(pairs)


def _unsigned(text: str) -> int:
    if text.startswith("-"):
        raise ValueError(f"{text[:40]} is negative")
    return int(text)


def _no_number(text: str) -> float:
    raise ValueError(f"{text[:40]} is not an unsigned number")


def _entry(path: Path, name: str, row: Any, payload_start: int) -> TensorInfo:
    if not isinstance(row, dict) or not {"dtype", "shape", "data_offsets"} <= row.keys():
        raise _broken(path, f"the header entry of {name} is incomplete")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise InputError(
            f"{path}: tensor {name} has the unsupported dtype {dtype!r}",
            "convert it with the tool that wrote it",
            choices=sorted(DTYPE_BITS),
        )
    if not _all_sizes(shape) or not _all_sizes(offsets) or len(offsets) != 2:
        raise _broken(path, f"shape or offsets of {name} are not lists of sizes")
    if len(shape) > MAX_DIMENSIONS or _overflows(DTYPE_BITS[dtype], shape):
        raise _broken(path, f"the shape of {name} is beyond all bounds")
    start, end = offsets
    if end - start != tensor_nbytes(dtype, shape):
        raise _broken(path, f"{name} is {dtype} {shape} but takes {end - start} bytes")
    return TensorInfo(name, sys.intern(dtype), _shared(tuple(shape)), payload_start + start, payload_start + end)


@lru_cache(maxsize=4096)
def _shared(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The same object for equal shapes: the tensors of a model have a few dozen."""
    return shape


def _overflows(bits: int, shape: list[int]) -> bool:
    """Whether the running product leaves 63 bits, even if a zero follows: the package's reader refuses that too."""
    for size in shape:
        bits *= size
        if bits >= _MAX_BITS:
            return True
    return False


def _all_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _broken(path: Path, what: str) -> InputError:
    return InputError(f"{path} is not a sound safetensors file: {what}", "copy or download the file again")


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Header bytes, length prefix included, for (name, dtype, shape) rows written in this order.

    Metadata keys are sorted and the header is padded with spaces to a multiple of 8, so equal input gives equal
    bytes.
    """
    table: dict[str, Any] = {}
    if metadata:
        table["__metadata__"] = dict(sorted(metadata.items()))
    position = 0
    for name, dtype, shape in tensors:
        size = tensor_nbytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def pread_exact(fd: int, buffer: memoryview, offset: int, what: str) -> None:
    """Fill `buffer` from `offset`; `what` names the file (and tensor) in the error.

    Raises:
        InputError: read error or early end of file.
    """
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise InputError(f"{what}: {error.strerror or error}", "check the disk or the mount") from error
        if count == 0:
            raise InputError(f"{what}: the file ends early", "copy or download the file again")
        done += count


def read_tensor(
    fd: int,
    info: TensorInfo,
    rows: tuple[int, int] | None = None,
    *,
    path: Path,
    into: Callable[[int], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Read a tensor, or `rows` [start, stop) along its first dimension.

    Args:
        into: gives a contiguous uint8 tensor of so many bytes that is read into and that the result is a view of;
            None: memory of its own.

    Raises:
        InputError: read error or early end of file.
        ValueError: rows outside the tensor; neighbours' bytes are never returned.
    """
    import torch

    shape, start, nbytes = info.shape, info.start, info.nbytes
    if rows is not None:
        if not shape or not 0 <= rows[0] <= rows[1] <= shape[0]:
            raise ValueError(f"rows {rows} of {info.name} {list(shape)}")
        row_bytes = nbytes // max(shape[0], 1)
        shape = (rows[1] - rows[0], *shape[1:])
        start, nbytes = start + rows[0] * row_bytes, (rows[1] - rows[0]) * row_bytes
    raw = into(nbytes) if into is not None else torch.empty(nbytes, dtype=torch.uint8)
    if nbytes:
        pread_exact(fd, raw.numpy().data, start, f"{path}: tensor {info.name}")
    return raw.view(torch_dtype(info.dtype)).reshape(shape)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a safetensors file, by name.

    Raises:
        InputError: as `read_header` and `read_tensor`.
    """
    header = read_header(path)
    fd = open_regular(path)
    try:
        return {name: read_tensor(fd, info, path=path) for name, info in header.tensors.items()}
    finally:
        os.close(fd)
