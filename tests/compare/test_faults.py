"""Planted faults are found and named: layer, operator, expert. Good conversions raise no alarm."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantkit.cli import main as quantkit
from quantkit.compare.report import page, sentences
from quantkit.compare.result import Comparison, Finding
from quantkit_instruments.cli import main as runtime
from quantkit_instruments.compare import Options, run

Make = Callable[[str], Path]


def compare(baseline: Path, candidate: Path) -> Comparison:
    return run(Options(baseline, candidate, device="cpu", dtype="float32", verify=False))


def changed(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Path:
    """A copy of a checkpoint of one file, without a manifest, some of its tensors replaced."""
    shutil.copytree(
        folder, out, ignore=shutil.ignore_patterns(".quantkit-work", "quantkit_manifest.json", "*.index.json")
    )
    (path,) = out.glob("*.safetensors")
    tensors = load_file(path)
    found = {name: tensor.contiguous() for name, tensor in change(tensors).items()}
    assert found.keys() <= tensors.keys()
    save_file({**tensors, **found}, path, metadata={"format": "pt"})
    return out


def configured(folder: Path, out: Path, **values: Any) -> Path:
    """A copy of a checkpoint with other values in its config."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    text = config.get("text_config", config)
    assert any(text.get(key) != value for key, value in values.items())
    text |= values
    (out / "config.json").write_text(json.dumps(config))
    return out


def first(result: Comparison) -> Finding:
    assert not result.passed
    assert result.findings, [check for check in result.checks if not check.passed]
    return result.findings[0]


# ------------------------------------------------------------------------------------------------ no false alarms


@pytest.mark.parametrize(
    "name", ["tiny-minimax-m2", "tiny-deepseek-v3", "gpt_oss", "qwen3_moe", "gemma3", "glm_moe_dsa", "llama"]
)
def test_good_conversions_pass(name: str, baseline_of: Make, int8: Make) -> None:
    result = compare(baseline_of(name), int8(name))
    assert sentences(result) == []
    assert result.passed
    assert all(check.passed for check in result.checks)
    assert result.candidate["weights"] == "int8"
    assert 0 < max(row.error for row in result.layers) < 0.1  # INT8 was measured, and is far from the limits


def test_the_source_itself_is_the_same_bit_for_bit(baseline_of: Make, source: Make) -> None:
    result = compare(baseline_of("tiny-deepseek-v3"), source("tiny-deepseek-v3"))
    assert result.passed
    assert {(row.error, row.own_error, row.long_error, row.routing) for row in result.layers} <= {
        (0.0, 0.0, 0.0, 1.0),
        (0.0, 0.0, 0.0, None),
    }
    assert result.kinds[0].kl_max == 0
    assert all(row.first is None and row.decoded == row.tokens for row in result.greedy)


# -------------------------------------------------------------------------------------------------- wrong weights


def test_gate_and_up_of_one_expert_swapped(baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    def swap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for part in ("weight", "weight_scale"):
            gate, up = (f"model.layers.3.block_sparse_moe.experts.5.{name}.{part}" for name in ("w1", "w3"))
            found |= {gate: tensors[up], up: tensors[gate]}
        return found

    result = compare(baseline_of("tiny-minimax-m2"), changed(int8("tiny-minimax-m2"), tmp_path / "bad", swap))
    assert result.first_bad_layer == 3
    one, other = result.findings[:2]
    assert (one.layer, one.operator, one.expert, one.why) == (3, "expert.gate", 5, "other")
    assert one.detail == "layers.3.expert.up.5"
    assert (other.operator, other.detail) == ("expert.up", "layers.3.expert.gate.5")
    assert [(row.what, row.expert) for row in result.findings[2:]] == [("expert", 5)]


def test_rows_of_a_router_permuted(baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    def permute(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "model.layers.2.block_sparse_moe.gate.weight"
        return {name: tensors[name].roll(1, 0)}

    result = compare(baseline_of("tiny-minimax-m2"), changed(int8("tiny-minimax-m2"), tmp_path / "bad", permute))
    found = first(result)
    assert (found.layer, found.operator, found.what, found.why) == (2, "router", "weight", "rows")
    assert found.detail.startswith("0 ← 15, 1 ← 0, 2 ← 1")
    assert {row.what for row in result.findings} >= {"routing", "operator"}
    assert {row.layer for row in result.findings} == {2}


def test_a_scale_off_by_two(baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    def double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "model.layers.4.self_attn.o_proj.weight_scale"
        return {name: 2 * tensors[name]}

    result = compare(baseline_of("tiny-deepseek-v3"), changed(int8("tiny-deepseek-v3"), tmp_path / "bad", double))
    found = first(result)
    assert (found.layer, found.operator, found.why, found.detail) == (4, "attn.o", "factor", "2")
    bad = [(row.name, row.end) for row in result.operators if row.bad]
    assert bad[0] == ("self_attn.o_proj", "out")
    assert "layer 4: the weight attn.o is 2 times the source's" in sentences(result)


def test_one_added_to_a_norm(baseline_of: Make, source: Make, tmp_path: Path) -> None:
    """Norms that multiply by (1 + weight), whose weights were stored as if they did not."""

    def bake(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = "model.layers.1.pre_feedforward_layernorm.weight"
        return {name: (tensors[name].float() + 1).bfloat16()}

    result = compare(baseline_of("gemma3"), changed(source("gemma3"), tmp_path / "bad", bake))
    found = first(result)
    assert (found.layer, found.operator, found.why, found.detail) == (1, "norm.pre_mlp", "offset", "+1")


# ----------------------------------------------------------------------------------------------- wrong arithmetic


def test_the_one_of_one_plus_weight_left_out(baseline_of: Make, source: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    def forward(self: Any, x: Tensor) -> Tensor:
        return self._norm(x.float()) * self.weight.float()

    expected = baseline_of("gemma3")
    monkeypatch.setattr(Gemma3RMSNorm, "forward", forward)
    found = first(compare(expected, source("gemma3")))
    assert (found.layer, found.operator, found.what) == (0, "norm.input", "operator")


def test_a_dropped_clamp(source: Make, baseline_of: Make, int8: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of gpt-oss clamp what comes out of gate and up; every weight is right."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    def without(self: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    expected, candidate = baseline_of("gpt_oss_clamped"), int8("gpt_oss_clamped")
    assert compare(expected, candidate).passed
    monkeypatch.setattr(GptOssExperts, "_apply_gate", without)
    found = first(compare(expected, candidate))
    assert (found.layer, found.operator, found.what, found.why) == (0, "experts", "expert", "all")


def test_another_order_of_ties(baseline_of: Make, source: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of a router are equal; the candidate takes the later one of equal experts first."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        probabilities = logits.float().softmax(-1)
        order = probabilities.flip(-1).sort(dim=-1, descending=True, stable=True).indices
        index = probabilities.shape[-1] - 1 - order[:, : self.top_k]
        weights = probabilities.gather(-1, index)
        return logits, weights / weights.sum(-1, keepdim=True), index

    expected, candidate = baseline_of("mixtral_tied"), source("mixtral_tied")
    assert compare(expected, candidate).passed
    monkeypatch.setattr(MixtralTopKRouter, "forward", forward)
    found = first(compare(expected, candidate))
    assert (found.layer, found.operator, found.what) == (1, "router", "ties")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number(value: float, baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    """Named in spite of what it does to everything after it, decoding too, and JSON can say the result."""
    name = "model.layers.3.block_sparse_moe.experts.5.w2.weight_scale"

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        scale = tensors[name].clone()
        scale[3] = value
        return {name: scale}

    result = compare(baseline_of("tiny-minimax-m2"), changed(int8("tiny-minimax-m2"), tmp_path / "bad", change))
    found = first(result)
    assert (found.layer, found.operator, found.expert, found.what) == (3, "expert.down", 5, "weight")
    assert not next(check for check in result.checks if check.name == "kl_mean").passed
    json.dumps(result.model_dump(mode="json"), allow_nan=False)
    page(result)


def test_a_norm_of_zeros_is_not_said_to_show_on_long_texts_only(baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    name = "model.layers.3.input_layernorm.weight"
    bad = changed(int8("tiny-minimax-m2"), tmp_path / "bad", lambda tensors: {name: torch.zeros_like(tensors[name])})
    result = compare(baseline_of("tiny-minimax-m2"), bad)
    assert [(row.what, row.operator) for row in result.findings if row.layer == 3][:2] == [
        ("weight", "norm.input"),
        ("operator", "norm.input"),
    ]
    assert not [row for row in result.findings if row.what == "long"]


# --------------------------------------------------------------------------------------------- a wrong config


def test_a_wrong_number_of_heads(baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    """8 heads of 16 instead of 4 of 32: every shape still fits."""
    wrong = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "rotary_dim": 8}
    result = compare(baseline_of("tiny-minimax-m2"), configured(int8("tiny-minimax-m2"), tmp_path / "bad", **wrong))
    found = first(result)
    assert (found.layer, found.what, found.operator) == (0, "before", "attn.o")
    assert {row.name for row in result.companions} == set(wrong)


def test_a_number_of_heads_that_fits_no_shape(baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    bad = configured(int8("llama"), tmp_path / "bad", num_attention_heads=6)
    looked = CliRunner().invoke(quantkit, ["inspect", str(bad)])
    assert re.search(r"q_proj", looked.output)
    refused = CliRunner().invoke(runtime, ["compare", str(baseline_of("llama")), str(bad), "--no-verify"])
    assert refused.exit_code == 3
    assert "q_proj" in refused.output or "o_proj" in refused.output or "attn.qkv" in refused.output


def test_another_rotary_base_shows_on_long_inputs(baseline_of: Make, source: Make, tmp_path: Path) -> None:
    rope = json.loads((source("llama_long") / "config.json").read_text())["rope_parameters"]
    bad = configured(source("llama_long"), tmp_path / "bad", rope_parameters={**rope, "rope_theta": 10_600.0})
    result = compare(baseline_of("llama_long"), bad)
    found = first(result)
    assert (found.layer, found.what, found.operator) == (0, "long", "attn.o")
    assert result.layers[0].error < 0.2  # the probe is short: there the error stays within the limits of INT8
    assert [row.name for row in result.companions] == ["rope_parameters.rope_theta"]


# ------------------------------------------------------------------------------------------- beside the weights


def test_a_missing_chat_template(baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(int8("llama"), bad)
    values = json.loads((bad / "tokenizer_config.json").read_text())
    del values["chat_template"]
    (bad / "tokenizer_config.json").write_text(json.dumps(values))
    result = compare(baseline_of("llama"), bad)
    assert not result.passed
    assert [row.what for row in result.companions] == ["no_template"]
    assert result.findings == ()
    looked = CliRunner().invoke(quantkit, ["inspect", str(bad)])
    assert "there is no chat template" in looked.output


def test_another_end_of_text(baseline_of: Make, int8: Make, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(int8("llama"), bad)
    values = json.loads((bad / "generation_config.json").read_text())
    (bad / "generation_config.json").write_text(json.dumps(values | {"eos_token_id": 7}))
    result = compare(baseline_of("llama"), bad)
    assert not result.passed
    assert [(row.what, row.source, row.candidate) for row in result.companions] == [("stop_tokens", "[2]", "[2, 7]")]
    looked = CliRunner().invoke(quantkit, ["inspect", str(bad)])
    assert "generation_config.json stops at 7, config.json at 2" in looked.output


def test_another_tokenizer(baseline_of: Make, source: Make, tmp_path: Path) -> None:
    shutil.copytree(source("llama"), tmp_path / "bad")
    path = tmp_path / "bad" / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    assert [row.what for row in compare(baseline_of("llama"), tmp_path / "bad").companions] == ["tokenizer"]
