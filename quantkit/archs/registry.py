"""Which record serves which `model_type`: a row per family, imported on use."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

from quantkit.archs.base import Architecture, text_config
from quantkit.errors import InputError

FAMILIES: Mapping[str, str] = {
    "llama": "default",
    "mistral": "default",
    "phi3": "default",
    "qwen2": "default",
    "qwen3": "default",
    "mixtral": "default",
    "qwen2_moe": "default",
    "qwen3_moe": "default",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "gemma3_text": "gemma",
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_next",
    "qwen3_5_text": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_next",
    "deepseek_v2": "deepseek_v3",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "deepseek_v4": "deepseek_v4",
    "glm4_moe_lite": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "glm4": "glm4",
    "glm4_moe": "glm4",
    "glm_moe_dsa": "glm_moe_dsa",
    "minimax_m2": "minimax_m2",
    "minimax_m3_vl": "minimax_m3",
    "minimax_m3_vl_text": "minimax_m3",
    "gpt_oss": "gpt_oss",
    "ernie4_5_moe": "ernie4_5_moe",
    "olmoe": "olmoe",
}
"""`model_type` -> module in this package whose `ARCHITECTURE` serves it."""


@cache
def _load(module: str) -> Architecture:
    record = importlib.import_module(f"quantkit.archs.{module}").ARCHITECTURE
    assert isinstance(record, Architecture)
    return record


def known_model_types() -> tuple[str, ...]:
    return tuple(sorted(FAMILIES))


def architecture_for(config: Mapping[str, Any]) -> Architecture:
    """Record for a parsed config.json; a model type without a record of its own gets the default one.

    Raises:
        InputError: the config names no model type.
    """
    for part in (config, text_config(config)):
        module = FAMILIES.get(str(part.get("model_type", "")))
        if module:
            return _load(module)
    if not config.get("model_type"):
        raise InputError("config.json has no model_type", "add the model_type that transformers uses for it")
    return _load("default")
