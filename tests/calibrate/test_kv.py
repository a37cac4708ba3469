"""Keys and values: what is observed against transformers' own cache, and what a checkpoint says about them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quantkit.archs.modeling import load_tokenizer
from quantkit.calibrate.data import draw
from quantkit.calibrate.run import calibrate
from quantkit.convert.run import convert
from quantkit.convert.verify import verify
from quantkit.errors import UsageError
from quantkit.recipe import Recipe
from quantkit.spec.calibration import CalibrationSummary
from tests.calibrate.conftest import small_recipe

RECIPE = small_recipe("w8a8-kv8", held_out=0)

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module")
def artifact(minimax: Path, no_plots: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kv") / "out"
    calibrate(minimax, out, RECIPE)
    return out


def summary_of(artifact: Path) -> CalibrationSummary:
    return CalibrationSummary.model_validate_json((artifact / "calibration.json").read_bytes())


def int8_error(x_GTD: np.ndarray) -> float:
    """Sum of squares that INT8 with one scale for each token and head loses."""
    scale = np.abs(x_GTD).max(-1, keepdims=True) / np.float32(127)
    q = np.rint(x_GTD / scale).astype(np.float64)
    return float(((q * scale - x_GTD) ** 2).sum())


def test_moments_are_those_of_the_cache(artifact: Path, minimax: Path) -> None:
    """transformers' cache holds the keys after rotary positions and norms of the heads."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(minimax, dtype=torch.float32).eval()
    samples = draw(load_tokenizer(minimax), RECIPE.calibration)[0].samples
    absmax = {name: np.zeros((6, 2)) for name in ("keys", "values")}
    error, square = ({name: np.zeros(6) for name in ("keys", "values")} for _ in range(2))
    for sample in samples:
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=sample.ids[None], past_key_values=cache, use_cache=True)
        for layer, held in enumerate(cache.layers):
            for name in ("keys", "values"):
                x = getattr(held, name)[0].numpy()
                absmax[name][layer] = np.maximum(absmax[name][layer], np.abs(x).max((1, 2)))
                error[name][layer] += int8_error(x)
                square[name][layer] += float((x.astype(np.float64) ** 2).sum())
    found = summary_of(artifact).kv_cache
    assert [row.layer for row in found] == list(range(6))
    for row in found:
        np.testing.assert_allclose(row.key_absmax, absmax["keys"][row.layer], rtol=1e-5)
        np.testing.assert_allclose(row.value_absmax, absmax["values"][row.layer], rtol=1e-5)
        wanted = [float(np.sqrt(error[name][row.layer] / square[name][row.layer])) for name in ("keys", "values")]
        assert [row.key_error, row.value_error] == pytest.approx(wanted, rel=1e-2)
        assert row.k_scale == pytest.approx(max(row.key_absmax) / 448, rel=1e-6)


def test_checkpoint_has_what_vllm_reads(artifact: Path, minimax: Path, tmp_path: Path) -> None:
    convert(minimax, tmp_path / "out", RECIPE, calibration=artifact)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    wanted = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    assert wanted.items() <= config["kv_cache_scheme"].items()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for row in summary_of(artifact).kv_cache:
        for name in ("k_scale", "v_scale"):
            scale = tensors[f"model.layers.{row.layer}.self_attn.{name}"]
            assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (1,))
            assert scale.item() == getattr(row, name)
    report = verify(tmp_path / "out", source=minimax)
    assert not [failure for check in report.checks for failure in check.failures]


def test_such_a_checkpoint_loads_and_is_a_source(artifact: Path, minimax: Path, tmp_path: Path) -> None:
    from quantkit_runtime.device import resolve
    from quantkit_runtime.graft import load_model

    convert(minimax, tmp_path / "out", RECIPE, calibration=artifact)
    convert(minimax, tmp_path / "plain", small_recipe())
    ids = torch.arange(24)[None]
    ours, plain = (
        load_model(tmp_path / name, resolve("cpu"), torch.float32).model(input_ids=ids, use_cache=False).logits
        for name in ("out", "plain")
    )
    assert torch.equal(ours, plain)
    again = convert(tmp_path / "out", tmp_path / "shards", small_recipe(), form="sharded")
    assert sum(row.role == "attn.cache_scale" for row in again.tensors) == 12


def test_what_a_checkpoint_cannot_say_is_refused(
    artifact: Path, minimax: Path, deepseek: Path, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="wants static scales"):
        convert(minimax, tmp_path / "out", RECIPE)
    values = RECIPE.model_dump()
    strict = Recipe.model_validate({**values, "kv_cache": {"checkpoint": "none"}})
    with pytest.raises(UsageError, match="engines cannot be told") as caught:
        convert(minimax, tmp_path / "out", strict)
    assert "int8_per_token_head" in caught.value.hint
    assert convert(minimax, tmp_path / "shards", strict, form="sharded").recipe["kv_cache"]
    for model in (deepseek, tiny("deepseek_v4")):
        with pytest.raises(UsageError, match="caches latents"):
            calibrate(model, tmp_path / "latents", RECIPE)
