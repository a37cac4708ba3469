"""What all files of settings and of results share: a model that refuses unknown keys, and what it refuses as lines."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError


class Strict(BaseModel):
    """A part of a document: an unknown key is an error, values stay as they were read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def problems(error: ValidationError, whole: str = "file") -> list[str]:
    """Everything that a model refuses, `KEY.KEY: why`; `whole` stands for the key where it is the document itself."""
    return [f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg']}" for item in error.errors()]
