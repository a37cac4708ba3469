"""What a calibration method is: a function from a source, its options and perhaps statistics to exact steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quantkit.checkpoint.effects import Vectors
from quantkit.checkpoint.reader import Source
from quantkit.spec.transform import MethodOptions, Step

__all__ = ["Built", "Method", "MethodOptions", "no_vectors"]


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


def no_vectors(_set: str, _key: object) -> None:
    """For steps that need none."""
