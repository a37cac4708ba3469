"""Distributions, continuations and needles of a candidate against the source's, as rows of the result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.compare.candidate import Answer
from quantkit.compare.distributions import Kept, cosine, divergence, edges, of_next, summary
from quantkit.compare.result import Distribution, Divergence, Greedy, Needle
from quantkit.spec.baseline import Baseline
from quantkit.spec.baseline import Sequence as Tokens


@dataclass(frozen=True)
class Positions:
    """Figures of every scored position of some sequences, `[P]` each.

    Attributes:
        kind: of text, one for each position.
        place: position in its text.
        kl, cos: of the two distributions.
        same: both have the same likeliest token.
        margin: nats by which the source prefers its likeliest token.
        source, candidate: negative log-likelihood of the token that follows.
    """

    kind: tuple[str, ...]
    place: Tensor
    kl: Tensor
    cos: Tensor
    same: Tensor
    margin: Tensor
    source: Tensor
    candidate: Tensor

    def where(self, mask: Tensor) -> dict[str, Any]:
        return summary(self.kl[mask], self.cos[mask], self.same[mask], self.source[mask], self.candidate[mask])

    def decided(self, margin: float) -> tuple[int, int]:
        """(positions that the source decides by this margin, those of them where both agree)."""
        mask = self.margin >= margin
        return int(mask.sum()), int(self.same[mask].sum())


def positions(baseline: Baseline, rows: Kept, answers: Mapping[str, Answer], sequences: Iterable[Tokens]) -> Positions:
    """All scored positions of `sequences`, one after the other."""
    spans, found, kinds = baseline.rows(), [], []
    for sequence in sequences:
        source, answer = rows.rows(*spans[sequence.name]), answers[sequence.name]
        kinds += [sequence.kind] * len(sequence.scored)
        found.append(
            (
                torch.tensor(sequence.scored),
                divergence(source, answer.kept),
                cosine(source, answer.kept),
                answer.first == source.top_ids[:, 0],
                source.margin,
                -source.next_logprob.double(),
                -of_next(answer.kept),
            )
        )
    columns = [torch.cat(column) for column in zip(*found, strict=True)]
    return Positions(tuple(kinds), *columns)


def by_kind(found: Positions, longest: int) -> Iterator[Distribution]:
    """All kinds together first, then each alone."""
    everything = torch.ones(len(found.kind), dtype=torch.bool)
    yield Distribution(kind="", start=0, stop=longest, **found.where(everything))
    for kind in dict.fromkeys(found.kind):
        mask = torch.tensor([name == kind for name in found.kind])
        yield Distribution(kind=kind, start=0, stop=longest, **found.where(mask))


def by_position(found: Positions, limits: tuple[int, ...], longest: int) -> Iterator[Distribution]:
    """Ranges of positions that hold any."""
    for start, stop in itertools.pairwise(edges(limits, longest)):
        mask = (found.place >= start) & (found.place < stop)
        if bool(mask.any()):
            yield Distribution(kind="", start=start, stop=stop, **found.where(mask))


def greedy_row(
    prompt: Tokens,
    source: Kept,
    answer: Answer,
    decoded: Sequence[int],
    decided_margin: float,
    text: Callable[[Sequence[int]], str],
) -> Greedy:
    """One prompt.

    Args:
        decoded: tokens of the candidate's own decoding.
        text: token ids -> text.
    """
    want = prompt.ids[prompt.prompt_tokens :]
    same = answer.first == torch.tensor(want)
    first = None
    if not bool(same.all()):
        step = int((~same).nonzero()[0])
        other = int(answer.first[step])
        first = Divergence(
            step=step,
            source=text([want[step]]),
            candidate=text([other]),
            source_id=want[step],
            candidate_id=other,
            source_margin=float(source.margin[step]),
            candidate_margin=float(answer.margin[step].nan_to_num(0.0)),
            decided=float(source.margin[step]) >= decided_margin,
        )
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(want, decoded, strict=False)))
    own = first.step if first else len(want)
    return Greedy(
        prompt=prompt.name,
        kind=prompt.kind,
        tokens=len(want),
        agreed=int(same.sum()),
        decoded=common,
        departs=common < own and float(answer.margin[common]) >= decided_margin,
        first=first,
        text=text(want),
    )


def needle_rows(baseline: Baseline, rows: Kept, answers: Mapping[str, Answer]) -> Iterator[Needle]:
    """Every place of the fact; the last scored tokens of each sequence are the answer."""
    spans = baseline.rows()
    for sequence in baseline.of_use("needle"):
        source = rows.rows(*spans[sequence.name])
        yield Needle(
            name=sequence.name.removeprefix("needle."),
            distance=sequence.distance,
            source=float(source.next_logprob.double().mean()),
            candidate=float(of_next(answers[sequence.name].kept).mean()),
        )
