"""On cards that can (sm_90 and later) a small kernel starts while its predecessor ends, and lets its successor do so.

It waits before it reads anything; what is saved is the time of the launch. The streaming GEMV does the same and has
requested its first weights by then.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """First statement of a kernel."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # after the wait: see QK_AFTER_PREVIOUS in hip/portable.h


@cache
def overlap() -> dict[str, bool]:
    """Constants and options of a kernel that calls `after_previous`."""
    interpreted = type(after_previous).__name__ != "JITFunction"
    able = not interpreted and torch.version.cuda is not None and torch.cuda.is_available()
    able = able and torch.cuda.get_device_capability()[0] >= 9 and hasattr(tl.extra.cuda, "gdc_wait")
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}
