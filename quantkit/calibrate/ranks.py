"""Several processes that share the samples of a calibration, started by `torchrun`.

Every process runs its share of the batches through every layer and sends what it measured to all others, batch by
batch. Each of them adds all of it up in the order of the batches, so sums, and with them the artifact, are bit for bit
those of one process. The first process writes. All of them see the model and the output folder under the same paths;
hidden states of a process are its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

_TIMEOUT = timedelta(hours=12)
"""For the slowest step that others wait for: writing the artifact of a large model."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a calibration.

    Attributes:
        rank: number of this one.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def mine(self, index: int) -> bool:
        """Whether a batch is this process's."""
        return index % self.size == self.rank

    def folder(self, work: Path) -> Path:
        """Where this process keeps its records and hidden states."""
        if self.is_first:
            return work
        own = work / f"rank-{self.rank}"
        own.mkdir(parents=True, exist_ok=True)
        return own

    def shared(self, values: Sequence[Value]) -> list[Value]:
        """Values of all processes, in the order of the ranks."""
        if self.size == 1:
            return list(values)
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, list(values))
        return [value for part in found for value in part]

    def wait(self) -> None:
        """Until all processes are here."""
        self.shared([None])


ALONE = Ranks()


@contextmanager
def started() -> Iterator[Ranks]:
    """The processes that `torchrun` started, joined inside the block; `ALONE` without it."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
