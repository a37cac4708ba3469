"""What a calibration method is.

A method either transforms the weights exactly, from the weights alone or with vectors that it found in text, or it
rounds them. What a method finds in text lies in the calibration artifact; conversion and verification take it from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from quantkit.archs import Key
from quantkit.arithmetic import channel_scales, dequantize, represented
from quantkit.checkpoint.effects import Vectors, matrix
from quantkit.checkpoint.reader import OpenFiles, Source
from quantkit.spec.tensorfile import read_header
from quantkit.spec.transform import VECTORS_NAME, MethodOptions, Step

if TYPE_CHECKING:
    from quantkit.calibrate.layer_weights import LayerWeights
    from quantkit.calibrate.rows import Rows
    from quantkit.recipe import Recipe
    from quantkit.spec.calibration import MethodRow
    from quantkit.spec.scheme import Scheme

__all__ = [
    "Built",
    "Found",
    "LayerView",
    "Learns",
    "Method",
    "MethodOptions",
    "no_vectors",
    "nothing",
    "stored_vectors",
]

Item = TypeVar("Item")
Result = TypeVar("Result")


FALLBACK = "plain: "
"""How the note of a GEMM begins that a method was to round and could not."""

STARVED = "left as it is: too few rows: "
"""How the note of a GEMM begins that a method could not judge."""


class Built(NamedTuple):
    """What a method asks for.

    Attributes:
        steps: in order; they follow those of the methods before.
        vectors: for the sets that the steps name; computed when they are asked for.
    """

    steps: tuple[Step, ...]
    vectors: Vectors


class Map(Protocol):
    """Runs a function on items side by side; results are in the order of the items."""

    def __call__(self, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]: ...


@dataclass(frozen=True)
class LayerView:
    """A layer as a method that learns sees it.

    Attributes:
        layer: index.
        source: as the methods before left it.
        weights: of the materialized layer.
        rows: what enters its GEMMs on sampled tokens, by `rows.input_name`.
        schemes: of the GEMMs that will be INT8: what the recipe says, and what else may be decided.
        codes: `Key.shard_name` of a weight -> int8, and its scales under `NAME_scale`, of what a method has rounded.
        map: for work on several GEMMs.
    """

    layer: int
    source: Source
    weights: LayerWeights
    rows: Mapping[str, Rows]
    schemes: Mapping[Key, Sequence[Scheme]]
    codes: Mapping[str, Tensor]
    map: Map

    def weight(self, key: Key) -> Tensor:
        """Float32 `[N, K]`, not to be changed; read again where the layer holds it in a narrower dtype."""
        view = self.weights.view(key)
        return view if view.dtype == torch.float32 else matrix(self.source, key).float().to(view.device)

    def rounded(self, key: Key) -> Tensor:
        """Float32 `[N, K]`, the weight as INT8 will represent it."""
        w_NK = self.weight(key)
        if key.shard_name not in self.codes:
            return represented(w_NK, channel_scales(w_NK))
        codes, scale = (self.codes[name].to(w_NK.device) for name in (key.shard_name, f"{key.shard_name}_scale"))
        return dequantize(codes, scale)


@dataclass(frozen=True)
class Found:
    """What a method found of a layer: tensors by their final names, and rows for the report."""

    tensors: Mapping[str, Tensor]
    rows: Sequence[MethodRow]


class Learns(NamedTuple):
    """How a method learns from text.

    Attributes:
        tokens: options -> tokens that go through the model.
        rows: options -> sampled rows of each input.
        layer: what it finds of a layer.
        finish: (records of all layers, folder of the artifact) -> writes what the next passes need.
        places: (source, GEMMs that will be INT8) -> counts for a dry run, by what they are of; raises a UsageError
            where the method has nothing to do.
        weight_bytes: for each weight of the GEMMs that it works on at once, measured.
        output_bytes: for each sampled row and output channel of them.
    """

    tokens: Callable[[Any], int]
    rows: Callable[[Any], int]
    layer: Callable[[LayerView, Any], Found]
    finish: Callable[[Sequence[Path], Path], None]
    places: Callable[[Source, Sequence[Key]], Mapping[str, int]] = lambda _source, _keys: {}
    weight_bytes: int = 0
    output_bytes: int = 0


class Method(NamedTuple):
    """A row of the registry.

    Attributes:
        options: pydantic model of the recipe's entry.
        build: (source with the steps of the methods before, options, calibration artifact or None) -> steps. Without
            an artifact, vectors that are found in text are missing, so that nothing is scaled.
        learns: how it learns from text; None when it needs none.
        rounds: it rounds weights, and has no steps; there is one such method at most, after those with steps.
        corrects: (source with the steps of the methods before, calibration artifact, recipe with all that was decided)
            -> steps that make up for the errors of rounding, so that only what is written has them; the last method.
    """

    options: type[MethodOptions]
    build: Callable[[Source, Any, Path | None], Built]
    learns: Learns | None = None
    rounds: bool = False
    corrects: Callable[[Source, Path, Recipe], Built] | None = None


def stored_vectors(artifact: Path) -> Vectors:
    """Vectors that a method left in a calibration artifact, read when they are asked for.

    Raises:
        InputError: the artifact holds none.
    """
    infos, files = read_header(artifact / VECTORS_NAME).tensors, OpenFiles(artifact)

    def vector(name: str, key: Key) -> Tensor | None:
        info = infos.get(f"{name}.{key.shard_name}")
        return None if info is None else files.read(VECTORS_NAME, info)

    return vector


def no_vectors(_set: str, _key: object) -> None:
    """For steps that need none."""


def nothing(_source: Source, _options: Any, _artifact: Path | None) -> Built:
    """`build` of a method that rounds, or makes up for it."""
    return Built((), no_vectors)
