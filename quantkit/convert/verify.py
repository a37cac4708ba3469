"""`quantkit verify`: hold a converted folder against its manifest, its index, its config, and its source.

Nothing here uses the plan: what a tensor should be follows from the manifest's slices and the role table alone. Every
check is a row with counts; every failure names file and tensor. Memory: a few slices of a tensor for each thread.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from quantkit.archs import architecture_for
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.writer import TEMPORARY_SUFFIX
from quantkit.convert.checkpoint_form import linear_modules
from quantkit.convert.compare import compare, filled_parameters
from quantkit.convert.coverage import check_coverage, written_parameters
from quantkit.convert.hashing import hash_file
from quantkit.convert.nonweights import is_ours
from quantkit.convert.shard_source import open_source
from quantkit.convert.signing import verifier
from quantkit.convert.transforms import open_transformed, steps_of
from quantkit.errors import QuantkitError
from quantkit.outdir import WORK_NAME
from quantkit.recipe import Recipe
from quantkit.spec.index import INDEX_NAME, open_checkpoint, read_json
from quantkit.spec.manifest import SIGNATURE_NAME, Manifest, OutputFile, TensorRecord, manifest_path, read_manifest
from quantkit.spec.tensorfile import read_header

SOURCE_CHECK = "source is the one that was converted"


class Check(BaseModel):
    """One kind of check.

    Attributes:
        name: what was checked.
        count: how many things were looked at.
        failures: one sentence for each that is wrong; empty when the check passed.
        note: what a reader should know about it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    count: int
    failures: tuple[str, ...] = ()
    note: str = ""


class VerifyReport(BaseModel):
    """Outcome of a verification.

    Attributes:
        folder: as given.
        form: "checkpoint" or "sharded".
        quick: sizes and headers only.
        checks: in the order in which they ran.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    form: str
    quick: bool
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(f"{check.name}: {failure}" for check in self.checks for failure in check.failures)


class _Checks:
    """Collects rows; an expected error inside a check is its failure."""

    def __init__(self) -> None:
        self.rows: list[Check] = []

    def run(self, name: str, check: Callable[[], tuple[int, list[str], str]]) -> bool:
        try:
            count, failures, note = check()
        except QuantkitError as error:
            count, failures, note = 0, [error.message, *error.items], ""
        self.rows.append(Check(name=name, count=count, failures=tuple(failures), note=note))
        return not failures


def verify(
    folder: Path,
    *,
    source: Path | None = None,
    quick: bool = False,
    jobs: int = 1,
    public_key: Path | None = None,
) -> VerifyReport:
    """Check a converted folder.

    Args:
        folder: checkpoint or rank shards; without a manifest (made by another tool) what can be checked is.
        source: what it was converted from; compared element by element.
        quick: names, sizes and headers only, no data is read.
        jobs: threads.
        public_key: PEM file; the folder must be signed with its private half.

    Raises:
        UsageError: `public_key` is no key.
        InputError: `folder` or `source` cannot be opened at all.
    """
    signed = verifier(public_key) if public_key is not None else None
    for root in (folder, *([source] if source is not None else [])):
        if not root.is_dir():
            open_checkpoint(root)  # raises the error that says what is wrong
    checks = _Checks()
    path = manifest_path(folder)
    manifest: Manifest | None = None
    if path is not None:
        found: list[Manifest] = []

        def parse() -> tuple[int, list[str], str]:
            found.append(read_manifest(path))
            return 1, [], ""

        if not checks.run("manifest is sound", parse):
            return _report(folder, "unknown", quick, checks)
        manifest = found[0]
        _check_files(folder, manifest, quick, jobs, checks)
    elif (folder / WORK_NAME).is_dir():
        unfinished = f"{folder} has no manifest: run the same `quantkit convert` command again, or copy the manifest"
        checks.rows.append(Check(name="conversion is finished", count=1, failures=(unfinished,)))
    if signed is not None:
        checks.run("signature is made with the key, of this manifest", lambda: signed(folder))
    elif (folder / SIGNATURE_NAME).exists():
        checks.rows.append(Check(name="signature", count=0, note="not checked: give --public-key"))
    if manifest is None or manifest.form == "checkpoint":
        _check_checkpoint(folder, manifest, checks)
    else:
        checks.run("ranks and slices cover the model", lambda: check_coverage(manifest, _dims(folder)))
    if manifest is None:
        checks.rows.append(Check(name="manifest", count=0, note="none: checksums cannot be checked"))
    if source is not None:
        _check_source(folder, source, manifest, quick, jobs, checks)
    return _report(folder, manifest.form if manifest else "checkpoint", quick, checks)


def _report(folder: Path, form: str, quick: bool, checks: _Checks) -> VerifyReport:
    return VerifyReport(folder=str(folder), form=form, quick=quick, checks=tuple(checks.rows))


# -------------------------------------------------------------------------------------------------- files


def _check_files(folder: Path, manifest: Manifest, quick: bool, jobs: int, checks: _Checks) -> None:
    checks.run("files are those of the manifest", lambda: _presence(folder, manifest))
    checks.run("options are those of the manifest", lambda: _options(folder, manifest))
    present = [file for file in manifest.files if (folder / file.name).is_file()]
    by_file: dict[str, list[TensorRecord]] = {}
    for record in manifest.tensors:
        by_file.setdefault(record.file, []).append(record)
    checks.run("headers are those of the manifest", lambda: _headers(folder, present, by_file))
    if not quick:
        checks.run("checksums of files and tensors", lambda: _checksums(folder, present, by_file, jobs))


def _presence(folder: Path, manifest: Manifest) -> tuple[int, list[str], str]:
    own = manifest_path(folder)
    expected = {file.name: file for file in manifest.files}
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    found = {name for name in found if not is_ours(name) and folder / name != own}
    failures = [f"{name}: missing" for name in sorted(expected.keys() - found)]
    for name in sorted(found - expected.keys()):
        left = name.endswith(TEMPORARY_SUFFIX)
        failures.append(f"{name}: {'left behind by a run that was killed' if left else 'not in the manifest'}")
    for name in sorted(expected.keys() & found):
        size = (folder / name).stat().st_size
        if size != expected[name].size:
            failures.append(f"{name}: {size} bytes, the manifest says {expected[name].size}")
    return len(expected), failures, ""


def _options(folder: Path, manifest: Manifest) -> tuple[int, list[str], str]:
    path = folder / WORK_NAME / "options.json"
    if not path.is_file():
        return 0, [], f"{WORK_NAME} is not there"
    # the bytes, not the parsed value: a changed byte between two values would not change the options
    same = hashlib.sha256(path.read_bytes()).hexdigest() == manifest.options_digest
    return 1, [] if same else [f"{path.relative_to(folder)}: not the options of this conversion"], ""


def _headers(
    folder: Path, present: list[OutputFile], by_file: dict[str, list[TensorRecord]]
) -> tuple[int, list[str], str]:
    failures = []
    names = {file.name for file in present}
    for name, records in by_file.items():
        if name not in names:
            continue
        try:
            header = read_header(folder / name)
        except QuantkitError as error:
            failures.append(error.message)
            continue
        stored = {record.name: record for record in records if not record.alias}
        failures += [
            f"{name}: {tensor}: in the file, not in the manifest" for tensor in header.tensors if tensor not in stored
        ]
        for record in stored.values():
            info = header.tensors.get(record.name)
            if info is None:
                failures.append(f"{name}: {record.name}: in the manifest, not in the file")
            elif (info.dtype, info.shape, info.start, info.nbytes) != (
                record.dtype,
                record.shape,
                record.offset,
                record.nbytes,
            ):
                failures.append(f"{name}: {record.name}: the file says {info.dtype} {list(info.shape)} at {info.start}")
    weights = {file.name for file in present if file.name.endswith(".safetensors") and not file.copied}
    failures += [f"{name}: no tensor of it is in the manifest" for name in sorted(weights - by_file.keys())]
    return sum(map(len, by_file.values())), failures, ""


def _checksums(
    folder: Path, present: list[OutputFile], by_file: dict[str, list[TensorRecord]], jobs: int
) -> tuple[int, list[str], str]:
    def one(file: OutputFile) -> list[str]:
        records = [record for record in by_file.get(file.name, []) if not record.alias]
        return hash_file(folder / file.name, file, records)

    with ThreadPoolExecutor(max(1, jobs)) as pool:
        failures = [failure for found in pool.map(one, present) for failure in found]
    return len(present) + sum(map(len, by_file.values())), failures, ""


# ------------------------------------------------------------------------------------------------- config


def _check_checkpoint(folder: Path, manifest: Manifest | None, checks: _Checks) -> None:
    checks.run("index and files agree", lambda: _index(folder, manifest))
    opened: list[Source] = []

    def classify() -> tuple[int, list[str], str]:
        opened.append(Source(folder, extra_roles=_roles(manifest)))
        source = opened[0]
        return len(source.entries), [f"{name}: no role" for name in source.unclassified], "; ".join(source.notes)

    checks.run("every tensor has a role and its scales", classify)
    if opened:
        checks.run("config.json describes the tensors", lambda: _config(opened[0]))


def _roles(manifest: Manifest | None) -> dict[str, str]:
    recorded = manifest.recipe.get("roles") if manifest else None
    return dict(recorded) if isinstance(recorded, dict) else {}


def _index(folder: Path, manifest: Manifest | None) -> tuple[int, list[str], str]:
    index = open_checkpoint(folder)
    failures = []
    if (folder / INDEX_NAME).is_file():
        total = read_json(folder / INDEX_NAME).get("metadata", {}).get("total_size")
        actual = sum(info.nbytes for header in index.headers.values() for info in header.tensors.values())
        if total is not None and total != actual:
            failures.append(f"{INDEX_NAME}: total_size is {total}, the tensors take {actual}")
    if manifest is not None:
        names = {record.name for record in manifest.tensors}
        failures += [f"{name}: in the manifest, not in the index" for name in sorted(names - set(index.names))]
        failures += [f"{name}: in the index, not in the manifest" for name in sorted(set(index.names) - names)]
    return len(index.names), failures, ""


def _config(source: Source) -> tuple[int, list[str], str]:
    """`quantization_config` against the tensors: INT8 needs it, and `ignore` names exactly the linears left."""
    quantized = {entry.module for entry in source.entries.values() if entry.format.name == "int8-channel"}
    config = source.config.get("quantization_config")
    if not quantized:
        return 0, ["config.json declares quantization, but no tensor is INT8"] if config else [], "nothing is quantized"
    if not isinstance(config, dict):
        return len(quantized), ["config.json has no quantization_config, but tensors are INT8"], ""
    failures = []
    if config.get("format") != "int-quantized" or config.get("quant_method") != "compressed-tensors":
        failures.append(f"quantization_config is {config.get('quant_method')} {config.get('format')}")
    ignore = [str(item) for item in config.get("ignore") or []]
    if any(item.startswith("re:") for item in ignore):
        return len(quantized), failures, "ignore has patterns; its entries were not matched one by one"
    kept = set(linear_modules(source, lambda key: source.entries[key].format.name == "int8-channel", source.entries))
    failures += [f"ignore names {name}, which is quantized" for name in sorted(quantized & set(ignore))]
    failures += [f"ignore lacks {name}, which is not quantized" for name in sorted(kept - set(ignore))]
    failures += [f"ignore names {name}, which is no linear module" for name in sorted(set(ignore) - kept - quantized)]
    failures += [f"ignore names {name} twice" for name in sorted({name for name in ignore if ignore.count(name) > 1})]
    return len(quantized) + len(ignore), failures, ""


def _dims(folder: Path) -> tuple[int, int]:
    """(decoder layers, experts) of a folder of shards."""
    config = read_json(folder / "config.json")
    dims = architecture_for(config).dims(config)
    return dims.layers, dims.experts


# ------------------------------------------------------------------------------------------------- source


def _check_source(folder: Path, root: Path, manifest: Manifest | None, quick: bool, jobs: int, checks: _Checks) -> None:
    opened: list[Source] = []
    if not checks.run("source is transformed as the manifest says", lambda: _transformed(root, manifest, opened)):
        return
    original = opened[0]
    if manifest is not None:
        checks.run(SOURCE_CHECK, lambda: _source_files(root, manifest, quick, jobs))
        checks.run("parameter count equals the source's", lambda: _parameters(original, manifest))
        checks.run("copied files equal the source's", lambda: _copies(root, manifest, quick, jobs))
    if quick:
        return
    outcome = compare(folder, original, manifest, jobs)
    for row in outcome:
        checks.rows.append(Check(name=row.name, count=row.count, failures=tuple(row.failures), note=row.note))


def _transformed(root: Path, manifest: Manifest | None, opened: list[Source]) -> tuple[int, list[str], str]:
    """Open the source and apply the recipe's methods, which must come to the recorded steps."""
    if manifest is None or not manifest.transforms:
        opened.append(open_source(root, extra_roles=_roles(manifest)))
        return 0, [], "no transforms"
    source = open_transformed(root, Recipe.model_validate(manifest.recipe))
    opened.append(source)
    if steps_of(source) != manifest.transforms:
        return len(manifest.transforms), ["the recipe's methods come to other steps than those of the manifest"], ""
    return len(manifest.transforms), [], ", ".join(step.step for step in manifest.transforms)


def _source_files(root: Path, manifest: Manifest, quick: bool, jobs: int) -> tuple[int, list[str], str]:
    files = [OutputFile(name=row.name, size=row.size, sha256=row.sha256) for row in manifest.source_files]
    if not any((root / file.name).is_file() for file in files):
        return 0, [], "another folder than the converted one (an ancestor?): compared by value only"
    return _equal_files(root, files, quick, jobs)


def _copies(root: Path, manifest: Manifest, quick: bool, jobs: int) -> tuple[int, list[str], str]:
    return _equal_files(root, [file for file in manifest.files if file.copied], quick, jobs)


def _equal_files(root: Path, files: list[OutputFile], quick: bool, jobs: int) -> tuple[int, list[str], str]:
    failures = [f"{file.name}: missing in the source" for file in files if not (root / file.name).is_file()]
    present = [file for file in files if (root / file.name).is_file()]
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
