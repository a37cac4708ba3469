"""The hidden states between two layers: in memory while they fit a budget, else one file per layer boundary.

Boundary i is what enters layer i. A spooled boundary is durable once `commit` returns, so a killed run continues from
it. What fits in memory is recomputed instead: its forward pass is cheap by definition.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from quantkit.errors import QuantkitError
from quantkit.spec.tensorfile import Header, build_header, dtype_name, read_header, read_tensor

MEMORY_BUDGET = 256 * 2**20
"""Bytes of hidden states that stay in memory, of the 1 GiB that calibration may use beside two layers."""


class ActivationStore:
    """Hidden states of one boundary at a time, one tensor `[batch, tokens, ...]` per batch.

    Args:
        folder: where boundaries are spooled.
        batch_shapes: (batch, tokens) of every batch.
        spool: whether to spool; decided once from the total size.
        device: where the tensors are wanted.
    """

    def __init__(
        self, folder: Path, batch_shapes: Sequence[tuple[int, int]], *, spool: bool, device: torch.device
    ) -> None:
        self._folder, self._shapes, self._spool, self._device = folder, batch_shapes, spool, device
        self._current: dict[int, Tensor] = {}
        self._next: dict[int, Tensor] = {}
        self._source: tuple[BinaryIO, Header] | None = None
        self._target: BinaryIO | None = None

    def path(self, boundary: int) -> Path:
        return self._folder / f"hidden-{boundary:05d}.safetensors"

    def last_boundary(self, finished: int) -> int:
        """The highest boundary <= `finished` from which a run can continue; 0, the embeddings, is always there."""
        if not self._spool:
            return 0
        return next((index for index in range(finished, 0, -1) if self.path(index).is_file()), 0)

    def start(self, boundary: int) -> None:
        """Make `boundary` the one that `get` reads; `put` then fills the one after it."""
        self._close_source()
        if self._spool and boundary > 0:
            self._source = (self.path(boundary).open("rb"), read_header(self.path(boundary)))

    def get(self, batch: int) -> Tensor:
        """Hidden states of a batch, once: what is in memory is let go."""
        if self._source is None:
            return self._current.pop(batch)
        file, header = self._source
        return read_tensor(file.fileno(), header.tensors[str(batch)], path=header.path).to(self._device)

    def put(self, boundary: int, batch: int, hidden: Tensor) -> None:
        """Add the next batch of `boundary`; batches come in order."""
        if not self._spool:
            self._next[batch] = hidden
            return
        data = hidden.cpu().contiguous()
        try:
            if self._target is None:
                self._target = self._temporary(boundary).open("wb")
                dtype, tail = dtype_name(data.dtype), tuple(data.shape[2:])
                rows = [(str(index), dtype, (*shape, *tail)) for index, shape in enumerate(self._shapes)]
                self._target.write(build_header(rows, {}))
            self._target.write(data.view(torch.uint8).numpy().data)
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
        self._target.flush()
        os.fsync(self._target.fileno())
        self._target.close()
        self._target = None
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
