"""`Architecture`: every fact about one family of models, as one frozen record.

The default record covers the common Hugging Face names. A family file adds only what differs, each exception
with its reason. A name that no record classifies parses to None: callers list all of them and stop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.archs.class_defaults import with_class_defaults
from quantkit.archs.dims import DIM_KEYS, Dims, read_dims, text_config
from quantkit.archs.optional import When
from quantkit.archs.roles import ROLES, Key, Kind, Role
from quantkit.archs.rules import (
    DEFAULT_LAYER_RULES,
    DEFAULT_MODEL_RULES,
    DEFAULT_OPAQUE_PREFIXES,
    JOINED_PARTS,
    MODEL_PREFIXES,
    PARTS,
)
from quantkit.errors import InputError

__all__ = ["PARTS", "Architecture", "Dims", "split_name", "text_config"]

_Lookup = Callable[[str], str | None]
_PREFIXES = re.compile(rf"(?:(?:{'|'.join(MODEL_PREFIXES)})\.)*")
_LAYER = re.compile(r"(?:layers|blocks|h)\.([0-9]{1,9})\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.([0-9]{1,9})\.")


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
        query_gate: q_proj also yields a gate of the attention's output: `[query, gate]` rows for each head.
        keys_are_values: one cached tensor serves as both.
        tied_by_default: what a config without `tie_word_embeddings` means (the class's default).
        norm_offset: the norms of the residual stream multiply by weight + offset (Gemma: 1), so scaling such a norm
            by s means weight -> (weight + offset) * s - offset.
        gate_is_linear_in_up: the feed-forward computes f(gate) * up, so that a factor moves from up to down exactly.
        experts_transposed: stacked experts are `[E, K, N]` in memory (gpt-oss).
        gate_up_interleaved: rows of a stacked gate_up alternate gate, up (gpt-oss) instead of halves.
        float32_parameters: roles that the model needs in float32 whatever dtype it is built with.
        carried_state: what a decoder layer hands to the next one beside the hidden states: keyword argument of the
            next layer -> position in this layer's output tuple. Streaming layer by layer must carry it along.
        layer_arguments: keyword arguments of every decoder layer that the model makes of the token ids, not of the
            hidden states. Streaming layer by layer must remember them from the embeddings on.
        optional: tensors that only some configs promise: name -> conditions of which one must hold, beside
            `DEFAULT_OPTIONAL` (a row here wins).
        window_pattern: every n-th layer attends to everything where the config gives a window and no list of layers;
            0: none does.
        class_of: model_type -> the one under which transformers has this very model.
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
    query_gate: bool = False
    keys_are_values: bool = False
    tied_by_default: bool = False
    norm_offset: float = 0.0
    gate_is_linear_in_up: bool = True
    experts_transposed: bool = False
    gate_up_interleaved: bool = False
    float32_parameters: tuple[str, ...] = ("router.correction",)
    carried_state: Mapping[str, int] = field(default_factory=dict)
    layer_arguments: tuple[str, ...] = ()
    optional: Mapping[str, tuple[When, ...]] = field(default_factory=dict)
    window_pattern: int = 0
    class_of: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""

    def role(self, name: str) -> Role:
        """Row of a role for this family.

        Raises:
            InputError: there is none (the names may come from a manifest).
        """
        found = self.roles.get(name) or ROLES.get(name)
        if found is None:
            raise InputError(f"no role is called {name}", choices=sorted({**ROLES, **self.roles}))
        return found

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
        layer, expert, rest = split_name(name)
        if layer is not None:
            return self._match(layer, expert, rest, self.layer_role)
        first = rest.split(".", 1)[0]
        opaque = self.opaque_prefixes.get(first) or DEFAULT_OPAQUE_PREFIXES.get(first)
        return Key(None, opaque, label=name) if opaque else self._match(None, None, rest, self.model_role)

    def _match(self, layer: int | None, expert: int | None, rest: str, lookup: _Lookup) -> Key | None:
        for candidate, part in _spellings(rest):
            role = lookup(candidate)
            if role is not None:
                return self._key(layer, role, expert, part, rest)
        role = _subtree(rest, lookup)  # an exact rule wins over the subtree that it lies in
        return None if role is None else self._key(layer, role, expert, "weight", rest)

    def _key(self, layer: int | None, role: str, expert: int | None, part: str, rest: str) -> Key:
        opaque = self.role(role).kind is Kind.OPAQUE
        return Key(layer, role, expert, "weight" if opaque else part, rest if opaque else "")

    def dims(self, config: Mapping[str, Any]) -> Dims:
        """Sizes from a parsed config.json (the text part of a multi-modal one).

        Experts without their number, their width or the number that a token is routed to have those of transformers'
        config class, since that is what runs; they stay 0 where no class says them.

        Raises:
            InputError: a key that every decoder needs is missing; all of them are listed.
        """
        keys = {**DIM_KEYS, **self.dim_keys}
        found = self._read_dims(config, keys)
        routing = (found.experts, found.experts_per_token, found.moe_intermediate)
        if all(routing) or not any(routing[:2]):
            return found
        wanted = [keys[name] for name in ("experts", "experts_per_token", "moe_intermediate")]
        return self._read_dims(with_class_defaults(config, wanted, self.class_of), keys)

    def _read_dims(self, config: Mapping[str, Any], keys: Mapping[str, tuple[str, ...]]) -> Dims:
        return read_dims(
            config,
            keys,
            shared_width=self.shared_width,
            query_gate=self.query_gate,
            keys_are_values=self.keys_are_values,
            tied_by_default=self.tied_by_default,
        )


def split_name(name: str) -> tuple[int | None, int | None, str]:
    """(layer, expert, rest) of a tensor's name: `rest` is what rules match, with `*` for the expert."""
    bare = name[_PREFIXES.match(name).end() :]  # type: ignore[union-attr]  # it matches the empty string too
    found = _LAYER.match(bare)
    if not found:
        return None, None, bare
    rest = bare[found.end() :]
    expert = _EXPERT.search(rest)
    if not expert:
        return int(found[1]), None, rest
    return int(found[1]), int(expert[1]), rest[: expert.start(1)] + "*" + rest[expert.end(1) :]


def _spellings(rest: str) -> Iterator[tuple[str, str]]:
    """(module or bare parameter, part) that a name can stand for; a rule for the whole name wins."""
    yield rest, "weight"
    stem, _, last = rest.rpartition(".")
    if last in PARTS:
        yield stem, last
    for part in JOINED_PARTS:
        if rest.endswith(f"_{part}"):
            yield rest.removesuffix(f"_{part}"), part


def _subtree(rest: str, lookup: _Lookup) -> str | None:
    """Role of the innermost rule ending in `.**` that claims a name."""
    fields = rest.split(".")
    ends = range(len(fields) - 1, 0, -1)
    return next((role for end in ends if (role := lookup(".".join(fields[:end]) + ".**"))), None)
