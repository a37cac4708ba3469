"""The tensors of one rank by key, read with pread, each checked against its checksum while it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from quantkit.archs import Architecture, Dims, Key, architecture_for
from quantkit.archs.modeling import canonical_value
from quantkit.console import Progress
from quantkit.errors import InputError
from quantkit.spec.tensorfile import TensorInfo, read_tensor
from quantkit_runtime.errors import BrokenShard


@dataclass(frozen=True)
class Stored:
    """One tensor on disk.

    Attributes:
        file: relative to the folder.
        info: dtype, shape and place.
        xxh3: xxh3-128 of its bytes, "" without a manifest.
        group_size: inputs that share an activation scale when this is an INT8 weight; 0 means one scale per token.
    """

    file: str
    info: TensorInfo
    xxh3: str = ""
    group_size: int = 0


@dataclass
class Checked:
    """What the checksums covered so far."""

    names: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    nbytes: int = 0


class ModelFiles:
    """The tensors of one rank by key.

    Attributes:
        root: the folder.
        form: "checkpoint", "sharded", or "source" without a manifest.
        config: parsed config.json.
        arch, dims: the family's record and the sizes.
        tensors: key -> where it lies.
        aliases: key -> key whose bytes it shares.
        checked: what was read and compared with its checksum.
    """

    def __init__(
        self,
        root: Path,
        form: str,
        config: dict[str, Any],
        tensors: Mapping[Key, Stored],
        aliases: Mapping[Key, Key],
        *,
        verify: bool = True,
    ) -> None:
        self.root, self.form, self.config = root, form, config
        self.arch: Architecture = architecture_for(config)
        self.dims: Dims = self.arch.dims(config)
        self.tensors, self.aliases = tensors, aliases
        self.checked = Checked()
        self._verify = verify
        self._open = ExitStack()
        self._descriptors: dict[str, int] = {}
        self._fused: dict[Key, Tensor] = {}

    def __enter__(self) -> ModelFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._descriptors.clear()
        self._fused.clear()

    @property
    def nbytes(self) -> int:
        return sum(stored.info.nbytes for stored in self.tensors.values())

    def has(self, key: Key) -> bool:
        return key in self.tensors

    def canonical(self, key: Key, tensor: Tensor) -> Tensor:
        """A stored tensor in canonical orientation; shards are, checkpoints may stack experts as their source did."""
        return tensor if self.form == "sharded" else canonical_value(self.arch, key, tensor)

    def fetch(self, key: Key, device: torch.device, progress: Progress | None = None) -> Tensor:
        """Read a stored tensor, check its bytes and bring it into canonical orientation.

        A fused tensor is kept until the next fused tensor of another layer is asked for, so that the parts cut out of
        it are views of one buffer.

        Raises:
            BrokenShard: the file cannot be read, ends early, or the checksum differs.
        """
        if key in self._fused:
            return self._fused[key]
        tensor = self._read(self.tensors[key])
        if progress is not None:
            progress.advance(self.tensors[key].info.nbytes)
        tensor = self.canonical(key, tensor.to(device))
        if self.arch.role(key.role).parts:
            self._fused = {old: value for old, value in self._fused.items() if old.layer == key.layer}
            self._fused[key] = tensor
        return tensor

    def _read(self, stored: Stored) -> Tensor:
        path = self.root / stored.file
        try:
            tensor = read_tensor(self._descriptor(stored.file), stored.info, path=path)
        except InputError as error:
            raise BrokenShard(error.message, error.hint) from error
        if self._verify and stored.xxh3:
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            found = xxhash.xxh3_128_hexdigest(raw.data) if raw.size else xxhash.xxh3_128_hexdigest(b"")
            if found != stored.xxh3:
                raise BrokenShard(
                    f"{path}: the checksum of tensor {stored.info.name} is {found}, the manifest says {stored.xxh3}",
                    "copy this file again from where it was converted, or convert again; --no-verify loads it as it is",
                )
            if stored.info.name not in self.checked.names:
                self.checked.names.add(stored.info.name)
                self.checked.files.add(stored.file)
                self.checked.nbytes += stored.info.nbytes
        return tensor

    def _descriptor(self, file: str) -> int:
        """Descriptor of the current file; files are read one after the other, so the previous one is closed."""
        if file not in self._descriptors:
            self._open.close()
            self._descriptors.clear()
            path = self.root / file
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise BrokenShard(f"{path}: {error.strerror or error}", "copy the missing file") from error
            self._open.callback(os.close, descriptor)
            self._descriptors[file] = descriptor
        return self._descriptors[file]
