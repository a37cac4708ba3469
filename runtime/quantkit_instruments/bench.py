"""Speed of a session: prefill and decode apart, by input length and by number of sequences.

Every prompt is new, so that nothing can be reused, and every shape runs twice at full length before it counts: the
first run compiles, the second fills the allocator's pools.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from quantkit_runtime.engine import Engine
from quantkit_runtime.runner import PagedRunner

WARM_UPS = 2
STEP_BACK = 0.10
"""Throughput that may be given up for fewer sequences at once, so for less time per token."""


@dataclass(frozen=True)
class Prefill:
    """Prompts of one length, alone: median seconds to the first token, and prompt tokens per second."""

    length: int
    ttft: float
    tokens_per_second: float


@dataclass(frozen=True)
class Decode:
    """Steps of `batch` sequences behind prompts of `length`: seconds per token of each sequence, tokens of all per
    second at the median."""

    length: int
    batch: int
    p50: float
    p99: float
    tokens_per_second: float


@dataclass(frozen=True)
class Speeds:
    """All rows, and shapes (length, sequences) that the KV pool has no room for."""

    prefill: tuple[Prefill, ...]
    decode: tuple[Decode, ...]
    left_out: tuple[tuple[int, int], ...]

    def knee(self, length: int) -> tuple[int, int] | None:
        """Of the batch sweep at a length: the batch of the highest throughput, and the smallest one that gives up
        at most a tenth of it."""
        rows = [row for row in self.decode if row.length == length]
        if not rows:
            return None
        best = max(rows, key=lambda row: row.tokens_per_second)
        enough = [row.batch for row in rows if row.tokens_per_second >= (1 - STEP_BACK) * best.tokens_per_second]
        return best.batch, min(enough)


class Bench:
    """Drives an engine with random prompts.

    Args:
        engine: idle.
        vocab: ids are drawn below it.
        steps: decode steps that count for a shape.
        repeats: prefills that count for a length.
    """

    def __init__(self, engine: Engine, vocab: int, *, steps: int, repeats: int) -> None:
        self._engine, self._vocab, self._steps, self._repeats = engine, vocab, steps, repeats
        self._random = torch.Generator().manual_seed(0)

    def run(self, lengths: Iterable[int], batches: Iterable[int], sweep: int) -> Speeds:
        """Prefill and single decode at every length, and every batch at the length `sweep`."""
        lengths, shapes = list(lengths), [(length, 1) for length in lengths]
        shapes += [(sweep, batch) for batch in batches if (sweep, batch) not in shapes]
        fitting = [shape for shape in shapes if self._fits(*shape)]
        prefill = [self._prefill(length) for length in lengths if (length, 1) in fitting]
        decode = [self._decode(*shape) for shape in fitting]
        return Speeds(tuple(prefill), tuple(decode), tuple(shape for shape in shapes if shape not in fitting))

    def _fits(self, length: int, batch: int) -> bool:
        runner = self._engine.runner
        if batch > self._engine.batch:
            return False
        if not isinstance(runner, PagedRunner):
            return True
        return batch * runner.cache.format.blocks(length + self._steps) <= runner.cache.free_blocks

    def _prompt(self, length: int) -> list[int]:
        ids: list[int] = torch.randint(self._vocab, (length,), generator=self._random).tolist()
        return ids

    def _prefill(self, length: int) -> Prefill:
        seconds = []
        for _ in range(WARM_UPS + self._repeats):
            prompt = self._prompt(length)
            start = time.perf_counter()
            self._engine.generate([prompt], 1)
            seconds.append(time.perf_counter() - start)
        ttft = float(np.median(seconds[WARM_UPS:]))
        return Prefill(length, ttft, length / ttft)

    def _decode(self, length: int, batch: int) -> Decode:
        for _ in range(WARM_UPS):
            self._steps_of(length, batch)
        seconds = self._steps_of(length, batch)
        p50, p99 = (float(value) for value in np.percentile(seconds, (50, 99)))
        return Decode(length, batch, p50, p99, batch / p50)

    def _steps_of(self, length: int, batch: int) -> list[float]:
        """Seconds of each decode step; a step ends when its tokens are on the host."""
        requests = [self._engine.add(self._prompt(length), self._steps + 1) for _ in range(batch)]
        while any(len(request.tokens) == request.prompt for request in requests):
            self._engine.step()
        seconds = []
        while self._engine.busy:
            start = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - start)
        return seconds


def as_json(speeds: Speeds, sweep: int) -> dict[str, Any]:
    """Machine-readable rows; seconds and tokens per second."""
    found = speeds.knee(sweep)
    return {**asdict(speeds), "knee": found and {"batch": found[0], "step_back": found[1], "length": sweep}}
