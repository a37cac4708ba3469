"""A Hugging Face checkpoint folder by its headers: which tensor lies in which file.

The index and the files are compared both ways. No tensor data is read here.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.spec.files import MAX_JSON_BYTES, open_regular
from quantkit.spec.tensorfile import Header, TensorInfo, pread_exact, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class CheckpointIndex:
    """Headers of a checkpoint.

    Attributes:
        root: the folder.
        headers: file name -> header, file names sorted.
        file_of: tensor name -> file name.
    """

    root: Path
    headers: Mapping[str, Header]
    file_of: Mapping[str, str]

    def info(self, name: str) -> TensorInfo:
        return self.headers[self.file_of[name]].tensors[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.file_of)


_RANK_FILE = re.compile(r"stage\d+-.*\.safetensors")
"""Files of rank shards, as `convert --format sharded` names them."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHARD = re.compile(r"(?P<stem>.*)-\d+-of-(?P<total>\d{1,9})\.safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InputError: missing, unreadable, not a regular file, not JSON, not an object, or a key that stands twice with
            different values.
    """
    fd = open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > MAX_JSON_BYTES:
            raise InputError(f"{path} has {size} bytes, too many for its kind", "copy or download the file again")
        raw = bytearray(size)
        pread_exact(fd, memoryview(raw), 0, str(path))
    finally:
        os.close(fd)
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_agreeing)
        if _SURROGATE.search(raw):  # half of a character: JSON can spell it, no file or terminal can hold it
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}", "copy or download the file again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, not an object", "copy or download the file again")
    return value


def _agreeing(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's dict; a repeated key must repeat its value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        differing = next((key for key, value in pairs if found[key] != value), None)
        if differing is not None:
            raise ValueError(f"the key {differing!r} stands twice with different values")
    return found


def open_checkpoint(root: Path, *, ignore_index: bool = False) -> CheckpointIndex:
    """Read all headers of a checkpoint folder and hold the index against them.

    Args:
        root: folder with config.json and *.safetensors.
        ignore_index: trust the files' headers alone, as the remedy for a stale index.

    Raises:
        InputError: no such folder, no tensors, broken files (all listed), or index and files disagree (all
            differences listed).
    """
    present = _files_of(root)
    index_path = root / INDEX_NAME
    indexed = _read_index(index_path) if INDEX_NAME in present and not ignore_index else None
    if indexed is not None:
        files = sorted(set(indexed.weight_map.values()))
        missing = [name for name in files if name not in present]
        if missing:
            raise InputError(
                f"{index_path} names files that are not there",
                "copy the missing files, or pass --ignore-index if the index is stale",
                items=missing,
            )
    elif SINGLE_NAME in present and not ignore_index:
        files = [SINGLE_NAME]
    else:
        files = [name for name in present if name.endswith(".safetensors") and not name.startswith(".")]
    if not files:
        raise InputError(f"{root} holds no *.safetensors file", "give the folder that holds the weights")
    if indexed is None and any(map(_RANK_FILE.fullmatch, files)):
        raise _rank_shards(root, present)
    problems = _series_problems(files, present, indexed is not None)
    headers = _read_headers(root, files)
    file_of, repeated = _merge(headers)
    problems += repeated
    if indexed is not None:
        problems += _index_problems(indexed, headers, file_of)
    if problems:
        raise InputError(
            f"{root}: index and files disagree" if indexed is not None else f"{root}: its files do not fit together",
            "pass --ignore-index if the index is stale, else copy the checkpoint again"
            if indexed is not None
            else "copy the checkpoint again, all of its files and into a folder of its own",
            items=problems,
        )
    return CheckpointIndex(root, headers, file_of)


def holds_rank_shards(root: Path) -> bool:
    """Whether a folder holds files that `convert --format sharded` wrote, and no checkpoint."""
    names = _files_of(root)
    return any(map(_RANK_FILE.fullmatch, names)) and not {INDEX_NAME, SINGLE_NAME} & set(names)


def _rank_shards(root: Path, present: list[str]) -> InputError:
    """Where a checkpoint is wanted: parts of tensors, not whole ones."""
    from quantkit.spec.manifest import SHARDED_NAME

    what = "`quantkit verify` checks them, `quantkit merge` makes a checkpoint of them"
    hint = what if SHARDED_NAME in present else f"copy their {SHARDED_NAME} here too; then {what}"
    return InputError(f"{root} holds rank shards, not a checkpoint", hint)


@dataclass(frozen=True)
class _Index:
    """weight_map of an index, and `total_size` of its metadata (None without one)."""

    weight_map: Mapping[str, str]
    total_size: int | None


def _files_of(root: Path) -> list[str]:
    """Names in a folder, sorted; a link counts as what it points to.

    Raises:
        InputError: no such folder, or it may not be read.
    """
    advice = "give the folder that holds config.json and *.safetensors"
    try:
        return sorted(entry.name for entry in os.scandir(root))
    except NotADirectoryError as error:
        raise InputError(f"{root} is a file, not a folder", advice) from error
    except FileNotFoundError as error:
        raise InputError(f"{root} does not exist", advice) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{root}: {getattr(error, 'strerror', None) or error}", advice) from error


def _read_index(path: Path) -> _Index:
    document = read_json(path)
    advice = "pass --ignore-index to read the headers instead"
    weight_map, metadata = document.get("weight_map"), document.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{path} has no weight_map", advice)
    odd = [f"{name}: {file!r}" for name, file in weight_map.items() if not isinstance(file, str)]
    if odd:
        raise InputError(f"{path} gives tensors something else than a file name", advice, items=odd)
    outside = sorted(file for file in set(weight_map.values()) if not file or file == ".." or Path(file).name != file)
    if outside:
        raise InputError(f"{path} names files outside the folder", advice, items=outside)
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():  # some writers compute it in floating point
        total = int(total)
    return _Index(weight_map, total if type(total) is int else None)


def _read_headers(root: Path, files: list[str]) -> dict[str, Header]:
    """Headers of all files, read side by side; several broken files are one error that lists them."""
    broken: list[InputError] = []

    def read(name: str) -> Header | None:
        try:
            return read_header(root / name)
        except InputError as error:
            broken.append(error)
            return None

    with ThreadPoolExecutor(max_workers=8) as pool:
        headers = list(pool.map(read, files))
    if len(broken) == 1:
        raise broken[0]
    if broken:
        problems = sorted(error.message for error in broken)
        raise InputError(f"{root}: {len(broken)} files cannot be read", broken[0].hint, items=problems)
    return {name: header for name, header in zip(files, headers, strict=True) if header is not None}


def _series_problems(files: list[str], present: list[str], indexed: bool) -> list[str]:
    """What is wrong with series like `X-00001-of-00003.safetensors`: files that the index leaves out or, without an
    index to tell, too few of them. Numbers start at 0 or 1 and are padded as their writer liked.
    """
    series: dict[tuple[str, str], list[str]] = {}
    for name in files:
        if match := _SHARD.fullmatch(name):
            series.setdefault((match["stem"], match["total"]), []).append(name)
    if not indexed:
        return [
            f"{stem}: only {len(names)} of {int(total)} files are there"
            for (stem, total), names in series.items()
            if len(names) < int(total)
        ]
    left = sorted(set(present) - set(files))
    matches = {name: match for name in left if (match := _SHARD.fullmatch(name))}
    return [f"{name}: not in the index" for name, m in matches.items() if (m["stem"], m["total"]) in series]


def _index_problems(indexed: _Index, headers: Mapping[str, Header], file_of: Mapping[str, str]) -> list[str]:
    weight_map = indexed.weight_map
    problems = [
        f"{name}: in the index, not in {file}" for name, file in weight_map.items() if file_of.get(name) != file
    ]
    problems += [f"{name}: in {file}, not in the index" for name, file in file_of.items() if name not in weight_map]
    total = sum(info.nbytes for header in headers.values() for info in header.tensors.values())
    if indexed.total_size is not None and indexed.total_size != total:
        problems.append(f"metadata.total_size: {indexed.total_size} in the index, the files' tensors hold {total}")
    return problems


def _merge(headers: Mapping[str, Header]) -> tuple[dict[str, str], list[str]]:
    file_of: dict[str, str] = {}
    problems: list[str] = []
    for file, header in headers.items():
        for name in header.tensors:
            if name in file_of:
                problems.append(f"{name}: both in {file_of[name]} and in {file}")
            file_of[name] = file
    return file_of, problems
