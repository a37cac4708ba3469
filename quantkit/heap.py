"""The C heap of long streaming commands: large blocks go back to the system when they are freed.

glibc raises its threshold for such blocks each time one is freed, up to 32 MiB. From then on the buffers of a
conversion come from the heap of each thread, where small blocks that live on keep the holes between them: the peak
memory of one command then differs by half from run to run. A threshold that was set is never raised.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_BYTES = 128 << 10
"""glibc's own starting value of both."""


def return_large_blocks() -> None:
    """Hold the thresholds at their starting values, for the rest of the process; without effect where the C library
    has no `mallopt`."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _BYTES)
        mallopt(_M_TRIM_THRESHOLD, _BYTES)
