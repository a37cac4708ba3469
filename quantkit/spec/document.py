"""What files of settings and of results share: reading YAML, a model that refuses unknown keys, what it refuses."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.errors import InputError, UsageError
from quantkit.spec.files import MAX_SETTINGS_BYTES, read_whole

_MAX_VALUES = 1_000_000


Document = TypeVar("Document", bound=BaseModel)


class Strict(BaseModel):
    """A part of a document: an unknown key is an error, values stay as they were read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def problems_of(error: ValidationError, whole: str = "file") -> list[str]:
    """Everything that a model refuses, `KEY.KEY: why`; `whole` stands for the key where it is the document itself."""
    return [f"{'.'.join(map(str, item['loc'])) or whole}: {item['msg']}" for item in error.errors()]


def read_finished(path: Path, model: type[Document], name: str, command: str) -> Document:
    """The JSON document that a command writes last.

    Args:
        name: of what the folder then holds, "calibration".
        command: that makes it.

    Raises:
        InputError: missing, so the command has not finished, or not what it claims to be.
    """
    try:
        return model.model_validate_json(read_whole(path))
    except OSError as error:
        raise InputError(
            f"{path.parent} holds no finished {name} ({error.strerror})", f"run `{command}` to its end"
        ) from error
    except ValidationError as error:
        raise InputError(
            f"{path} is not a {name}",
            f"copy it again, or run `{command}` again into a new folder",
            items=problems_of(error),
        ) from error


def read_yaml(file: Path | Traversable, name: str, wanted: str) -> Any:
    """What a YAML file of settings holds.

    Args:
        name: of the file in errors.
        wanted: what to give instead of one that cannot be read.

    Raises:
        UsageError: unreadable, or not YAML.
    """
    try:
        raw = read_whole(file, MAX_SETTINGS_BYTES, pipes=True) if isinstance(file, Path) else file.read_bytes()
        return parse_yaml(raw.decode())
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}", f"give {wanted}") from error
    except ValueError as error:
        raise UsageError(f"{name} is not YAML: {error}", "correct it") from error


def parse_yaml(text: str) -> Any:
    """What a YAML document holds.

    Raises:
        ValueError: it is not YAML, a key stands twice in a mapping, or a few lines of it stand for more values than
            anybody wrote: by aliases of aliases, or one that holds itself.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            _each_key_once(node, set())
            found = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
        _written_out(found, {})
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    except (TypeError, AttributeError) as error:  # a tag on a value of another kind, which the package does not check
        raise ValueError(f"a value does not fit its tag ({error})") from error
    return found


def _each_key_once(node: Any, known: set[int]) -> None:
    """Refuse a mapping that names a key twice, of which the package would silently keep the last; merges may repeat."""
    if id(node) in known or not isinstance(getattr(node, "value", None), list):
        return
    known.add(id(node))
    lines: dict[tuple[str, str], int] = {}
    for part in node.value:
        key, value = part if isinstance(part, tuple) else (None, part)
        if key is not None and isinstance(key.value, str) and key.value != "<<":
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise ValueError(f"the key {key.value!r} stands twice, in lines {lines[name]} and {line}")
            lines[name] = line
        _each_key_once(value, known)


def _written_out(value: Any, known: dict[int, int]) -> int:
    """Number of values that a document stands for; `known`: of its containers, by identity; 0 while counting."""
    if not isinstance(value, dict | list | set):
        if isinstance(value, str):
            value.encode()  # half of a character, which YAML can spell, is a ValueError
        return 1
    if id(value) not in known:
        known[id(value)] = 0
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_written_out(part, known) for part in parts)
    size = known[id(value)]
    if size == 0:
        raise ValueError("an alias stands inside of what it names")
    if size > _MAX_VALUES:
        raise ValueError(f"its aliases stand for more than {_MAX_VALUES:,} values")
    return size
