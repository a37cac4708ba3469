"""Routed experts in INT8, through transformers' own extension point.

transformers keeps the experts of a layer as 3-D parameters and dispatches their forward through
`ALL_EXPERTS_FUNCTIONS`. Our function is registered there; it uses the module's own gate, activation, biases and
post-expert norm, so clamps and interleaving of each architecture stay right. Where a projection is stored in INT8,
`Int8Experts` stands in place of its parameter; a projection that the recipe kept runs as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantkit_runtime.errors import UnsupportedDtype
from quantkit_runtime.layers import Int8Experts

NAME = "quantkit_int8"
"""Key in `ALL_EXPERTS_FUNCTIONS`."""

FLOAT_IMPLEMENTATION = "grouped_mm"
"""What transformers runs by default; layers without any INT8 expert use it."""


def register() -> None:
    """Make `experts_implementation="quantkit_int8"` known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def install(module: nn.Module, parameter: str, projection: Int8Experts) -> None:
    """Put `projection` in the place of a 3-D parameter of an experts module.

    Raises:
        UnsupportedDtype: transformers does not dispatch this module's forward, so INT8 weights cannot run in it.
    """
    if not hasattr(module, "is_transposed"):
        raise UnsupportedDtype(
            f"{type(module).__name__} of transformers has no exchangeable experts function",
            "convert with a rule that keeps the experts of this model, or use a newer transformers",
        )
    del module._parameters[parameter]
    module.add_module(parameter, projection)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts of one layer.

    Args:
        self: transformers' experts module.
        hidden_states: `[T, H]`.
        top_k_index: `[T, k]`; an index outside the experts is a place that another rank computes.
        top_k_weights: `[T, k]`.

    Returns:
        `[T, H]`, the weighted sum over each token's experts.
    """
    entering = "gate_up_proj" if self.has_gate else "up_proj"
    if not any(isinstance(getattr(self, name), Int8Experts) for name in (entering, "down_proj")):
        return _transformers_forward(self, hidden_states, top_k_index, top_k_weights)
    has_norm = getattr(self, "has_post_expert_norm", False)  # not in older versions of transformers
    tokens, k = top_k_index.shape
    out = hidden_states.new_zeros((tokens * k, hidden_states.shape[-1]))
    flat = top_k_index.reshape(-1)
    for expert in torch.unique(flat).tolist():
        if not 0 <= expert < self.num_experts:
            continue
        slots = (flat == expert).nonzero().squeeze(1)
        inner = _project(self, entering, hidden_states[slots // k], expert)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        result = _project(self, "down_proj", inner, expert)
        out[slots] = self.post_expert_norm(result) if has_norm else result
    weighted = out.view(tokens, k, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden_states.dtype)


def _project(module: Any, name: str, x_TK: Tensor, expert: int) -> Tensor:
    projection = getattr(module, name)
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if isinstance(projection, Int8Experts):
        out = projection(x_TK, expert, bias)
        assert isinstance(out, Tensor)
        return out
    weight = projection[expert]
    return functional.linear(x_TK, weight.T if module.is_transposed else weight, bias)


def _transformers_forward(module: Any, *args: Tensor) -> Tensor:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    out = ALL_EXPERTS_FUNCTIONS[FLOAT_IMPLEMENTATION](module, *args)
    assert isinstance(out, Tensor)
    return out
