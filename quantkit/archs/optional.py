"""Tensors that not every model of a record has, and the config keys that say so.

The role table says what a tensor is; this says whether a config promises it, so that a model can be sized before its
weights are there. Names are `role` for a weight and `role:bias` for a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class When(NamedTuple):
    """Condition on a config.

    Attributes:
        key: config key that switches the tensor on; "" is always.
        values: what the key must be; () is anything true.
        default: value of a key that is missing.
        types: only for these values of `model_type`; () is all.
    """

    key: str = ""
    values: tuple[Any, ...] = ()
    default: Any = None
    types: tuple[str, ...] = ()

    def holds(self, text: Mapping[str, Any]) -> bool:
        """Whether the text part of a config.json meets it."""
        if self.types and text.get("model_type") not in self.types:
            return False
        if not self.key:
            return True
        value = text.get(self.key, self.default)
        return value in self.values if self.values else bool(value)


ALWAYS = (When(),)
NEVER: tuple[When, ...] = ()

_ATTENTION_BIAS = (When("attention_bias"), When("use_bias"))
_MLP_BIAS = (When("mlp_bias"), When("use_bias"))

DEFAULT_OPTIONAL: Mapping[str, tuple[When, ...]] = {
    **{f"attn.{part}:bias": _ATTENTION_BIAS for part in ("q", "k", "v", "o")},
    **{f"mla.{part}:bias": _ATTENTION_BIAS for part in ("q_a", "kv_a")},
    **{f"mlp.{part}:bias": _MLP_BIAS for part in ("gate", "up", "down")},
}
"""Name -> conditions of which one must hold; a name that stands nowhere is absent."""

MTP_COPIES = "mtp:copies"
"""Name of a draft layer's own copies of the embedding and of the output head."""
