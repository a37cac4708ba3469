"""Hardware layouts in a conversion: what is packed, the packed bytes as a stream, and rows read back as plain.

Only INT8 weights are packed, each rank's shard on its own, after fusing and splitting; scales and kept tensors stay
plain. Readers (verify, merge, sharding again) see plain rows, so that nothing else knows about layouts. Memory: tiles
of rows; one int8 matrix of a rank (one expert) for a K-major layout, whose first bytes need the last row.

Shape suffixes: N output rows, K input columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.checkpoint.reader import OpenFiles
from quantkit.convert.boxes import is_stacked
from quantkit.convert.decide import Problems
from quantkit.convert.units import How, PlannedTensor
from quantkit.errors import InputError
from quantkit.spec.layout import Layout, layout_named
from quantkit.spec.manifest import TensorRecord
from quantkit.spec.tensorfile import TensorInfo, tensor_nbytes

_EMIT_BYTES = 16 << 20
"""Packed bytes of a K-major matrix that are made at once."""

Unit = tuple[PlannedTensor, ...]


def lay_out(
    groups: Iterable[tuple[str, list[Unit]]], layout: Layout, problems: Problems
) -> Iterator[tuple[str, list[Unit]]]:
    """Groups of units with the layout of every INT8 weight set; sizes that do not fit go to `problems`, all of them."""
    misfits: dict[tuple[str, str], list[str]] = defaultdict(list)
    count = 0

    def chosen(tensor: PlannedTensor) -> PlannedTensor:
        nonlocal count
        if tensor.how is not How.INT8:
            return tensor
        count += 1
        for problem in layout.misfits(*tensor.shape[-2:]):
            misfits[str(list(tensor.shape[-2:])), problem].append(tensor.name)
        return replace(tensor, layout=layout.name)

    for name, units in groups:
        yield name, [tuple(chosen(tensor) for tensor in unit) for unit in units]
    for (shape, problem), names in misfits.items():
        distinct = list(dict.fromkeys(names))
        others = f" and {len(distinct) - 1} like it" if len(distinct) > 1 else ""
        problems.use.append(f"layout {layout.name}: {distinct[0]}{others}, {shape} of one rank: {problem}")
    if not count:
        problems.use.append(f"layout {layout.name} packs INT8 weights, and this recipe quantizes nothing")


def packed(tensor: PlannedTensor, rows: Iterator[Tensor]) -> Iterator[Tensor]:
    """The data of a planned tensor in its layout, from its plain rows `[n, K]` in order; equal total size."""
    layout = layout_named(tensor.layout)
    if layout.name == "plain":
        return rows
    n, k = tensor.shape[-2:]
    return _by_column_blocks(layout, n, k, rows) if layout.k_major else _by_row_tiles(layout, rows)


def _by_row_tiles(layout: Layout, rows: Iterator[Tensor]) -> Iterator[Tensor]:
    """Whole tiles of rows, packed as they come; N is a multiple of the tile, so no tile spans two experts."""
    rest: list[Tensor] = []
    for piece in rows:
        joined = torch.cat([*rest, piece])  # a copy: a piece is good until the next one is asked for
        whole = len(joined) // layout.n_multiple * layout.n_multiple
        rest = [joined[whole:]]
        if whole:
            yield layout.pack(joined[:whole])


def _by_column_blocks(layout: Layout, n: int, k: int, rows: Iterator[Tensor]) -> Iterator[Tensor]:
    """Block after block of K, each with all rows: a matrix is gathered, then emitted a few blocks at a time."""
    matrix_NK = torch.empty(n, k, dtype=torch.int8)
    step = max(1, _EMIT_BYTES // (n * layout.k_multiple)) * layout.k_multiple
    filled = 0
    for piece in rows:
        while len(piece):
            part, piece = piece[: n - filled], piece[n - filled :]
            matrix_NK[filled : filled + len(part)] = part
            filled += len(part)
            if filled == n:
                for start in range(0, k, step):
                    yield layout.pack(matrix_NK[:, start : start + step])
                filled = 0


def plain_shape(record: TensorRecord) -> tuple[int, ...]:
    """Shape of a written tensor before it was packed."""
    return layout_named(record.layout).plain_shape(record.shape) if record.layout != "plain" else record.shape


def stored_rows(files: OpenFiles, record: TensorRecord, slot: int | None, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a written tensor (of one expert where they are stacked) as plain `[rows, width]`.

    Raises:
        InputError: a read error, a packed shape that its layout does not have, or rows that the tensor does not have.
    """
    shape, stacked = plain_shape(record), is_stacked(record)
    local = shape[1 if stacked else 0] if shape else 1
    total = local * (shape[0] if stacked else 1)
    width = record.nbytes // max(total, 1) // tensor_nbytes(record.dtype, (1,))
    if record.layout != "plain":
        return _unpacked_rows(files, record, (local, width), slot or 0, start, stop)
    info = TensorInfo(record.name, record.dtype, (total, width), record.offset, record.offset + record.nbytes)
    base = local * (slot or 0)
    if base + stop > total:  # a manifest can say anything
        raise InputError(f"rows {start} to {stop} are not in {list(shape)}", "convert again")
    return files.read(record.file, info, (base + start, base + stop))


def _unpacked_rows(
    files: OpenFiles, record: TensorRecord, matrix: tuple[int, int], slot: int, start: int, stop: int
) -> Tensor:
    layout, (n, k) = layout_named(record.layout), matrix
    tile = layout.n_multiple
    first, last = start // tile * tile, -(-stop // tile) * tile
    flat = TensorInfo(record.name, "I8", (record.nbytes,), record.offset, record.offset + record.nbytes)
    base = slot * n * k
    parts = [
        files.read(record.file, flat, (base + offset, base + offset + length))
        for offset, length in layout.spans(n, k, first, last)
    ]
    rows_NK = layout.unpack(torch.cat(parts).reshape(layout.packed_shape((last - first, k))))
    return rows_NK[start - first : stop - first]
