"""What a calibration method is: a function from a source, its options and perhaps statistics to exact steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from quantkit.archs import Key
from quantkit.checkpoint.effects import Vectors
from quantkit.checkpoint.reader import OpenFiles, Source
from quantkit.spec.tensorfile import read_header
from quantkit.spec.transform import VECTORS_NAME, MethodOptions, Step

__all__ = ["Built", "Method", "MethodOptions", "no_vectors", "stored_vectors"]


class Built(NamedTuple):
    """What a method asks for.

    Attributes:
        steps: in order; they follow those of the methods before.
        vectors: for the sets that the steps name; computed when they are asked for.
    """

    steps: tuple[Step, ...]
    vectors: Vectors


class Method(NamedTuple):
    """A row of the registry.

    Attributes:
        options: pydantic model of the recipe's entry.
        build: (source with the steps of the methods before, options, calibration artifact or None) -> steps. A
            method that needs statistics raises a UsageError without an artifact.
    """

    options: type[MethodOptions]
    build: Callable[[Source, Any, Path | None], Built]


def stored_vectors(artifact: Path) -> Vectors:
    """Vectors that a data-driven method left in a calibration artifact, read when they are asked for.

    Raises:
        InputError: the artifact holds none.
    """
    infos, files = read_header(artifact / VECTORS_NAME).tensors, OpenFiles(artifact)

    def vector(name: str, key: Key) -> Tensor | None:
        info = infos.get(f"{name}.{key.shard_name}")
        return None if info is None else files.read(VECTORS_NAME, info)

    return vector


def no_vectors(_set: str, _key: object) -> None:
    """For steps that need none."""
