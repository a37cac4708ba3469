"""What enters a layer, between two layers: in memory while it fits a budget, else one file per layer boundary.

Boundary i is what enters layer i: hidden states, and what else the layer before handed on (indices of an indexer, in
their own dtype). A spooled boundary is durable and sealed once `commit` returns, so a killed run continues from it, if
it is whole. What fits in memory is recomputed instead: its forward pass is cheap by definition.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from quantkit.checkpoint.sealed import is_sealed, sealed_header
from quantkit.checkpoint.writer import tensor_bytes
from quantkit.errors import QuantkitError
from quantkit.spec.tensorfile import Header, dtype_name, read_header, read_tensor

MEMORY_BUDGET = 256 * 2**20
"""Bytes of hidden states that stay in memory, of the 1 GiB that calibration may use beside its layer."""

_HEADER_BYTES_PER_BATCH = 1024
"""Room that is left for the header, which is known last: some 100 bytes for a tensor, a few tensors for a batch."""


@dataclass(frozen=True)
class LayerInput:
    """What one batch brings to a layer.

    Attributes:
        hidden: `[batch, tokens, ...]`, compute dtype.
        carried: keyword argument -> tensor of any dtype and shape (see `Architecture.carried_state`); an argument that
            is None is absent.
    """

    hidden: Tensor
    carried: Mapping[str, Tensor] = field(default_factory=dict)


class ActivationStore:
    """What enters one layer at a time, one `LayerInput` per batch.

    Args:
        folder: where boundaries are spooled.
        batches: number of batches.
        spool: whether to spool; decided once from the total size.
        device: where the tensors are wanted.
        name: of the spooled files.
    """

    def __init__(self, folder: Path, batches: int, *, spool: bool, device: torch.device, name: str = "hidden") -> None:
        self._folder, self._spool, self._device, self._name = folder, spool, device, name
        self._header_bytes = 192 + _HEADER_BYTES_PER_BATCH * batches
        self._current: dict[int, LayerInput] = {}
        self._next: dict[int, LayerInput] = {}
        self._source: tuple[BinaryIO, Header] | None = None
        self._target: BinaryIO | None = None
        self._rows: list[tuple[str, str, tuple[int, ...]]] = []
        self._digest = xxhash.xxh3_128()

    def path(self, boundary: int) -> Path:
        return self._folder / f"{self._name}-{boundary:05d}.safetensors"

    def last_boundary(self, finished: int) -> int:
        """The highest boundary <= `finished` from which a run can continue; 0, the embeddings, is always there."""
        if not self._spool:
            return 0
        return next((index for index in range(finished, 0, -1) if is_sealed(self.path(index))), 0)

    def start(self, boundary: int) -> None:
        """Make `boundary` the one that `get` reads; `put` then fills the one after it."""
        self._close_source()
        if self._spool:
            self._source = (self.path(boundary).open("rb"), read_header(self.path(boundary)))

    def get(self, batch: int, *, keep: bool = False) -> LayerInput:
        """What a batch brings; memory is let go unless `keep`. Several threads may ask for different batches."""
        if self._source is None:
            return self._current[batch] if keep else self._current.pop(batch)
        names = [name for name in self._source[1].tensors if name.startswith(f"{batch}/")]
        return LayerInput(self._read(str(batch)), {name.partition("/")[2]: self._read(name) for name in names})

    def _read(self, name: str) -> Tensor:
        assert self._source is not None
        file, header = self._source
        return read_tensor(file.fileno(), header.tensors[name], path=header.path).to(self._device)

    def put(self, boundary: int, batch: int, value: LayerInput) -> None:
        """Add the next batch of `boundary`; batches come in order."""
        if not self._spool:
            self._next[batch] = value
            return
        tensors = {str(batch): value.hidden, **{f"{batch}/{name}": each for name, each in value.carried.items()}}
        try:
            if self._target is None:
                self._target = self._temporary(boundary).open("wb")
                self._target.seek(self._header_bytes)
                self._digest = xxhash.xxh3_128()
            for name, tensor in tensors.items():
                data = tensor_bytes(tensor.cpu())
                self._rows.append((name, dtype_name(tensor.dtype), tuple(tensor.shape)))
                self._digest.update(data)
                self._target.write(data)
        except OSError as error:
            raise QuantkitError(
                f"{self._temporary(boundary)}: {error.strerror or error}",
                "make room on that disk, then run the same command again: finished layers are kept",
            ) from error

    def commit(self, boundary: int) -> None:
        """All batches of `boundary` were put: it becomes current, and durable when spooled."""
        self._current, self._next = self._next, {}
        if self._target is None:
            return
        self._target.seek(0)
        header = sealed_header(self.path(boundary), self._rows, {}, self._digest)
        self._target.write(_padded(header, self._header_bytes))
        self._target.flush()
        os.fsync(self._target.fileno())
        self._target.close()
        self._target, self._rows = None, []
        self._temporary(boundary).rename(self.path(boundary))

    def forget(self, boundary: int) -> None:
        """Drop a spooled boundary that no later run needs."""
        self._close_source()
        self.path(boundary).unlink(missing_ok=True)

    def close(self) -> None:
        self._close_source()
        if self._target is not None:
            self._target.close()

    def _temporary(self, boundary: int) -> Path:
        return self.path(boundary).with_suffix(".tmp")

    def _close_source(self) -> None:
        if self._source is not None:
            self._source[0].close()
            self._source = None


def _padded(header: bytes, size: int) -> bytes:
    """A safetensors header of exactly `size` bytes: the JSON is followed by spaces."""
    if len(header) > size:
        raise QuantkitError(
            f"the names of what is handed from layer to layer take {len(header)} bytes, {size} were left for them",
            "raise calibration.batch_tokens, so that there are fewer batches",
        )
    return struct.pack("<Q", size - 8) + header[8:] + b" " * (size - len(header))
