"""What each decoder layer of a config is: attention over everything, over a window or linear; experts or one MLP.

Configs spell the same fact in several ways; every spelling is read here, once. Without a spelling all layers are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from quantkit.archs.base import Architecture
from quantkit.archs.dims import MAX_COUNTS, MAX_SIZE, Dims, text_config
from quantkit.errors import InputError

_COMPRESSED = "heavily_compressed_attention"
_SELECTED = "compressed_sparse_attention"

_PLAIN_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "linear_attention", _COMPRESSED})

_RATIOS: Mapping[int, str] = {0: "sliding_attention", 4: _SELECTED, 128: _COMPRESSED}
"""DeepSeek-V4's published `compress_ratios`, one for each layer -> transformers' layer type."""


class Layer(NamedTuple):
    """One decoder layer.

    Attributes:
        attention: "full", "window" (the last `window` positions) or "linear" (a state of fixed size).
        window: positions of a windowed layer, else 0.
        indexed: has an indexer, whose keys are cached too.
        moe: has routed experts.
        compress: tokens that share one entry of the cache, beside the last `sliding_window` ones; 0: none do.
        table: chooses experts by token id instead of by scores.
    """

    attention: Literal["full", "window", "linear"]
    window: int
    indexed: bool
    moe: bool
    compress: int = 0
    table: bool = False


def layers_of(arch: Architecture, dims: Dims, config: Mapping[str, Any]) -> tuple[Layer, ...]:
    """The decoder layers of a parsed config.json, draft layers not among them."""
    text = text_config(config)
    types = _attention_types(arch, dims, text)
    window = whole_number(text, "sliding_window")
    found = []
    for index, kind in enumerate(types):
        attention: Literal["full", "window", "linear"] = "full"
        if kind == "linear_attention":
            attention = "linear"
        elif kind in ("sliding_attention", "chunked_attention") and window:
            attention = "window"
        found.append(
            Layer(
                attention,
                window if attention == "window" else 0,
                _is_indexed(dims, text, index),
                bool(dims.experts) and _is_moe(text, index),
                _compression(text, index, kind),
                _has_table(text, index),
            )
        )
    return tuple(found)


def whole_number(text: Mapping[str, Any], key: str, most: int = MAX_SIZE) -> int:
    """A key that counts something; 0 when it is absent, null or false.

    Raises:
        InputError: it is no whole number, or more than `most`.
    """
    value = text.get(key) or 0
    if not isinstance(value, int) or not 0 <= value <= most:
        raise InputError(
            f"config.json: {key} is {str(value)[:40]!r}, not a whole number from 0 to {most:,}",
            "correct it in config.json",
        )
    return value


def draft_layers(config: Mapping[str, Any]) -> int:
    """Multi-token-prediction layers that lie beyond the last one in published checkpoints."""
    text = text_config(config)
    return whole_number(text, "num_nextn_predict_layers", MAX_COUNTS["layers"])


def _attention_types(arch: Architecture, dims: Dims, text: Mapping[str, Any]) -> list[str]:
    listed = text.get("layer_types")
    if isinstance(listed, list) and len(listed) == dims.layers:
        return [str(kind) for kind in listed]
    ratios = _ratios(text)
    if len(ratios) >= dims.layers:  # draft layers have some too
        return [_RATIOS.get(ratio, "full_attention") for ratio in ratios[: dims.layers]]
    if text.get("linear_num_value_heads"):
        interval = whole_number(text, "full_attention_interval") or 4
        return [("full" if (index + 1) % interval == 0 else "linear") + "_attention" for index in range(dims.layers)]
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return ["full_attention"] * dims.layers
    pattern = whole_number(text, "sliding_window_pattern") or arch.window_pattern
    return [
        "full_attention" if pattern and (index + 1) % pattern == 0 else "sliding_attention"
        for index in range(dims.layers)
    ]


def _is_indexed(dims: Dims, text: Mapping[str, Any], index: int) -> bool:
    if not dims.index_head_dim:
        return False
    own, types, ratios = text.get("indexer_types"), text.get("layer_types"), _ratios(text)
    sparse = text.get("sparse_attention_config")
    frequencies = sparse.get("sparse_attention_freq") if isinstance(sparse, Mapping) else None
    if isinstance(own, list) and len(own) > index:
        return bool(own[index] == "full")
    if isinstance(types, list) and len(types) > index:
        return str(types[index]) not in _PLAIN_TYPES
    if isinstance(frequencies, list) and len(frequencies) > index:
        return bool(frequencies[index])
    return _RATIOS.get(ratios[index]) == _SELECTED if len(ratios) > index else True


def _ratios(text: Mapping[str, Any]) -> list[int]:
    """`compress_ratios`; empty without.

    Raises:
        InputError: one of them is no whole number.
    """
    found = text.get("compress_ratios")
    ratios = found if isinstance(found, list) else []
    return [whole_number({"compress_ratios": ratio}, "compress_ratios") for ratio in ratios]


def _compression(text: Mapping[str, Any], index: int, kind: str) -> int:
    """Tokens of a compressed entry, by the config's rate for the layer's type or by its list of all layers."""
    if kind not in (_COMPRESSED, _SELECTED):
        return 0
    rates, ratios = text.get("compress_rates"), _ratios(text)
    if isinstance(rates, Mapping) and kind in rates:
        return whole_number(rates, kind)
    if len(ratios) > index:
        return ratios[index]
    return next(ratio for ratio, name in _RATIOS.items() if name == kind)


def _has_table(text: Mapping[str, Any], index: int) -> bool:
    types = text.get("mlp_layer_types")
    if isinstance(types, list) and len(types) > index:
        return bool(types[index] == "hash_moe")
    return index < whole_number(text, "num_hash_layers")


def _is_moe(text: Mapping[str, Any], index: int) -> bool:
    types, every = text.get("mlp_layer_types"), text.get("moe_layer_freq")
    if isinstance(types, list) and len(types) > index:
        return bool(types[index] != "dense")
    if isinstance(every, list) and len(every) > index:
        return bool(every[index])
    dense = text.get("mlp_only_layers")
    if isinstance(dense, list) and index in dense:
        return False
    first = whole_number(text, "first_k_dense_replace") or whole_number(text, "moe_layer_start_index")
    last = text.get("moe_layer_end_index")
    if index < first or (isinstance(last, int) and 0 <= last < index):
        return False
    frequency = 0 if isinstance(every, list) else whole_number(text, "moe_layer_freq")
    interval = frequency or whole_number(text, "moe_layer_interval") or 1
    step = whole_number(text, "decoder_sparse_step") or 1
    return (index + 1) % step == 0 and (index % interval == 0 if frequency else (index + 1) % interval == 0)


def attention_limits(arch: Architecture, dims: Dims, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Token counts at which attention begins to leave keys out: windows, and what an indexer selects. Ascending."""
    text = text_config(config)
    layers = layers_of(arch, dims, config)
    found = {layer.window for layer in layers if layer.window}
    if dims.index_head_dim:
        entry = max((layer.compress for layer in layers if layer.indexed), default=0) or 1
        found.add(whole_number(text, "index_topk") * entry)
        sparse = text.get("sparse_attention_config")
        nested = sparse if isinstance(sparse, Mapping) else {}
        for keys, section in ((("index_block_size", "index_topk_blocks"), text), (_SPARSE_BLOCKS, nested)):
            found.add(whole_number(section, keys[0]) * whole_number(section, keys[1]))
    return tuple(sorted(limit for limit in found if limit))


_SPARSE_BLOCKS = ("sparse_block_size", "sparse_topk_blocks")
"""In `sparse_attention_config`, as MiniMax-M3 is published."""
