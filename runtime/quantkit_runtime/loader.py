"""Opens what a rank loads: by headers, held against the manifest before any tensor is read.

Both output forms and plain checkpoints open the same way. With a manifest every tensor has a checksum and a scheme;
without one (a source checkpoint, or one that another tool wrote) there is nothing to check against, and the report
says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.archs import Architecture, Key, architecture_for
from quantkit.errors import InputError
from quantkit.spec.files import exists, is_folder
from quantkit.spec.index import open_checkpoint, read_json
from quantkit.spec.manifest import Manifest, RankFiles, TensorRecord, manifest_path, read_manifest
from quantkit.spec.mesh import Mesh
from quantkit.spec.scheme import SCHEMES, group_size_for
from quantkit.spec.tensorfile import TensorInfo, read_header
from quantkit_runtime.errors import BrokenShard, UnsupportedDtype
from quantkit_runtime.parallel import join
from quantkit_runtime.shards import ModelFiles, Stored

WORK_FOLDER = ".quantkit-work"
"""What `quantkit convert` leaves in its output folder; without a manifest beside it the conversion is not finished."""


def open_model(root: Path, *, verify: bool = True, on_card: bool = False, overlap: int = 0) -> ModelFiles:
    """Open a converted folder of either form, or a plain checkpoint, for this process. Reads headers only.

    Of shards it meets the other processes of their mesh first; what then fails on one rank fails on all.

    Args:
        verify: check every tensor's checksum while reading.
        on_card: tensors will lie on cards (which library carries them from rank to rank).
        overlap: see `parallel.Team`.

    Raises:
        InputError: no such folder, no config, no weights, a broken manifest or tensors without a role.
        BrokenShard: the conversion is not finished, or files are missing, have other sizes or other headers than the
            manifest says.
        UnsupportedDtype: a layout or activation scheme that this runtime has no kernel for.
        UsageError: the manifest was made for another mesh than the one that runs.
    """
    require_folder(root)
    config = read_json(root / "config.json")
    path = manifest_path(root)
    if path is None and is_folder(root / WORK_FOLDER):
        raise BrokenShard(f"{root} holds an unfinished conversion", "run the same `quantkit convert` command again")
    if path is None:
        ranks = join(Mesh(), "a checkpoint without a manifest is")
        return ModelFiles(root, "source", config, _from_headers(root, config), {}, verify=verify, ranks=ranks)
    manifest = read_manifest(path)
    what = "these shards are" if manifest.form == "sharded" else "a checkpoint (not shards) is"
    ranks = join(manifest.mesh, what, on_card=on_card, overlap=overlap)

    def open_own() -> ModelFiles:
        names = _rank_files(manifest, ranks.rank)
        _check_files(root, manifest, names)
        tensors, aliases = _from_manifest(root, manifest, architecture_for(config), names)
        made_with = manifest.environments
        return ModelFiles(root, manifest.form, config, tensors, aliases, made_with, verify=verify, ranks=ranks)

    return ranks.together(open_own, f"opening {root}")


def mesh_of(root: Path) -> Mesh:
    """The mesh that a converted folder was made for.

    Raises:
        InputError: the folder has no manifest, or a broken one.
    """
    require_folder(root)
    path = manifest_path(root)
    if path is None:
        raise InputError(f"{root} has no manifest", "give the folder that `quantkit convert` wrote")
    return read_manifest(path).mesh


def require_folder(root: Path) -> None:
    """Raise an InputError unless `root` is a folder."""
    if not is_folder(root):
        what = "is a file, not a folder" if exists(root) else "does not exist"
        raise InputError(f"{root} {what}", "give the folder that `quantkit convert` wrote")


def _rank_files(manifest: Manifest, rank: int) -> frozenset[str]:
    """Weight files of a rank; for the checkpoint form all of them."""
    mine: list[RankFiles] = [row for row in manifest.ranks if row.rank == rank]
    if manifest.form == "sharded" and not mine:
        raise InputError(f"the manifest lists no files for rank {rank}", "convert again")
    return frozenset(mine[0].files) if mine else frozenset(record.file for record in manifest.tensors)


def _check_files(root: Path, manifest: Manifest, names: frozenset[str]) -> None:
    """Hold the rank's files against the manifest: all there, of the recorded size."""
    problems = []
    for file in manifest.files:
        if file.name not in names:
            continue
        try:
            size = (root / file.name).stat().st_size
        except OSError as error:
            problems.append(f"{file.name}: {error.strerror or error}")
            continue
        if size != file.size:
            problems.append(f"{file.name}: {size} bytes, the manifest says {file.size}")
    if problems:
        raise BrokenShard(f"{root}: files are missing or damaged", "copy these files again", items=problems)


def _from_manifest(
    root: Path, manifest: Manifest, arch: Architecture, names: frozenset[str]
) -> tuple[dict[Key, Stored], dict[Key, Key]]:
    tensors: dict[Key, Stored] = {}
    key_of: dict[str, Key] = {}
    records = [record for record in manifest.tensors if record.file in names]
    for record in records:
        key = _key_of(record, arch) if manifest.form == "checkpoint" else _shard_key(record)
        key_of[record.name] = key
        if not record.alias:
            tensors[key] = _stored(record)
    _check_headers(root, [record for record in records if not record.alias])
    aliases = {key_of[record.name]: key_of[record.alias] for record in records if record.alias}
    return tensors, aliases


def _stored(record: TensorRecord) -> Stored:
    info = TensorInfo(record.name, record.dtype, record.shape, record.offset, record.offset + record.nbytes)
    scheme = SCHEMES.get(record.scheme)
    if scheme is None:
        raise UnsupportedDtype(
            f"{record.name}: scheme {record.scheme} has no kernel here", "convert again", choices=tuple(SCHEMES)
        )
    _check_layout(record)
    group = group_size_for(record.global_shape[-1], scheme.group_size) if scheme.group_size else 0
    return Stored(record.file, info, record.xxh3, group)


def _check_layout(record: TensorRecord) -> None:
    """Packed weights are refused: every kernel that the layers ask the registry for reads plain ones.

    They are not unpacked on the way either. Whoever packed them expects the kernel of that layout to run, and a run of
    another kernel would prove nothing about it.
    """
    if record.layout != "plain":
        raise UnsupportedDtype(
            f"{record.name} is packed in layout {record.layout} for {record.target or 'another device'}; "
            "no kernel of this runtime reads it",
            "convert these shards again with --layout plain (nothing is quantized anew), or give them to an engine "
            "that has such a kernel",
            choices=["layout plain"],
        )


def _key_of(record: TensorRecord, arch: Architecture) -> Key:
    key = arch.parse(record.name)
    if key is None or (key.layer, key.role) != (record.layer, record.role):
        return Key(record.layer, record.role, None, record.part, label=record.name)
    return key


def _shard_key(record: TensorRecord) -> Key:
    """Key of a tensor in a shard, whose name is `Key.shard_name`."""
    key = Key(record.layer, record.role, None, record.part)
    if record.name == key.shard_name:
        return key
    prefix = key.shard_name.removesuffix(record.part)
    rest = record.name.removeprefix(prefix).removesuffix(f".{record.part}")
    found = key._replace(expert=int(rest)) if rest.isdigit() else key._replace(label=rest)
    if found.shard_name != record.name:
        raise InputError(
            f"the manifest's tensor {record.name} is not named by its layer and role ({found.shard_name})",
            "convert again",
        )
    return found


def _check_headers(root: Path, records: list[TensorRecord]) -> None:
    """The files' own headers must say what the manifest says: a file that was swapped is found before reading."""
    problems: list[str] = []
    by_file: dict[str, dict[str, TensorRecord]] = {}
    for record in records:
        by_file.setdefault(record.file, {})[record.name] = record
    for file, wanted in by_file.items():
        try:
            found = read_header(root / file).tensors
        except InputError as error:
            raise BrokenShard(error.message, error.hint) from error
        problems += [f"{file}: {name} is not in the manifest" for name in found if name not in wanted]
        for name, record in wanted.items():
            info = found.get(name)
            if info is None:
                problems.append(f"{file}: {name} is not in the file")
            elif (info.dtype, info.shape, info.start) != (record.dtype, record.shape, record.offset):
                problems.append(
                    f"{file}: {name} is {info.dtype} {list(info.shape)} at {info.start}, the manifest says "
                    f"{record.dtype} {list(record.shape)} at {record.offset}"
                )
    if problems:
        raise BrokenShard(f"{root}: files and manifest disagree", "copy these files again", items=problems)


def _from_headers(root: Path, config: dict[str, Any]) -> dict[Key, Stored]:
    """Tensors of a checkpoint without a manifest."""
    _check_foreign_scheme(root, config)
    arch = architecture_for(config)
    try:
        index = open_checkpoint(root)
    except InputError as error:
        raise BrokenShard(error.message, error.hint, items=error.items) from error
    tensors: dict[Key, Stored] = {}
    unknown = []
    for name, file in index.file_of.items():
        key = arch.parse(name)
        if key is None:
            unknown.append(name)
        else:
            tensors[key] = Stored(file, index.info(name))
    if unknown:
        raise InputError(
            f"{len(unknown)} tensors of {root} have no role (architecture record: {arch.name})",
            "add a layer rule to the record in quantkit/archs",
            items=unknown,
        )
    return tensors


def _check_foreign_scheme(root: Path, config: dict[str, Any]) -> None:
    """A checkpoint of another tool must say W8A8 with dynamic per-token activations, if it says anything."""
    declared = config.get("quantization_config")
    if not isinstance(declared, dict):
        return
    problems = []
    if declared.get("format") != "int-quantized":
        problems.append(f"format is {declared.get('format')!r} (quant_method {declared.get('quant_method')!r})")
    groups = declared.get("config_groups") or {}
    for name, group in groups.items() if isinstance(groups, dict) else [("config_groups", groups)]:
        inputs = group.get("input_activations") if isinstance(group, dict) else None
        inputs = inputs if isinstance(inputs, dict) else {}
        if (inputs.get("strategy"), inputs.get("dynamic"), inputs.get("symmetric")) != ("token", True, True):
            problems.append(f"{name}: activations are not symmetric, dynamic and per token")
    if problems:
        raise UnsupportedDtype(
            f"{root / 'config.json'} declares a quantization that this runtime does not execute",
            "convert the source checkpoint with `quantkit convert`",
            items=problems,
        )
