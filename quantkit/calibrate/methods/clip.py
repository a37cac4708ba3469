"""`clip`: a smaller scale for weight rows whose largest values cost more than they bring, by weighted error.

A row's scale is its largest magnitude / 127. Scales below it clip a few values and make every other step finer. The
candidate with the least error of the output is taken, (w - q) H (w - q)^T with H the second moments of the rounded
inputs, row by row. At 8 bits little is left to gain: most rows keep their scale. It pays where a row has a lone outlier
against channels that hardly ever carry anything. Alone it rounds to nearest; `gptq` has it as an option.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from quantkit.arithmetic import channel_scales, dequantize, quantize
from quantkit.calibrate.methods.base import Found, LayerView
from quantkit.calibrate.round_weights import RoundingOptions, round_layer, rounding_method

RATIOS = (0.98, 0.96, 0.94, 0.92, 0.9, 0.87, 0.84, 0.8)
"""Candidates, as shares of the scale of the largest magnitude."""


class ClipOptions(RoundingOptions):
    """Options of `clip`."""

    name: Literal["clip"] = "clip"
    ratios: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = RATIOS


def clipped_scales(w_NK: Tensor, h_KK: Tensor, ratios: tuple[float, ...] = RATIOS) -> Tensor:
    """Scale of every row, float32 `[N, 1]`: that of its largest magnitude, or the share of it with the least error.

    Args:
        w_NK: float32.
        h_KK: float64, second moments of the inputs.
    """
    best = full = channel_scales(w_NK)
    least = row_errors(w_NK, dequantize(quantize(w_NK, full), full), h_KK)
    for ratio in ratios:
        scale = full * ratio
        error = row_errors(w_NK, dequantize(quantize(w_NK, scale), scale), h_KK)
        better = error < least
        best, least = best.where(~better.unsqueeze(1), scale), least.where(~better, error)
    return best


def row_errors(w_NK: Tensor, rounded_NK: Tensor, h_KK: Tensor) -> Tensor:
    """(w - q) H (w - q)^T of every row, float64 `[N]`."""
    difference = (w_NK - rounded_NK).double()
    return ((difference @ h_KK) * difference).sum(1)


def _round(w_NK: Tensor, h_KK: Tensor, options: ClipOptions) -> tuple[Tensor, Tensor, str]:
    scale = clipped_scales(w_NK, h_KK, options.ratios)
    clipped = int((scale < channel_scales(w_NK)).sum())
    return quantize(w_NK, scale), scale, f"{clipped} of {len(scale)} rows clipped"


def search_layer(view: LayerView, options: ClipOptions) -> Found:
    return round_layer(view, options, lambda w, h: _round(w, h, options))


METHOD = rounding_method(ClipOptions, search_layer)
