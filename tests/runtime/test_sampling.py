"""Sampling against transformers' own generation with the same seed, and the options' limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantkit.errors import UsageError
from quantkit_runtime.engine import Engine
from quantkit_runtime.graft import LoadedModel
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.sampling import Sampling
from quantkit_runtime.session import make_runner
from tests.reference import transformers_model
from tests.runtime import outputs
from tests.runtime.conftest import TINY

FOLDER = outputs.MODELS / TINY[0]
FLOAT = KvFormat(torch.float32, torch.float32)
CHOICES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 1.0, "repetition_penalty": 1.4},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2},
    {"repetition_penalty": 1.5},
]


@pytest.fixture(scope="module")
def loaded(load: Callable[..., LoadedModel]) -> LoadedModel:
    return load(FOLDER)


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers_model(FOLDER, torch.float32)


def sample(loaded: LoadedModel, prompts: list[list[int]], count: int, **options: Any) -> list[tuple[int, ...]]:
    drive = Engine(make_runner(loaded, FLOAT, 20), batch=len(prompts), sampling=Sampling(**options))
    return [generated.tokens for generated in drive.generate(prompts, count)]


@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_draws_are_those_of_transformers(loaded: LoadedModel, reference: Any, options: dict[str, Any]) -> None:
    ids = [1, 50, 60, 70, 60]
    given = {"top_k": 0, "top_p": 1.0, **options}
    if "temperature" not in options:
        given = {"repetition_penalty": options["repetition_penalty"]}
    torch.manual_seed(11)
    want = reference.generate(
        torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample="temperature" in options, **given
    )
    assert list(sample(loaded, [ids], 12, seed=11, **options)[0]) == want[0, len(ids) :].tolist()


def test_a_text_does_not_depend_on_its_company(loaded: LoadedModel) -> None:
    prompts = [[1, 50, 60], [1, 50, 60], [7, 8, 9, 10, 11]]
    together = sample(loaded, prompts, 8, temperature=1.0, seed=5)
    assert together[0] != together[1]
    for index, ids in enumerate(prompts):
        assert sample(loaded, [ids], 8, temperature=1.0, seed=5 + index) == [together[index]]
    assert sample(loaded, prompts, 8, temperature=1.0, seed=5) == together


def test_options_out_of_range_are_all_named() -> None:
    with pytest.raises(UsageError) as found:
        Sampling(temperature=-1, top_k=-1, top_p=0, repetition_penalty=0)
    assert len(found.value.items) == 4
