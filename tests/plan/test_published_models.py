"""Sizes of published models from their configs alone: parameters, native bytes, cache bytes, cards."""

import json
from pathlib import Path
from typing import Any

import pytest

from quantkit.archs import architecture_for
from quantkit.archs.structure import layers_of
from quantkit.plan.cache import CacheFormat, LayerCache, layer_caches, per_token, per_token_at_start, sequence_bytes
from quantkit.plan.devices import find_device
from quantkit.plan.report import PlanReport, make_plan
from quantkit.plan.sizing import Request
from quantkit.recipe import load_recipe
from tests.plan.facts import CONFIGS

K100_AI = find_device("K100_AI", None)


def plan(config: dict[str, Any], folder: Path, **request: Any) -> PlanReport:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return make_plan(path, Request(K100_AI, load_recipe(request.pop("recipe", "w8a8")), **request))


def caches(config: dict[str, Any], form: CacheFormat | None = None, tp: int = 1) -> tuple[LayerCache, ...]:
    arch = architecture_for(config)
    dims = arch.dims(config)
    return layer_caches(dims, config, layers_of(arch, dims, config), form or CacheFormat(), tp)


BILLIONS = {
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "MiniMax-M2.7": 228.7,
    "MiniMax-M3": 427.0,  # published with its vision tower
    "DeepSeek-V3.2": 685.0,
    "Kimi-K2": 1026.0,
    "GLM-4.5": 358.3,  # 355 B and the draft layer with its copies of both tables
    "GLM-5": 754.0,  # 744 B and the draft layer
    "Qwen3.5-397B-A17B": 397.0,  # without its draft layer
    "gpt-oss-120b": 116.8,
    "Mixtral-8x7B": 46.7,
    "Llama-3-70B": 70.6,
}

GIB = {"MiniMax-M2.7": 214.0, "MiniMax-M3": 795.5, "DeepSeek-V3.2": 642.0, "Kimi-K2": 958.0, "gpt-oss-120b": 60.8}

CACHE_BYTES = {
    "Qwen3-30B-A3B": 2 * 48 * 4 * 128 * 2,
    "Qwen3-235B-A22B": 2 * 94 * 4 * 128 * 2,
    "MiniMax-M2.7": 2 * 62 * 8 * 128 * 2,
    "MiniMax-M3": 122_880 + 14_592,
    "DeepSeek-V3.2": 61 * (512 + 64) * 2 + 61 * 128 * 2,  # latents and index keys
    "Kimi-K2": 61 * (512 + 64) * 2,
    "GLM-4.5": 2 * 92 * 8 * 128 * 2,
    "GLM-5": 78 * (512 + 64) * 2 + 78 * 128 * 2,
    "Qwen3.5-397B-A17B": 2 * 15 * 2 * 256 * 2,  # three layers in four are linear
    "gpt-oss-120b": 2 * 36 * 8 * 64 * 2,
    "Mixtral-8x7B": 2 * 32 * 8 * 128 * 2,
    "Llama-3-70B": 2 * 80 * 8 * 128 * 2,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_cache(name: str, tmp_path: Path) -> None:
    found = plan(CONFIGS[name], tmp_path, context=1024, concurrency=1)
    assert found.parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)
    assert found.kv_bytes_per_token == CACHE_BYTES[name]
    if name in GIB:
        assert found.source_bytes / 2**30 == pytest.approx(GIB[name], rel=0.005)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_for_k100_ai_holds_together(name: str, tmp_path: Path) -> None:
    """Cards are enough for the weights, not absurdly many, and the table of a card adds up."""
    found = plan(CONFIGS[name], tmp_path, context=8192, concurrency=4)
    assert found.fewest is not None
    assert found.recommended is not None
    assert found.cards == found.recommended
    least = (found.output_bytes - sum(found.beside_ranks.values())) / (65520 * 2**20)
    assert least < found.fewest <= max(1.0, 2.2 * least + 8)
    assert found.recommended >= 1.2 * found.fewest
    assert sum(row.nbytes for row in found.memory) == found.card_bytes
    best = found.proposals[0]
    assert best.tp * best.pp * best.dp == found.cards
    assert best.tp <= 8
    assert best.longest_context >= 8192
    assert best.largest_batch >= 4
    assert [row.cost for row in found.proposals] == sorted(row.cost for row in found.proposals)


def test_256_gb_of_cache_at_a_million_tokens() -> None:
    """61 layers, 8 kv heads of 128: 0.25 MB a token."""
    config = {**CONFIGS["MiniMax-M2.7"], "num_hidden_layers": 61}
    one = caches(config)
    assert per_token_at_start(one) == 249_856 == pytest.approx(0.25e6, rel=0.001)
    assert sequence_bytes(one, 2**20) / 1e9 == pytest.approx(262, rel=0.001)
    assert sequence_bytes(one, 2**20) / 2**30 == pytest.approx(244, rel=0.001)
    assert sequence_bytes(one, 1_000_000) / 1e9 == pytest.approx(250, rel=0.001)


def test_int8_keys_have_a_scale_for_each_head_and_token() -> None:
    config = CONFIGS["Llama-3-70B"]
    assert per_token(caches(config, CacheFormat("int8", "bf16"))) == 80 * 8 * (128 + 4 + 256)
    assert per_token(caches(config, CacheFormat("int8", "int8"))) == 80 * 8 * 2 * (128 + 4)


def test_heads_replicate_when_tp_exceeds_them_and_latents_always() -> None:
    m3 = CONFIGS["MiniMax-M3"]
    assert per_token(caches(m3, tp=4)) == per_token(caches(m3, tp=8)) == 122_880 // 4 + 14_592
    k2 = CONFIGS["Kimi-K2"]
    assert per_token(caches(k2, tp=8)) == per_token(caches(k2))


def test_windows_stop_growing_and_linear_layers_hold_no_keys() -> None:
    config = CONFIGS["gpt-oss-120b"]
    full, all_of_it = 18 * 8 * 64 * 2 * 2, 36 * 8 * 64 * 2 * 2
    one = caches(config)
    assert (per_token(one), per_token_at_start(one)) == (full, all_of_it)
    assert sequence_bytes(one, 100) == 100 * all_of_it
    assert sequence_bytes(one, 10_000) == 10_000 * full + 128 * full
    hybrid = {
        **CONFIGS["Qwen3-30B-A3B"],
        "model_type": "qwen3_next",
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    state = 36 * (32 * 128 * 128 * 4 + (2 * 2048 + 4096) * 3 * 2)
    assert per_token(caches(hybrid)) == 12 * 4 * 128 * 2 * 2
    assert sequence_bytes(caches(hybrid), 1000) == 1000 * 12 * 4 * 128 * 2 * 2 + state


def test_int8_that_is_larger_than_its_mxfp4_source_is_said_first(tmp_path: Path) -> None:
    found = plan(CONFIGS["gpt-oss-120b"], tmp_path)
    assert found.output_bytes > 1.7 * found.source_bytes
    assert found.warnings[0].startswith("INT8 makes this model larger: 60.8 GiB (U8 + U8 scale)")
    assert not any("larger" in text for text in plan(CONFIGS["Mixtral-8x7B"], tmp_path).warnings)


def test_a_million_tokens_is_a_row_whatever_was_asked(tmp_path: Path) -> None:
    found = plan(CONFIGS["DeepSeek-V3.2"], tmp_path, context=4096, concurrency=2)
    row = next(row for row in found.what_if if row.context == 1_000_000)
    assert row.cache_bytes == 1_000_000 * CACHE_BYTES["DeepSeek-V3.2"]
    assert row.host_bytes == 2 * row.cache_bytes
    assert row.beyond
    assert found.rope == "yarn x 40 from 4,096"
