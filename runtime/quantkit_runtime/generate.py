"""Greedy generation with transformers' own cache: the smallest loop that shows that a model speaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import InputError, UsageError, first_line
from quantkit.spec.index import read_json
from quantkit_runtime.memory import cache_bytes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Generated:
    """Result of a generation.

    Attributes:
        tokens: new token ids, the stop token included.
        stopped: whether a stop token ended it.
        cache_bytes: of keys and values at the end, as they lie in memory.
        cache_tokens: positions that the cache holds.
    """

    tokens: tuple[int, ...]
    stopped: bool
    cache_bytes: int
    cache_tokens: int


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


def stop_tokens(root: Path) -> frozenset[int]:
    """End-of-text ids of both generation_config.json and config.json; either may hold one id or several."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (root / name).is_file():
            value = read_json(root / name).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def greedy(model: Any, prompt: Tensor, max_new_tokens: int, stop: Iterable[int] = (), cache: Any = None) -> Generated:
    """Append the likeliest token until a stop token or `max_new_tokens`.

    Args:
        model: transformers' causal language model.
        prompt: token ids `[1, T]`, on the model's device.
        max_new_tokens: at least 1.
        stop: ids that end the text.
        cache: transformers' cache; None makes a `DynamicCache`.

    Raises:
        UsageError: an empty prompt.
        InputError: the logits are not finite.
    """
    from transformers import DynamicCache

    if prompt.shape[-1] == 0:
        raise UsageError("the prompt has no tokens", "give a text with --prompt")
    cache = DynamicCache(config=model.config) if cache is None else cache
    stop, entering = frozenset(stop), prompt
    tokens: list[int] = []
    with torch.no_grad():
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop):
            logits = model(input_ids=entering, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            if not bool(torch.isfinite(logits).all()):
                raise InputError(
                    f"the logits of new token {len(tokens)} are not finite", "compare with --dtype float32"
                )
            tokens.append(int(logits.argmax()))
            entering = prompt.new_tensor([[tokens[-1]]])
    return Generated(tuple(tokens), bool(tokens) and tokens[-1] in stop, cache_bytes(cache), cache.get_seq_length())
