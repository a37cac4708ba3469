"""What a plan consists of: tensors made of pieces of source tensors, gathered into files.

Every written tensor is a stack of row ranges of stored tensors, so checkpoint and shards, fused and split, quantized
and kept differ only in their pieces. One file is one unit of work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from quantkit.archs import Key
from quantkit.archs.assemble import Location
from quantkit.spec.layout import layout_named
from quantkit.spec.manifest import Dropped, RankFiles
from quantkit.spec.tensorfile import tensor_nbytes


class How(StrEnum):
    """How the data of a written tensor comes to be."""

    COPY = "copy"  # the stored values, bit for bit (a native low-bit format is decoded)
    INT8 = "int8"  # quantized, or passed through when the source is INT8 per channel
    SCALE = "scale"  # the scales of an INT8 tensor, computed over whole rows of the source
    GIVEN = "given"  # values that the plan holds
    ALIAS = "alias"  # the bytes of another tensor of the same file


class Zeros(NamedTuple):
    """Rows of padding."""

    rows: int


Piece = Location | Zeros


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that will be written.

    Attributes:
        name: in its file.
        key: of the target; `part` says which tensor of the module, `expert` is None for stacked ones.
        how: see `How`.
        dtype, shape: as written, but for the layout.
        pieces: rows in order; of a stacked tensor, expert after expert.
        columns: [start, stop) of the source's columns, None for all.
        experts: logical ids along dimension 0 of a stacked tensor.
        sources: names in the source.
        scheme: of the GEMM, "keep" when it is not quantized.
        scale: name of the scales of an INT8 tensor; for the scales themselves "".
        alias: name of the tensor whose bytes this one shares.
        global_shape, slices: see `spec.manifest.TensorRecord`.
        layout: row of `spec.layout.LAYOUTS` in which it is packed when it is written.
        values: of a given tensor, float32.
    """

    name: str
    key: Key
    how: How
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    columns: tuple[int, int] | None = None
    experts: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    scheme: str = "keep"
    scale: str = ""
    alias: str = ""
    global_shape: tuple[int, ...] = ()
    slices: tuple[tuple[int, int, int], ...] = ()
    layout: str = "plain"
    values: tuple[float, ...] = ()

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(self.dtype, self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in the file: packed where it has a layout."""
        return self.shape if self.layout == "plain" else layout_named(self.layout).packed_shape(self.shape)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A safetensors file: its tensors in the order of their data; aliases come last and take no bytes."""

    name: str
    tensors: tuple[PlannedTensor, ...]

    @property
    def stored(self) -> tuple[PlannedTensor, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.how is not How.ALIAS)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored)


@dataclass(frozen=True)
class Plan:
    """All that a conversion will do.

    Attributes:
        form: "checkpoint" or "sharded".
        files: weight files in the order of their names.
        texts: name -> content of the JSON files that are generated.
        copies: names of the files that are copied byte for byte.
        dropped: tensors and files of the source that are not written, each with its rule.
        ignore: modules listed in `quantization_config.ignore`.
        ranks: what each rank of a mesh reads.
        parameters: of the source, scales not counted.
        source_bytes: size of the source's weights.
        quantized, kept: number of source tensors.
        warnings: sentences that a person should read.
    """

    form: str
    files: tuple[PlannedFile, ...]
    texts: dict[str, bytes]
    copies: tuple[str, ...]
    dropped: tuple[Dropped, ...]
    ignore: tuple[str, ...]
    ranks: tuple[RankFiles, ...]
    parameters: int
    source_bytes: int
    quantized: int
    kept: int
    warnings: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Bytes of tensor data that will be written."""
        return sum(file.nbytes for file in self.files)
