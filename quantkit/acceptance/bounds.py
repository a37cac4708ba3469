"""Bounds on what a server may send: an answer that never ends is a fault that a check names, not a reason to wait.

The client's own timeout is for the next bytes; one byte now and then, or gigabytes of them, would pass it for ever.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

MAX_BYTES = 64 * 2**20
"""Of one answer, unpacked: a million tokens with log-probabilities take less."""

TIMES = 10
"""A whole answer may take so many times the timeout for its next bytes."""


class Endless(Exception):
    """An answer beyond a bound; says which."""


class _Count:
    """What one answer has sent, and since when."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until, self._sent = seconds, time.monotonic() + seconds, 0

    def add(self, piece: bytes) -> bytes:
        self._sent += len(piece)
        if self._sent > MAX_BYTES:
            raise Endless(f"the answer has more than {MAX_BYTES:,} bytes")
        if time.monotonic() > self._until:
            raise Endless(f"the answer goes on for more than {self._seconds:g} s")
        return piece


def bounded(response: Any, timeout_s: float) -> None:
    """Hook of the HTTP client: the response's bytes are counted as they are read."""
    count, inner = _Count(TIMES * timeout_s), response.iter_bytes

    def iter_bytes(*arguments: Any, **options: Any) -> Iterator[bytes]:
        return map(count.add, inner(*arguments, **options))

    response.iter_bytes = iter_bytes


async def bounded_async(response: Any, timeout_s: float) -> None:
    """The same for the client of `asyncio`."""
    count, inner = _Count(TIMES * timeout_s), response.aiter_bytes

    async def aiter_bytes(*arguments: Any, **options: Any) -> AsyncIterator[bytes]:
        async for piece in inner(*arguments, **options):
            yield count.add(piece)

    response.aiter_bytes = aiter_bytes


def read_bounded(answer: Any, seconds: float) -> bytes:
    """The body of an answer of `urllib`.

    Raises:
        Endless: it is beyond a bound.
    """
    count, pieces = _Count(seconds), list[bytes]()
    while piece := answer.read1(2**16):
        pieces.append(count.add(piece))
    return b"".join(pieces)
