"""Bytes of weights on each rank of a mesh, in the form that `quantkit convert --format sharded` writes.

The splits are those of the role table, by the same functions that `convert` uses. Layers with equal tensors are
computed once, so that a hundred meshes of a model with a hundred layers take milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from quantkit.archs import Architecture, Dims, Key, Kind, Split, Stage
from quantkit.archs.split import misfit, split_range
from quantkit.memory import SCALE_BYTES, Weight, canonical_shape, column_name
from quantkit.recipe import Recipe
from quantkit.spec.mesh import Mesh
from quantkit.spec.scheme import SCHEMES, group_size_for
from quantkit.spec.tensorfile import DTYPE_BITS


class Matrix(NamedTuple):
    """One unfused tensor before the split; of experts, that of one.

    Attributes:
        rows, columns: canonical; a vector has 0 columns.
        scheme: of its GEMM, "keep" when it stays as it is.
        bits: of one kept value.
    """

    role: str
    part: str
    rows: int
    columns: int
    scheme: str
    bits: int

    @property
    def is_int8(self) -> bool:
        return SCHEMES[self.scheme].is_int8


Columns = Mapping[str, int]
"""Memory column -> bytes."""


@dataclass
class ModelWeights:
    """All tensors of a model, by where they go.

    Attributes:
        layers: of each decoder layer, sorted, so that equal layers compare equal.
        first, last: what the ends of the pipeline hold.
        whole: bytes of what belongs to no rank (draft layers, vision towers), by column, kept as it is.
    """

    arch: Architecture
    dims: Dims
    tied: bool
    layers: tuple[tuple[Matrix, ...], ...]
    first: tuple[Matrix, ...]
    last: tuple[Matrix, ...]
    whole: Columns
    _rows: set[Matrix] = field(default_factory=set)
    _reasons: dict[tuple[Matrix, int], str] = field(default_factory=dict)
    _known: dict[tuple[tuple[Matrix, ...], int, int], tuple[Counter[str], Counter[str]]] = field(default_factory=dict)

    def stage(self, mesh: Mesh, stage: int, layers: range) -> tuple[Counter[str], Counter[str]]:
        """Bytes by column of the dense part, and of one routed expert of every layer of a stage on one rank."""
        dense: Counter[str] = Counter()
        expert: Counter[str] = Counter()
        groups = [self.layers[index] for index in layers]
        if stage == 0:
            groups.append(self.first)
        if stage == mesh.pp - 1:
            groups.append(self.last)
            if self.tied and mesh.pp > 1:
                groups.append(tuple(row for row in self.first if row.role == "embed"))
        for group, count in Counter(groups).items():
            for total, part in zip((dense, expert), self._group(group, mesh.tp, mesh.moe_tp), strict=True):
                for column, nbytes in part.items():
                    total[column] += nbytes * count
        return dense, expert

    def _group(self, group: tuple[Matrix, ...], tp: int, moe_tp: int) -> tuple[Counter[str], Counter[str]]:
        key = (group, tp, moe_tp)
        if key not in self._known:
            dense: Counter[str] = Counter()
            expert: Counter[str] = Counter()
            for row in group:
                role = self.arch.role(row.role)
                into, size = (expert, moe_tp) if role.per_expert else (dense, tp)
                into[role.column] += rank_bytes(self.arch, self.dims, row, size)
            self._known[key] = dense, expert
        return self._known[key]

    def misfits(self, mesh: Mesh) -> list[str]:
        """Why the tensors cannot be divided over a mesh, each reason once; the words of `convert`."""
        found: dict[str, None] = dict.fromkeys(mesh.problems(self.dims.layers, self.dims.experts))
        if self.dims.experts and mesh.tp * mesh.dp % mesh.ep:
            return list(found)
        for row in self._distinct():
            per_expert = self.arch.role(row.role).per_expert
            if reason := self._misfit(row, *((mesh.moe_tp, "tp * dp / ep") if per_expert else (mesh.tp, "tp"))):
                found[reason] = None
        return sorted(found)

    def _distinct(self) -> set[Matrix]:
        if not self._rows:
            groups = (*self.layers, self.first, self.last)
            self._rows.update(row for group in groups for row in group if row.part == "weight")
        return self._rows

    def _misfit(self, row: Matrix, size: int, what: str) -> str:
        if (row, size) not in self._reasons:
            role = self.arch.role(row.role)
            by_row = role.split is Split.ROW and row.columns > 0
            length = row.columns if by_row else row.rows
            group = SCHEMES[row.scheme].group_size if by_row else 0
            group = group_size_for(length, group) if group else 0
            self._reasons[row, size] = misfit(self.dims, role, length, size, what, group)
        return self._reasons[row, size]


def rank_bytes(arch: Architecture, dims: Dims, row: Matrix, size: int) -> int:
    """Bytes of one tensor, scales included, on the first of `size` ranks, which never holds less than another.

    Biases of tensors that are split along K stand on every rank (as zeros but on one).
    """
    role = arch.role(row.role)
    rows, columns = row.rows, row.columns
    if role.split is Split.COL:
        part = split_range(dims, role, rows, size, 0)
        rows = part.stop - part.start + part.padding
    elif role.split is Split.ROW and columns:
        columns = split_range(dims, role, columns, size, 0).stop
    values = rows * columns if columns else rows
    return values + SCALE_BYTES * rows if row.is_int8 else values * row.bits // 8


def model_weights(
    arch: Architecture, dims: Dims, recipe: Recipe, weights: Mapping[Key, Weight], *, kept_bits: int = 16
) -> ModelWeights:
    """Sort the tensors of a checkpoint, or of a config, by where they go.

    Args:
        kept_bits: of a value whose native low-bit form is decoded and kept: the model's own dtype.
    """
    layers: list[dict[tuple[str, str, str], Matrix]] = [{} for _ in range(dims.layers)]
    ends: dict[Stage, list[Matrix]] = {Stage.FIRST: [], Stage.LAST: []}
    whole: Counter[str] = Counter()
    for key, weight in weights.items():
        role = arch.role(key.role)
        is_draft = dims.is_draft(key)
        if (recipe.mtp == "drop" and is_draft) or weight.payload is None:
            continue
        place = None if is_draft or key.layer is None else layers[key.layer]
        if key.expert and place is not None and (key.role, key.part, key.label) in place:
            continue  # experts of a layer are alike, or `convert` refuses them
        if is_draft or (role.kind is Kind.OPAQUE and key.layer is None):
            whole[column_name(arch, dims, key)] += _kept_bytes(weight, kept_bits)
            continue
        for row in _matrices(arch, dims, recipe, weight, kept_bits):
            if key.layer is None:
                ends[Stage.LAST if role.stage is Stage.LAST else Stage.FIRST].append(row)
            else:
                layers[key.layer][row.role, row.part, key.label] = row
    return ModelWeights(
        arch,
        dims,
        Key(None, "lm_head") not in weights,
        tuple(tuple(sorted(rows.values())) for rows in layers),
        tuple(ends[Stage.FIRST]),
        tuple(ends[Stage.LAST]),
        dict(whole),
    )


def _kept_bytes(weight: Weight, kept_bits: int) -> int:
    return weight.parameters * kept_bits // 8 if len(weight.parts) > 1 else weight.nbytes


def _matrices(arch: Architecture, dims: Dims, recipe: Recipe, weight: Weight, kept_bits: int) -> Iterator[Matrix]:
    """A weight or bias, a fused one as its parts."""
    key, info = weight.key, weight.payload
    assert info is not None
    shape = canonical_shape(arch, weight)
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape), 0)
    gemm = key.part == "weight" and arch.role(key.role).kind is Kind.LINEAR
    scheme = recipe.scheme_for(arch, key, info.name).name if gemm else "keep"
    bits = DTYPE_BITS[info.dtype] if len(weight.parts) == 1 else kept_bits
    for name, length in _parts(arch, dims, key.role, rows):
        yield Matrix(name, key.part, length, columns, scheme, bits)


def _parts(arch: Architecture, dims: Dims, role_name: str, rows: int) -> list[tuple[str, int]]:
    """(role, rows) of the members of a fused tensor; of another tensor itself."""
    members = arch.role(role_name).parts
    if not members:
        return [(role_name, rows)]
    sizes = [dims.count(arch.role(part).unit) * dims.rows_per_unit(part) for part in members]
    return list(zip(members, sizes, strict=True)) if sum(sizes) == rows else [(role_name, rows)]
