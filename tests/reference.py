"""W8A8 by the definition, written from the formulas alone: nothing of quantkit is imported here.

`fake_quantized` takes transformers' own float32 model of a BF16 checkpoint, replaces every quantized weight by
`round(w / s) * s` with one scale per output channel, and patches the forward of linear layers and experts so that
their inputs go through `round(x / s) * s` with one scale per token (or per token and group of inputs). Weights are
rounded in numpy, products are formed in float64, so that the reference's own error is far below what is compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

KEPT = re.compile(r"(^|\.)(lm_head|q_a_proj|kv_a_proj_with_mqa|gate|shared_expert_gate|router)$")
"""Modules that W8A8 leaves alone: head, latent projections of MLA, routers."""

Groups = Callable[[str], int]
"""Module (or expert parameter) name -> inputs that share an activation scale, 0 for one scale per token."""


def quantized_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integer values and scales, float64 `[..., N, K]` and `[..., N, 1]`; scales are float32 numbers."""
    w = weight.detach().to(torch.float32).numpy()
    scale = np.abs(w).max(axis=-1, keepdims=True) / np.float32(127)
    scale = np.where(scale == 0, np.float32(1), scale)
    q = np.clip(np.rint(w / scale), -127, 127)
    return torch.from_numpy(q.astype(np.float64)), torch.from_numpy(scale.astype(np.float64))


def w8a8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, group: int = 0) -> Tensor:
    """`[..., K]` -> `[..., N]` in x's dtype.

    Integer sums are exact in float64; the scales are applied in float32 from left to right, as the scheme defines:
    `sum * x_scale * weight_scale + bias`. With another order the last bit differs, and a value that lies next to a
    rounding boundary of the next layer falls on its other side, so that logits could only be compared loosely.
    """
    k = x.shape[-1]
    grouped = x.float().reshape(*x.shape[:-1], -1, group or k)
    s = grouped.abs().amax(-1, keepdim=True) / 127
    s = torch.where(s == 0, 1.0, s)
    rounded = torch.clamp(torch.round(grouped / s), -127, 127).double()
    sums = torch.einsum("...gk,ngk->...gn", rounded, q.reshape(q.shape[0], -1, group or k))
    out = (sums.float() * s).sum(-2) * scale.squeeze(-1).float()
    return (out if bias is None else out + bias.float()).to(x.dtype)


def quantized_by_name(name: str) -> bool:
    """Linear layers of the decoder layers, but for `KEPT`."""
    return ".layers." in name and not KEPT.search(name.removesuffix(".weight"))


def transformers_model(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """The model of the class that config.json names; a model type that transformers knows under another name too."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=dtype, **options).eval()


def greedy(model: Any, ids: Tensor, count: int) -> list[int]:
    """The likeliest `count` tokens after ids `[1, T]`, by transformers' own generation."""
    out = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def fake_quantized(
    folder: Path, groups: Groups = lambda name: 0, quantized: Callable[[str], bool] = quantized_by_name
) -> Any:
    """transformers' float32 model of a checkpoint with W8A8 arithmetic in its layers.

    Args:
        folder: BF16 checkpoint.
        groups: activation groups by module (or expert parameter) name.
        quantized: whether the weight of this name is quantized.
    """
    model = transformers_model(folder, torch.float32, experts_implementation="eager")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and quantized(f"{name}.weight"):
            _patch_linear(module, groups(name))
        elif name.endswith(".experts") and hasattr(module, "down_proj"):
            _patch_experts(module, groups(f"{name}.gate_up_proj"), groups(f"{name}.down_proj"))
    return model


def _patch_linear(module: nn.Linear, group: int) -> None:
    q, scale = quantized_weight(module.weight)
    module.forward = lambda x: w8a8_linear(x, q, scale, module.bias, group)  # type: ignore[method-assign]


def _patch_experts(module: Any, group_in: int, group_down: int) -> None:
    up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    (q_up, s_up), (q_down, s_down) = quantized_weight(up), quantized_weight(down)

    def forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden, dtype=torch.float64)
        for token in range(hidden.shape[0]):
            for slot in range(index.shape[1]):
                e = int(index[token, slot])
                bias_up = self.gate_up_proj_bias[e] if self.has_bias else None
                bias_down = self.down_proj_bias[e] if self.has_bias else None
                inner = self._apply_gate(w8a8_linear(hidden[token, None], q_up[e], s_up[e], bias_up, group_in))
                out = w8a8_linear(inner, q_down[e], s_down[e], bias_down, group_down)[0]
                total[token] += out.double() * weights[token, slot].double()
        return total.to(hidden.dtype)

    module.forward = MethodType(forward, module)
