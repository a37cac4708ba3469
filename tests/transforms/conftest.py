"""Models of every family whose norms are far from constant, and transformers' model filled from any source."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quantkit.archs import Key
from quantkit.archs.modeling import build_skeleton, load_config, parameter_key, parameter_value, set_tensor
from quantkit.checkpoint.reader import Source
from tests.families import FAMILIES, make_tiny

REAL = {name: Path(__file__).parents[1] / "models" / name for name in ("tiny-minimax-m2", "tiny-deepseek-v3")}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoint of a family (or a real tiny model by name), with norm weights spread over an order of magnitude."""

    @cache
    def make(family: str, mtp: bool = False) -> Path:
        if family in REAL:
            return REAL[family]
        folder = make_tiny(family, tmp_path_factory.mktemp(family), mtp=mtp and bool(FAMILIES[family].draft))
        _spread_norms(folder / "model.safetensors")
        return folder

    return make


def _spread_norms(path: Path) -> None:
    """Norms that are nearly one would hide a norm that was folded into too few matrices, or not at all."""
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(path)
    for name, value in tensors.items():
        if "norm" in name and name.endswith(".weight") and value.ndim == 1:
            factor = torch.empty(value.shape).uniform_(0.3, 3.0, generator=generator)
            tensors[name] = (value.float() + factor - value.float().mean()).to(value.dtype)
    save_file(tensors, path, metadata={"format": "pt"})


def filled_model(source: Source, get: Callable[[Key], Tensor] | None = None) -> nn.Module:
    """transformers' float32 model with every parameter and stored buffer from a source."""
    model = build_skeleton(load_config(source.root), dtype=torch.float32)
    read = get or source.get
    for name in model.state_dict():
        key = parameter_key(source.arch, name)
        if key == Key(None, "lm_head") and source.tied:
            key = Key(None, "embed")
            value = read(key)
        else:
            value = parameter_value(source.arch, source.dims, name, read)
        set_tensor(model, name, value.float())
    return model


def logits(source: Source, get: Callable[[Key], Tensor] | None = None) -> Tensor:
    ids = torch.randint(0, source.dims.vocab, (2, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: Tensor = filled_model(source, get)(input_ids=ids).logits
    return found


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
