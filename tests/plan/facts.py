"""Configs of published models, written down from their facts: sizes that `plan` must reproduce without weights."""

from typing import Any

_MLA: dict[str, Any] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_M3_LAYERS = [0, 0, 0] + [1] * 57


def _config(
    model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, vocab: int, **rest: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        **rest,
    }


def _experts(key: str, count: int, top: int, width_key: str, width: int, **rest: Any) -> dict[str, Any]:
    return {key: count, "num_experts_per_tok": top, width_key: width, **rest}


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _config(
        "qwen3_moe", 48, 2048, 32, 4, 151936,
        head_dim=128, intermediate_size=6144, max_position_embeddings=40960,
        **_experts("num_experts", 128, 8, "moe_intermediate_size", 768),
    ),
    "Qwen3-235B-A22B": _config(
        "qwen3_moe", 94, 4096, 64, 4, 151936,
        head_dim=128, intermediate_size=12288, max_position_embeddings=40960,
        **_experts("num_experts", 128, 8, "moe_intermediate_size", 1536),
    ),
    "MiniMax-M2.7": _config(
        "minimax_m2", 62, 3072, 48, 8, 200064,
        head_dim=128, max_position_embeddings=204800, use_qk_norm=True, quantization_config=_FP8, num_mtp_modules=3,
        **_experts("num_local_experts", 256, 8, "intermediate_size", 1536),
    ),
    "MiniMax-M3": {
        "model_type": "minimax_m3_vl",
        "text_config": _config(
            "minimax_m3_vl_text", 60, 6144, 64, 4, 200064,
            head_dim=128, dense_intermediate_size=12288, shared_intermediate_size=3072, moe_layer_freq=_M3_LAYERS,
            max_position_embeddings=524288,
            sparse_attention_config={
                "sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_attention_freq": _M3_LAYERS,
            },
            **_experts("num_local_experts", 128, 4, "intermediate_size", 3072),
        ),
        "vision_config": {},
    },
    "DeepSeek-V3.2": _config(
        "deepseek_v32", 61, 7168, 128, 128, 129280,
        intermediate_size=18432, first_k_dense_replace=3, index_n_heads=64, index_head_dim=128,
        num_nextn_predict_layers=1, topk_method="noaux_tc", quantization_config=_FP8, max_position_embeddings=163840,
        rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        **_MLA, **_experts("n_routed_experts", 256, 8, "moe_intermediate_size", 2048, n_shared_experts=1),
    ),
    "Kimi-K2": _config(
        "kimi_k2", 61, 7168, 64, 64, 163840,
        intermediate_size=18432, first_k_dense_replace=1, topk_method="noaux_tc", quantization_config=_FP8,
        num_nextn_predict_layers=0, max_position_embeddings=131072,
        **_MLA, **_experts("n_routed_experts", 384, 8, "moe_intermediate_size", 2048, n_shared_experts=1),
    ),
    "GLM-4.5": _config(
        "glm4_moe", 92, 5120, 96, 8, 151552,
        head_dim=128, intermediate_size=12288, first_k_dense_replace=3, attention_bias=True, use_qk_norm=True,
        num_nextn_predict_layers=1, max_position_embeddings=131072,
        **_experts("n_routed_experts", 160, 8, "moe_intermediate_size", 1536, n_shared_experts=1),
    ),
    "GLM-5": _config(
        "glm_moe_dsa", 78, 6144, 64, 64, 154880,
        intermediate_size=12288, first_k_dense_replace=3, index_n_heads=32, index_head_dim=128, index_topk=2048,
        num_nextn_predict_layers=1, topk_method="noaux_tc", scoring_func="sigmoid", max_position_embeddings=202752,
        **(_MLA | {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256}),
        **_experts("n_routed_experts", 256, 8, "moe_intermediate_size", 2048, n_shared_experts=1),
    ),
    "Qwen3.5-397B-A17B": {
        "model_type": "qwen3_5_moe",
        "text_config": _config(
            "qwen3_5_moe_text", 60, 4096, 32, 2, 248320,
            head_dim=256, full_attention_interval=4, max_position_embeddings=262144, mtp_num_hidden_layers=1,
            linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
            linear_num_value_heads=64, shared_expert_intermediate_size=1024,
            **_experts("num_experts", 512, 10, "moe_intermediate_size", 1024),
        ),
        "vision_config": {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
            "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        "tie_word_embeddings": False,
    },
    "gpt-oss-120b": _config(
        "gpt_oss", 36, 2880, 64, 8, 201088,
        head_dim=64, sliding_window=128, attention_bias=True, max_position_embeddings=131072,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        },
        **_experts("num_local_experts", 128, 4, "intermediate_size", 2880),
    ),
    "Mixtral-8x7B": _config(
        "mixtral", 32, 4096, 32, 8, 32000,
        max_position_embeddings=32768, **_experts("num_local_experts", 8, 2, "intermediate_size", 14336),
    ),
    "Llama-3-70B": _config("llama", 80, 8192, 64, 8, 128256, intermediate_size=28672, max_position_embeddings=8192),
}  # fmt: skip
"""Name -> config. M3's index sizes stand in a nested object, as published."""
