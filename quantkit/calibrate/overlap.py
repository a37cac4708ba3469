"""Whether the text that a result will be judged by was seen in the calibration.

Both are compared as runs of `RUN` tokens, so that neither white space at the ends nor the cut into samples matters.
13 is the length that GPT-3's authors used to find benchmarks in training text (Brown et al. 2020, appendix C). A text
counts when many of its runs are shared: a few are, where two dialogues have the same system prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantkit.calibrate.sources import Row, read_rows
from quantkit.recipe import Mix

if TYPE_CHECKING:
    from quantkit.calibrate.data import Sample

RUN = 13
"""Tokens of a run."""

MANY_RUNS, MANY_SHARE = 32, 0.1
"""A text counts when this many of its runs, or this share of them, are shared."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def overlaps(tokenizer: Any, files: Sequence[str], samples: Sequence[Sample]) -> Iterator[str]:
    """A sentence for each file that shares text with the samples.

    Raises:
        UsageError, InputError: a file cannot be read.
    """
    if not files:
        return
    known = [runs(sample.ids.numpy()) for sample in samples]
    owner = np.repeat(np.arange(len(samples)), [len(each) for each in known])
    hashes = np.concatenate(known) if known else np.zeros(0, np.uint64)
    order = np.argsort(hashes, kind="stable")
    hashes, owner = hashes[order], owner[order]
    for file in files:
        rows = read_rows(Mix(data=file))
        found = [seen for row in rows if (seen := _seen(tokenizer, row, hashes, owner))]
        if found:
            kinds = sorted({samples[index].source for seen in found for index in seen})
            yield (
                f"{len(found)} of {len(rows)} texts of {file} are also calibration text, in whole or in part, so "
                f"results on them flatter; they come from {', '.join(kinds)}"
            )


def _seen(tokenizer: Any, row: Row, hashes: NDArray[np.uint64], owner: NDArray[np.int64]) -> set[int]:
    """Samples that share many runs with a text."""
    from quantkit.calibrate.data import encode

    text = row.text or "\n".join(str(message["content"]) for message in row.messages)
    mine = runs(encode(tokenizer, text, special=False))
    if not len(mine) or not len(hashes):
        return set()
    where = np.minimum(np.searchsorted(hashes, mine), len(hashes) - 1)
    shared = hashes[where] == mine
    if shared.sum() < MANY_RUNS and shared.mean() < MANY_SHARE:
        return set()
    return set(owner[where[shared]].tolist())


def runs(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """A hash for every run of `RUN` tokens, `[tokens - RUN + 1]`; empty when there are fewer."""
    count = len(ids) - RUN + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    found = np.zeros(count, np.uint64)
    wide = ids.astype(np.uint64) + np.uint64(1)
    for offset in range(RUN):
        found = (found ^ wide[offset : offset + count]) * _FACTOR
        found ^= found >> np.uint64(29)
    return found
