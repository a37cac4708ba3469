"""What files of settings and of results share: reading YAML, a model that refuses unknown keys, what it refuses."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.errors import UsageError


class Strict(BaseModel):
    """A part of a document: an unknown key is an error, values stay as they were read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def problems_of(error: ValidationError, whole: str = "file") -> list[str]:
    """Everything that a model refuses, `KEY.KEY: why`; `whole` stands for the key where it is the document itself."""
    return [f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg']}" for item in error.errors()]


def read_yaml(file: Path | Traversable, name: str, wanted: str) -> Any:
    """What a YAML file of settings holds.

    Args:
        name: of the file in errors.
        wanted: what to give instead of one that cannot be read.

    Raises:
        UsageError: unreadable, or not YAML.
    """
    import yaml

    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}", f"give {wanted}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, an impossible date or number
        raise UsageError(f"{name} is not YAML: {error}", "correct it") from error
