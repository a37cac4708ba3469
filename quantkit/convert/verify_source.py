"""`quantkit verify --source`: a converted folder against the model that it was made from."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quantkit.checkpoint.reader import Source
from quantkit.convert.checks import Check, Checks
from quantkit.convert.compare import compare, filled_parameters
from quantkit.convert.compute import Calibrated
from quantkit.convert.coverage import written_parameters
from quantkit.convert.hashing import hash_file
from quantkit.convert.sample import Sample
from quantkit.convert.shard_source import open_source
from quantkit.convert.transforms import open_transformed, steps_of
from quantkit.recipe import recorded
from quantkit.spec.calibration import Artifact
from quantkit.spec.files import is_file
from quantkit.spec.manifest import Manifest, OutputFile

SOURCE_CHECK = "source is the one that was converted"


def check_source(
    folder: Path,
    root: Path,
    manifest: Manifest | None,
    quick: bool,
    jobs: int,
    checks: Checks,
    sample: Sample | None = None,
    calibration: Path | None = None,
) -> None:
    """Add the checks against the source: its files, the number of parameters, copied files, and the values."""
    opened: list[Source] = []
    if calibration is not None and not checks.run(
        "calibration is the one that was used", lambda: _calibration(calibration, manifest)
    ):
        return
    transformed = "source is transformed as the manifest says"
    if not checks.run(transformed, lambda: _transformed(root, manifest, opened, calibration)):
        return
    original = opened[0]
    if manifest is not None:
        checks.run(SOURCE_CHECK, lambda: _source_files(root, manifest, quick, jobs))
        checks.run("parameter count equals the source's", lambda: _parameters(original, manifest))
        checks.run("copied files equal the source's", lambda: _copies(root, manifest, quick, jobs))
        checks.run("names of the source are those of the manifest", lambda: _names(original, manifest))
    if quick:
        return
    view = _words(manifest)
    artifact = Calibrated(calibration, original) if calibration is not None else None
    outcome = compare(folder, original, manifest, jobs, sample, artifact)
    checks.compared, checks.tensors = outcome.compared, outcome.tensors
    what = f"{outcome.compared:,} of {outcome.tensors:,} tensors" + (f", seed {sample.seed}" if sample else "")
    checks.rows.append(Check(name=f"tensors compared with {view}", count=outcome.compared, note=what))
    for row in outcome.rows:
        failures = tuple(failure.replace("the source", view) for failure in row.failures)
        name = row.name.replace("the source", view)
        checks.rows.append(Check(name=name, count=row.count, failures=failures, note=row.note))


def _words(manifest: Manifest | None) -> str:
    """What the written values are compared with."""
    return "the transformed source" if manifest is not None and manifest.transforms else "the source"


def _calibration(calibration: Path, manifest: Manifest | None) -> tuple[int, list[str], str]:
    """The artifact is intact, and its summary is the one that the manifest names."""
    artifact = Artifact.read(calibration)
    artifact.check_files()
    same = manifest is not None and manifest.calibration_digest == artifact.digest()
    return (
        len(artifact.summary.files),
        [] if same else [f"{calibration}: another calibration than that of the conversion"],
        "",
    )


def _transformed(
    root: Path, manifest: Manifest | None, opened: list[Source], calibration: Path | None
) -> tuple[int, list[str], str]:
    """Open the source and apply the recipe's methods, which must come to the recorded steps."""
    if manifest is None or not manifest.transforms:
        opened.append(open_source(root, extra_roles=manifest.recipe_roles if manifest else {}))
        return 0, [], "no transforms"
    source = open_transformed(root, recorded(manifest.recipe), artifact=calibration)
    opened.append(source)
    if steps_of(source) != manifest.transforms:
        return len(manifest.transforms), ["the recipe's methods come to other steps than those of the manifest"], ""
    return len(manifest.transforms), [], ", ".join(step.step for step in manifest.transforms)


def _source_files(root: Path, manifest: Manifest, quick: bool, jobs: int) -> tuple[int, list[str], str]:
    files = [OutputFile(name=row.name, size=row.size, sha256=row.sha256) for row in manifest.source_files]
    if not any(is_file(root / file.name) for file in files):
        return 0, [], "another folder than the converted one (an ancestor?): compared by value only"
    return _equal_files(root, files, quick, jobs)


def _names(source: Source, manifest: Manifest) -> tuple[int, list[str], str]:
    """The tensors that the manifest names as sources or as dropped, against those of the source, both ways."""
    if not any(is_file(source.root / file.name) for file in manifest.source_files):
        return 0, [], "another folder than the converted one: its names may differ"
    there = {entry.name for entry in source.entries.values()}
    named = {name for record in manifest.tensors for name in record.sources}
    dropped = {row.name for row in manifest.dropped if row.parameters}
    failures = [f"{name}: not in the source" for name in sorted(named - there)]
    failures += [f"{name}: in the source, not in the manifest" for name in sorted(there - named - dropped)]
    return len(there), failures, ""


def _copies(root: Path, manifest: Manifest, quick: bool, jobs: int) -> tuple[int, list[str], str]:
    return _equal_files(root, [file for file in manifest.files if file.copied], quick, jobs)


def _equal_files(root: Path, files: list[OutputFile], quick: bool, jobs: int) -> tuple[int, list[str], str]:
    failures = [f"{file.name}: missing in the source" for file in files if not is_file(root / file.name)]
    present = [file for file in files if is_file(root / file.name)]
    if quick:
        sizes = {file.name: (root / file.name).stat().st_size for file in present}
        failures += [
            f"{f.name}: {sizes[f.name]} bytes in the source, not {f.size}" for f in present if sizes[f.name] != f.size
        ]
    else:
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            found = pool.map(lambda file: hash_file(root / file.name, file, []), present)
            failures += [f"{failure} (of the source)" for rows in found for failure in rows]
    return len(files), failures, "sizes only" if quick else ""


def _parameters(source: Source, manifest: Manifest) -> tuple[int, list[str], str]:
    actual = sum(math.prod(entry.shape) for entry in source.entries.values())
    dropped = sum(row.parameters for row in manifest.dropped)
    written = written_parameters(manifest) - filled_parameters(source, manifest)
    failures = []
    if actual != manifest.parameters:
        failures.append(f"the source has {actual:,}, the manifest says {manifest.parameters:,}")
    if written + dropped != manifest.parameters:
        failures.append(f"written {written:,} and dropped {dropped:,} do not add up to {manifest.parameters:,}")
    return actual, failures, ""
