"""Written tensors against the source, element by element.

Kept tensors must equal the source bit for bit. INT8 weights, dequantized, must lie within half a step of it, and
without a calibration each scale must be that of its row's largest magnitude. INT8 sources must be passed on unchanged.
Weights that a method has rounded must be the codes of its calibration, or near the source where that is not given.

The bound is exact: q rounds the float32 quotient fl(w / s) to nearest, and fl is off by at most 2^-24 of its value, so
|w / s - q| <= 1/2 + 2^-24 |w / s|, which is checked in float64. Shape suffixes: N rows, K columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.archs import Key
from quantkit.archs.assemble import Location
from quantkit.arithmetic import QMAX, channel_scales
from quantkit.calibrate.methods import method
from quantkit.checkpoint.reader import Entry, OpenFiles, Source
from quantkit.convert.boxes import Box, boxes, data_rows, is_stacked
from quantkit.convert.compute import Calibrated
from quantkit.convert.packing import plain_shape, stored_rows
from quantkit.convert.sample import Sample, records_of
from quantkit.convert.source_pieces import cut_pieces, source_rows, steps, target_pieces, with_rows
from quantkit.convert.units import Zeros
from quantkit.errors import InputError, QuantkitError
from quantkit.recipe import recorded
from quantkit.spec.manifest import Manifest, TensorRecord
from quantkit.spec.tensorfile import tensor_nbytes, torch_dtype

_ROUNDOFF = 2.0**-24
"""Largest relative error of a float32 division."""

_SURE = 0.5 - 2**-10
"""Distance in steps below which float32 arithmetic proves the bound: w / s is at most 128 and off by 2^-17."""


@dataclass
class Row:
    """A kind of comparison: elements seen, and what is wrong."""

    name: str
    count: int = 0
    failures: list[str] = field(default_factory=list)
    note: str = ""


@dataclass
class _Tally:
    """Result of comparing one record."""

    kind: str
    count: int = 0
    failures: list[str] = field(default_factory=list)
    clipped: int = 0


_KEPT, _STEP, _PASSED, _FOUND, _NEAR = (
    "kept tensors equal the source bit for bit",
    "INT8 weights lie within half a step of the source",
    "INT8 weights of the source are unchanged",
    "INT8 weights are the codes of the calibration",
    "INT8 weights lie near the source",
)

_FAR = 0.1
"""Relative error of a row of weights that no method causes which rounds: INT8 makes 0.01 of Gaussian weights, error
feedback up to three times that; a row of another matrix has an error above 1."""


class Rounding(NamedTuple):
    """What is known of how weights were rounded.

    Attributes:
        calibrated: a calibration was used, so scales need not be those of the largest magnitudes.
        rounded: a method has rounded weights, so they need not be the nearest.
        artifact: that calibration, None when it was not given.
    """

    calibrated: bool = False
    rounded: bool = False
    artifact: Calibrated | None = None

    @classmethod
    def of(cls, manifest: Manifest | None, artifact: Calibrated | None) -> Rounding:
        if manifest is None:
            return cls()
        methods = recorded(manifest.recipe).methods
        rounded = any(method(options.name).rounds for options in methods)
        return cls(bool(manifest.calibration_digest), rounded, artifact)


@dataclass
class Comparison:
    """What was compared: kinds of comparison, and how many of how many tensors."""

    rows: list[Row]
    compared: int
    tensors: int


def compare(
    folder: Path,
    source: Source,
    manifest: Manifest | None,
    jobs: int,
    sample: Sample | None = None,
    artifact: Calibrated | None = None,
) -> Comparison:
    """Compare every written tensor, or a sample, with the source, and every source tensor's name with what was written.

    That every element of the source is written somewhere is always checked of all tensors: it needs no data.
    """
    records = list(manifest.tensors) if manifest else records_of(folder)
    rounding = Rounding.of(manifest, artifact)
    files = OpenFiles(folder)
    work = [record for record in records if not record.alias and record.part in ("weight", "bias")]
    chosen = work if sample is None else sample.choose(work)
    scales = {(record.file if manifest else "", record.name): record for record in records}

    def one(record: TensorRecord) -> _Tally:
        scale = scales.get((record.file if manifest else "", record.scale))
        try:
            return _compare_one(files, source, record, scale, rounding)
        except QuantkitError as error:
            return _Tally(_STEP if record.scale else _KEPT, 0, [f"{record.file}: {record.name}: {error.message}"])

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        tallies = list(pool.map(one, chosen))
    files.close()
    rows = {kind: Row(kind) for kind in (_KEPT, _STEP, _PASSED, _FOUND, _NEAR)}
    for tally in tallies:
        rows[tally.kind].count += tally.count
        rows[tally.kind].failures += tally.failures
    clipped = sum(tally.clipped for tally in tallies)
    if clipped:
        rows[_STEP].note = f"{clipped:,} values are clipped by the calibration's scales"
    rows[_NEAR].note = "a method has rounded them; --calibration compares them code by code"
    found = [row for row in rows.values() if row.count or row.failures] + [_completeness(source, work, manifest)]
    return Comparison(found, len(chosen), len(work))


# ---------------------------------------------------------------------------------------------- one record


def _compare_one(
    files: OpenFiles, source: Source, record: TensorRecord, scale: TensorRecord | None, rounding: Rounding
) -> _Tally:
    raw = _stored_entry(source, record)
    if raw is not None:
        return _compare_raw(files, source, record, raw)
    int8 = bool(record.scale)
    tally = _Tally(_STEP if int8 else _KEPT)
    if int8 and scale is None:
        tally.failures.append(f"{record.file}: {record.name}: its scales {record.scale} are not there")
        return tally
    for box in boxes(record):
        target = Key(record.layer, record.role, box.expert, record.part)
        for piece, row in with_rows(cut_pieces(target_pieces(source, target), box.start, box.stop), box.row):
            if isinstance(piece, Zeros):
                _expect_zeros(files, record, box, row, piece.rows, tally)
            elif scale is not None:
                _compare_int8(files, source, record, scale, box, piece, row, rounding, tally)
            else:
                _compare_kept(files, source, record, box, piece, row, tally)
    _check_padding(files, record, tally)
    return tally


def _stored_entry(source: Source, record: TensorRecord) -> Entry | None:
    """The source tensor that a record is a plain copy of: same name, shape and orientation; else None."""
    if record.scale or record.slices or len(record.sources) != 1:
        return None
    key = source.arch.parse(record.sources[0])
    entry = source.entries.get(key.with_part("bias" if key.part == "bias" else "weight")) if key else None
    if entry is None or entry.name != record.sources[0] or entry.shape != record.shape:
        return None
    return entry if not is_stacked(record) else None


def _compare_raw(files: OpenFiles, source: Source, record: TensorRecord, entry: Entry) -> _Tally:
    tally = _Tally(_KEPT, math.prod(record.shape))
    rows = record.shape[0] if record.shape else 1
    for start, stop in steps(0, rows, record.nbytes // max(rows, 1) // tensor_nbytes(record.dtype, (1,))):
        ours = stored_rows(files, record, None, start, stop)
        theirs = source.fetch(entry.key, (start, stop) if record.shape else None).reshape(stop - start, -1)
        if not _same(ours, theirs.to(torch_dtype(record.dtype))):
            tally.failures.append(f"{record.file}: {record.name}: differs from the source in rows {start} to {stop}")
            break
    return tally


def _compare_kept(
    files: OpenFiles, source: Source, record: TensorRecord, box: Box, piece: Location, row: int, tally: _Tally
) -> None:
    for first, theirs in source_rows(source, piece):
        at = row + first - piece.start
        ours = stored_rows(files, record, box.slot, at, at + len(theirs))
        wanted = theirs.reshape(len(theirs), -1)[:, box.left : box.right].to(torch_dtype(record.dtype))
        tally.count += ours.numel()
        if not _same(ours, wanted):
            tally.failures.append(f"{record.file}: {record.name}{_of(box)}: differs from the source at row {at}")
            return


def _compare_int8(
    files: OpenFiles,
    source: Source,
    record: TensorRecord,
    scale: TensorRecord,
    box: Box,
    piece: Location,
    row: int,
    rounding: Rounding,
    tally: _Tally,
) -> None:
    passed = source.entries[piece.key].format.name == "int8-channel"
    if not passed and _compare_codes(files, record, scale, box, piece, row, rounding.artifact, tally):
        return
    where = f"{record.file}: {record.name}{_of(box)}"
    for first, w_NK in source_rows(source, piece):
        at = row + first - piece.start
        q_NK = stored_rows(files, record, box.slot, at, at + len(w_NK))
        s_N1 = stored_rows(files, scale, box.slot, at, at + len(w_NK))
        tally.count += q_NK.numel()
        window = w_NK.float()[:, box.left : box.right]
        if q_NK.shape != window.shape or s_N1.shape != (len(window), 1):
            shapes = f"{list(q_NK.shape)} with scales {list(s_N1.shape)}"
            tally.failures.append(f"{where}: rows {shapes}, the source's are {list(window.shape)}")
            return
        if passed:
            tally.kind = _PASSED
            wrong = q_NK.float() * s_N1 != window
        elif rounding.rounded:
            tally.kind = _NEAR
            distance = torch.linalg.vector_norm(q_NK.float() * s_N1 - window, dim=1, keepdim=True)
            wrong = ~(distance <= _FAR * torch.linalg.vector_norm(window, dim=1, keepdim=True) + s_N1)
        else:
            wrong, clipped = _off(window, q_NK, s_N1)
            wrong = wrong & ~clipped if rounding.calibrated else wrong
            tally.clipped += int(clipped.sum()) if rounding.calibrated else 0
            if not rounding.calibrated and not torch.equal(s_N1, channel_scales(w_NK.float())):
                bad = int((s_N1 != channel_scales(w_NK.float())).flatten().nonzero()[0])
                tally.failures.append(f"{where}: the scale of row {at + bad} is not absmax / {QMAX} of the source's")
                return
        if bool(wrong.any()):
            bad_row, column = (int(item) for item in wrong.nonzero()[0])
            value, step = float(window[bad_row, column]), float(s_N1[bad_row])
            tally.failures.append(
                f"{where}: row {at + bad_row}, column {column}: {int(q_NK[bad_row, column])} x {step:.6g} "
                f"is not the source's {value:.6g} ({int(wrong.sum())} such values here)"
            )
            return


def _compare_codes(
    files: OpenFiles,
    record: TensorRecord,
    scale: TensorRecord,
    box: Box,
    piece: Location,
    row: int,
    artifact: Calibrated | None,
    tally: _Tally,
) -> bool:
    """Compare a piece with the codes of the calibration; whether there are any."""
    codes = None if artifact is None else artifact.codes(piece)
    if artifact is None or codes is None:
        return False
    tally.kind = _FOUND
    q_NK, s_N1 = (stored_rows(files, each, box.slot, row, row + piece.rows) for each in (record, scale))
    wanted = artifact.rows(piece, (piece.start, piece.stop))
    differs = (q_NK != codes[:, box.left : box.right]).any(1) | (s_N1 != wanted).any(1)
    tally.count += q_NK.numel()
    if bool(differs.any()):
        at, count = row + int(differs.nonzero()[0]), int(differs.sum())
        tally.failures.append(
            f"{record.file}: {record.name}{_of(box)}: row {at} is not what the calibration has found ({count} rows)"
        )
    return True


def _off(w_NK: Tensor, q_NK: Tensor, s_N1: Tensor) -> tuple[Tensor, Tensor]:
    """(values beyond half a step, values that a smaller scale clipped); float64 where float32 cannot tell."""
    distance = (w_NK / s_N1 - q_NK.float()).abs_()
    suspect = ~(distance <= _SURE)
    clipped = torch.zeros_like(suspect)
    if not bool(suspect.any()):
        return suspect, clipped
    rows, columns = suspect.nonzero(as_tuple=True)
    w, q, s = w_NK[rows, columns].double(), q_NK[rows, columns].double(), s_N1[rows, 0].double()
    suspect[rows, columns] = ~((w / s - q).abs() <= 0.5 + _ROUNDOFF * (w / s).abs())
    clipped[rows, columns] = (q.abs() == QMAX) & (q.sign() == w.sign()) & (w.abs() > QMAX * s)
    return suspect, clipped


def _expect_zeros(files: OpenFiles, record: TensorRecord, box: Box, row: int, count: int, tally: _Tally) -> None:
    if bool((stored_rows(files, record, box.slot, row, row + count) != 0).any()):
        tally.failures.append(f"{record.file}: {record.name}{_of(box)}: rows {row} to {row + count} should be zero")


def _check_padding(files: OpenFiles, record: TensorRecord, tally: _Tally) -> None:
    """Rows after the data: vocabulary padding, the bias of a row-parallel GEMM on all ranks but the first."""
    stacked, used = is_stacked(record), data_rows(record)
    local = plain_shape(record)[1 if stacked else 0] if record.shape else 1
    for slot in range(len(record.experts)) if stacked else (None,):
        if used < local and bool((stored_rows(files, record, slot, used, local) != 0).any()):
            tally.failures.append(f"{record.file}: {record.name}: its padding is not zero")


def filled_parameters(source: Source, manifest: Manifest) -> int:
    """Elements of fused biases that the source does not have, one part of it having no bias: they are zeros."""
    total = 0
    for record in {record.name: record for record in manifest.tensors if record.part == "bias"}.values():
        experts = range(source.dims.experts) if is_stacked(record) else (record.experts or (None,))[:1]
        for expert in experts:
            pieces = target_pieces(source, Key(record.layer, record.role, expert, "bias"))
            total += sum(piece.rows for piece in pieces if isinstance(piece, Zeros))
    return total


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, so that NaN equals itself and -0 differs from 0."""
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def _of(box: Box) -> str:
    return "" if box.expert is None or box.slot is None else f" (expert {box.expert})"


# -------------------------------------------------------------------------------------------- completeness


def _completeness(source: Source, work: list[TensorRecord], manifest: Manifest | None) -> Row:
    """Every element of every source tensor is in some written tensor, or its tensor is dropped by a rule."""
    row = Row("every source tensor is written or dropped by a rule", len(source.entries))
    dropped = {item.name for item in manifest.dropped} if manifest else set()
    boxes_of: dict[Key, set[tuple[int | None, int, int, int, int]]] = defaultdict(set)
    for record in work:
        raw = _stored_entry(source, record)
        if raw is not None:
            boxes_of[raw.key].add((None, 0, math.prod(raw.shape), 0, 1))
            continue
        for box in boxes(record):
            try:
                pieces = target_pieces(source, Key(record.layer, record.role, box.expert, record.part))
            except InputError:
                continue  # reported where the record itself is compared
            for piece in cut_pieces(pieces, box.start, box.stop):
                if isinstance(piece, Location):
                    boxes_of[piece.key].add((piece.slot, piece.start, piece.stop, box.left, box.right))
    for key, entry in source.entries.items():
        held = sum((stop - start) * (right - left) for _, start, stop, left, right in boxes_of.get(key, ()))
        if entry.name not in dropped and held != math.prod(entry.shape):
            row.failures.append(f"{entry.name}: {held:,} of {math.prod(entry.shape):,} elements were written")
    return row
