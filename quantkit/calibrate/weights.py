"""The GEMM weights of a source: which there are, their scales, and that they are finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.archs import Architecture, Dims, Key, Kind
from quantkit.archs.assemble import rows_in_fused
from quantkit.arithmetic import channel_scales
from quantkit.checkpoint.reader import Source
from quantkit.crosscheck import contradictions
from quantkit.errors import InputError
from quantkit.recipe import Recipe

FLOATS = frozenset({"BF16", "F16", "F32", "F64"})
"""Dtypes (safetensors names) of decoded weights that a GEMM can have."""


def gemm_keys(arch: Architecture, dims: Dims, key: Key) -> list[Key]:
    """The GEMMs that a weight stands for: parts of a fused one, experts of a stacked one; [] for other tensors.

    Names of scales and statistics always use these finest keys, whatever the source or transformers fuses.
    """
    role = arch.role(key.role)
    if role.kind is not Kind.LINEAR or key.part != "weight" or key.layer is None:
        return []
    stacked = role.per_expert and key.expert is None
    experts: list[int | None] = list(range(dims.experts)) if stacked else [key.expert]
    return [key._replace(role=part, expert=expert) for expert in experts for part in role.parts or (key.role,)]


@dataclass(frozen=True)
class GemmWeight:
    """One GEMM of the model: the tensor on disk that holds its weight, and whether the recipe converts it."""

    disk_name: str
    quantized: bool


def require_sound(source: Source) -> None:
    """Refuse weights that no GEMM can have, and a config that tells of other sizes than the tensors.

    Raises:
        InputError: all of them, listed.
    """
    items = [
        f"{problem.what}{' (' + ', '.join(problem.items) + ')' if problem.items else ''}: {problem.remedy}"
        for problem in contradictions(source)
    ]
    for key, entry in source.entries.items():
        if gemm_keys(source.arch, source.dims, key):
            if 0 in entry.shape:
                items.append(f"{entry.name}: empty shape {list(entry.shape)}")
            elif entry.dtype not in FLOATS:
                items.append(f"{entry.name}: {entry.dtype} values are not weights of a GEMM")
    if items:
        raise InputError(
            f"{source.root}: config.json and tensors make no model that runs",
            "correct config.json, or complete the checkpoint; `quantkit inspect` tells more",
            items=items,
        )


def expected_gemms(source: Source, recipe: Recipe) -> dict[Key, GemmWeight]:
    """Every GEMM of the decoder layers, in the order layer, role, expert.

    Raises:
        UsageError: rules of the recipe match nothing.
    """
    names = {entry.name: key for key, entry in source.entries.items()}
    recipe.check_rules(names, source.root)
    found: dict[Key, GemmWeight] = {}
    for stored, entry in source.entries.items():
        if stored.layer is not None and stored.layer < source.dims.layers:
            for key in gemm_keys(source.arch, source.dims, stored):
                found[key] = GemmWeight(entry.name, recipe.scheme_for(source.arch, key, entry.name).is_int8)
    order = sorted(found, key=lambda key: (key.layer or 0, key.role, -1 if key.expert is None else key.expert))
    return {key: found[key] for key in order}


class WeightRecorder:
    """Hands tensors from the source to the model and notes shapes and scales of the GEMM weights on their way.

    Attributes:
        shapes: GEMM -> (N, K).
        scales: GEMM -> float32 `[N, 1]`, quantized ones only.
    """

    def __init__(self, source: Source, expected: Mapping[Key, GemmWeight]) -> None:
        self._source, self._expected = source, expected
        self.shapes: dict[Key, tuple[int, int]] = {}
        self.scales: dict[Key, Tensor] = {}

    def get(self, key: Key) -> Tensor:
        """Tensor of `key` in canonical orientation.

        Raises:
            InputError: it is not finite; the tensor on disk is named.
        """
        tensor = self._source.get(key)
        weights = list(self._split(key, tensor))
        for each, w_NK in weights:
            self._note(each, w_NK)
        if not weights and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise not_finite(key.shard_name)
        return tensor

    def _note(self, key: Key, w_NK: Tensor) -> None:
        scales = channel_scales(w_NK)
        planned = self._expected.get(key)
        if not bool(torch.isfinite(scales).all()):
            raise not_finite(planned.disk_name if planned else key.shard_name)
        self.shapes[key] = (w_NK.shape[0], w_NK.shape[1])
        if planned and planned.quantized:
            self.scales[key] = scales

    def _split(self, key: Key, tensor: Tensor) -> Iterator[tuple[Key, Tensor]]:
        """The finest GEMMs inside a tensor, with their rows of it."""
        arch, dims = self._source.arch, self._source.dims
        for each in gemm_keys(arch, dims, key):
            stacked = each.expert is not None and key.expert is None
            weight = tensor[each.expert] if stacked else tensor
            if each.role != key.role:
                start, stop = rows_in_fused(arch, dims, each.role, weight.shape[0])
                weight = weight[start:stop]
            yield each, weight


def not_finite(name: str) -> InputError:
    return InputError(f"the tensor {name} holds NaN or infinity", "copy or download the checkpoint again")
