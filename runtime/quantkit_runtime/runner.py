"""Forward passes over sequences that keep their past: in the paged cache, or in transformers' own where that must be.

All runners take the same chunks, so the engine does not know which of them it drives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import first_line
from quantkit_runtime.attention import NAME, Step, implementation
from quantkit_runtime.kernels.reference import Rope, rotated
from quantkit_runtime.kernels.tuning import tuning
from quantkit_runtime.kv_cache import KvCache, Layer
from quantkit_runtime.memory import cache_bytes
from quantkit_runtime.packing import Form, sizes

Recorded = tuple[torch.cuda.CUDAGraph, Tensor, Tensor]
"""A graph, what it reads and the logits that it leaves."""

Size = TypeVar("Size", int, Form)


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
        attend: a `paged_prefill` kernel; None computes prefill attention in torch, sequence by sequence.
        no_kernel: why it is None.

    Attributes:
        graphs, prefill_graphs: what is recorded: (graph, its input, its logits) by number of sequences, and by form.
        eager_because, prefill_eager_because: why nothing is.
        replays: forwards of each phase that were replays; eager_prefills: those of prefill that were not.
    """

    def __init__(
        self,
        model: Any,
        cache: KvCache,
        device: torch.device,
        decode: Callable[..., Tensor],
        rope_write: Callable[..., Tensor] | None = None,
        attend: Callable[..., Tensor] | None = None,
        no_kernel: str = "",
    ) -> None:
        self.model, self.cache, self.device, self.decode = model, cache, device, decode
        dims = {dim for layer in cache.layers.values() for dim in (layer.spec.key_dim, layer.spec.value_dim)}
        self._rope_write = rope_write if len(dims) == 1 else None
        self.attend, self._heads = attend, max((layer.spec.queries for layer in cache.layers.values()), default=1)
        self.attention = f"torch ({no_kernel})" if attend is None else "one kernel"
        self.reserve, self.release, self.nbytes = cache.reserve, cache.release, cache.nbytes
        self.kind = f"paged, {cache.format.name}, blocks of {cache.format.block}"
        self.graphs: dict[int, Recorded] = {}
        self.prefill_graphs: dict[Form, Recorded] = {}
        self.eager_because = self.prefill_eager_because = "no graphs were asked for"
        self.replays, self.eager_prefills = {"prefill": 0, "decode": 0}, 0

    def forward(self, chunks: list[Chunk], every_token: bool = False) -> Tensor:
        """Logits `[B, V]` of the last token of every chunk, or `[T, V]` of all; their blocks are reserved."""
        if all(len(chunk.ids) == 1 for chunk in chunks):
            return self._decode(chunks)
        ids = [token for chunk in chunks for token in chunk.ids]
        positions = [at for chunk in chunks for at in range(chunk.start, chunk.stop)]
        slots = np.concatenate([self.cache.slots(*chunk[:2], chunk.stop) for chunk in chunks], axis=1)
        shapes = [(len(chunk.ids), chunk.stop) for chunk in chunks]
        tables = self._tables(chunks, len(chunks), 0)
        return self.prefill(np.concatenate(([ids, positions], slots)), tables, shapes, every_token)

    def prefill(
        self, rows_RT: Any, tables: Any, shapes: Sequence[tuple[int, int]], every_token: bool = False
    ) -> Tensor:
        """Arguments as `Form.pack`, on the host.

        Returns:
            Logits of the last token of each sequence, or of every token.
        """
        least = self.form(rows_RT.shape[1], *tables.shape)
        form = min((form for form in self.prefill_graphs if form.holds(least)), default=None)
        if form is None or every_token:
            self.eager_prefills += 1
            return self.prefill_packed(least.pack(rows_RT, tables, shapes).to(self.device), least, shapes, every_token)
        graph, packed, logits = self.prefill_graphs[form]
        packed.copy_(form.pack(rows_RT, tables, shapes))
        graph.replay()
        self.replays["prefill"] += 1
        return logits[: len(shapes)]

    def form(self, tokens: int, sequences: int, groups: int, width: int) -> Form:
        queries = tuning().prefill_shape(tokens, self._heads).queries if self.attend is not None else 0
        return Form(tokens, sequences, groups, width, queries)

    def prefill_packed(
        self, packed: Tensor, form: Form, shapes: Sequence[tuple[int, int]] = (), every_token: bool = False
    ) -> Tensor:
        """As `prefill`, from what `form` packed; `shapes` are only read where attention runs in torch."""
        rows, last, tables, tiles = form.parts(packed)
        own = (self.attend, tiles) if self.attend is not None else (None, None, shapes)
        return self._run(rows, 0 if every_token else last, Step(self.cache, self._writer(rows[2:]), tables, *own))

    def decode_rows(self, rows: Tensor) -> Tensor:
        """One token of each sequence from int32 rows `[B, row_width]`: id, position, then slots and tables by group."""
        groups = len(self.cache.rings)
        packed = rows[:, : 2 + groups].T.contiguous().long()  # once, and not by every layer that reads it
        tables = rows[:, 2 + groups :].unflatten(1, (groups, -1))
        step = Step(self.cache, self._writer(packed[2:]), tables, self.decode, rows[:, 1] + 1)
        return self._run(packed, 0, step)

    def row_width(self, blocks: int) -> int:
        """Width of a row of `decode_rows` with tables of so many blocks."""
        return 2 + len(self.cache.rings) * (1 + blocks)

    def capture(self, batch: int, width: int, chunk: int, agree: Callable[[str], str] = str) -> None:
        """Record forwards with tables of `width` blocks as graphs: decode steps of 1, 2, 4, ... `batch` sequences, and
        prefill of `chunk` tokens of up to `batch` sequences, of half as many, and so on; 0: no memory for prefill.

        `agree` makes of why this rank has no graph why some rank has none: padding is part of what ranks exchange, so
        that one with a graph and one without cannot run together.
        """
        if not records(self.device):
            self.eager_because = self.prefill_eager_because = "graphs need a card"
            return
        pool, groups = torch.cuda.graph_pool_handle(), len(self.cache.rings)

        def decode(size: int) -> Recorded:
            rows = torch.zeros((size, self.row_width(width)), dtype=torch.int32, device=self.device)
            return _recorded(partial(self.decode_rows, rows), rows, pool)

        def prefill(form: Form) -> Recorded:
            packed = form.empty().to(self.device)
            return _recorded(partial(self.prefill_packed, packed, form), packed, pool)

        steps = sorted({min(1 << power, batch) for power in range(batch.bit_length() + 1)}, reverse=True)
        if why := _fill(self.graphs, steps, decode, agree):
            self.eager_because = self.prefill_eager_because = why
            return
        why = f"attention: {self.attention}" if self.attend is None else "" if chunk else "no memory for it"
        forms = [self.form(tokens, min(batch, tokens), groups, width) for tokens in sizes(chunk)]
        self.prefill_eager_because = agree(why) or _fill(self.prefill_graphs, forms, prefill, agree)

    def _decode(self, chunks: list[Chunk]) -> Tensor:
        width = self.row_width(max(len(self.cache.tables[chunk.sequence][0]) for chunk in chunks))
        fitting = (size for size, (_, rows, _) in self.graphs.items() if size >= len(chunks) and rows.shape[1] >= width)
        size = min(fitting, default=0)
        if not size:
            return self.decode_rows(torch.from_numpy(self._rows(chunks, len(chunks), 0)).to(self.device))
        graph, rows, logits = self.graphs[size]
        rows.copy_(torch.from_numpy(self._rows(chunks, size, rows.shape[1])))
        graph.replay()
        self.replays["decode"] += 1
        return logits[: len(chunks)]

    def _rows(self, chunks: list[Chunk], size: int, width: int) -> Any:
        """Rows for `decode_rows`, of this width or as wide as they must be; what is added to reach `size` writes to
        block 0."""
        groups = len(self.cache.rings)
        firsts = np.zeros((size, 2 + groups), dtype=np.int32)
        for row, chunk in zip(firsts, chunks, strict=False):
            slots = (slot for (slot,) in self.cache.slots(*chunk[:2], chunk.stop))
            row[:] = (chunk.ids[0], chunk.start, *slots)
        tables = self._tables(chunks, size, (width - 2) // groups - 1)
        return np.concatenate((firsts, tables.reshape(size, -1)), axis=1)

    def _tables(self, chunks: list[Chunk], size: int, width: int) -> Any:
        """Block tables int32 `[size, groups, width]`, or as wide as they must be for a width below 1."""
        tables = [self.cache.tables[chunk.sequence] for chunk in chunks]
        width = width if width > 0 else max(len(whole) for whole, *_ in tables)
        padded = np.zeros((size, len(self.cache.rings), width), dtype=np.int32)
        for row, groups in zip(padded, tables, strict=False):
            row[:, : len(groups[0])] = groups
        return padded

    def _writer(self, slots_GT: Tensor) -> Callable[[Layer, Tensor, Tensor, Tensor, Rope | None], Tensor]:
        """Writes a layer's keys and values to the slots of its group; see `Step.write`."""
        kernel = self._rope_write

        def write(layer: Layer, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, rope: Rope | None) -> Tensor:
            slots_T = slots_GT[layer.group]
            if kernel is not None:
                stores = layer.keys.data, layer.keys.scale, layer.values.data, layer.values.scale
                return kernel(q_THD, k_TGD, v_TGD, rope, slots_T, *stores)
            layer.write(slots_T, rotated(k_TGD, rope), v_TGD)
            return rotated(q_THD, rope)

        return write

    def _run(self, packed_RT: Tensor, last: Any, step: Step) -> Tensor:
        ids, positions = packed_RT[0:1], packed_RT[1:2]
        with torch.no_grad(), implementation(self.model, NAME):
            out = self.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=last, step=step)
        logits: Tensor = out.logits[0]
        return logits


def records(device: torch.device) -> bool:
    """Whether forwards can be recorded there at all."""
    return device.type == "cuda"


def _fill(
    graphs: dict[Size, Recorded],
    all_sizes: Iterable[Size],
    record: Callable[[Size], Recorded],
    agree: Callable[[str], str],
) -> str:
    """A graph of every size, or none and why."""
    why = ""
    for size in all_sizes:
        try:
            graphs[size] = record(size)
        except Exception as error:  # an operation that waits for the device, or a compiler's own errors
            why = first_line(error)
        if why := agree(why):  # at once: others would wait for this rank in the next forward
            graphs.clear()
            break
    return why


def _recorded(run: Callable[[], Tensor], given: Tensor, pool: Any) -> Recorded:
    """`run` as a graph, which reads `given`."""
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # lazy initialization must not be recorded
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        logits = run()
    return graph, given, logits


class TransformersRunner:
    """Runs one sequence after the other, each with a cache of transformers.

    For models whose layers keep a state that blocks do not hold; `kind` says which.
    """

    def __init__(self, model: Any, device: torch.device, why: str) -> None:
        self.model, self.device, self.kind = model, device, f"transformers' own, not paged: {why}"
        self.attention = "transformers"
        self.eager_because = self.prefill_eager_because = "transformers' cache grows"
        self.graphs: dict[int, Any] = {}
        self.prefill_graphs: dict[Form, Any] = {}
        self.replays, self.eager_prefills = {"prefill": 0, "decode": 0}, 0
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

        rows, self.eager_prefills = [], self.eager_prefills + any(len(chunk.ids) > 1 for chunk in chunks)
        for chunk in chunks:
            cache = self.caches.setdefault(chunk.sequence, DynamicCache(config=self.model.config))
            ids = torch.tensor([chunk.ids], device=self.device)
            with torch.no_grad():
                out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            rows.append(out.logits[0, -1])
        return torch.stack(rows)


def prefill_facts(runner: PagedRunner | TransformersRunner) -> dict[str, Any]:
    """How prefill runs, for reports: attention, tokens of recorded forwards or why there are none, and how many
    forwards were replays or eager."""
    return {
        "attention": runner.attention,
        "graphs": sorted(form.tokens for form in runner.prefill_graphs),
        "eager_because": "" if runner.prefill_graphs else runner.prefill_eager_because,
        "replays": runner.replays["prefill"],
        "eager": runner.eager_prefills,
    }


Runner = PagedRunner | TransformersRunner
