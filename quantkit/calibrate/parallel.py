"""Batches in parallel, results that do not depend on how many at once.

How many threads share a matrix product or a reduction decides in which pieces it is summed, and where vectorized code
hands over to scalar code (SiLU of three threads is not SiLU of two), so its last bits. Here every operation of torch
runs on one thread, whole batches run side by side, and their results are taken in the order of the batches: all
bits are those of a machine with one core. Other instruction sets (AVX2, AVX-512) may still differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

Result = TypeVar("Result")


def in_order(pool: Executor, work: Callable[[int], Result], count: int, ahead: int) -> Generator[Result, None, None]:
    """Results of `work(0)` to `work(count - 1)` in this order; at most `ahead` + 1 of them are begun and not taken.

    The error of the first that fails is raised. None runs any more when the iterator is closed.
    """
    pending: deque[Future[Result]] = deque()
    try:
        for index in range(count):
            pending.append(pool.submit(work, index))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        wait(pending)
