"""Sizes of one model, read from its config.json once.

Head sizes come from the config, never from hidden / heads unless the config has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.archs.roles import Key
from quantkit.errors import InputError


@dataclass(frozen=True)
class Dims:
    """Sizes of one model by its config. Tensors beat the config: `inspect` compares both.

    Attributes:
        head_dim: of queries and keys; for latent attention the part without position plus the rotary part.
        intermediate: width of a dense feed-forward layer.
        moe_intermediate: width of one routed expert.
        shared_intermediate: width of all shared experts together; they are one MLP.
        query_rows: rows of the query projection that belong to one head: head_dim, or twice as many when the
            projection also yields a gate of the attention's output.
        v_head_dim: of values; 0 where the keys are the values.
        index_heads, index_head_dim: of the indexer of sparse attention.
        output_groups, output_lora_rank: groups of heads that the output projection first reduces, each to this width;
            0 where it is one matrix.
        expert_groups, groups_per_token: groups that the router first chooses among; 0 without.
        streams: parallel residual streams; 0 and 1 are the usual single one.
        tied: the config says that lm_head is the embedding table (`Source.tied` knows what the tensors say).
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
    expert_groups: int = 0
    groups_per_token: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    query_rows: int = 0
    index_heads: int = 0
    index_head_dim: int = 0
    output_groups: int = 0
    output_lora_rank: int = 0
    streams: int = 0
    tied: bool = False
    max_positions: int = 0

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def stream_width(self) -> int:
        """Values of a token that one layer hands to the next."""
        return self.hidden * max(1, self.streams)

    def is_draft(self, key: Key) -> bool:
        """Whether a tensor belongs to a draft (multi-token-prediction) module: beyond the last layer or beside all."""
        return key.role == "mtp" or (key.layer is not None and key.layer >= self.layers)

    def rows_per_unit(self, role: str) -> int:
        """Rows (COL) or columns (ROW) of a role's weight that belong to one unit of its split."""
        return {
            "attn.q": self.query_rows or self.head_dim,
            "attn.k": self.head_dim,
            "attn.v": self.v_head_dim,
            "attn.o_a": self.output_lora_rank,
            "attn.o": self.output_lora_rank or self.v_head_dim,
            "attn.q_norm": self.head_dim,
            "attn.k_norm": self.head_dim,
            "mla.q_b": self.head_dim,
            "mla.kv_b": self.qk_nope_head_dim + self.v_head_dim,
            "indexer.q": self.index_head_dim,
        }.get(role, 1)

    def count(self, unit: str) -> int:
        """Value of a `Role.unit`."""
        return int(getattr(self, unit))

    def contradictions(self) -> list[tuple[str, str]]:
        """(what, remedy) of sizes that no model has together, whatever its tensors are."""
        found = []
        if self.heads % self.kv_heads:
            what = f"{self.heads} query heads cannot share {self.kv_heads} key and value heads"
            found.append((what, "correct num_attention_heads or num_key_value_heads"))
        if self.experts_per_token > self.experts > 0:
            what = f"config.json routes each token to {self.experts_per_token} of {self.experts} experts"
            found.append((what, "correct the number of experts, or of experts per token, in config.json"))
        if self.experts and self.expert_groups:
            if self.experts % self.expert_groups:
                what = f"{self.experts} experts make no {self.expert_groups} equal groups"
                found.append((what, "correct n_group or the number of experts in config.json"))
            if self.groups_per_token > self.expert_groups:
                what = f"config.json routes each token to {self.groups_per_token} of {self.expert_groups} groups"
                found.append((what, "correct topk_group or n_group in config.json"))
        return found

    def require_consistent(self, place: object) -> None:
        """Refuse `contradictions`.

        Args:
            place: the config, as errors name it.

        Raises:
            InputError: all of them, listed.
        """
        if items := [f"{what}: {remedy}" for what, remedy in self.contradictions()]:
            raise InputError(f"{place}: its sizes make no model", "correct config.json", items=items)


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
    "expert_groups": ("n_group",),
    "groups_per_token": ("topk_group",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "index_heads": ("index_n_heads",),
    "index_head_dim": ("index_head_dim",),
    "output_groups": ("o_groups",),
    "output_lora_rank": ("o_lora_rank",),
    "streams": ("hc_mult",),
    "max_positions": ("max_position_embeddings",),
    # not a field of its own: it multiplies moe_intermediate where the config gives no total width
    "shared_experts": ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"),
}
"""Field of `Dims` -> config keys, the first that is present counts; a dot leads into a nested object."""


MAX_SIZE = 2**31 - 1
"""Bound on every size of a config: far above any model, far below what a damaged digit can make of one."""

MAX_COUNTS: Mapping[str, int] = {"layers": 10_000, "experts": 100_000}
"""Tighter bounds on what lists and messages are made for, one by one."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json: `text_config` of a multi-modal model, else all of it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def read_dims(
    config: Mapping[str, Any],
    keys: Mapping[str, tuple[str, ...]],
    *,
    shared_width: str = "",
    query_gate: bool = False,
    keys_are_values: bool = False,
    tied_by_default: bool = False,
) -> Dims:
    """Sizes from a parsed config.json; the keyword arguments are those of `Architecture`.

    Raises:
        InputError: a key that every decoder needs is missing, or a size is no whole number; all of them are listed.
    """
    text = text_config(config)
    widths: dict[str, tuple[str, ...]] = {"head_dim": ("head_dim",), "v_head_dim": ("v_head_dim",)}
    widths["shared_width"] = (*filter(None, (shared_width,)), "shared_expert_intermediate_size")
    found = _sizes(text, {**keys, **widths})
    missing = [keys[name][0] for name in ("layers", "hidden", "vocab", "heads", "kv_heads") if not found[name]]
    if not found["heads"]:
        missing = [name for name in missing if name != keys["kv_heads"][0]]  # it follows from the heads
    if missing:
        raise InputError(
            f"config.json lacks {', '.join(missing)} (or says 0)", "check that this folder holds a decoder model"
        )
    routed_to_none = not found["experts_per_token"] and any(key in text for key in keys["experts_per_token"])
    if found["experts"] and routed_to_none:
        raise InputError(
            f"config.json routes each token to 0 of {found['experts']} experts",
            f"correct {keys['experts_per_token'][0]} in config.json",
        )
    is_mla = found["kv_lora_rank"] > 0
    nope_rope = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
    own_head_dim, own_v_head_dim = found.pop("head_dim"), found.pop("v_head_dim")
    head_dim = nope_rope if is_mla else own_head_dim or found["hidden"] // found["heads"]
    v_head_dim = (own_v_head_dim or head_dim) if is_mla else 0 if keys_are_values else head_dim
    if found["experts"] and not found["moe_intermediate"]:
        found["moe_intermediate"] = found["intermediate"]
    shared_experts = found.pop("shared_experts")
    width = found.pop("shared_width")
    return Dims(
        **found,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        query_rows=head_dim * (2 if query_gate else 1),
        shared_intermediate=width or found["moe_intermediate"] * shared_experts,
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", tied_by_default))),
    )


def _sizes(text: Mapping[str, Any], keys: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """Value of each field, 0 where the config has none; transformers takes no text for a number either."""
    values = {name: (*_value(text, keys[name]), MAX_COUNTS.get(name, MAX_SIZE)) for name in keys}
    wrong = [
        f"{key}: {str(value)[:40]!r} is no whole number from 0 to {most:,}"
        for key, value, most in values.values()
        if not _is_size(value, most)
    ]
    if wrong:
        raise InputError(
            f"config.json gives {len(wrong)} sizes that cannot be",
            "copy or download config.json again, or correct what is listed",
            items=list(dict.fromkeys(wrong)),
        )
    return {name: int(value) for name, (_, value, _) in values.items()}


def _is_size(value: Any, most: int) -> bool:
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    return whole and 0 <= value <= most


def _value(text: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, Any]:
    """The first key that is present, and its value; "" and 0 when none is."""
    for key in keys:
        value: Any = text
        for field in key.split("."):
            value = value.get(field) if isinstance(value, Mapping) else None
        if value is not None:
            return key, value
    return "", 0
