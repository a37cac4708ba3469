"""What predictions of a quantized model on held-out text are worth beside the source's, by kind and by position."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from quantkit.calibrate.data import Batch, Samples
from quantkit.compare.distributions import edges, full_divergence

POSITIONS = 64
"""Positions of a sample whose predictions are compared, evenly spaced."""

Value = TypeVar("Value", int, float)


def spaced(tokens: int) -> Tensor:
    """The positions that are compared of a sample of so many tokens, int64, ascending, the last among them."""
    return torch.linspace(0, tokens - 1, min(POSITIONS, tokens)).round().long()


@dataclass
class Scores:
    """A variant on one kind of text.

    Attributes:
        samples: mean KL divergence of each sample.
        same: positions with the same likeliest token.
        positions: all of them.
        followed: those with a next token.
        nll_source, nll: sums of the negative log-likelihood of the next tokens.
    """

    samples: list[float] = field(default_factory=list)
    same: int = 0
    positions: int = 0
    followed: int = 0
    nll_source: float = 0.0
    nll: float = 0.0

    def add(self, log_p: Tensor, log_q: Tensor, following: Tensor) -> Tensor:
        """Log probabilities `[positions, V]` of one sample -> KL of each position, float64.

        Args:
            following: int64, the next tokens; the sample's last position has none.
        """
        divergence = full_divergence(log_p, log_q).double()
        self.samples.append(float(divergence.mean()))
        self.same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        self.positions += len(log_p)
        count = len(following)
        self.followed += count
        self.nll_source -= float(log_p[:count].gather(1, following[:, None]).double().sum())
        self.nll -= float(log_q[:count].gather(1, following[:, None]).double().sum())
        return divergence

    @property
    def mean(self) -> float:
        return math.fsum(self.samples) / len(self.samples)

    @property
    def error(self) -> float:
        """Standard error of the mean over samples."""
        count = len(self.samples)
        square = math.fsum((value - self.mean) ** 2 for value in self.samples)
        return math.sqrt(square / (count - 1) / count) if count > 1 else 0.0

    @property
    def perplexity_source(self) -> float:
        return math.exp(self.nll_source / max(1, self.followed))

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / max(1, self.followed))


class HeldOutScores:
    """All variants on all kinds of text.

    Args:
        samples: the text.
    """

    def __init__(self, samples: Samples) -> None:
        self._kinds = samples.kinds
        self._edges = edges((), max(len(sample.ids) for sample in samples.samples))
        self._scores: dict[tuple[str, int], Scores] = {}
        self._positions: defaultdict[str, dict[int, list[float]]] = defaultdict(dict)

    def add(self, name: str, batch: Batch, row: int, log_p: Tensor, log_q: Tensor) -> None:
        """Predictions of a variant at the `spaced` positions of one sample, row `row` of `batch`."""
        ids = batch.ids[row]
        where = spaced(len(ids))
        following = ids[where[where + 1 < len(ids)] + 1].to(log_p.device)
        score = self._scores.setdefault((name, batch.kind), Scores())
        for position, value in zip(where.tolist(), score.add(log_p, log_q, following).tolist(), strict=True):
            start = max(edge for edge in self._edges if edge <= position)
            self._positions[name].setdefault(start, []).append(value)

    def table(self, value: Callable[[Scores], Value]) -> dict[str, dict[str, Value]]:
        """Variant -> kind of text -> a figure."""
        found: defaultdict[str, dict[str, Value]] = defaultdict(dict)
        for (name, kind), score in self._scores.items():
            found[name][self._kinds[kind]] = value(score)
        return dict(found)

    def by_position(self) -> dict[str, dict[int, float]]:
        """Variant -> first position of a bucket -> mean KL divergence there."""
        return {
            name: {start: math.fsum(values) / len(values) for start, values in sorted(buckets.items())}
            for name, buckets in self._positions.items()
        }
