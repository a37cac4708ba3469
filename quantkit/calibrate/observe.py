"""Who sees what enters every GEMM of one decoder layer, and whether anything was missed.

`nn.Linear` modules are seen by forward pre-hooks, experts with 3-D parameters through `quantkit.calibrate.experts`.
GEMMs that read the same tensor (q, k and v; gate and up; all of a router's neighbours) are measured once and share
the statistics; that it is the same tensor is checked, not assumed from their roles.

`activations.safetensors` holds, for every input, the fields of `InputStats` as `INPUT.FIELD`. INPUT is
`layers.3.attn.in`, or `layers.3.mlp.in.experts` and `layers.3.expert.down_in.experts` for routed experts, whose
statistics have one row per expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quantkit.archs import Architecture, Dims, Key
from quantkit.archs.modeling import parameter_key
from quantkit.calibrate.data import Batch
from quantkit.calibrate.experts import OBSERVER, Routing
from quantkit.calibrate.statistics import InputStats, TokenStats, channel_absmax, token_stats
from quantkit.calibrate.weights import gemm_keys
from quantkit.errors import InputError


class LayerObserver:
    """Statistics of one layer.

    Args:
        arch, dims: of the model.
        layer: index.
        prefix: of the layer's parameter names, `model.layers.3`.
        kinds: number of kinds of text.
        device: where activations are.

    Attributes:
        inputs: INPUT -> statistics.
        input_of: GEMM -> INPUT.
        rows: GEMM -> rows that entered it.
        routed: int64 `[E]`, rows that the router sent to each fused expert, counted before the experts run.
    """

    def __init__(
        self, arch: Architecture, dims: Dims, layer: int, prefix: str, *, kinds: int, device: torch.device
    ) -> None:
        self._arch, self._dims, self._layer, self._prefix = arch, dims, layer, prefix
        self._kinds, self._device = kinds, device
        self.inputs: dict[str, InputStats] = {}
        self.input_of: dict[Key, str] = {}
        self.rows: Counter[Key] = Counter()
        self.routed: NDArray[np.int64] = np.zeros(dims.experts, np.int64)
        self._batch: Batch | None = None
        self._current: dict[tuple[str, int], tuple[Tensor, TokenStats]] = {}
        self._expert_absmax: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._keys: dict[tuple[int, str], list[Key]] = {}

    @contextmanager
    def attached(self, layer: nn.Module) -> Iterator[LayerObserver]:
        """Observe `layer` inside the block."""
        handles = []
        fused = []
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                handles += self._attach_linear(name, module)
            elif _is_fused_experts(module):
                self._names[id(module)] = name
                setattr(module, OBSERVER, self)
                fused.append(module)
                handles.append(module.register_forward_pre_hook(self._count_routed, with_kwargs=True))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()
            for module in fused:
                delattr(module, OBSERVER)

    def begin(self, batch: Batch) -> None:
        """The next forward runs `batch`."""
        self._batch = batch
        self._current.clear()  # holds the inputs alive until here, so that equal addresses mean equal tensors

    # ------------------------------------------------------------------------------------------- linear modules

    def _attach_linear(self, name: str, module: nn.Module) -> list[Any]:
        key = parameter_key(self._arch, f"{self._prefix}.{name}.weight")
        keys = gemm_keys(self._arch, self._dims, key)
        if not keys:
            return []

        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self._linear(name, key, keys, args[0])

        return [module.register_forward_pre_hook(hook)]

    def _linear(self, name: str, key: Key, keys: list[Key], x: Tensor) -> None:
        x_TK = x.reshape(-1, x.shape[-1])
        found = self.input_of.get(keys[0]) or self._choose_input(key, x_TK)
        for each in keys:
            self.input_of[each] = found
            self.rows[each] += x_TK.shape[0]
        row = key.expert or 0
        if x_TK.shape[0] and not self._same(found, row, x_TK):
            self._add(found, row, x_TK, name, experts=1 if key.expert is None else self._dims.experts)

    def _choose_input(self, key: Key, x_TK: Tensor) -> str:
        """INPUT of a module that is seen for the first time: its role's, unless another tensor has that name."""
        role = self._arch.role(key.role)
        name = self._input_name(role.input or role.name, per_expert=key.expert is not None)
        taken = (name, key.expert or 0) in self._current and not self._same(name, key.expert or 0, x_TK)
        return f"{name}.{key.role}" if taken else name

    def _input_name(self, name: str, *, per_expert: bool) -> str:
        return f"layers.{self._layer}.{name}" + (".experts" if per_expert else "")

    def _add(self, name: str, row: int, x_TK: Tensor, module: str, experts: int = 1) -> TokenStats:
        """Measure rows that belong to one row of the statistics `name`."""
        assert self._batch is not None
        stats = self._measure(x_TK, module)
        self._current[name, row] = (x_TK, stats)
        absmax_EK = torch.zeros(experts, x_TK.shape[-1], device=self._device)
        absmax_EK[row] = channel_absmax(x_TK)
        self._stats(name, absmax_EK).add(absmax_EK, self._batch.kind, stats, np.full(x_TK.shape[0], row))
        return stats

    def _stats(self, name: str, like_EK: Tensor) -> InputStats:
        if name not in self.inputs:
            self.inputs[name] = InputStats.empty(like_EK.shape[0], like_EK.shape[1], self._kinds, self._device)
        return self.inputs[name]

    def _same(self, name: str, expert: int, x_TK: Tensor) -> bool:
        """Whether `x_TK` is the tensor that was measured under this name in this batch."""
        known = self._current.get((name, expert))
        return (
            known is not None
            and known[0].data_ptr() == x_TK.data_ptr()
            and known[0].shape == x_TK.shape
            and known[0].stride() == x_TK.stride()
        )

    def _measure(self, x: Tensor, module: str, token: Tensor | None = None) -> TokenStats:
        """Row statistics; `token` maps rows to tokens of the batch where they are not the same."""
        stats = token_stats(x)
        infinite = np.flatnonzero(~np.isfinite(stats.absmax))
        if len(infinite):
            self._refuse(module, int(infinite[0] if token is None else token[infinite[0]]))
        return stats

    def _refuse(self, module: str, token: int) -> None:
        assert self._batch is not None
        raise InputError(
            f"the input of {self._prefix}.{module} is not finite on {self._batch.describe(token)}",
            "leave that sample out, or check the weights of the layers before it with `quantkit inspect`",
        )

    # -------------------------------------------------------------------------------------------- fused experts

    def _count_routed(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rows that the router sends to each expert, counted apart from what the experts function reports."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        index = next(value for value in tensors if not value.is_floating_point())
        experts = self._dims.experts
        self.routed += np.bincount(index.reshape(-1).cpu().numpy(), minlength=experts)[:experts]

    def expert_rows(self, module: Any, expert: int, projection: str, x_SK: Tensor) -> None:
        """See `experts.ExpertsObserver`."""
        if projection not in self._expert_absmax:
            self._expert_absmax[projection] = torch.zeros(self._dims.experts, x_SK.shape[-1], device=self._device)
        self._expert_absmax[projection][expert] = channel_absmax(x_SK)
        for key in self._projection_keys(module, projection):
            self.rows[key._replace(expert=expert)] += x_SK.shape[0]

    def expert_inputs(self, module: Any, projection: str, x: Tensor, routing: Routing) -> None:
        """See `experts.ExpertsObserver`."""
        assert self._batch is not None
        keys = self._projection_keys(module, projection)
        role = self._arch.role(keys[0].role)
        if projection == "in":
            stats = self._shared_stats(role.input, x, self._names[id(module)]).take(routing.token.cpu().numpy())
        else:
            stats = self._measure(x, f"{self._names[id(module)]}.{projection}_proj", routing.token)
        name = self._input_name(role.input, per_expert=True)
        for key in keys:
            self.input_of.update({key._replace(expert=expert): name for expert in range(self._dims.experts)})
        absmax_EK = self._expert_absmax.pop(projection)
        self._stats(name, absmax_EK).add(absmax_EK, self._batch.kind, stats, routing.expert.cpu().numpy())

    def _shared_stats(self, input_name: str, x_TK: Tensor, module: str) -> TokenStats:
        """Statistics of the tensor that all experts read; measured here unless a neighbour already did."""
        name = self._input_name(input_name, per_expert=False)
        if self._same(name, 0, x_TK):
            return self._current[name, 0][1]
        if (name, 0) in self._current:
            name = f"{name}.experts_all"
        return self._add(name, 0, x_TK, module)

    def _projection_keys(self, module: Any, projection: str) -> list[Key]:
        """Keys of a projection's GEMMs, expert None; a gated projection has two."""
        if (id(module), projection) not in self._keys:
            leaf = "down_proj" if projection == "down" else "gate_up_proj" if module.has_gate else "up_proj"
            key = parameter_key(self._arch, f"{self._prefix}.{self._names[id(module)]}.{leaf}")
            parts = self._arch.role(key.role).parts or (key.role,)
            self._keys[id(module), projection] = [key._replace(role=part) for part in parts]
        return self._keys[id(module), projection]


def _is_fused_experts(module: nn.Module) -> bool:
    """Whether transformers' `use_experts_implementation` made this module."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))


def missing_gemms(expected: Sequence[Key], observer: LayerObserver, experts_per_token: int) -> list[Key]:
    """GEMMs of a layer that were not observed.

    A routed expert without rows counts as observed only when the router demonstrably chose others: its layer's experts
    ran, and its rows are those that the router sent.
    """
    tokens = max((observer.rows[key] for key in expected if key.expert is None), default=0)
    by_role: Counter[str] = Counter()
    for key in expected:
        by_role[key.role] += observer.rows[key] if key.expert is not None else 0

    def seen(key: Key) -> bool:
        rows = observer.rows[key]
        if key.expert is None:
            return rows > 0
        if observer.routed.any():
            return bool(rows == observer.routed[key.expert])
        return rows > 0 or 0 < tokens * experts_per_token <= by_role[key.role]

    return [key for key in expected if not seen(key)]
