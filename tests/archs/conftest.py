"""Each family's tiny checkpoint, made once for all tests of this folder; with draft layers where it publishes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.families import FAMILIES, make_tiny


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(family: str) -> Path:
        return make_tiny(family, tmp_path_factory.mktemp(family), mtp=bool(FAMILIES[family].draft))

    return make
