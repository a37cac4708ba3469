"""Sources that quantkit wrote have checksums: what was read is held against them before a result counts as finished.

The files are hashed while they are converted anyway, so this costs nothing. Shards of two ranks may have the same
header and size; without this a swapped or damaged one would be merged or split again without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from quantkit.errors import InputError
from quantkit.spec.manifest import manifest_path, read_manifest


class Hashed(Protocol):
    """A file that was read: name relative to the source, sha256 as hex."""

    @property
    def name(self) -> str: ...

    @property
    def sha256(self) -> str: ...


def damaged_files(root: Path, read: Iterable[Hashed]) -> list[str]:
    """Files of a source that differ from its own manifest; empty when it has none of ours."""
    path = manifest_path(root)
    if path is None:
        return []
    try:
        recorded = {file.name: file.sha256 for file in read_manifest(path).files}
    except InputError:
        return []  # somebody else's file of that name: ours was checked when the source was opened
    return [
        f"{file.name}: its bytes changed"
        for file in sorted(read, key=lambda file: file.name)
        if recorded.get(file.name, file.sha256) != file.sha256
    ]


def damaged(root: Path, files: list[str]) -> InputError:
    return InputError(
        f"{root}: files differ from its manifest, so the result would be wrong",
        "copy these files again and run the same command; nothing that was made of them is kept",
        items=files,
    )
