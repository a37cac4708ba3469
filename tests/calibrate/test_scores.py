"""Held-out scores against sums in numpy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.calibrate.data import Sample, Samples
from quantkit.calibrate.scores import POSITIONS, HeldOutScores, spaced

VOCAB = 23


def sample(tokens: int, kind: str, seed: int) -> Sample:
    return Sample(torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed)), kind, "test")


SAMPLES = Samples((sample(300, "code", 0), sample(300, "code", 1), sample(9, "prose", 2)))


@pytest.mark.parametrize("tokens", [1, 9, 64, 65, 300])
def test_positions_are_spread_and_end_with_the_last(tokens: int) -> None:
    where = spaced(tokens).tolist()
    assert len(where) == len(set(where)) == min(POSITIONS, tokens)
    assert where[-1] == tokens - 1
    assert where == sorted(where)


def test_figures() -> None:
    scores, generator = HeldOutScores(SAMPLES), np.random.default_rng(0)
    kl: dict[str, list[float]] = {"code": [], "prose": []}
    by_position: dict[int, list[float]] = {0: [], 64: [], 256: []}
    losses: dict[str, list[tuple[float, float]]] = {"code": [], "prose": []}
    for batch in SAMPLES.batches(8192):
        for row, ids in enumerate(batch.ids.tolist()):
            where = np.rint(np.linspace(0, len(ids) - 1, min(POSITIONS, len(ids)))).astype(int)
            logits = generator.normal(size=(2, len(where), VOCAB))
            p, q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            scores.add("all", batch, row, torch.from_numpy(p), torch.from_numpy(q))
            values = (np.exp(p) * (p - q)).sum(-1)
            kind = SAMPLES.kinds[batch.kind]
            kl[kind].append(values.mean())
            for index, position in enumerate(where):
                by_position[0 if position < 64 else 64 if position < 256 else 256].append(values[index])
                if position + 1 < len(ids):
                    losses[kind].append((p[index, ids[position + 1]], q[index, ids[position + 1]]))
    assert scores.table(lambda score: score.mean)["all"] == pytest.approx({k: np.mean(v) for k, v in kl.items()})
    errors = scores.table(lambda score: score.error)["all"]
    assert errors == pytest.approx({"code": np.std(kl["code"], ddof=1) / np.sqrt(2), "prose": 0})
    perplexity = scores.table(lambda score: score.perplexity)["all"]
    assert perplexity == pytest.approx({k: np.exp(-np.mean([q for _, q in v])) for k, v in losses.items()})
    source = scores.table(lambda score: score.perplexity_source)["all"]
    assert source == pytest.approx({k: np.exp(-np.mean([p for p, _ in v])) for k, v in losses.items()})
    assert scores.by_position()["all"] == pytest.approx({k: np.mean(v) for k, v in by_position.items()})
