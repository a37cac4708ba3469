"""`quantkit verify`: hold a converted folder against its manifest, its index, its config, and its source.

Nothing here uses the plan: what a tensor should be follows from the manifest's slices and the role table alone. Every
check is a row with counts; every failure names file and tensor. Memory: a few slices of a tensor for each thread.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quantkit.archs import Architecture, Key, architecture_for, with_roles
from quantkit.archs.parser import NameParser
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.writer import TEMPORARY_SUFFIX
from quantkit.convert import kv_scales
from quantkit.convert.checkpoint_form import linear_modules
from quantkit.convert.checks import Check, Checks, VerifyReport
from quantkit.convert.coverage import check_coverage
from quantkit.convert.hashing import hash_file
from quantkit.convert.nonweights import is_ours
from quantkit.convert.sample import Sample
from quantkit.convert.signing import verifier
from quantkit.convert.verify_source import check_source
from quantkit.errors import QuantkitError
from quantkit.outdir import WORK_NAME
from quantkit.spec.files import exists, is_file, is_folder, read_whole
from quantkit.spec.index import INDEX_NAME, open_checkpoint, read_json
from quantkit.spec.manifest import SIGNATURE_NAME, Manifest, OutputFile, TensorRecord, manifest_path, read_manifest
from quantkit.spec.tensorfile import read_header


def verify(
    folder: Path,
    *,
    source: Path | None = None,
    quick: bool = False,
    jobs: int = 1,
    public_key: Path | None = None,
    sample: Sample | None = None,
    calibration: Path | None = None,
) -> VerifyReport:
    """Check a converted folder.

    Args:
        folder: checkpoint or rank shards; without a manifest (made by another tool) what can be checked is.
        source: what it was converted from; compared element by element.
        quick: names, sizes and headers only, no data is read.
        jobs: threads.
        sample: which tensors are compared with the source; None: all.
        calibration: artifact that it was converted with, for `source`: what methods found in text is taken from there.
        public_key: PEM file; the folder must be signed with its private half.

    Raises:
        UsageError: `public_key` is no key.
        InputError: `folder` or `source` cannot be opened at all.
    """
    signed = verifier(public_key) if public_key is not None else None
    for root in (folder, *([source] if source is not None else [])):
        if not is_folder(root):
            open_checkpoint(root)  # raises the error that says what is wrong
    checks = Checks()
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
        checks.run("manifest and config.json agree", lambda: _model(folder, manifest))
        _check_files(folder, manifest, quick, jobs, checks)
    elif is_folder(folder / WORK_NAME):
        unfinished = f"{folder} has no manifest: run the same `quantkit convert` command again, or copy the manifest"
        checks.rows.append(Check(name="conversion is finished", count=1, failures=(unfinished,)))
    if signed is not None:
        checks.run("signature is made with the key, of this manifest", lambda: signed(folder))
    elif exists(folder / SIGNATURE_NAME):
        checks.rows.append(Check(name="signature", count=0, note="not checked: give --public-key"))
    if manifest is None or manifest.form == "checkpoint":
        _check_checkpoint(folder, manifest, checks)
    else:
        checks.run("ranks and slices cover the model", lambda: check_coverage(manifest, _dims(folder)))
    if manifest is None:
        checks.rows.append(Check(name="manifest", count=0, note="none: checksums cannot be checked"))
    if source is not None:
        check_source(folder, source, manifest, quick, jobs, checks, sample, calibration)
    return _report(folder, manifest.form if manifest else "checkpoint", quick, checks)


def _report(folder: Path, form: str, quick: bool, checks: Checks) -> VerifyReport:
    return VerifyReport(
        folder=str(folder),
        form=form,
        quick=quick,
        compared=checks.compared,
        tensors=checks.tensors,
        checks=tuple(checks.rows),
    )


# -------------------------------------------------------------------------------------------------- files


def _model(folder: Path, manifest: Manifest) -> tuple[int, list[str], str]:
    """What the manifest says of the model against its config, and its roles against the table."""
    config = read_json(folder / "config.json")
    arch = architecture_for(config)
    said = {
        "architecture": arch.name,
        "model_type": config.get("model_type", ""),
        "vocab_size": arch.dims(config).vocab,
    }
    failures = [
        f"{field}: {value!r} by the config, {getattr(manifest, field)!r} by the manifest"
        for field, value in said.items()
        if value != getattr(manifest, field)
    ]
    arch = with_roles(arch, manifest.recipe_roles)
    for role in sorted({record.role for record in manifest.tensors}):
        arch.role(role)
    failures += _names(manifest, arch)
    return len(said) + len(manifest.tensors), failures, ""


def _names(manifest: Manifest, arch: Architecture) -> list[str]:
    """Layer, role and part of each record against its name, which is what engines and ranks load it by."""
    parse = NameParser(arch).parse
    failures = []
    for record in manifest.tensors:
        said = Key(record.layer, record.role, None, record.part)
        if manifest.form == "sharded":
            start, end = said.shard_name.removesuffix(record.part), f".{record.part}"
            agrees = record.name.startswith(start) and f".{record.name}".endswith(end)
        else:
            key = parse(record.name)
            if key is not None and key.role == kv_scales.ROLE:
                key = key._replace(part="scale")  # of no weight, so the parser cannot tell it from one
            agrees = key is not None and key._replace(expert=None, label="") == said
        if not agrees:
            failures.append(f"{record.file}: {record.name}: its name is not of {said.shard_name}")
    return failures


def _check_files(folder: Path, manifest: Manifest, quick: bool, jobs: int, checks: Checks) -> None:
    checks.run("files are those of the manifest", lambda: _presence(folder, manifest))
    checks.run("options are those of the manifest", lambda: _options(folder, manifest))
    present = [file for file in manifest.files if is_file(folder / file.name)]
    by_file: dict[str, list[TensorRecord]] = {}
    for record in manifest.tensors:
        by_file.setdefault(record.file, []).append(record)
    checks.run("headers are those of the manifest", lambda: _headers(folder, present, by_file))
    if not quick:
        checks.run("checksums of files and tensors", lambda: _checksums(folder, present, by_file, jobs))


def _presence(folder: Path, manifest: Manifest) -> tuple[int, list[str], str]:
    own = manifest_path(folder)
    expected = {file.name: file for file in manifest.files}
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not is_folder(path)}
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
    if not is_file(path):
        return 0, [], f"{WORK_NAME} is not there"
    # the bytes, not the parsed value: a changed byte between two values would not change the options
    same = hashlib.sha256(read_whole(path)).hexdigest() == manifest.options_digest
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


def _check_checkpoint(folder: Path, manifest: Manifest | None, checks: Checks) -> None:
    checks.run("index and files agree", lambda: _index(folder, manifest))
    opened: list[Source] = []

    def classify() -> tuple[int, list[str], str]:
        opened.append(Source(folder, extra_roles=manifest.recipe_roles if manifest else {}))
        source = opened[0]
        return len(source.entries), [f"{name}: no role" for name in source.unclassified], "; ".join(source.notes)

    checks.run("every tensor has a role and its scales", classify)
    if opened:
        checks.run("config.json describes the tensors", lambda: _config(opened[0]))


def _index(folder: Path, manifest: Manifest | None) -> tuple[int, list[str], str]:
    index = open_checkpoint(folder)
    failures = []
    if is_file(folder / INDEX_NAME):
        metadata = read_json(folder / INDEX_NAME).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
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
    listed = config.get("ignore") or []
    if not isinstance(listed, list):
        return len(quantized), [*failures, f"ignore is no list of modules: {str(listed)[:40]}"], ""
    ignore = [str(item) for item in listed]
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
