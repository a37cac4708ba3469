"""What stands beside the weights and decides what a model is asked and when it stops: config, tokenizer, template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.compare.result import Difference
from quantkit.errors import InputError, first_line
from quantkit.spec.baseline import CHAT, Baseline, TokenizerRecord
from quantkit.spec.files import file_sha256, is_file
from quantkit.spec.index import read_json
from quantkit.templates import TemplateFailure, render

_LONGEST = 200

NOT_COMPARED = frozenset(
    {"quantization_config", "compression_config", "transformers_version", "_name_or_path", "auto_map"}
    | {"dtype", "torch_dtype", "use_cache", "output_router_logits"}
)
"""Keys of a config that a conversion changes, or that say nothing about the computation."""


def comparable_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed config.json without `NOT_COMPARED`, nested objects alike."""
    return {
        key: comparable_config(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in NOT_COMPARED
    }


def config_differences(source: Mapping[str, Any], candidate: Mapping[str, Any], path: str = "") -> Iterator[Difference]:
    """Keys whose values differ, nested keys joined by dots."""
    for key in sorted(source.keys() | candidate.keys()):
        old, new = source.get(key), candidate.get(key)
        where = f"{path}.{key}" if path else key
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from config_differences(old, new, where)
        elif old != new:
            yield Difference(what="config", name=where, source=_value(old), candidate=_value(new))


def _value(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def stop_tokens(root: Path) -> tuple[int, ...]:
    """End-of-text ids of generation_config.json and config.json; either may hold one id or several."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if is_file(root / name):
            value = read_json(root / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(type(each) is int and each >= 0 for each in ids):
                raise InputError(
                    f"{root / name}: eos_token_id is neither an id nor a list of ids",
                    "correct it, or copy the file again",
                )
            found.update(ids)
    return tuple(sorted(found))


def tokenizer_record(root: Path, tokenizer: Any) -> TokenizerRecord:
    """What prompts depend on, of a checkpoint folder and its tokenizer (None: it has none)."""
    path = root / "tokenizer.json"
    template = bool(getattr(tokenizer, "chat_template", None))
    return TokenizerRecord(
        sha256=file_sha256(path) if is_file(path) else "",
        chat_template=render_chat(tokenizer, CHAT) if template else "",
        stop_tokens=stop_tokens(root),
    )


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generation: bool = True) -> str:
    """A conversation under the tokenizer's chat template, with `generation` up to where the model begins to answer.

    Raises:
        InputError: the template fails.
    """
    try:
        return render(tokenizer.get_chat_template(), messages, tokenizer.special_tokens_map, generate=generation)
    except (TemplateFailure, ValueError) as error:  # ValueError: several templates and no default
        raise InputError(
            f"the chat template of the tokenizer fails: {first_line(error)}",
            "correct the template; `quantkit inspect` renders it too",
        ) from error


def companion_differences(
    baseline: Baseline, config: Mapping[str, Any], record: TokenizerRecord, *, transformed: bool = False
) -> Iterator[Difference]:
    """What differs between source and candidate beside the weights.

    Args:
        transformed: its weights were transformed, which may give a tied head weights of its own.
    """
    for row in config_differences(baseline.config, comparable_config(config)):
        if not (transformed and row.name.rpartition(".")[2] == "tie_word_embeddings"):
            yield row
    want = baseline.tokenizer
    if record.sha256 != want.sha256:
        yield Difference(what="tokenizer" if record.sha256 else "no_tokenizer")
    if record.chat_template != want.chat_template:
        yield Difference(
            what="template" if record.chat_template else "no_template",
            source=_value(want.chat_template),
            candidate=_value(record.chat_template),
        )
    if record.stop_tokens != want.stop_tokens:
        yield Difference(what="stop_tokens", source=_value(want.stop_tokens), candidate=_value(record.stop_tokens))
