"""Routed experts from the registry's kernels: nothing is read back to the host, so a graph can hold it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit_runtime.kernels import registry
from quantkit_runtime.kernels.tuning import tuning


@dataclass(frozen=True)
class Projection:
    """One projection of all experts.

    Attributes:
        weight, weight_scale: int8 `[E, N, K]`, float32 `[E, N, 1]`.
        bias: `[E, N]` or None.
        group_size: 0 for a scale per token.
        counted: a context around the product, made with the kernel's name.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    group_size: int
    counted: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()


def serves(family: str) -> bool:
    """Whether this device family has kernels for routed experts."""
    return family != "cpu" and all(registry.has(op, family) for op in ("align", "grouped_gemm", "combine"))


def routed_experts(
    x_TH: Tensor,
    index_Tk: Tensor,
    weights_Tk: Tensor,
    entering: Projection,
    leaving: Projection,
    family: str,
    activate: Callable[[Tensor], Tensor] | None,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Weighted sum over each token's experts -> `[T, H]`; experts outside 0..E-1 are another rank's and add nothing.

    Args:
        activate: `[S, N of entering]` -> `[S, K of leaving]`; None is silu(gate) * up, fused with the quantization.
        finish: applied to each expert's output (a norm).
    """
    tokens, per_token = index_Tk.shape
    experts = entering.weight.shape[0]
    few = all(
        registry.has("expert_gemm", family, rows=tokens, k=one.weight.shape[-1], group=one.group_size)
        for one in (entering, leaving)
    )
    if few:
        index_Tk = index_Tk.to(torch.int64).contiguous()  # here, so that quantizing lies between this and its reader
        routing: object = index_Tk
        kernel = registry.find("expert_gemm", family, rows=tokens)
    else:
        block = tuning().expert_block(tokens * per_token, experts)
        routing = registry.find("align", family).run(index_Tk, experts, block)
        kernel = registry.find("grouped_gemm", family)

    def multiply(quantized: tuple[Tensor, Tensor], projection: Projection, share: int) -> Tensor:
        q, scale = quantized
        weight, weight_scale, bias = projection.weight, projection.weight_scale, projection.bias
        with projection.counted(kernel.name):
            out = kernel.run(q, scale, weight, weight_scale, bias, routing, share, x_TH.dtype)
        assert isinstance(out, Tensor)
        return out

    quantize = registry.find("quantize", family).run
    inner = multiply(quantize(x_TH, entering.group_size), entering, per_token)
    if activate is None:
        quantized = registry.find("silu_mul_quantize", family).run(inner, leaving.group_size)
    else:
        quantized = quantize(activate(inner), leaving.group_size)
    out = multiply(quantized, leaving, 1)
    total = registry.find("combine", family).run(out if finish is None else finish(out), weights_Tk, index_Tk, experts)
    assert isinstance(total, Tensor)
    return total
