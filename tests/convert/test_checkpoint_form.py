"""The checkpoint form: names, bits, scales, config, and that transformers loads it as it is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.convert.run import convert
from quantkit.errors import InputError
from quantkit.recipe import Recipe, Rule
from tests.convert.helpers import assert_int8, ref_int8, tensors, tree

KEPT_MINIMAX = re.compile(r"norm|embed_tokens|lm_head|block_sparse_moe\.gate|correction_bias")


def test_every_weight_is_rounded_and_all_else_is_kept(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    convert(minimax, tmp_path / "out", w8a8, jobs=1)
    source, result = tensors(minimax), tensors(tmp_path / "out")
    quantized = [name for name in source if not KEPT_MINIMAX.search(name)]
    assert len(quantized) == 312
    for name in quantized:
        assert_int8(source[name], result.pop(name), result.pop(name.replace(".weight", ".weight_scale")))
    assert result.keys() == {name for name in source if KEPT_MINIMAX.search(name)}
    for name, value in result.items():
        assert value.dtype == source[name].dtype
        assert torch.equal(value.view(torch.uint8), source[name].view(torch.uint8)), name


def test_latent_projections_are_kept_and_ignored(deepseek: Path, tmp_path: Path, w8a8: Recipe) -> None:
    convert(deepseek, tmp_path / "out", w8a8, jobs=1)
    result = tensors(tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    ignore = config["quantization_config"]["ignore"]
    linears = {
        name.removesuffix(".weight") for name, value in result.items() if value.ndim == 2 and "scale" not in name
    }
    linears -= {"model.embed_tokens"}
    kept = {name for name in linears if result[f"{name}.weight"].dtype != torch.int8}
    assert sorted(kept) == ignore
    assert {"lm_head", "model.layers.1.mlp.gate", "model.layers.0.self_attn.q_a_proj"} <= kept
    assert "model.layers.0.self_attn.q_b_proj" not in kept


def test_config_keeps_its_keys(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    convert(minimax, tmp_path / "out", w8a8, jobs=1)
    config = json.loads((tmp_path / "out/config.json").read_text())
    scheme = config.pop("quantization_config")
    assert config == json.loads((minimax / "config.json").read_text())
    (group,) = scheme["config_groups"].values()
    assert (scheme["quant_method"], scheme["format"]) == ("compressed-tensors", "int-quantized")
    assert group["targets"] == ["Linear"]
    assert (group["weights"]["strategy"], group["weights"]["num_bits"], group["weights"]["dynamic"]) == (
        "channel",
        8,
        False,
    )
    activations = group["input_activations"]
    assert (activations["strategy"], activations["num_bits"], activations["dynamic"]) == ("token", 8, True)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
def test_stacked_experts_are_taken_apart(
    family: str, tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe
) -> None:
    """Rows are found independently: halves of the stack, or every other row of gpt-oss's transposed one."""
    source_dir = tiny(family)
    convert(source_dir, tmp_path / "out", w8a8, jobs=1)
    source, result = tensors(source_dir), tensors(tmp_path / "out")
    stacks = [name for name in source if name.endswith("experts.gate_up_proj")]
    stacks = [name for name in stacks if not name.startswith("mtp.")]
    assert stacks
    for name in stacks:
        assert name not in result
        prefix = name.removesuffix(".gate_up_proj")
        down = source[f"{prefix}.down_proj"]
        for expert in range(len(down)):
            matrix = source[name][expert]
            if family == "gpt_oss":
                parts = {"gate": matrix.T[0::2], "up": matrix.T[1::2], "down": down[expert].T}
            else:
                gate, up = matrix.chunk(2)
                parts = {"gate": gate, "up": up, "down": down[expert]}
            for part, weight in parts.items():
                module = f"{prefix}.{expert}.{part}_proj"
                assert_int8(weight, result[f"{module}.weight"], result[f"{module}.weight_scale"])


def test_expert_biases_follow_their_weights(tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe) -> None:
    convert(tiny("gpt_oss"), tmp_path / "out", w8a8, jobs=1)
    source, result = tensors(tiny("gpt_oss")), tensors(tmp_path / "out")
    stacked = source["model.layers.1.mlp.experts.gate_up_proj_bias"]
    assert torch.equal(result["model.layers.1.mlp.experts.3.up_proj.bias"], stacked[3, 1::2])
    assert torch.equal(result["model.layers.1.mlp.experts.3.gate_proj.bias"], stacked[3, 0::2])
    stacked = source["model.layers.1.mlp.experts.down_proj_bias"]
    assert torch.equal(result["model.layers.1.mlp.experts.2.down_proj.bias"], stacked[2])


def test_recipe_bf16_changes_nothing(tiny: Callable[[str], Path], tmp_path: Path, bf16: Recipe) -> None:
    source = tiny("qwen3_5_moe")
    convert(source, tmp_path / "out", bf16, jobs=1)
    before, after = tensors(source), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    assert (tmp_path / "out/config.json").read_bytes() == (source / "config.json").read_bytes()


def test_zero_rows_get_the_floor(tmp_path: Path, tiny: Callable[[str], Path], w8a8: Recipe) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny("llama"), source)
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    weights[f"{name}.weight"][3] = 0
    save_file(weights, source / "model.safetensors")
    convert(source, tmp_path / "out", w8a8, jobs=1)
    result = tensors(tmp_path / "out")
    assert not result[f"{name}.weight"][3].any()
    assert 0 < float(result[f"{name}.weight_scale"][3]) < 1e-30
    assert_int8(weights[f"{name}.weight"], result[f"{name}.weight"], result[f"{name}.weight_scale"])


def test_files_beside_the_weights(tmp_path: Path, tiny: Callable[[str], Path], w8a8: Recipe) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny("llama"), source)
    (source / "code").mkdir()
    (source / "code/模型 [v1].py").write_text("pass")
    (source / "tokenizer.json").symlink_to("code/blob")
    (source / "code/blob").write_text("{}")
    for name in ("pytorch_model.bin", "model-q4.gguf", "consolidated.safetensors"):
        (source / name).write_bytes(b"other weights")
    (source / ".cache").mkdir()
    (source / ".cache/x").write_text("x")
    manifest = convert(source, tmp_path / "out", w8a8, jobs=1)
    result = tree(tmp_path / "out")
    assert {"code/模型 [v1].py", "code/blob", "tokenizer.json", "generation_config.json"} <= result.keys()
    assert not (tmp_path / "out/tokenizer.json").is_symlink()
    assert {row.name: row.rule for row in manifest.dropped} == {
        "pytorch_model.bin": "weights in another format",
        "model-q4.gguf": "weights in another format",
        "consolidated.safetensors": "weights that the index does not name",
        ".cache/": "hidden folder",
    }


def test_a_link_that_leads_out_is_not_copied(tmp_path: Path, tiny: Callable[[str], Path], w8a8: Recipe) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny("llama"), source)
    (tmp_path / "secret").write_text("of somebody else")
    (source / "NOTICE").symlink_to("../secret")
    with pytest.raises(InputError, match="links that lead out") as refused:
        convert(source, tmp_path / "out", w8a8, jobs=1)
    assert refused.value.items == (f"NOTICE -> {tmp_path / 'secret'}",)
    assert not (tmp_path / "out").exists()


def test_shards_and_index(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    convert(minimax, tmp_path / "whole", w8a8, jobs=1)
    convert(minimax, tmp_path / "shards", w8a8, jobs=1, max_shard_bytes=1_000_000)
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 5
    whole, parts = tensors(tmp_path / "whole"), tensors(tmp_path / "shards")
    assert whole.keys() == parts.keys() == index["weight_map"].keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    for name, file in index["weight_map"].items():
        if name.endswith(".weight_scale"):
            assert index["weight_map"][name.removesuffix("_scale")] == file, "a weight and its scale lie together"


def test_tied_head_is_ignored_once(tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe) -> None:
    manifest = convert(tiny("qwen2"), tmp_path / "out", w8a8, jobs=1)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert manifest.tied_embeddings
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert "lm_head.weight" not in tensors(tmp_path / "out")


def test_draft_layers_are_kept_and_ignored_or_dropped(
    tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe
) -> None:
    source = tiny("deepseek_v3")
    convert(source, tmp_path / "kept", w8a8, jobs=1)
    before, after = tensors(source), tensors(tmp_path / "kept")
    draft = [name for name in before if name.startswith("model.layers.3.")]
    assert draft
    assert all(torch.equal(before[name], after[name]) for name in draft)
    ignore = json.loads((tmp_path / "kept/config.json").read_text())["quantization_config"]["ignore"]
    assert {"model.layers.3.eh_proj", "model.layers.3.mlp.experts.0.down_proj"} <= set(ignore)
    manifest = convert(source, tmp_path / "dropped", w8a8.model_copy(update={"mtp": "drop"}), jobs=1)
    assert sorted(row.name for row in manifest.dropped) == sorted(draft)
    assert not [name for name in tensors(tmp_path / "dropped") if name.startswith("model.layers.3.")]


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_transformers_loads_it_as_it_is(family: str, tiny: Callable[[str], Path], tmp_path: Path, w8a8: Recipe) -> None:
    """Through compressed-tensors, against transformers' float32 model of the source with weights rounded in numpy."""
    from transformers import AutoModelForCausalLM

    convert(tiny(family), tmp_path / "out", w8a8, jobs=1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    reference = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32).eval()
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            q, scale = ref_int8(module.weight.detach())
            module.weight.data = torch.from_numpy(q * scale)
            module.register_forward_pre_hook(_rounded_as_compressed_tensors_does)
    ids = torch.randint(5, 120, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = loaded(ids).logits, reference(ids).logits
    assert (found - expected).norm() / expected.norm() < 1e-5


def _rounded_as_compressed_tensors_does(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Its dynamic activations use the whole range: absmax / 127.5 and -128 to 127, where engines use absmax / 127."""
    scale = args[0].abs().amax(-1, keepdim=True) / 127.5
    return (torch.clamp(torch.round(args[0] / scale), -128, 127) * scale, *args[1:])


def test_a_rule_keeps_a_layer(minimax: Path, tmp_path: Path, w8a8: Recipe) -> None:
    rule = Rule(match="model.layers.2.*", scheme="keep", reason="test")
    convert(minimax, tmp_path / "out", w8a8.model_copy(update={"rules": (rule,)}), jobs=1)
    ignore = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.2.block_sparse_moe.experts.15.w3" in ignore
    assert "model.layers.2.self_attn.k_proj" in ignore
    result = tensors(tmp_path / "out")
    assert {str(value.dtype) for name, value in result.items() if ".layers.2.self_attn.k_proj" in name} == {
        "torch.bfloat16"
    }
