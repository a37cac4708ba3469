"""Recorded forwards on a host: a replay computes from what lies in place, as a card does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from quantkit_runtime import packing, runner, session
from quantkit_runtime.kernels import reference
from quantkit_runtime.packing import Form
from quantkit_runtime.runner import PagedRunner


class Replayed:
    """Stands for a graph of decode steps."""

    def __init__(self, runner: PagedRunner, size: int, width: int) -> None:
        self.runner, self.replays = runner, 0
        self.rows = torch.zeros((size, runner.row_width(width)), dtype=torch.int32)
        self.logits = runner.decode_rows(self.rows)

    def replay(self) -> None:
        self.replays += 1
        self.logits.copy_(self.runner.decode_rows(self.rows))


class ReplayedPrefill:
    """Stands for a graph of a chunk."""

    def __init__(self, runner: PagedRunner, form: Form) -> None:
        self.runner, self.form, self.packed = runner, form, form.empty()
        self.logits = runner.prefill_packed(self.packed, form)

    def replay(self) -> None:
        self.logits.copy_(self.runner.prefill_packed(self.packed, self.form))


def record(runner: PagedRunner, chunk: int, sequences: int, width: int) -> None:
    """As `PagedRunner.capture` does on a card."""
    for tokens in packing.sizes(chunk):
        graph = ReplayedPrefill(runner, runner.form(tokens, sequences, len(runner.cache.rings), width))
        graphs: Any = runner.prefill_graphs  # of a card's
        graphs[graph.form] = graph, graph.packed, graph.logits


@contextmanager
def recording(failing: int = -1, refused: str = "") -> Iterator[None]:
    """Sessions record on the host, prefill attention by tiles unless it is refused; the forward of this number cannot
    be recorded."""
    numbers, kernel = count(), None if refused else reference.paged_prefill

    def recorded(run: Callable[[], Tensor], given: Tensor, pool: Any) -> Any:
        logits = run()
        if next(numbers) == failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return SimpleNamespace(replay=lambda: logits.copy_(run())), given, logits

    with (
        patch.multiple(runner, records=lambda device: True, _recorded=recorded),
        patch.multiple(session, records=lambda device: True, _prefill=lambda *_: (kernel, refused)),
        patch("torch.cuda.graph_pool_handle"),
    ):
        yield
