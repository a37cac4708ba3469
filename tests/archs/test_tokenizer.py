"""Tokenizers whose files load and that fail later, some with a panic of their library, which is no Exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.archs.modeling import load_tokenizer, text_of, token_ids
from quantkit.errors import InputError

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def tokenizer(minimax: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """A folder with the trained mixture's tokenizer, changed."""

    def make(change: Change) -> Path:
        raw = json.loads((minimax / "tokenizer.json").read_text())
        change(raw)
        (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        return tmp_path

    return make


def test_a_begin_token_that_is_not_there_fails_while_it_is_loaded(tokenizer: Callable[[Change], Path]) -> None:
    """Loading does not look it up; the first text does, and panics."""

    def change(raw: dict[str, Any]) -> None:
        raw["post_processor"]["single"][0]["SpecialToken"]["id"] = "<|nowhere|>"

    with pytest.raises(InputError, match=r"cannot read the tokenizer of .*: no entry found"):
        load_tokenizer(tokenizer(change))


def test_a_text_that_the_tokenizer_fails_on(tokenizer: Callable[[Change], Path]) -> None:
    """The letter that loading tries is in the vocabulary, others are not, nor is the token for them."""
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    empty = {"added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "model": words}
    found = load_tokenizer(tokenizer(lambda raw: raw.update(empty)))
    assert token_ids(found, "a a") == [0, 0]
    with pytest.raises(InputError, match=r"cannot encode a text: .*\[UNK\]"):
        token_ids(found, "a b")


def test_tokens_that_the_tokenizer_panics_on(tokenizer: Callable[[Change], Path]) -> None:
    """A decoder that takes more from the end than a token has."""
    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 9}
    found = load_tokenizer(tokenizer(lambda raw: raw.update(decoder=strip)))
    ids = token_ids(found, "a", special=False)
    with pytest.raises(InputError, match="cannot decode tokens: "):
        text_of(found, ids)


def test_special_tokens_are_asked_for(tokenizer: Callable[[Change], Path]) -> None:
    found = load_tokenizer(tokenizer(lambda raw: None))
    bare, whole = token_ids(found, "The sea", special=False), token_ids(found, "The sea")
    assert whole == [found.convert_tokens_to_ids("<|bos|>"), *bare]
    assert (text_of(found, whole), text_of(found, whole, special=False)) == ("<|bos|>The sea", "The sea")


def test_ctrl_c_is_no_failure_of_the_tokenizer() -> None:
    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        token_ids(interrupted, "a")
