"""Names of tensors that most families share -> roles, and the tables that several records reuse.

`*` stands for the expert index; a rule that ends in `.**` claims everything below it. Names on disk and names of
transformers' parameters stand side by side: both parse to the same key.
"""

from __future__ import annotations

from collections.abc import Mapping

PARTS = frozenset(
    {
        "weight",
        "bias",
        "weight_scale",
        "weight_scale_inv",
        "weight_packed",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "input_scale",
        "activation_scale",
        "scale",
    }
)
"""Last components of names that say which tensor of a module it is."""

JOINED_PARTS = ("blocks", "scales", "bias", "scale", "scale_inv")
"""Parts that are joined to a bare parameter's name with `_`: `down_proj_blocks`."""

DEFAULT_LAYER_RULES: Mapping[str, str] = {
    # norms
    "input_layernorm": "norm.input",
    "post_attention_layernorm": "norm.pre_mlp",
    # attention
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.qkv_proj": "attn.qkv",
    "self_attn.o_proj": "attn.o",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "self_attn.sinks": "attn.sinks",
    "self_attn.k_scale": "attn.cache_scale",
    "self_attn.v_scale": "attn.cache_scale",
    "self_attn.q_a_proj": "mla.q_a",
    "self_attn.q_a_layernorm": "mla.q_a_norm",
    "self_attn.q_b_proj": "mla.q_b",
    "self_attn.kv_a_proj_with_mqa": "mla.kv_a",
    "self_attn.kv_a_layernorm": "mla.kv_a_norm",
    "self_attn.kv_b_proj": "mla.kv_b",
    "self_attn.rotary_emb.inv_freq": "buffer",
    # dense feed-forward
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "mlp.gate_up_proj": "mlp.gate_up",
    # mixture of experts; a name without the expert index stacks all experts
    "mlp.gate": "router",
    "mlp.gate.e_score_correction_bias": "router.correction",
    "mlp.e_score_correction_bias": "router.correction",
    "mlp.experts.*.gate_proj": "expert.gate",
    "mlp.experts.*.up_proj": "expert.up",
    "mlp.experts.*.down_proj": "expert.down",
    "mlp.experts.gate_up_proj": "expert.gate_up",
    "mlp.experts.down_proj": "expert.down",
    "mlp.shared_experts.gate_proj": "shared.gate",
    "mlp.shared_experts.up_proj": "shared.up",
    "mlp.shared_experts.gate_up_proj": "shared.gate_up",
    "mlp.shared_experts.down_proj": "shared.down",
    "mlp.shared_expert.gate_proj": "shared.gate",
    "mlp.shared_expert.up_proj": "shared.up",
    "mlp.shared_expert.down_proj": "shared.down",
    "mlp.shared_expert_gate": "shared.router",
    # the Mixtral spelling, shared by several families on disk
    "block_sparse_moe.gate": "router",
    "block_sparse_moe.e_score_correction_bias": "router.correction",
    "block_sparse_moe.experts.*.w1": "expert.gate",
    "block_sparse_moe.experts.*.w3": "expert.up",
    "block_sparse_moe.experts.*.w2": "expert.down",
}
"""Name below `layers.N.` -> role."""

DEFAULT_MODEL_RULES: Mapping[str, str] = {
    "embed_tokens": "embed",
    "norm": "norm.final",
    "lm_head": "lm_head",
    "rotary_emb.inv_freq": "buffer",
}
"""Name outside the layers, without its model prefix -> role."""

DEFAULT_OPAQUE_PREFIXES: Mapping[str, str] = {
    "visual": "vision",
    "vision_tower": "vision",
    "vision_model": "vision",
    "multi_modal_projector": "vision",
    "mtp": "mtp",
}
"""First component after the model prefixes that marks a whole subtree as opaque -> role."""

MODEL_PREFIXES = ("model", "language_model", "transformer")
"""Leading components that say nothing: `model.language_model.layers.0` is layer 0."""

DRAFT_LAYER_RULES: Mapping[str, str] = {
    "eh_proj": "mtp",
    "enorm": "mtp",
    "hnorm": "mtp",
    "embed_tokens": "mtp",
    "shared_head.**": "mtp",
}
"""What a multi-token-prediction layer has beside a decoder layer's tensors; it lies beyond num_hidden_layers."""

SANDWICH_NORM_RULES: Mapping[str, str] = {
    "post_attention_layernorm": "norm.post_attn",
    "pre_feedforward_layernorm": "norm.pre_mlp",
    "post_feedforward_layernorm": "norm.post_mlp",
}
"""Norms on both sides of attention and feed-forward: the familiar name then stands *after* attention."""
