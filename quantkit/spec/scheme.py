"""Quantization schemes, as rows of data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scheme:
    """How one GEMM is quantized.

    Attributes:
        name: as written in recipes.
        weight_bits: 8, or 0 for weights kept in the source's dtype.
        group_size: group of K that shares an activation scale; 0 means one scale per token.
        checkpoint_form: whether engines load it from a compressed-tensors checkpoint.
        doc: one line for humans.
    """

    name: str
    weight_bits: int
    group_size: int
    checkpoint_form: bool
    doc: str

    @property
    def is_int8(self) -> bool:
        return self.weight_bits == 8


SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("w8a8", 8, 0, True, "INT8 weights per output channel, INT8 activations per token"),
        Scheme("w8a8-group128", 8, 128, False, "as w8a8, activations per token and group of 128 inputs"),
        Scheme("keep", 0, 0, True, "weights and activations stay in the source's dtype"),
    )
}


def group_size_for(k: int, preferred: int = 128) -> int:
    """The largest divisor of `k` that is at most `preferred`: 128 where it divides, else what does."""
    return next(size for size in range(min(preferred, k), 0, -1) if k % size == 0)


def quantization_config(ignore: list[str], *, kv_cache_fp8: bool = False) -> dict[str, Any]:
    """`quantization_config` of config.json for w8a8 in the compressed-tensors ``int-quantized`` form.

    `ignore` lists every linear that is not quantized by its exact module name. With `kv_cache_fp8` the checkpoint has
    static scales for a cache in FP8, one for keys and one for values of each layer: the only form that vLLM's
    compressed-tensors loader takes right.
    """
    shared = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "actorder": None}
    cache = {**shared, "type": "float", "strategy": "tensor", "dynamic": False, "observer": "minmax"}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": cache if kv_cache_fp8 else None,
        "ignore": ignore,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**shared, "strategy": "channel", "dynamic": False, "observer": "minmax"},
                "input_activations": {**shared, "strategy": "token", "dynamic": True, "observer": None},
                "output_activations": None,
            }
        },
    }
