"""Where the rows of a written tensor lie in the source, and their values, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from quantkit.archs import Key
from quantkit.archs.assemble import Location, cut, locate
from quantkit.checkpoint.reader import Source
from quantkit.convert.units import Piece, Zeros
from quantkit.errors import InputError

ELEMENTS = 1 << 20
"""Values read at once."""


def target_pieces(source: Source, key: Key) -> tuple[Piece, ...]:
    """Where the rows of a whole tensor lie in the source; a part without a bias counts as zeros.

    Raises:
        InputError: the source has nothing like it.
    """
    if key.role == "lm_head" and source.tied:
        key = key._replace(role="embed")
    found = _locate(source, key)
    if found is not None:
        return found
    pieces: list[Piece] = []
    for part in source.arch.role(key.role).parts if key.part == "bias" else ():
        own = key._replace(role=part)
        weight = _locate(source, own.with_part("weight")) or ()
        pieces += _locate(source, own) or (Zeros(sum(item.rows for item in weight)),)
    if not pieces:
        raise InputError(f"the source has no tensor for {key.shard_name}")
    return tuple(pieces)


def _locate(source: Source, key: Key) -> tuple[Location, ...] | None:
    def rows_of(stored: Key) -> int:
        shape = source.canonical_shape(stored)
        return shape[1] if source.is_stacked(stored) else (shape[0] if shape else 1)

    return locate(source.arch, source.dims, key, source.has, rows_of)


def cut_pieces(pieces: tuple[Piece, ...], start: int, stop: int) -> list[Piece]:
    """Rows [start, stop) of pieces, zeros included."""
    found: list[Piece] = []
    position = 0
    for piece in pieces:
        low, high = max(start - position, 0), min(stop - position, piece.rows)
        if low < high:
            found += [Zeros(high - low)] if isinstance(piece, Zeros) else cut((piece,), low, high)
        position += piece.rows
    return found


def with_rows(pieces: list[Piece], row: int) -> Iterator[tuple[Piece, int]]:
    for piece in pieces:
        yield piece, row
        row += piece.rows


def source_rows(source: Source, piece: Location) -> Iterator[tuple[int, Tensor]]:
    """(first canonical row, values) of a piece, a few rows at a time; one expert at once where experts are stacked."""
    if piece.slot is not None:
        matrix = source.canonical(piece.key, source.fetch(piece.key, (piece.slot, piece.slot + 1)))[0]
        for start, stop in steps(piece.start, piece.stop, math.prod(matrix.shape[1:])):
            yield start, matrix[start:stop]
        return
    for start, stop in steps(piece.start, piece.stop, math.prod(source.entries[piece.key].shape[1:])):
        yield start, source.fetch(piece.key, (start, stop))


def steps(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, ELEMENTS // max(1, width))
    return ((first, min(first + step, stop)) for first in range(start, stop, step))
