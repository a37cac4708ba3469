"""Files that appear whole or not at all: streamed, hashed while written, fsynced, renamed.

A file is written under a temporary name in its own folder and renamed when its last byte is on the disk, so a
crash leaves at most a temporary file, which the next run overwrites. Memory: one chunk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.spec.tensorfile import build_header, dtype_name, tensor_nbytes

TEMPORARY_SUFFIX = ".quantkit-tmp"

Chunk = bytes | bytearray | memoryview


def temporary_name(name: str) -> str:
    """What a file is called until it is whole."""
    return f".{name}{TEMPORARY_SUFFIX}"


@dataclass(frozen=True)
class WrittenFile:
    """A finished file: size in bytes and sha256 as hex."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """Where a tensor's data lies in its file, and the xxh3-128 of the data as hex."""

    name: str
    offset: int
    nbytes: int
    xxh3: str


def write_atomic(path: Path, chunks: Iterable[Chunk], *, durable: bool = True) -> WrittenFile:
    """Write `chunks` to `path`: temporary file in the same folder, fsync, rename, fsync of the folder.

    Args:
        durable: False leaves out both fsyncs, for notes whose loss only repeats work.

    Raises:
        QuantkitError: the disk is full, or writing failed otherwise; `path` then is as it was before.
    """
    temporary = path.with_name(temporary_name(path.name))
    digest, size = hashlib.sha256(), 0
    try:
        with _failures(path):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            for chunk in chunks:
                with _failures(path):
                    _write_all(fd, chunk)
                digest.update(chunk)
                size += memoryview(chunk).nbytes
            if durable:
                with _failures(path):
                    os.fsync(fd)
        finally:
            os.close(fd)
        with _failures(path):
            temporary.replace(path)
            if durable:
                fsync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return WrittenFile(size, digest.hexdigest())


def write_tensors(
    path: Path,
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    produce: Callable[[str], Iterable[Tensor]],
    on_bytes: Callable[[int], None] = lambda _: None,
) -> tuple[WrittenFile, list[WrittenTensor]]:
    """Write a safetensors file whose header is known beforehand.

    Args:
        tensors: (name, dtype, shape) in the order of the data.
        produce: contiguous pieces of a tensor by its name, in order.
        on_bytes: told the length of every piece that was written.

    Raises:
        QuantkitError: as `write_atomic`.
        AssertionError: `produce` gave another amount of data than the header says (a bug, never input).
    """
    rows = list(tensors)
    header = build_header(rows, {"format": "pt"})
    written: list[WrittenTensor] = []

    def stream() -> Iterator[Chunk]:
        yield header
        position = len(header)
        for name, dtype, shape in rows:
            digest, size = xxhash.xxh3_128(), 0
            for piece in produce(name):
                data = tensor_bytes(piece)
                digest.update(data)
                size += data.nbytes
                yield data
                on_bytes(data.nbytes)
            planned = tensor_nbytes(dtype, shape)
            assert size == planned, f"{path}: {name} was planned with {planned} bytes and got {size}"
            written.append(WrittenTensor(name, position, size, digest.hexdigest()))
            position += size

    file = write_atomic(path, stream())
    return file, written


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Write tensors that are in memory as a safetensors file, in an order that aligns them."""
    rows = aligned_rows(dict(sorted(tensors.items())))
    return write_tensors(path, rows, lambda name: [tensors[name].contiguous()])[0]


def aligned_rows(tensors: Mapping[str, Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of tensors in `order_for_alignment`."""
    rows = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    return [rows[index] for index in order_for_alignment(rows)]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order, without a copy where it is contiguous."""
    import torch

    flat: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return flat


def order_for_alignment(rows: list[tuple[str, str, tuple[int, ...]]]) -> list[int]:
    """Order in a file that leaves every tensor aligned to its element size, which safetensors' readers need.

    One-byte tensors of a multiple of 8 bytes come first (so a weight precedes the scales that are computed while it
    streams), then all others by falling element size; the order among equals is kept.
    """

    def rank(index: int) -> tuple[int, int]:
        _, dtype, shape = rows[index]
        width, size = tensor_nbytes(dtype, (1,)), tensor_nbytes(dtype, shape)
        return (-16 if width == 1 and size % 8 == 0 else -width, index)

    return sorted(range(len(rows)), key=rank)


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda _: None, chunk: int = 8 << 20) -> WrittenFile:
    """Size and sha256 of a whole file, read once; the interpreter lock is free while hashing.

    Raises:
        QuantkitError: a read error.
    """
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(chunk)
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(view):
                digest.update(view[:count])
                size += count
                on_bytes(count)
    except OSError as error:
        raise QuantkitError(f"{path}: {error.strerror or error}", "check the disk or the mount") from error
    return WrittenFile(size, digest.hexdigest())


def read_chunks(path: Path, chunk: int = 8 << 20, *, start: int = 0) -> Iterator[bytes]:
    """The bytes of a file from `start` on, for a copy through `write_atomic`."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            while data := file.read(chunk):
                yield data
    except OSError as error:
        raise QuantkitError(f"{path}: {error.strerror or error}", "check the disk or the mount") from error


def fsync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, chunk: Chunk) -> None:
    view = memoryview(chunk).cast("B")
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def _failures(path: Path) -> Iterator[None]:
    """Turn the failures of the disk into an expected error."""
    try:
        yield
    except OSError as error:
        raise QuantkitError(
            f"{path} cannot be written: {error.strerror or error}",
            "make room or check the permissions, then run the same command again; finished files are kept",
        ) from error
