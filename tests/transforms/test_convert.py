"""Conversion, verification, sharding and calibration of transformed sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from quantkit.archs import Key
from quantkit.calibrate.methods import view_of
from quantkit.calibrate.run import calibrate
from quantkit.checkpoint.reader import Source
from quantkit.convert.merge import merge
from quantkit.convert.run import convert
from quantkit.convert.shard_source import open_source
from quantkit.convert.verify import verify
from quantkit.errors import UsageError
from quantkit.recipe import Recipe, load_recipe
from quantkit.spec.manifest import read_manifest
from quantkit.spec.mesh import Mesh
from quantkit.spec.tensorfile import torch_dtype
from tests.transforms.conftest import logits, relative_error

Tiny = Callable[..., Path]

_BOTH = [{"name": "balance"}, {"name": "rotate", "heads": True}]
ROTATE = Recipe.model_validate({**load_recipe("w8a8-rotate").model_dump(), "methods": _BOTH})
ROTATE_ONLY = Recipe.model_validate({**ROTATE.model_dump(), "methods": [{"name": "rotate"}]})
KEPT = Recipe.model_validate({**ROTATE_ONLY.model_dump(), "scheme": "keep"})

CONVERTED = {
    "qwen2": ROTATE,  # tied, biases
    "phi3": ROTATE,  # fused
    "deepseek_v3": ROTATE,  # latent attention, kept projections
    "gpt_oss": ROTATE_ONLY,  # stacked, transposed, interleaved, biases
    "qwen3_5_moe": Recipe.model_validate({**ROTATE.model_dump(), "methods": [{"name": "balance"}]}),  # stacked
    "ernie4_5_moe": ROTATE,  # tied mixture
}
WEIGHT_ERROR = 0.15
"""Relative error of logits with INT8 weights alone; of a model that was not transformed consistently it is about 1."""


@pytest.mark.parametrize("family", CONVERTED)
def test_converted_model_is_the_source_within_rounding(tiny: Tiny, tmp_path: Path, family: str) -> None:
    root, recipe = tiny(family), CONVERTED[family]
    manifest = convert(root, tmp_path / "ck", recipe, jobs=1)
    assert [step.step for step in manifest.transforms]
    assert verify(tmp_path / "ck", source=root).failures == ()
    expected = logits(Source(root))
    plain = relative_error(logits(_plain(root, tmp_path)), expected)
    error = relative_error(logits(Source(tmp_path / "ck")), expected)
    assert 0 < error < max(WEIGHT_ERROR, 2 * plain)


def _plain(root: Path, tmp_path: Path) -> Source:
    convert(root, tmp_path / "plain", load_recipe("w8a8"), jobs=1)
    return Source(tmp_path / "plain")


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3", "gpt_oss"])
def test_kept_weights_are_rounded_once(tiny: Tiny, tmp_path: Path, family: str) -> None:
    """Nothing quantized: every written value is the float32 one of the view, rounded to the dtype that is written."""
    root = tiny(family)
    convert(root, tmp_path / "out", KEPT, jobs=1)
    assert verify(tmp_path / "out", source=root).failures == ()
    found, view = Source(tmp_path / "out"), view_of(Source(root), KEPT.methods)
    assert found.entries.keys() == view.entries.keys()
    for key, entry in found.entries.items():
        is_router = key.role == "router" and key.part == "weight"
        assert entry.dtype == ("F32" if is_router or "correction" in key.role else "BF16")
        assert torch.equal(found.fetch(key), view.fetch(key).to(torch_dtype(entry.dtype))), entry.name


def test_transformers_loads_an_untied_model(tiny: Tiny, tmp_path: Path) -> None:
    root = tiny("qwen2")
    convert(root, tmp_path / "out", ROTATE, jobs=1)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head" in config["quantization_config"]["ignore"]
    ids = torch.arange(40)[None]
    with torch.no_grad():
        source = transformers.AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32)(input_ids=ids).logits
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        ours = model(input_ids=ids).logits
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert relative_error(ours, source) < WEIGHT_ERROR


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_shards_merge_and_reshard_without_transforming_again(tiny: Tiny, tmp_path: Path, family: str) -> None:
    root = tiny(family)
    direct = convert(root, tmp_path / "ck", ROTATE, jobs=1)
    convert(root, tmp_path / "shards", ROTATE, form="sharded", mesh=Mesh(tp=2), jobs=1)
    assert verify(tmp_path / "shards", source=root).failures == ()
    merged = merge(tmp_path / "shards", tmp_path / "merged", jobs=1)
    assert merged.transforms == direct.transforms
    for path in (tmp_path / "ck").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "merged" / path.name).read_bytes()
    again = convert(tmp_path / "ck", tmp_path / "again", ROTATE, form="sharded", mesh=Mesh(tp=2), jobs=1)
    assert again.transforms == direct.transforms
    assert {record.xxh3 for record in again.tensors} == {
        record.xxh3 for record in read_manifest(tmp_path / "shards" / "manifest.json").tensors
    }
    assert verify(tmp_path / "again", source=tmp_path / "ck").failures == ()
    shards = open_source(tmp_path / "shards")
    assert torch.equal(shards.get(Key(1, "mlp.down" if family == "qwen2" else "shared.down")).float(), _down(tmp_path))


def _down(tmp_path: Path) -> torch.Tensor:
    found = Source(tmp_path / "ck")
    role = "shared.down" if found.has(Key(1, "shared.down")) else "mlp.down"
    return found.get(Key(1, role)).float()


def test_int8_sources_and_other_methods_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    root = tiny("llama")
    convert(root, tmp_path / "plain", load_recipe("w8a8"), jobs=1)
    with pytest.raises(UsageError, match="INT8 already"):
        convert(tmp_path / "plain", tmp_path / "a", ROTATE, jobs=1)
    convert(root, tmp_path / "rotated", ROTATE, jobs=1)
    with pytest.raises(UsageError, match="other methods"):
        convert(tmp_path / "rotated", tmp_path / "b", ROTATE_ONLY, jobs=1)
    assert not (tmp_path / "a").exists()


def test_a_refused_family_writes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="norm after the block"):
        convert(tiny("gemma2"), tmp_path / "out", ROTATE_ONLY, jobs=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.gate.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
)
def test_verify_finds_a_tensor_that_was_not_rotated(tiny: Tiny, tmp_path: Path, name: str) -> None:
    root = tiny("deepseek_v3")
    manifest = convert(root, tmp_path / "out", ROTATE, jobs=1)
    record = next(record for record in manifest.tensors if record.name == name)
    value = load_file(root / "model.safetensors")[name].to(torch_dtype(record.dtype))
    with (tmp_path / "out" / record.file).open("r+b") as file:
        file.seek(record.offset)
        file.write(value.view(torch.uint8).numpy().tobytes())
    failures = verify(tmp_path / "out", source=root).failures
    assert any(name in failure and "differs from the transformed source" in failure for failure in failures)


def test_calibration_sees_the_transformed_weights(tiny: Tiny, tmp_path: Path) -> None:
    """Scales of an artifact are those that conversion computes from the view, so both outputs are the same weights."""
    root = tiny("tiny-deepseek-v3")
    small = {"samples": 6, "seq_len": 32, "min_tokens_per_expert": 0}
    recipe = Recipe.model_validate({**ROTATE.model_dump(), "calibration": small})
    calibrate(root, tmp_path / "artifact", recipe, device="cpu")
    convert(root, tmp_path / "with", recipe, calibration=tmp_path / "artifact", jobs=1)
    convert(root, tmp_path / "without", recipe, jobs=1)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("with", "without"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
