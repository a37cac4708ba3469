"""Text in and out: transformers' tokenizer of a folder, and the tokens that end a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.errors import InputError, UsageError, first_line
from quantkit.spec.index import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(root: Path) -> Any:
    """transformers' tokenizer of a folder.

    Raises:
        InputError: there is none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    if not any((root / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(
            f"{root} holds no tokenizer", "copy the tokenizer files of the source model there", choices=TOKENIZER_FILES
        )
    try:
        return AutoTokenizer.from_pretrained(root)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise InputError(
            f"transformers cannot read the tokenizer of {root}: {first_line(error)}",
            "copy the tokenizer files of the source model there again",
        ) from error


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt, also where the locale is not UTF-8: Python then hands over bytes as lone surrogates.

    Raises:
        UsageError: it is no text, or has no tokens.
    """
    try:
        text = prompt.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise UsageError("the prompt is no text in UTF-8", "give another --prompt, or set LC_ALL=C.UTF-8") from error
    ids: list[int] = tokenizer(text).input_ids
    if not ids:
        raise UsageError("the prompt has no tokens", "give a text with --prompt")
    return ids


def stop_tokens(root: Path) -> frozenset[int]:
    """End-of-text ids of both generation_config.json and config.json; either may hold one id or several."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (root / name).is_file():
            value = read_json(root / name).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
