"""The loading rules of vLLM and SGLang for INT8 W8A8 checkpoints, applied to a folder as the engines would.

Written from their loaders' behaviour and independent of quantkit: only the safetensors package and config.json are
read. Rules, with where they come from:
- compressed-tensors config: one group for all `Linear`, INT8 per channel and dynamic per token (vLLM
  `CompressedTensorsW8A8Int8`, SGLang the same, DCU `slimquant_marlin`); `actorder` null; no KV cache scheme.
- `ignore`: a module is ignored when an entry equals its name, or follows `re:` and matches from its start.
- fused modules (q/k/v, gate/up, MLA q_a/kv_a) must be all quantized or all ignored.
- experts: one scheme for a layer, taken from expert 0.
- F32 `weight_scale [N, 1]` beside I8 `weight [N, K]`, 2-D, one tensor per expert, no zero points.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def violations(folder: Path) -> list[str]:
    """Every rule that the folder breaks, as sentences; empty when engines load it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return ["config.json has no quantization_config"]
    tensors = _tensors(folder)
    found = list(_config_rules(quantization))
    int8 = {name.removesuffix(".weight") for name, (dtype, _) in tensors.items() if dtype == "I8"}
    floating = {
        name.removesuffix(".weight")
        for name, (dtype, shape) in tensors.items()
        if name.endswith(".weight") and len(shape) == 2 and dtype != "I8" and "embed" not in name.split(".")[-2]
    }
    if not any(
        name.endswith("lm_head") or name == "head" for name in floating
    ):  # tied: engines build a head without a tensor
        heads = [entry for entry in quantization.get("ignore", []) if entry.endswith("lm_head")]
        floating.update(heads or ["lm_head"])
    found += _tensor_rules(tensors, int8)
    found += _ignore_rules(quantization.get("ignore", []), int8, floating)
    found += _fused_rules(int8, floating)
    found += _expert_rules(int8, floating)
    return found


def _tensors(folder: Path) -> dict[str, tuple[str, list[int]]]:
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    tensors: dict[str, tuple[str, list[int]]] = {}
    for name in sorted(names):
        with safe_open(folder / name, framework="np") as file:
            for key in file.keys():
                piece = file.get_slice(key)
                tensors[key] = (piece.get_dtype(), list(piece.get_shape()))
    return tensors


def _config_rules(quantization: dict[str, Any]) -> Iterable[str]:
    if quantization.get("quant_method") != "compressed-tensors" or quantization.get("format") != "int-quantized":
        yield "not compressed-tensors int-quantized"
    if quantization.get("kv_cache_scheme"):
        yield "kv_cache_scheme is set"
    groups = quantization.get("config_groups", {})
    if len(groups) != 1:
        yield f"{len(groups)} config groups"
    for group in groups.values():
        if group.get("targets") != ["Linear"]:
            yield f"targets {group.get('targets')}"
        for field, wanted in (("weights", WEIGHTS), ("input_activations", ACTIVATIONS)):
            given = group.get(field) or {}
            yield from (f"{field}.{key} is {given.get(key)}" for key in wanted if given.get(key) != wanted[key])
            if given.get("actorder") is not None or given.get("group_size") is not None:
                yield f"{field} has an order or a group size"


def _tensor_rules(tensors: dict[str, tuple[str, list[int]]], int8: set[str]) -> Iterable[str]:
    for module in sorted(int8):
        shape = tensors[f"{module}.weight"][1]
        scale = tensors.get(f"{module}.weight_scale")
        if len(shape) != 2:
            yield f"{module}.weight is {len(shape)}-dimensional"
        elif scale != ("F32", [shape[0], 1]):
            yield f"{module}.weight_scale is {scale}"
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part in ("weight_zero_point", "input_scale", "weight_g_idx") or (
            part == "weight_scale" and module not in int8
        ):
            yield f"{name} has no business here"


def _ignored(entry: str, module: str) -> bool:
    return bool(re.match(entry[3:], module)) if entry.startswith("re:") else entry == module


def _ignore_rules(ignore: list[str], int8: set[str], floating: set[str]) -> Iterable[str]:
    for module in sorted(floating):
        matches = sum(_ignored(entry, module) for entry in ignore)
        if matches != 1:
            yield f"{module} is not quantized and {matches} ignore entries match it"
    for entry in ignore:
        if any(_ignored(entry, module) for module in int8):
            yield f"ignore entry {entry} matches a quantized module"
        if not any(_ignored(entry, module) for module in floating):
            yield f"ignore entry {entry} matches nothing"


def _fused_rules(int8: set[str], floating: set[str]) -> Iterable[str]:
    for module in sorted(int8):
        parent, _, leaf = module.rpartition(".")
        for group in FUSED:
            if leaf in group:
                yield from (f"{parent}.{other} is not quantized, {leaf} is" for other in group
                            if f"{parent}.{other}" in floating)  # fmt: skip


def _expert_rules(int8: set[str], floating: set[str]) -> Iterable[str]:
    states: defaultdict[str, set[bool]] = defaultdict(set)
    for quantized, modules in ((True, int8), (False, floating)):
        for module in modules:
            if ".experts." in module:
                states[module.split(".experts.")[0]].add(quantized)
    yield from (f"{block}: some experts are quantized and some are not" for block in states if len(states[block]) > 1)
