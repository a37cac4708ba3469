"""The data of planned tensors, streamed from a source in bounded pieces.

Shape suffixes: N output rows, K input columns. Memory: `READ_ELEMENTS` values of the source in its dtype and in
float32; one expert's matrix where experts are stacked.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from quantkit.archs import Key, Kind
from quantkit.archs.assemble import Location, assemble
from quantkit.arithmetic import SCALE_FLOOR, channel_scales, quotient_scratch
from quantkit.checkpoint.formats import int8_channel
from quantkit.checkpoint.reader import OpenFiles, Source
from quantkit.convert.units import How, PlannedTensor, Zeros
from quantkit.errors import InputError
from quantkit.spec.calibration import SCALES_NAME, codes_name
from quantkit.spec.tensorfile import TensorInfo, read_header, torch_dtype

READ_ELEMENTS = 2 << 20
"""Values read at once: 4 MiB of bf16."""

ROUND_ELEMENTS = 1 << 18
"""Values quantized at once: 1 MiB of float32, so that every pass of the arithmetic stays in the cache."""


class _Last(threading.local):
    """The codes and scales that a thread used last, by part."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[Key, Tensor]] = {}


class Calibrated:
    """What a calibration artifact says of the weights: scales, and codes where a method has rounded them. Thread-safe.

    Args:
        folder: the artifact.
        source: that it was made for.
    """

    def __init__(self, folder: Path, source: Source) -> None:
        self._source = source
        self._files = OpenFiles(folder)
        self._last = _Last()
        self._found: dict[str, tuple[str, TensorInfo]] = {}
        codes = sorted(path.name for path in folder.glob(codes_name("*")))
        for name in (SCALES_NAME, *codes):  # scales of codes go before those of the largest magnitudes
            self._found |= {tensor: (name, info) for tensor, info in read_header(folder / name).tensors.items()}

    def has(self, key: Key) -> bool:
        return key.shard_name in self._found

    def rows(self, piece: Location, rows: tuple[int, int]) -> Tensor:
        """Scales `[n, 1]` of rows of a stored matrix, assembled from whatever the artifact holds.

        Raises:
            InputError: it holds nothing for this GEMM, or a scale that is not a positive finite number.
        """
        scale = self._whole(piece, "weight_scale")[rows[0] : rows[1]]
        name = _key(piece, "weight_scale").shard_name
        if scale.shape != (rows[1] - rows[0], 1) or scale.dtype != torch.float32:
            raise InputError(
                f"{name} in the calibration has shape {list(scale.shape)} {scale.dtype}", "calibrate again"
            )
        if not bool((scale.isfinite() & (scale >= SCALE_FLOOR)).all()):
            raise InputError(f"{name} in the calibration is not positive and finite", "calibrate again")
        return scale

    def codes(self, piece: Location) -> Tensor | None:
        """int8 `[n, K]` of the rows of a piece, None where no method has rounded them.

        Raises:
            InputError: what the artifact holds does not fit.
        """
        if not self._has_codes(piece):
            return None
        codes = self._whole(piece, "weight")[piece.start : piece.stop]
        shape = self._source.canonical_shape(piece.key)
        if codes.dtype != torch.int8 or codes.shape != (piece.rows, shape[-1]):
            name = _key(piece, "weight").shard_name
            raise InputError(
                f"{name} in the calibration has shape {list(codes.shape)} {codes.dtype}", "calibrate again"
            )
        return codes

    def _has_codes(self, piece: Location) -> bool:
        key = _key(piece, piece.key.part)
        parts = self._source.arch.role(key.role).parts or (key.role,)
        found = [self.has(key._replace(role=part)) or self.has(key) for part in parts]
        return key.part == "weight" and all(found)

    def _whole(self, piece: Location, part: str) -> Tensor:
        """Codes or scales of a stored matrix, of one expert where experts are stacked."""
        key, last = _key(piece, part), self._last
        if last.found.get(part, (None,))[0] != key:
            last.found[part] = key, assemble(self._source.arch, self._source.dims, key, self.has, self._fetch)
        return last.found[part][1]

    def _fetch(self, key: Key) -> Tensor:
        name, info = self._found[key.shard_name]
        return self._files.read(name, info)


def _key(piece: Location, part: str) -> Key:
    """Key of a part of the stored matrix that a piece belongs to, of its expert where experts are stacked."""
    key = piece.key.with_part(part)
    return key if piece.slot is None else key._replace(expert=piece.slot)


class Producer:
    """Yields the data of planned tensors; the scales of a weight are kept from its own pass where it comes first."""

    def __init__(self, source: Source, scales: Calibrated | None = None) -> None:
        self._source, self._calibrated = source, scales
        self._scales: dict[str, Tensor] = {}
        # made once for all tensors: fresh memory for each few rows costs a page fault for every 4 KiB
        self._scratch = torch.empty(ROUND_ELEMENTS)
        self._codes = torch.empty(ROUND_ELEMENTS, dtype=torch.int8)
        self._read = torch.empty(0, dtype=torch.uint8)

    def produce(self, tensor: PlannedTensor) -> Iterator[Tensor]:
        """Contiguous parts of `tensor` in row order, in its dtype; each is good until the next one is asked for.

        Raises:
            InputError: a read error, or weights that are not finite (named).
        """
        if tensor.how is How.GIVEN:
            yield torch.tensor(tensor.values, dtype=torch.float32)
            return
        if tensor.how is How.SCALE and tensor.name in self._scales:
            yield self._scales.pop(tensor.name)
            return
        # one block for all scales: many small ones between large temporaries keep the heap from shrinking
        rows = math.prod(tensor.shape[:-1]) if tensor.how is How.INT8 else 0
        kept, position = torch.empty(rows, 1), 0
        for piece in tensor.pieces:
            if isinstance(piece, Zeros):
                yield _zeros(tensor, piece)
            elif tensor.how is How.COPY:
                yield from self._copied(tensor, piece)
            else:
                for q_NK, scale_N1 in self._int8(piece):
                    if tensor.how is How.SCALE:
                        yield scale_N1
                        continue
                    kept[position : position + len(scale_N1)] = scale_N1
                    position += len(scale_N1)
                    yield _window(q_NK, tensor)
        if tensor.how is How.INT8:
            self._scales[tensor.scale] = kept

    def _copied(self, tensor: PlannedTensor, piece: Location) -> Iterator[Tensor]:
        entry = self._source.entries[piece.key]
        if not entry.shape:
            yield self._source.fetch(piece.key).to(torch_dtype(tensor.dtype))
            return
        for (first, _), values in self._rows(piece):
            kept = values.to(torch_dtype(tensor.dtype))
            self._check_kept(piece, kept, first)
            yield _window(kept, tensor)

    def _check_kept(self, piece: Location, values: Tensor, first: int) -> None:
        """Refuse NaN and infinity in what the model computes with; opaque subtrees may hold them (masks)."""
        opaque = self._source.arch.role(piece.key.role).kind is Kind.OPAQUE
        if not opaque and values.dtype in _CHECKED and not bool(values.isfinite().all()):
            by_row = values.abs().flatten(1).amax(1) if values.ndim > 1 else values
            raise self._not_finite(piece, by_row, first)

    def _int8(self, piece: Location) -> Iterator[tuple[Tensor, Tensor]]:
        """(int8 `[n, K]`, float32 scales `[n, 1]`) of a piece, a few rows at a time."""
        if self._source.entries[piece.key].format is int8_channel.FORMAT:
            yield from self._passed_through(piece)
            return
        codes = None if self._calibrated is None else self._calibrated.codes(piece)
        if codes is not None and self._calibrated is not None:
            yield codes, self._calibrated.rows(piece, (piece.start, piece.stop))
            return
        for (first, _), w_NK in self._rows(piece):
            step = max(1, ROUND_ELEMENTS // w_NK.shape[-1])
            for start in range(0, len(w_NK), step):
                rows = w_NK[start : start + step]
                part = self._float32(rows)
                scale = channel_scales(part)
                if not bool(scale.isfinite().all()):
                    raise self._not_finite(piece, scale, first + start)
                if self._calibrated is not None:
                    scale = self._calibrated.rows(piece, (first + start, first + start + len(part)))
                yield self._quantized(part, scale), scale

    def _quantized(self, part: Tensor, scale: Tensor) -> Tensor:
        """Codes of some rows that are given up, good until the next ones are asked for."""
        if part.numel() > self._codes.numel():
            self._codes = torch.empty(part.numel(), dtype=torch.int8)
        return self._codes[: part.numel()].view(part.shape).copy_(quotient_scratch(part, scale))

    def _memory(self, nbytes: int) -> Tensor:
        """Where rows are read to, good until the next ones are read."""
        if nbytes > self._read.numel():
            self._read = torch.empty(0, dtype=torch.uint8)  # let go first
            self._read = torch.empty(nbytes, dtype=torch.uint8)
        return self._read[:nbytes]

    def _float32(self, rows: Tensor) -> Tensor:
        """A float32 copy of some rows, good until the next one is asked for."""
        if rows.numel() > self._scratch.numel():
            self._scratch = torch.empty(rows.numel())
        return self._scratch[: rows.numel()].view(rows.shape).copy_(rows)

    def _passed_through(self, piece: Location) -> Iterator[tuple[Tensor, Tensor]]:
        entry = self._source.entries[piece.key]
        for (first, last), q_NK in self._rows(piece, "weight"):
            rows = (first, last) if piece.slot is None else (piece.slot, piece.slot + 1)
            scale = self._source.read_stored(entry, "weight_scale", rows)
            scale_N1 = scale if piece.slot is None else scale[0][first:last]
            if not bool(scale_N1.isfinite().all()):
                raise self._not_finite(piece, scale_N1, first)
            yield q_NK, scale_N1.float()

    def _rows(self, piece: Location, stored_part: str = "") -> Iterator[tuple[tuple[int, int], Tensor]]:
        """((first, last) row, values) over a piece; decoded, or one stored part as it is."""
        entry = self._source.entries[piece.key]

        def read(rows: tuple[int, int]) -> Tensor:
            if stored_part:
                return self._source.read_stored(entry, stored_part, rows, self._memory)
            return self._source.fetch(piece.key, rows, self._memory)

        if piece.slot is not None:
            matrix = self._source.canonical(piece.key, read((piece.slot, piece.slot + 1)))[0]
            yield (piece.start, piece.stop), matrix[piece.start : piece.stop]
            return
        width = max(1, math.prod(entry.shape[1:]))
        step = max(1, READ_ELEMENTS // width)
        for start in range(piece.start, piece.stop, step):
            stop = min(start + step, piece.stop)
            yield (start, stop), read((start, stop))

    def _not_finite(self, piece: Location, scale: Tensor, first: int) -> InputError:
        name = self._source.entries[piece.key].name
        row = first + int((~scale.isfinite()).flatten().nonzero()[0])
        expert = "" if piece.slot is None else f" of expert {piece.slot}"
        return InputError(
            f"{name}: row {row}{expert} holds NaN or infinity",
            "the source is damaged: copy or download it again, and check it with its publisher's checksums",
        )


_CHECKED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _window(values: Tensor, tensor: PlannedTensor) -> Tensor:
    return values if tensor.columns is None else values[:, tensor.columns[0] : tensor.columns[1]]


def _zeros(tensor: PlannedTensor, piece: Zeros) -> Tensor:
    """Padding rows; their shape is that of the tensor below the rows (and below the experts)."""
    below = tensor.shape[2:] if tensor.experts else tensor.shape[1:]
    return torch.zeros(piece.rows, *below, dtype=torch_dtype(tensor.dtype))
