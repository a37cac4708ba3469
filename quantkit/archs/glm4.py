"""GLM-4 dense and GLM-4.5 to 4.7 (MoE): norms on both sides in the dense model, draft layers in the MoE."""

from quantkit.archs.base import Architecture
from quantkit.archs.optional import ALWAYS, MTP_COPIES, NEVER, When
from quantkit.archs.rules import DRAFT_LAYER_RULES

ARCHITECTURE = Architecture(
    name="glm4",
    model_types=("glm4", "glm4_moe"),
    layer_rules={
        **DRAFT_LAYER_RULES,
        # dense: post_attention_layernorm keeps its familiar place before the feed-forward
        "post_self_attn_layernorm": "norm.post_attn",
        "post_mlp_layernorm": "norm.post_mlp",
    },
    optional={
        "norm.post_attn": (When(types=("glm4",)),),
        "norm.post_mlp": (When(types=("glm4",)),),
        "attn.q_norm": (When("use_qk_norm", types=("glm4_moe",)),),
        "attn.k_norm": (When("use_qk_norm", types=("glm4_moe",)),),
        "attn.o:bias": NEVER,
        "router.correction": ALWAYS,
        MTP_COPIES: ALWAYS,  # GLM-4.5; 4.6 leaves them out
    },
)
