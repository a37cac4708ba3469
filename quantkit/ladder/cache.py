"""Attention that reads its keys and values from an INT8 cache, for any model whose attention asks a cache for them.

transformers' attention modules hand new keys (after the rotation) and values `[B, heads, T, D]` to
`past_key_values.update` and go on with what it returns. The stand-in here returns them as an INT8 cache would give
them back: rounded with one scale for each token and head. Latent attention hands over its latent, which stands for the
values and is rounded with them, and the rotary part of the keys, which is never rounded (`quantkit.plan.cache` counts
the same way).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from quantkit.arithmetic import dequantize, quantize_tokens

ARGUMENT = "past_key_values"


class RoundingCache:
    """Stands where a cache is asked for; keeps nothing.

    Args:
        keys, values: whether they are rounded.
        latent: width of the latent (`kv_lora_rank`), 0 where there is none.
    """

    def __init__(self, *, keys: bool, values: bool, latent: int = 0) -> None:
        self._keys, self._values, self._latent = keys, values, latent

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self._latent and key.shape[1] == 1 and key.shape[-1] == self._latent:
            return _rounded(key) if self._values else key, value
        return _rounded(key) if self._keys else key, _rounded(value) if self._values else value


def _rounded(x_BHTD: Tensor) -> Tensor:
    return dequantize(*quantize_tokens(x_BHTD)).to(x_BHTD.dtype)


@contextmanager
def rounding_attention(layer: nn.Module, cache: RoundingCache) -> Iterator[int]:
    """Put the stand-in into every softmax attention of a decoder layer inside the block -> how many there are.

    Linear attention keeps no keys and values and is left alone.
    """
    modules = [module for module in layer.modules() if _asks_a_cache(module)]

    def give(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, ARGUMENT: cache}

    handles = [module.register_forward_pre_hook(give, with_kwargs=True) for module in modules]
    try:
        yield len(modules)
    finally:
        for handle in handles:
            handle.remove()


def _asks_a_cache(module: nn.Module) -> bool:
    """An attention module: knows its layer's number and takes a cache; recurrent ones have a convolution instead."""
    takes = ARGUMENT in inspect.signature(type(module).forward).parameters
    return takes and hasattr(module, "layer_idx") and hasattr(module, "scaling") and not hasattr(module, "conv1d")
