"""A source checkpoint, seen by key: every tensor accounted for, every weight readable in canonical form.

`Source` reads headers once; tensor data is read on request with pread, a slice at a time, through a bounded set of
open files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.archs import ROLES, Architecture, Dims, Key, architecture_for
from quantkit.archs.assemble import assemble
from quantkit.archs.base import PARTS
from quantkit.checkpoint.formats import NativeFormat, recognise
from quantkit.errors import InputError
from quantkit.spec.index import CheckpointIndex, open_checkpoint, read_json
from quantkit.spec.tensorfile import TensorInfo, read_tensor

MAX_OPEN_FILES = 16


@dataclass(frozen=True)
class Entry:
    """One logical tensor of the source.

    Attributes:
        key: its identity; `part` is "weight" or "bias".
        name: its name on disk (of the payload, where scales stand beside it).
        stored: part -> header entry; for a plain tensor just {"weight": ...}.
        format: how it is stored.
        shape: logical shape as stored, before `Architecture` transposes or de-interleaves.
        dtype: of the decoded tensor (safetensors name).
    """

    key: Key
    name: str
    stored: Mapping[str, TensorInfo]
    format: NativeFormat
    shape: tuple[int, ...]
    dtype: str

    @property
    def module(self) -> str:
        """Name of the module: the tensor's name without its part (`model.layers.0.mlp.gate_proj`)."""
        return module_name(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes on disk, scales included."""
        return sum(info.nbytes for info in self.stored.values())


class OpenFiles:
    """At most `limit` open file descriptors of one folder, least recently used closed first. Thread-safe."""

    def __init__(self, root: Path, limit: int = MAX_OPEN_FILES) -> None:
        self._root, self._limit = root, limit
        self._open: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, file: str, info: TensorInfo, rows: tuple[int, int] | None = None) -> Tensor:
        path = self._root / file
        with self._lock:
            fd = self._open.pop(file, None)
            if fd is None:
                try:
                    fd = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise InputError(f"{path}: {error.strerror or error}", "check the path") from error
        try:
            return read_tensor(fd, info, rows, path=path)
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


class Source:
    """A checkpoint folder by key.

    Attributes:
        config: parsed config.json.
        arch: the family's record.
        dims: its sizes.
        index: headers of all files.
        entries: key (part "weight" or "bias") -> entry, in the order of names on disk by file.
        unclassified: names that no rule knows; `require_classified` turns them into an error.
    """

    def __init__(self, root: Path, *, ignore_index: bool = False, extra_roles: Mapping[str, str] | None = None) -> None:
        self.root = root
        if not root.is_dir():
            open_checkpoint(root)  # raises the error that says what is wrong
        self.config: dict[str, Any] = read_json(root / "config.json")
        self.arch: Architecture = architecture_for(self.config)
        if extra_roles:
            self.arch = with_roles(self.arch, extra_roles)
        self.dims: Dims = self.arch.dims(self.config)
        self.index: CheckpointIndex = open_checkpoint(root, ignore_index=ignore_index)
        self._files = OpenFiles(root)
        self.entries, self.unclassified = _classify(self.arch, self.index)

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding table: what the tensors say, not the config."""
        return not self.has(Key(None, "lm_head"))

    def require_classified(self) -> None:
        """Raise an InputError that lists every tensor without a role and how to add a rule."""
        if self.unclassified:
            snippet = ", ".join(f'"{rule_pattern(name)}": ROLE' for name in self.unclassified[:1])
            raise InputError(
                f"{len(self.unclassified)} tensors of {self.root} have no role (architecture record: {self.arch.name})",
                f"add `roles: {{{snippet}}}` to the recipe, with a role of quantkit/archs/roles.py",
                items=self.unclassified,
            )

    def has(self, key: Key) -> bool:
        return key in self.entries

    def fetch(self, key: Key, rows: tuple[int, int] | None = None) -> Tensor:
        """Decoded tensor of a stored key, or rows of it along dimension 0, as stored (no transposition)."""
        entry = self.entries[key]

        def read(part: str, part_rows: tuple[int, int] | None) -> Tensor:
            return self.read_stored(entry, part, part_rows)

        return entry.format.decode(entry.stored, read, rows)

    def read_stored(self, entry: Entry, part: str, rows: tuple[int, int] | None = None) -> Tensor:
        """One stored tensor of an entry, as it lies on disk."""
        info = entry.stored[part]
        return self._files.read(self.index.file_of[info.name], info, rows)

    def get(self, key: Key) -> Tensor:
        """Tensor of any key in canonical orientation, built from what the source stores (`assemble`)."""
        return assemble(self.arch, self.dims, key, self.has, self._fetch_canonical)

    def _fetch_canonical(self, key: Key) -> Tensor:
        return self.canonical(key, self.fetch(key))

    def is_stacked(self, key: Key) -> bool:
        """Whether the stored tensor of `key` holds all experts along dimension 0."""
        return self.arch.role(key.role).per_expert and key.expert is None

    def canonical(self, key: Key, tensor: Tensor) -> Tensor:
        """A fetched tensor (stacked: all experts or some of them) in canonical orientation."""
        stacked = self.is_stacked(key)
        if stacked and self.arch.experts_transposed and key.part == "weight":
            tensor = tensor.transpose(1, 2)
        if stacked and self.arch.gate_up_interleaved and key.role == "expert.gate_up":
            tensor = torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1)
        return tensor

    def canonical_shape(self, key: Key) -> tuple[int, ...]:
        """Shape of a stored tensor in canonical orientation, from the headers alone."""
        shape = self.entries[key].shape
        if self.is_stacked(key) and self.arch.experts_transposed and key.part == "weight":
            return (shape[0], shape[2], shape[1])
        return shape

    def digest(self) -> str:
        """sha256 over name, dtype and shape of every tensor and the size of every file; reads no data."""
        infos = [info for header in self.index.headers.values() for info in header.tensors.values()]
        names = sorted((info.name, info.dtype, info.shape) for info in infos)
        sizes = sorted((name, header.file_size) for name, header in self.index.headers.items())
        return hashlib.sha256(json.dumps([names, sizes]).encode()).hexdigest()

    def layer_keys(self, layer: int) -> Iterator[Key]:
        return (key for key in self.entries if key.layer == layer)

    def close(self) -> None:
        self._files.close()


def module_name(name: str) -> str:
    """A tensor's name without its part; a bare parameter's name is its own."""
    stem, _, last = name.rpartition(".")
    return stem if stem and last in PARTS else name


def with_roles(arch: Architecture, extra: Mapping[str, str]) -> Architecture:
    """The record with a recipe's `roles:` added: pattern below the layer, or full name outside, -> role."""
    unknown = sorted(role for role in extra.values() if role not in {**ROLES, **arch.roles})
    if unknown:
        raise InputError("the recipe's roles name unknown roles", items=unknown, choices=sorted(ROLES))
    return replace(arch, layer_rules={**arch.layer_rules, **extra}, model_rules={**arch.model_rules, **extra})


def rule_pattern(name: str) -> str:
    """The rule that would classify `name`: below its layer, `*` for the expert, without its part."""
    below = re.sub(r"^.*?\b(?:layers|blocks|h)\.\d+\.", "", name)
    below = re.sub(r"(^|\.)experts\.\d+\.", r"\1experts.*.", below)
    return re.sub(r"\.(weight|bias)$", "", below)


def _classify(arch: Architecture, index: CheckpointIndex) -> tuple[dict[Key, Entry], list[str]]:
    groups: dict[Key, dict[str, TensorInfo]] = {}
    unclassified: list[str] = []
    for file in index.headers.values():
        for name, info in file.tensors.items():
            key = arch.parse(name)
            if key is None:
                unclassified.append(name)
                continue
            whole, part = (key, "weight") if key.part == "bias" else (key.with_part("weight"), key.part)
            group = groups.setdefault(whole, {})
            if part in group:
                raise InputError(
                    f"{name} and {group[part].name} are the same tensor ({whole.shard_name})",
                    "the checkpoint holds two spellings of one tensor; remove one",
                )
            group[part] = info
    entries: dict[Key, Entry] = {}
    for key, stored in groups.items():
        payload = stored.get("weight") or next(iter(stored.values()))
        found = recognise(payload.name, stored)
        entries[key] = Entry(key, payload.name, stored, found, found.shape(stored), found.dtype(stored))
    return entries, unclassified
