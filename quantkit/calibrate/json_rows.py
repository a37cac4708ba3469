"""Rows of JSON Lines, or of a JSON file that is one list, read by Python's own parser.

Not by the reader of the `datasets` library (pyarrow 26), which takes the process with it where a row is `null` or nests
deeply; no `except` sees that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import InputError

MAX_NESTING = 100
"""Levels of a row; a dialogue has three, with parts and tool calls about ten."""

MAX_LINE = 64 << 20
"""Bytes of a row of JSON Lines."""

MAX_LIST = 1 << 30
"""Bytes of a file that is one list, which is read as a whole."""

_NEXT = "give rows with `text`, or with `messages` of role and content"


def json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Rows in the order of the file; blank lines are none.

    Memory: a row of JSON Lines, or the whole of a list.

    Raises:
        InputError: it is no JSON, a row is no object, nests deeper than `MAX_NESTING` or is larger than `MAX_LINE`, or
            a list is larger than `MAX_LIST`.
        OSError: it cannot be read.
    """
    number, blank = 0, True  # so far
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise InputError(f"{path}, line {number}: it is longer than {MAX_LINE >> 20} MiB", _NEXT)
            if not line.strip():
                continue
            if blank and line.lstrip().startswith(b"["):
                yield from _list(path)
                return
            blank = False
            yield _row(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}")


def _list(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.stat().st_size > MAX_LIST:
        raise InputError(
            f"{path} is a list of more than {MAX_LIST >> 30} GiB, which would be read as a whole",
            "give JSON Lines: one row in each line",
        )
    for number, row in enumerate(_parsed(path.read_bytes(), str(path))):
        yield _row(row, f"{path}, row {number}")


def _parsed(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:  # of JSON, of text that is not UTF-8, of numbers with thousands of digits
        raise InputError(f"{where}: it cannot be read as JSON: {error}", "check the file") from error
    except RecursionError as error:
        raise InputError(f"{where}: it nests deeper than {MAX_NESTING} levels", _NEXT) from error


def _row(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: the row is no object", _NEXT)
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise InputError(f"{where}: it nests deeper than {MAX_NESTING} levels", _NEXT)
        parts = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [part for part in parts if isinstance(part, dict | list)]
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can escape halves of a character, which no tokenizer takes
        raise InputError(f"{where}: a text has half of a surrogate pair", "write the character as UTF-8") from error
    return value
