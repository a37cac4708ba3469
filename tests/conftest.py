"""What the tests of every folder share: the trained models, tiny random ones of each family, few threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from quantkit.recipe import Recipe, load_recipe
from tests.baseline.helpers import make_baseline
from tests.browser import Browser, running_browser
from tests.families import FAMILIES, make_tiny

MODELS = Path(__file__).parent / "models"

# Triton decides at its first import whether kernels are interpreted, its own library included; transformers imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny random checkpoint of a family, with draft layers where it publishes them; do not change it."""

    @cache
    def make(family: str) -> Path:
        return make_tiny(family, tmp_path_factory.mktemp(family) / "model", mtp=bool(FAMILIES[family].draft))

    return make


@pytest.fixture(scope="session")
def minimax() -> Path:
    return MODELS / "tiny-minimax-m2"


@pytest.fixture(scope="session")
def deepseek() -> Path:
    return MODELS / "tiny-deepseek-v3"


@pytest.fixture(scope="session")
def baseline(minimax: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Baseline of the trained mixture; do not change it."""
    return make_baseline(minimax, tmp_path_factory.mktemp("baseline") / "out")


@pytest.fixture(scope="session")
def w8a8() -> Recipe:
    return load_recipe("w8a8")


@pytest.fixture(scope="session")
def bf16() -> Recipe:
    return load_recipe("bf16")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium for the reports."""
    with running_browser() as running:
        yield running
