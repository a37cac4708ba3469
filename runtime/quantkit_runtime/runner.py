"""Forward passes over sequences that keep their past: in the paged cache, or in transformers' own where that must be.

Both runners take the same chunks, so the engine does not know which of them it drives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quantkit_runtime.attention import NAME, Step, implementation
from quantkit_runtime.kv_cache import KvCache, KvFormat
from quantkit_runtime.memory import cache_bytes

if TYPE_CHECKING:
    from quantkit_runtime.graft import LoadedModel


class Chunk(NamedTuple):
    """New tokens of a sequence, the first of them at position `start`."""

    sequence: int
    start: int
    ids: list[int]

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


class PagedRunner:
    """Runs packed tokens of many sequences at once.

    Args:
        model: transformers' causal language model whose attention goes through `attention.NAME`.
        cache: the pool.
        device: where both lie.
    """

    def __init__(self, model: Any, cache: KvCache, device: torch.device) -> None:
        self.model, self.cache, self.device = model, cache, device
        self.reserve, self.release, self.nbytes = cache.reserve, cache.release, cache.nbytes

    def forward(self, chunks: list[Chunk]) -> Tensor:
        """Logits `[B, V]` of the last token of every chunk; their blocks are reserved."""
        ids = [token for chunk in chunks for token in chunk.ids]
        positions = [at for chunk in chunks for at in range(chunk.start, chunk.stop)]
        step = self.step(chunks)
        last = torch.tensor([len(chunk.ids) for chunk in chunks], device=self.device).cumsum(0) - 1
        return self.run(self._long([ids]), self._long([positions]), last, step)

    def step(self, chunks: list[Chunk]) -> Step:
        tables = [self.cache.tables[chunk.sequence] for chunk in chunks]
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]
        slots = [slot for chunk in chunks for slot in self.cache.slots(*chunk[:2], chunk.stop)]
        one_each = all(len(chunk.ids) == 1 for chunk in chunks)
        return Step(
            self.cache,
            self._long(slots),
            torch.tensor(padded, dtype=torch.int32, device=self.device),
            torch.tensor([chunk.stop for chunk in chunks], dtype=torch.int32, device=self.device),
            () if one_each else tuple((len(chunk.ids), chunk.stop) for chunk in chunks),
        )

    def run(self, ids: Tensor, positions: Tensor, last: Tensor, step: Step) -> Tensor:
        """Packed ids and positions `[1, T]` -> logits `[B, V]` at the places `last`."""
        with torch.no_grad(), implementation(self.model, NAME):
            out = self.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last, step=step)
        logits: Tensor = out.logits[0]
        return logits

    def _long(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


class TransformersRunner:
    """Runs one sequence after the other, each with a cache of transformers.

    For models whose layers keep a state that blocks do not hold; `why` says which.
    """

    def __init__(self, model: Any, device: torch.device, why: str) -> None:
        self.model, self.device, self.why = model, device, why
        self.caches: dict[int, Any] = {}
        self.nbytes = 0  # of all caches, as they were when a sequence last ended

    def reserve(self, sequence: int, tokens: int) -> bool:
        return True

    def release(self, sequence: int) -> None:
        self.nbytes = sum(map(cache_bytes, self.caches.values()))
        self.caches.pop(sequence, None)

    def forward(self, chunks: list[Chunk]) -> Tensor:
        """Logits `[B, V]` of the last token of every chunk."""
        from transformers import DynamicCache

        rows = []
        for chunk in chunks:
            cache = self.caches.setdefault(chunk.sequence, DynamicCache(config=self.model.config))
            ids = torch.tensor([chunk.ids], device=self.device)
            with torch.no_grad():
                out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            rows.append(out.logits[0, -1])
        return torch.stack(rows)


def make_runner(loaded: LoadedModel, fmt: KvFormat, blocks: int) -> PagedRunner | TransformersRunner:
    """The paged runner with a pool of this many blocks (block 0 included), or the other where the model needs it."""
    if isinstance(loaded.kv, str):
        return TransformersRunner(loaded.model, loaded.device.torch, loaded.kv)
    cache = KvCache(loaded.kv, fmt, blocks, loaded.device.torch)
    return PagedRunner(loaded.model, cache, loaded.device.torch)
