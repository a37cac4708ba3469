"""Both mixture-of-experts models through the whole job: all observed, all in INT8, nothing else touched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quantkit.archs.modeling import load_tokenizer
from quantkit_runtime import device as devices
from quantkit_runtime.graft import load_model
from tests.acceptance.conftest import MODELS, TINY, cli, smoke_load, succeeded
from tests.reference import fake_quantized, greedy, transformers_model
from tests.runtime.conftest import generate

Converted = Callable[[str, str, str], Path]

QUANTIZED = re.compile(
    r"layers\.\d+\.(self_attn\.(q|k|v|o|q_b|kv_b)_proj|(mlp|block_sparse_moe)\..*(gate_proj|up_proj|down_proj|w[123]))\.weight$"
)
"""GEMMs of both models by their names on disk, written from the models' definitions."""


def source_tensors(name: str) -> dict[str, torch.Tensor]:
    return tensors_of(MODELS / name)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in sorted(file.keys())}
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", TINY)
def test_every_gemm_is_observed(name: str, calibrated: Callable[[str], Path]) -> None:
    summary = json.loads((calibrated(name) / "calibration.json").read_text())
    quantized = [row for row in summary["gemms"] if row["quantized"]]
    expected = [key for key in source_tensors(name) if QUANTIZED.search(key)]
    assert summary["observed_gemms"] == summary["expected_gemms"]
    assert len(quantized) == len(expected)
    experts = [row for row in quantized if row["expert"] is not None]
    assert len(experts) == sum("experts." in key and "shared" not in key for key in expected)
    with safe_open(calibrated(name) / "scales.safetensors", framework="pt") as file:
        assert len(list(file.keys())) == len(expected)


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("name", TINY)
def test_every_gemm_runs_in_int8(name: str, form: str, converted: Converted) -> None:
    result = succeeded(
        smoke_load(converted(name, form, "w8a8"), "--prompt", "The king", "--max-new-tokens", "4", "--json")
    )
    report = json.loads(result.stdout)
    expected = sum(bool(QUANTIZED.search(key)) for key in source_tensors(name))
    assert report["int8"]["expected"] == expected
    assert report["int8"]["run"] == expected
    assert not report["int8"]["fallbacks"]


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("name", TINY)
def test_verify_against_the_source(name: str, form: str, converted: Converted) -> None:
    result = succeeded(cli("verify", converted(name, form, "w8a8"), "--source", MODELS / name, "--json"))
    assert json.loads(result.stdout)["passed"]


@pytest.mark.parametrize("name", TINY)
def test_what_is_not_a_gemm_keeps_its_bits(name: str, converted: Converted) -> None:
    source = source_tensors(name)
    written = tensors_of(converted(name, "checkpoint", "w8a8"))
    kept = [key for key in source if not QUANTIZED.search(key)]
    assert any("gate.weight" in key for key in kept)
    assert any("correction_bias" in key for key in kept)
    assert all(same_bits(source[key], written[key]) for key in kept)
    assert all(written[key].dtype == torch.int8 for key in source if key not in kept)


@pytest.mark.parametrize("name", TINY)
def test_routers_of_shards_keep_their_bits(name: str, converted: Converted) -> None:
    source, shards = source_tensors(name), tensors_of(converted(name, "sharded", "w8a8"))
    routers = {key: value for key, value in source.items() if re.search(r"\.gate\.weight$|correction_bias$", key)}
    stored = {key: value for key, value in shards.items() if ".router" in key}
    assert len(stored) == len(routers)
    for key, value in routers.items():
        layer = re.search(r"layers\.(\d+)\.", key)
        role = "router.correction" if "correction" in key else "router"
        assert layer is not None
        assert same_bits(value, stored[f"layers.{layer[1]}.{role}.weight"])


@pytest.mark.parametrize("name", TINY)
def test_logits_and_tokens_equal_an_independent_fake_quant_model(name: str, converted: Converted) -> None:
    reference = fake_quantized(MODELS / name)
    tokenizer = load_tokenizer(MODELS / name)
    for form in ("checkpoint", "sharded"):
        folder = converted(name, form, "w8a8")
        loaded = load_model(folder, devices.resolve("cpu"), torch.float32)
        ids = tokenizer("def scale(values):\n    return", return_tensors="pt").input_ids
        with torch.no_grad():
            got, want = loaded.model(input_ids=ids).logits, reference(input_ids=ids).logits
        assert float((got - want).norm() / want.norm()) < 1e-4
        assert generate(loaded, ids, 8) == greedy(reference, ids, 8)


@pytest.mark.parametrize("form", ["checkpoint", "sharded"])
@pytest.mark.parametrize("name", TINY)
def test_recipe_bf16_changes_no_bit(name: str, form: str, converted: Converted) -> None:
    folder = converted(name, form, "bf16")
    if form == "checkpoint":
        source, written = source_tensors(name), tensors_of(folder)
        assert source.keys() == written.keys()
        assert all(same_bits(source[key], written[key]) for key in source)
    model = load_model(folder, devices.resolve("cpu"), torch.float32).model
    reference = transformers_model(MODELS / name, torch.float32)
    ids = load_tokenizer(MODELS / name)("The sea and the 太阳", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits)
