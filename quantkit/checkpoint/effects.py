"""What the steps of a transform do to one tensor, by its role.

Every step has rows (functions below) for the tensors whose outputs it changes and for those whose inputs it changes
back; both are found in the role table (`residual`, `fed_by`), so a step reaches each reader and writer or none.
Matrices are canonical, `[N, K]` of one expert. Shape suffixes: N output rows, K input columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quantkit.archs import Key, Kind
from quantkit.archs.assemble import Location, locate, rows_in_fused
from quantkit.archs.roles import Residual
from quantkit.checkpoint.reader import Source
from quantkit.errors import InputError
from quantkit.rotation import Rotation
from quantkit.spec.transform import (
    RESIDUAL_NORMS,
    CorrectBias,
    FoldNorm,
    RotateHeads,
    RotateResidual,
    ScalePair,
    Step,
)

Vectors = Callable[[str, Key], Tensor | None]
"""(`ScalePair.vectors`, key of the producer's weight) -> float `[channels]`, None when it is not scaled; or
(`CorrectBias.vectors`, key of a GEMM's bias, of one expert and one part) -> the bias, None when it is left."""


@dataclass(frozen=True)
class Diagonal:
    """Multiply channel j of `[..., n]` by factor[j] (float64)."""

    factor: Tensor
    unit: int = 1

    def __call__(self, x: Tensor, first: int) -> Tensor:
        return x * self.factor[first : first + x.shape[-1]].to(x.device)


@dataclass(frozen=True)
class Mixing:
    """Apply `mix` to each run of `unit` channels in [start, stop); slices must begin and end between two runs."""

    mix: Callable[[Tensor], Tensor]
    unit: int
    start: int
    stop: int

    def __call__(self, x: Tensor, first: int) -> Tensor:
        low, high = max(self.start - first, 0), min(self.stop - first, x.shape[-1])
        if low >= high:
            return x
        x = x.clone()
        x[..., low:high] = self.mix(x[..., low:high].unflatten(-1, (-1, self.unit))).flatten(-2)
        return x


@dataclass(frozen=True)
class Replacement:
    """Put value[j] (float64) in the place of channel j where known[j]."""

    value: Tensor
    known: Tensor
    unit: int = 1

    def __call__(self, x: Tensor, first: int) -> Tensor:
        stop = first + x.shape[-1]
        return torch.where(self.known[first:stop].to(x.device), self.value[first:stop].to(x.device), x)


Effect = Diagonal | Mixing | Replacement


def pieces_of(source: Source, key: Key) -> tuple[Location, ...] | None:
    """Where the rows of one GEMM's weight or bias lie, None where the source has nothing like it."""
    return locate(source.arch, source.dims, key, source.has, lambda stored: matrix_shape(source, stored)[0])


def matrix(source: Source, key: Key) -> Tensor:
    """The tensor of one GEMM `[N, K]` (or its bias `[N]`), of one expert where experts are stacked, and no more.

    Raises:
        InputError: the source has nothing like it.
    """
    pieces = pieces_of(source, key)
    if pieces is None:
        raise InputError(f"the checkpoint has no tensor for {key.shard_name}", "check that the copy is complete")
    found = []
    for piece in pieces:
        if piece.slot is None:
            found.append(source.fetch(piece.key, (piece.start, piece.stop)))
        else:
            stacked = source.canonical(piece.key, source.fetch(piece.key, (piece.slot, piece.slot + 1)))
            found.append(stacked[0, piece.start : piece.stop])
    return torch.cat(found) if len(found) > 1 else found[0]


def matrix_shape(source: Source, key: Key) -> tuple[int, ...]:
    """Canonical shape of a stored tensor, without the experts where they are stacked."""
    shape = source.canonical_shape(key)
    return shape[1:] if source.is_stacked(key) else shape


class Effects:
    """The effects of a list of steps on every tensor of a source.

    Args:
        source: as it is before the steps.
        steps: in order.
        vectors: of `scale_pair` steps.
    """

    def __init__(self, source: Source, steps: tuple[Step, ...], vectors: Vectors) -> None:
        self._source, self._steps, self._vectors = source, steps, vectors
        self._norm_before = lru_cache(maxsize=None)(self._uncached_norm_before)

    def touches(self, key: Key) -> bool:
        """Whether a step may change a tensor."""
        if self._source.dims.is_draft(key):
            return False
        if self._source.arch.role(key.role).kind is Kind.NORM:
            return any(_changes_norm(step, key.role) for step in self._steps)
        changed = (*self._touched_rows(key), *self._touched_columns(key))
        return bool(changed)

    def _touched_rows(self, key: Key) -> list[Step]:
        return [step for step in self._steps if self._on_rows(step, key)]

    def _touched_columns(self, key: Key) -> list[Step]:
        return [step for step in self._steps if key.part == "weight" and self._on_columns(step, key)]

    # ------------------------------------------------------------------------------------------ which tensors

    def _on_rows(self, step: Step, key: Key) -> bool:
        """Whether a step changes the outputs of a matrix (and its bias)."""
        role = self._source.arch.role(key.role)
        match step:
            case RotateResidual():
                return role.residual is Residual.OUT and role.kind is not Kind.EMBEDDING
            case RotateHeads():
                return self._produces(key, "attn.v")
            case ScalePair():
                return self._produces(key, step.producer)
            case CorrectBias():
                return key.part == "bias" and role.kind is Kind.LINEAR and key.layer is not None
        return False

    def _on_columns(self, step: Step, key: Key) -> bool:
        """Whether a step changes the inputs of a matrix; the embedding's channels are its columns too."""
        role = self._source.arch.role(key.role)
        match step:
            case FoldNorm():
                return role.fed_by in step.norms
            case RotateResidual():
                return role.residual is Residual.IN or (role.residual is Residual.OUT and role.kind is Kind.EMBEDDING)
            case RotateHeads():
                return role.fed_by == "attn.v"
            case ScalePair():
                return role.fed_by == step.producer
            case CorrectBias():
                return False

    def _produces(self, key: Key, producer: str) -> bool:
        if producer == "attn.v" and self._source.dims.is_mla:
            return key.role == "mla.kv_b"
        return key.role == producer or producer in self._source.arch.role(key.role).parts

    # ------------------------------------------------------------------------------------------------ effects

    def rows(self, key: Key, expert: int | None, total: int) -> list[Effect]:
        """Effects on the `total` outputs of a matrix, of one expert where experts are stacked."""
        return [self._row_effect(step, key, expert, total) for step in self._touched_rows(key)]

    def columns(self, key: Key, expert: int | None, total: int) -> list[Effect]:
        """Effects on its `total` inputs."""
        found = []
        for index, step in enumerate(self._steps):
            if key.part == "weight" and self._on_columns(step, key):
                found.append(self._column_effect(index, step, key, expert, total))
        return found

    def _row_effect(self, step: Step, key: Key, expert: int | None, total: int) -> Effect:
        match step:
            case RotateResidual():
                return Mixing(_rotation(total, step.seed), total, 0, total)
            case RotateHeads():
                return self._rotated_values(step, key, total)
            case ScalePair():
                factor = torch.ones(total, dtype=torch.float64)
                scale = self._scale(step, key, expert)
                if scale is not None:
                    factor[self._rows_of(step.producer, key, total)] = 1 / scale
                return Diagonal(factor)
            case CorrectBias():
                return self._corrected(step, key, expert, total)
            case FoldNorm():
                raise AssertionError(step)

    def _column_effect(self, index: int, step: Step, key: Key, expert: int | None, total: int) -> Effect:
        match step:
            case FoldNorm():
                return Diagonal(self._norm_factor(index, key))
            case RotateResidual():
                return Mixing(_rotation(total, step.seed), total, 0, total)
            case RotateHeads():
                size = self._source.dims.v_head_dim
                return Mixing(_rotation(size, step.seed), size, 0, total)
            case ScalePair():
                scale = self._scale(step, key, expert)
                if scale is None:
                    return Diagonal(torch.ones(total, dtype=torch.float64))
                return Diagonal(self._for_heads(scale) if step.producer == "attn.v" else scale)
            case CorrectBias():
                raise AssertionError(step)

    def _corrected(self, step: CorrectBias, key: Key, expert: int | None, total: int) -> Replacement:
        """The corrected biases of a stored bias, which may be that of several parts."""
        value, known = torch.zeros(total, dtype=torch.float64), torch.zeros(total, dtype=torch.bool)
        for part in self._source.arch.role(key.role).parts or (key.role,):
            found = self._vectors(step.vectors, key._replace(role=part, expert=expert))
            if found is not None:
                start, stop = self._range_of(part, key, total)
                value[start:stop], known[start:stop] = found.double(), True
        return Replacement(value, known)

    def _scale(self, step: ScalePair, key: Key, expert: int | None) -> Tensor | None:
        """The vector of a pair, for its producer or a consumer."""
        own = expert if self._source.arch.role(step.producer).per_expert else None
        vector = self._vectors(step.vectors, Key(key.layer, step.producer, own))
        return None if vector is None else vector.double()

    def _for_heads(self, scale: Tensor) -> Tensor:
        """A vector over the values of the kv heads, repeated for the query heads that read each of them."""
        dims = self._source.dims
        times = 1 if dims.is_mla else dims.heads // dims.kv_heads
        repeated: Tensor = scale.unflatten(0, (-1, dims.v_head_dim)).repeat_interleave(times, 0)
        return repeated.flatten()

    def _rows_of(self, producer: str, key: Key, total: int) -> Tensor:
        """Rows of a stored matrix that are the producer's outputs, in order."""
        dims = self._source.dims
        if key.role == "mla.kv_b":
            per_head: Tensor = torch.arange(total).unflatten(0, (dims.heads, -1))
            return per_head[:, dims.qk_nope_head_dim :].flatten()
        start, stop = self._range_of(producer, key, total)
        return torch.arange(start, stop)

    def _range_of(self, producer: str, key: Key, total: int) -> tuple[int, int]:
        if key.role == producer:
            return 0, total
        return rows_in_fused(self._source.arch, self._source.dims, producer, total)

    def _rotated_values(self, step: RotateHeads, key: Key, total: int) -> Mixing:
        dims = self._source.dims
        rotation = _rotation(dims.v_head_dim, step.seed)
        if key.role != "mla.kv_b":
            return Mixing(rotation, dims.v_head_dim, *self._range_of("attn.v", key, total))
        keys = dims.qk_nope_head_dim  # each head has rows of its key, then of its value

        def mix(x: Tensor) -> Tensor:
            return torch.cat((x[..., :keys], rotation(x[..., keys:])), -1)

        return Mixing(mix, keys + dims.v_head_dim, 0, total)

    # -------------------------------------------------------------------------------------------------- norms

    def norm(self, key: Key) -> Tensor:
        """Weight of a norm after all steps, float64 `[n]`."""
        return self._norm_before(len(self._steps), key)

    def _norm_factor(self, index: int, reader: Key) -> Tensor:
        """What the norm before a reader multiplies by when step `index` begins."""
        norm = Key(reader.layer, self._source.arch.role(reader.role).fed_by)
        return self._norm_before(index, norm) + self._offset(norm.role)

    def _offset(self, norm: str) -> float:
        return self._source.arch.norm_offset if norm in RESIDUAL_NORMS else 0.0

    def _uncached_norm_before(self, index: int, key: Key) -> Tensor:
        """Weight of a norm before step `index`."""
        if index == 0:
            return self._source.fetch(key).double()
        weight, step = self._norm_before(index - 1, key), self._steps[index - 1]
        offset = self._offset(key.role)
        if isinstance(step, FoldNorm) and key.role in step.norms:
            return torch.full_like(weight, 1 - offset)
        if isinstance(step, ScalePair) and key.role == step.producer:
            scale = self._scale(step, key, None)
            return weight if scale is None else (weight + offset) / scale - offset
        return weight


@lru_cache(maxsize=8)
def _rotation(size: int, seed: int) -> Rotation:
    return Rotation(size, seed)


def _changes_norm(step: Step, role: str) -> bool:
    match step:
        case FoldNorm():
            return role in step.norms
        case ScalePair():
            return role == step.producer
    return False
