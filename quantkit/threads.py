"""Threads of this process: how many cores there are, and torch operations that run on one thread each.

Work that runs side by side gives torch one thread per operation: many small operations gain nothing from more, and the
results no longer depend on how many cores a machine has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """torch's operations use one thread each inside the block, in this thread and in those started inside."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
