"""A linear product some rows of its weight at a time, where the whole weight in the compute dtype takes too much."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def blocks(n: int, step: int) -> Iterator[slice]:
    """Ranges of at most `step` of `n` rows; at least one range."""
    return (slice(start, start + step) for start in range(0, max(1, n), step))


def linear_by_rows(x: Tensor, n: int, step: int, rows: Callable[[slice], Tensor], bias_N: Tensor | None) -> Tensor:
    """`x` `[..., K]` times a weight of `n` rows -> `[..., N]`; `rows` gives a range of them in the dtype of x."""
    parts = [F.linear(x, rows(part), None if bias_N is None else bias_N[part]) for part in blocks(n, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
