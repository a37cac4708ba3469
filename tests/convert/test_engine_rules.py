"""Checkpoints of every family against the loading rules of the engines, and the rules against planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.convert.run import convert
from quantkit.recipe import Recipe
from tests.engine_rules import violations
from tests.families import FAMILY_NAMES


@pytest.fixture(scope="module")
def sound(minimax: Path, tmp_path_factory: pytest.TempPathFactory, w8a8: Recipe) -> Path:
    out = tmp_path_factory.mktemp("rules") / "out"
    convert(minimax, out, w8a8, jobs=1)
    return out


def test_trained_models(sound: Path, deepseek: Path, tmp_path: Path, w8a8: Recipe) -> None:
    convert(deepseek, tmp_path / "out", w8a8, jobs=1)
    assert violations(sound) == []
    assert violations(tmp_path / "out") == []


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family(family: str, tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe) -> None:
    convert(tiny(family), tmp_path / "out", w8a8, jobs=1)
    assert violations(tmp_path / "out") == []


Edit = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
Q_PROJ = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.0.block_sparse_moe.experts.3.w2"


def _float_again(tensors: dict[str, torch.Tensor], config: dict[str, Any], module: str) -> None:
    tensors[f"{module}.weight"] = tensors[f"{module}.weight"].to(torch.bfloat16)
    del tensors[f"{module}.weight_scale"]
    config["ignore"].append(module)


FAULTS: dict[str, tuple[Edit, str]] = {
    "bf16 scale": (lambda t, c: t.update({f"{Q_PROJ}.weight_scale": t[f"{Q_PROJ}.weight_scale"].bfloat16()}), "BF16"),
    "flat scale": (lambda t, c: t.update({f"{Q_PROJ}.weight_scale": t[f"{Q_PROJ}.weight_scale"][:, 0].clone()}), "F32"),
    "router not ignored": (lambda t, c: c["ignore"].remove("model.layers.0.block_sparse_moe.gate"), "0 ignore entries"),
    "entry for nothing": (lambda t, c: c["ignore"].append("model.layers.9.mlp.gate"), "matches nothing"),
    "entry twice": (lambda t, c: c["ignore"].append("re:lm_h"), "2 ignore entries"),
    "part of q/k/v": (lambda t, c: _float_again(t, c, Q_PROJ), "q_proj is not quantized"),
    "one expert": (lambda t, c: _float_again(t, c, EXPERT), "some experts"),
    "static activations": (
        lambda t, c: c["config_groups"]["group_0"]["input_activations"].update(dynamic=False),
        "dyn",
    ),
    "zero point": (lambda t, c: t.update({f"{Q_PROJ}.weight_zero_point": torch.zeros(1)}), "no business"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, sound: Path, tmp_path: Path) -> None:
    edit, wanted = FAULTS[fault]
    config = json.loads((sound / "config.json").read_text())
    tensors = load_file(sound / "model.safetensors")
    edit(tensors, config["quantization_config"])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any(wanted in line for line in violations(tmp_path)), violations(tmp_path)
