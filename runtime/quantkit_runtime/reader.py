"""Reads tensors in a given order, ahead of who asks for them, straight into their final memory.

One thread reads in large pieces, a second one hashes the piece before, so that checking costs little where it is as
fast as reading. On the CPU a piece lands where the tensor will stay. For a card it lands in pinned memory and is
copied from there while the next one is read. Memory beyond the tensors: `STAGES` pieces; at most `AHEAD` tensors wait.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from quantkit.errors import InputError
from quantkit.spec.tensorfile import pread_exact, torch_dtype
from quantkit_runtime.errors import BrokenShard

if TYPE_CHECKING:
    from quantkit_runtime.shards import Stored

PIECE = 16 * 2**20
STAGES = 3
AHEAD = 4


class Reader:
    """A thread that reads `wanted`, in this order.

    Args:
        root: folder of the files.
        device: where tensors will stay.
        verify: compare each tensor with its checksum, if it has one.
    """

    def __init__(self, root: Path, wanted: Sequence[Stored], device: torch.device, *, verify: bool) -> None:
        self._root, self._wanted, self._device, self._verify = root, wanted, device, verify
        self._ready: queue.Queue[tuple[Tensor, Any] | BaseException] = queue.Queue(AHEAD)
        self._stop = threading.Event()
        self._next = 0
        self._hashing = ThreadPoolExecutor(1)
        self._pieces = _Pinned(device) if device.type == "cuda" else _InPlace()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        while self._thread.is_alive():  # it may wait for room in the queue
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue
        self._hashing.shutdown()

    def take(self, stored: Stored) -> Tensor | None:
        """The next tensor if it is `stored`, else None.

        Raises:
            BrokenShard: it cannot be read, or its checksum differs.
        """
        if self._next == len(self._wanted) or self._wanted[self._next] is not stored:
            return None
        self._next += 1
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        tensor, copied = item
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)
        return tensor

    def _run(self) -> None:
        descriptor, file = -1, ""
        try:
            for stored in self._wanted:
                if self._stop.is_set():
                    break
                if stored.file != file:  # files are read one after the other, so the previous one is closed
                    if descriptor >= 0:
                        os.close(descriptor)
                    descriptor, file = -1, stored.file
                    descriptor = self._opened(file)
                self._ready.put(self._read(descriptor, stored))
        except BaseException as error:  # it belongs to the thread that asks for the tensor
            self._ready.put(error)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _opened(self, file: str) -> int:
        try:
            return os.open(self._root / file, os.O_RDONLY)
        except OSError as error:
            raise BrokenShard(f"{self._root / file}: {error.strerror or error}", "copy the missing file") from error

    def _read(self, descriptor: int, stored: Stored) -> tuple[Tensor, Any]:
        info, what = stored.info, f"{self._root / stored.file}: tensor {stored.info.name}"
        raw = torch.empty(info.nbytes, dtype=torch.uint8, device=self._device)
        digest = xxhash.xxh3_128() if self._verify and stored.xxh3 else None
        hashed: list[Future[None]] = []
        for start in range(0, info.nbytes, PIECE):
            final = raw[start : start + PIECE]
            if len(hashed) >= STAGES:
                hashed[-STAGES].result()  # its pinned memory is about to be written again
            view = self._pieces.memory(final)
            try:
                pread_exact(descriptor, view, info.start + start, what)
            except InputError as error:
                raise BrokenShard(error.message, error.hint) from error
            if digest is not None:
                hashed.append(self._hashing.submit(digest.update, view))
            self._pieces.filled(final)
        for piece in hashed:
            piece.result()
        if digest is not None and digest.hexdigest() != stored.xxh3:
            raise BrokenShard(
                f"{self._root / stored.file}: the checksum of tensor {info.name} is {digest.hexdigest()}, the manifest "
                f"says {stored.xxh3}",
                "copy this file again from where it was converted, or convert again; --no-verify loads it as it is",
            )
        return raw.view(torch_dtype(info.dtype)).reshape(info.shape), self._pieces.copied()


class _InPlace:
    """Pieces of a tensor in host memory are read where they stay."""

    def memory(self, final: Tensor) -> memoryview:
        return final.numpy().data

    def filled(self, final: Tensor) -> None: ...

    def copied(self) -> Any:
        return None


class _Pinned(_InPlace):
    """Pieces of a tensor on a card go through a ring of pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._slots = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(STAGES)]
        self._copied: list[Any] = [None] * STAGES
        self._stream: Any = torch.cuda.Stream(device)
        self._slot = 0

    def memory(self, final: Tensor) -> memoryview:
        self._slot = (self._slot + 1) % STAGES
        if self._copied[self._slot] is not None:
            self._copied[self._slot].synchronize()
        return self._slots[self._slot].numpy().data[: final.numel()]

    def filled(self, final: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(final.device))  # it may be memory that is still in use
        with torch.cuda.stream(self._stream):
            final.copy_(self._slots[self._slot][: final.numel()], non_blocking=True)
            self._copied[self._slot] = torch.cuda.Event()
            self._copied[self._slot].record(self._stream)

    def copied(self) -> Any:
        """An event after which the tensor is whole, for the stream that uses it."""
        return self._copied[self._slot]
