"""What one batch shows of the inputs of one decoder layer's GEMMs.

GEMMs that read the same tensor (q, k and v; gate and up; all of a router's neighbours) are measured once and share
the statistics; that it is the same tensor is checked, not assumed from their roles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantkit.archs import Architecture, Dims, Key
from quantkit.calibrate.data import Batch
from quantkit.calibrate.experts import Routing
from quantkit.calibrate.statistics import BatchStats, TokenStats, channel_absmax, input_stats
from quantkit.errors import InputError


@dataclass(frozen=True)
class Layer:
    """Which layer of which model is measured.

    Attributes:
        arch, dims: of the model.
        index: of the layer.
        prefix: of its parameter names, `model.layers.3`.
        kinds: number of kinds of text.
        device: where activations are.
        sample_rows: rows of each batch that are kept of what enters the experts, for those that starve.
    """

    arch: Architecture
    dims: Dims
    index: int
    prefix: str
    kinds: int
    device: torch.device
    sample_rows: int = 0


class BatchMeasurement:
    """Statistics of one layer on one batch.

    Attributes:
        kind: of text, by its index.
        inputs: INPUT -> statistics.
        input_of: GEMM -> INPUT.
        rows: GEMM -> rows that entered it.
        routed: int64 `[E]`, rows that the router sent to each fused expert, counted before the experts run.
        entered: experts module -> some rows `[S, H]` that entered it.
    """

    def __init__(self, layer: Layer, batch: Batch) -> None:
        self._layer, self._batch = layer, batch
        self.kind = batch.kind
        self.inputs: dict[str, BatchStats] = {}
        self.input_of: dict[Key, str] = {}
        self.rows: Counter[Key] = Counter()
        self.routed: NDArray[np.int64] = np.zeros(layer.dims.experts, np.int64)
        self.entered: dict[str, Tensor] = {}
        # holds the inputs alive until the batch is done, so that equal addresses mean equal tensors
        self._current: dict[tuple[str, int], tuple[Tensor, TokenStats]] = {}
        self._expert_absmax: dict[str, Tensor] = {}

    def done(self) -> None:
        """The batch has left the layer: let its activations go."""
        self._current.clear()

    def linear(self, name: str, key: Key, keys: Sequence[Key], x: Tensor) -> None:
        """What enters the linear module `name`, which computes the GEMMs `keys`."""
        x_TK = x.reshape(-1, x.shape[-1])
        found = self.input_of.get(keys[0]) or self._choose_input(key, x_TK)
        for each in keys:
            self.input_of[each] = found
            self.rows[each] += x_TK.shape[0]
        row = key.expert or 0
        if x_TK.shape[0] and not self._same(found, row, x_TK):
            self._add(found, row, x_TK, name, experts=1 if key.expert is None else self._layer.dims.experts)

    def _choose_input(self, key: Key, x_TK: Tensor) -> str:
        """INPUT of a module that is seen for the first time: its role's, unless another tensor has that name."""
        role = self._layer.arch.role(key.role)
        name = self._input_name(role.input or role.name, per_expert=key.expert is not None)
        taken = (name, key.expert or 0) in self._current and not self._same(name, key.expert or 0, x_TK)
        return f"{name}.{key.role}" if taken else name

    def _input_name(self, name: str, *, per_expert: bool) -> str:
        return f"layers.{self._layer.index}.{name}" + (".experts" if per_expert else "")

    def _add(self, name: str, row: int, x_TK: Tensor, module: str, experts: int = 1) -> TokenStats:
        """Measure rows that belong to one row of the statistics `name`."""
        stats, absmax_K = self._measure(x_TK, module)
        self._current[name, row] = (x_TK, stats)
        if experts == 1:
            self._put(name, BatchStats.of(absmax_K.unsqueeze(0), stats))
            return stats
        if name not in self.inputs:
            none_EK, no_rows = absmax_K.new_zeros(experts, len(absmax_K)), stats.take(np.zeros(0, np.int64))
            self.inputs[name] = BatchStats.of(none_EK, no_rows)
        self.inputs[name].add_rows(row, absmax_K, stats)
        return stats

    def _put(self, name: str, stats: BatchStats) -> None:
        if name in self.inputs:
            self.inputs[name].merge(stats)
        else:
            self.inputs[name] = stats

    def _same(self, name: str, expert: int, x_TK: Tensor) -> bool:
        """Whether `x_TK` is the tensor that was measured under this name in this batch."""
        known = self._current.get((name, expert))
        return (
            known is not None
            and known[0].data_ptr() == x_TK.data_ptr()
            and known[0].shape == x_TK.shape
            and known[0].stride() == x_TK.stride()
        )

    def _measure(self, x: Tensor, module: str, token: Tensor | None = None) -> tuple[TokenStats, Tensor]:
        """See `input_stats`; `token` maps rows to tokens of the batch where they are not the same."""
        stats, absmax_K = input_stats(x)
        infinite = np.flatnonzero(~np.isfinite(stats.absmax))
        if len(infinite):
            self._refuse(module, int(infinite[0] if token is None else token[infinite[0]]))
        return stats, absmax_K

    def _refuse(self, module: str, token: int) -> None:
        raise InputError(
            f"the input of {self._layer.prefix}.{module} is not finite on {self._batch.describe(token)}",
            "leave that sample out, or check the weights of the layers before it with `quantkit inspect`",
        )

    # -------------------------------------------------------------------------------------------- fused experts

    def count_routed(self, index: Tensor) -> None:
        """Experts that the router chose, any shape, int64."""
        experts = self._layer.dims.experts
        self.routed += np.bincount(index.reshape(-1).cpu().numpy(), minlength=experts)[:experts]

    def expert_rows(self, keys: Sequence[Key], expert: int, projection: str, x_SK: Tensor) -> None:
        """Rows that enter one expert's GEMMs `keys` of a projection ("in" or "down")."""
        if projection not in self._expert_absmax:
            shape = (self._layer.dims.experts, x_SK.shape[-1])
            self._expert_absmax[projection] = torch.zeros(shape, device=self._layer.device)
        self._expert_absmax[projection][expert] = channel_absmax(x_SK)
        for key in keys:
            self.rows[key._replace(expert=expert)] += x_SK.shape[0]

    def expert_inputs(self, keys: Sequence[Key], name: str, projection: str, x: Tensor, routing: Routing) -> None:
        """All rows of a projection of the experts module `name`; see `experts.ExpertsObserver`."""
        role = self._layer.arch.role(keys[0].role)
        if projection == "in":
            stats = self._shared_stats(role.input, x, name).take(routing.token.cpu().numpy())
            self._keep_rows(name, x)
        else:
            stats, _ = self._measure(x, f"{name}.{projection}_proj", routing.token)
        found = self._input_name(role.input, per_expert=True)
        for key in keys:
            self.input_of.update({key._replace(expert=expert): found for expert in range(self._layer.dims.experts)})
        absmax_EK = self._expert_absmax.pop(projection)
        self._put(found, BatchStats.of(absmax_EK, stats, routing.expert.cpu().numpy()))

    def _keep_rows(self, name: str, x_TH: Tensor) -> None:
        """Evenly spaced rows."""
        count = min(self._layer.sample_rows, len(x_TH))
        if count:
            where = torch.linspace(0, len(x_TH) - 1, count, device=x_TH.device).round().long()
            self.entered[name] = x_TH[where]

    def _shared_stats(self, input_name: str, x_TK: Tensor, module: str) -> TokenStats:
        """Statistics of the tensor that all experts read; measured here unless a neighbour already did."""
        name = self._input_name(input_name, per_expert=False)
        if self._same(name, 0, x_TK):
            return self._current[name, 0][1]
        if (name, 0) in self._current:
            name = f"{name}.experts_all"
        return self._add(name, 0, x_TK, module)
