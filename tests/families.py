"""Tiny random models of every family, in the names that their checkpoints have on disk.

`make_tiny` builds the model with transformers' own class and saves it with `save_pretrained`, whose conversion mapping
writes the published names (experts one by one, Mixtral's w1/w2/w3, vision-language prefixes). Sizes are small and odd
on purpose: head_dim is not hidden / heads, experts do not divide by 2 or 3 where the router allows it, vocabulary and
widths are no powers of two. Routers' correction biases are float32, everything else bf16 as published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB = 131

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_HEAD: dict[str, Any] = {"head_dim": 16}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_GROUPED: dict[str, Any] = {"n_group": 2, "topk_group": 1, "n_routed_experts": 6, "num_experts_per_tok": 2}
_SHARED: dict[str, Any] = {"n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_INDEXER: dict[str, Any] = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 3}
_LINEAR_ATTENTION: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_QWEN_MOE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}
_QWEN_OUTER: dict[str, Any] = {
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
}


@dataclass(frozen=True)
class Family:
    """How to build one family's tiny model.

    Attributes:
        model_class: name in transformers.
        model_type: of config.json.
        text: config values of the language model, beside `_TEXT`.
        vision: values of the vision tower of a vision-language checkpoint; empty for a text model.
        outer: values beside `text_config` and `vision_config`.
        float32: parameters that published checkpoints hold in float32, beside the correction biases.
        retype: model_type to write instead (Kimi-K2 is DeepSeek-V3 under another name).
        rename: (pattern, replacement) that turn what `save_pretrained` writes into the published names.
        stacked: experts are published as one tensor for all of them, where `save_pretrained` writes one for each.
        draft: form of published draft layers: "layer" (one more decoder layer), "layer, no tables" (the same without
            copies of embedding and head), or "module" (a subtree `mtp.`).
    """

    model_class: str
    model_type: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    float32: str = ""
    retype: str = ""
    rename: tuple[tuple[str, str], ...] = ()
    stacked: bool = False
    draft: str = ""


_DEEPSEEK_V3 = {**_MLA, **_GROUPED, **_SHARED, "num_mtp_layers": 0}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", _HEAD),
    "mistral": Family("MistralForCausalLM", "mistral", {**_HEAD, "sliding_window": 16}),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _HEAD),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", {**_HEAD, "sliding_window": 16, "tie_word_embeddings": True}),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", {**_HEAD, "sliding_window": 16, "tie_word_embeddings": True}),
    "gemma3_vl": Family(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {**_HEAD, "sliding_window": 16, "tie_word_embeddings": True},
        vision={
            "hidden_size": 24,
            "intermediate_size": 20,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        outer={"image_token_index": 3, "boi_token_index": 4, "eoi_token_index": 5, "mm_tokens_per_image": 4},
    ),
    "phi3": Family("Phi3ForCausalLM", "phi3", {}),
    "mixtral": Family("MixtralForCausalLM", "mixtral", {**_HEAD, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**_QWEN_MOE, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", {**_HEAD, **_QWEN_MOE, "mlp_only_layers": [1]}),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {**_HEAD, **_QWEN_MOE, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 56},
        draft="module",
    ),
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {**_HEAD, **_LINEAR_ATTENTION},
        vision=_QWEN_VISION,
        outer=_QWEN_OUTER,
        draft="module",
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        {**_HEAD, **_QWEN_MOE, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 56},
        vision=_QWEN_VISION,
        outer=_QWEN_OUTER,
        stacked=True,
        draft="module",
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {**_MLA, **_GROUPED, **_SHARED, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", "deepseek_v3", _DEEPSEEK_V3, draft="layer"),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM", "deepseek_v32", {**_MLA, **_GROUPED, **_SHARED, **_INDEXER}, draft="layer"
    ),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        {
            **_HEAD,
            **_INDEXER,
            "num_key_value_heads": 1,
            "q_lora_rank": 20,
            "partial_rotary_factor": 0.5,
            "o_groups": 4,
            "o_lora_rank": 10,
            "hc_mult": 3,
            "intermediate_size": 24,  # transformers' other name for the experts' width
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "sliding_window": 16,
            "index_topk": 4,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "num_nextn_predict_layers": 0,
        },
        float32=r"attn_hc|ffn_hc|hc_head|sinks|position_bias",
        rename=(
            (r"^model\.", ""),
            (r"^embed_tokens\.", "embed."),
            (r"^hc_head\.hc_", "hc_head_"),
            (r"\.attn\.norm\.", ".attn.kv_norm."),
        ),
    ),
    "kimi_k2": Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {**_DEEPSEEK_V3, "n_routed_experts": 5, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
        retype="kimi_k2",
    ),
    "glm4": Family("Glm4ForCausalLM", "glm4", {**_HEAD, "attention_bias": True}),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **_HEAD,
            **_SHARED,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
        draft="layer",
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        {**_MLA, **_SHARED, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1},
        draft="layer",
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        {
            **_MLA,
            **_SHARED,
            **_INDEXER,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "indexer_types": ["full", "shared", "full"],
        },
        draft="layer, no tables",
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        {**_HEAD, "intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
        float32=r"\.mlp\.gate\.weight$",
    ),
    "minimax_m3": Family(
        "MiniMaxM3SparseForConditionalGeneration",
        "minimax_m3_vl",
        {
            **_HEAD,
            "intermediate_size": 24,
            "dense_intermediate_size": 40,
            "shared_intermediate_size": 56,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 3,
        },
        vision={"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2},
        outer={"projector_hidden_size": 40, "image_token_index": 3, "video_token_index": 4},
        float32=r"\.mlp\.gate\.weight$",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        {**_HEAD, "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 5, "sliding_window": 16},
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {
            **_HEAD,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 1,
            "tie_word_embeddings": True,
        },
        float32=r"\.mlp\.gate\.weight$",
    ),
    "olmoe": Family("OlmoeForCausalLM", "olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
}

FAMILY_NAMES = tuple(FAMILIES)


def make_tiny(family: str, folder: Path, *, seed: int = 0, mtp: bool = False, **overrides: Any) -> Path:
    """Write the family's tiny checkpoint (config.json, model.safetensors) to `folder` and return it.

    Args:
        seed: of the weights.
        mtp: add a draft layer in the family's published names; ValueError where `Family.draft` is "".
        overrides: config values of the language model.
    """
    row = FAMILIES[family]
    model = _random_model(row, seed, overrides)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    layers = model.config.get_text_config().num_hidden_layers
    tensors = as_published(row, load_file(path), layers, draft=mtp)
    save_file(tensors, path, metadata={"format": "pt"})
    if row.retype:
        config = folder / "config.json"
        config.write_text(config.read_text().replace(f'"{row.model_type}"', f'"{row.retype}"'))
    return folder


def as_published(row: Family, tensors: Mapping[str, Tensor], layers: int, *, draft: bool) -> dict[str, Tensor]:
    """What transformers saves, as it is published: stacked experts where they are, and a draft layer if wanted."""
    found = {_DENSE_MLP.sub(r"\1.mlp.\2", name): tensor for name, tensor in tensors.items()}
    for pattern, replacement in row.rename:
        found = {re.sub(pattern, replacement, name): tensor for name, tensor in found.items()}
    if row.stacked:
        found = _stack_experts(found)
    return found | (_draft(row.draft, found, layers) if draft else {})


_DENSE_MLP = re.compile(r"(layers\.\d+)\.block_sparse_moe\.(\w+_proj|fc\d)\b")
"""transformers before 5.20 saves dense and vision MLPs of MiniMax-M3 under the name of its experts' block."""


def _random_model(row: Family, seed: int, overrides: Mapping[str, Any]) -> Any:
    import transformers

    values = text = {**_TEXT, **row.text, **overrides}
    if row.vision:
        values = {"text_config": text, "vision_config": dict(row.vision), **row.outer}
    config = transformers.AutoConfig.for_model(row.model_type, **values)
    config.get_text_config().dtype = config.dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = getattr(transformers, row.model_class)(config).float()
        for name, tensor in model.state_dict().items():
            _randomize(name, tensor, generator)
    to_published_dtypes(row, model)
    return model.eval()


def to_published_dtypes(row: Family, model: Any) -> None:
    """BF16, but for what published checkpoints hold in float32."""
    keep = re.compile("|".join(filter(None, (row.float32, "e_score_correction_bias"))))
    stored = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not keep.search(name) and name in stored:
            tensor.data = tensor.data.bfloat16()


def _randomize(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Weights of unit gain; norms, biases and other vectors move away from their constant initial value."""
    noise = torch.randn(tensor.shape, generator=generator)
    if not tensor.is_floating_point():  # a table of experts by token id: as many different ones as there are columns
        tensor.copy_(noise.argsort(-1))
    elif tensor.ndim >= 2 and "e_score_correction_bias" not in name:
        tensor.copy_(noise * tensor.shape[-1] ** -0.5)
    else:
        tensor.add_(noise * 0.1)


def _stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`experts.N.{gate,up,down}_proj.weight` -> `experts.gate_up_proj [E, 2I, H]` and `experts.down_proj [E, H, I]`."""
    single = re.compile(r"^(.*\.experts)\.(\d+)\.(\w+)_proj\.weight$")
    found = {match.groups(): tensors[name] for name in tensors if (match := single.match(name))}
    result = {name: tensor for name, tensor in tensors.items() if not single.match(name)}
    for block in {block for block, _, _ in found}:
        ids = sorted({int(expert) for at, expert, _ in found if at == block})
        pairs = [torch.cat([found[block, str(e), part] for part in ("gate", "up")]) for e in ids]
        result[f"{block}.gate_up_proj"] = torch.stack(pairs)
        result[f"{block}.down_proj"] = torch.stack([found[block, str(e), "down"] for e in ids])
    return dict(sorted(result.items()))


def _draft(form: str, tensors: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """A multi-token-prediction layer: a copy of the last full-attention layer with its projection and norms."""
    if not form:
        raise ValueError("this family publishes no draft layers")
    norm = next(value for name, value in tensors.items() if name.endswith("model.norm.weight"))
    embed = next(value for name, value in tensors.items() if name.endswith("embed_tokens.weight"))
    joined = torch.cat((embed[: len(norm)], embed[: len(norm)]), 1)
    last = max(int(found[1]) for name in tensors if (found := re.search(r"layers\.(\d+)\.self_attn\.o_proj", name)))
    body = {
        name.partition(f"layers.{last}.")[2]: value * 0.5
        for name, value in tensors.items()
        if f"layers.{last}." in name and "visual" not in name
    }
    if form == "module":
        rest = {"fc": joined, "norm": norm, "pre_fc_norm_embedding": norm, "pre_fc_norm_hidden": norm}
        return {f"mtp.layers.0.{name}": value for name, value in body.items()} | {
            f"mtp.{name}.weight": value.clone() for name, value in rest.items()
        }
    rest = {"eh_proj": joined, "enorm": norm, "hnorm": norm, "shared_head.norm": norm}
    if form == "layer":
        rest |= {"embed_tokens": embed, "shared_head.head": embed}
    return {f"model.layers.{layers}.{name}": value for name, value in body.items()} | {
        f"model.layers.{layers}.{name}.weight": value.clone() for name, value in rest.items()
    }
