"""`quantkit convert` as a function: open, plan, write, and the manifest last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quantkit import __version__
from quantkit.archs.assemble import Location
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.writer import WrittenTensor, write_atomic
from quantkit.convert.compute import Calibrated
from quantkit.convert.decided import with_decisions
from quantkit.convert.execute import Done, Runner, SourceSpec, execute, local
from quantkit.convert.kv_scales import cache_scales
from quantkit.convert.plan import DEFAULT_SHARD_BYTES, plan
from quantkit.convert.source_check import damaged, damaged_files
from quantkit.convert.transforms import steps_of
from quantkit.convert.units import How, Plan, PlannedFile, PlannedTensor
from quantkit.errors import QuantkitError, UsageError
from quantkit.garbage import collection_paused
from quantkit.outdir import OutputFolder, check_place, exclusive, options_digest, prepare_output
from quantkit.recipe import Recipe
from quantkit.spec.calibration import Artifact, KvSummary
from quantkit.spec.environment import distinct
from quantkit.spec.files import is_file
from quantkit.spec.layout import layout_named
from quantkit.spec.manifest import (
    CHECKPOINT_NAME,
    SHARDED_NAME,
    Manifest,
    OutputFile,
    SourceFile,
    TensorRecord,
    manifest_chunks,
    read_manifest,
    sealed,
)
from quantkit.spec.mesh import Mesh
from quantkit.threads import available_cores

Form = Literal["checkpoint", "sharded"]


@dataclass(frozen=True)
class Prepared:
    """A conversion that was planned and may start."""

    source: Source
    spec: SourceSpec
    plan: Plan
    options: dict[str, Any]
    recipe: Recipe
    form: Form
    mesh: Mesh
    calibration_digest: str

    @property
    def manifest_name(self) -> str:
        return SHARDED_NAME if self.form == "sharded" else CHECKPOINT_NAME


@collection_paused()
def prepare(
    root: Path,
    recipe: Recipe,
    *,
    calibration: Path | None = None,
    form: Form = "checkpoint",
    mesh: Mesh | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ignore_index: bool = False,
    layout: str = "plain",
) -> Prepared:
    """Open the source and plan the conversion; writes nothing.

    Raises:
        UsageError, InputError: all that forbids it.
    """
    mesh = mesh or Mesh()
    spec = SourceSpec(root, ignore_index, recipe, calibration)
    source = spec.open()
    source_digest = source.digest()
    given = recipe
    digest, recipe, kv_cache = _calibrated(calibration, source, source_digest, recipe, form)
    if recipe != given:  # what was decided is part of what the weights become
        spec = replace(spec, recipe=recipe)
        source = spec.open()
    scales = Calibrated(calibration, source) if calibration else None
    planned = plan(
        source,
        recipe,
        form=form,
        mesh=mesh,
        max_shard_bytes=max_shard_bytes,
        scales=scales,
        layout=layout,
        kv_cache=kv_cache,
    )
    options = {
        "calibration": digest,
        "command": "convert",
        "form": form,
        "layout": layout,
        "max_shard_bytes": max_shard_bytes,
        "mesh": mesh.model_dump(mode="json"),
        "recipe": given.model_dump(mode="json"),
        "source": source_digest,
        "tool_version": __version__,
    }
    return Prepared(source, spec, planned, options, recipe, form, mesh, digest)


def convert(
    root: Path,
    out: Path,
    recipe: Recipe,
    *,
    calibration: Path | None = None,
    form: Form = "checkpoint",
    mesh: Mesh | None = None,
    jobs: int = 0,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    ignore_index: bool = False,
    layout: str = "plain",
) -> Manifest:
    """Convert a checkpoint; continue or do nothing when `out` holds the same conversion already.

    Args:
        calibration: artifact whose scales are used; None computes them from the weights.
        form: "checkpoint" (compressed-tensors, for engines) or "sharded" (for the runtime).
        mesh: of the sharded form, one rank when None.
        jobs: threads; 0 means the number of cores, at most 8.
        max_shard_bytes: bound on the data of one file.
        ignore_index: trust the files' headers instead of a stale index.
        layout: row of `spec.layout.LAYOUTS` in which the INT8 weights of the sharded form are packed.

    Raises:
        QuantkitError: bad use, bad input, no space; what was finished is kept and the same call continues.
    """
    check_place(out, root)
    prepared = prepare(
        root,
        recipe,
        calibration=calibration,
        form=form,
        mesh=mesh,
        max_shard_bytes=max_shard_bytes,
        ignore_index=ignore_index,
        layout=layout,
    )
    return run(prepared, out, jobs)


def run(prepared: Prepared, out: Path, jobs: int = 0, *, runner: Runner | None = None) -> Manifest:
    """Carry out a planned conversion, by `jobs` threads of this machine or by another `runner`."""
    name = prepared.manifest_name
    folder = open_output(prepared, out)
    if folder.finished:
        return _finished(out, name)
    with exclusive(folder):
        if is_file(out / name):  # another process has ended since
            folder.clear_work()
            return read_manifest(out / name)
        runner = runner or local(jobs or default_jobs())
        done = execute(prepared.plan, prepared.source, prepared.spec, folder, runner)
        _check_read(prepared, folder, done)
        manifest = sealed(_manifest(prepared, folder, done))
        write_atomic(out / name, manifest_chunks(manifest))
        folder.clear_work()
    return manifest


def _finished(out: Path, name: str) -> Manifest:
    """Manifest of a conversion that an earlier call ended, whose files are still there."""
    manifest = read_manifest(out / name)
    lost = [file.name for file in manifest.files if not is_file(out / file.name)]
    if lost:
        raise UsageError(
            f"files of the finished conversion {out} were removed",
            "copy them back, or convert into a new folder",
            items=lost,
        )
    return manifest


def _check_read(prepared: Prepared, folder: OutputFolder, done: dict[str, Done]) -> None:
    """Refuse the result when a source of ours was read that differs from its own manifest."""
    read = [row for label, row in done.items() if label.startswith("source:")]
    wrong = damaged_files(prepared.source.root, read)
    if wrong:
        folder.clear_work()  # the journal too: what was made of these files must be made again
        raise damaged(prepared.source.root, wrong)


def open_output(prepared: Prepared, out: Path) -> OutputFolder:
    """The output folder of a planned conversion, made or continued; `finished` once its manifest is there."""
    sources = [prepared.source.root, *([prepared.spec.calibration] if prepared.spec.calibration else [])]
    return prepare_output(
        out, prepared.options, sources=sources, final=prepared.manifest_name, command="quantkit convert"
    )


def default_jobs() -> int:
    """Cores that this process may use, at most 8: more only wait for the disk."""
    return min(available_cores(), 8)


def _calibrated(
    folder: Path | None, source: Source, source_digest: str, recipe: Recipe, form: Form
) -> tuple[str, Recipe, tuple[KvSummary, ...]]:
    """(digest of the artifact, "" without one; the recipe with what it decided; scales of the cache)."""
    artifact = None if folder is None else _artifact(folder, source_digest, recipe)
    decided = with_decisions(recipe, source, form, artifact)
    return artifact.digest() if artifact else "", decided, cache_scales(decided, form, artifact)


def _artifact(folder: Path, source_digest: str, recipe: Recipe) -> Artifact:
    """An artifact, after checking that it belongs to this source and recipe and is intact."""
    artifact = Artifact.read(folder)
    summary = artifact.summary
    if summary.source_digest != source_digest:
        raise UsageError(
            f"{folder} was calibrated on another source (digest {summary.source_digest[:16]}, "
            f"this one is {source_digest[:16]})",
            "calibrate this source, or convert the one that was calibrated",
        )
    there, now = _decisions(summary.recipe), _decisions(recipe.model_dump(mode="json"))
    if differing := [key for key in now if there.get(key) != now[key]]:
        raise UsageError(
            f"{folder} was calibrated with another recipe",
            "use the recipe of the calibration, or calibrate again",
            items=[f"{key}: {there.get(key)} there, {now[key]} now" for key in differing],
        )
    artifact.check_files()
    return artifact


def _decisions(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a recipe decides about scales: without its prose, and without how the text was drawn, which is the
    artifact's own matter."""
    kept = {key: value for key, value in recipe.items() if key not in ("name", "description", "calibration")}
    rules = [
        {"layers": [], "optional": False, **{key: value for key, value in rule.items() if key != "reason"}}
        for rule in recipe.get("rules", ())
    ]
    return {**kept, "rules": rules}


def _manifest(prepared: Prepared, out: OutputFolder, done: dict[str, Done]) -> Manifest:
    source, plan_ = prepared.source, prepared.plan
    written = {label.removeprefix("file:"): row for label, row in done.items() if label.startswith("file:")}
    planned = {*(file.name for file in plan_.files), *plan_.texts, *plan_.copies}
    if written.keys() != planned:
        raise QuantkitError(f"planned and written files differ: {sorted(written.keys() ^ planned)}", "report this")
    copied = set(plan_.copies)
    read = sorted((row for label, row in done.items() if label.startswith("source:")), key=lambda row: row.name)
    return Manifest(
        form=prepared.form,
        tool_version=__version__,
        options_digest=options_digest(prepared.options),
        architecture=source.arch.name,
        model_type=str(source.config.get("model_type", "")),
        recipe=prepared.recipe.model_dump(mode="json"),
        calibration_digest=prepared.calibration_digest,
        transforms=steps_of(source),
        mesh=prepared.mesh,
        vocab_size=source.dims.vocab,
        tied_embeddings=source.tied,
        source_files=tuple(SourceFile(name=row.name, size=row.size, sha256=row.sha256) for row in read),
        files=tuple(
            OutputFile(name=name, size=row.size, sha256=row.sha256, copied=name in copied)
            for name, row in sorted(written.items())
        ),
        tensors=tuple(
            record
            for file in sorted(plan_.files, key=lambda file: file.name)
            for record in _records(file, written[file.name])
        ),
        dropped=plan_.dropped,
        ranks=plan_.ranks,
        parameters=plan_.parameters,
        environments=distinct(row.versions for row in written.values() if row.versions),
    )


def _records(file: PlannedFile, done: Done) -> list[TensorRecord]:
    """Records of a file's tensors by offset, an alias after the tensor whose bytes it shares."""
    written = {row.name: row for row in done.tensors}
    if written.keys() != {tensor.name for tensor in file.stored}:
        raise QuantkitError(f"{file.name}: planned and written tensors differ", "report this")
    rows = [(written[tensor.alias or tensor.name], tensor) for tensor in file.tensors]
    rows.sort(key=lambda row: (row[0].offset, row[1].how is How.ALIAS, row[1].name))
    return [_record(file.name, tensor, place) for place, tensor in rows]


def _record(file: str, tensor: PlannedTensor, place: WrittenTensor) -> TensorRecord:
    experts = tensor.experts
    if not experts and isinstance(tensor.key.expert, int):
        experts = (tensor.key.expert,)
    return TensorRecord(
        name=tensor.name,
        sources=tensor.sources,
        role=tensor.key.role,
        layer=tensor.key.layer,
        experts=experts,
        part=tensor.key.part,
        file=file,
        offset=place.offset,
        nbytes=place.nbytes,
        dtype=tensor.dtype,
        shape=tensor.stored_shape,
        global_shape=tensor.global_shape,
        slices=tensor.slices,
        scheme=tensor.scheme,
        scale=tensor.scale,
        alias=tensor.alias,
        layout=tensor.layout,
        target=layout_named(tensor.layout).target,
        xxh3=place.xxh3,
    )


__all__ = ["Form", "Location", "Prepared", "convert", "default_jobs", "open_output", "prepare", "run"]
