"""Sources with a tokenizer, their baselines and their INT8 conversions, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quantkit.baseline.plan import Options
from quantkit.baseline.texts import TextOptions
from quantkit.convert.run import convert
from quantkit.recipe import load_recipe
from tests.baseline.helpers import KINDS, SMALL, make_baseline, with_tokenizer
from tests.conftest import MODELS
from tests.families import make_tiny

LONG = Options(
    TextOptions(KINDS, texts=1, tokens=24, long_tokens=1000, probe_tokens=24, prompts=0), new_tokens=0, top_k=16
)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss_clamped": ("gpt_oss", {"swiglu_limit": 0.6}),  # random weights rarely reach the published 7
    "mixtral_tied": ("mixtral", {}),
    "llama_long": ("llama", {"max_position_embeddings": 1024}),
}
"""Families with other values in their config."""


def tie_two_experts(model: Path) -> None:
    """Give two experts of layer 1 the same row of the router."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    router = next(tensor for name, tensor in tensors.items() if "layers.1." in name and name.endswith("gate.weight"))
    router[3] = router[1]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family or trained model -> checkpoint folder with a tokenizer; do not change it."""

    @cache
    def make(name: str) -> Path:
        if (MODELS / name).is_dir():
            return MODELS / name
        folder, (family, values) = tmp_path_factory.mktemp(name), VARIANTS.get(name, (name, {}))
        raw = make_tiny(family, folder / "raw", **values)
        if name == "mixtral_tied":
            tie_two_experts(raw)
        return with_tokenizer(raw, MODELS / "tiny-minimax-m2", folder / "model")

    return make


@pytest.fixture(scope="session")
def baseline_of(
    source: Callable[[str], Path], baseline: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Name -> baseline; do not change it."""

    @cache
    def make(name: str) -> Path:
        if name == "tiny-minimax-m2":
            return baseline
        options = LONG if name == "llama_long" else SMALL
        return make_baseline(source(name), tmp_path_factory.mktemp("baseline") / "out", options)

    return make


@pytest.fixture(scope="session")
def int8(source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name -> INT8 checkpoint by `quantkit convert`; copy it before changing it."""

    @cache
    def make(name: str) -> Path:
        out = tmp_path_factory.mktemp(f"{name}-int8") / "out"
        convert(source(name), out, load_recipe("w8a8"))
        return out

    return make
