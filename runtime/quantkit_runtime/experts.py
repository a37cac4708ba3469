"""Routed experts in INT8, through transformers' own extension point, on one rank or spread over many.

transformers keeps the experts of a layer as 3-D parameters and dispatches their forward through
`ALL_EXPERTS_FUNCTIONS`. Our function is registered there; it uses the module's own gate, activation, biases and
post-expert norm, so clamps and interleaving of each architecture stay right. Where a projection is stored in INT8,
`Int8Experts` stands in place of its parameter; a projection that the recipe kept runs as before.

Over a mesh, each rank computes the experts that it holds. Either every rank of a stage sees all tokens and the results
are added, or tokens travel to their experts and back (all-to-all); see `Placement`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantkit_runtime.errors import UnsupportedDtype
from quantkit_runtime.kernels import routed
from quantkit_runtime.layers import Int8Experts, places_of
from quantkit_runtime.parallel import Ranks

NAME = "quantkit_int8"
"""Key in `ALL_EXPERTS_FUNCTIONS`."""

FLOAT_IMPLEMENTATION = "grouped_mm"
"""What transformers runs by default; layers without any INT8 expert use it."""


def register() -> None:
    """Make `experts_implementation="quantkit_int8"` known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def install(module: nn.Module, parameter: str, projection: Int8Experts) -> None:
    """Put `projection` in the place of a 3-D parameter of an experts module."""
    require_exchangeable(module)
    del module._parameters[parameter]
    module.add_module(parameter, projection)


def require_exchangeable(module: nn.Module) -> None:
    """Refuse a module whose forward transformers does not dispatch.

    Raises:
        UnsupportedDtype: INT8 weights, or the experts of one rank, cannot run in it.
    """
    if not hasattr(module, "is_transposed"):
        raise UnsupportedDtype(
            f"{type(module).__name__} of transformers has no exchangeable experts function",
            "convert with a rule that keeps the experts of this model, or use a newer transformers",
        )


class Placement:
    """Which rank computes which expert of a layer, how tokens get there, and how many came.

    An expert that several ranks hold is computed by one of them, chosen by the token's number.

    Args:
        ranks: this process.
        experts: routed experts of the layer.
        dispatch: tokens travel to their experts; needs whole experts (`moe_tp` 1). None: where that moves fewer bytes
            than adding up the results of all ranks, which is when a token meets fewer experts than there are ranks.
        per_token: experts of a token.

    Attributes:
        load: tokens of this replica that each expert was given, int64 `[experts]`; padding of graphs counts.
    """

    def __init__(self, ranks: Ranks, experts: int, per_token: int, dispatch: bool | None = None) -> None:
        owned = ranks.mesh.rank_experts(experts)
        holders = [[rank for rank, mine in enumerate(owned) if expert in mine] for expert in range(experts)]
        most = max(map(len, holders))
        self.ranks, self.load = ranks, torch.zeros(experts, dtype=torch.long)
        self._holders = torch.tensor([(row * most)[:most] for row in holders])
        self._count = torch.tensor([len(row) for row in holders])
        self._local = torch.full((len(owned), experts), -1)
        for rank, mine in enumerate(owned):
            self._local[rank, list(mine)] = torch.arange(len(mine))
        self.dispatch = ranks.mesh.moe_tp == 1 and (ranks.mesh.ep > per_token if dispatch is None else dispatch)

    def to(self, device: torch.device) -> Placement:
        for name in ("load", "_holders", "_count", "_local"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def run(self, module: Any, x_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
        """As `experts_forward`, with the experts of all ranks; every rank of the stage must call it."""
        self.load.scatter_add_(0, expert_Tk.reshape(-1), torch.ones_like(expert_Tk.reshape(-1)))
        if self.ranks.stage.size == 1:
            return _combined(module, x_TH, expert_Tk, weight_Tk)
        return (self._dispatched if self.dispatch else self._added)(module, x_TH, expert_Tk, weight_Tk)

    def _owner(self, expert_Tk: Tensor) -> Tensor:
        """ep rank that computes each place."""
        token_T1 = torch.arange(len(expert_Tk), device=expert_Tk.device).unsqueeze(1)
        return self._holders[expert_Tk, token_T1 % self._count[expert_Tk]]

    def _added(self, module: Any, x_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
        """All ranks of the stage see the tokens of all replicas, compute what they hold, and add the results."""
        dp, stage, mine = self.ranks.dp, self.ranks.stage, self.ranks.ep.index
        tokens, counts = len(x_TH), [len(x_TH)]
        if dp.size > 1:
            counts = dp.gather(torch.tensor([tokens], device=x_TH.device), 0).tolist()
            x_TH, expert_Tk, weight_Tk = (_gathered(dp, x, counts) for x in (x_TH, expert_Tk, weight_Tk))
        local_Tk = self._local[mine, expert_Tk].where(self._owner(expert_Tk) == mine, -1)
        out_TH = stage.sum_of(lambda rows: _combined(module, x_TH[rows], local_Tk[rows], weight_Tk[rows]), len(x_TH))
        start = sum(counts[: dp.index])
        return out_TH[start : start + tokens]

    def _dispatched(self, module: Any, x_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
        """Each tp rank takes its part of the replica's tokens and sends them to their experts' ranks and back."""
        tp, ep, (tokens, k) = self.ranks.tp, self.ranks.ep, expert_Tk.shape
        counts = [(tokens + tp.size - 1 - index) // tp.size for index in range(tp.size)]
        part = slice(sum(counts[: tp.index]), sum(counts[: tp.index + 1]))
        x_TH, expert_Tk, weight_Tk = x_TH[part], expert_Tk[part], weight_Tk[part]
        owner_S = self._owner(expert_Tk).reshape(-1)
        order_S = owner_S.argsort(stable=True)
        sent_E = owner_S.bincount(minlength=ep.size)
        ones = [1] * ep.size
        sent, received = sent_E.tolist(), ep.exchange(sent_E, ones, ones).tolist()
        local_S = ep.exchange(self._local[owner_S, expert_Tk.reshape(-1)][order_S], sent, received)
        result_SH = _results(module, ep.exchange(x_TH[order_S // k], sent, received), local_S, None)
        out_SH = x_TH.new_empty((len(order_S), x_TH.shape[1]))
        out_SH[order_S] = ep.exchange(result_SH, received, sent)
        return _gathered(tp, _weighted(out_SH, weight_Tk).to(x_TH.dtype), counts)


def _gathered(team: Any, x: Tensor, counts: list[int]) -> Tensor:
    """Rows of all members one after the other; member i has `counts[i]`."""
    most = max(counts)
    padded = functional.pad(x, (0, 0, 0, most - len(x)))
    rows = team.gather(padded.unsqueeze(0), 0)
    return torch.cat([part[:count] for part, count in zip(rows, counts, strict=True)])


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts of one layer.

    Args:
        self: transformers' experts module.
        hidden_states: `[T, H]`.
        top_k_index: `[T, k]`, experts of the whole layer.
        top_k_weights: `[T, k]`.

    Returns:
        `[T, H]`, the weighted sum over each token's experts.
    """
    placement: Placement | None = getattr(self, "placement", None)
    if placement is not None:
        return placement.run(self, hidden_states, top_k_index, top_k_weights)
    return _combined(self, hidden_states, top_k_index, top_k_weights)


def _combined(module: Any, x_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
    """The weighted sum over the experts that this rank holds; -1 is one that it does not."""
    placement, projections = getattr(module, "placement", None), (_entering(module), "down_proj")
    whole = placement is None or placement.ranks.stage.size == 1
    if whole and not any(isinstance(getattr(module, name), Int8Experts) for name in projections):
        return _transformers_forward(module, x_TH, expert_Tk, weight_Tk)
    if _on_card(module, x_TH.dtype):
        return _routed(module, x_TH, expert_Tk, weight_Tk)
    tokens, k = expert_Tk.shape
    token_S = torch.arange(tokens, device=x_TH.device).repeat_interleave(k)
    return _weighted(_results(module, x_TH, expert_Tk.reshape(-1), token_S), weight_Tk).to(x_TH.dtype)


def _on_card(module: Any, dtype: torch.dtype) -> bool:
    """Whether both projections run in the kernels for routed experts; in float32 a team adds int32 sums instead."""
    projections = [getattr(module, name) for name in (_entering(module), "down_proj")]
    int8 = all(isinstance(one, Int8Experts) and not one.adds_sums(dtype) for one in projections)
    return int8 and routed.serves(projections[0].family)


def _routed(module: Any, x_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
    """`_combined` without a word to the host, so that a graph can hold it; which experts ran is asked when traced."""

    def part(name: str) -> routed.Projection:
        one = getattr(module, name)
        met = [expert for expert, _ in places_of(expert_Tk.reshape(-1), len(one.names))] if one.account.tracing else []
        names = tuple(name for expert in met for name in one.names[expert])
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        counted = partial(one.account.int8_gemm, weights=names)
        return routed.Projection(one.weight, one.weight_scale, bias, one.group_size, counted)

    activate = (
        None if getattr(module, "fused_silu", False) else module._apply_gate if module.has_gate else module.act_fn
    )
    finish = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    family = module.down_proj.family
    parts = part(_entering(module)), part("down_proj")
    return routed.routed_experts(x_TH, expert_Tk, weight_Tk, *parts, family, activate, finish)


def _weighted(result_SH: Tensor, weight_Tk: Tensor) -> Tensor:
    return (result_SH.view(*weight_Tk.shape, result_SH.shape[-1]) * weight_Tk.unsqueeze(-1)).sum(dim=1)


def spread(module: Any, placement: Placement, device: torch.device) -> None:
    """Let an experts module compute what `placement` gives to this rank.

    Raises:
        UnsupportedDtype: see `require_exchangeable`; or a norm follows each expert, and ranks split the experts.
    """
    if placement.ranks.stage.size > 1:
        require_exchangeable(module)
    if placement.ranks.moe_tp.size > 1 and getattr(module, "has_post_expert_norm", False):
        raise UnsupportedDtype(
            f"{type(module).__name__} normalizes the output of each expert, which ranks that split it do not have",
            "convert with --ep equal to tp * dp, so that experts stay whole",
        )
    module.placement = placement.to(device)


def loads(model: nn.Module) -> dict[str, list[int]]:
    """Tokens that each expert was given so far, by the module's name."""
    placed = ((name, getattr(module, "placement", None)) for name, module in model.named_modules())
    return {name: placement.load.tolist() for name, placement in placed if placement is not None}


def _entering(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _results(module: Any, x_TH: Tensor, expert_S: Tensor, token_S: Tensor | None) -> Tensor:
    """`[S, H]`: each place's token through its expert."""
    inner = _project(module, _entering(module), x_TH, expert_S, token_S)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    result = _project(module, "down_proj", inner, expert_S, None)
    has_norm = getattr(module, "has_post_expert_norm", False)  # not in older versions of transformers
    return module.post_expert_norm(result) if has_norm else result


def _project(module: Any, name: str, x_TK: Tensor, expert_S: Tensor, token_S: Tensor | None) -> Tensor:
    projection = getattr(module, name)
    bias_EN = getattr(module, f"{name}_bias") if module.has_bias else None
    if isinstance(projection, Int8Experts):
        out = projection(x_TK, expert_S, token_S, bias_EN)
        assert isinstance(out, Tensor)
        return out
    x_SK = x_TK if token_S is None else x_TK[token_S]
    weight_ENK = projection.transpose(1, 2) if module.is_transposed else projection
    out = x_TK.new_zeros((len(expert_S), weight_ENK.shape[1]))
    for expert, rows in places_of(expert_S, len(weight_ENK)):
        bias = None if bias_EN is None else bias_EN[expert]
        out[rows] = functional.linear(x_SK[rows], weight_ENK[expert], bias)
    return out


def _transformers_forward(module: Any, *args: Tensor) -> Tensor:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    out = ALL_EXPERTS_FUNCTIONS[FLOAT_IMPLEMENTATION](module, *args)
    assert isinstance(out, Tensor)
    return out
