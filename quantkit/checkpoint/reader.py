"""A source checkpoint, seen by key: every tensor accounted for, every weight readable in canonical form.

`Source` reads headers once; tensor data is read on request with pread, a slice at a time, through a bounded set of
open files.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.archs import ROLES, Architecture, Dims, Key, architecture_for, roles_snippet, unused_patterns, with_roles
from quantkit.archs.assemble import assemble
from quantkit.archs.base import PARTS
from quantkit.archs.parser import NameParser
from quantkit.checkpoint.formats import FormatContext, NativeFormat, ReadPart, disagreements, recognise
from quantkit.errors import InputError, UsageError
from quantkit.spec.index import CheckpointIndex, open_checkpoint, read_json
from quantkit.spec.tensorfile import DTYPE_BITS, TensorInfo, read_tensor

MAX_OPEN_FILES = 16

ReadInto = Callable[[int], Tensor]
"""Gives memory for so many bytes: a contiguous uint8 tensor."""

QUANTIZED_PARTS = PARTS - {"weight", "bias"}
"""Parts that stand beside a weight, or in its place, when it is quantized."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One logical tensor of the source.

    Attributes:
        key: its identity; `part` is "weight" or "bias".
        name: its name on disk (of the payload, where scales stand beside it).
        stored: part -> header entry; for a plain tensor just {"weight": ...}.
        format: how it is stored.
        shape: logical shape as stored, before `Architecture` transposes or de-interleaves.
        dtype: of the decoded tensor (safetensors name); "F32" for every quantized format.
        transposed: the logical shape is `[E, K, N]` (stacked experts of an architecture that stores them so).
        kept_dtype: in which it is written when it is kept (safetensors name); "" leaves that to the writer.
    """

    key: Key
    name: str
    stored: Mapping[str, TensorInfo]
    format: NativeFormat
    shape: tuple[int, ...]
    dtype: str
    transposed: bool = False
    kept_dtype: str = ""

    @property
    def module(self) -> str:
        """Name of the module: the tensor's name without its part (`model.layers.0.mlp.gate_proj`)."""
        return module_name(self.name.removesuffix("_blocks"))

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """Shape in canonical orientation: `[N, K]`, `[E, N, K]` for stacked experts, else as stored."""
        return (self.shape[0], self.shape[2], self.shape[1]) if self.transposed else self.shape

    @property
    def nbytes(self) -> int:
        """Bytes on disk, scales included."""
        return sum(info.nbytes for info in self.stored.values())

    @property
    def kept_nbytes(self) -> int:
        """Bytes when it is kept unquantized: as stored, or 2 a number when it must be decoded first."""
        return 2 * math.prod(self.shape) if self.format.scales else self.nbytes

    @property
    def int8_nbytes(self) -> int:
        """Bytes as INT8 with one float32 scale per output channel; `kept_nbytes` for a vector."""
        if len(self.shape) < 2:
            return self.kept_nbytes
        return math.prod(self.shape) + 4 * math.prod(self.canonical_shape[:-1])


class OpenFiles:
    """At most `limit` open file descriptors of one folder, least recently used closed first. Thread-safe."""

    def __init__(self, root: Path, limit: int = MAX_OPEN_FILES) -> None:
        self._root, self._limit = root, limit
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(
        self, file: str, info: TensorInfo, rows: tuple[int, int] | None = None, into: ReadInto | None = None
    ) -> Tensor:
        """As `read_tensor`."""
        path = self._root / file
        with self._lock:
            fd = self._open.pop(file, None)
            if fd is None:
                try:
                    fd = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise InputError(f"{path}: {error.strerror or error}", "check the path") from error
        try:
            return read_tensor(fd, info, rows, path=path, into=into)
        finally:
            self._release(file, fd)

    def _release(self, file: str, fd: int) -> None:
        """Put a descriptor back; a second one of the same file (another thread opened it) is closed."""
        with self._lock:
            surplus = [fd] if file in self._open else []
            self._open.setdefault(file, fd)
            while len(self._open) > self._limit:
                surplus.append(self._open.popitem(last=False)[1])
        for old in surplus:
            os.close(old)

    def close(self) -> None:
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()


class Source:
    """A checkpoint folder by key.

    Attributes:
        config: parsed config.json.
        arch: the family's record.
        dims: its sizes.
        index: headers of all files.
        entries: key (part "weight" or "bias") -> entry, in the order of names on disk by file.
        unclassified: names that no rule knows; `require_classified` turns them into an error.
        context: what the config says about quantization.
        notes: where config and tensors disagree about it, as sentences for reports; the tensors count.
    """

    def __init__(self, root: Path, *, ignore_index: bool = False, extra_roles: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.index: CheckpointIndex = open_checkpoint(root, ignore_index=ignore_index)
        self.config: dict[str, Any] = read_json(root / "config.json")
        self.arch: Architecture = architecture_for(self.config)
        if extra_roles:
            self.arch = with_roles(self.arch, extra_roles)
        self.dims: Dims = self.arch.dims(self.config)
        if unused := unused_patterns(extra_roles or (), self.index.names):
            raise UsageError(
                f"`roles:` of the recipe has patterns that fit no tensor of {root}",
                "remove or correct them",
                items=unused,
            )
        self._files = OpenFiles(root)
        self.context = FormatContext.from_config(self.config)
        self.entries, self.unclassified = self._classify()
        self.notes = disagreements(self.context, self.formats)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding table: what the tensors say, not the config."""
        return not self.has(Key(None, "lm_head"))

    @property
    def formats(self) -> Counter[str]:
        """Name of a format -> number of entries stored in it."""
        return Counter(entry.format.name for entry in self.entries.values())

    def int8_size(self, quantized: Callable[[Key], bool]) -> tuple[int, int]:
        """Bytes of the source's tensors, and of the same with the weights that `quantized` names as INT8.

        The second is larger for sources of 4 bits: say so before converting them.
        """
        sizes = (entry.int8_nbytes if quantized(key) else entry.kept_nbytes for key, entry in self.entries.items())
        return sum(entry.nbytes for entry in self.entries.values()), sum(sizes)

    def require_classified(self) -> None:
        """Raise an InputError that lists every tensor without a role and how to add a rule."""
        if self.unclassified:
            raise InputError(
                f"{len(self.unclassified)} tensors of {self.root} have no role (architecture record: {self.arch.name})",
                f"add this to the recipe, with a role for each ROLE\n{roles_snippet(self.unclassified)}",
                items=self.unclassified,
                choices=sorted({**ROLES, **self.arch.roles}),
            )

    def has(self, key: Key) -> bool:
        return key in self.entries

    def fetch(self, key: Key, rows: tuple[int, int] | None = None, into: ReadInto | None = None) -> Tensor:
        """Decoded tensor of a stored key, or rows of it along dimension 0, as stored (no transposition).

        Rows of a quantized weight equal those of the whole bit for bit; no more than they need is read.

        Args:
            into: memory for the stored values, see `read_tensor`; the result may lie in it.

        Raises:
            InputError: a read error, or a quantized weight or its scale that is not finite.
        """
        entry = self.entries[key]
        if rows is not None and not 0 <= rows[0] <= rows[1] <= entry.shape[0]:
            raise ValueError(f"rows {rows} of {entry.name} {entry.shape}")
        return entry.format.decode(
            entry.stored, self._reader(entry.stored, into, entry.format.payload[0]), rows, self.context
        )

    def fetch_lazily(self, key: Key, rows: tuple[int, int]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """(rows before anything is computed, what makes those of `fetch` out of some of them `[n, K]`), of a table."""
        return self.fetch(key, rows), lambda some: some

    def _reader(self, stored: Mapping[str, TensorInfo], into: ReadInto | None = None, payload: str = "") -> ReadPart:
        def read(part: str, rows: tuple[int, int] | None) -> Tensor:
            info = stored[part]
            return self._files.read(self.index.file_of[info.name], info, rows, into if part == payload else None)

        return read

    def read_stored(
        self, entry: Entry, part: str, rows: tuple[int, int] | None = None, into: ReadInto | None = None
    ) -> Tensor:
        """One stored tensor of an entry, as it lies on disk; `into` as for `fetch`."""
        info = entry.stored[part]
        return self._files.read(self.index.file_of[info.name], info, rows, into)

    def get(self, key: Key) -> Tensor:
        """Tensor of any key in canonical orientation, built from what the source stores (`assemble`).

        Of a stacked tensor no more is read than the expert that is asked for.
        """
        return assemble(self.arch, self.dims, key, self._can_fetch, self._fetch_canonical)

    def _can_fetch(self, key: Key) -> bool:
        return self.has(key) or (key.expert is not None and self.has(key._replace(expert=None)))

    def _fetch_canonical(self, key: Key) -> Tensor:
        if self.has(key) or key.expert is None:
            return self.canonical(key, self.fetch(key))
        stacked = key._replace(expert=None)
        return self.canonical(stacked, self.fetch(stacked, (key.expert, key.expert + 1)))[0]

    def is_stacked(self, key: Key) -> bool:
        """Whether the stored tensor of `key` holds all experts along dimension 0."""
        return self.arch.role(key.role).per_expert and key.expert is None

    def canonical(self, key: Key, tensor: Tensor) -> Tensor:
        """A fetched tensor (stacked: all experts or some of them) in canonical orientation."""
        if self.entries[key].transposed:
            tensor = tensor.transpose(1, 2)
        if self.is_stacked(key) and self.arch.gate_up_interleaved and key.role == "expert.gate_up":
            tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)
        return tensor

    def as_stored(self, key: Key, tensor: Tensor) -> Tensor:
        """The way back from `canonical`."""
        if self.is_stacked(key) and self.arch.gate_up_interleaved and key.role == "expert.gate_up":
            gate, up = tensor.chunk(2, 1)
            tensor = torch.stack((gate, up), 2).flatten(1, 2)
        return tensor.transpose(1, 2) if self.entries[key].transposed else tensor

    def canonical_shape(self, key: Key) -> tuple[int, ...]:
        """Shape of a stored tensor in canonical orientation, from the headers alone."""
        return self.entries[key].canonical_shape

    def digest(self) -> str:
        """sha256 over name, dtype and shape of every tensor and the size of every file; reads no data."""
        infos = [info for header in self.index.headers.values() for info in header.tensors.values()]
        names = sorted((info.name, info.dtype, info.shape) for info in infos)
        sizes = sorted((name, header.file_size) for name, header in self.index.headers.items())
        return hashlib.sha256(json.dumps([names, sizes]).encode()).hexdigest()

    def _classify(self) -> tuple[dict[Key, Entry], list[str]]:
        groups, unclassified = _group(self.arch, self.index)
        entries: dict[Key, Entry] = {}
        for key, stored in groups.items():
            first = stored.get("weight") or next(iter(stored.values()))
            found = recognise(first.name, stored, self.context)
            shape = found.shape(stored, self._reader(stored), self.context)
            stacked = self.is_stacked(key) and key.part == "weight"
            transposed = stacked and self.arch.experts_transposed and not found.oriented and len(shape) == 3
            name = stored[found.payload[0]].name
            entries[key] = Entry(key, name, stored, found, shape, found.dtype(stored), transposed)
        return entries, unclassified

    def files_of(self, key: Key) -> set[str]:
        """Files that hold the data of a stored key."""
        return {self.index.file_of[info.name] for info in self.entries[key].stored.values()}

    def layer_keys(self, layer: int) -> Iterator[Key]:
        return (key for key in self.entries if key.layer == layer)

    def close(self) -> None:
        self._files.close()


def module_name(name: str) -> str:
    """A tensor's name without its part; a bare parameter's name is its own."""
    stem, _, last = name.rpartition(".")
    return stem if stem and last in PARTS else name


def _group(arch: Architecture, index: CheckpointIndex) -> tuple[dict[Key, dict[str, TensorInfo]], list[str]]:
    """Tensors that make one logical tensor, by part; and the names that no rule knows."""
    groups: dict[Key, dict[str, TensorInfo]] = {}
    unclassified: list[str] = []
    parse = NameParser(arch).parse
    for file in index.headers.values():
        for name, info in file.tensors.items():
            key = parse(name)
            if key is None:
                unclassified.append(name)
                continue
            if key.label:
                whole, part = _opaque_part(key, name, index)
            elif key.part == "bias":
                whole, part = key, "weight"
            else:
                whole, part = key.with_part("weight"), key.part
            group = groups.setdefault(whole, {})
            if part in group:
                raise InputError(
                    f"{name} and {group[part].name} are the same tensor ({whole.shard_name})",
                    "the checkpoint holds two spellings of one tensor; remove one",
                )
            group[part] = info
    return groups, unclassified


def _opaque_part(key: Key, name: str, index: CheckpointIndex) -> tuple[Key, str]:
    """Key and part of a tensor of an opaque subtree: a scale belongs to the weight beside it.

    A tensor called `scale` does so only beside a one-byte weight: vision towers have parameters of that name.
    """
    stem, _, part = name.rpartition(".")
    if part not in QUANTIZED_PARTS:
        return key, "weight"
    weight = f"{stem}.weight"
    if part == "scale" and not (weight in index.file_of and DTYPE_BITS[index.info(weight).dtype] == 8):
        return key, "weight"
    return key._replace(label=f"{key.label.removesuffix(part)}weight"), part
