"""The one family of expected failures.

Every failure that a user can cause or meet says what is wrong, where, and what to do next. The command line
prints it without a traceback and exits with the class's code; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_MAX_LISTED = 20

_MAX_TEXT = 4096
"""Characters of a message, hint or item that are kept: foreign text in them may be a whole file or answer."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys instead of showing it (C0, DEL, C1), line separators, what turns the direction of text, and
halves of characters, which no stream takes; all but tab and newline."""


def printable(text: str) -> str:
    """`text` as a person may see it: what a terminal would obey as an escape, `\\x1b`; tabs and newlines stay.

    Names, patterns and values of files come from anywhere; printed raw they could clear a screen or forge a line.
    """
    return _CONTROL.sub(lambda found: _escaped(found[0]), text)


def one_line(text: str) -> str:
    """`printable`, and newlines as escapes too: for one of several things that are listed a line each."""
    return printable(text).replace("\n", "\\n")


def clipped(text: str, most: int = _MAX_TEXT) -> str:
    """The first `most` characters of `text`, and how many were left off."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most:,} more characters)"


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class QuantkitError(Exception):
    """An expected failure.

    Args:
        message: what is wrong and where (file, tensor, key); of a very long one the beginning is kept.
        hint: the next step, in the imperative.
        items: offenders to list under the message, one per line (the first 20 are printed, all are kept).
        choices: legal values, when there are any.
    """

    exit_code = 3

    def __init__(self, message: str, hint: str = "", *, items: Sequence[str] = (), choices: Sequence[str] = ()) -> None:
        message = clipped(message)
        super().__init__(message)
        self.message = message
        self.hint = clipped(hint)
        self.items = tuple(items)
        self.choices = tuple(choices)

    def __str__(self) -> str:
        lines = [self.message.replace("\n", "\n  ")]  # so that no name can forge a line of ours
        lines += [f"  - {one_line(clipped(item))}" for item in self.items[:_MAX_LISTED]]
        if len(self.items) > _MAX_LISTED:
            lines.append(f"  ... and {len(self.items) - _MAX_LISTED} more")
        if self.choices:
            lines.append(f"choices: {clipped(', '.join(self.choices))}")
        if self.hint:
            lines.append(f"next: {self.hint}")
        return "\n".join(lines)


class UsageError(QuantkitError):
    """The command was asked for something that it cannot do: a bad option, recipe key or output folder."""

    exit_code = 2


class InputError(QuantkitError):
    """What was read is not what it claims to be: a broken file, index, config or tensor."""

    exit_code = 3


class NonFiniteError(InputError):
    """A model computed infinity or not-a-number where a number is needed."""


class VerificationError(QuantkitError):
    """A check of finished work failed: a checksum, a count, a value out of tolerance."""

    exit_code = 4


def first_line(error: BaseException) -> str:
    """What a foreign exception says, on one line; its class when it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):  # a heading: the reason stands below it
        return clipped(f"{lines[0]} {lines[1]}")
    return clipped(lines[0]) if lines else type(error).__name__
