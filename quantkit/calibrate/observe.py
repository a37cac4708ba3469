"""Who sees what enters every GEMM of one decoder layer, and whether anything was missed.

`nn.Linear` modules are seen by forward pre-hooks, experts with 3-D parameters through `quantkit.calibrate.experts`.
Each batch is measured on its own, by the thread that runs it (`measure.py`); `merge` adds up batches in their order.

`activations.safetensors` holds, for every input, the fields of `InputStats` as `INPUT.FIELD`. INPUT is
`layers.3.attn.in`, or `layers.3.mlp.in.experts` and `layers.3.expert.down_in.experts` for routed experts, whose
statistics have one row per expert.
"""

from __future__ import annotations

import threading
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
from quantkit.calibrate.experts import OBSERVER, Routing, activated, is_fused_experts, projection_weight
from quantkit.calibrate.measure import BatchMeasurement, Layer
from quantkit.calibrate.rows import BatchRows
from quantkit.calibrate.statistics import InputStats, input_stats
from quantkit.calibrate.weights import gemm_keys
from quantkit.errors import QuantkitError


class _Current(threading.local):
    """The batch that this thread runs."""

    batch: BatchMeasurement | BatchRows


class LayerObserver:
    """Statistics of one layer.

    Args:
        arch, dims: of the model.
        layer: index.
        prefix: of the layer's parameter names, `model.layers.3`.
        kinds: number of kinds of text.
        device: where activations are.
        sample_rows: of each batch, see `Layer`.

    Attributes:
        inputs, input_of, rows, routed: those of `BatchMeasurement` over all merged batches.
        entered: experts module -> the batches' rows.
    """

    def __init__(
        self,
        arch: Architecture,
        dims: Dims,
        layer: int,
        prefix: str,
        *,
        kinds: int,
        device: torch.device,
        sample_rows: int = 0,
    ) -> None:
        self._layer = Layer(arch, dims, layer, prefix, kinds, device, sample_rows)
        self.inputs: dict[str, InputStats] = {}
        self.input_of: dict[Key, str] = {}
        self.rows: Counter[Key] = Counter()
        self.routed: NDArray[np.int64] = np.zeros(dims.experts, np.int64)
        self.entered: dict[str, list[Tensor]] = {}
        self._current = _Current()
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
            elif is_fused_experts(module):
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

    @contextmanager
    def measuring(self, batch: Batch) -> Iterator[BatchMeasurement]:
        """What this thread runs through the layer inside the block is `batch`; `merge` the result."""
        self._current.batch = found = BatchMeasurement(self._layer, batch)
        try:
            yield found
        finally:
            found.done()

    @contextmanager
    def collecting(self, rows: BatchRows) -> Iterator[None]:
        """What this thread runs through the layer inside the block goes to `rows`; there is nothing to merge."""
        self._current.batch = rows
        try:
            yield
        finally:
            rows.done()

    def merge(self, batch: BatchMeasurement) -> None:
        """Add the next batch; sums are added in the order of these calls."""
        for key, name in batch.input_of.items():
            if self.input_of.setdefault(key, name) != name:
                raise QuantkitError(
                    f"the input of {key.shard_name} is {name} for one batch and {self.input_of[key]} for another: "
                    "modules that share an input do not share it always",
                    "report this model",
                )
        for name, stats in batch.inputs.items():
            if name not in self.inputs:
                experts, k = stats.absmax.shape
                self.inputs[name] = InputStats.empty(experts, k, self._layer.kinds, self._layer.device)
            self.inputs[name].add(stats, batch.kind)
        self.rows.update(batch.rows)
        self.routed += batch.routed
        for name, rows in batch.entered.items():
            self.entered.setdefault(name, []).append(rows)

    def feed_starving(self, layer: nn.Module, min_tokens: int) -> None:
        """Send the kept rows through experts that saw fewer than `min_tokens`: for statistics, after all batches."""
        for name, rows in self.entered.items():
            module, x_SH = layer.get_submodule(name), torch.cat(rows)
            for expert in np.flatnonzero(self.routed < min_tokens).tolist():
                for projection, x in (("in", x_SH), ("down", activated(module, expert, x_SH))):
                    key = self._projection_keys(module, projection)[0]._replace(expert=expert)
                    tokens, absmax_K = input_stats(x)
                    self.inputs[self.input_of[key]].add_rows(expert, absmax_K, tokens)

    def _attach_linear(self, name: str, module: nn.Module) -> list[Any]:
        key = parameter_key(self._layer.arch, f"{self._layer.prefix}.{name}.weight")
        keys = gemm_keys(self._layer.arch, self._layer.dims, key)
        if not keys:
            return []

        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            self._current.batch.linear(name, key, keys, args[0])

        return [module.register_forward_pre_hook(hook)]

    # -------------------------------------------------------------------------------------------- fused experts

    def _count_routed(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rows that the router sends to each expert, counted apart from what the experts function reports."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._current.batch.count_routed(next(value for value in tensors if not value.is_floating_point()))

    def expert_rows(self, module: Any, expert: int, projection: str, x_SK: Tensor) -> None:
        """See `experts.ExpertsObserver`."""
        self._current.batch.expert_rows(self._projection_keys(module, projection), expert, projection, x_SK)

    def expert_inputs(self, module: Any, projection: str, x: Tensor, routing: Routing) -> None:
        """See `experts.ExpertsObserver`."""
        keys = self._projection_keys(module, projection)
        self._current.batch.expert_inputs(keys, self._names[id(module)], projection, x, routing)

    def _projection_keys(self, module: Any, projection: str) -> list[Key]:
        """Keys of a projection's GEMMs, expert None; a gated projection has two."""
        if (id(module), projection) not in self._keys:
            name = f"{self._names[id(module)]}.{projection_weight(module, projection)}"
            key = parameter_key(self._layer.arch, f"{self._layer.prefix}.{name}")
            parts = self._layer.arch.role(key.role).parts or (key.role,)
            self._keys[id(module), projection] = [key._replace(role=part) for part in parts]
        return self._keys[id(module), projection]


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
