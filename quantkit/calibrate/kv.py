"""Keys and values as a cache would hold them: observed where every attention module hands them over.

transformers' attention modules call a function by the name in their config, after rotary positions and norms of the
heads: exactly what is cached. Here another name stands there for a while, whose function looks at keys and values and
then calls the one that would have been called. Results stay bit for bit what they are.

Two forms of cache are looked at: INT8 with one scale for each token and head, computed at run time, of which the error
is measured; and FP8 (e4m3) with one static scale for keys and one for values of each layer, which is the largest
magnitude over `FP8_MAX`. Shape suffixes: B batch, G key/value heads, T tokens, D head dimension.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.arithmetic import SCALE_FLOOR, dequantize, quantize_tokens
from quantkit.errors import InputError
from quantkit.spec.calibration import KvSummary

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn (OCP OFP8, table 1)."""

_PREFIX = "quantkit_kv_"


@dataclass
class Moments:
    """Keys or values of one layer.

    Attributes:
        absmax: float32 `[G]`.
        square, error: float64 `[G]`, sums of x^2 and of (x - q(x))^2 with INT8 per token and head.
    """

    absmax: NDArray[np.float32]
    square: NDArray[np.float64]
    error: NDArray[np.float64]

    @classmethod
    def of(cls, x_BGTD: Tensor) -> Moments:
        x = x_BGTD.float()
        difference = dequantize(*quantize_tokens(x)).sub_(x)
        return cls(x.abs().amax((0, 2, 3)).cpu().numpy(), _by_head(x), _by_head(difference))

    def merge(self, other: Moments) -> Moments:
        return Moments(np.maximum(self.absmax, other.absmax), self.square + other.square, self.error + other.error)

    @property
    def relative_error(self) -> float:
        """||x - q(x)|| / ||x||."""
        return float(np.sqrt(self.error.sum() / self.square.sum())) if self.square.sum() > 0 else 0.0

    @property
    def fp8_scale(self) -> float:
        """Static scale as float32."""
        return float(np.maximum(self.absmax.max() / np.float32(FP8_MAX), np.float32(SCALE_FLOOR)))


def _by_head(x_BGTD: Tensor) -> NDArray[np.float64]:
    """Sum of squares by head; float32 within a token, float64 over tokens."""
    rows: NDArray[np.float32] = torch.linalg.vector_norm(x_BGTD, dim=-1).square_().cpu().numpy()
    sums: NDArray[np.float64] = rows.astype(np.float64).sum((0, 2))
    return sums


@dataclass
class KvMoments:
    """Keys and values of one layer."""

    keys: Moments
    values: Moments

    def merge(self, other: KvMoments) -> KvMoments:
        return KvMoments(self.keys.merge(other.keys), self.values.merge(other.values))

    def summary(self, layer: int) -> KvSummary:
        return KvSummary(
            layer=layer,
            key_absmax=tuple(map(float, self.keys.absmax)),
            value_absmax=tuple(map(float, self.values.absmax)),
            key_error=self.keys.relative_error,
            value_error=self.values.relative_error,
            k_scale=self.keys.fp8_scale,
            v_scale=self.values.fp8_scale,
        )


class _Seen(threading.local):
    """What this thread's attention handed over since `take`."""

    last: KvMoments | None = None


_SEEN = _Seen()


def take() -> KvMoments | None:
    """Moments of the pass that just ended in this thread, None where the layer's attention keeps no keys."""
    found, _SEEN.last = _SEEN.last, None
    return found


@contextmanager
def observed(model: nn.Module) -> Iterator[None]:
    """Look at what the model's attention modules hand over inside the block."""
    config: Any = model.config
    before: str = config._attn_implementation
    _register(before)
    config._attn_implementation = _PREFIX + before
    try:
        yield
    finally:
        config._attn_implementation = before


def _register(implementation: str) -> None:
    """A function that observes and then does what `implementation` does, with the same masks."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        found = KvMoments(Moments.of(key), Moments.of(value))
        _SEEN.last = found if _SEEN.last is None else _SEEN.last.merge(found)
        own = sys.modules[type(module).__module__]
        wrapped: Any = (
            own.eager_attention_forward if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        )
        return wrapped(module, query, key, value, mask, **options)

    AttentionInterface.register(_PREFIX + implementation, forward)
    AttentionMaskInterface.register(_PREFIX + implementation, ALL_MASK_ATTENTION_FUNCTIONS[implementation])


def require_finite(found: KvMoments, layer: int) -> KvMoments:
    """Refuse keys or values that are not finite."""
    for name, moments in (("keys", found.keys), ("values", found.values)):
        if not np.isfinite(moments.absmax).all():
            raise InputError(f"{name} of layer {layer} are not finite", "leave kv_cache out of the recipe")
    return found
