"""Bytes that attention keeps for the tokens of a sequence, layer by layer and rank by rank.

Formulas per token and layer (bytes of one value: 2 in BF16, 1 in INT8):
- heads: kv_heads x (head_dim + v_head_dim), each rank at least one head, so heads are replicated when tp > kv_heads;
- latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): kv_lora_rank + qk_rope_head_dim, the same on every
  rank;
- an indexer adds one key of index_head_dim, shared by all of its heads, the same on every rank;
- keys that are the values too are kept once;
- compressed attention keeps its last `sliding_window` positions and one entry for each `compress` tokens, with one
  index key where it has an indexer (DeepSeek-V4);
- a window holds its last positions only; linear attention holds a state of fixed size for each sequence.
An INT8 head has a float32 scale for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.archs import Dims, text_config
from quantkit.archs.expected import linear_attention_sizes
from quantkit.archs.structure import Layer, whole_number

SCALE_BYTES = 4
STATE_BYTES = 4  # float32: a recurrent state adds errors up


@dataclass(frozen=True)
class CacheFormat:
    """Dtypes of the cache: "bf16" or "int8"."""

    keys: str = "bf16"
    values: str = "bf16"

    def head(self, size: int, dtype: str) -> int:
        """Bytes of one head of `size` values for one token."""
        return size + SCALE_BYTES if dtype == "int8" else 2 * size


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps on one rank: bytes for each token, of the last `window` tokens (0: of all), and bytes of a
    state for each sequence whatever its length."""

    per_token: int
    window: int
    state: int = 0

    def nbytes(self, tokens: int) -> int:
        """Bytes for one sequence of `tokens`."""
        return self.per_token * (min(tokens, self.window) if self.window else tokens) + self.state


def kv_heads_of_rank(dims: Dims, tp: int) -> int:
    """kv heads that a rank holds; more than kv_heads / tp when heads are replicated."""
    return max(1, dims.kv_heads // tp)


def layer_caches(
    dims: Dims, config: Mapping[str, Any], layers: Sequence[Layer], form: CacheFormat, tp: int = 1
) -> tuple[LayerCache, ...]:
    """The cache of every decoder layer on one rank of `tp`."""
    known: dict[Layer, LayerCache] = {}
    for layer in layers:
        if layer not in known:
            known[layer] = _layer_cache(dims, config, layer, form, tp)
    return tuple(known[layer] for layer in layers)


def _layer_cache(dims: Dims, config: Mapping[str, Any], layer: Layer, form: CacheFormat, tp: int) -> LayerCache:
    if layer.attention == "linear":
        size = linear_attention_sizes(text_config(config))
        heads = max(1, size.value_heads // tp)
        convolution = (2 * size.key_width + size.value_width) * max(0, size.kernel - 1) * 2
        return LayerCache(0, 0, heads * size.key_dim * size.value_dim * STATE_BYTES + convolution // tp)
    index = 2 * dims.index_head_dim if layer.indexed else 0
    if dims.is_mla:
        latent = form.head(dims.kv_lora_rank, form.values) + 2 * dims.qk_rope_head_dim
        return LayerCache(latent + index, layer.window)
    head = form.head(dims.head_dim, form.keys)
    head += form.head(dims.v_head_dim, form.values) if dims.v_head_dim else 0
    if layer.compress:
        recent = head * whole_number(text_config(config), "sliding_window")
        return LayerCache(-(-(head + index) // layer.compress), 0, recent)
    return LayerCache(kv_heads_of_rank(dims, tp) * head + index, layer.window)


def per_token(caches: Sequence[LayerCache]) -> int:
    """Bytes that one more token of a long sequence adds: layers with a window add none."""
    return sum(cache.per_token for cache in caches if not cache.window)


def per_token_at_start(caches: Sequence[LayerCache]) -> int:
    """Bytes that a token adds while no window is full."""
    return sum(cache.per_token for cache in caches)


def sequence_bytes(caches: Sequence[LayerCache], tokens: int) -> int:
    """Bytes of one sequence of `tokens`."""
    return sum(cache.nbytes(tokens) for cache in caches)
