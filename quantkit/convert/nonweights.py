"""Files beside the weights: copied byte for byte, or left out by a named rule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from quantkit.checkpoint.writer import TEMPORARY_SUFFIX, temporary_name
from quantkit.errors import InputError
from quantkit.outdir import WORK_NAME
from quantkit.spec.files import is_file, leads_out
from quantkit.spec.manifest import (
    BESIDE,
    CHECKPOINT_NAME,
    COMPARISON_NAME,
    SHARDED_NAME,
    SIGNATURE_NAME,
    Dropped,
    read_manifest,
)

_WEIGHT_SUFFIXES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
    ".tflite",
)
"""Weights in any format: those of the checkpoint are converted, the others would be a second, unquantized model."""


def split_files(root: Path, converted: frozenset[str]) -> tuple[tuple[str, ...], tuple[Dropped, ...]]:
    """Names (relative, with `/`) to copy, and those left out with the rule.

    Args:
        converted: names that the conversion reads or generates itself.

    Raises:
        InputError: links that lead out of the folder: what they lead to was not published with the model, and its
            content would be passed on with the output.
    """
    copies: list[str] = []
    dropped: list[Dropped] = []
    for name in sorted(_walk(root)):
        rule = _rule(root, name)
        if name in converted:
            continue
        if rule:
            dropped.append(Dropped(name=name, rule=rule))
        else:
            copies.append(name)
    if outside := [f"{name} -> {(root / name).resolve()}" for name in copies if leads_out(root, root / name)]:
        raise InputError(
            f"{root} has links that lead out of it, and what they lead to would be copied",
            "put the files themselves there if they belong to the model, else remove the links",
            items=outside,
        )
    return tuple(copies), tuple(dropped)


def _walk(root: Path) -> Iterator[str]:
    """All files below `root`, links to files among them (cached downloads are links); links to folders are named."""
    for folder, subfolders, files in os.walk(root):
        here = Path(folder).relative_to(root)
        for name in list(subfolders):
            if (Path(folder) / name).is_symlink() or name.startswith("."):
                subfolders.remove(name)
                yield f"{(here / name).as_posix()}/"
        for name in files:
            yield (here / name).as_posix()


def _rule(root: Path, name: str) -> str:
    """Why a file is left out, "" when it is copied."""
    if name.endswith("/"):
        return "hidden folder" if Path(name).name.startswith(".") else "link to a folder"
    if name.endswith(_WEIGHT_SUFFIXES):
        return "weights that the index does not name" if name.endswith(".safetensors") else "weights in another format"
    if name in (CHECKPOINT_NAME, SHARDED_NAME) and _is_manifest(root / name):
        return "manifest of the conversion that made the source"
    if name == SIGNATURE_NAME:
        return "signature of the source, not of what is made of it"
    if name == COMPARISON_NAME:
        return "comparison of the source, not of what is made of it"
    if name.endswith(TEMPORARY_SUFFIX):
        return "left behind by a run that was killed"
    if not is_file(root / name):
        return "not a readable file"
    return ""


def _is_manifest(path: Path) -> bool:
    from quantkit.errors import QuantkitError

    try:
        read_manifest(path)
    except QuantkitError:
        return False
    return True


BESIDE_THE_RESULT = (*BESIDE, *map(temporary_name, BESIDE))
"""What says something about a finished folder, also where the run that wrote it was killed: the result is whole."""


def is_ours(name: str) -> bool:
    """Whether a name in an output folder belongs to the machinery and not to the result."""
    return name.split("/", 1)[0] == WORK_NAME or name in BESIDE_THE_RESULT
