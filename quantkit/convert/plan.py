"""From headers, recipe and mesh to the list of files that will be written: a pure function, no data is read.

All problems are reported together before anything is written.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from quantkit.archs import Key
from quantkit.archs.assemble import Location
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.writer import order_for_alignment
from quantkit.convert.checkpoint_form import checkpoint_tensors, config_bytes, index_bytes, linear_modules
from quantkit.convert.compute import Calibrated
from quantkit.convert.decide import Decisions, Problems, decide
from quantkit.convert.kv_scales import has_scales, scale_tensors
from quantkit.convert.nonweights import split_files
from quantkit.convert.packing import lay_out
from quantkit.convert.sharded_form import ShardedForm, Unit
from quantkit.convert.units import How, Plan, PlannedFile, PlannedTensor
from quantkit.errors import InputError
from quantkit.memory import grows
from quantkit.recipe import Recipe
from quantkit.spec.calibration import KvSummary
from quantkit.spec.index import INDEX_NAME, SINGLE_NAME
from quantkit.spec.layout import layout_named
from quantkit.spec.manifest import CHECKPOINT_NAME, SHARDED_NAME, RankFiles
from quantkit.spec.mesh import Mesh

DEFAULT_SHARD_BYTES = 1 << 30
"""One file is one unit of work: small enough that a few workers are busy to the end, large enough for long reads."""


def plan(
    source: Source,
    recipe: Recipe,
    *,
    form: str,
    mesh: Mesh,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    scales: Calibrated | None = None,
    layout: str = "plain",
    kv_cache: tuple[KvSummary, ...] = (),
) -> Plan:
    """Plan a conversion.

    Args:
        form: "checkpoint" or "sharded".
        mesh: of the sharded form; the checkpoint form has none.
        max_shard_bytes: bound on the data of a file, unless one tensor alone is larger.
        scales: of a calibration; every quantized GEMM must have its own.
        layout: row of `spec.layout.LAYOUTS` for the INT8 weights of the sharded form.
        kv_cache: static scales that the checkpoint form gets.

    Raises:
        UsageError, InputError: everything that forbids the conversion, listed.
    """
    chosen = layout_named(layout)
    problems = Problems()
    decisions = decide(source, recipe, form, problems)
    if form == "checkpoint" and mesh != Mesh():
        problems.use.append("a mesh needs --format sharded: engines split a checkpoint themselves")
    if form == "checkpoint" and chosen.name != "plain":
        problems.use.append(f"layout {layout} needs --format sharded: engines lay a checkpoint out themselves")
    ranks: tuple[RankFiles, ...] = ()
    files: tuple[PlannedFile, ...] = ()
    try:
        if form == "sharded":
            sharded = ShardedForm(source, decisions, mesh, problems)
            if scales is not None:
                _check_scales(source, decisions, scales, problems)
            problems.raise_if_any()
            groups = sharded.groups() if chosen.name == "plain" else lay_out(sharded.groups(), chosen, problems)
            sets = {name: pack(units, max_shard_bytes) for name, units in groups}
            problems.raise_if_any()
            files = tuple(_numbered(sets))
            ranks = sharded.ranks({name: tuple(_set_names(name, len(parts))) for name, parts in sets.items()})
        else:
            if scales is not None:
                _check_scales(source, decisions, scales, problems)
            problems.raise_if_any()
            units = checkpoint_tensors(source, decisions) + scale_tensors(source, kv_cache)
            files = checkpoint_files(pack(units, max_shard_bytes))
    except InputError as error:
        if error is problems.raised or not (problems.use or problems.source):
            raise
        problems.source.append(error.message)
        problems.raise_if_any()
    ignore = linear_modules(source, decisions.is_int8, decisions.written)
    texts = _texts(source, decisions, form, ignore, files, fp8=bool(kv_cache) or has_scales(source))
    copies, dropped_files = split_files(source.root, frozenset({*texts, *source.index.headers, INDEX_NAME}))
    result = Plan(
        form=form,
        files=files,
        texts=texts,
        copies=copies,
        dropped=decisions.dropped + dropped_files,
        ignore=ignore if _any_int8(decisions) else (),
        ranks=ranks,
        parameters=sum(math.prod(entry.shape) for entry in source.entries.values()),
        source_bytes=sum(entry.nbytes for entry in source.entries.values()),
        quantized=sum(scheme.is_int8 for scheme in decisions.schemes.values()),
        kept=len(decisions.written) - sum(scheme.is_int8 for scheme in decisions.schemes.values()),
        warnings=(),
    )
    _check_outcome(source, decisions, result)
    return replace(result, warnings=tuple(_warnings(source, result, mesh)))


def pack(units: Iterable[Unit], max_bytes: int) -> list[tuple[PlannedTensor, ...]]:
    """Fill files with units in order; a unit is never divided. Tensors of a file are ordered for alignment."""
    files: list[list[PlannedTensor]] = []
    filled = 0
    for unit in units:
        size = sum(tensor.nbytes for tensor in unit if tensor.how is not How.ALIAS)
        if not files or filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1] += unit
        filled += size
    return [_ordered(tensors) for tensors in files]


def _ordered(tensors: list[PlannedTensor]) -> tuple[PlannedTensor, ...]:
    stored = [tensor for tensor in tensors if tensor.how is not How.ALIAS]
    order = order_for_alignment([(tensor.name, tensor.dtype, tensor.shape) for tensor in stored])
    return (*(stored[index] for index in order), *(tensor for tensor in tensors if tensor.how is How.ALIAS))


def checkpoint_files(parts: list[tuple[PlannedTensor, ...]]) -> tuple[PlannedFile, ...]:
    """The usual names of a checkpoint's files."""
    if len(parts) == 1:
        return (PlannedFile(SINGLE_NAME, parts[0]),)
    total = len(parts)
    return tuple(
        PlannedFile(f"model-{number:05d}-of-{total:05d}.safetensors", tensors)
        for number, tensors in enumerate(parts, 1)
    )


def _set_names(name: str, count: int) -> Iterator[str]:
    return (f"{name}-{number:05d}.safetensors" for number in range(1, count + 1))


def _numbered(sets: dict[str, list[tuple[PlannedTensor, ...]]]) -> Iterator[PlannedFile]:
    for name, parts in sets.items():
        for file, tensors in zip(_set_names(name, len(parts)), parts, strict=True):
            yield PlannedFile(file, tensors)


def _check_scales(source: Source, decisions: Decisions, scales: Calibrated, problems: Problems) -> None:
    for key in decisions.written:
        if key.part != "weight" or not decisions.is_int8(key):
            continue
        experts = range(source.dims.experts) if source.is_stacked(key) else (key.expert,)
        for expert in experts:
            own = key._replace(expert=expert, part="weight_scale")
            if not _has_scale(source, own, scales):
                problems.use.append(f"the calibration has no scales for {own.with_part('weight').shard_name}")


def _has_scale(source: Source, key: Key, scales: Calibrated) -> bool:
    """Whether the artifact holds the scales of a GEMM, fused, in parts, or stacked."""
    role = source.arch.role(key.role)

    def stored(role_name: str) -> bool:
        own = key._replace(role=role_name)
        return scales.has(own) or (role.per_expert and scales.has(own._replace(expert=None)))

    return (
        stored(key.role)
        or bool(role.fuse and stored(role.fuse))
        or (bool(role.parts) and all(stored(part) for part in role.parts))
    )


def _texts(
    source: Source,
    decisions: Decisions,
    form: str,
    ignore: tuple[str, ...],
    files: tuple[PlannedFile, ...],
    *,
    fp8: bool,
) -> dict[str, bytes]:
    original = (source.root / "config.json").read_bytes()
    quantized = _any_int8(decisions) and form == "checkpoint"
    texts = {"config.json": config_bytes(source, ignore if quantized else None, original, kv_cache_fp8=fp8)}
    index = index_bytes(files) if form == "checkpoint" else None
    if index is not None:
        texts[INDEX_NAME] = index
    return texts


def _any_int8(decisions: Decisions) -> bool:
    return any(scheme.is_int8 for scheme in decisions.schemes.values())


def _check_outcome(source: Source, decisions: Decisions, result: Plan) -> None:
    """Names are unique and legal, and every element of every source tensor is written or dropped by name."""
    problems = Problems()
    taken = [file.name for file in result.files] + list(result.texts) + list(result.copies)
    own = SHARDED_NAME if result.form == "sharded" else CHECKPOINT_NAME
    problems.source += [
        f"{name}: the source has a file of this name, which quantkit writes" for name in _repeated([*taken, own])
    ]
    for file in result.files:
        problems.source += [
            f"{file.name}: two tensors would be called {name}" for name in _repeated([t.name for t in file.tensors])
        ]
    if result.form == "checkpoint":
        names = [tensor.name for file in result.files for tensor in file.tensors]
        problems.source += [f"two tensors would be called {name}" for name in _repeated(names)]
    covered = covered_elements(source, result.files)
    for key in decisions.written:
        entry = source.entries[key]
        if covered.get(key, 0) != math.prod(entry.shape):
            problems.source.append(
                f"{entry.name}: {covered.get(key, 0)} of its {math.prod(entry.shape)} elements would be written"
            )
    problems.raise_if_any()


def covered_elements(source: Source, files: Iterable[PlannedFile]) -> dict[Key, int]:
    """Elements of each source tensor that the plan writes; equal pieces (replicas) count once."""
    found: dict[Key, int] = defaultdict(int)
    seen: set[tuple[Location, int, int]] = set()
    for file in files:
        for tensor in file.tensors:
            if tensor.how in (How.SCALE, How.ALIAS):
                continue
            for piece in tensor.pieces:
                if not isinstance(piece, Location):
                    continue
                left, right = tensor.columns or (0, _width(source, piece))
                if (piece, left, right) not in seen:
                    seen.add((piece, left, right))
                    found[piece.key] += piece.rows * (right - left)
    return found


def _width(source: Source, piece: Location) -> int:
    shape = source.canonical_shape(piece.key)
    return math.prod(shape[1:] if piece.slot is None else shape[2:])


def _repeated(names: list[str]) -> list[str]:
    return [name for name, count in Counter(names).items() for _ in range(count - 1)]


def _warnings(source: Source, result: Plan, mesh: Mesh) -> Iterator[str]:
    if grows(result.source_bytes, result.weight_bytes) and mesh == Mesh():
        yield (
            f"the output is larger than the source: {result.weight_bytes:,} bytes of weights against "
            f"{result.source_bytes:,}"
        )
    yield from source.notes
    decoded = [e.name for k, e in source.entries.items() if e.format.name not in ("plain", "int8-channel")]
    if decoded:
        yield f"{len(decoded)} tensors are decoded from a native low-bit format before they are rounded again"
    if result.form == "checkpoint" and not result.quantized:
        if any(entry.format.name != "plain" for entry in source.entries.values()):
            yield "the recipe quantizes nothing; low-bit weights of the source are written as floats"
        else:
            yield "the recipe quantizes nothing; the output has the source's tensors bit for bit"
