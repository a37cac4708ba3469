"""The records themselves: registry, published names and configs that no tiny model shows, quirks of configs."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantkit.archs import ROLES, Key, Kind, architecture_for, known_model_types
from quantkit.archs.modeling import build_skeleton, load_config, parameter_value, set_tensor
from quantkit.archs.parser import NameParser
from quantkit.archs.registry import FAMILIES
from quantkit.checkpoint.reader import Source
from quantkit.errors import InputError
from tests.families import make_tiny

Tiny = Callable[[str], Path]


def test_registry_and_records_name_the_same_model_types() -> None:
    records = {row: importlib.import_module(f"quantkit.archs.{row}").ARCHITECTURE for row in set(FAMILIES.values())}
    served = {kind for record in records.values() for kind in record.model_types}
    assert served == {kind for kind, row in FAMILIES.items() if row != "default"}
    assert all(record.name == row for row, record in records.items())
    assert known_model_types() == tuple(sorted(FAMILIES))


def test_rules_name_roles_that_exist() -> None:
    for row in set(FAMILIES.values()):
        record = importlib.import_module(f"quantkit.archs.{row}").ARCHITECTURE
        rules = {**record.layer_rules, **record.model_rules, **record.opaque_prefixes}
        assert {role for role in rules.values() if role not in {**ROLES, **record.roles}} == set()
        assert all(name == role.name for name, role in record.roles.items())


@pytest.mark.parametrize("role", ROLES.values(), ids=lambda role: role.name)
def test_roles_are_consistent(role: Any) -> None:
    if role.fuse:
        assert role.name in ROLES[role.fuse].parts
    for part in role.parts:
        assert ROLES[part].fuse == role.name
        assert ROLES[part].input == role.input
    if role.quantize:
        assert role.kind is Kind.LINEAR
        assert role.input
    if role.fed_by:
        assert role.fed_by in ROLES


@pytest.mark.parametrize(
    ("model_type", "name", "key"),
    [
        ("mixtral", "model.layers.3.block_sparse_moe.experts.7.w2.weight", Key(3, "expert.down", 7)),
        ("mixtral", "model.layers.3.mlp.experts.down_proj", Key(3, "expert.down")),
        ("deepseek_v3", "model.layers.61.eh_proj.weight", Key(61, "mtp", label="eh_proj.weight")),
        ("deepseek_v3", "model.layers.0.self_attn.o_proj.weight_scale_inv", Key(0, "attn.o", part="weight_scale_inv")),
        ("glm4_moe", "model.layers.92.shared_head.head.weight", Key(92, "mtp", label="shared_head.head.weight")),
        ("kimi_k25", "language_model.model.layers.1.mlp.experts.9.up_proj.weight", Key(1, "expert.up", 9)),
        ("kimi_k25", "mm_projector.proj.0.weight", Key(None, "vision", label="mm_projector.proj.0.weight")),
        ("ernie4_5_moe", "model.mtp_linear_proj.0.weight", Key(None, "mtp", label="model.mtp_linear_proj.0.weight")),
        ("minimax_m3_vl", "language_model.model.layers.4.self_attn.index_k_norm.weight", Key(4, "indexer.k_norm")),
        ("minimax_m3_vl", "model.layers.4.self_attn.indexer.k_norm.weight", Key(4, "indexer.k_norm")),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj_blocks", Key(0, "expert.gate_up", None, "blocks")),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_bias", Key(0, "expert.down", None, "bias")),
        ("gpt_oss", "model.layers.0.self_attn.sinks", Key(0, "attn.sinks")),
        ("qwen3_5_moe", "model.visual.merger.norm.bias", Key(None, "vision", label="model.visual.merger.norm.bias")),
        ("qwen3_next", "model.layers.0.linear_attn.A_log", Key(0, "linear_attn", label="linear_attn.A_log")),
        ("qwen3_next", "model.layers.0.linear_attn.out_proj.weight", Key(0, "linear_attn.o")),
        ("gemma2", "model.layers.0.post_attention_layernorm.weight", Key(0, "norm.post_attn")),
        ("glm4", "model.layers.0.post_attention_layernorm.weight", Key(0, "norm.pre_mlp")),
        ("llama", "rotary_emb.inv_freq", Key(None, "buffer", label="rotary_emb.inv_freq")),
        # not this family's: listed as unclassified, never guessed
        ("llama", "model.layers.0.post_feedforward_layernorm.weight", None),
        ("llama", "model.layers.0.self_attn.indexer.wq_b.weight", None),
        ("llama", "audio_tower.layers.0.self_attn.q_proj.weight", None),
        ("qwen3_moe", "model.layers.0.mlp.gate_projection.weight", None),
    ],
)  # fmt: skip
def test_parse(model_type: str, name: str, key: Key | None) -> None:
    assert architecture_for({"model_type": model_type}).parse(name) == key


MINIMAX_M3 = {
    "model_type": "minimax_m3_vl",
    "text_config": {
        "num_hidden_layers": 60,
        "hidden_size": 6144,
        "vocab_size": 200064,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "n_shared_experts": 1,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sparse_attention_config": {"sparse_num_index_heads": 4, "sparse_index_dim": 128},
    },
}
DEEPSEEK_V32 = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
}


def test_sizes_of_published_configs() -> None:
    m3 = architecture_for(MINIMAX_M3).dims(MINIMAX_M3)
    assert (m3.intermediate, m3.moe_intermediate, m3.shared_intermediate) == (12288, 3072, 3072)
    assert (m3.index_heads, m3.index_head_dim, m3.rows_per_unit("indexer.q")) == (4, 128, 128)
    v32 = architecture_for(DEEPSEEK_V32).dims(DEEPSEEK_V32)
    assert (v32.head_dim, v32.v_head_dim, v32.shared_intermediate) == (192, 128, 2048)
    assert v32.heads * v32.rows_per_unit("mla.kv_b") == 32768
    assert not v32.is_draft(Key(60, "attn.o"))
    assert v32.is_draft(Key(61, "attn.o"))
    assert v32.is_draft(Key(None, "mtp", label="mtp.fc.weight"))
    assert not v32.is_draft(Key(None, "lm_head"))


MODELS = Path(__file__).parents[1] / "models"


@pytest.mark.parametrize("name", ["tiny-minimax-m2", "tiny-deepseek-v3"])
def test_trained_models_are_classified(name: str) -> None:
    source = Source(MODELS / name)
    source.require_classified()
    dims = source.dims
    counts = Counter(key.role for key in source.entries)
    moe_layers = len({key.layer for key in source.entries if key.role == "router"})
    assert counts["expert.down"] == moe_layers * dims.experts
    assert counts["attn.o"] == dims.layers
    assert source.get(Key(dims.layers - 1, "expert.gate_up")).shape == (
        dims.experts,
        2 * dims.moe_intermediate,
        dims.hidden,
    )


def test_kimi_k25_is_a_vision_language_model_around_deepseek_v3(tiny: Tiny, tmp_path: Path) -> None:
    text = json.loads((tiny("kimi_k2") / "config.json").read_text())
    config = {"model_type": "kimi_k25", "text_config": text}
    assert architecture_for(config).name == "deepseek_v3"
    assert architecture_for(config).dims(config).experts == 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path).model_type == "deepseek_v3"


def test_missing_sizes_are_listed_together() -> None:
    with pytest.raises(InputError, match="hidden_size, vocab_size"):
        architecture_for({"model_type": "llama"}).dims({"num_hidden_layers": 1, "num_attention_heads": 2})


def test_a_config_without_tie_word_embeddings_means_what_its_class_means(tiny: Tiny) -> None:
    for family, tied in (("gemma2", True), ("ernie4_5_moe", True), ("llama", False), ("qwen3_moe", False)):
        config = json.loads((tiny(family) / "config.json").read_text())
        config.pop("tie_word_embeddings", None)
        assert architecture_for(config).dims(config).tied is tied
        values = {key: value for key, value in config.items() if key != "model_type"}
        assert transformers.AutoConfig.for_model(config["model_type"], **values).tie_word_embeddings is tied


def test_kimi_k2_runs_as_deepseek_v3(tiny: Tiny) -> None:
    config = load_config(tiny("kimi_k2"))
    assert config.model_type == "deepseek_v3"
    assert config.n_routed_experts == 5
    assert type(build_skeleton(config, dtype=torch.float32)).__name__ == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize("digits", ["9" * 10, "9" * 5000, "\u0663"])
def test_what_no_layer_or_expert_can_be_numbered_as_has_no_role(digits: str) -> None:
    arch = architecture_for({"model_type": "mixtral"})
    names = [f"model.layers.{digits}.input_layernorm.weight"]
    names += [f"model.layers.0.block_sparse_moe.experts.{digits}.w1.weight"]
    for name in names:
        assert arch.parse(name) is None
        assert NameParser(arch).parse(name) is None
    assert arch.parse("model.layers.999999999.input_layernorm.weight") is not None


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "kimi_k2", "ernie4_5_moe", "gpt_oss"])
def test_routing_that_a_config_leaves_out_is_that_of_the_class(model_type: str) -> None:
    same_as = {"kimi_k2": "deepseek_v3"}.get(model_type, model_type)
    whole = transformers.AutoConfig.for_model(same_as).to_dict() | {"model_type": model_type}
    arch = architecture_for(whole)
    wanted = arch.dims(whole)
    assert wanted.experts > wanted.experts_per_token > 0
    top_k = {"ernie4_5_moe": "moe_k"}.get(model_type, "num_experts_per_tok")
    silent = {key: value for key, value in whole.items() if key != top_k}
    assert arch.dims(silent) == wanted
    nested = {"model_type": "a_wrapper", "text_config": silent}
    assert arch.dims(nested) == wanted
    for name in ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"):
        silent.pop(name, None)
    assert arch.dims({**silent, top_k: whole[top_k]}) == wanted


def test_an_unknown_model_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model", "num_hidden_layers": 1}')
    with pytest.raises(InputError, match="no_such_model"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("minimax_m2", {"num_experts_per_tok": 6}, "6 of 5 experts"),
        ("minimax_m2", {"num_experts_per_tok": None}, "8 of 5 experts"),  # the class' default
        ("deepseek_v3", {"n_group": 4}, "6 experts make no 4 equal groups"),
        ("deepseek_v3", {"topk_group": 3}, "3 of 2 groups"),
        ("llama", {"num_key_value_heads": 3}, "share 3 key and value heads"),
    ],
)
def test_sizes_that_make_no_model(
    family: str, values: dict[str, int | None], words: str, tiny: Tiny, tmp_path: Path
) -> None:
    config = {**json.loads((tiny(family) / "config.json").read_text()), **values}
    kept = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises(InputError, match="make no model") as caught:
        load_config(tmp_path)
    (item,) = caught.value.items
    assert words in item


def test_tensors_beat_a_config_that_claims_tied_embeddings(tmp_path: Path) -> None:
    """transformers does the same: it ties nothing when both tables are there and differ."""
    folder = make_tiny("llama", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    source = Source(folder)
    assert source.dims.tied
    assert not source.tied
    model = build_skeleton(load_config(folder), dtype=torch.float32)
    for name in model.state_dict():
        set_tensor(model, name, parameter_value(source.arch, source.dims, name, source.get).float())
    ids = torch.arange(20)[None]
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)


def test_a_state_that_layers_hand_on_is_declared(tiny: Tiny) -> None:
    """GLM-5's second layer has no indexer: without the first one's selection it cannot run."""
    source = Source(tiny("glm_moe_dsa"))
    with_indexer = {key.layer for key in source.entries if key.role == "indexer.k"}
    assert with_indexer == {0, 2, 3}  # 3 copies layer 2 as a draft
    ((argument, position),) = source.arch.carried_state.items()
    model = build_skeleton(load_config(source.root), dtype=torch.float32)
    for name in model.state_dict():
        set_tensor(model, name, parameter_value(source.arch, source.dims, name, source.get).float())
    seen: list[tuple[Any, Any]] = []
    for layer in model.model.layers:
        layer.register_forward_hook(
            lambda _, args, kwargs, output: seen.append((kwargs[argument], output[position])), with_kwargs=True
        )
    with torch.no_grad():
        model(torch.arange(24)[None])
    assert seen[0][0] is None
    assert all(after[0] is before[1] for before, after in pairwise(seen))


def test_other_families_hand_on_nothing_but_hidden_states(tiny: Tiny) -> None:
    for family in ("llama", "gemma3", "deepseek_v32", "minimax_m3", "qwen3_next", "gpt_oss"):
        source = Source(tiny(family))
        assert not source.arch.carried_state
        model = build_skeleton(load_config(source.root), dtype=torch.float32)
        for name in model.state_dict():
            if name != "lm_head.weight" or not source.tied:
                value = parameter_value(source.arch, source.dims, name, source.get)
                set_tensor(model, name, value.float())
        outputs: list[Any] = []
        model.model.layers[0].register_forward_hook(lambda _, _args, output, into=outputs: into.append(output))
        with torch.no_grad():
            model.model(torch.arange(8)[None])
        assert isinstance(outputs[0], torch.Tensor), family


def test_a_lost_expert_is_named(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_moe", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.3.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match="lacks experts 3"):
        Source(folder).get(Key(0, "expert.down"))
