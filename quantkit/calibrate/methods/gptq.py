"""`gptq`: round weights one input channel after the other, and let the channels that follow make up for each error.

GPTQ (arXiv:2210.17323) for INT8 per output channel, with activations rounded per token: the second moments are those
of the rounded inputs, of each expert by itself. Rounding column i of w leaves e = w_i - q_i, of which a share is taken
off the columns behind it, w_j -= e U_ij / U_ii, with U the upper Cholesky factor of the damped H^-1; columns come in
the order of falling second moments, in units of their rows' scales. Scales stay those of the largest magnitudes, or are
searched first (`clip`).

Rounding errors of 8 bits are small against those of the activations unless these were made small before: after `rotate`
and `smooth` GPTQ takes a third off the KL divergence of SmolLM2-135M, without a rotation a tenth. That the second
moments are those of the float model's inputs and not of the quantized model so far makes no difference at 8 bits (the
KL divergences are equal within 5 %), so that no second stream of hidden states is needed.

What was tried and left out: weights that also make up for the errors of their inputs, solved for by a ridge regression
on the outputs of the float model. A weak ridge (0.01 of the mean second moment) lowers the error of most hidden states
and doubles the KL divergence, because few tokens with very large states decide; a strong one (0.3, tokens weighted by
1 / ||h||^2, the error of the residual stream among the targets) takes a tenth off and needs a second stream.

Memory of each job: H twice and its factor in float64, 24 K^2 bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from quantkit.arithmetic import QMAX, channel_scales
from quantkit.calibrate.methods.base import Found, LayerView
from quantkit.calibrate.methods.clip import clipped_scales
from quantkit.calibrate.round_weights import NoFactorError, RoundingOptions, round_layer, rounding_method

_BLOCK = 64
"""Columns whose errors are handed on one by one; those behind the block get them in one product."""

_ATTEMPTS = 3
"""Factorizations, each with ten times the damping of the one before."""


class GptqOptions(RoundingOptions):
    """Options of `gptq`.

    Attributes:
        damping: added to the diagonal of H, as a share of its mean.
        clip: search the scales first.
    """

    name: Literal["gptq"] = "gptq"
    damping: Annotated[float, Field(gt=0, le=1)] = 0.01
    clip: bool = False


def gptq(w_NK: Tensor, h_KK: Tensor, scale_N1: Tensor, damping: float) -> tuple[Tensor, float]:
    """Codes int8 `[N, K]`, and the damping that was needed.

    Args:
        w_NK: float32.
        h_KK: float64, second moments of the inputs.
        scale_N1: float32 scales of the rows.
        damping: to begin with, as a share of the mean of the diagonal.

    Raises:
        NoFactorError: H has no factor even with much damping.
    """
    order = torch.argsort(h_KK.diagonal(), descending=True, stable=True)
    shares_KK, damping = _factor(h_KK[order][:, order], damping)
    rest_KN = (w_NK / scale_N1).T[order].contiguous()
    for start in range(0, len(rest_KN), _BLOCK):
        stop = min(start + _BLOCK, len(rest_KN))
        block_KN, shares = rest_KN[start:stop], shares_KK[start:stop]
        errors_KN = torch.empty_like(block_KN)
        for i, row_N in enumerate(block_KN):
            torch.sub(row_N, row_N.round().clamp_(-QMAX, QMAX), out=errors_KN[i])
            block_KN[i + 1 :].addr_(shares[i, start + i + 1 : stop], errors_KN[i], alpha=-1)
        block_KN -= errors_KN
        rest_KN[stop:] -= shares[:, stop:].T @ errors_KN
    result_KN = torch.empty(rest_KN.shape, dtype=torch.int8, device=w_NK.device)
    result_KN[order] = rest_KN.round_().to(torch.int8)
    return result_KN.T.contiguous(), damping


def _factor(h_KK: Tensor, damping: float) -> tuple[Tensor, float]:
    """U_ij / U_ii of the upper Cholesky factor of H^-1, float32, and the damping that was needed."""
    diagonal = h_KK.diagonal()
    mean = diagonal.mean().clamp_min(torch.finfo(torch.float32).tiny)
    for attempt in range(_ATTEMPTS):
        damped = h_KK + torch.diag(torch.full_like(diagonal, float(mean) * damping))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return (upper / upper.diagonal().unsqueeze(1)).float(), damping
        if attempt + 1 < _ATTEMPTS:
            damping *= 10
    raise NoFactorError(f"no factor with damping {damping:g}")


def _round(w_NK: Tensor, h_KK: Tensor, options: GptqOptions) -> tuple[Tensor, Tensor, str]:
    scale = clipped_scales(w_NK, h_KK) if options.clip else channel_scales(w_NK)
    codes, damping = gptq(w_NK, h_KK, scale, options.damping)
    return codes, scale, "" if damping == options.damping else f"damping {damping:g}"


def search_layer(view: LayerView, options: GptqOptions) -> Found:
    return round_layer(view, options, lambda w, h: _round(w, h, options))


METHOD = rounding_method(GptqOptions, search_layer)
