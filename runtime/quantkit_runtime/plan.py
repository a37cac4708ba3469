"""What every parameter of the model will hold, decided from headers: shapes, dtypes and names are all checked before
the first tensor is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantkit.archs import Key, Kind
from quantkit.archs.assemble import assemble
from quantkit.archs.modeling import parameter_key, parameter_value
from quantkit.errors import InputError
from quantkit_runtime.errors import BrokenShard, ShapeMismatch, UnsupportedDtype
from quantkit_runtime.shards import ModelFiles

FLOAT_DTYPES = frozenset({"BF16", "F16", "F32"})
_INDEX_DTYPES = frozenset({"I32", "I64"})  # of tables: experts by token id


@dataclass(frozen=True)
class Planned:
    """One parameter or persistent buffer of the model.

    Attributes:
        name: in transformers' model.
        key: what it is; for tied ends that of the tensor that is read.
        int8: stored as INT8 with scales, so its module is replaced.
        dtype: in memory.
        shape: in memory.
        scale_shape: of its scales, () when it is not INT8.
        group_size: inputs that share an activation scale; 0 means one scale per token.
        column: memory column.
        leaves: stored tensors that it is made of, in the order in which they are read.
    """

    name: str
    key: Key
    int8: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    group_size: int
    column: str
    leaves: tuple[Key, ...] = ()

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def scale_nbytes(self) -> int:
        return torch.Size(self.scale_shape).numel() * 4 if self.scale_shape else 0


class _Problems:
    """Everything that is wrong, by class; the gravest class is raised, with all of its offenders."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.dtypes: list[str] = []
        self.shapes: list[str] = []
        self.unexpected: list[str] = []

    def raise_if_any(self, files: ModelFiles) -> None:
        if self.missing:
            raise BrokenShard(
                f"{files.root} lacks tensors that the model needs", "copy or convert it again", items=self.missing
            )
        if self.dtypes:
            raise UnsupportedDtype(
                f"{files.root} holds weights that this runtime cannot execute",
                "convert the source checkpoint with `quantkit convert`",
                items=self.dtypes,
                choices=(*sorted(FLOAT_DTYPES), "I8 with an F32 weight_scale"),
            )
        if self.shapes:
            raise ShapeMismatch(
                f"{files.root}: shapes differ from the model of config.json",
                "use the config.json that belongs to these weights",
                items=self.shapes,
            )
        if self.unexpected:
            raise InputError(
                f"{files.root} holds tensors that the model has no place for",
                "use the config.json that belongs to these weights, or a transformers that knows these modules",
                items=self.unexpected,
            )


class Planner:
    """Plans all parameters of `model` from `files`."""

    def __init__(self, model: nn.Module, files: ModelFiles, dtype: torch.dtype) -> None:
        self._model, self._files, self._dtype = model, files, dtype
        self._problems = _Problems()
        self._used: set[Key] = set()

    def run(self) -> tuple[list[Planned], list[str]]:
        """The plan, and the names of stored tensors that the model does not build, by rule.

        Raises:
            BrokenShard, UnsupportedDtype, ShapeMismatch, InputError: all offenders of a class at once.
        """
        planned = []
        for name, value in self._model.state_dict(keep_vars=True).items():
            row = self._parameter(name, value)
            if row is not None:
                planned.append(row)
        unused = self._unused()
        self._problems.raise_if_any(self._files)
        return planned, unused

    def _parameter(self, name: str, value: Tensor) -> Planned | None:
        key = source_key(self._files, parameter_key(self._files.arch, name))
        found = self._assemble(key, name)
        if found is None:
            return None
        tensor, leaves = found
        dtypes = {self._files.tensors[leaf].info.dtype for leaf in leaves}
        column = self._files.arch.role(key.role).column
        if dtypes == {"I8"}:
            return self._int8(name, key, value, tensor, leaves, column)
        if not dtypes <= (FLOAT_DTYPES if value.is_floating_point() else _INDEX_DTYPES):
            self._problems.dtypes.append(f"{name}: stored as {_describe(self._files, leaves)}")
            return None
        try:
            shape = tuple(parameter_value(self._files.arch, self._files.dims, name, lambda _: tensor).shape)
        except InputError as error:
            self._problems.shapes.append(error.message)
            return None
        if shape != tuple(value.shape):
            self._problems.shapes.append(self._shape_problem(name, shape, tuple(value.shape), leaves))
            return None
        dtype = torch.float32 if key.role in self._files.arch.float32_parameters else self._dtype
        dtype = dtype if value.is_floating_point() else value.dtype
        return Planned(name, key, False, dtype, shape, (), 0, column, tuple(leaves))

    def _int8(
        self, name: str, key: Key, value: Tensor, tensor: Tensor, leaves: list[Key], column: str
    ) -> Planned | None:
        scales = self._assemble(key.with_part("weight_scale"), f"{name} (weight_scale)")
        if scales is None:
            return None
        arch, shape = self._files.arch, tuple(tensor.shape)
        wanted = tuple(value.shape)
        if arch.role(key.role).per_expert and key.expert is None and arch.experts_transposed:
            wanted = (wanted[0], wanted[2], wanted[1])
        if shape != wanted:
            self._problems.shapes.append(self._shape_problem(name, shape, wanted, leaves))
            return None
        if tuple(scales[0].shape) != (*shape[:-1], 1):
            wanted_scale = (*shape[:-1], 1)
            self._problems.shapes.append(
                self._shape_problem(f"{name} (weight_scale)", tuple(scales[0].shape), wanted_scale, scales[1])
            )
            return None
        groups = {self._files.tensors[leaf].group_size for leaf in leaves}
        if len(groups) > 1:
            self._problems.dtypes.append(f"{name}: its parts have different activation groups {sorted(groups)}")
            return None
        leaves += scales[1]
        return Planned(name, key, True, torch.int8, shape, tuple(scales[0].shape), groups.pop(), column, tuple(leaves))

    def _assemble(self, key: Key, name: str) -> tuple[Tensor, list[Key]] | None:
        """The assembled tensor on `meta` and the stored keys that it is made of; None notes the problem."""
        files, leaves = self._files, []

        def fetch(leaf: Key) -> Tensor:
            leaves.append(leaf)
            # uniform dtype: which dtypes are mixed is judged by the caller, not by torch's promotion
            return files.canonical(leaf, torch.empty(files.tensors[leaf].info.shape, device="meta"))

        try:
            tensor = assemble(files.arch, files.dims, key, files.has, fetch)
        except InputError as error:
            (self._problems.shapes if self._has_fused(key) else self._problems.missing).append(
                f"{name}: {error.message}"
            )
            return None
        except (RuntimeError, IndexError):  # torch: shapes that do not go together
            self._problems.shapes.append(f"{name}: {_odd_ones(files, leaves)}")
            return None
        finally:
            self._used.update(leaves)
        return tensor, leaves

    def _has_fused(self, key: Key) -> bool:
        """Whether the source has the fused tensor of a key, so that a failure to cut it is a matter of shape."""
        fused = self._files.arch.role(key.role).fuse
        return bool(fused) and self._files.has(key._replace(role=fused))

    def _shape_problem(self, name: str, found: tuple[int, ...], wanted: tuple[int, ...], leaves: list[Key]) -> str:
        stored = self._files.tensors[leaves[0]].info.name
        return f"{name}: {list(found)} in the files ({stored}), the model wants {list(wanted)}"

    def _unused(self) -> list[str]:
        """Stored tensors that no parameter took; those that no rule excuses become problems."""
        excused = []
        for key, stored in self._files.tensors.items():
            if key in self._used:
                continue
            beyond = key.layer is not None and key.layer >= self._files.dims.layers
            if beyond or self._files.arch.role(key.role).kind == Kind.OPAQUE:
                excused.append(stored.info.name)
            else:
                self._problems.unexpected.append(f"{stored.info.name} ({key.role}, {stored.info.dtype})")
        return excused


def source_key(files: ModelFiles, key: Key) -> Key:
    """Key that is read for `key`: itself, or the tensor it shares its bytes with (tied ends)."""
    if key in files.aliases:
        return files.aliases[key]
    tied = Key(None, "embed")
    if key.role == "lm_head" and not files.has(key) and files.dims.tied and files.has(tied):
        return tied
    return key


def _describe(files: ModelFiles, leaves: Iterable[Key]) -> str:
    rows: Counter[str] = Counter(files.tensors[leaf].info.dtype for leaf in leaves)
    return " and ".join(f"{dtype} ({count} tensors)" for dtype, count in sorted(rows.items()))


def _odd_ones(files: ModelFiles, leaves: list[Key]) -> str:
    """Names the stored tensors whose shape is not that of most of the same role."""
    shapes = {leaf: files.tensors[leaf].info.shape for leaf in leaves}
    by_role: dict[str, Counter[tuple[int, ...]]] = {}
    for leaf, shape in shapes.items():
        by_role.setdefault(leaf.role, Counter())[shape] += 1
    usual = {role: counts.most_common(1)[0][0] for role, counts in by_role.items()}
    odd = [
        f"{files.tensors[leaf].info.name} {list(shape)} (others {list(usual[leaf.role])})"
        for leaf, shape in shapes.items()
        if shape != usual[leaf.role]
    ]
    return ", ".join(odd) or ", ".join(
        f"{files.tensors[leaf].info.name} {list(shape)}" for leaf, shape in shapes.items()
    )
