"""The last files of a baseline: distributions, perplexities, `baseline.json`."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quantkit import __version__
from quantkit.archs.structure import attention_limits
from quantkit.baseline.plan import Plan
from quantkit.checkpoint.writer import file_sha256, save_tensors, write_atomic
from quantkit.compare.companions import comparable_config
from quantkit.compare.distributions import Kept, edges, join, perplexity
from quantkit.spec.baseline import (
    BASELINE_NAME,
    LOGPROBS_NAME,
    OUTSIDE_NAME,
    Baseline,
    PerplexityRow,
    baseline_bytes,
    layer_name,
    sequences_digest,
)
from quantkit.spec.baseline import Sequence as Tokens


def write_baseline(out: Path, plan: Plan, sequences: tuple[Tokens, ...], kept: Sequence[Kept]) -> None:
    """Write what is left to write; the layers' files are there."""
    source = plan.source
    save_tensors(out / LOGPROBS_NAME, join(list(kept)).tensors())
    limits = attention_limits(source.arch, source.dims, source.config)
    names = [LOGPROBS_NAME, OUTSIDE_NAME, *(layer_name(layer) for layer in range(source.dims.layers))]
    baseline = Baseline(
        tool_version=__version__,
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        compute=plan.compute,
        architecture=source.arch.name,
        model_type=str(source.config.get("model_type", "")),
        config=comparable_config(source.config),
        source_digest=source.digest(),
        source_formats=dict(sorted(source.formats.items())),
        limits=limits,
        sequences=sequences,
        sequences_sha256=sequences_digest(sequences),
        tokenizer=plan.tokenizer,
        top_k=plan.top_k,
        full=plan.options.full,
        perplexity=tuple(_perplexities(sequences, kept, limits)),
        layers=source.dims.layers,
        files={name: file_sha256(out / name).sha256 for name in names},
        warnings=plan.warnings,
    )
    write_atomic(out / BASELINE_NAME, [baseline_bytes(baseline)])


def _perplexities(
    sequences: Sequence[Tokens], kept: Sequence[Kept], limits: tuple[int, ...]
) -> Iterator[PerplexityRow]:
    """By kind, then by range of positions over the texts and the long text."""
    scored = [pair for pair in zip(sequences, kept, strict=True) if pair[0].use in ("text", "long")]
    losses = [-rows.next_logprob.double() for _, rows in scored]
    kinds = [sequence.kind for sequence, _ in scored]
    longest = max(len(sequence.ids) for sequence in sequences)
    for kind in dict.fromkeys(kinds):
        yield _row(kind, 0, longest, torch.cat([each for own, each in zip(kinds, losses, strict=True) if own == kind]))
    position, loss = torch.cat([torch.tensor(sequence.scored) for sequence, _ in scored]), torch.cat(losses)
    for start, stop in itertools.pairwise(edges(limits, longest)):
        inside = (position >= start) & (position < stop)
        if bool(inside.any()):
            yield _row("", start, stop, loss[inside])


def _row(kind: str, start: int, stop: int, losses: Tensor) -> PerplexityRow:
    return PerplexityRow(kind=kind, start=start, stop=stop, tokens=len(losses), perplexity=perplexity(losses))
