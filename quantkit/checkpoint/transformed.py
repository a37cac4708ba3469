"""A source seen through exact transforms of its weights: the same interface, other values.

Calibration, conversion and verification read a `TransformedSource` as they read any source. Tensors that no step
touches are the source's own, bit for bit. Touched ones are computed in float64 and returned in float32: weights that
will be quantized are rounded from that, and what is kept is written as `Entry.kept_dtype` says, rounded once.

- Kept tensors keep the dtype that they have in the source, but for routers, which become float32: their values are no
  longer bf16 numbers, and rounding them again would move tokens to other experts. Engines that hold the router in
  bf16 round it when they load it and are where they would be otherwise.
- Norms whose weights were folded away are exactly one (zero for norms that multiply by 1 + weight).
- A tied output head becomes a tensor of its own when what is done to it differs from what is done to the embedding
  table, and the config says so.

Memory: the stored rows, the result in float32 and blocks of `BLOCK` float64 values; a tensor whose rows are mixed is
computed whole and the last one is kept for the rows that will be asked for next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.archs import Key, Kind
from quantkit.checkpoint.effects import Effect, Effects, Vectors, matrix_shape
from quantkit.checkpoint.formats import plain
from quantkit.checkpoint.reader import Entry, ReadInto, Source
from quantkit.checkpoint.refusals import check_transforms
from quantkit.spec.tensorfile import TensorInfo
from quantkit.spec.transform import Transforms

BLOCK = 1 << 16
"""Float64 values that are computed at once: 512 KiB, so that a rotation's passes over them stay in the cache."""

ACCELERATOR_BLOCK = 1 << 23
"""The same on an accelerator, 64 MiB: there each operation has a price of its own."""

COMPUTED = replace(plain.FORMAT, name="computed")
"""Format of a transformed tensor whose source is stored in a low-bit format; plain ones stay plain."""

_EMBED, _HEAD = Key(None, "embed"), Key(None, "lm_head")


class TransformedSource(Source):
    """A source after the steps of a transform.

    Args:
        base: any source.
        transforms: steps.
        vectors: of `scale_pair` steps.
        without_drafts: draft layers will not be written, so they need not be right.
        threads: that share the blocks of a tensor; no bit depends on them.
        device: that computes; results are on the CPU. No bit depends on it: every operation is a sum or a product.

    Attributes:
        base: the source as it is.
        transforms: as given.

    Raises:
        UsageError: the family cannot be transformed so; every reason is listed.
    """

    def __init__(
        self,
        base: Source,
        transforms: Transforms,
        vectors: Vectors | None = None,
        *,
        without_drafts: bool = False,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        check_transforms(base, transforms, without_drafts=without_drafts)
        self._threads, self._device = threads, torch.device(device)
        self.base, self.transforms = base, transforms
        self.root, self.arch, self.index, self.context = base.root, base.arch, base.index, base.context
        self.unclassified, self.notes = base.unclassified, base.notes
        self.vectors: Vectors = vectors or (lambda _set, _key: None)
        self._effects = Effects(base, transforms.steps, self.vectors)
        self._last = threading.local()
        unties = base.tied and any(self._effects.touches(key) for key in (_EMBED, _HEAD))
        self.config = _untied(base.config) if unties else base.config
        self.dims = replace(base.dims, tied=False) if unties else base.dims
        self.entries = {key: self._entry(key, entry) for key, entry in base.entries.items()}
        if unties:
            self.entries[_HEAD] = self._head()

    def is_transformed(self, key: Key) -> bool:
        """Whether the values of a stored key are computed instead of read."""
        return key not in self.base.entries or self._effects.touches(key)

    def _entry(self, key: Key, entry: Entry) -> Entry:
        if not self._effects.touches(key):
            return entry
        is_plain = entry.format.name == "plain"
        kept = "F32" if self.arch.role(key.role).kind is Kind.ROUTER else entry.dtype if is_plain else ""
        return replace(entry, format=plain.FORMAT if is_plain else COMPUTED, dtype="F32", kept_dtype=kept)

    def _head(self) -> Entry:
        """The output head of a tied source, which stands beside `model`."""
        embed = self.base.entries[_EMBED]
        prefix = embed.module.removesuffix("embed_tokens").removesuffix("model.")
        name = f"{prefix}lm_head.weight"
        stored = {"weight": _renamed(embed.stored["weight"], name)}
        return replace(self._entry(_EMBED, embed), key=_HEAD, name=name, stored=stored, dtype="F32")

    # ------------------------------------------------------------------------------------------------ reading

    def fetch(self, key: Key, rows: tuple[int, int] | None = None, into: ReadInto | None = None) -> Tensor:
        """As `Source.fetch`; float32 when the key is transformed."""
        if not self.is_transformed(key):
            return self.base.fetch(key, rows, into)
        shape = self.entries[key].shape
        if rows is not None and not 0 <= rows[0] <= rows[1] <= shape[0]:
            raise ValueError(f"rows {rows} of {self.entries[key].name} {shape}")
        start, stop = rows or (0, shape[0])
        if self.arch.role(key.role).kind is Kind.NORM:
            return self._effects.norm(key)[start:stop].float()
        if self.is_stacked(key):
            return self._experts(key, start, stop)
        return self._rows(key, start, stop)

    def fetch_lazily(self, key: Key, rows: tuple[int, int]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        mixing, columns = self._effects_on(key, None) if self.is_transformed(key) else ([], [])
        if mixing or not columns:
            return super().fetch_lazily(key, rows)
        return self._stored(key, rows), lambda some: _apply(some, [], columns, 0, self._threads, self._device)

    def _experts(self, key: Key, start: int, stop: int) -> Tensor:
        """Experts [start, stop) of a stacked tensor, as stored."""
        found = []
        for expert in range(start, stop):
            stored = self.base.canonical(key, self.base.fetch(key, (expert, expert + 1)))[0]
            found.append(_apply(stored, *self._effects_on(key, expert), 0, self._threads, self._device))
        return self.base.as_stored(key, torch.stack(found)).contiguous()

    def _effects_on(self, key: Key, expert: int | None) -> tuple[list[Effect], list[Effect]]:
        """(on rows, on columns) of the canonical matrix."""
        shape = matrix_shape(self, key)
        return self._effects.rows(key, expert, shape[0]), self._effects.columns(key, expert, shape[-1])

    def _rows(self, key: Key, start: int, stop: int) -> Tensor:
        rows, columns = self._effects_on(key, key.expert)
        total, unit = self.entries[key].shape[0], _unit(rows)
        if unit < total:
            low, high = start // unit * unit, min(-(-stop // unit) * unit, total)
            computed = _apply(self._stored(key, (low, high)), rows, columns, low, self._threads, self._device)
            return computed[start - low : stop - low]
        if getattr(self._last, "key", None) != key:
            self._last.key, self._last.value = None, None  # one at a time
            self._last.value = _apply(self._stored(key, None), rows, columns, 0, self._threads, self._device)
            self._last.key = key
        kept: Tensor = self._last.value
        return kept[start:stop].clone()

    def _stored(self, key: Key, rows: tuple[int, int] | None) -> Tensor:
        return self.base.fetch(_EMBED if key == _HEAD and key not in self.base.entries else key, rows)

    def read_stored(
        self, entry: Entry, part: str, rows: tuple[int, int] | None = None, into: ReadInto | None = None
    ) -> Tensor:
        return self.base.read_stored(self.base.entries[entry.key], part, rows, into)

    def canonical(self, key: Key, tensor: Tensor) -> Tensor:
        return self.base.canonical(key, tensor) if key in self.base.entries else tensor

    def as_stored(self, key: Key, tensor: Tensor) -> Tensor:
        return self.base.as_stored(key, tensor) if key in self.base.entries else tensor

    def digest(self) -> str:
        """Of the source as it is; the transforms are the recipe's and the calibration's."""
        return self.base.digest()

    def files_of(self, key: Key) -> set[str]:
        return self.base.files_of(key if key in self.base.entries else _EMBED)

    def close(self) -> None:
        self.base.close()


def transforms_of(source: Source) -> Transforms:
    """Steps of a source; none when it is no view."""
    return source.transforms if isinstance(source, TransformedSource) else Transforms()


def _unit(effects: list[Effect]) -> int:
    """Channels that must be computed together."""
    return max((effect.unit for effect in effects), default=1)


def _apply(
    w: Tensor, rows: list[Effect], columns: list[Effect], first: int, threads: int, device: torch.device
) -> Tensor:
    """Effects on a matrix `[N, K]` (or vector `[N]`) whose row 0 is row `first` of the whole -> float32.

    Blocks of rows where rows are independent of one another, else blocks of columns.
    """
    if w.ndim == 1:
        return _along_rows(w.double().unsqueeze(1), rows, first).squeeze(1).float()
    result = torch.empty(w.shape, dtype=torch.float32)
    n, k = w.shape
    unit, across = _unit(rows), _unit(columns)
    here = device.type == "cpu"
    size = BLOCK if here else ACCELERATOR_BLOCK
    by_rows = unit < n or across >= k
    step_n = max(1, size // k // unit) * unit if by_rows else n
    step_k = k if by_rows else max(1, size // n // across) * across

    def block(corner: tuple[int, int]) -> None:
        top, left = corner
        with torch.inference_mode():  # threads do not inherit it, and `result` may belong to it
            x = w[top : top + step_n, left : left + step_k].to(device).double()
            for effect in columns:
                x = effect(x, left)
            result[top : top + step_n, left : left + step_k] = _along_rows(x, rows, first + top)

    corners = [(top, left) for top in range(0, n, step_n) for left in range(0, k, step_k)]
    if here and min(threads, len(corners)) > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(block, corners))
    else:
        for corner in corners:
            block(corner)
    return result


def _along_rows(x: Tensor, rows: list[Effect], first: int) -> Tensor:
    if not rows:
        return x
    x = x.T.contiguous()
    for effect in rows:
        x = effect(x, first)
    return x.T


def _renamed(info: TensorInfo, name: str) -> TensorInfo:
    return TensorInfo(name, info.dtype, info.shape, info.start, info.end)


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with a head of its own."""
    changed = dict(config)
    nested = config.get("text_config")
    if isinstance(nested, dict):
        changed["text_config"] = {**nested, "tie_word_embeddings": False}
    return {**changed, "tie_word_embeddings": False}
