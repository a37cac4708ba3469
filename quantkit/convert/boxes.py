"""Which part of a whole tensor a written tensor is: the manifest's slices as boxes.

The only reader of `TensorRecord.slices`; verification and merging stand on it, the planner does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quantkit.spec.manifest import TensorRecord


class Box(NamedTuple):
    """Rows of a written tensor that are rows of a whole one.

    Attributes:
        slot: position along dimension 0 of a stacked tensor, None when it is not stacked.
        expert: logical expert at that position.
        row: first row here.
        start, stop: rows of the whole matrix (or elements of the whole vector).
        left, right: columns of the whole matrix; (0, 1) for a vector.
    """

    slot: int | None
    expert: int | None
    row: int
    start: int
    stop: int
    left: int
    right: int

    @property
    def area(self) -> int:
        return (self.stop - self.start) * (self.right - self.left)


def is_stacked(record: TensorRecord) -> bool:
    """Whether dimension 0 of a rank's tensor counts experts."""
    return (
        bool(record.experts)
        and bool(record.global_shape)
        and len(record.shape) == len(record.global_shape)
        and (record.shape[0] == len(record.experts) and len(record.shape) == (2 if record.part == "bias" else 3))
    )


def boxes(record: TensorRecord) -> Iterator[Box]:
    """Every run of rows of a record, expert by expert."""
    stacked = is_stacked(record)
    row_dim = 1 if stacked else 0
    whole = record.global_shape[row_dim] if len(record.global_shape) > row_dim else 1
    width = record.global_shape[row_dim + 1] if len(record.global_shape) > row_dim + 1 else 1
    for size in record.global_shape[row_dim + 2 :]:
        width *= size
    runs = [(start, stop) for dim, start, stop in record.slices if dim == row_dim] or [(0, whole)]
    columns = [(start, stop) for dim, start, stop in record.slices if dim == row_dim + 1] or [(0, width)]
    ((left, right),) = columns
    experts: Iterable[tuple[int | None, int | None]] = (
        enumerate(record.experts) if stacked else [(None, record.experts[0] if record.experts else None)]
    )
    for slot, expert in experts:
        row = 0
        for start, stop in runs:
            if stop > start:
                yield Box(slot, expert, row, start, stop, left, right)
            row += stop - start


def data_rows(record: TensorRecord) -> int:
    """Rows that are not padding, of one expert."""
    row_dim = 1 if is_stacked(record) else 0
    runs = [stop - start for dim, start, stop in record.slices if dim == row_dim]
    whole = record.global_shape[row_dim] if len(record.global_shape) > row_dim else 1
    return sum(runs) if runs else whole


def covered(found: Iterable[Box]) -> int:
    """Elements that boxes of one whole tensor cover; equal boxes (replicas) count once."""
    distinct = {(box.expert, box.start, box.stop, box.left, box.right): box.area for box in found}
    return sum(distinct.values())


def overlap(found: Iterable[Box]) -> bool:
    """Whether two distinct boxes of one whole tensor share elements: areas then say nothing about what is covered."""
    distinct = {(-1 if box.expert is None else box.expert, *box[3:]) for box in found}
    active: list[tuple[int, ...]] = []
    for box in sorted(distinct):
        expert, start, _, left, right = box
        active = [other for other in active if other[0] == expert and other[2] > start]
        if any(other[3] < right and left < other[4] for other in active):
            return True
        active.append(box)
    return False
