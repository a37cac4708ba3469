"""A chat template, found and tried on a conversation.

Where it stands in newer checkpoints: `chat_template.jinja`; in older ones: `chat_template.json` or a key of
tokenizer_config.json, which may hold several by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.crosscheck import Problem
from quantkit.errors import InputError, first_line
from quantkit.spec.files import MAX_SETTINGS_BYTES, is_file, read_whole
from quantkit.spec.index import read_json
from quantkit.templates import TemplateFailure, render

QUESTION, ANSWER = "What is the sea?", "Salt water."

_ONE_TURN = [{"role": "user", "content": QUESTION}]
_TWO_TURNS = [*_ONE_TURN, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And the sky?"}]


def check_chat_template(root: Path, tokenizer_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Whether there is a template, and whether it turns a conversation into a prompt that holds it.

    Args:
        tokenizer_config: parsed tokenizer_config.json, for templates and special tokens.
    """
    templates, broken = find_templates(root, tokenizer_config)
    if broken:
        yield _error(broken, "copy the file again")
        return
    if not templates:
        yield Problem(
            level="note",
            what="there is no chat template",
            remedy="a base model needs none; for a chat model copy chat_template.jinja, or chats will be refused",
        )
    tokens = {name: _token(tokenizer_config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    for name, template in templates.items():
        label = "the chat template" if name == "default" else f"the chat template {name!r}"
        yield from _check(label, template, {key: value for key, value in tokens.items() if value is not None})


def find_templates(root: Path, tokenizer_config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Templates by name, and what is wrong with the file that should hold them ("" if nothing)."""
    try:
        if is_file(root / "chat_template.jinja"):
            return {"default": read_whole(root / "chat_template.jinja", MAX_SETTINGS_BYTES).decode()}, ""
        if is_file(root / "chat_template.json"):
            found = read_json(root / "chat_template.json").get("chat_template")
        else:
            found = tokenizer_config.get("chat_template")
    except (InputError, OSError, ValueError) as error:
        return {}, f"the chat template cannot be read: {first_line(error)}"
    if isinstance(found, str):
        return {"default": found}, ""
    if isinstance(found, list):
        rows = [row for row in found if isinstance(row, Mapping)]
        return {str(row.get("name")): str(row.get("template")) for row in rows}, ""
    return {}, "" if found is None else "the chat template is neither a text nor a list of named texts"


def _check(label: str, template: str, tokens: Mapping[str, str]) -> Iterator[Problem]:
    shown, error = _try(template, _ONE_TURN, tokens, generate=True)
    if shown is None:
        yield _error(f"{label} cannot be rendered: {error}", "copy it again from the model's source, or correct it")
        return
    if QUESTION not in shown:
        yield _error(f"{label} loses what the user says", "correct it: message['content'] must appear in the prompt")
    bare, _ = _try(template, _ONE_TURN, tokens, generate=False)
    if bare == shown:
        yield Problem(
            level="note",
            what=f"{label} pays no heed to add_generation_prompt",
            remedy="the model may go on with the user's turn instead of answering: compare with the model's source",
        )
    longer, error = _try(template, _TWO_TURNS, tokens, generate=True)
    if longer is None:
        yield _error(f"{label} fails at a second turn: {error}", "copy it again from the model's source, or correct it")
    elif "And the sky?" not in longer:
        yield _error(f"{label} loses the second turn", "correct it: every message must appear in the prompt")


def _try(
    template: str, messages: list[dict[str, Any]], tokens: Mapping[str, str], *, generate: bool
) -> tuple[str | None, str]:
    """The prompt, or None and the error; templates of multi-modal models want content as a list of parts."""
    parts = [{**row, "content": [{"type": "text", "text": row["content"]}]} for row in messages]
    first = ""
    result = None
    for form in (messages, parts):
        try:
            result = render(template, form, tokens, generate=generate)
        except TemplateFailure as error:
            first = first or str(error)
            continue
        if str(messages[-1]["content"]) in result:
            return result, ""
    return result, first


def _token(value: Any) -> str | None:
    """Text of a special token: a string, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _error(what: str, remedy: str) -> Problem:
    return Problem(level="error", what=what, remedy=remedy)
