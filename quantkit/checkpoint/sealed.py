"""Files of unfinished work that say whether they are whole, so that a run goes on from those alone.

A seal is the xxh3-128 of a file's content and of its own name: a file that was cut short, changed in any byte, or is
another layer's counts as missing, and what it stood for is done again. It is held against accidents, not against
somebody who computes it anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash
from torch import Tensor

from quantkit.checkpoint.writer import aligned_rows, read_chunks, tensor_bytes, write_atomic
from quantkit.errors import QuantkitError
from quantkit.spec.files import is_file, read_whole
from quantkit.spec.tensorfile import build_header, read_header

_SEAL = "seal"
"""Key in the metadata of a safetensors header."""

Rows = Sequence[tuple[str, str, tuple[int, ...]]]
"""(name, dtype, shape) of tensors in the order of their data."""


def write_note(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a note atomically; arguments and errors as of `write_atomic`."""
    write_atomic(path, [f"{text}\n{_seal(xxhash.xxh3_128(), path, text.encode())}".encode()], durable=durable)


def read_note(path: Path) -> str | None:
    """What `write_note` wrote into this file, None where it is missing or damaged."""
    try:
        text, _, seal = read_whole(path).decode().rpartition("\n")
    except (OSError, ValueError):
        return None
    return text if seal == _seal(xxhash.xxh3_128(), path, text.encode()) else None


def write_sealed(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors, on any device, as a safetensors file with a seal, atomically, in an order that aligns them.

    Raises:
        QuantkitError: as `write_atomic`.
    """
    rows = aligned_rows(tensors)
    held = [tensors[name].cpu().contiguous() for name, _, _ in rows]
    digest = xxhash.xxh3_128()
    for tensor in held:
        digest.update(tensor_bytes(tensor))
    write_atomic(path, [sealed_header(path, rows, metadata or {}, digest), *map(tensor_bytes, held)])


def sealed_header(path: Path, rows: Rows, metadata: Mapping[str, str], payload: xxhash.xxh3_128) -> bytes:
    """Header of a safetensors file with its seal.

    Args:
        path: the file's final one.
        payload: digest of all data so far; what else is sealed is added to it.
    """
    return build_header(rows, {**metadata, _SEAL: _seal(payload, path, build_header(rows, metadata))})


def is_sealed(path: Path) -> bool:
    """Whether a safetensors file is there, whole, and its own; it is read once, a chunk at a time."""
    if not is_file(path):
        return False
    digest = xxhash.xxh3_128()
    try:
        header = read_header(path)
        written = next(read_chunks(path, header.payload_start))
        for chunk in read_chunks(path, start=header.payload_start):
            digest.update(chunk)
    except QuantkitError:
        return False
    metadata = {key: value for key, value in header.metadata.items() if key != _SEAL}
    rows = [(tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors.values()]
    return written[8:].rstrip(b" ") == sealed_header(path, rows, metadata, digest)[8:].rstrip(b" ")


def _seal(digest: xxhash.xxh3_128, path: Path, last: bytes) -> str:
    digest.update(last)
    digest.update(path.name.encode())
    return digest.hexdigest()
