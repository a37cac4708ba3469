"""Parameters and bytes of a checkpoint by role column, from headers alone. Nothing here imports torch.

A weight may lie on disk as several tensors (payload, scale, zero point); they are gathered by key first, so that a
parameter is counted once and its scales are counted as bytes only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quantkit.archs import Architecture, Dims, Key, Kind
from quantkit.archs.parser import NameParser
from quantkit.recipe import Recipe
from quantkit.spec.tensorfile import Header, TensorInfo

DRAFT_COLUMN = "draft layers"
SCALE_BYTES = 4  # float32, as every scale that we write

LARGER = 1.02
"""The scales of an 8-bit source and of ours differ by less; what grows by more is worth a warning."""

_PACKED: Mapping[tuple[str, str], int] = {
    ("weight_packed", "I32"): 8,  # int4
    ("weight_packed", "U8"): 2,  # mxfp4, compressed-tensors
    ("blocks", "U8"): 2,  # mxfp4, gpt-oss
}
"""(part, dtype) -> values in one stored element, where it is not 1."""

_FP4_SCALE = "F8_E8M0"  # an I8 payload with such a scale holds two FP4 values a byte


def grows(source_bytes: int, output_bytes: int) -> bool:
    """Whether a conversion makes weights so much larger that it is worth a warning."""
    return output_bytes > LARGER * source_bytes


@dataclass(frozen=True, slots=True)
class Weight:
    """One logical tensor of a checkpoint.

    Attributes:
        key: its identity; `part` is "weight" or "bias".
        parts: part -> header entry: {"weight": ...}, with "weight_scale" and its like where the source has them.
    """

    key: Key
    parts: dict[str, TensorInfo]

    @property
    def stored(self) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """(part, dtype, shape) of every part: equal for tensors that are stored alike."""
        return tuple([(part, info.dtype, info.shape) for part, info in self.parts.items()])

    @property
    def payload(self) -> TensorInfo | None:
        """The tensor that holds the values; None when only scales are there."""
        plain = self.parts.get("weight")
        return plain or self.parts.get("weight_packed") or self.parts.get("blocks")

    @property
    def values_per_element(self) -> int:
        plain = self.parts.get("weight")
        if plain is not None:
            is_fp4 = plain.dtype == "I8" and any(info.dtype == _FP4_SCALE for info in self.parts.values())
            return 2 if is_fp4 else 1
        return next(
            (_PACKED[part, info.dtype] for part, info in self.parts.items() if (part, info.dtype) in _PACKED), 1
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape `[N, K]` or `[E, N, K]`, as stored (not transposed)."""
        info = self.payload
        if info is None:
            return ()
        if "blocks" in self.parts and len(info.shape) > 2:
            return (*info.shape[:-2], info.shape[-2] * info.shape[-1] * self.values_per_element)
        return (*info.shape[:-1], info.shape[-1] * self.values_per_element) if info.shape else ()

    @property
    def parameters(self) -> int:
        info = self.payload
        return info.numel * self.values_per_element if info is not None else 0

    @property
    def nbytes(self) -> int:
        """Bytes on disk, scales included."""
        return sum(info.nbytes for info in self.parts.values())


def names_on_disk(weights: Mapping[Key, Weight]) -> dict[str, Key]:
    """Name of the payload -> key, as recipe rules want it."""
    return {weight.payload.name: key for key, weight in weights.items() if weight.payload is not None}


def inventory(arch: Architecture, headers: Iterable[Header]) -> tuple[dict[Key, Weight], list[str]]:
    """All logical tensors by key, in the order of the files, and the names that no rule knows."""
    parse = NameParser(arch).parse
    weights: dict[Key, Weight] = {}
    unclassified: list[str] = []
    for header in headers:
        for name, info in header.tensors.items():
            key = parse(name)
            if key is None:
                unclassified.append(name)
                continue
            part = "weight" if key.part == "bias" else key.part
            if part != "weight":
                key = key.with_part("weight")
            weight = weights.get(key)
            if weight is None:
                weight = weights[key] = Weight(key, {})
            weight.parts[part] = info
    return weights, unclassified


@dataclass
class Column:
    """One row of the table by role column.

    Attributes:
        name: `Role.column`, or "draft layers" for layers beyond the model's own.
        tensors: logical ones.
        parameters: of the source.
        nbytes: on disk, scales included.
        quantized: parameters that the recipe converts to INT8.
        output_nbytes: after the conversion, scales included.
    """

    name: str
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    quantized: int = 0
    output_nbytes: int = 0


def columns(arch: Architecture, dims: Dims, weights: Iterable[Weight], recipe: Recipe) -> list[Column]:
    """Totals by role column, the largest first."""
    found: dict[str, Column] = {}
    known: dict[object, tuple[int, int, int, int]] = {}  # experts are alike: their sizes are computed once
    for weight in weights:
        name = column_name(arch, dims, weight.key)
        column = found.setdefault(name, Column(name))
        like = (name, weight.key.role, weight.key.part, weight.key.expert is None, weight.stored)
        sizes = known.get(like)
        if sizes is None:
            int8 = name != DRAFT_COLUMN and is_quantized(arch, recipe, weight)  # drafts are kept
            parameters = weight.parameters
            sizes = parameters, weight.nbytes, parameters if int8 else 0, output_nbytes(arch, weight, int8)
            if not recipe.rules:  # a rule may single out one tensor by its name
                known[like] = sizes
        column.tensors += 1
        column.parameters += sizes[0]
        column.nbytes += sizes[1]
        column.quantized += sizes[2]
        column.output_nbytes += sizes[3]
    return sorted(found.values(), key=lambda column: (-column.parameters, column.name))


def column_name(arch: Architecture, dims: Dims, key: Key) -> str:
    """Column of a tensor; layers beyond `num_hidden_layers` hold the draft model."""
    if key.layer is not None and key.layer >= dims.layers:
        return DRAFT_COLUMN
    return arch.role(key.role).column


def is_quantized(arch: Architecture, recipe: Recipe, weight: Weight) -> bool:
    """Whether `recipe` converts it: GEMM weights only, never a bias."""
    if weight.key.part != "weight" or arch.role(weight.key.role).kind is not Kind.LINEAR or weight.payload is None:
        return False
    return recipe.scheme_for(arch, weight.key, weight.payload.name).is_int8


def canonical_shape(arch: Architecture, weight: Weight) -> tuple[int, ...]:
    """`[N, K]` of a weight, `[N]` of a bias; the expert dimension of stacked ones is left out."""
    shape = weight.shape
    role = arch.role(weight.key.role)
    if role.kind is Kind.VECTOR:
        return (math.prod(shape),)  # a correction bias may be stored as [1, E]
    if role.per_expert and weight.key.expert is None:
        shape = shape[1:]
        shape = shape[::-1] if arch.experts_transposed and "weight" in weight.parts else shape
    return shape or (1,)  # of too few sizes: told by `crosscheck`


def output_nbytes(arch: Architecture, weight: Weight, int8: bool) -> int:
    """Bytes after the conversion: one per value and a float32 scale per output channel, or as it is.

    A kept weight whose source has a scale is decoded, so it is counted in BF16.
    """
    if int8:
        rows, columns = (*canonical_shape(arch, weight), 1)[:2]  # a vector in the place of a matrix is refused later
        experts = weight.parameters // max(1, rows * columns)  # of a stacked tensor, else 1
        return weight.parameters + SCALE_BYTES * rows * experts
    info = weight.payload
    if info is not None and len(weight.parts) > 1:
        return 2 * weight.parameters
    return weight.nbytes


def active_parameters(arch: Architecture, dims: Dims, weights: Iterable[Weight]) -> int:
    """Parameters that one token meets: all, less the experts it is not routed to and the draft layers."""
    active = 0
    for weight in weights:
        if column_name(arch, dims, weight.key) == DRAFT_COLUMN:
            continue
        routed = arch.role(weight.key.role).per_expert and dims.experts
        active += weight.parameters * dims.experts_per_token // dims.experts if routed else weight.parameters
    return active


def native_dtypes(weights: Iterable[Weight]) -> dict[str, int]:
    """Bytes by stored dtype, the largest first; a payload with a scale beside it reads `F8_E4M3 + F32 scale`."""
    totals: dict[str, int] = {}
    known: dict[object, tuple[str, int]] = {}
    for weight in weights:
        like = weight.stored
        if like not in known:
            payload = weight.payload
            scales = sorted({info.dtype for part, info in weight.parts.items() if "scale" in part})
            name = " + ".join([payload.dtype if payload else "nothing", *(f"{dtype} scale" for dtype in scales)])
            known[like] = name, weight.nbytes
        name, nbytes = known[like]
        totals[name] = totals.get(name, 0) + nbytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


def human_bytes(count: float) -> str:
    """`12.3 MiB`: three significant digits, binary units, as cards are sold."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def human_count(count: float) -> str:
    """`6.12 M`: three significant digits."""
    return _scaled(count, 1000, ("", "K", "M", "B", "T")).rstrip()


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    step = 0
    while value >= base and step < len(units) - 1:
        value, step = value / base, step + 1
    digits = 0 if step == 0 else max(0, 2 - int(math.log10(max(value, 1))))
    return f"{value:.{digits}f} {units[step]}"
