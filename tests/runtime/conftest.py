"""Converted tiny models, written once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit_runtime import device as devices
from quantkit_runtime.engine import Engine
from quantkit_runtime.graft import LoadedModel, load_model
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.session import make_runner
from tests.runtime import outputs

TINY = ("tiny-minimax-m2", "tiny-deepseek-v3")
FORMS: dict[str, Callable[..., Path]] = {"checkpoint": outputs.write_checkpoint, "sharded": outputs.write_sharded}
SCHEMES = {"w8a8": outputs.w8a8, "group": outputs.grouped, "keep": outputs.kept}


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(model, form, scheme) -> folder; do not change it."""

    @cache
    def make(model: str, form: str = "checkpoint", scheme: str = "w8a8") -> Path:
        return FORMS[form](outputs.MODELS / model, tmp_path_factory.mktemp(f"{model}-{form}"), SCHEMES[scheme])

    return make


def generate(loaded: LoadedModel, ids: torch.Tensor, count: int) -> list[int]:
    """The likeliest tokens after ids `[1, T]`, by the engine."""
    fmt = KvFormat(loaded.dtype, loaded.dtype)
    runner = make_runner(loaded, fmt, 1 + fmt.blocks(ids.shape[1] + count - 1))
    return list(Engine(runner).generate(ids.tolist(), count)[0].tokens)


@pytest.fixture(scope="session")
def load() -> Callable[..., LoadedModel]:
    """Load on the CPU in float32."""

    def run(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
        return load_model(folder, devices.resolve("cpu"), dtype, **options)

    return run
