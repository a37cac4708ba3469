"""How a fusion is proved equal: on random input, up to rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKENS = 3
"""Rows of the random input."""

_ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Relative error (of norms) up to which results count as equal: a last bit may move an int8 value by one."""


def random_rows(layer: Any, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[TOKENS, width]`, where the layer is."""
    x = torch.randn((TOKENS, width), generator=torch.Generator().manual_seed(width))
    return x.to(layer.weight.device, dtype)


def difference(got: list[Tensor], want: list[Tensor]) -> str:
    """Why results are not equal; empty if they are but for rounding."""
    for one, other in zip(got, want, strict=True):
        if one.shape != other.shape:
            return f"shape {list(one.shape)}, not {list(other.shape)}"
        error = float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
        if not error <= _ALLOWED[other.dtype]:
            return f"differs by {error:.2g} from the module as it was"
    return ""
