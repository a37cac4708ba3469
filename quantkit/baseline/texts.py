"""The inputs of a baseline, fixed once: texts of every kind, a long text, needles in it, prompts, a probe.

By default the texts are shipped ones that a default calibration does not see: it draws 512 samples in a random order of
each kind (`quantkit.calibrate.data`), these are the last ones of the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.archs import Architecture, Dims
from quantkit.archs.modeling import token_ids
from quantkit.archs.structure import attention_limits
from quantkit.calibrate.sources import Row, default_mix, parse_spec, read_rows
from quantkit.compare.companions import render_chat
from quantkit.compare.taps import spread
from quantkit.errors import InputError, UsageError
from quantkit.recipe import Calibration
from quantkit.spec.baseline import Sequence as Tokens

MIN_TOKENS = 16
POOL = 10
"""Texts of a kind that are looked at: the last ones of the shipped kinds that a default calibration leaves over."""
LONG_TOKENS = 2048
LONG_MOST = 16_384
"""Length of the long text where nothing else is asked for: at least the first, twice the largest window or top-k count
of the attention if that is more, and no more than the second."""

PROMPT_TOKENS = 48
LONG_SCORED, LONG_SAMPLED = 192, 32

_FACT, _ANSWER = " The number of the old lighthouse is", " 48213."


@dataclass(frozen=True)
class TextOptions:
    """How many inputs, and how long.

    Attributes:
        data: sources of text as `quantkit calibrate --data` takes them; empty: the shipped ones.
        texts: of each kind.
        tokens: of a text at most.
        prompts: of each kind.
        long_tokens: of the long text and of those with a needle; 0: see `LONG_TOKENS`; 1: none.
        probe_tokens: that go through each layer by themselves.
    """

    data: tuple[str, ...] = ()
    texts: int = 4
    tokens: int = 512
    prompts: int = 1
    long_tokens: int = 0
    probe_tokens: int = 192


def make_sequences(
    tokenizer: Any, arch: Architecture, dims: Dims, config: Mapping[str, Any], options: TextOptions
) -> tuple[tuple[Tokens, ...], tuple[str, ...]]:
    """The inputs, prompts without their continuation yet, and warnings.

    Raises:
        UsageError, InputError: a source of text cannot be used, or has too little text.
    """
    longest = dims.max_positions or LONG_MOST
    rows = _rows(options.data)
    texts = [text for kind, members in rows.items() for text in _texts(tokenizer, kind, members, options, longest)]
    prompts = [each for kind, members in rows.items() for each in _prompts(tokenizer, kind, members, options)]
    limits = attention_limits(arch, dims, config)
    wanted = options.long_tokens or min(max(LONG_TOKENS, 2 * max(limits, default=0) + 64), LONG_MOST)
    length = min(wanted, longest)
    long: list[Tokens] = []
    if length > 1:
        long = [_long(tokenizer, rows, length, limits), *_needles(tokenizer, rows, length, limits)]
    probe = _probe(texts, options.probe_tokens)
    missed = [str(limit) for limit in limits if length < 2 * limit]
    warnings = [f"the long text has {length} tokens: the attention's limit of {', '.join(missed)} is not crossed twice"]
    return (*texts, *long, *prompts, probe), tuple(warnings if missed else ())


def _rows(data: Sequence[str]) -> dict[str, list[Row]]:
    """Rows by kind, in the order in which they are taken."""
    mixes = tuple(parse_spec(spec) for spec in data) or default_mix()
    found: dict[str, list[Row]] = {}
    for index, mix in enumerate(mixes):
        table = read_rows(mix)
        order = np.random.default_rng([Calibration().seed, index]).permutation(len(table))[::-1]
        for position in order:
            found.setdefault(table[int(position)].kind, []).append(table[int(position)])
    return found


def _texts(tokenizer: Any, kind: str, rows: list[Row], options: TextOptions, longest: int) -> Iterator[Tokens]:
    """The longest of the first texts of a kind."""
    limit = min(options.tokens, longest)
    encoded = [_encoded(tokenizer, row) for row in rows[: max(POOL, 2 * options.texts)]]
    usable = [(text, ids[:limit]) for text, ids in encoded if len(ids) >= min(MIN_TOKENS, limit)]
    chosen = sorted(usable, key=lambda pair: -len(pair[1]))[: options.texts]
    if not chosen:
        raise InputError(f"no text of kind {kind} has {MIN_TOKENS} tokens", "give longer texts with --data")
    for number, (text, ids) in enumerate(chosen):
        yield _sequence(f"{kind}.{number}", kind, "text", ids, text, scored=tuple(range(len(ids) - 1)))


def _prompts(tokenizer: Any, kind: str, rows: list[Row], options: TextOptions) -> Iterator[Tokens]:
    """First turns of dialogues, beginnings of other texts, to be continued greedily."""
    number = 0
    for row in rows:
        if number == options.prompts:
            return
        if _templated(tokenizer, row):
            asked = [message for message in row.messages if message.get("role") == "user"][:1]
            if not asked:
                continue
            text = render_chat(tokenizer, asked)
            ids = token_ids(tokenizer, text, special=False)
        else:
            text, ids = _plain(row), token_ids(tokenizer, _plain(row))[:PROMPT_TOKENS]
        if 2 <= len(ids) <= 4 * PROMPT_TOKENS:
            yield _sequence(f"prompt.{kind}.{number}", kind, "prompt", ids, text)
            number += 1


def _long(tokenizer: Any, rows: dict[str, list[Row]], length: int, limits: tuple[int, ...]) -> Tokens:
    ids = _stream(tokenizer, rows, length)
    around = {place + step for limit in limits for place in (limit, 2 * limit) for step in range(-3, 3)}
    places = {*spread(length - 1, LONG_SCORED).tolist(), *around}
    scored = tuple(sorted(place for place in places if 0 <= place < length - 1))
    return _sequence("long", "long", "long", ids, scored=scored, sampled=tuple(spread(length, LONG_SAMPLED).tolist()))


def _needles(tokenizer: Any, rows: dict[str, list[Row]], length: int, limits: tuple[int, ...]) -> Iterator[Tokens]:
    """A fact at several places of a long text that ends with the question for it, and the same without the fact."""
    fact = token_ids(tokenizer, _FACT, special=False)
    answer = token_ids(tokenizer, _ANSWER, special=False)
    room = length - 2 * (len(fact) + len(answer))
    if room < 4:
        return
    filler = _stream(tokenizer, rows, room)
    end = min(8, room // 4)
    places = {"nowhere": -1, "start": room - end, "middle": room // 2, "end": end}
    for limit in limits:
        # the answer is copied from `distance` tokens back: just inside the limit, just beyond it, at twice of it
        near = len(fact) + len(answer)
        for name, distance in (("below", limit - near), ("at", limit), ("twice", 2 * limit)):
            places[f"{name} {limit}"] = distance - near
    for name, after in places.items():
        if after >= room:
            continue
        cut = room - after
        inside = [] if after < 0 else [*fact, *answer]
        ids = [*filler[:cut], *inside, *filler[cut:]] if inside else filler
        start = len(ids) + len(fact)
        ids = [*ids, *fact, *answer]
        scored = tuple(range(start - 1, len(ids) - 1))
        distance = after + len(fact) + len(answer) if inside else 0
        yield _sequence(f"needle.{name}", "needle", "needle", ids, scored=scored, distance=distance)


def _probe(texts: list[Tokens], tokens: int) -> Tokens:
    """Pieces of every kind, one after the other."""
    first = {text.kind: text for text in reversed(texts)}
    share = max(2, tokens // len(first))
    ids = [token for text in reversed(first.values()) for token in text.ids[:share]]
    return _sequence("probe", "", "probe", ids, scored=tuple(range(len(ids) - 1)), sampled=tuple(range(len(ids))))


def _stream(tokenizer: Any, rows: dict[str, list[Row]], length: int) -> list[int]:
    """Texts of all kinds in turn, joined, cut to `length` tokens."""
    ids: list[int] = []
    longest = max(map(len, rows.values()))
    for number in range(longest):
        for members in rows.values():
            if number < len(members):
                ids += token_ids(tokenizer, _plain(members[number]))
            if len(ids) >= length:
                return ids[:length]
    if not ids:
        raise InputError("the sources hold no text", "give texts with --data")
    return (ids * (length // len(ids) + 1))[:length]


def _sequence(name: str, kind: str, use: Any, ids: Sequence[int], text: str = "", **positions: Any) -> Tokens:
    return Tokens(name=name, kind=kind, use=use, text=text, ids=tuple(ids), prompt_tokens=len(ids), **positions)


def _encoded(tokenizer: Any, row: Row) -> tuple[str, list[int]]:
    """Text and ids of a row as a calibration feeds it: dialogues under the chat template where there is one."""
    if not _templated(tokenizer, row):
        return _plain(row), token_ids(tokenizer, _plain(row))
    text = render_chat(tokenizer, row.messages, generation=False)
    return text, token_ids(tokenizer, text, special=False)


def _templated(tokenizer: Any, row: Row) -> bool:
    return bool(row.messages and getattr(tokenizer, "chat_template", None))


def _plain(row: Row) -> str:
    return row.text or "\n".join(str(message.get("content") or "") for message in row.messages)


def check(options: TextOptions) -> None:
    """Raise a UsageError for numbers that make no sense together."""
    if options.probe_tokens < 2 or options.tokens < 2:
        raise UsageError("a text needs two tokens or more", "raise --tokens or --probe-tokens")
