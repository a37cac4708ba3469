"""What happens inside one decoder layer, seen through hooks: operators, chosen experts, each expert alone.

The same hooks sit in the source's layers when a baseline is made and in a candidate's when it is compared, on the
modules of transformers' own model, so that operators have the same names and come in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.archs import Architecture
from quantkit.compare.fingerprint import of_rows
from quantkit.spec.baseline import Sequence

EXPERT_ROWS = 8
"""Rows that every expert is run on by itself, whether the router chose it or not."""


@dataclass
class Record:
    """What is kept of one sequence in one layer.

    Attributes:
        tokens: of the sequence.
        positions: whose operators are kept, None for no operators.
        events: `NNN.MODULE.in` and `.out` -> fingerprints `[S, WIDTH]`, in the order in which they happened.
        routing: int64 `[tokens, k]`, ascending.
        router: logits `[tokens, E]`.
        experts_input: rows that entered the experts.
        output: hidden states that the layer returned at `positions`, where a caller keeps them.
    """

    tokens: int
    positions: Tensor | None = None
    events: dict[str, Tensor] = field(default_factory=dict)
    routing: Tensor | None = None
    router: Tensor | None = None
    experts_input: Tensor | None = None
    output: Tensor | None = None

    @classmethod
    def of(cls, sequence: Sequence) -> Record:
        """An empty one, for the sampled positions of a sequence."""
        return cls(len(sequence.ids), torch.tensor(sequence.sampled) if sequence.sampled else None)

    def add(self, name: str, value: Any) -> None:
        rows = None if self.positions is None else per_token(value, self.tokens)
        if rows is not None:
            assert self.positions is not None
            chosen = rows[self.positions.to(rows.device)]
            self.events[f"{len(self.events):03d}.{name}"] = of_rows(chosen).cpu()


class _Current(threading.local):
    record: Record | None = None


class LayerTaps:
    """Hooks on the modules of one decoder layer; each thread has its own record.

    Args:
        arch: record of the family.
        prefix: of the layer's parameter names.
        layer: the module.
    """

    def __init__(self, arch: Architecture, prefix: str, layer: nn.Module) -> None:
        self._layer = layer
        self.experts = next((name for name, module in layer.named_modules() if _runs_experts(name, module)), "")
        self._router = _router(arch, prefix, layer)
        self._current = _Current()

    @property
    def experts_module(self) -> Any:
        """The module of routed experts, None without."""
        return self._layer.get_submodule(self.experts) if self.experts else None

    @contextmanager
    def attached(self) -> Iterator[LayerTaps]:
        handles = []
        for name, module in self._layer.named_modules():
            inside = bool(self.experts) and name.startswith(f"{self.experts}.")
            if not name or inside:
                continue
            if name == self.experts:
                handles.append(module.register_forward_pre_hook(self._enter_experts, with_kwargs=True))
            leaf = name == self.experts or not any(True for _ in module.children())
            if leaf:
                handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(name)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def recording(self, record: Record) -> Iterator[Record]:
        """What this thread runs inside the block goes to `record`."""
        self._current.record = record
        try:
            yield record
        finally:
            self._current.record = None

    def _before(self, name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._current.record is not None:
                self._current.record.add(f"{name}.in", args or tuple(kwargs.values()))

        return hook

    def _after(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            record = self._current.record
            if record is None:
                return
            record.add(f"{name}.out", output)
            if name == self._router:
                record.router = per_token(output, record.tokens)

        return hook

    def _enter_experts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record = self._current.record
        if record is None:
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        index = next(value for value in tensors if not value.is_floating_point())
        record.routing = index.sort(dim=-1).values.cpu()
        if record.positions is not None:
            record.experts_input = tensors[0].detach()


def per_token(value: Any, tokens: int) -> Tensor | None:
    """The first tensor of `value` that has a row for each token of a batch of one, as `[tokens, ...]` flattened."""
    values = value if isinstance(value, tuple | list) else (value,)
    for tensor in values:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim < 2:
            continue
        if tensor.shape[0] == tokens:
            return tensor.reshape(tokens, -1)
        if tensor.shape[0] == 1 and tensor.shape[1] == tokens:
            return tensor[0].reshape(tokens, -1)
        if tensor.ndim == 4 and tensor.shape[0] == 1 and tensor.shape[2] == tokens:  # heads before tokens
            return tensor[0].transpose(0, 1).reshape(tokens, -1)
    return None


def run_each_expert(module: Any, x_RH: Tensor) -> Tensor:
    """Output fingerprints `[E, R, WIDTH]` of every expert alone on the same rows `[R, H]`."""
    experts, rows = int(module.num_experts), len(x_RH)
    index = torch.arange(experts, device=x_RH.device).repeat_interleave(rows)[:, None]
    out = module(x_RH.repeat(experts, 1), index, x_RH.new_ones(len(index), 1))
    return of_rows(out).cpu().reshape(experts, rows, -1)


def spread(count: int, wanted: int) -> Tensor:
    """At most `wanted` indices below `count`, evenly spread, first and last among them."""
    places = torch.linspace(0, count - 1, min(count, wanted)).round().long().tolist()
    return torch.tensor(sorted(set(places)), dtype=torch.int64)


def _runs_experts(name: str, module: nn.Module) -> bool:
    return name.rpartition(".")[2] == "experts" and hasattr(module, "num_experts")


def _router(arch: Architecture, prefix: str, layer: nn.Module) -> str:
    """Name of the module that holds the router's weight, "" without experts."""
    for name, _ in layer.named_parameters():
        key = arch.parse(f"{prefix}.{name}")
        if key is not None and key.role == "router" and key.part == "weight":
            return name.rpartition(".")[0]
    return ""
