"""Forward passes over sequences that keep their past: in the paged cache, or in transformers' own where that must be.

All runners take the same chunks, so the engine does not know which of them it drives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import first_line
from quantkit_runtime.attention import NAME, Step, implementation
from quantkit_runtime.kv_cache import KvCache, Layer
from quantkit_runtime.memory import cache_bytes


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
        model: transformers' causal language model.
        cache: the pool.
        device: where both lie.
        decode: the `paged_decode` kernel.
        rope_write: a kernel that writes keys and values as one; None writes them in torch.
    """

    def __init__(
        self,
        model: Any,
        cache: KvCache,
        device: torch.device,
        decode: Callable[..., Tensor],
        rope_write: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model, self.cache, self.device, self.decode = model, cache, device, decode
        dims = {dim for layer in cache.layers.values() for dim in (layer.spec.key_dim, layer.spec.value_dim)}
        self._rope_write = rope_write if len(dims) == 1 else None
        self.reserve, self.release, self.nbytes = cache.reserve, cache.release, cache.nbytes
        self.kind = f"paged, {cache.format.name}, blocks of {cache.format.block}"
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.eager_because = "no graphs were asked for"

    def forward(self, chunks: list[Chunk], every_token: bool = False) -> Tensor:
        """Logits `[B, V]` of the last token of every chunk, or `[T, V]` of all; their blocks are reserved."""
        if all(len(chunk.ids) == 1 for chunk in chunks):
            return self._decode(chunks)
        ids = [token for chunk in chunks for token in chunk.ids]
        positions = [at for chunk in chunks for at in range(chunk.start, chunk.stop)]
        slots = [slot for chunk in chunks for slot in self.cache.slots(*chunk[:2], chunk.stop)]
        shapes = tuple((len(chunk.ids), chunk.stop) for chunk in chunks)
        packed = torch.tensor([ids, positions, slots], device=self.device)
        table = torch.from_numpy(self._tables(chunks, len(chunks), 0)).to(self.device)
        return self.prefill(packed, table, shapes, every_token)

    def prefill(
        self, packed_3T: Tensor, table: Tensor, shapes: tuple[tuple[int, int], ...], every_token: bool = False
    ) -> Tensor:
        """Ids, positions and slots of packed tokens; (tokens, length after them) of each sequence.

        Returns:
            Logits of the last token of each sequence, or of every token.
        """
        last: Any = (
            0 if every_token else torch.tensor([tokens for tokens, _ in shapes], device=self.device).cumsum(0) - 1
        )
        lengths = torch.tensor([length for _, length in shapes], dtype=torch.int32, device=self.device)
        write = self._writer(packed_3T[2])
        return self._run(packed_3T, last, Step(self.cache, write, table, lengths, self.decode, shapes))

    def decode_rows(self, rows: Tensor) -> Tensor:
        """One token of each sequence from int32 rows `[B, 3 + blocks]`: id, position, slot, block table."""
        packed = rows[:, :3].T.long()
        step = Step(self.cache, self._writer(packed[2]), rows[:, 3:], rows[:, 1] + 1, self.decode)
        return self._run(packed, 0, step)

    def capture(self, batch: int, width: int) -> None:
        """Record decode steps of 1, 2, 4, ... `batch` sequences with tables of `width` blocks as graphs."""
        if self.device.type != "cuda":
            self.eager_because = "graphs need a card"
            return
        pool = torch.cuda.graph_pool_handle()
        sizes = sorted({min(1 << power, batch) for power in range(batch.bit_length() + 1)}, reverse=True)
        try:
            for size in sizes:
                rows = torch.zeros((size, 3 + width), dtype=torch.int32, device=self.device)
                torch.cuda.synchronize()
                with torch.cuda.stream(torch.cuda.Stream()):  # lazy initialization must not be recorded
                    self.decode_rows(rows)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    logits = self.decode_rows(rows)
                self.graphs[size] = graph, rows, logits
        except RuntimeError as error:  # an operation that waits for the device cannot be recorded
            self.graphs.clear()
            self.eager_because = first_line(error)

    def _decode(self, chunks: list[Chunk]) -> Tensor:
        size = min((size for size in self.graphs if size >= len(chunks)), default=0)
        if not size:
            return self.decode_rows(torch.from_numpy(self._rows(chunks, len(chunks), 0)).to(self.device))
        graph, rows, logits = self.graphs[size]
        rows.copy_(torch.from_numpy(self._rows(chunks, size, rows.shape[1] - 3)))
        graph.replay()
        return logits[: len(chunks)]

    def _rows(self, chunks: list[Chunk], size: int, width: int) -> Any:
        """Rows for `decode_rows`; what is added to reach `size` writes to block 0."""
        firsts = np.zeros((size, 3), dtype=np.int32)
        slots = (self.cache.slots(chunk.sequence, chunk.start, chunk.stop)[0] for chunk in chunks)
        firsts[: len(chunks)] = [(chunk.ids[0], chunk.start, slot) for chunk, slot in zip(chunks, slots, strict=True)]
        return np.concatenate((firsts, self._tables(chunks, size, width)), axis=1)

    def _tables(self, chunks: list[Chunk], size: int, width: int) -> Any:
        tables = [self.cache.tables[chunk.sequence] for chunk in chunks]
        padded = np.zeros((size, width or max(map(len, tables))), dtype=np.int32)
        for row, table in zip(padded, tables, strict=False):
            row[: len(table)] = table
        return padded

    def _writer(self, slots_T: Tensor) -> Callable[[Layer, Tensor, Tensor], None]:
        kernel = self._rope_write
        if kernel is None:
            return lambda layer, k_TGD, v_TGD: layer.write(slots_T, k_TGD, v_TGD)
        dim = next(iter(self.cache.layers.values())).spec.key_dim
        cos, sin = (torch.full((len(slots_T), dim), value, device=self.device) for value in (1.0, 0.0))

        def write(layer: Layer, k_TGD: Tensor, v_TGD: Tensor) -> None:
            """The keys are rotated already: here by nothing."""
            kv_TD = torch.cat((k_TGD, v_TGD), 1).flatten(1)
            kernel(kv_TD, cos, sin, slots_T, layer.keys.data, layer.keys.scale, layer.values.data, layer.values.scale)

        return write

    def _run(self, packed_3T: Tensor, last: Any, step: Step) -> Tensor:
        ids, positions = packed_3T[0:1], packed_3T[1:2]
        with torch.no_grad(), implementation(self.model, NAME):
            out = self.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last, step=step)
        logits: Tensor = out.logits[0]
        return logits


class TransformersRunner:
    """Runs one sequence after the other, each with a cache of transformers.

    For models whose layers keep a state that blocks do not hold; `kind` says which.
    """

    def __init__(self, model: Any, device: torch.device, why: str) -> None:
        self.model, self.device, self.kind = model, device, f"transformers' own, not paged: {why}"
        self.eager_because = "transformers' cache grows"
        self.graphs: dict[int, Any] = {}
        self.caches: dict[int, Any] = {}
        self.nbytes = 0  # most of all caches when a sequence ended

    def reserve(self, sequence: int, tokens: int) -> bool:
        return True

    def release(self, sequence: int) -> None:
        self.nbytes = max(self.nbytes, sum(map(cache_bytes, self.caches.values())))
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


Runner = PagedRunner | TransformersRunner
