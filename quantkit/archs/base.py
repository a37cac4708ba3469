"""`Architecture`: every fact about one family of models, as one frozen record; `Dims`: the sizes of one model.

The default record covers the common Hugging Face names. A family file adds only what differs, each exception
with its reason. A name that no record classifies parses to None: callers list all of them and stop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.archs.roles import ROLES, Key, Role
from quantkit.errors import InputError

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
        "scale",
    }
)
"""Last components of names that say which tensor of a module it is."""

_JOINED_PARTS = ("blocks", "scales", "bias", "scale")  # `down_proj_blocks`: joined to a bare parameter's name

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")

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
    # mixture of experts; `*` stands for the expert index, a name without it stacks all experts
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
"""First component after `model.` / `language_model.` that marks a whole subtree as opaque -> role."""

_MODEL_PREFIXES = ("model", "language_model")


@dataclass(frozen=True)
class Dims:
    """Sizes of one model, read from its config once. Head sizes come from the config, never hidden / heads
    unless the config has none. Tensors beat the config: `inspect` compares both.

    Attributes:
        q_rows, k_rows, v_rows: output rows of one head's query, of one kv head's key and value.
        o_cols: input columns of the output projection that belong to one head.
    """

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    intermediate: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    experts: int = 0
    experts_per_token: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    tied: bool = False
    max_positions: int = 0

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    def rows_per_unit(self, role: str) -> int:
        """Rows (COL) or columns (ROW) of a role's weight that belong to one unit of its split."""
        return {
            "attn.q": self.head_dim,
            "attn.k": self.head_dim,
            "attn.v": self.v_head_dim,
            "attn.o": self.v_head_dim,
            "attn.q_norm": self.head_dim,
            "attn.k_norm": self.head_dim,
            "mla.q_b": self.head_dim,
            "mla.kv_b": self.qk_nope_head_dim + self.v_head_dim,
        }.get(role, 1)

    def count(self, unit: str) -> int:
        """Value of a `Role.unit`."""
        return int(getattr(self, unit))


DIM_KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "vocab": ("vocab_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "intermediate": ("intermediate_size",),
    "moe_intermediate": ("moe_intermediate_size",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_k", "top_k_experts"),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "max_positions": ("max_position_embeddings",),
}
"""Field of `Dims` -> config keys, the first that is present counts."""


@dataclass(frozen=True)
class Architecture:
    """Every fact about one family.

    Attributes:
        name: of the record.
        model_types: values of `model_type` in config.json that it serves.
        layer_rules, model_rules: names -> roles, beside the defaults (a row here wins).
        opaque_prefixes: subtrees kept whole, beside the defaults.
        roles: rows that replace those of `ROLES` for this family, each with its reason beside it.
        dim_keys: config keys beside `DIM_KEYS` (a row here wins).
        shared_width: config key of the shared experts' total width; "" when it is moe_intermediate x the number of
            shared experts.
        experts_transposed: stacked experts are `[E, K, N]` in memory (gpt-oss).
        gate_up_interleaved: rows of a stacked gate_up alternate gate, up (gpt-oss) instead of halves.
        float32_parameters: roles that the model needs in float32 whatever dtype it is built with.
        notes: why each exception above exists.
    """

    name: str
    model_types: tuple[str, ...] = ()
    layer_rules: Mapping[str, str] = field(default_factory=dict)
    model_rules: Mapping[str, str] = field(default_factory=dict)
    opaque_prefixes: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)
    dim_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shared_width: str = ""
    experts_transposed: bool = False
    gate_up_interleaved: bool = False
    float32_parameters: tuple[str, ...] = ("router.correction",)
    notes: str = ""

    def role(self, name: str) -> Role:
        """Row of a role for this family."""
        return self.roles.get(name) or ROLES[name]

    def layer_role(self, rest: str) -> str | None:
        return self.layer_rules.get(rest) or DEFAULT_LAYER_RULES.get(rest)

    def model_role(self, rest: str) -> str | None:
        return self.model_rules.get(rest) or DEFAULT_MODEL_RULES.get(rest)

    def parse(self, name: str) -> Key | None:
        """Key of a tensor or parameter name, None when no rule knows it.

        Names on disk and names of transformers' parameters go through the same rules:
        `model.layers.3.block_sparse_moe.experts.7.w2.weight` -> (3, "expert.down", 7, "weight") and
        `model.layers.3.mlp.experts.down_proj` -> (3, "expert.down", None, "weight").
        """
        bare = _strip_prefixes(name)
        opaque = {**DEFAULT_OPAQUE_PREFIXES, **self.opaque_prefixes}.get(bare.split(".", 1)[0])
        if opaque:
            return Key(None, opaque, label=name)
        found = _LAYER.match(bare)
        if not found:
            return self._match(None, None, bare, self.model_role)
        layer, rest = int(found[1]), bare[found.end() :]
        expert = _EXPERT.search(rest)
        if expert:
            rest = rest[: expert.start(1)] + "*" + rest[expert.end(1) :]
        return self._match(layer, int(expert[1]) if expert else None, rest, self.layer_role)

    def _match(self, layer: int | None, expert: int | None, rest: str, lookup: Any) -> Key | None:
        stem, _, last = rest.rpartition(".")
        candidates = [(rest, "weight")]
        if last in PARTS:
            candidates.append((stem, last))
        candidates += [(rest.removesuffix(f"_{part}"), part) for part in _JOINED_PARTS if rest.endswith(f"_{part}")]
        for candidate, part in candidates:
            role = lookup(candidate)
            if role is None:
                role = self._opaque_subtree(candidate, lookup)
            if role is not None:
                opaque = self.role(role).kind == "opaque"
                return Key(layer, role, expert, "weight" if opaque else part, rest if opaque else "")
        return None

    @staticmethod
    def _opaque_subtree(rest: str, lookup: Any) -> str | None:
        """A rule that ends in `.**` (`self_attn.indexer.**`) claims everything below it."""
        fields = rest.split(".")
        for end in range(len(fields) - 1, 0, -1):
            role: str | None = lookup(".".join(fields[:end]) + ".**")
            if role:
                return role
        return None

    def dims(self, config: Mapping[str, Any]) -> Dims:
        """Sizes from a parsed config.json (the text part of a multi-modal one).

        Raises:
            InputError: a key that every decoder needs is missing; all of them are listed.
        """
        text = text_config(config)
        keys = {**DIM_KEYS, **self.dim_keys}

        def value(name: str) -> Any:
            return next((text[key] for key in keys.get(name, ()) if text.get(key) is not None), 0)

        missing = [keys[name][0] for name in ("layers", "hidden", "vocab", "heads") if not value(name)]
        if missing:
            raise InputError(f"config.json lacks {', '.join(missing)}", "check that this folder holds a decoder model")
        found = {name: int(value(name)) for name in keys if name in Dims.__dataclass_fields__}
        nope_rope = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
        is_mla = found["kv_lora_rank"] > 0
        head_dim = nope_rope if is_mla else int(text.get("head_dim") or found["hidden"] // found["heads"])
        v_head_dim = int(text.get("v_head_dim") or head_dim) if is_mla else head_dim
        if found["experts"] and not found["moe_intermediate"]:
            found["moe_intermediate"] = found["intermediate"]
        shared = int(text.get(self.shared_width) or 0) if self.shared_width else 0
        shared = shared or found["moe_intermediate"] * int(text.get("n_shared_experts") or 0)
        shared = shared or int(text.get("shared_expert_intermediate_size") or 0)
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        return Dims(**found, head_dim=head_dim, v_head_dim=v_head_dim, shared_intermediate=shared, tied=bool(tied))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json: `text_config` of a multi-modal model, else all of it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _strip_prefixes(name: str) -> str:
    fields = name.split(".")
    start = 0
    while start < len(fields) - 1 and fields[start] in _MODEL_PREFIXES:
        start += 1
    return ".".join(fields[start:])
