"""A Hugging Face checkpoint folder by its headers: which tensor lies in which file.

The index and the files are compared both ways. No tensor data is read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import InputError
from quantkit.spec.tensorfile import Header, TensorInfo, read_header

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


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InputError: missing, unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", "check the path and its permissions") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}", "copy or download the file again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds {type(value).__name__}, not an object")
    return value


def open_checkpoint(root: Path, *, ignore_index: bool = False) -> CheckpointIndex:
    """Read all headers of a checkpoint folder and hold the index against them.

    Args:
        root: folder with config.json and *.safetensors.
        ignore_index: trust the files' headers alone, as the remedy for a stale index.

    Raises:
        InputError: no such folder, no tensors, or index and files disagree (all differences listed).
    """
    if not root.is_dir():
        what = "is a file, not a folder" if root.exists() else "does not exist"
        raise InputError(f"{root} {what}", "give the folder that holds config.json and *.safetensors")
    index_path = root / INDEX_NAME
    indexed: dict[str, str] | None = None
    if index_path.exists() and not ignore_index:
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise InputError(f"{index_path} has no weight_map", "pass --ignore-index to read the headers instead")
        indexed = weight_map
        outside = sorted({name for name in weight_map.values() if Path(name).name != name})
        if outside:
            raise InputError(f"{index_path} names files outside the folder", items=outside)
        files = sorted(set(weight_map.values()))
        missing = [name for name in files if not (root / name).is_file()]
        if missing:
            raise InputError(
                f"{index_path} names files that are not there",
                "copy the missing files, or pass --ignore-index if the index is stale",
                items=missing,
            )
    else:
        single = [SINGLE_NAME] if (root / SINGLE_NAME).is_file() and not ignore_index else []
        files = single or sorted(path.name for path in root.glob("*.safetensors"))
    if not files:
        raise InputError(f"{root} holds no *.safetensors file", "give the folder that holds the weights")
    with ThreadPoolExecutor(max_workers=8) as pool:
        headers = dict(zip(files, pool.map(lambda name: read_header(root / name), files), strict=True))
    file_of, problems = _merge(headers)
    if indexed is not None:
        problems += [
            f"{name}: in the index, not in {file}" for name, file in indexed.items() if file_of.get(name) != file
        ]
        problems += [f"{name}: in {file}, not in the index" for name, file in file_of.items() if name not in indexed]
    if problems:
        raise InputError(
            f"{root}: index and files disagree",
            "pass --ignore-index if the index is stale, else copy the checkpoint again",
            items=problems,
        )
    return CheckpointIndex(root, headers, file_of)


def _merge(headers: Mapping[str, Header]) -> tuple[dict[str, str], list[str]]:
    file_of: dict[str, str] = {}
    problems: list[str] = []
    for file, header in headers.items():
        for name in header.tensors:
            if name in file_of:
                problems.append(f"{name}: both in {file_of[name]} and in {file}")
            file_of[name] = file
    return file_of, problems
