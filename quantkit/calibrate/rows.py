"""Rows of what enters the GEMMs of one layer: a sample of the tokens, the same tokens for every input.

Shape suffixes: T tokens, R sampled tokens, S their rows at the routed experts, K input channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantkit.archs import Architecture, Key
from quantkit.calibrate.experts import Routing


@dataclass(frozen=True)
class Rows:
    """Rows of one input.

    Attributes:
        x: `[R, K]`, or `[S, K]` of what enters the down projections of routed experts; compute dtype.
        expert: int64 `[S]`, expert of each routed row, None for what all tokens enter.
        row: int64 `[S]`, row of `x` of each routed row.
    """

    x: Tensor
    expert: Tensor | None = None
    row: Tensor | None = None

    def of(self, expert: int | None) -> Tensor:
        """Float32 `[n, K]` of one expert, of all for None."""
        if expert is None or self.expert is None or self.row is None:
            return self.x.float()
        return self.x[self.row[self.expert == expert]].float()

    def counts(self, experts: int) -> list[int]:
        """Rows of each expert."""
        if self.expert is None:
            return []
        return torch.bincount(self.expert, minlength=experts).tolist()


def joined(parts: Sequence[Mapping[str, Rows]]) -> dict[str, Rows]:
    """Rows of several batches, in their order."""
    found: dict[str, Rows] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        mine = [part[name] for part in parts if name in part]
        starts = np.cumsum([0, *(len(rows.x) for rows in mine)]).tolist()
        experts = [rows.expert for rows in mine if rows.expert is not None]
        row = [rows.row + start for rows, start in zip(mine, starts, strict=False) if rows.row is not None]
        found[name] = Rows(
            torch.cat([rows.x for rows in mine]),
            torch.cat(experts) if experts else None,
            torch.cat(row) if row else None,
        )
    return found


class BatchRows:
    """Collects the rows of one batch; stands in for `BatchMeasurement` behind a `LayerObserver`.

    Args:
        arch: of the model.
        wanted: int64 `[R]`, the tokens of the flattened batch that are kept, ascending.
        tokens: T.

    Attributes:
        rows: by `input_name`.
    """

    def __init__(self, arch: Architecture, wanted: Tensor, tokens: int) -> None:
        self._arch, self._wanted, self._tokens = arch, wanted, tokens
        self.rows: dict[str, Rows] = {}

    def done(self) -> None:
        """Nothing is held but the rows."""

    def linear(self, _module: str, key: Key, _keys: Sequence[Key], x: Tensor) -> None:
        """See `BatchMeasurement.linear`; modules that see other rows than the batch's tokens are passed over."""
        x_TK = x.reshape(-1, x.shape[-1])
        name = input_name(self._arch, key)
        if len(x_TK) == self._tokens and name not in self.rows:
            self.rows[name] = Rows(x_TK[self._wanted])

    def count_routed(self, index: Tensor) -> None:
        """Counted by `expert_inputs`."""

    def expert_rows(self, keys: Sequence[Key], expert: int, projection: str, x_SK: Tensor) -> None:
        """All rows come with `expert_inputs`."""

    def expert_inputs(self, keys: Sequence[Key], _module: str, projection: str, x: Tensor, routing: Routing) -> None:
        """See `BatchMeasurement.expert_inputs`."""
        position = torch.full((self._tokens,), -1, dtype=torch.int64, device=x.device)
        position[self._wanted] = torch.arange(len(self._wanted), device=x.device)
        mine = position[routing.token] >= 0
        if projection == "in":
            found = Rows(x[self._wanted], routing.expert[mine], position[routing.token[mine]])
        else:
            count = int(mine.sum())
            found = Rows(x[mine], routing.expert[mine], torch.arange(count, device=x.device))
        self.rows[input_name(self._arch, keys[0])] = found


def input_name(arch: Architecture, key: Key) -> str:
    """Name of the rows that enter a GEMM; routed experts have names of their own."""
    role = arch.role(key.role)
    return f"{role.input or role.name}{'.routed' if role.per_expert else ''}"


def spread(tokens: int, wanted: int, total: int, device: torch.device) -> Tensor:
    """Evenly spaced tokens of a batch of `tokens`: its share of `wanted` out of `total`, at least one."""
    count = min(tokens, max(1, round(wanted * tokens / total)))
    return torch.from_numpy(np.linspace(0, tokens - 1, count).round().astype(np.int64)).to(device)
