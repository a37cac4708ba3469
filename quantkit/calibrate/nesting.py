"""Whether JSON text nests within reason: the reader of the `datasets` library calls itself for every level, and takes
the process with it where its stack ends, which no `except` sees."""

from __future__ import annotations

import re
from pathlib import Path

from quantkit.errors import InputError

MAX_NESTING = 100
"""Levels; a dialogue has three, with parts and tool calls about ten."""

_CHUNK = 1 << 20
_READ_AHEAD = 32 << 20
"""Bytes beyond the rows that are wanted: the library parses 10 MiB at once."""

_TOKEN = re.compile(rb'\\.|["\[\]{}\n]', re.DOTALL)
_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}


def require_shallow(path: Path, rows: int) -> None:
    """Refuse a JSON or JSONL file that nests deeper than `MAX_NESTING`.

    Memory: a few megabytes.

    Args:
        rows: that are read from it; what lies far beyond them is not looked at.

    Raises:
        InputError: it does, or opens more than it closes.
        OSError: it cannot be read.
    """
    depth, lines, beyond, in_text, rest = 0, 0, 0, False, b""
    with path.open("rb") as file:
        while (chunk := file.read(_CHUNK)) and beyond <= _READ_AHEAD:
            piece = rest + chunk
            whole = piece.rstrip(b"\\")  # what they escape may stand in the next chunk
            piece, rest = whole, piece[len(whole) :]
            for token in _TOKEN.findall(piece):
                if token == b"\n":  # stands in no text: one that is not closed ends here
                    lines, in_text = lines + 1, False
                elif token == b'"':
                    in_text = not in_text
                elif not in_text:
                    depth = max(0, depth + _STEPS.get(token, 0))
                    if depth > MAX_NESTING:
                        raise InputError(
                            f"{path}, line {lines + 1}: it nests deeper than {MAX_NESTING} levels, or is not closed",
                            "give rows with `text`, or with `messages` of role and content",
                        )
            beyond += len(chunk) if lines > rows else 0
