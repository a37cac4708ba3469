"""What is left of a finished layer: one file in the work folder, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from quantkit.archs import Key
from quantkit.calibrate.statistics import InputStats
from quantkit.checkpoint.writer import tensor_bytes, write_atomic
from quantkit.spec.tensorfile import build_header, dtype_name, read_header, read_tensor

INPUT_PREFIX, SCALE_PREFIX = "input/", "scale/"

LAYER_NAME = "layer"
"""Of the records of the statistics."""


@dataclass(frozen=True)
class GemmRecord:
    """One observed GEMM.

    Attributes:
        name: `Key.shard_name` without its part.
        role: of the weight.
        expert: routed expert, None for others.
        shape: (N, K).
        quantized: whether the recipe converts it.
        rows: that entered it.
        input: INPUT in `LayerRecord.inputs`, "" when no row ever entered any expert of its kind.
    """

    name: str
    role: str
    expert: int | None
    shape: tuple[int, int]
    quantized: bool
    rows: int
    input: str


@dataclass(frozen=True)
class LayerRecord:
    """Results of one layer: its GEMMs, statistics by INPUT, scales by `GemmRecord.name`."""

    gemms: tuple[GemmRecord, ...]
    inputs: Mapping[str, InputStats]
    scales: Mapping[str, Tensor]


def gemm_name(key: Key) -> str:
    """`Key.shard_name` without its part."""
    return key.shard_name.removesuffix(f".{key.part}")


def save_layer(path: Path, record: LayerRecord) -> None:
    """Write a layer's record atomically."""
    tensors = {f"{SCALE_PREFIX}{name}": scale.cpu() for name, scale in record.scales.items()}
    for name, stats in record.inputs.items():
        tensors |= {f"{INPUT_PREFIX}{name}.{field}": tensor for field, tensor in stats.tensors().items()}
    rows = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    gemms = json.dumps([asdict(gemm) for gemm in record.gemms])
    write_atomic(path, [build_header(rows, {"gemms": gemms}), *map(tensor_bytes, tensors.values())])


def load_layer(path: Path) -> LayerRecord:
    """Read a layer's record."""
    header = read_header(path)
    with path.open("rb") as file:
        tensors = {name: read_tensor(file.fileno(), info, path=path) for name, info in header.tensors.items()}
    fields: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(INPUT_PREFIX):
            group, _, field = name.removeprefix(INPUT_PREFIX).rpartition(".")
            fields.setdefault(group, {})[field] = tensor
    gemms = tuple(GemmRecord(**{**row, "shape": tuple(row["shape"])}) for row in json.loads(header.metadata["gemms"]))
    scales = {
        name.removeprefix(SCALE_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(SCALE_PREFIX)
    }
    return LayerRecord(gemms, {name: InputStats.from_tensors(each) for name, each in fields.items()}, scales)
