"""What a config says about rotary positions, in its older and newer spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.archs import text_config
from quantkit.archs.dims import MAX_SIZE


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scaling in use: `rope_parameters` (newer) or `rope_scaling`; {} when there is none.

    Where layers of different kinds have their own, it is that of layers that attend to everything.
    """
    text = text_config(config)
    found = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if isinstance(found, Mapping) and isinstance(found.get("full_attention"), Mapping):
        found = found["full_attention"]
    return found if isinstance(found, Mapping) else {}


def rope_type(config: Mapping[str, Any]) -> str:
    """ "default", "yarn", "linear", "llama3", ..."""
    parameters = rope_parameters(config)
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def rope_factor(config: Mapping[str, Any]) -> float | None:
    """By how much the scaling stretches the positions; None where the config gives no number for it that could be."""
    factor = rope_parameters(config).get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        return None
    return float(factor) if 0 < factor <= MAX_SIZE else None  # NaN compares as false


def rope_text(config: Mapping[str, Any]) -> str:
    """One phrase: `yarn x 40 from 4,096`."""
    parameters, kind = rope_parameters(config), rope_type(config)
    if kind == "default":
        return "none"
    factor = rope_factor(config)
    original = parameters.get("original_max_position_embeddings")
    text = kind + (f" x {factor:g}" if factor is not None else "")
    return text + (f" from {original:,}" if isinstance(original, int) else "")
