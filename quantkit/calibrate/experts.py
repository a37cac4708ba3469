"""Routed experts under observation: a function for transformers' `ALL_EXPERTS_FUNCTIONS`.

transformers keeps the experts of a layer as 3-D parameters that no hook on `nn.Linear` sees. This function computes
what transformers' own functions compute (rows sorted by expert, the module's own gate, routing weights, a sum over the
chosen experts) with one GEMM per expert, and shows every GEMM's input to the layer's observer. The routed output does
not depend on whether anybody observes.

Shape suffixes: T tokens, S = T x top_k routed rows sorted by expert, H hidden, K GEMM input, N GEMM output, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

IMPLEMENTATION = "quantkit_observe"
"""Name under which `register` makes the function known."""

OBSERVER = "_quantkit_observer"
"""Attribute of an experts module that holds its observer; absent when nobody observes."""

LINEAR = "_quantkit_linear"
"""Attribute of an experts module that computes its GEMMs: (projection, expert, x `[S, K]`, weight `[N, K]`, bias) ->
`[S, N]`; absent: `F.linear` does."""


@dataclass(frozen=True)
class Routing:
    """Routed rows in the order of their experts.

    Attributes:
        token: int64 `[S]`, token of each row.
        expert: int64 `[S]`, ascending.
        order: int64 `[S]`, position of each row in the flattened `[T, top_k]`.
        bounds: E + 1 positions; rows bounds[e] to bounds[e + 1] belong to expert e.
    """

    token: Tensor
    expert: Tensor
    order: Tensor
    bounds: list[int]

    @classmethod
    def of(cls, top_k_index: Tensor, experts: int) -> Routing:
        expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
        counts = torch.bincount(expert.clamp(max=experts), minlength=experts + 1)[:experts]
        return cls(order // top_k_index.shape[-1], expert, order, [0, *counts.cumsum(0).tolist()])


class ExpertsObserver(Protocol):
    """What an experts module tells its observer."""

    def expert_rows(self, module: Any, expert: int, projection: str, x_SK: Tensor) -> None:
        """Rows that enter the GEMM `projection` ("in" or "down") of one expert."""

    def expert_inputs(self, module: Any, projection: str, x: Tensor, routing: Routing) -> None:
        """All rows of a projection: tokens `[T, H]` for "in" (rows are `x[routing.token]`), `[S, K]` for "down"."""


def register() -> None:
    """Make `experts_forward` known to transformers as `IMPLEMENTATION`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Output `[T, H]` of the routed experts, in the dtype of `hidden_states`.

    Args:
        self: transformers' experts module.
        hidden_states: `[T, H]`.
        top_k_index, top_k_weights: `[T, top_k]`, chosen experts and their weights.
    """
    observer: ExpertsObserver | None = getattr(self, OBSERVER, None)
    routing = Routing.of(top_k_index, self.num_experts)
    projected = _project(self, "in", hidden_states[routing.token], routing, observer)
    activated = self._apply_gate(projected) if self.has_gate else self.act_fn(projected)
    output_SH = _project(self, "down", activated, routing, observer)
    if observer is not None:
        observer.expert_inputs(self, "in", hidden_states, routing)
        observer.expert_inputs(self, "down", activated, routing)
    if getattr(self, "has_post_expert_norm", False):  # unknown to transformers before 5.20
        output_SH = self.post_expert_norm(output_SH)
    output_SH = output_SH * top_k_weights.reshape(-1)[routing.order].unsqueeze(-1)
    inverse = torch.empty_like(routing.order)
    inverse[routing.order] = torch.arange(len(inverse), device=inverse.device)
    output_TH: Tensor = output_SH[inverse].unflatten(0, top_k_index.shape).sum(dim=1)
    return output_TH.to(hidden_states.dtype)


def is_fused_experts(module: Any) -> bool:
    """Whether transformers' `use_experts_implementation` made this module."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))


def projection_weight(module: Any, projection: str) -> str:
    """Name of the parameter of an experts module that holds a projection ("in" or "down") of all experts."""
    return "down_proj" if projection == "down" else "gate_up_proj" if module.has_gate else "up_proj"


def _project(module: Any, projection: str, x_SK: Tensor, routing: Routing, observer: ExpertsObserver | None) -> Tensor:
    """One GEMM per expert that has rows -> `[S, N]`; rows of no expert of this module stay zero."""
    weight = getattr(module, projection_weight(module, projection))
    width = weight.shape[2] if module.is_transposed else weight.shape[1]
    output_SN = x_SK.new_zeros(x_SK.shape[0], width)
    for expert, start, stop in _occupied(routing):
        rows = x_SK[start:stop]
        if observer is not None:
            observer.expert_rows(module, expert, projection, rows)
        output_SN[start:stop] = _project_one(module, projection, expert, rows)
    return output_SN


def _project_one(module: Any, projection: str, expert: int, x_SK: Tensor) -> Tensor:
    """One GEMM of one expert -> `[S, N]`."""
    name = projection_weight(module, projection)
    weight, bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
    w_NK = weight[expert].T if module.is_transposed else weight[expert]
    linear = getattr(module, LINEAR, _float_linear)
    output: Tensor = linear(projection, expert, x_SK, w_NK, None if bias is None else bias[expert])
    return output


def activated(module: Any, expert: int, x_SH: Tensor) -> Tensor:
    """What enters the down projection of one expert for tokens `[S, H]` -> `[S, I]`."""
    projected = _project_one(module, "in", expert, x_SH)
    output: Tensor = module._apply_gate(projected) if module.has_gate else module.act_fn(projected)
    return output


def _float_linear(_projection: str, _expert: int, x_SK: Tensor, w_NK: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x_SK, w_NK, bias)


def _occupied(routing: Routing) -> Iterator[tuple[int, int, int]]:
    """(expert, start, stop) of every expert that has rows."""
    for expert, (start, stop) in enumerate(zip(routing.bounds, routing.bounds[1:], strict=False)):
        if stop > start:
            yield expert, start, stop
