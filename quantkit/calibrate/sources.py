"""Where calibration text comes from: the shipped text, local files, Hugging Face data sets.

A row of a source has `text`, or `messages` (`[{role, content}, ...]`); `kind` and `source` are optional. Rows are read
up to a bound, in the order of the source, so that a data set of any size costs a bounded time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibrate.json_rows import json_rows
from quantkit.errors import InputError, UsageError, first_line
from quantkit.recipe import Mix
from quantkit.shipped import shipped_folder
from quantkit.spec.files import exists, is_file, is_folder

BUILTIN = "builtin:"
MAX_ROWS = 20_000
"""Rows of one source that samples are drawn from: its first ones."""

_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".md": "text"}
"""File suffix -> what reads it: `json_rows`, or a builder of the `datasets` library."""


@dataclass(frozen=True)
class Row:
    """One text: `text` or `messages` is set."""

    text: str
    messages: tuple[Mapping[str, str], ...]
    kind: str
    source: str


def builtin_kinds() -> tuple[str, ...]:
    """Kinds of the shipped text."""
    folder = shipped_folder("calibration_data")
    return tuple(sorted(item.name.removesuffix(".jsonl") for item in folder.iterdir() if item.name.endswith(".jsonl")))


def default_mix() -> tuple[Mix, ...]:
    """The shipped text, all kinds alike."""
    return tuple(Mix(data=f"{BUILTIN}{kind}") for kind in builtin_kinds())


def parse_spec(spec: str) -> Mix:
    """`NAME_OR_PATH[=WEIGHT]` -> a source with its weight (1 without one).

    Raises:
        UsageError: the weight is not a positive number.
    """
    data, separator, weight = spec.rpartition("=")
    if not separator or exists(Path(spec)):
        return Mix(data=spec)
    try:
        return Mix(data=data, weight=float(weight))
    except ValueError as error:
        raise UsageError(
            f"--data {spec}: {weight!r} is not a positive weight", "write NAME_OR_PATH=WEIGHT, for example code.jsonl=2"
        ) from error


def read_rows(mix: Mix) -> list[Row]:
    """Rows of a source, at most `MAX_ROWS`.

    Raises:
        UsageError: no such shipped kind, file or data set.
        InputError: it cannot be read or has neither `text` nor `messages`.
    """
    raw = _builtin_rows(mix.data) if mix.data.startswith(BUILTIN) else _external_rows(mix.data)
    default_kind = Path(mix.data.removeprefix(BUILTIN)).stem
    rows = []
    for number, item in enumerate(raw):
        if number == MAX_ROWS:
            break
        rows.append(_row(item, mix.data, number, default_kind))
    if not rows:
        raise InputError(f"{mix.data} holds no rows", "give a source with text")
    return rows


def _row(item: Mapping[str, Any], data: str, number: int, default_kind: str) -> Row:
    text, messages = item.get("text"), item.get("messages")
    for label in ("kind", "source"):
        if isinstance(item.get(label), list | Mapping):
            raise InputError(
                f"row {number} of {data}: its `{label}` is no text", f"give {label}s as text, or leave them out"
            )
    kind, source = str(item.get("kind") or default_kind), str(item.get("source") or data)
    if isinstance(text, str):
        return Row(text, (), kind, source)
    if isinstance(messages, list) and all(isinstance(each, Mapping) and "content" in each for each in messages):
        return Row("", tuple(messages), kind, source)
    raise InputError(
        f"row {number} of {data} has neither `text` (a string) nor `messages` (a list of role and content)",
        "rename its columns",
        choices=sorted(map(str, item)),
    )


def _builtin_rows(data: str) -> Iterator[Mapping[str, Any]]:
    kind = data.removeprefix(BUILTIN)
    if kind not in builtin_kinds():
        raise UsageError(
            f"no shipped text of kind {kind!r}",
            "choose a shipped kind, or give a file or a data set",
            choices=builtin_kinds(),
        )
    text = (shipped_folder("calibration_data") / f"{kind}.jsonl").read_text(encoding="utf-8")
    return (json.loads(line) for line in text.splitlines() if line.strip())


def _external_rows(data: str) -> Iterable[Mapping[str, Any]]:
    path = Path(data)
    if is_file(path):
        return _local_rows(path)
    if exists(path) or path.suffix in _LOADERS or data.startswith((".", "/", "~")):
        what = "is a folder" if is_folder(path) else "does not exist"
        raise UsageError(f"calibration text {data} {what}", "give a JSONL, JSON, Parquet or text file")
    return _hub_rows(data)


def _local_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    builder = _LOADERS.get(path.suffix.lower())
    if builder is None:
        raise UsageError(
            f"calibration text {path} has an unknown suffix", "rename it to what it holds", choices=sorted(_LOADERS)
        )
    try:
        if builder == "json":
            yield from json_rows(path)
            return
        import datasets

        extra = {"sample_by": "paragraph"} if builder == "text" else {}
        options = {"data_files": str(path), "split": "train", "streaming": True, **extra}
        with tempfile.TemporaryDirectory(prefix="quantkit-") as cache:  # not in the user's home, which may be read-only
            yield from datasets.load_dataset(builder, cache_dir=cache, **options)
    except InputError:
        raise
    except Exception as error:  # the library raises what its readers raise: pyarrow, unicode errors
        raise InputError(f"{path} cannot be read as {builder}: {first_line(error)}", "check the file") from error


def _hub_rows(data: str) -> Iterator[Mapping[str, Any]]:
    name, _, config = data.partition(":")
    import datasets

    try:
        yield from datasets.load_dataset(name, config or None, split="train", streaming=True)
    except Exception as error:  # not found, offline, gated, no such configuration: one next step for all
        raise UsageError(
            f"calibration text {data!r} is neither shipped, nor a file, nor a data set that can be loaded: "
            f"{first_line(error)}",
            "give a shipped kind, a local file, or NAME[:CONFIGURATION] of a Hugging Face data set",
            choices=[f"{BUILTIN}{kind}" for kind in builtin_kinds()],
        ) from error
