"""Tokenizers and stop tokens of a folder, perplexity against its definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantkit.archs.modeling import load_tokenizer
from quantkit.errors import InputError
from quantkit_instruments.perplexity import perplexity, windows
from quantkit_instruments.tokenizer import stop_tokens
from quantkit_runtime.graft import LoadedModel
from tests.runtime import outputs
from tests.runtime.conftest import TINY


def test_stop_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert stop_tokens(tmp_path) == {7, 8, 9}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert stop_tokens(tmp_path) == {7}


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="tokenizer"):
        load_tokenizer(tmp_path)


# --------------------------------------------------------------------------------------------- perplexity


class Uneven(nn.Module):
    """Logits that depend on the last token alone: row i predicts token j with weight table[i, j]."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.table[input_ids])


@pytest.mark.parametrize("batch", [1, 2])
def test_perplexity_against_its_definition(batch: int) -> None:
    rng = np.random.default_rng(0)
    table, ids = rng.standard_normal((11, 11)), rng.integers(0, 11, (3, 7))
    got = perplexity(Uneven(torch.tensor(table, dtype=torch.float32)), torch.from_numpy(ids), batch)
    log_p = table - np.log(np.exp(table).sum(1, keepdims=True))
    losses = np.array([[-log_p[row[i], row[i + 1]] for i in range(6)] for row in ids])
    want = np.exp(losses.mean())
    assert got.value == pytest.approx(want, rel=1e-6)
    assert got.error == pytest.approx(want * losses.mean(1).std(ddof=1) / np.sqrt(3), rel=1e-5)
    assert got.tokens == 18


def test_windows_join_documents_with_a_begin_token() -> None:
    class Tokenizer:
        bos_token_id: int | None = 1
        eos_token_id = 2

        def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
            assert not add_special_tokens
            assert not verbose
            return {"input_ids": [ord(letter) for letter in text]}

    tokenizer = Tokenizer()
    assert windows(tokenizer, ["ab", "c", "de"], 3).tolist() == [[1, 97, 98], [1, 99, 1]]
    assert windows(tokenizer, ["abc"], 512).tolist() == [[1, 97, 98, 99]]
    tokenizer.bos_token_id = None
    assert windows(tokenizer, ["a"], 2).tolist() == [[2, 97]]
    with pytest.raises(InputError, match="fewer than two"):
        windows(tokenizer, [])


def test_int8_costs_little_on_held_out_text(converted: Callable[..., Path], load: Callable[..., LoadedModel]) -> None:
    """Loose bound on 6 windows; the acceptance tests measure properly."""
    source = outputs.MODELS / TINY[0]
    lines = (outputs.MODELS / "texts" / "english.jsonl").read_text(encoding="utf-8").splitlines()
    ids = windows(load_tokenizer(source), (json.loads(line)["text"] for line in lines), 128)[:6]
    before, after = perplexity(load(source).model, ids), perplexity(load(converted(TINY[0])).model, ids)
    assert before.tokens == 6 * 127
    assert 0.97 < after.value / before.value < 1.05
