"""Prompts as tokens, how many of them a model takes, and the tokens that end a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantkit.archs import Dims, architecture_for
from quantkit.archs.modeling import require_embedded, token_ids
from quantkit.compare import companions
from quantkit.errors import InputError, UsageError, first_line
from quantkit.spec.files import read_whole
from quantkit.spec.index import read_json


def encode(tokenizer: Any, prompt: str, vocab: int) -> list[int]:
    """Token ids of a prompt, also where the locale is not UTF-8: Python then hands over bytes as lone surrogates.

    Args:
        vocab: `vocab_size` of the model that they are for.

    Raises:
        UsageError: it is no text, is empty, or has no tokens.
        InputError: the tokenizer fails on it, or the model does not have one of these tokens.
    """
    try:
        text = prompt.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise UsageError("the prompt is no text in UTF-8", "give another --prompt, or set LC_ALL=C.UTF-8") from error
    if not text:  # many tokenizers make a begin-of-text token of nothing
        raise UsageError("the prompt is empty", "give a text with --prompt")
    ids = token_ids(tokenizer, text)
    if not ids:
        raise UsageError("the prompt has no tokens", "give a text with --prompt")
    require_embedded(ids, vocab)
    return ids


def _dims(root: Path) -> Dims:
    config = read_json(root / "config.json")
    return architecture_for(config).dims(config)


def vocab_size(root: Path) -> int:
    """Token ids that the model of a folder has embeddings for."""
    return _dims(root).vocab


def max_positions(root: Path) -> int:
    """Positions that the model of a folder was made for; a huge number where its config does not say."""
    return _dims(root).max_positions or 1 << 60


def require_positions(
    root: Path, prompt: int, new: int, remedy: str = "give a shorter prompt or fewer new tokens (--max-new-tokens)"
) -> int:
    """Positions of a prompt and its new tokens, the last of which is not fed back.

    Args:
        remedy: in the options of the command.

    Raises:
        UsageError: more than the model has.
    """
    positions, limit = prompt + new - 1, max_positions(root)
    if positions > limit:
        raise UsageError(
            f"a prompt of {prompt:,} tokens and {new:,} new ones need {positions:,} positions; the model has {limit:,}",
            remedy,
        )
    return positions


def stop_tokens(root: Path) -> frozenset[int]:
    """End-of-text ids of both generation_config.json and config.json; either may hold one id or several."""
    return frozenset(companions.stop_tokens(root))


def read_prompts(path: Path) -> list[str]:
    """Lines of a text file, empty ones left out.

    Raises:
        InputError: unreadable, not UTF-8, or without any line.
    """
    try:
        lines = [line for line in read_whole(path, pipes=True).decode().splitlines() if line.strip()]
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path}: {first_line(error)}", "give a UTF-8 text file with one prompt a line") from error
    if not lines:
        raise InputError(f"{path} holds no prompt", "give one prompt a line")
    return lines
