"""Rank shards as a source: whole tensors gathered from the slices that the manifest describes.

A `ShardedSource` looks like the checkpoint that was converted, INT8 where it was quantized, so splitting it for another
mesh and merging it back are conversions like any other, without requantizing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quantkit.archs import Key, architecture_for, with_roles
from quantkit.checkpoint.formats import FormatContext, int8_channel, plain
from quantkit.checkpoint.reader import QUANTIZED_PARTS, Entry, OpenFiles, ReadInto, Source
from quantkit.convert.boxes import Box, boxes, is_stacked, overlap
from quantkit.convert.packing import stored_rows
from quantkit.errors import InputError, QuantkitError
from quantkit.spec.files import is_file
from quantkit.spec.index import INDEX_NAME, SINGLE_NAME, CheckpointIndex, read_json
from quantkit.spec.manifest import SHARDED_NAME, Manifest, TensorRecord, read_manifest
from quantkit.spec.tensorfile import TensorInfo, read_header, tensor_nbytes, torch_dtype

Place = tuple[Box, TensorRecord]


@dataclass
class Whole:
    """A tensor of the whole model, spread over records of one name.

    Attributes:
        record: any of them.
        places: expert (None when there is none) -> distinct boxes; replicas are left out.
        starts: first row of each part of a fused tensor.
        sources: names that it was made of; one without elements has no boxes that would say so.
        rows: of one expert.
    """

    record: TensorRecord
    places: dict[int | None, dict[tuple[int, int, int, int], Place]] = field(default_factory=lambda: defaultdict(dict))
    starts: list[int] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)

    @property
    def rows(self) -> int:
        shape = self.record.global_shape
        return shape[1] if is_stacked(self.record) else (shape[0] if shape else 1)

    @property
    def tail(self) -> tuple[int, ...]:
        """Sizes after the rows."""
        return self.record.global_shape[2 if is_stacked(self.record) else 1 :]

    def add(self, record: TensorRecord) -> bool:
        """Take in a part; False when it cannot be one of the tensor that the others are parts of."""
        if _in_common(record) != _in_common(self.record):
            return False
        self.sources.update(record.sources)
        for box in boxes(record):
            self.places[box.expert].setdefault((box.start, box.stop, box.left, box.right), (box, record))
        row_dim = 1 if is_stacked(record) else 0
        starts = [start for dim, start, _ in record.slices if dim == row_dim]
        self.starts = list(map(min, self.starts, starts)) if self.starts else starts
        return True


def _in_common(record: TensorRecord) -> tuple[object, ...]:
    """What all parts of a tensor share: ids of stacked experts, slices and so shapes differ by rank."""
    stacked = is_stacked(record)
    same = record.layer, record.part, record.dtype, record.global_shape, record.scale
    return *same, stacked, () if stacked else record.experts


class Gathered:
    """Reads rows of whole tensors from rank files."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.wholes: dict[str, Whole] = {}
        self._files = OpenFiles(root)
        odd = [
            record.name
            for record in manifest.tensors
            if not record.alias and not self.wholes.setdefault(record.name, Whole(record)).add(record)
        ]
        if odd:
            raise InputError(f"{root}: the parts of its ranks are not of the same tensors", "convert again", items=odd)
        overlapping = [
            name
            for name, whole in self.wholes.items()
            if any(overlap(box for box, _ in places.values()) for places in whole.places.values())
        ]
        if overlapping:
            raise InputError(f"{root}: the parts of its ranks overlap", "convert again", items=overlapping)

    def rows(self, name: str, expert: int | None, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a whole matrix `[rows, ...]`, of one expert where experts are stacked.

        Raises:
            InputError: no rank holds some of them.
        """
        whole = self.wholes[name]
        width = math.prod(whole.tail)
        result = torch.empty(stop - start, width, dtype=torch_dtype(whole.record.dtype))
        filled = 0
        for box, record in whole.places.get(expert, {}).values():
            low, high = max(start, box.start), min(stop, box.stop)
            if low < high:
                first = box.row + low - box.start
                result[low - start : high - start, box.left : box.right] = stored_rows(
                    self._files, record, box.slot, first, first + high - low
                )
                filled += (high - low) * (box.right - box.left)
        if filled != result.numel():
            raise InputError(f"{name}: the ranks hold {filled} of {result.numel()} elements of rows {start} to {stop}")
        return result.reshape(stop - start, *whole.tail)

    def close(self) -> None:
        self._files.close()


@dataclass(frozen=True)
class _Part:
    """Where a stored tensor lies in whole ones: names of weight and scales, first row, rows."""

    name: str
    scale: str
    start: int
    rows: int


class ShardedSource(Source):
    """A folder of rank shards, by key of the source that was converted."""

    def __init__(self, root: Path, manifest: Manifest, extra_roles: Mapping[str, str] | None = None) -> None:
        self.root, self.manifest = root, manifest
        self.config = read_json(root / "config.json")
        roles = {**manifest.recipe_roles, **(extra_roles or {})}
        self.arch = with_roles(architecture_for(self.config), roles) if roles else architecture_for(self.config)
        self.dims = self.arch.dims(self.config)
        names = sorted({record.file for record in manifest.tensors})
        self.index = CheckpointIndex(root, {name: read_header(root / name) for name in names}, {})
        self.context = FormatContext()
        self.unclassified, self.notes = [], []
        self._gathered = Gathered(root, manifest)
        self._parts: dict[Key, _Part] = {}
        self.entries = self._entries()

    def _entries(self) -> dict[Key, Entry]:
        found: dict[Key, Entry] = {}
        for name, whole in self._gathered.wholes.items():
            record = whole.record
            if record.part not in ("weight", "bias") or (self.manifest.tied_embeddings and record.role == "lm_head"):
                continue
            for source in sorted(whole.sources):
                key = self.arch.parse(source)
                if key is None:
                    raise InputError(f"{self.root}: no rule knows the source tensor {source} of {name}")
                key = key.with_part(record.part)
                self._parts[key] = self._part(whole, key)
                found[key] = self._entry(whole, key, source)
        return found

    def _part(self, whole: Whole, key: Key) -> _Part:
        record, members = whole.record, self.arch.role(whole.record.role).parts
        if key.role == record.role or key.role not in members:
            return _Part(record.name, record.scale, 0, whole.rows)
        position = members.index(key.role)
        ends = [*whole.starts[1:], whole.rows]
        if len(ends) != len(members) or whole.starts != sorted(whole.starts):
            raise InputError(
                f"{self.root}: {record.name} does not hold {', '.join(members)} one after the other", "convert again"
            )
        return _Part(record.name, record.scale, whole.starts[position], ends[position] - whole.starts[position])

    def _entry(self, whole: Whole, key: Key, source: str) -> Entry:
        record, part = whole.record, self._parts[key]
        shape = record.global_shape
        if is_stacked(record):
            lead = (record.global_shape[0],) if key.expert is None else ()
            shape = (*lead, part.rows, *whole.tail)
        elif shape:
            shape = (part.rows, *whole.tail)
        int8 = record.dtype == "I8" and bool(record.scale)
        infos = {"weight": TensorInfo(source, record.dtype, shape, 0, tensor_nbytes(record.dtype, shape))}
        if int8:
            scale_shape = (*shape[:-1], 1)
            infos["weight_scale"] = TensorInfo(record.scale, "F32", scale_shape, 0, tensor_nbytes("F32", scale_shape))
        row = int8_channel.FORMAT if int8 else plain.FORMAT
        return Entry(key, _plain_name(source), infos, row, shape, row.dtype(infos))

    def read_stored(
        self, entry: Entry, part: str, rows: tuple[int, int] | None = None, into: ReadInto | None = None
    ) -> Tensor:
        where = self._parts[entry.key]
        name = where.name if part == "weight" else where.scale
        stacked = is_stacked(self._gathered.wholes[where.name].record)
        if stacked and entry.key.expert is None:
            chosen = range(*(rows or (0, entry.shape[0])))
            return torch.stack([self._whole_rows(name, where, expert, None) for expert in chosen])
        result = self._whole_rows(name, where, entry.key.expert if stacked else self._only(name), rows)
        return result if entry.shape else result.reshape(())

    def _only(self, name: str) -> int | None:
        """The expert under which a tensor that stacks none is filed."""
        return next(iter(self._gathered.wholes[name].places), None)  # none where it has no elements

    def _whole_rows(self, name: str, where: _Part, expert: int | None, rows: tuple[int, int] | None) -> Tensor:
        first, last = rows or (0, where.rows)
        return self._gathered.rows(name, expert, where.start + first, where.start + last)

    def fetch(self, key: Key, rows: tuple[int, int] | None = None, into: ReadInto | None = None) -> Tensor:
        entry = self.entries[key]
        return entry.format.decode(
            entry.stored, lambda part, wanted: self.read_stored(entry, part, wanted), rows, self.context
        )

    def canonical(self, key: Key, tensor: Tensor) -> Tensor:
        return tensor  # shards are written in canonical orientation

    def as_stored(self, key: Key, tensor: Tensor) -> Tensor:
        return tensor

    def files_of(self, key: Key) -> set[str]:
        where = self._parts[key]
        names = [where.name, *([where.scale] if where.scale else [])]
        wholes = (self._gathered.wholes[name] for name in names)
        return {record.file for whole in wholes for place in whole.places.values() for _, record in place.values()}

    def close(self) -> None:
        self._gathered.close()


def _plain_name(source: str) -> str:
    """Name of a weight that was stored in a native low-bit format, now that it is plain."""
    stem, _, last = source.rpartition(".")
    return f"{stem}.weight" if last in QUANTIZED_PARTS else source.removesuffix("_blocks")


def open_source(root: Path, *, ignore_index: bool = False, extra_roles: Mapping[str, str] | None = None) -> Source:
    """A checkpoint, or a folder of rank shards, as a source.

    Raises:
        InputError: it is neither.
    """
    is_checkpoint = is_file(root / INDEX_NAME) or is_file(root / SINGLE_NAME)
    if is_file(root / SHARDED_NAME) and not is_checkpoint:
        try:
            return ShardedSource(root, read_manifest(root / SHARDED_NAME), extra_roles)
        except QuantkitError:
            if not any(root.glob("model*.safetensors")):
                raise
    return Source(root, ignore_index=ignore_index, extra_roles=extra_roles)
