"""Whether a manifest agrees with itself, before anything trusts it: it may come from anywhere.

What is checked is all that a reader relies on: files lie inside the folder and are listed, sizes follow from shapes,
slices lie inside the whole tensor, what one record names exists, and everything stands once and in its order. No file
is opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from quantkit.errors import InputError
from quantkit.spec.files import is_inside
from quantkit.spec.layout import LAYOUTS
from quantkit.spec.scheme import SCHEMES
from quantkit.spec.tensorfile import DTYPE_BITS, MAX_DIMENSIONS, tensor_nbytes

if TYPE_CHECKING:
    from quantkit.spec.manifest import Manifest, TensorRecord

_SHOWN = 20


def outside_names(manifest: Manifest) -> list[str]:
    """Names that would leave the folder, or that no file can have."""
    names = {file.name for file in manifest.files} | {file.name for file in manifest.source_files}
    names.update(name for rank in manifest.ranks for name in rank.files)
    names.update(record.file for record in manifest.tensors)
    return sorted(name for name in names if not is_inside(name))


def contradictions(manifest: Manifest) -> list[str]:
    """Sentences, one for each contradiction, the first 20; empty for a manifest that agrees with itself."""
    found: list[str] = []
    for problem in (*_of_files(manifest), *_of_tensors(manifest)):
        found.append(problem)
        if len(found) == _SHOWN:
            break
    return found


def _of_files(manifest: Manifest) -> Iterator[str]:
    sizes = {file.name: file.size for file in manifest.files}
    if len(sizes) != len(manifest.files):
        yield "files: a name stands twice"
    elif list(sizes) != sorted(sizes):
        yield "files: they are not in the order of their names"
    read = [file.name for file in manifest.source_files]
    if read != sorted(set(read)):
        yield "source_files: they do not stand once and in the order of their names"
    numbers = [rank.rank for rank in manifest.ranks]
    if len(set(numbers)) < len(numbers) or not all(0 <= number < manifest.mesh.world for number in numbers):
        yield f"ranks: {numbers} of a mesh of {manifest.mesh.world}"
    elif numbers != sorted(numbers):
        yield f"ranks: {numbers} are not in order"
    for rank in manifest.ranks:
        yield from (f"rank {rank.rank}: {name} is none of the files" for name in rank.files if name not in sizes)
        if len(set(rank.files)) < len(rank.files):
            yield f"rank {rank.rank}: it reads a file twice"


def _of_tensors(manifest: Manifest) -> Iterator[str]:
    sizes = {file.name: file.size for file in manifest.files}
    files: dict[str, dict[str, TensorRecord]] = {}
    for record in manifest.tensors:
        there = files.setdefault(record.file, {})
        if there.setdefault(record.name, record) is not record:
            yield f"{record.file}: {record.name} stands twice"
    for one, next_ in pairwise(manifest.tensors):
        if _place(one) > _place(next_):
            yield f"{next_.file}: {next_.name}: it does not stand by file and offset"
    for record in manifest.tensors:
        if record.alias and not manifest.tied_embeddings:
            yield f"{record.file}: {record.name}: an alias, but no ends are tied"
        problem = _problem(record, sizes, files[record.file])
        if problem:
            yield f"{record.file}: {record.name}: {problem}"


def _place(record: TensorRecord) -> tuple[str, int, bool]:
    """What records are sorted by; an alias comes after the tensor whose bytes it shares."""
    return record.file, record.offset, bool(record.alias)


def _problem(record: TensorRecord, sizes: Mapping[str, int], beside: Mapping[str, TensorRecord]) -> str:
    """What is wrong with a record, "" when nothing is; `beside` are the records of its file by name."""
    if record.file not in sizes:
        return "its file is none of the files"
    if record.dtype not in DTYPE_BITS:
        return f"no dtype is called {record.dtype}"
    if record.layout not in LAYOUTS:
        return f"no layout is called {record.layout}"
    if record.target != LAYOUTS[record.layout].target:
        return f"layout {record.layout} is not for the target {record.target or '(none)'}"
    if max(len(record.shape), len(record.global_shape)) > MAX_DIMENSIONS or min(record.shape, default=0) < 0:
        return f"no tensor has the shape {list(record.shape)}"
    if tensor_nbytes(record.dtype, record.shape) != record.nbytes:
        return f"{record.dtype} {list(record.shape)} does not take {record.nbytes} bytes"
    if not 0 <= record.offset <= sizes[record.file] - record.nbytes:
        return f"bytes {record.offset} to {record.offset + record.nbytes} do not lie in the file"
    if record.alias and (record.alias == record.name or record.alias not in beside):
        return f"its alias {record.alias} is not in the file"
    if record.scheme not in SCHEMES:
        return f"no scheme is called {record.scheme}"
    if record.part == "weight" and SCHEMES[record.scheme].is_int8 != (record.dtype == "I8" and bool(record.scale)):
        return f"{record.dtype} {'with' if record.scale else 'without'} scales is not of the scheme {record.scheme}"
    if len(set(record.sources)) < len(record.sources):
        return "one of its sources stands twice"
    return _slices_problem(record) or (_scale_problem(record, beside.get(record.scale)) if record.scale else "")


def _scale_problem(record: TensorRecord, scale: TensorRecord | None) -> str:
    """Whether the scales stand beside their weight and are those of its rows, expert by expert."""
    if scale is None:
        return f"its scales {record.scale} are not in the file"
    if scale.experts != record.experts or _runs(scale) != _runs(record):
        return f"its scales {record.scale} are of other rows or experts"
    return ""


def _row_dim(record: TensorRecord) -> int:
    """The dimension that counts rows: 1 where dimension 0 counts experts."""
    dimensions = 2 if record.part == "bias" else 3
    return 1 if len(record.shape) == dimensions and len(record.experts) == record.shape[0] > 0 else 0


def _runs(record: TensorRecord) -> list[tuple[int, int]]:
    row_dim = _row_dim(record)
    return [(start, stop) for dim, start, stop in record.slices if dim == row_dim]


def _slices_problem(record: TensorRecord) -> str:
    """Whether shape, whole shape, experts and slices fit together (`convert.boxes` reads them)."""
    whole, shape = record.global_shape, record.shape
    for dim, start, stop in record.slices:
        if not 0 <= dim < len(whole) or not 0 <= start <= stop <= whole[dim]:
            return f"the slice {[dim, start, stop]} does not lie in {list(whole)}"
    if min(whole, default=0) < 0 or len(whole) != len(shape):
        return f"the shape {list(shape)} is no part of {list(whole)}"
    row_dim = _row_dim(record)
    if len(record.experts) > 1 and not row_dim:
        return f"the shape {list(shape)} does not hold {len(record.experts)} experts"
    runs = [stop - start for start, stop in _runs(record)]
    columns = [stop - start for dim, start, stop in record.slices if dim == row_dim + 1]
    if len(columns) > 1 or len(runs) + len(columns) < len(record.slices):
        return "its slices are not runs of rows and then one of columns"
    if record.layout != "plain":
        try:
            shape = LAYOUTS[record.layout].plain_shape(shape) if len(shape) > 1 else ()
        except InputError as error:
            return error.message
    rows = sum(runs) if runs else math.prod(whole[row_dim : row_dim + 1])
    held = math.prod(shape[row_dim : row_dim + 1])
    tail = (*columns, *whole[row_dim + 1 + len(columns) :])
    if shape[row_dim + 1 :] != tail or held < rows or (held > rows and not runs):
        held_by = f"the slices of {list(whole)} that it should" if record.slices else f"the whole {list(whole)}"
        return f"{list(record.shape)} does not hold {held_by}"
    return ""
