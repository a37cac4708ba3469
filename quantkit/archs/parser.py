"""`Architecture.parse` for whole checkpoints: half a million names are about a hundred patterns, each parsed once."""

from __future__ import annotations

import re

from quantkit.archs.base import Architecture
from quantkit.archs.roles import Key

_NUMBER = re.compile(r"(?<=\.)[0-9]{1,9}(?=\.)")
"""A component that is a number, of as many digits as `base` takes for one; `w1` and `w2` stay apart."""


class NameParser:
    """`Architecture.parse`, remembered by the name without its layer and expert."""

    def __init__(self, arch: Architecture) -> None:
        self._arch = arch
        self._seen: dict[str, tuple[Key, int | None, int | None] | None] = {}

    def parse(self, name: str) -> Key | None:
        """Key of a tensor name, None when no rule knows it."""
        pattern = _NUMBER.sub("#", name)
        if pattern not in self._seen:
            self._seen[pattern] = self._learn(name)
        known = self._seen[pattern]
        if known is None:  # unknown or opaque: the whole name counts
            return self._arch.parse(name)
        key, layer_at, expert_at = known
        numbers = _NUMBER.findall(name)
        layer = None if layer_at is None else int(numbers[layer_at])
        expert = None if expert_at is None else int(numbers[expert_at])
        return Key(layer, key.role, expert, key.part)

    def _learn(self, name: str) -> tuple[Key, int | None, int | None] | None:
        """Key of the pattern, and which of its numbers are layer and expert: parsed with a different one at each."""
        places = iter(range(len(name)))
        key = self._arch.parse(_NUMBER.sub(lambda _: str(next(places)), name))
        return None if key is None or key.label else (key, key.layer, key.expert)
