"""ERNIE-4.5-MoE: config keys with a prefix `moe_`, correction biases in a module of their own, draft blocks."""

from quantkit.archs.base import Architecture
from quantkit.archs.optional import ALWAYS

ARCHITECTURE = Architecture(
    name="ernie4_5_moe",
    model_types=("ernie4_5_moe",),
    layer_rules={
        "mlp.moe_statics.e_score_correction_bias": "router.correction",  # on disk
        "mlp.gate.moe_statics.e_score_correction_bias": "router.correction",  # in transformers
    },
    opaque_prefixes={"mtp_block": "mtp", "mtp_emb_norm": "mtp", "mtp_hidden_norm": "mtp", "mtp_linear_proj": "mtp"},
    optional={
        "router.correction": ALWAYS,
    },
    tied_by_default=True,
    float32_parameters=("router.correction", "router"),
    notes="The class keeps its router in float32 and ties the embeddings unless told otherwise.",
)
