"""Calibration samples: drawn by weight with a seed, tokenized, deduplicated, frozen with their hashes.

Samples of one batch have the same length and kind of text: nothing is padded, so nothing has to be masked out of the
statistics, and the extremes of each kind fall out of the batches.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.archs.modeling import token_ids
from quantkit.calibrate.overlap import overlaps, runs
from quantkit.calibrate.sources import Row, default_mix, read_rows
from quantkit.compare.companions import render_chat
from quantkit.errors import InputError, UsageError
from quantkit.recipe import Calibration, Mix
from quantkit.spec.calibration import SampleRecord

MIN_TOKENS = 8
"""Shorter texts are passed over: their statistics are those of the first positions."""

MAX_WINDOWS = 16
"""Windows that are cut out of one text; what follows is passed over, so that reading a book costs a bounded time."""

_Ids = NDArray[np.int32]

_STEP = 64
"""Samples of two steps and more are whole steps long, or `seq_len`: a quarter of the batches for 3 % of the tokens."""

_SIEVE = 8
"""One of so many runs of tokens is remembered of a sample, chosen by its hash, so that equal texts keep equal ones."""

_FEWEST_RUNS = 8
"""Samples with fewer remembered runs are compared as a whole only."""

_HELD_OUT_SHARE = 5
"""Of so many samples at most one is held out, where text is scarce."""

_CHARS_PER_TOKEN = 32
"""Text beyond this many characters per wanted token is cut before it is tokenized, to save time."""


@dataclass(frozen=True)
class Sample:
    """One text as token ids `[tokens]`, int64."""

    ids: Tensor
    kind: str
    source: str

    @cached_property
    def sha256(self) -> str:
        """Hash of the token ids as little-endian int32."""
        return hashlib.sha256(self.ids.numpy().astype("<i4").tobytes()).hexdigest()

    @property
    def record(self) -> SampleRecord:
        return SampleRecord(source=self.source, kind=self.kind, tokens=len(self.ids), sha256=self.sha256)


@dataclass(frozen=True)
class Batch:
    """Samples that go through a layer together.

    Attributes:
        ids: int64 `[batch, tokens]`, no padding.
        kind: index into `Samples.kinds`.
        samples: index of each row into `Samples.samples`.
        names: description of each row for errors.
    """

    ids: Tensor
    kind: int
    samples: tuple[int, ...]
    names: tuple[str, ...]

    def describe(self, token: int) -> str:
        """The sample that the token with this index in the flattened batch belongs to."""
        row = min(token // self.ids.shape[1], len(self.samples) - 1)
        return f"sample {self.samples[row]} ({self.names[row]})"


@dataclass(frozen=True)
class Samples:
    """The frozen list, in the order of the recipe's sources and of the draw.

    Attributes:
        samples: what is fed.
        warnings: sentences for the report.
    """

    samples: tuple[Sample, ...]
    warnings: tuple[str, ...] = ()

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted({sample.kind for sample in self.samples}))

    @cached_property
    def digest(self) -> str:
        """sha256 over the samples' hashes and kinds, in order."""
        lines = "".join(f"{sample.sha256} {sample.kind}\n" for sample in self.samples)
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def tokens(self) -> int:
        return sum(len(sample.ids) for sample in self.samples)

    def thinned(self, tokens: int) -> Samples:
        """Evenly chosen samples that hold about so many tokens, of every kind its share."""
        count = min(len(self.samples), max(1, -(-len(self.samples) * tokens // max(1, self.tokens))))
        chosen = np.linspace(0, len(self.samples) - 1, count).round().astype(int)
        return Samples(tuple(self.samples[index] for index in chosen), self.warnings)

    def batches(self, batch_tokens: int) -> list[Batch]:
        """Batches of equal length and kind, at most `batch_tokens` tokens each (or one sample)."""
        groups: dict[tuple[str, int], list[int]] = defaultdict(list)
        for index, sample in enumerate(self.samples):
            groups[sample.kind, len(sample.ids)].append(index)
        batches = []
        for (kind, length), members in sorted(groups.items()):
            size = max(1, batch_tokens // length)
            for start in range(0, len(members), size):
                chosen = members[start : start + size]
                batches.append(self._batch(self.kinds.index(kind), chosen))
        return batches

    def _batch(self, kind: int, chosen: Sequence[int]) -> Batch:
        members = [self.samples[index] for index in chosen]
        names = tuple(f"{sample.kind}, {sample.source}" for sample in members)
        return Batch(torch.stack([sample.ids for sample in members]), kind, tuple(chosen), names)


def draw_samples(tokenizer: Any, options: Calibration) -> Samples:
    """The samples of `draw` that statistics are taken on."""
    return draw(tokenizer, options)[0]


def draw(tokenizer: Any, options: Calibration) -> tuple[Samples, Samples]:
    """Draw `options.samples` samples, and `options.held_out` other ones on which the result is checked.

    A source that runs dry passes its share on to the others.

    Raises:
        UsageError: fewer kinds of text than `min_sources`.
        InputError: a source cannot be read, or nothing long enough was found.
    """
    mix = options.mix or default_mix()
    encoder = _Encoder(tokenizer, options)
    generators = [np.random.default_rng([options.seed, index]) for index in range(len(mix))]
    streams = [encoder.stream(read_rows(each), generator) for each, generator in zip(mix, generators, strict=True)]
    drawn, dry = _take(streams, mix, options.samples + options.held_out)
    scarce = sum(map(len, drawn)) < options.samples + options.held_out
    count = min(options.held_out, sum(map(len, drawn)) // _HELD_OUT_SHARE) if scarce else options.held_out
    parts, held_parts = _hold_out(drawn, count)
    samples = [sample for part in parts for sample in part]
    if not samples:
        raise InputError(f"no calibration text has {MIN_TOKENS} tokens or more", "give longer texts")
    held_out = Samples(tuple(sample for part in held_parts for sample in part))
    warnings = [
        *_warnings(options, samples, held_out, [mix[i].data for i in dry], encoder),
        *overlaps(tokenizer, options.evaluation, (*samples, *held_out.samples)),
    ]
    result = Samples(tuple(samples), tuple(warnings))
    _check_kinds(result, options.min_sources)
    return result, held_out


def _take(streams: Sequence[Iterator[Sample]], mix: Sequence[Mix], count: int) -> tuple[list[list[Sample]], list[int]]:
    """`count` samples by weight, a list for each source; and the sources that ran dry."""
    drawn: list[list[Sample]] = [[] for _ in mix]
    dry: list[int] = []
    while (missing := count - sum(map(len, drawn))) > 0 and len(dry) < len(mix):
        flowing = [index for index in range(len(mix)) if index not in dry]
        for index, share in zip(flowing, _shares([mix[i].weight for i in flowing], missing), strict=True):
            taken = list(islice(streams[index], share))
            drawn[index] += taken
            dry += [index] if len(taken) < share else []
    return drawn, dry


def _hold_out(drawn: list[list[Sample]], count: int) -> tuple[list[list[Sample]], list[list[Sample]]]:
    """Take the last samples of every source, in all `count`."""
    sizes = [len(part) for part in drawn]
    if not count:
        return drawn, []
    cuts = [size - share for size, share in zip(sizes, _shares(sizes, count), strict=True)]
    return (
        [part[:cut] for part, cut in zip(drawn, cuts, strict=True)],
        [part[cut:] for part, cut in zip(drawn, cuts, strict=True)],
    )


def _shares(weights: Sequence[float] | Sequence[int], total: int) -> list[int]:
    """Split `total` by weight; remainders go to the largest fractions, the first of equals first."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(value) for value in exact]
    by_fraction = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in by_fraction[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _check_kinds(samples: Samples, min_sources: int) -> None:
    if len(samples.kinds) < min_sources:
        raise UsageError(
            f"the calibration text has {len(samples.kinds)} kind ({', '.join(samples.kinds)}), the recipe wants at "
            f"least {min_sources}: statistics of one kind mislead on the others",
            "add sources with --data, or pass --force-sources if this text is all that the model will ever see",
        )


def _warnings(
    options: Calibration, samples: Sequence[Sample], held_out: Samples, dry: Sequence[str], encoder: _Encoder
) -> Iterator[str]:
    if dry and len(samples) == options.samples:
        yield f"these sources had fewer samples than their share, others were drawn instead: {', '.join(dry)}"
    if len(samples) < options.samples:
        yield f"{options.samples} samples were asked for, the sources hold {len(samples)}"
    if len(held_out.samples) < options.held_out:
        yield f"{options.held_out} samples were to be held out, there is text for {len(held_out.samples)}"
    if encoder.near_duplicates:
        yield f"{encoder.near_duplicates} texts were passed over because most of each was drawn before"
    if encoder.without_template:
        yield f"the tokenizer has no chat template: {encoder.without_template} dialogues were fed as plain text"


def encode(tokenizer: Any, text: str, *, special: bool = True) -> _Ids:
    """Token ids `[tokens]` of a text, with the tokenizer's special tokens when `special`."""
    ids = token_ids(tokenizer, text, special=special)
    try:
        return np.asarray(ids, dtype=np.int32)
    except OverflowError as error:
        raise InputError(
            f"the tokenizer gives the id {max(ids):,}, which no vocabulary has",
            "use the tokenizer that belongs to these weights",
        ) from error


class _Encoder:
    """Turns rows into samples, each token sequence once, and nothing most of which was there before.

    Attributes:
        without_template: dialogues that were fed as plain text.
        near_duplicates: samples that were passed over because they share more than half of their runs of tokens.
    """

    def __init__(self, tokenizer: Any, options: Calibration) -> None:
        self._tokenizer, self._seq_len, self._packing = tokenizer, options.seq_len, options.packing
        self._seen: set[str] = set()
        self._runs: set[int] = set()
        self.without_template = self.near_duplicates = 0

    def stream(self, rows: Sequence[Row], generator: np.random.Generator) -> Iterator[Sample]:
        """Samples of `rows` in a random order: the first window of every row, then the second ones, and so on."""
        order = [rows[int(position)] for position in generator.permutation(len(rows))]
        windows = self._packed(order) if self._packing else self._split(order)
        for window, row in windows:
            ids = self._even(window)
            sample = Sample(torch.from_numpy(ids.astype(np.int64)), row.kind, row.source)
            if len(ids) >= min(MIN_TOKENS, self._seq_len) and sample.sha256 not in self._seen:
                self._seen.add(sample.sha256)
                if self._is_new(ids):
                    yield sample

    def _is_new(self, ids: _Ids) -> bool:
        """Whether half of a sample or more was not drawn before; its runs then count as drawn."""
        found = {run for run in runs(ids).tolist() if run % _SIEVE == 0}
        if len(found) >= _FEWEST_RUNS and 2 * len(found & self._runs) > len(found):
            self.near_duplicates += 1
            return False
        self._runs |= found
        return True

    def _even(self, ids: _Ids) -> _Ids:
        """A window without its last few tokens, so that many have the same length and go through layers together."""
        return ids[: len(ids) // _STEP * _STEP] if 2 * _STEP <= len(ids) < self._seq_len else ids

    def _split(self, rows: Iterable[Row]) -> Iterator[tuple[_Ids, Row]]:
        """Windows of `seq_len` tokens, those of one text far apart."""
        left: list[tuple[_Ids, Row]] = []
        for row in rows:
            ids = self._encode(row)
            yield ids[: self._seq_len], row
            left += [(ids[self._seq_len :], row)] if len(ids) > self._seq_len else []
        while left:
            yield from ((ids[: self._seq_len], row) for ids, row in left)
            left = [(ids[self._seq_len :], row) for ids, row in left if len(ids) > self._seq_len]

    def _packed(self, rows: Iterable[Row]) -> Iterator[tuple[_Ids, Row]]:
        """Windows of exactly `seq_len` tokens, texts of one kind one after the other; at the end what is left."""
        buffers: dict[str, tuple[_Ids, Row]] = {}
        for row in rows:
            before = buffers.get(row.kind)
            ids = self._encode(row)
            ids = ids if before is None else np.concatenate((before[0], ids))
            whole = len(ids) - len(ids) % self._seq_len
            for start in range(0, whole, self._seq_len):
                yield ids[start : start + self._seq_len], row
            buffers[row.kind] = ids[whole:], row
        yield from buffers.values()

    def _encode(self, row: Row) -> _Ids:
        special = True
        text = row.text
        if row.messages:
            text, special = self._dialogue(row)
        text = text[: self._seq_len * _CHARS_PER_TOKEN * MAX_WINDOWS]
        return encode(self._tokenizer, text, special=special)[: self._seq_len * MAX_WINDOWS]

    def _dialogue(self, row: Row) -> tuple[str, bool]:
        """Text of a dialogue and whether the tokenizer must still add its special tokens."""
        if getattr(self._tokenizer, "chat_template", None):
            return self._templated(row), False
        self.without_template += 1
        return "\n".join(map(_plain_content, row.messages)), True

    def _templated(self, row: Row) -> str:
        try:
            return render_chat(self._tokenizer, row.messages, generation=False)
        except InputError as error:
            raise InputError(
                f"{error.message} (on a dialogue of {row.source}, {row.kind})",
                "correct the dialogue (a list of role and content) or the template; rows with `text` need none",
            ) from error


def _plain_content(message: Mapping[str, Any]) -> str:
    """Text of a message: a string, or the text parts of a list of parts."""
    content = message["content"]
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
