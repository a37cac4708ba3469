"""What is left of a finished layer: one file in the work folder, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from quantkit.archs import Key
from quantkit.calibrate.statistics import InputStats
from quantkit.checkpoint.sealed import write_sealed
from quantkit.checkpoint.writer import order_for_alignment, write_tensors
from quantkit.spec.calibration import KvSummary
from quantkit.spec.tensorfile import TensorInfo, read_header, read_tensor

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
    """Results of one layer: its GEMMs, statistics by INPUT, scales by `GemmRecord.name`, keys and values if wanted."""

    gemms: tuple[GemmRecord, ...]
    inputs: Mapping[str, InputStats]
    scales: Mapping[str, Tensor]
    cache: KvSummary | None = None


def gemm_name(key: Key) -> str:
    """`Key.shard_name` without its part."""
    return key.shard_name.removesuffix(f".{key.part}")


def save_layer(path: Path, record: LayerRecord) -> None:
    """Write a layer's record atomically."""
    tensors = {f"{SCALE_PREFIX}{name}": scale for name, scale in record.scales.items()}
    for name, stats in record.inputs.items():
        tensors |= {f"{INPUT_PREFIX}{name}.{field}": tensor for field, tensor in stats.tensors().items()}
    metadata = {"gemms": json.dumps([asdict(gemm) for gemm in record.gemms])}
    if record.cache is not None:
        metadata["cache"] = record.cache.model_dump_json()
    write_sealed(path, tensors, metadata)


def join_records(target: Path, records: Iterable[Path], prefix: str = "", suffix: str = "") -> None:
    """Copy all tensors whose names start with `prefix` from the layers' records into one file, under their final
    names, one tensor in memory at a time."""
    found: dict[str, tuple[Path, TensorInfo]] = {}
    for path in records:
        for name, info in read_header(path).tensors.items():
            if name.startswith(prefix):
                found[name.removeprefix(prefix) + suffix] = (path, info)
    rows = [(name, info.dtype, info.shape) for name, (_, info) in found.items()]

    def produce(name: str) -> Iterator[Tensor]:
        path, info = found[name]
        with path.open("rb") as file:
            yield read_tensor(file.fileno(), info, path=path)

    write_tensors(target, [rows[index] for index in order_for_alignment(rows)], produce)


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
    cache = KvSummary.model_validate_json(header.metadata["cache"]) if "cache" in header.metadata else None
    return LayerRecord(gemms, {name: InputStats.from_tensors(each) for name, each in fields.items()}, scales, cache)
