"""The tensors of one rank by key, and where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.archs import Architecture, Dims, Key, architecture_for
from quantkit.archs.modeling import canonical_value
from quantkit.archs.split import local_dims
from quantkit.console import Progress
from quantkit.spec.environment import Environment
from quantkit.spec.tensorfile import TensorInfo
from quantkit_runtime.parallel import Ranks
from quantkit_runtime.reader import Reader


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
        arch, dims: the family's record and the sizes of this rank's part; `whole_dims` are those of the model.
        tensors: key -> where it lies.
        aliases: key -> key whose bytes it shares.
        environments: software that the files were made with, see `Manifest`.
        ranks: this process in the mesh that the files were made for.
        experts: ids of the routed experts that this rank holds, in the order of its stacked tensors.
        checked: what was read and compared with its checksum.
    """

    def __init__(
        self,
        root: Path,
        form: str,
        config: dict[str, Any],
        tensors: Mapping[Key, Stored],
        aliases: Mapping[Key, Key],
        environments: tuple[Environment, ...] = (),
        *,
        verify: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self.root, self.form, self.config = root, form, config
        self.tensors, self.aliases, self.environments, self.ranks = tensors, aliases, environments, ranks or Ranks()
        self.arch: Architecture = architecture_for(config)
        self.whole_dims: Dims = self.arch.dims(config)
        mesh, experts = self.ranks.mesh, self.whole_dims.experts
        self.experts = mesh.rank_experts(experts)[self.ranks.at.ep] if experts else ()
        self.dims = local_dims(self.arch, self.whole_dims, mesh.tp, mesh.moe_tp, len(self.experts))
        self.checked = Checked()
        self._verify = verify
        self._open = ExitStack()
        self._reader: Reader | None = None
        self._fused: dict[Key, Tensor] = {}

    def __enter__(self) -> ModelFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._fused.clear()

    def has(self, key: Key) -> bool:
        return key in self.tensors

    def canonical(self, key: Key, tensor: Tensor) -> Tensor:
        """A stored tensor in canonical orientation; shards are, checkpoints may stack experts as their source did."""
        return tensor if self.form == "sharded" else canonical_value(self.arch, key, tensor)

    def read_ahead(self, keys: Iterable[Key], device: torch.device) -> None:
        """Start to read these tensors, in this order, in which `fetch` is about to ask for them."""
        wanted = [self.tensors[key] for key in dict.fromkeys(keys)]
        self._reader = self._open.enter_context(Reader(self.root, wanted, device, verify=self._verify))

    def fetch(self, key: Key, device: torch.device, progress: Progress | None = None) -> Tensor:
        """A stored tensor on the device, its bytes checked, in canonical orientation.

        A fused tensor is kept until the next fused tensor of another layer is asked for, so that the parts cut out of
        it are views of one buffer.

        Raises:
            BrokenShard: the file cannot be read, ends early, or the checksum differs.
        """
        if key in self._fused:
            return self._fused[key]
        stored = self.tensors[key]
        tensor = self._reader.take(stored) if self._reader else None
        if tensor is None:  # nobody said that it would be wanted, or it was wanted before
            with Reader(self.root, [stored], device, verify=self._verify) as reader:
                tensor = reader.take(stored)
                assert tensor is not None
        if self._verify and stored.xxh3 and stored.info.name not in self.checked.names:
            self.checked.names.add(stored.info.name)
            self.checked.files.add(stored.file)
            self.checked.nbytes += stored.info.nbytes
        if progress is not None:
            progress.advance(stored.info.nbytes)
        tensor = self.canonical(key, tensor)
        if self.arch.role(key.role).parts:
            self._fused = {old: value for old, value in self._fused.items() if old.layer == key.layer}
            self._fused[key] = tensor
        return tensor
