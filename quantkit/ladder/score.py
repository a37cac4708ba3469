"""What a rung loses: its next-token distributions beside the source's, by kind of text and by position.

KL is taken over the whole vocabulary, KL(source || rung) in nats; perplexities are exp of the mean negative
log-likelihood. Standard errors are those of paired differences over samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibrate.activations import LayerInput
from quantkit.calibrate.data import Batch, Samples
from quantkit.calibrate.stream import LayerStream
from quantkit.compare.distributions import edges, full_divergence, standard_error
from quantkit.spec.document import Strict
from quantkit.spec.tensorfile import Header, read_header, read_tensor
from quantkit.threads import one_thread_per_operation

BLOCK = 64
"""Positions whose distributions are taken at once: at 150,000 tokens of vocabulary 40 MB each in float32."""


class Score(Strict):
    """A rung against the source on some positions.

    Attributes:
        tokens: predicted.
        kl, kl_error: mean KL and its standard error over samples, nats.
        perplexity_source, perplexity: of both.
        change, change_error: perplexity over the source's, minus 1, and the standard error of that.
        top1: share of positions with the same likeliest token.
    """

    tokens: int
    kl: float
    kl_error: float
    perplexity_source: float
    perplexity: float
    change: float
    change_error: float
    top1: float


class Scores(Strict):
    """All of a rung's: over everything, by kind of text, by first position of a bucket; mean KL of each sample."""

    overall: Score
    kinds: dict[str, Score]
    positions: dict[int, Score]
    samples: tuple[float, ...]

    def step(self, before: Scores | None) -> tuple[float, float]:
        """KL beyond that of another rung on the same text (None: the source), and its paired standard error."""
        if before is None:
            return self.overall.kl, self.overall.kl_error
        pairs = zip(self.samples, before.samples, strict=True)
        return self.overall.kl - before.overall.kl, standard_error(torch.tensor([a - b for a, b in pairs]))


@dataclass
class _Sums:
    """Per sample: [tokens, KL, negative log-likelihood of the source, of the rung, equal likeliest tokens]."""

    rows: list[Tensor] = field(default_factory=list)

    def add(self, values_5P: Tensor) -> None:
        if values_5P.shape[1]:
            self.rows.append(values_5P.sum(1))

    def score(self) -> Score:
        rows = torch.stack(self.rows)
        tokens = float(rows[:, 0].sum())
        kl, source, own, same = (float(value) for value in rows[:, 1:].sum(0) / tokens)
        change = math.exp(own - source) - 1
        return Score(
            tokens=int(tokens),
            kl=kl,
            kl_error=standard_error(rows[:, 1] / rows[:, 0]),
            perplexity_source=math.exp(source),
            perplexity=math.exp(own),
            change=change,
            change_error=(1 + change) * standard_error((rows[:, 3] - rows[:, 2]) / rows[:, 0]),
            top1=same,
        )


def score(
    samples: Samples, batches: Sequence[Batch], source: tuple[LayerStream, Path], rung: tuple[LayerStream, Path]
) -> Scores:
    """Scores from what left the last layer of both.

    Args:
        samples, batches: the text.
        source, rung: a model, and the record of its last layer: batch -> hidden states.
    """
    bounds = edges((), max(len(sample.ids) for sample in samples.samples))
    overall = _Sums()
    kinds, positions = {kind: _Sums() for kind in samples.kinds}, {start: _Sums() for start in bounds[:-1]}
    for batch, values_5P in _compared(batches, source, rung):
        overall.add(values_5P)
        kinds[samples.kinds[batch.kind]].add(values_5P)
        for start, stop in pairwise(bounds):
            positions[start].add(values_5P[:, start:stop])
    return Scores(
        overall=overall.score(),
        kinds={kind: sums.score() for kind, sums in kinds.items()},
        positions={start: sums.score() for start, sums in positions.items() if sums.rows},
        samples=tuple(float(row[1] / row[0]) for row in overall.rows),
    )


def _compared(
    batches: Sequence[Batch], source: tuple[LayerStream, Path], rung: tuple[LayerStream, Path]
) -> Iterator[tuple[Batch, Tensor]]:
    """For each sample its batch and, float64 `[5, positions]`, what `_Sums` adds up."""
    records = [(stream, read_header(path)) for stream, path in (source, rung)]
    with one_thread_per_operation(), source[0].head(), rung[0].head():
        for index, batch in enumerate(batches):
            ends = [_read(header, index).to(stream.device) for stream, header in records]
            for row, ids in enumerate(batch.ids):
                pairs = zip(*(end[row, :-1].split(BLOCK) for end in ends), ids[1:].split(BLOCK), strict=True)
                yield batch, torch.cat([_values(source[0], rung[0], *each) for each in pairs], dim=1)


def _values(source: LayerStream, rung: LayerStream, theirs_PH: Tensor, own_PH: Tensor, target_P: Tensor) -> Tensor:
    log_p, log_q = _distribution(source, theirs_PH), _distribution(rung, own_PH)
    target = target_P.to(log_p.device)[:, None]
    rows = (
        torch.ones(len(log_p), device=log_p.device),
        full_divergence(log_p, log_q),
        -log_p.gather(1, target).squeeze(1),
        -log_q.gather(1, target).squeeze(1),
        (log_p.argmax(-1) == log_q.argmax(-1)).float(),
    )
    return torch.stack(rows).double().cpu()


def _distribution(stream: LayerStream, hidden_PH: Tensor) -> Tensor:
    """Log-probabilities `[P, V]`, float32."""
    return stream.logits(LayerInput(hidden_PH[None]))[0].float().log_softmax(-1)


def _read(record: Header, index: int) -> Tensor:
    with record.path.open("rb") as file:
        return read_tensor(file.fileno(), record.tensors[f"{index}"], path=record.path)
