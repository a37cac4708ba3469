"""Qwen3-Next and Qwen3.5: linear attention in most layers, gated attention in the rest, (1 + w) norms."""

from quantkit.archs.base import Architecture
from quantkit.archs.optional import ALWAYS

ARCHITECTURE = Architecture(
    name="qwen3_next",
    model_types=("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    layer_rules={
        # Qwen3-Next fuses the projections, Qwen3.5 has them apart; all read the layer's normed input
        "linear_attn.in_proj_qkvz": "linear_attn.qkvz",
        "linear_attn.in_proj_ba": "linear_attn.ba",
        "linear_attn.in_proj_qkv": "linear_attn.qkv",
        "linear_attn.in_proj_z": "linear_attn.z",
        "linear_attn.in_proj_b": "linear_attn.b",
        "linear_attn.in_proj_a": "linear_attn.a",
        "linear_attn.out_proj": "linear_attn.o",
        "linear_attn.**": "linear_attn",
    },
    optional={
        "attn.q_norm": ALWAYS,
        "attn.k_norm": ALWAYS,
        "shared.router": ALWAYS,
    },
    query_gate=True,
    norm_offset=1.0,
    notes="The norm inside linear attention multiplies by its plain weight; it is opaque with the rest of it.",
)
