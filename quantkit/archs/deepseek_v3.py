"""DeepSeek-V2/V3/V3.2, Kimi-K2, GLM-4.7-Flash: latent attention, grouped router, shared experts, first layers dense."""

from quantkit.archs.base import Architecture
from quantkit.archs.optional import ALWAYS, MTP_COPIES, When
from quantkit.archs.rules import DRAFT_LAYER_RULES

ARCHITECTURE = Architecture(
    name="deepseek_v3",
    model_types=("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite"),
    layer_rules={
        **DRAFT_LAYER_RULES,
        # V3.2's indexer scores with all heads at once, so every rank needs all of it
        "self_attn.indexer.wq_b": "indexer.q",
        "self_attn.indexer.wk": "indexer.k",
        "self_attn.indexer.k_norm": "indexer.k_norm",
        "self_attn.indexer.weights_proj": "indexer.weights",
    },
    optional={
        "router.correction": (When("topk_method", ("noaux_tc",), default="noaux_tc"),),  # V2 has none
        "indexer.k_norm:bias": ALWAYS,
        "indexer.weights": ALWAYS,
        MTP_COPIES: ALWAYS,
    },
    opaque_prefixes={"mm_projector": "vision"},  # Kimi-K2.5
    class_of={"kimi_k2": "deepseek_v3"},
    notes="Kimi-K2 is DeepSeek-V3 with other sizes; transformers has no class under its name.",
)
