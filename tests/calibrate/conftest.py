"""Small settings: the tests measure correctness, the models are tiny and the text is short."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from quantkit.recipe import Recipe, load_recipe
from tests.families import make_tiny

MODELS = Path(__file__).parents[1] / "models"


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny random checkpoint of a family."""

    @cache
    def make(family: str) -> Path:
        return make_tiny(family, tmp_path_factory.mktemp(family) / "model")

    return make


@pytest.fixture(scope="session")
def minimax() -> Path:
    return MODELS / "tiny-minimax-m2"


@pytest.fixture(scope="session")
def deepseek() -> Path:
    return MODELS / "tiny-deepseek-v3"


def small_recipe(name: str = "w8a8", **calibration: object) -> Recipe:
    """A shipped recipe with little text; keyword arguments are keys of its calibration section."""
    values = load_recipe(name).model_dump()
    small = {"samples": 18, "seq_len": 48, "min_tokens_per_expert": 1}
    return Recipe.model_validate({**values, "calibration": {**values["calibration"], **small, **calibration}})
